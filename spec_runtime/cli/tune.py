"""spec-runtime tune: finds the fastest budget on this machine and keeps it as a machine profile."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from spec_runtime.cli import next_command, options
from spec_runtime.cli.flags import with_flags
from spec_runtime.cli.terminal import COMPACT, Console, visible
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable

if TYPE_CHECKING:
    from spec_runtime import Engine
    from spec_runtime.bundle.manifest import Manifest
    from spec_runtime.pace.profile import Key, Profile


@with_flags(
    loading=options.loading(only=("drafter", "lookup", "threads")),
    length=options.sampling(only=("max_new_tokens",), max_new_tokens=64),
)
def command(
    loading: dict[str, Any],
    length: dict[str, Any],
    bundle: options.Bundle = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="JSON Lines, as for bench; a dozen will do",
            show_default="six short ones of its own",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Predict only: no race of the best candidates")
    ] = False,
    out: options.Out = None,
) -> None:
    """Measure this machine and choose the budget that is fastest on it."""
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.files import mapping
    from spec_runtime.measure import provenance, tune
    from spec_runtime.measure.prompts import read_prompts
    from spec_runtime.pace import profile

    if out is not None:
        require_writable(out)
    folder = bundle or bundles.find()
    opened = bundles.read(folder, verify=False)
    given = None if prompts is None else read_prompts(prompts)
    engine = options.open_engine(folder, {**loading, "profile": False})
    contents = tune.PROMPTS if given is None else [prompt.content for prompt in given]
    chosen = _encode(engine, contents)
    tune.require_trees(engine)
    threads, max_new_tokens = loading["threads"], length["max_new_tokens"]
    key = profile.key_of(opened, engine.drafter, threads)
    manifest = opened.manifest
    with profile.reserved(key) as path:
        found = _measure(engine, chosen, key, manifest, max_new_tokens, quick)
        figures = {
            "provenance": provenance.collect(
                threads=threads, prompts_file=prompts, prompts=given, manifest=manifest
            ),
            "profile": mapping.to_json(found),
        }
        try:
            profile.write(found)
        finally:  # a full disk loses neither the figures nor what is printed
            options.deliver(out, figures, lambda: _print(found, manifest.name))
    Console().print(f"Kept in {visible(path)}", soft_wrap=True)
    next_command.say("tune", folder)


def _measure(
    engine: "Engine",
    prompts: list[list[int]],
    key: "Key",
    manifest: "Manifest",
    max_new_tokens: int,
    quick: bool,
) -> "Profile":
    """Measures under a progress line; takes what `tune.tune` takes."""
    from spec_runtime.measure import tune

    entry = manifest.entry(engine.drafter)
    columns = SpinnerColumn(), TextColumn("measuring {task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        return tune.tune(
            engine,
            prompts,
            key,
            entry.calibration if entry is not None else None,
            max_new_tokens=max_new_tokens,
            quick=quick,
            on_stage=lambda stage: progress.update(task, description=stage),
            on_forecast=lambda seconds: progress.console.print(_forecast(seconds)),
        )


def _forecast(seconds: float) -> str:
    """Returns one line that says how long the measurement will take."""
    return f"tuning takes about {max(1, round(seconds / 60))} min from here on this machine"


def _encode(engine: "Engine", contents: Iterable[Any]) -> list[list[int]]:
    """Returns the token ids of the prompts that fit the context; raises UserError if none does."""
    console = Console(stderr=True)
    found = []
    for content in contents:
        try:
            found.append(engine.encode(content))
        except ValueError as error:
            console.print(f"prompt skipped: {visible(error)}")
    if not found:
        raise UserError("got no prompt that fits the context; give shorter ones with --prompts")
    return found


def _print(profile: "Profile", name: str) -> None:
    """Prints the times, the candidates and the choice."""
    key, costs = profile.key, profile.costs
    console = Console()
    times = Table(title="one pass over a tree, ms by nodes", **COMPACT | {"padding": (0, 1, 0, 0)})
    for nodes, _ in costs.verify:
        times.add_column(f"{nodes:g}", justify="right")
    times.add_row(*(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for _, ms in costs.verify))
    console.print(times)
    console.print(
        f"plain step {costs.plain:.2f} ms, drafting {costs.draft:.2f} ms"
        + (f" + {costs.level:.2f} ms a further level" if costs.level else "")
        + f", host {costs.host:.2f} ms a step, prefill {costs.prefill:.2f} ms a token"
    )
    table = Table(
        title=f"{visible(name)} {key.precision}, drafter {visible(key.drafter)}, "
        f"{key.threads} threads"
    )
    table.add_column("budget")
    heads = ("nodes", "expected speedup", "tokens/s", "speedup", "accepted length")
    for head in heads:
        table.add_column(head, justify="right")
    for row in profile.candidates:
        table.add_row(
            row.name,
            _number(row.nodes, 1),
            _number(row.expected_speedup, 2),
            _number(row.tokens_per_second, 1),
            _number(row.speedup, 2),
            _number(row.accepted_length, 2),
            style="bold" if row.name == profile.chosen else "",
        )
    console.print(table)
    wins = "plain decoding: the drafter will not be used" if profile.plain_wins else profile.chosen
    from_run = "a run on the prompts" if profile.curve == "run" else "the bundle's calibration"
    console.print(f"Chosen: {wins}. Predicted from {from_run}.", soft_wrap=True)
    if (sampled := profile.choice.sampled_gain) is not None:
        console.print(
            f"At temperature 1: speedup {sampled.speedup:.2f}, "
            f"accepted length {sampled.accepted_length:.2f}.",
            soft_wrap=True,
        )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
