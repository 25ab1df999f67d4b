"""Implements spec-runtime audit: is speculative decoding lossless on these prompts?"""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from spec_runtime.cli import options
from spec_runtime.cli.flags import with_flags
from spec_runtime.cli.terminal import Console, visible
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable

if TYPE_CHECKING:
    from spec_runtime import Engine
    from spec_runtime.measure.prompts import BenchPrompt
    from spec_runtime.sampling import SamplingOptions


@with_flags(
    loading=options.loading(only=("drafter", "lookup", "threads", "strict")),
    length=options.sampling(only=("max_new_tokens",), max_new_tokens=128),
)
def command(
    loading: dict[str, Any],
    length: "SamplingOptions",
    prompts: options.Prompts,
    limit: options.Limit = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 is greedy; else same seed, same tokens")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the noise, with a temperature")] = 0,
    out: options.Out = None,
    bundle: options.Bundle = None,
) -> None:
    """Check speculative decoding against plain decoding, token by token; the bundle's own trees are
    used, whatever `tune` found. Exit code 1 if a difference is real: neither a near tie nor within
    the rounding that is measured for this model and precision."""
    import spec_runtime
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.measure import provenance
    from spec_runtime.measure.prompts import read_prompts
    from spec_runtime.sampling import SamplingParams

    temperature = SamplingParams(temperature=temperature).temperature  # 0 where that is greedy
    if loading["strict"] and temperature > 0:
        raise UserError(f"got --strict with temperature {temperature}, expected 0: it is greedy's")
    chosen = read_prompts(prompts, limit)
    if out is not None:  # found out now, not after the audit
        require_writable(out)
    folder = bundle or bundles.find()
    manifest = bundles.read(folder, verify=False).manifest
    engine = spec_runtime.load(folder, profile=False, **loading)
    settings: SamplingOptions = {
        "max_new_tokens": length["max_new_tokens"],
        "temperature": temperature,
        "seed": seed,
    }
    figures: dict[str, Any] = {
        "provenance": provenance.collect(
            threads=loading["threads"], prompts_file=prompts, prompts=chosen, manifest=manifest
        ),
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        "target_modified": manifest.target.target_modified,
        "drafter": engine.drafter,
        **settings,
        "is_strict": loading["strict"],
    }
    figures |= _audit(engine, chosen, settings, manifest.target.precision)
    options.deliver(out, figures, lambda: _print(figures))
    if figures["real"]:
        raise typer.Exit(1)


def _audit(
    engine: "Engine", prompts: "list[BenchPrompt]", settings: "SamplingOptions", precision: str
) -> dict[str, Any]:
    from spec_runtime.measure import audit

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("auditing", total=len(prompts))
        report = audit.run(
            engine,
            prompts,
            settings,
            precision,
            on_prompt=lambda: progress.advance(task),
            on_skip=lambda reason: progress.console.print(visible(reason)),
        )
    return audit.summarise(report)


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    console.print(_table(figures))
    if figures["divergences"]:
        console.print(_divergences(figures["divergences"]))


def _table(figures: dict[str, Any]) -> Table:
    rule = "greedy"
    if figures["temperature"] > 0:
        rule = f"temperature {figures['temperature']}"
    table = Table(
        title=f"{visible(figures['bundle'])} {figures['precision']}, "
        f"drafter {visible(figures['drafter'])}, {rule}",
        caption="plain decoding is that of the modified target"
        if figures["target_modified"]
        else None,
        show_header=False,
    )
    table.add_column()
    table.add_column()
    counts = figures["counts"]
    table.add_row("prompts", f"{figures['prompts']}, {len(figures['skipped'])} skipped")
    length = f"accepted length {figures['accepted_length']:.2f}"
    table.add_row("tokens", f"{figures['tokens']}, {length}")
    table.add_row("identical", f"{figures['identical']:.1%} of the prompts")
    share = f"{figures['near_tie_limit']:g} of the row's range"
    gap, row = figures["rounding_limit"], figures["row_limit"]
    table.add_row("near ties", f"{counts['near tie']} (gap up to {share})")
    if gap > 0:
        table.add_row("rounding", f"{counts['rounding']} (gap up to {gap:.3g} logits)")
    beyond = f"{gap:.3g} logits" if gap > 0 else share
    table.add_row("real", f"{counts['real']} divergences (gap above {beyond})")
    table.add_row("", f"{len(figures['unjustified'])} tokens that their own row does not say")
    beyond = f"{row:.3g} logits" if row > 0 else share
    table.add_row("", f"{len(figures['deviating_rows'])} rows of trees (|Δlogit| above {beyond})")
    if gap > 0:
        alarms = figures["expected_false_alarms"]
        text = f"{alarms['divergences']:.2g} divergences, {alarms['rows']:.2g} rows"
        table.add_row("false alarms expected", text)
    table.add_row("divergences", f"{figures['divergences_per_1000_tokens']:.2f} per 1000 tokens")
    for name, delta in figures["delta_logit"].items():
        if delta["rows"]:
            text = f"median {delta['median']:.3g}, maximum {delta['maximum']:.3g}"
            table.add_row(f"|Δlogit|, {name.replace('_', ' ')}", f"{text}, {delta['rows']} rows")
    if figures["is_strict"]:
        strict = figures["strict"]
        table.add_row(
            "strict",
            f"{strict['redone']} of {strict['rows']} rows redone ({strict['share']:.2%}), "
            f"{strict['share_of_decoding']:.2%} of the decoding time",
        )
    return table


def _divergences(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="first divergences")
    for head in ("prompt", "position", "plain", "speculative", "gap", "class"):
        table.add_column(head, justify="left" if head == "class" else "right")
    for row in rows:
        gap = "" if row["gap"] is None else f"{row['gap']:.3g}"
        ids = (row["plain_id"], row["id"])
        table.add_row(
            visible(row["prompt"]),
            str(row["position"]),
            *("ended" if i is None else str(i) for i in ids),
            gap,
            row["class"],
        )
    return table
