"""Implements spec-runtime bench: speed and acceptance on a file of prompts, as table and JSON."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from spec_runtime.cli import options
from spec_runtime.cli.flags import with_flags
from spec_runtime.cli.terminal import COMPACT, Console, visible
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable

if TYPE_CHECKING:
    from spec_runtime import Engine
    from spec_runtime.measure.prompts import BenchPrompt
    from spec_runtime.sampling import SamplingOptions

LOSS = 0.98  # a speed-up below it is no chance
SPEEDUPS = (
    "speed-up: ratio of tokens/s while decoding; end to end: the same with prefill in the time"
)


PerCategory = Annotated[
    int | None,
    typer.Option(
        "--per-category",
        min=1,
        help="So many of each category, the first by id; of mt_bench in turn from its eight",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="As elsewhere; several are compared in one run. NAME+prompt_lookup merges prompt "
        "lookup's candidates into its trees, and NAME next to it is then the drafter by itself",
        show_default="the bundle's first",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="Trees of N nodes, root and merged candidates included, however probable",
        show_default="the bundle's or the profile's trees",
    ),
]

Clients = Annotated[
    int | None,
    typer.Option(
        "--clients",
        min=1,
        help="Instead: N clients share the prompts, each asking when it has its answer; plain and "
        "with the drafters, one after another and together",
        show_default="prompt by prompt",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        min=1,
        help="Answers decoded together for these clients",
        show_default="as many as clients, at most those that share a pass",
    ),
]


@with_flags(
    loading=options.loading("drafter", "strict", "kept_mb"),
    settings=options.sampling("logprobs", max_new_tokens=128),
)
def command(
    settings: "SamplingOptions",
    loading: dict[str, Any],
    prompts: options.Prompts,
    limit: options.Limit = None,
    per_category: PerCategory = None,
    out: options.Out = None,
    bundle: options.Bundle = None,
    drafter: Drafters = None,
    nodes: Nodes = None,
    clients: Clients = None,
    parallel: Parallel = None,
    system: options.System = None,
) -> None:
    """Compare plain and speculative decoding of one bundle, prompt by prompt or for clients."""
    from spec_runtime.bundle import manifest as bundles
    from spec_runtime.measure import provenance
    from spec_runtime.measure.prompts import read_prompts

    chosen = read_prompts(prompts, limit, per_category)
    if out is not None:  # found out now, not after the measurement
        require_writable(out)
    folder = bundle or bundles.find()
    max_new_tokens = settings.pop("max_new_tokens")
    (name, merged), *others = contenders(drafter or [], loading["lookup"])
    loading |= {"drafter": name, "lookup": merged}
    loading["profile"] = loading["profile"] and nodes is None
    engine = options.open_engine(folder, loading)
    engines = [engine, *(engine.with_drafter(*other) for other in others)]
    _check_different(engines)
    if nodes is not None:
        engines = _fix_size(engines, nodes)
    manifest = bundles.read(folder, verify=False).manifest
    about = provenance.collect(
        threads=loading["threads"], prompts_file=prompts, prompts=chosen, manifest=manifest
    )
    figures: dict[str, Any] = {
        "provenance": about,
        "bundle": manifest.name,
        "precision": manifest.target.precision,
        "target_modified": manifest.target.target_modified,
        "threads": about["threads"],
        "max_new_tokens": max_new_tokens,
        "nodes": nodes,
        **{name: loading[name] for name in ("backend", "cuda_graphs")},
        "tuned": [each.drafter for each in engines if each.is_tuned],
        "system": system,
        "sampling": settings,
    }
    if clients is not None or parallel is not None:
        clients = clients or parallel or 1
        together = parallel or min(clients, engine.most_parallel)
        figures |= {"clients": clients, "parallel": together}
        settings |= {"max_new_tokens": max_new_tokens}
        figures["traffic"] = _serve(engines, chosen, clients, together, system, settings)
        options.deliver(out, figures, lambda: Console().print(_traffic(figures)))
        return
    results = _decode(engines, chosen, max_new_tokens, system, settings)
    parameters = {each.name: each.config.get("parameters", 0) for each in manifest.drafters}
    for spelled, result in results.items():
        result["parameters"] = parameters.get(spelled.partition("+")[0], 0)
    if len(engines) == 1:
        figures |= {"drafter": engine.drafter, **results[engine.drafter]}
    else:
        figures["drafters"] = results
    table = _table if len(engines) == 1 else _comparison
    options.deliver(out, figures, lambda: Console().print(table(figures)))


def _decode(
    engines: "list[Engine]",
    prompts: "list[BenchPrompt]",
    max_new_tokens: int,
    system: str | None,
    sampling: "SamplingOptions",
) -> dict[str, dict[str, Any]]:
    """Decodes the prompts under a progress bar; returns the figures by drafter."""
    from spec_runtime.measure import bench

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        reports = bench.run(
            engines,
            prompts,
            max_new_tokens,
            on_prompt=lambda: progress.advance(task),
            on_skip=lambda reason: progress.console.print(visible(reason)),
            system=system,
            sampling=sampling,
        )
    pairs = zip(engines, reports, strict=True)
    return {engine.drafter: bench.summarise(report) for engine, report in pairs}


def _serve(
    engines: "list[Engine]",
    prompts: "list[BenchPrompt]",
    clients: int,
    parallel: int,
    system: str | None,
    sampling: "SamplingOptions",
) -> list[dict[str, Any]]:
    """Lets clients share the first turns of the prompts under a progress bar; returns the figures
    of each way to answer them."""
    from spec_runtime.measure import clients as measured

    asked = [engines[0].encode(prompt.content, system=system) for prompt in prompts]
    plain = engines[0].with_drafter("none")
    ways = [(engine, n) for n in dict.fromkeys((1, parallel)) for engine in (plain, *engines)]
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answering", total=len(ways) * len(asked))
        for engine, together in ways:
            measured.run(engine, asked[:together], clients, together, {"max_new_tokens": 8})
            traffic = measured.run(
                engine, asked, clients, together, sampling, lambda: progress.advance(task)
            )
            rows.append({"drafter": engine.drafter, "together": together, **traffic.figures()})
    return rows


def _traffic(figures: dict[str, Any]) -> Table:
    """Returns the table of many clients, a row for each way to answer them."""
    rows = figures["traffic"]
    table = Table(
        title=f"{visible(figures['bundle'])} {figures['precision']}, {figures['threads']} threads, "
        f"{figures['clients']} clients",
        caption="tok/s: of all clients, prompts included; ms to the first token and between steps",
        **COMPACT,
    )
    table.add_column("drafter", no_wrap=True)
    waits = ("first\nmedian", "first\n95 %", "gap\nmedian", "gap\n99 %", "gap\nlongest")
    for head in ("together", "tok/s", "ratio", *waits):
        table.add_column(head, justify="right")
    for row in rows:
        first, gap = row["first_token"], row["gap"]
        waited = (first["median"], first["p95"], gap["median"], gap["p99"], gap["longest"])
        table.add_row(
            visible(row["drafter"]),
            str(row["together"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / rows[0]['tokens_per_second']:.2f}",
            *(f"{1000 * seconds:.0f}" for seconds in waited),
        )
    return table


def contenders(
    drafters: list[str], lookup: bool | None
) -> list[tuple[str, bool | None]] | list[tuple[None, bool | None]]:
    """Returns the name of each drafter to compare and whether prompt lookup is merged into its
    trees (None: as the bundle says).

    A name that ends in +prompt_lookup is merged. Beside it, the same name without the ending is the
    drafter by itself, unless --lookup or --no-lookup says which it is.

    >>> contenders(["medusa+prompt_lookup", "medusa", "prompt_lookup"], None)
    [('medusa', True), ('medusa', False), ('prompt_lookup', None)]
    """
    if not drafters:
        return [(None, lookup)]
    found: list[tuple[str, bool | None]] = []
    for spelled in drafters:
        name, plus, added = spelled.partition("+")
        if plus and added != "prompt_lookup":
            raise UserError(
                f"got drafter {spelled}, expected a name, or a name and +prompt_lookup: no other "
                "drafter's candidates can be merged"
            )
        alone = False if f"{name}+prompt_lookup" in drafters else None
        found.append((name, True if plus else lookup if lookup is not None else alone))
    return found


def _check_different(engines: "list[Engine]") -> None:
    names = [engine.drafter for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"got drafter {name} twice, expected different ones; --no-lookup leaves a trained "
                "drafter by itself, NAME+prompt_lookup merges prompt lookup into its trees"
            )


def _fix_size(engines: "list[Engine]", nodes: int) -> "list[Engine]":
    """Returns the engines with trees of ``nodes`` nodes, in which merged candidates of prompt
    lookup take places of the drafter's."""
    from spec_runtime.trees.budget import Budget

    for engine in engines:
        if nodes > engine.target.max_nodes:
            raise UserError(
                f"got --nodes {nodes}, expected at most the bundle's scratch of "
                f"{engine.target.max_nodes}"
            )
    return [engine.with_budget(Budget(nodes)) for engine in engines]


def _losses(results: dict[str, dict[str, Any]]) -> str:
    """Returns a sentence for each drafter that was slower than plain decoding."""
    slower = {name: each["overall"]["speedup"] for name, each in results.items() if name != "none"}
    return "".join(
        f"\n{visible(name)} does not pay on these prompts: plain decoding is faster"
        for name, speedup in slower.items()
        if 0 < speedup < LOSS
    )


def _table(figures: dict[str, Any]) -> Table:
    """Returns the table of one drafter, a row for each category."""
    plain = "plain (modified target) tok/s" if figures["target_modified"] else "plain tok/s"
    skipped = f"; {len(figures['skipped'])} turns skipped" if figures["skipped"] else ""
    table = Table(
        title=f"{visible(figures['bundle'])} {figures['precision']}, drafter "
        f"{visible(figures['drafter'])}, {figures['threads']} threads",
        caption=f"{SPEEDUPS}{skipped}{_losses({figures['drafter']: figures})}",
        **COMPACT,
    )
    table.add_column("prompts from", no_wrap=True)
    speeds = ("tok/s", plain, "speed-\nup", "end to end")
    for head in ("prompts", *speeds, "accepted length", "identical", "host share"):
        table.add_column(head, justify="right")
    rows = {"overall": figures["overall"], **figures["categories"]}
    for name, row in rows.items():
        table.add_row(
            visible(name),
            str(row["prompts"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_end_to_end']:.2f}",
            f"{row['accepted_length']:.2f}",
            f"{row['identical']:.0%}",
            f"{row['host_share']:.1%}",
            end_section=name == "overall",
        )
    return table


def _comparison(figures: dict[str, Any]) -> Table:
    """Returns the table of several drafters, a row for each, over all prompts."""
    results = figures["drafters"].values()
    overall = next(iter(results))["overall"]
    plain = "plain of the modified target" if figures["target_modified"] else "plain"
    table = Table(
        title=f"{visible(figures['bundle'])} {figures['precision']}, {figures['threads']} threads, "
        f"{overall['prompts']} prompts",
        caption=f"{plain}: {overall['plain_tokens_per_second']:.1f} tokens/s, "
        f"{overall['plain_verify_ms']:.1f} ms a step. {SPEEDUPS}{_losses(figures['drafters'])}",
        **COMPACT,
    )
    table.add_column("drafter", no_wrap=True)
    costs = ("draft ms", "verify ms", "speed-\nup", "end to end")
    for head in ("params", "nodes", "accepted length", *costs, "same"):
        table.add_column(head, justify="right")
    for name, result in figures["drafters"].items():
        row = result["overall"]
        table.add_row(
            visible(name),
            f"{result['parameters'] / 1e6:.1f}M" if result["parameters"] else "",
            f"{1 + row['nodes_per_step']:.1f}",
            f"{row['accepted_length']:.2f}",
            f"{row['draft_ms']:.1f}",
            f"{row['verify_ms']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_end_to_end']:.2f}",
            f"{row['identical']:.0%}",
        )
    return table
