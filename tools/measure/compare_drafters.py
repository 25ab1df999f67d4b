"""Decodes with every drafter of a bundle, at several temperatures and with trees of several sizes.

The table of temperatures and the sweep of sizes are

    python -m tools.measure.compare_drafters --bundle DIR --prompts spec_bench.jsonl \\
        --temperature 0 0.7 1 --nodes 8 --json drafters-temperatures.json
    … --temperature 0 --nodes 4 8 16 32 64 --json drafters-nodes.json

Every drafter decodes all prompts of each subset, second turns included, and plain decoding does the
same beside them. They go without merged prompt lookup; with --lookup, a second time with it. Above
temperature 0 tokens are drawn by target sampling, which keeps the target's distribution. What is
decoded is kept in OUT with .parts.json in place of .json: the same command goes on where it was
stopped. Lookups draft what they find, at most a tree of the size; size 0 is the bundle's own trees.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.sampling import SamplingOptions
from tools.figures import asked, command_line, manifest_of, markdown, parse, run, write
from tools.measure.decoding import Ledger, Task, decode, sizes

LOOKUPS = ("prompt_lookup", "lookahead")
SAMPLING: SamplingOptions = {"seed": 0}  # plain decoding draws the same text with the same seed
COLUMNS = ("temperature", "size", "nodes", "accepted_length", "draft_ms", "verify_ms", "speedup")


def main(words: list[str] | None = None) -> None:
    """Decodes as the command line says; writes --json after each drafter and prints a table."""
    flags = ("--bundle", "--prompts", "--per-category", "--max-new-tokens", "--threads", "--json")
    parser = command_line(__doc__, *flags, required=("--json",), max_new_tokens=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=(0.0,))
    parser.add_argument("--nodes", type=int, nargs="+", default=(8,))
    parser.add_argument("--lookup", action="store_true", help="also with merged prompt lookup")
    parser.add_argument("--drafter", nargs="+", help="default: all of the bundle, and lookups")
    arguments = parse(parser, words)
    rows = compare(arguments)
    cells = [[row["drafter"], *(f"{row[column]:.3g}" for column in COLUMNS)] for row in rows]
    print(markdown(["drafter", *COLUMNS], cells))


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each drafter, temperature and size; writes them as it goes.

    Raises UserError for an unknown drafter, a bad temperature, more nodes than the bundle takes,
    and if the file of what was decoded has other settings.
    """
    folder = arguments.bundle or bundles.find()
    prompts = read_prompts(arguments.prompts, per_category=arguments.per_category)
    manifest = manifest_of(folder)
    plain = spec_runtime.load(folder, "none", arguments.threads, profile=False)
    task = Task(prompts, arguments.max_new_tokens, SAMPLING)
    settings = {**task.settings, "files": manifest.files, "threads": arguments.threads}
    ledger = Ledger(arguments.json.with_suffix(".parts.json"), settings)
    names = arguments.drafter or [*(info.name for info in manifest.drafters), *LOOKUPS]
    opened = [plain.with_drafter(each, lookup=None if each in LOOKUPS else False) for each in names]
    if arguments.lookup:
        opened += [plain.with_drafter(name, lookup=True) for name in names if name not in LOOKUPS]
    rows: dict[str, dict[str, Any]] = {}
    for temperature in arguments.temperature:
        engines = {}
        for engine in opened:
            for n, each in sizes(engine, arguments.nodes).items():
                label = f"{engine.drafter}, T = {temperature:g}, {n} nodes"
                engines[label] = each
                rows[label] = {"drafter": engine.drafter, "temperature": temperature, "size": n}
        sampling: SamplingOptions = {**SAMPLING, "temperature": temperature}
        decode(engines, replace(task, sampling=sampling), ledger)
        done = [{**about, **ledger.figures(label)} for label, about in rows.items()]
        figures = {"max_new_tokens": arguments.max_new_tokens, "rows": done}
        write(arguments.json, figures, **asked(arguments), prompts=prompts, manifest=manifest)
    return done


if __name__ == "__main__":
    run(main)
