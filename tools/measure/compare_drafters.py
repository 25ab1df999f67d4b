#!/usr/bin/env python3
"""Decodes with every drafter of a bundle, at several temperatures and with trees of several sizes.

    python -m tools.measure.compare_drafters --bundle DIR --prompts spec_bench.jsonl --json OUT
        [--temperature 0 0.7 1] [--nodes 8] [--drafter NAME …] [--per-category 10]
        [--max-new-tokens 64] [--threads N]

The table of temperatures and the sweep of sizes are

    … --temperature 0 0.7 1 --nodes 8          --json drafters-temperatures.json
    … --temperature 0 --nodes 4 8 16 32 64     --json drafters-nodes.json

Every drafter goes without merged prompt lookup and decodes all prompts of each subset, second turns
included; plain decoding does the same beside it. Above temperature 0 tokens are drawn by target
sampling, which keeps the target's distribution. What is decoded is kept in OUT with .parts.json in
place of .json: the same command goes on where it was stopped. Lookups draft what they find, at most
so many nodes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.sampling import SamplingOptions
from tools.measure.decoding import Ledger, Task, decode, sizes

LOOKUPS = ("prompt_lookup", "lookahead")
SAMPLING: SamplingOptions = {"seed": 0}  # plain decoding draws the same text with the same seed
COLUMNS = ("drafter", "temperature", "size", "nodes", "accepted_length", "draft_ms", "verify_ms")


def main(words: list[str] | None = None) -> None:
    """Decodes as the command line says; writes --json after each drafter and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=(0.0,))
    parser.add_argument("--nodes", type=int, nargs="+", default=(8,))
    parser.add_argument("--drafter", nargs="+", help="default: all of the bundle, and lookups")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    require_writable(arguments.json)
    try:
        figures = compare(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("| " + " | ".join(COLUMNS) + " | speedup |\n|" + "---|" * (len(COLUMNS) + 1))
    for row in figures["rows"]:
        cells = [row[c] if isinstance(row[c], str) else f"{row[c]:.3g}" for c in COLUMNS]
        print("| " + " | ".join([*cells, f"{row['speedup']:.2f}"]) + " |")


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures, a row for each drafter, temperature and size; writes them as it goes.

    Raises ValueError for an unknown drafter, a bad temperature, more nodes than the bundle takes,
    and if the file of what was decoded has other settings.
    """
    folder = arguments.bundle or bundles.find()
    prompts = read_prompts(arguments.prompts, per_category=arguments.per_category)
    manifest = bundles.read(folder, verify=False).manifest
    plain = spec_runtime.load(folder, "none", arguments.threads, profile=False)
    names = arguments.drafter or [*(info.name for info in manifest.drafters), *LOOKUPS]
    figures: dict[str, Any] = {
        "provenance": provenance.collect(
            threads=arguments.threads,
            prompts_file=arguments.prompts,
            prompts=prompts,
            manifest=manifest,
        ),
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        "max_new_tokens": arguments.max_new_tokens,
        "rows": [],
    }
    task = Task(prompts, arguments.max_new_tokens, SAMPLING)
    settings = {**task.settings, "files": manifest.files, "threads": arguments.threads}
    ledger = Ledger(arguments.json.with_suffix(".parts.json"), settings)
    for name in names:
        is_trained = name not in LOOKUPS
        engine = plain.with_drafter(name, lookup=False if is_trained else None)
        for temperature in arguments.temperature:
            print(f"{name}, temperature {temperature:g}", file=sys.stderr, flush=True)
            labels = {n: f"{name}, T = {temperature:g}, {n} nodes" for n in arguments.nodes}
            engines = {labels[n]: each for n, each in sizes(engine, arguments.nodes).items()}
            decode(
                engines, replace(task, sampling={**SAMPLING, "temperature": temperature}), ledger
            )
            figures["rows"] += [
                {
                    "drafter": name,
                    "temperature": temperature,
                    "size": size,
                    **ledger.figures(label),
                }
                for size, label in labels.items()
            ]
            write_figures(arguments.json, figures)
    return figures


if __name__ == "__main__":
    main()
