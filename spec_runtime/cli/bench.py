"""spec-runtime bench: speed and acceptance on a file of prompts, as a table and as JSON."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spec_runtime.cli import options

if TYPE_CHECKING:
    from spec_runtime.sampling import SamplingOptions


@options.with_sampling
def command(
    settings: "SamplingOptions",
    prompts: options.Prompts,
    limit: options.Limit = None,
    per_category: Annotated[
        int | None,
        typer.Option("--per-category", min=1, help="The first so many of each category, by id"),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    out: options.Out = None,
    bundle: options.Bundle = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            help="As elsewhere; several are compared in one run",
            show_default="the bundle's first",
        ),
    ] = None,
    lookup: options.Lookup = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="Trees of so many nodes, root included, however probable",
            show_default="the bundle's or the profile's trees",
        ),
    ] = None,
    threads: options.Threads = None,
    backend: options.Backend = "onnxruntime",
    fused: options.Fused = None,
    profile: options.Profile = True,
    system: options.System = None,
) -> None:
    """Compare plain and speculative decoding of one bundle, prompt by prompt."""
    from spec_runtime import bundle as bundles
    from spec_runtime.backends.threads import default_threads
    from spec_runtime.measure import bench
    from spec_runtime.measure.prompts import read_prompts
    from spec_runtime.trees.budget import Budget

    chosen = read_prompts(prompts, limit, per_category)
    if out is not None:  # found out now, not after the measurement
        out.parent.mkdir(parents=True, exist_ok=True)
    folder = bundle or bundles.find()
    names: list[str] | list[None] = drafter or [None]
    profile = profile and nodes is None
    engine = options.open_engine(folder, names[0], threads, lookup, profile, backend, fused)
    engines = [engine, *(engine.with_drafter(name, lookup) for name in names[1:])]
    if nodes is not None:
        if engine.fused is not None:
            raise ValueError(
                f"got --nodes {nodes} with the fused step, expected one of them: its trees have "
                f"{engine.fused.num_nodes} nodes"
            )
        if nodes > engine.target.max_nodes:
            raise ValueError(
                f"got --nodes {nodes}, expected at most the bundle's scratch of "
                f"{engine.target.max_nodes}"
            )
        engines = [each.with_budget(Budget(nodes)) for each in engines]
    manifest = bundles.read(folder, verify=False).manifest
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=len(chosen))
        reports = bench.run(
            engines,
            chosen,
            max_new_tokens,
            on_prompt=lambda: progress.advance(task),
            on_skip=progress.console.print,
            system=system,
            sampling=settings,
        )
    figures: dict[str, Any] = {
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        "target_modified": manifest.target.target_modified,
        "threads": threads or default_threads(),
        "max_new_tokens": max_new_tokens,
        "nodes": nodes,
        "backend": backend,
        "fused": [each.drafter for each in engines if each.fused is not None],
        "tuned": [each.drafter for each in engines if each.is_tuned],
        "system": system,
        "sampling": settings,
    }
    parameters = {each.name: each.config.get("parameters", 0) for each in manifest.drafters}
    results = {
        each.drafter: {
            "parameters": parameters.get(each.drafter.partition("+")[0], 0),
            **bench.summarise(report),
        }
        for each, report in zip(engines, reports, strict=True)
    }
    if len(engines) == 1:
        figures |= {"drafter": engine.drafter, **results[engine.drafter]}
        table = _table(figures)
    else:
        figures["drafters"] = results
        table = _comparison(figures)
    Console(highlight=False).print(table)
    if out is not None:
        options.write_figures(out, figures)


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


def _comparison(figures: dict[str, Any]) -> Table:
    """A row for each drafter, over all prompts."""
    results = figures["drafters"].values()
    overall = next(iter(results))["overall"]
    plain = "plain of the modified target" if figures["target_modified"] else "plain"
    table = Table(
        title=f"{figures['bundle']} {figures['precision']}, {figures['threads']} threads, "
        f"{overall['prompts']} prompts",
        caption=f"{plain}: {overall['plain_tokens_per_second']:.1f} tokens/s, "
        f"{overall['plain_verify_ms']:.1f} ms a step",
    )
    table.add_column("drafter", no_wrap=True)
    heads = ("params", "accepted length", "draft ms", "verify ms", "speedup", "same")
    for head in heads:
        table.add_column(head, justify="right")
    for name, result in figures["drafters"].items():
        row = result["overall"]
        table.add_row(
            name,
            f"{result['parameters'] / 1e6:.1f}M" if result["parameters"] else "",
            f"{row['accepted_length']:.2f}",
            f"{row['draft_ms']:.1f}",
            f"{row['verify_ms']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['identical']:.0%}",
        )
    return table
