"""spec-runtime bench: speed and acceptance on a file of prompts, as a table and as JSON."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spec_runtime.cli import options


def command(
    prompts: Annotated[
        Path, typer.Option("--prompts", help="JSON Lines: turns (Spec-Bench), prompt or messages")
    ],
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="So many prompts in all, evenly over categories"),
    ] = None,
    per_category: Annotated[
        int | None,
        typer.Option("--per-category", min=1, help="The first so many of each category, by id"),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here")
    ] = None,
    bundle: options.Bundle = None,
    drafter: options.Drafter = None,
    also: options.Also = None,
    threads: options.Threads = None,
) -> None:
    """Compare plain and speculative decoding of one bundle, prompt by prompt."""
    from spec_runtime import bench
    from spec_runtime import bundle as bundles
    from spec_runtime.threads import default_threads

    chosen = bench.read_prompts(prompts, limit, per_category)
    if out is not None:  # found out now, not after the measurement
        out.parent.mkdir(parents=True, exist_ok=True)
    folder = bundle or bundles.find()
    engine = options.open_engine(folder, drafter, threads, also)
    manifest = bundles.read(folder, verify=False).manifest
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=len(chosen))
        report = bench.run(
            engine,
            chosen,
            max_new_tokens,
            on_prompt=lambda: progress.advance(task),
            on_skip=progress.console.print,
        )
    figures = {
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        "target_modified": manifest.target.target_modified,
        "drafter": engine.drafter,
        "threads": threads or default_threads(),
        "max_new_tokens": max_new_tokens,
        **bench.summarise(report),
    }
    Console(highlight=False).print(_table(figures))
    if out is not None:
        temporary = out.with_name(f".{out.name}.tmp")
        temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, out)


def _table(figures: dict[str, Any]) -> Table:
    plain = "plain (of the modified target)" if figures["target_modified"] else "plain"
    table = Table(
        title=f"{figures['bundle']} {figures['precision']}, drafter {figures['drafter']}, "
        f"{figures['threads']} threads",
        caption=f"{len(figures['skipped'])} prompts skipped" if figures["skipped"] else None,
    )
    table.add_column("prompts from")
    heads = ("prompts", "tokens/s", plain, "speedup", "accepted length", "identical", "host share")
    for head in heads:
        table.add_column(head, justify="right")
    rows = {"overall": figures["overall"], **figures["categories"]}
    for name, row in rows.items():
        table.add_row(
            name,
            str(row["prompts"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['accepted_length']:.2f}",
            f"{row['identical']:.0%}",
            f"{row['host_share']:.1%}",
            end_section=name == "overall",
        )
    return table
