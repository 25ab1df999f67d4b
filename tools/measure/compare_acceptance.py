"""Compares acceptance rules above temperature 0 in one run: accepted length, speed-up and text.

    python -m tools.measure.compare_acceptance --bundle DIR --prompts FILE.jsonl --json OUT

Every prompt is decoded plainly, by target sampling (whose text is that of plain decoding, seed by
seed), by typical acceptance at each epsilon with delta = sqrt(epsilon), and on demand by rejection;
whose turn comes first rotates. Of prompts with several turns only the first is asked. The quality
axis of Medusa's figure 5 is here the mean log-probability of a token under the target itself at
temperature 1: typical acceptance writes likelier, duller text than the target would.
"""

from __future__ import annotations

from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.machine import default_threads
from spec_runtime.loop.stats import Stats
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.sampling import SamplingOptions
from tools.figures import asked, command_line, manifest_of, markdown, parse, run, write
from tools.measure import quality

TEMPERATURES = (1.0, 0.7)
EPSILONS = (0.01, 0.03, 0.05, 0.09, 0.15, 0.25)
COLUMNS = ("accepted length", "tokens/s", "speedup", "log p a token")


def main(words: list[str] | None = None) -> None:
    flags = (
        *("--bundle", "--drafter", "--prompts", "--limit", "--max-new-tokens"),
        *("--no-profile", "--threads", "--json"),
    )
    parser = command_line(__doc__, *flags, limit=60)
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--rejection", action="store_true")
    arguments = parse(parser, words)
    folder = arguments.bundle or bundles.find()
    engine = spec_runtime.load(
        folder, arguments.drafter, arguments.threads, profile=not arguments.no_profile
    )
    prompts = read_prompts(arguments.prompts, arguments.limit)
    rules: dict[str, SamplingOptions] = {"target_sampling": {}}
    if arguments.rejection:
        rules["rejection"] = {"acceptance": "rejection"}
    for epsilon in arguments.epsilon:
        rules[f"typical {epsilon:g}"] = {"acceptance": "typical", "typical_epsilon": epsilon}
    rows = [
        row
        for temperature in arguments.temperature
        for row in compare(engine, prompts, temperature, arguments.max_new_tokens, rules)
    ]
    cells = [
        [f"{row['temperature']:g}", row["rule"], *(f"{row[column]:.3g}" for column in COLUMNS)]
        for row in rows
    ]
    print(markdown(["temperature", "rule", *COLUMNS], cells, left=2))
    figures = {
        "drafter": engine.drafter,
        "tuned": engine.is_tuned,
        "threads": arguments.threads or default_threads(),
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "rows": rows,
    }
    about = {**asked(arguments), "prompts": prompts, "manifest": manifest_of(folder)}
    write(arguments.json, figures, **about)


def compare(
    engine: spec_runtime.Engine,
    prompts: list[BenchPrompt],
    temperature: float,
    max_new_tokens: int,
    rules: dict[str, SamplingOptions],
) -> list[dict[str, Any]]:
    """Returns a row for plain decoding and one for each rule."""
    contenders = {"plain": (engine.with_drafter("none"), SamplingOptions())}
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
            # A ratio of speeds and not of times, since texts differ in length.
            "speedup": total.tokens_per_second / totals["plain"].tokens_per_second,
            "log p a token": log_prob[name] / count[name],
            "steps": total.steps,
            "tokens": total.committed_tokens,
        }
        for name, total in totals.items()
    ]


if __name__ == "__main__":
    run(main)
