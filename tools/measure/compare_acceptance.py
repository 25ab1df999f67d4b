#!/usr/bin/env python3
"""Compares acceptance rules above temperature 0 in one run: accepted length, speed-up and text.

usage: python -m tools.measure.compare_acceptance --prompts FILE.jsonl [--limit 60]
       [--max-new-tokens 128] [--bundle DIR] [--drafter NAME] [--temperature T …] [--epsilon E …]
       [--rejection] [--no-profile] [--threads N] [--json OUT] [--figure OUT.svg]

Every prompt is decoded plainly, by target sampling (whose text is that of plain decoding, seed by
seed), by typical acceptance at each epsilon with delta = sqrt(epsilon), and on demand by rejection;
whose turn comes first rotates. Of prompts with several turns only the first is asked. The quality
axis of Medusa's figure 5 is here the mean
log-probability of a token under the target itself at temperature 1: typical acceptance writes
likelier, duller text than the target would.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundle
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import replacing, require_writable
from spec_runtime.machine import default_threads
from spec_runtime.measure import provenance, quality
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.sampling import SamplingOptions
from spec_runtime.stats import Stats

TEMPERATURES = (1.0, 0.7)
EPSILONS = (0.01, 0.03, 0.05, 0.09, 0.15, 0.25)
COLUMNS = ("temperature", "rule", "accepted length", "tokens/s", "speedup", "log p a token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--drafter")
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--rejection", action="store_true")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    for file in filter(None, (arguments.json, arguments.figure)):
        require_writable(file)
    folder = arguments.bundle or bundle.find()
    engine = spec_runtime.load(
        folder, arguments.drafter, arguments.threads, profile=not arguments.no_profile
    )
    prompts = read_prompts(arguments.prompts, arguments.limit)
    manifest = bundle.read(folder, verify=False).manifest
    figures: dict[str, Any] = {
        "provenance": provenance.collect(
            threads=arguments.threads,
            prompts_file=arguments.prompts,
            prompts=prompts,
            manifest=manifest,
        ),
        "bundle": manifest.name,
        "drafter": engine.drafter,
        "tuned": engine.is_tuned,
        "threads": arguments.threads or default_threads(),
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "rows": [],
    }
    for temperature in arguments.temperature:
        rules: dict[str, SamplingOptions] = {"target_sampling": {}}
        if arguments.rejection:
            rules["rejection"] = {"acceptance": "rejection"}
        for epsilon in arguments.epsilon:
            rules[f"typical {epsilon:g}"] = {"acceptance": "typical", "typical_epsilon": epsilon}
        figures["rows"] += compare(engine, prompts, temperature, arguments.max_new_tokens, rules)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in figures["rows"]:
        cells = (row[c] if isinstance(row[c], str) else f"{row[c]:.3g}" for c in COLUMNS)
        print("| " + " | ".join(cells) + " |")
    if arguments.json:
        write_figures(arguments.json, figures)
    if arguments.figure:
        draw(figures["rows"], arguments.figure)


def compare(
    engine: spec_runtime.Engine,
    prompts: list[BenchPrompt],
    temperature: float,
    max_new_tokens: int,
    rules: dict[str, SamplingOptions],
) -> list[dict[str, Any]]:
    """Returns a row for plain decoding and one for each rule."""
    plainly = engine.with_drafter("none")
    contenders = {"plain": (plainly, SamplingOptions())}
    contenders |= {name: (engine, options) for name, options in rules.items()}
    parts: dict[str, list[Stats]] = {name: [] for name in contenders}
    log_prob, count = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0)
    names = list(contenders)
    for i, prompt in enumerate(prompts):
        prompt_ids = engine.encode(prompt.content)
        first = i % len(names)
        for name in names[first:] + names[:first]:
            each, options = contenders[name]
            settings: SamplingOptions = {
                **options,
                "temperature": temperature,
                "seed": i,
                "max_new_tokens": max_new_tokens,
            }
            result = each.generate(prompt_ids, reuse=False, **settings)
            parts[name].append(result.stats)
            log_prob[name] += quality.log_prob(engine.target, prompt_ids, result.token_ids)
            count[name] += len(result.token_ids)
    totals = {name: Stats.total(stats) for name, stats in parts.items()}
    return [
        {
            "temperature": temperature,
            "rule": name,
            "accepted length": total.accepted_length,
            "tokens/s": total.tokens_per_second,
            # a ratio of speeds and not of times, since texts differ in length
            "speedup": total.tokens_per_second / totals["plain"].tokens_per_second,
            "log p a token": log_prob[name] / count[name],
            "steps": total.steps,
            "tokens": total.committed_tokens,
        }
        for name, total in totals.items()
    ]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws accepted length against log-probability, a line for each temperature, as in Medusa's
    figure 5."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        typical = [row for row in here if row["rule"].startswith("typical")]
        lines = axes.plot(
            [row["log p a token"] for row in typical],
            [row["accepted length"] for row in typical],
            marker="o",
            label=f"typical, T = {temperature:g}",
        )
        exact = next(row for row in here if row["rule"] == "target_sampling")
        axes.plot(
            [exact["log p a token"]],
            [exact["accepted length"]],
            marker="*",
            markersize=12,
            linestyle="none",
            color=lines[0].get_color(),
            label=f"target sampling, T = {temperature:g}",
        )
        for row in typical:
            where = (row["log p a token"], row["accepted length"])
            axes.annotate(row["rule"].removeprefix("typical "), where, fontsize=7)
    axes.set_xlabel("mean log-probability of a token under the target")
    axes.set_ylabel("accepted length")
    axes.legend()
    with replacing(file) as temporary:
        figure.savefig(temporary, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
