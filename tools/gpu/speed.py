"""The parts of tools/gpu/check.py that ask how fast it is: drafters, and forms of attention."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import ATTENTIONS
from spec_runtime.loop.target import ARGMAX
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt
from spec_runtime.trees.tree import chain_parents
from tools.gpu import graphs
from tools.gpu.graphs import PRECISION_FOR, Feeder, milliseconds
from tools.gpu.job import Check, contenders, label
from tools.gpu.report import Findings, LeftOut, TableRow, finite
from tools.gpu.same import TOLERANCES

# ---------------------------------------------------------------------------------------- bench


def bench_all(check: Check, found: Findings) -> None:
    """Runs what a user gets without asking, the first drafter, and then the others and lookup."""
    for opened in check.opened:
        first, *others = contenders(opened)
        _bench(check, found, opened, [first])
        _bench(check, found, opened, others)


def race(
    engines: Sequence[spec_runtime.Engine], prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> list[bench.BenchReport]:
    """Returns a report for each engine; CUDA graphs are captured before the clock starts."""
    bench.run(engines, prompts[:1], max_new_tokens)
    reports = bench.run(engines, prompts, max_new_tokens)
    if not reports[0].pairs:
        raise ValueError("got no prompt that fits the context")
    return reports


def _bench(check: Check, found: Findings, opened: bundles.Bundle, names: Sequence[str]) -> None:
    """Runs drafters in turns, against plain decoding on the same backend."""
    ready: dict[str, spec_runtime.Engine] = {}
    for name in ("none", *names):
        engine = found.attempt(f"{label(opened)}, {name}", check.engine, opened, name)
        if engine is not None:
            ready[name] = engine
    reports = found.attempt(
        label(opened), race, [*ready.values()], check.prompts, check.sizes.bench_tokens
    )
    if reports is None:
        return
    for engine, report in zip(ready.values(), reports, strict=True):
        figures = bench.summarise(report)["overall"]
        found.add(
            {
                "bundle": label(opened),
                "drafter": engine.drafter,
                "accepted length": figures["accepted_length"],
                "nodes": 1 + figures["nodes_per_step"],
                "tokens/s": figures["tokens_per_second"],
                "speed-up": figures["speedup"],
                "identical": figures["identical"],
                "outside engines": figures["host_share"],
            }
        )
    rows = [row for row in found.tables["measured"] if row["drafter"] != "none"]
    best = max(rows, key=lambda row: row["speed-up"] or 0.0, default=None)
    if best is not None:
        found.figure = (
            f"{best['drafter']} {best['speed-up']:.2f} times plain decoding, "
            f"{best['tokens/s']:.0f} tokens/s, accepted length {best['accepted length']:.2f}"
        )
    found.note = (
        "speed-up over plain decoding on the same backend, whose own row shows the noise; outside "
        "engines: share of decoding."
    )


# ------------------------------------------------------------------------------------ attention


def attention(check: Check, found: Findings) -> None:
    """Times a few layers with wide heads, with each form of attention."""
    require_export()
    sizes, precision = check.sizes, PRECISION_FOR[check.device]
    shape = sizes.attention
    backbone = graphs.random_backbone(shape, max(sizes.contexts), precision)
    traced = graphs.trace_target(backbone)
    reference: dict[int, np.ndarray] = {}
    totals: dict[str, float] = {}
    for variant in ATTENTIONS:
        folder = check.work / "attention" / variant
        path = folder / "target.onnx"
        graph = found.attempt(variant, graphs.write_target, traced, variant, path)
        for capacity in sizes.contexts if graph is not None else ():
            what = f"{variant}, S = {capacity}"
            row = found.attempt(what, _attend, check, graph, folder, capacity, reference)
            if row is None:
                continue
            found.add({"attention": variant, "S": capacity, **row})
            bound = TOLERANCES[precision][0]
            if row["Δ"] is None or row["Δ"] > bound:
                found.fail_number(f"{what}: logits differ by {row['Δ']}, expected {bound:g}")
            elif capacity == min(sizes.contexts):
                totals[variant] = sum(row[f"n = {n}"] for n in sizes.widths)
    if totals:
        found.figure = ", ".join(f"{name} {ms:.3f} ms" for name, ms in totals.items())
    found.note = (
        f"ms of {shape.num_layers} layers ({shape.num_heads} heads of {shape.head_dim} over "
        f"{shape.num_kv_heads}, {precision}) for a chain of n rows, in a cache of S slots that is "
        "full but for the rows; Δ: mean |Δ| of n rows' logits against the first form, over their "
        "range."
    )


def _attend(
    check: Check,
    graph: bundles.Graph,
    folder: Path,
    capacity: int,
    reference: dict[int, np.ndarray],
) -> TableRow:
    shape, sizes = check.sizes.attention, check.sizes
    backend = graphs.open_alone(graph, folder, capacity, check.device)
    feeder = Feeder(graph, capacity, shape.vocab_size)
    feeder.prefill(backend, capacity - max(sizes.widths) - 1)
    row: TableRow = {}
    for n in sizes.widths:
        feeds = feeder.feeds(chain_parents(n))
        row[f"n = {n}"] = milliseconds(backend, feeds, [ARGMAX], sizes.repeats)
    logits_NV = backend.run(feeds, ["logits"])["logits"].copy()
    errors = graphs.row_errors(logits_NV, reference.setdefault(capacity, logits_NV))
    return row | {"Δ": finite(np.mean(errors))}


def require_export() -> None:
    """Raises LeftOut, which says so, if the packages that make graphs are not installed."""
    try:
        import onnxscript  # noqa: F401
        import torch  # noqa: F401

        import spec_export  # noqa: F401
    except ImportError as error:
        raise LeftOut(f"making random graphs needs the extra export: {error}") from error
