"""Sweeps the budgets that a drafter may have, and says how near the tuned one is to the best.

    spec-runtime tune --bundle DIR
    python -m tools.measure.sweep_budgets --bundle DIR --prompts FILE.jsonl --json OUT

Contenders: plain decoding; the bundle's own trees; the tuned engine; grown trees of each size in
--nodes, whatever their probability; and trees of at most the largest size with nodes of at least
each --threshold. In every repeat each contender decodes every prompt (greedy; whose turn comes
first rotates). Each repeat so gives one speed-up over plain decoding, a ratio of tokens a second;
their median, least and greatest are printed, over all prompts and by category. Of prompts with
several turns only the first is asked. The last line compares the tuned engine with the best budget
of the sweep; the best of many is by chance a little too good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.machine import default_threads
from spec_runtime.loop.stats import Stats
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.trees.budget import Budget, Grown
from tools.figures import (
    asked,
    command_line,
    manifest_of,
    markdown,
    parse,
    run,
    spread,
    spread_text,
    write,
)

NODES = (2, 4, 6, 8, 12, 16)
THRESHOLDS = (0.03, 0.1, 0.2, 0.3)
PLAIN, OWN, TUNED = "plain", "bundle", "tuned"
ALL = "all"

Runs = dict[str, list[list[Stats]]]  # by contender, repeat and prompt


def main(words: list[str] | None = None) -> None:
    flags = ("--bundle", "--prompts", "--limit", "--max-new-tokens", "--threads", "--json")
    parser = command_line(__doc__, *flags, limit=12, max_new_tokens=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--threshold", type=float, nargs="*", default=THRESHOLDS)
    arguments = parse(parser, words)
    folder = arguments.bundle or bundles.find()
    engines = contenders(folder, arguments.threads, arguments.nodes, arguments.threshold)
    prompts = read_prompts(arguments.prompts, arguments.limit)
    runs = race(engines, prompts, arguments.repeats, arguments.max_new_tokens)
    found = summarise(runs, [prompt.category for prompt in prompts])
    medians = {name: each["speedup"][ALL]["median"] for name, each in found.items()}
    best = max(
        (name for name in medians if name not in (PLAIN, OWN, TUNED)), key=medians.__getitem__
    )
    figures = {
        "drafter": engines[OWN].drafter,
        "threads": arguments.threads or default_threads(),
        "prompts": len(prompts),
        "repeats": arguments.repeats,
        "max_new_tokens": arguments.max_new_tokens,
        "contenders": found,
        "best": best,
        "tuned_over_best": medians[TUNED] / medians[best],
    }
    groups = list(found[PLAIN]["speedup"])
    rows = [
        [
            name,
            f"{row['nodes']:.1f}",
            f"{row['accepted_length']:.2f}",
            *map(spread_text, row["speedup"].values()),
        ]
        for name, row in found.items()
    ]
    print(markdown(["budget", "nodes", "accepted length", *groups], rows))
    print(f"tuned / best of the sweep ({best}): {figures['tuned_over_best']:.3f}")
    about = {**asked(arguments), "prompts": prompts, "manifest": manifest_of(folder)}
    write(arguments.json, figures, **about)


def contenders(
    folder: Path, threads: int | None, nodes: Sequence[int], thresholds: Sequence[float]
) -> dict[str, spec_runtime.Engine]:
    """Returns the engines by name. The tuned one has a target of its own; the others share one."""
    own = spec_runtime.load(folder, threads=threads, profile=False)
    engines = {
        PLAIN: own.with_drafter("none"),
        OWN: own,
        TUNED: spec_runtime.load(folder, threads=threads, verify=False),
    }
    budgets = {f"{n} nodes": Budget(n) for n in nodes}
    budgets |= {f"p >= {p:g}": Budget(max(nodes, default=16), growth=Grown(p)) for p in thresholds}
    for name, budget in budgets.items():
        engines[name] = own.observed(lambda proposer: proposer, budget)
    return engines


def race(
    engines: Mapping[str, spec_runtime.Engine],
    prompts: Sequence[BenchPrompt],
    repeats: int,
    max_new_tokens: int,
) -> Runs:
    """Decodes every prompt with every engine in each repeat; whose turn comes first rotates."""
    names = list(engines)
    runs: Runs = {name: [] for name in names}
    turn = 0
    for _ in range(repeats):
        for name in names:
            runs[name].append([])
        for prompt in prompts:
            prompt_ids = engines[OWN].encode(prompt.content)
            if turn == 0:  # page in weights and buffers outside the timing
                for engine in engines.values():
                    engine.generate(prompt_ids, max_new_tokens=8, reuse=False)
            first, turn = turn % len(names), turn + 1
            for name in names[first:] + names[:first]:
                result = engines[name].generate(
                    prompt_ids, max_new_tokens=max_new_tokens, reuse=False
                )
                runs[name][-1].append(result.stats)
    return runs


def summarise(runs: Runs, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns for each contender {nodes, accepted_length, tokens_per_second, speedup}.

    ``speedup`` has {median, least, greatest} for all prompts and for each category; it is a ratio
    of tokens a second, since texts may differ in length.
    """
    groups = {ALL: list(range(len(categories)))}
    for i, category in enumerate(categories):
        groups.setdefault(category, []).append(i)

    def pace(repeat: list[Stats], group: list[int]) -> float:
        rate = Stats.total(repeat[i] for i in group).tokens_per_second
        return rate or 1.0  # nothing to decode, for anybody

    figures: dict[str, dict[str, Any]] = {}
    for name, repeats in runs.items():
        total = Stats.total(stats for repeat in repeats for stats in repeat)
        speedup = {}
        for group, members in groups.items():
            ratios = [
                pace(repeat, members) / pace(plain, members)
                for repeat, plain in zip(repeats, runs[PLAIN], strict=True)
            ]
            speedup[group] = spread(ratios)
        figures[name] = {
            "nodes": 1 + total.drafted_tokens / max(1, total.steps),
            "accepted_length": total.accepted_length,
            "tokens_per_second": total.tokens_per_second,
            "speedup": speedup,
        }
    # Plain decoding's own repeats over their median show how far the machine is from itself.
    for group, members in groups.items():
        own = spread([pace(repeat, members) for repeat in runs[PLAIN]])
        figures[PLAIN]["speedup"][group] = {key: each / own["median"] for key, each in own.items()}
    return figures


if __name__ == "__main__":
    run(main)
