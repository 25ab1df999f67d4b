#!/usr/bin/env python3
"""Decodes with the first masks of a trained ParallelSpec drafter: what each mask is worth in speed.

    python tools/mask_speed.py --prompts spec_bench.jsonl --bundles bundles --json OUT
        [--drafter DIR] [--model M] [--nodes 8 16] [--per-category 10] [--max-new-tokens 128]

A mask reads the masks before it and none behind it. So the first K of a drafter's masks guess the
same with the others and without, and a drafter that has learnt once gives one with each number of
masks. (tools/ablations.py num_masks trains one for each.) The default drafter is the demo's own.

All of them go without prompt lookup, with trees of so many nodes, and take turns with plain
decoding subset by subset. What is decoded is kept in OUT with .parts.json in place of .json: the
same command goes on where it was stopped. --bundles keeps the target's bundle.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding import Ledger, Task, decode, sizes
from variant_bundles import VariantBundles

import spec_runtime
from spec_export import target
from spec_export.bundling import drafters
from spec_export.bundling.options import BuildOptions
from spec_export.graphs.quantize import PRECISIONS
from spec_export.training.checkpoint import SavedDrafter
from spec_runtime.cli.options import write_figures
from spec_runtime.files.writing import require_writable, sha256
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts

COLUMNS = ("accepted_length", "nodes", "draft_ms", "verify_ms", "speedup")


def main(words: list[str] | None = None) -> None:
    """Decodes as the command line says; writes --json and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", type=Path, help="a trained ParallelSpec drafter's folder")
    parser.add_argument("--model", help="its target (the demo's)")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's questions")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, nargs="+", default=(8, 16))
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    require_writable(arguments.json)
    try:
        figures = compare(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    write_figures(arguments.json, figures)
    print(table(figures["rows"]))


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures, a row for each number of masks and size of trees.

    Raises ValueError if the drafter is not ParallelSpec, for more nodes than a bundle takes, and
    if the file of what was decoded has other settings.
    """
    options = BuildOptions(
        arguments.model,
        [] if arguments.drafter else ["parallelspec"],
        [arguments.drafter] if arguments.drafter else [],
    )
    (saved,) = drafters.choose(options, target.resolve(arguments.model))
    cut = {masks: first_masks(saved, masks) for masks in range(1, num_masks(saved) + 1)}
    prompts = read_prompts(arguments.prompts, per_category=arguments.per_category)
    task = Task(prompts, arguments.max_new_tokens, {})
    weights = sha256(saved.path / "drafter.safetensors")
    settings = {
        **task.settings,
        "drafter": weights,
        "precision": arguments.precision,
        "threads": arguments.threads,
    }
    ledger = Ledger(arguments.json.with_suffix(".parts.json"), settings)
    names = {
        (masks, nodes): f"{masks} masks, {nodes} nodes"
        for masks in cut
        for nodes in arguments.nodes
    }
    bundles = VariantBundles(arguments.bundles, arguments.model, arguments.precision)
    if ledger.lacks(names.values(), task):
        with ExitStack() as stack:
            engines = {}
            for masks, drafter in cut.items():
                folder = stack.enter_context(bundles.bundle(drafter))
                engine = spec_runtime.load(
                    folder, threads=arguments.threads, verify=False, lookup=False, profile=False
                )
                for nodes, each in sizes(engine, arguments.nodes).items():
                    engines[names[masks, nodes]] = each
            decode(engines, task, ledger)
    return {
        "provenance": provenance.collect(
            threads=arguments.threads, prompts_file=arguments.prompts, prompts=prompts
        ),
        "drafter": weights,
        "precision": arguments.precision,
        "max_new_tokens": arguments.max_new_tokens,
        "rows": [
            {"masks": masks, "size": nodes, **ledger.figures(name)}
            for (masks, nodes), name in names.items()
        ],
    }


def num_masks(saved: SavedDrafter) -> int:
    """Returns how many masks a drafter has; raises ValueError if it has none."""
    count = saved.config.get("num_masks", 0) if saved.name == "parallelspec" else 0
    if not count:
        raise ValueError(
            f"got {saved.path}, a {saved.name} drafter without masks, expected ParallelSpec's"
        )
    return count


def first_masks(saved: SavedDrafter, count: int) -> SavedDrafter:
    """Returns the drafter with its first `count` masks alone.

    What validation measured is of all of them and is left out.
    """
    state = {**saved.state, "mask_embed": saved.state["mask_embed"][:count]}
    about = {key: each for key, each in saved.provenance.items() if key != "validation"}
    config = {**saved.config, "num_masks": count}
    return replace(saved, config=config, state=state, provenance=about)


def table(rows: list[Mapping[str, Any]]) -> str:
    """Returns a Markdown table, a line for each number of masks and size of trees."""
    lines = [["masks", "trees", *COLUMNS], ["---:"] * (2 + len(COLUMNS))]
    for row in rows:
        lines.append([str(row["masks"]), str(row["size"]), *(f"{row[c]:.2f}" for c in COLUMNS)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
