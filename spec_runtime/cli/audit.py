"""Implements spec-runtime audit: is speculative decoding lossless on these prompts?"""

import dataclasses
from pathlib import Path
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
    from spec_runtime.bundle.manifest import Manifest
    from spec_runtime.measure import distribution_test
    from spec_runtime.measure.prompts import BenchPrompt
    from spec_runtime.sampling import SamplingOptions

ACCEPTANCES = ("target_sampling", "rejection")


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
    acceptance: Annotated[
        str,
        typer.Option(
            "--acceptance",
            help="target_sampling, or rejection: then a token's distribution is tested, on the "
            "first prompt",
        ),
    ] = "target_sampling",
    draws: Annotated[
        int, typer.Option("--draws", min=50, help="Seeds of that test, from --seed on")
    ] = 1000,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="fp32 bundle that says how likely the answers are"),
    ] = None,
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
    _check(acceptance, temperature, loading["strict"], reference)
    chosen = read_prompts(prompts, limit)
    if out is not None:  # found out now, not after the audit
        require_writable(out)
    folder = bundle or bundles.find()
    manifest = bundles.read(folder, verify=False).manifest
    judge = _open_reference(reference, manifest, loading["threads"])
    engine = spec_runtime.load(folder, profile=False, **loading)
    settings: SamplingOptions = {
        "max_new_tokens": length["max_new_tokens"],
        "temperature": temperature,
        "seed": seed,
        "acceptance": acceptance,
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
    if acceptance == "rejection":
        found = _test_distribution(engine, chosen[0], settings, draws)
        figures |= {"law": dataclasses.asdict(found), "real": int(found.is_real)}
    else:
        figures |= _audit(engine, chosen, settings, manifest.target.precision, judge)
    options.deliver(out, figures, lambda: _print(figures))
    if figures["real"]:
        raise typer.Exit(1)


def _open_reference(
    reference: Path | None, manifest: "Manifest", threads: int | None
) -> "Engine | None":
    """Opens the bundle that judges how likely the answers are. Raises UserError if it cannot."""
    if reference is None:
        return None
    import spec_runtime
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.measure import quality

    quality.check_reference(manifest, bundles.read(reference, verify=False).manifest)
    return spec_runtime.load(reference, drafter="none", threads=threads)


def _check(acceptance: str, temperature: float, strict: bool, reference: Path | None) -> None:
    if acceptance == "typical":
        raise UserError(
            "got acceptance typical, expected target_sampling or rejection: typical acceptance "
            "does not preserve the distribution, so there is nothing to audit"
        )
    if acceptance not in ACCEPTANCES:
        raise UserError(f"got acceptance {acceptance}, expected one of {', '.join(ACCEPTANCES)}")
    if acceptance == "rejection" and temperature == 0:
        raise UserError("got acceptance rejection without a temperature, expected --temperature")
    if acceptance == "rejection" and reference is not None:
        raise UserError("got a reference with acceptance rejection, expected target_sampling")
    if strict and temperature > 0:
        raise UserError(f"got --strict with temperature {temperature}, expected 0: it is greedy's")


def _audit(
    engine: "Engine",
    prompts: "list[BenchPrompt]",
    settings: "SamplingOptions",
    precision: str,
    reference: "Engine | None",
) -> dict[str, Any]:
    from spec_runtime.measure import audit

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("auditing", total=len(prompts))
        report = audit.run(
            engine,
            prompts,
            settings,
            precision,
            reference,
            on_prompt=lambda: progress.advance(task),
            on_skip=lambda reason: progress.console.print(visible(reason)),
        )
    return audit.summarise(report)


def _test_distribution(
    engine: "Engine", prompt: "BenchPrompt", settings: "SamplingOptions", draws: int
) -> "distribution_test.DistributionTest":
    from spec_runtime.measure import distribution_test

    prompt_ids = engine.encode(prompt.content)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("drawing", total=draws)
        return distribution_test.check_second_token(
            engine, prompt.id, prompt_ids, settings, draws, lambda: progress.advance(task)
        )


def _print(figures: dict[str, Any]) -> None:
    console = Console()
    if figures["acceptance"] == "rejection":
        console.print(_distribution_table(figures))
        return
    console.print(_table(figures))
    if figures["divergences"]:
        console.print(_divergences(figures["divergences"]))


def _table(figures: dict[str, Any]) -> Table:
    table = _empty_table(figures)
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
    if quality := figures["quality"]:
        error = quality["standard_error"]
        table.add_row(
            "log-probability a token",
            f"plain {quality['plain']:.4f}, speculative {quality['speculative']:.4f}, difference "
            f"{quality['difference']:+.4f}" + ("" if error is None else f" ± {error:.4f}"),
        )
    return table


def _empty_table(figures: dict[str, Any]) -> Table:
    rule = "greedy"
    if figures["temperature"] > 0:
        rule = f"temperature {figures['temperature']}, {figures['acceptance']}"
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
    return table


def _distribution_table(figures: dict[str, Any]) -> Table:
    table, law = _empty_table(figures), figures["law"]
    table.add_row("prompt", visible(law["prompt"]))
    table.add_row(
        "seeds", f"{law['draws']}; {law['count']} with {law['firsts']} common first tokens"
    )
    table.add_row("second token drafted", f"{law['drafted']}, accepted {law['accepted']}")
    table.add_row("its distribution", f"chi-square {law['statistic']:.1f} in {law['bins']} bins")
    table.add_row("p-value", f"{law['p_value']:.4f}" + (" (real)" if figures["real"] else ""))
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
