"""The parts of tools/gpu_check.py that ask how fast it is: drafters, forms of attention, and
targets of the size of real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_graphs
import numpy as np
from gpu_graphs import PRECISION_FOR, Feeder, Shape, milliseconds
from gpu_job import TINY, Check, Sizes, contenders, label, shipped
from gpu_report import Findings, LeftOut, TableRow, finite
from gpu_same import TOLERANCES, race

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import ATTENTIONS
from spec_runtime.measure import bench
from spec_runtime.target import ARGMAX
from spec_runtime.trees.tree import chain_parents

# The ParallelSpec paper's figures on Spec-Bench at temperature 0: shape, drafter, its accepted
# length, and the number of rows measured here that comes nearest to its tree.
PAPER = (
    ("Llama-2-7B", "ParallelSpec, EAGLE-style", 3.49, 32),
    ("Llama-2-7B", "ParallelSpec, Medusa-style, on Vicuna-7B", 3.31, 64),
    ("Llama-3-8B", "ParallelSpec, EAGLE-style", 3.36, 32),
)

# ---------------------------------------------------------------------------------------- bench


def bench_shipped(check: Check, found: Findings) -> None:
    """Runs what a user gets without asking: the first drafter and its fused step."""
    for opened in check.opened:
        _bench(check, found, opened, shipped(opened))


def bench_others(check: Check, found: Findings) -> None:
    """Runs the other drafters, prompt lookup, and the other fused steps."""
    for opened in check.opened:
        names = [name for name in contenders(opened) if name not in shipped(opened)]
        _bench(check, found, opened, names)


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
    for (name, engine), report in zip(ready.items(), reports, strict=True):
        figures = bench.summarise(report)["overall"]
        nodes = 1 + figures["nodes_per_step"]
        check.lengths[f"{name}, {label(opened)}"] = figures["accepted_length"], nodes
        what = f"{label(opened)}, {name}, bytes"
        found.add(
            {
                "bundle": label(opened),
                "drafter": name if engine.fused else engine.drafter,
                "accepted length": figures["accepted_length"],
                "nodes": nodes,
                "tokens/s": figures["tokens_per_second"],
                "speed-up": figures["speedup"],
                "identical": figures["identical"],
                "outside engines": figures["host_share"],
                "bytes to host": found.attempt(what, bytes_to_host, check, engine),
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
        "engines: share of decoding; bytes to host: from device memory, a step."
    )


def bytes_to_host(check: Check, engine: spec_runtime.Engine) -> float | None:
    """Returns the bytes that a decoding step copies from the device, as the backends count them.

    Returns None where there is no device.
    """
    if check.device == "cpu":
        return None
    counters = counters_of(engine)
    ids = engine.encode(check.prompts[0].content)
    steps = engine.steps(ids, reuse=False, max_new_tokens=check.sizes.bench_tokens)
    next(steps)  # the prompt's own pass
    before = sum(each.bytes_to_host for each in counters)
    num_steps = sum(1 for _ in steps)
    return (sum(each.bytes_to_host for each in counters) - before) / max(1, num_steps)


def counters_of(whole: Any) -> list[Any]:
    """Returns the objects with a `bytes_to_host` that `whole` holds, at any depth.

    The parts of such an object are left out, since it counts their bytes itself.
    """
    seen: set[int] = set()
    todo, counters = [whole], []
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if hasattr(each, "bytes_to_host"):
            counters.append(each)
        elif isinstance(each, tuple):
            todo += each
        elif type(each).__module__.startswith("spec_runtime"):
            todo += getattr(each, "__dict__", {}).values()
    return counters


# ------------------------------------------------------------------------------------ attention


def attention(check: Check, found: Findings) -> None:
    """Times a few layers with wide heads, with each form of attention."""
    require_export()
    sizes, precision = check.sizes, PRECISION_FOR[check.device]
    shape = sizes.attention
    backbone = gpu_graphs.random_backbone(shape, max(sizes.contexts), precision)
    traced = gpu_graphs.trace_target(backbone)
    reference: dict[int, np.ndarray] = {}
    totals: dict[str, float] = {}
    for variant in ATTENTIONS:
        folder = check.work / "attention" / variant
        path = folder / "target.onnx"
        graph = found.attempt(variant, gpu_graphs.write_target, traced, variant, path)
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
    check.attention = min(totals, key=lambda variant: totals[variant], default=check.attention)
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
    backend = gpu_graphs.open_alone(graph, folder, shape, capacity, check.device)
    feeder = Feeder(graph, capacity, shape.vocab_size)
    feeder.prefill(backend, capacity - max(sizes.widths) - 1)
    row: TableRow = {}
    for n in sizes.widths:
        feeds = feeder.feeds(chain_parents(n))
        row[f"n = {n}"] = milliseconds(backend, feeds, [ARGMAX], sizes.repeats)
    logits_NV = backend.run(feeds, ["logits"])["logits"].copy()
    errors = gpu_graphs.row_errors(logits_NV, reference.setdefault(capacity, logits_NV))
    return row | {"Δ": finite(np.mean(errors))}


# --------------------------------------------------------------------------------------- shapes


def shapes(check: Check, found: Findings) -> None:
    """Times steps at the size of real targets, and predicts speed-ups from them."""
    require_export()
    sizes = check.sizes
    for shape in sizes.shapes:
        found.attempt(shape.name, _shape, check, found, shape)
    rows = [row for row in found.tables.get("measured", []) if row["n"] == 1]
    found.figure = ", ".join(f"{row['shape']} {row['verify ms']:.2f} ms a row" for row in rows)
    found.note = (
        f"random weights, {PRECISION_FOR[check.device]}, attention {check.attention}, context "
        f"{sizes.context}; the drafter is ParallelSpec's, {sizes.draft_rows} rows. Predicted, not "
        "measured: speed-up = accepted length / ((verify(n) + draft) / verify(1)), with accepted "
        "lengths measured on another target or printed in a paper."
    )
    if sizes.shapes == (TINY,):
        found.note += " Toy dimensions: no figure here is one of a 7B target."


@dataclass(frozen=True)
class ShapeTimer:
    """Writes the random graphs of one shape to `folder` and times runs of them."""

    shape: Shape
    sizes: Sizes
    device: str
    folder: Path

    @property
    def precision(self) -> str:
        return PRECISION_FOR[self.device]

    def time_target(self, traced: Any, attention: str) -> dict[int, float]:
        """Returns the milliseconds of verifying each number of rows."""
        graph = gpu_graphs.write_target(traced, attention, self.folder / "target.onnx")
        widths = self.sizes.verify_widths
        return dict(zip(widths, self._time_runs(graph, widths, [ARGMAX]), strict=True))

    def time_drafter(self, backbone: Any, traced: Any) -> float:
        """Returns the milliseconds of a drafter's run."""
        path = self.folder / "drafter.onnx"
        graph = gpu_graphs.write_drafter(backbone, traced, self.shape, self.precision, path)
        outputs = ["guess_ids", "guess_log_probs"]
        (ms,) = self._time_runs(graph, [self.sizes.draft_rows], outputs)
        return ms

    def _time_runs(
        self, graph: bundles.Graph, widths: Sequence[int], outputs: list[str]
    ) -> list[float]:
        capacity = self.sizes.context + gpu_graphs.SCRATCH
        backend = gpu_graphs.open_alone(graph, self.folder, self.shape, capacity, self.device)
        feeder = Feeder(graph, capacity, self.shape.vocab_size)
        feeder.prefill(backend, self.sizes.context)
        feeds = (feeder.feeds(chain_parents(n)) for n in widths)
        return [milliseconds(backend, each, outputs, self.sizes.repeats) for each in feeds]


def _shape(check: Check, found: Findings, shape: Shape) -> None:
    timer = ShapeTimer(shape, check.sizes, check.device, check.work / shape.name)
    backbone = gpu_graphs.random_backbone(shape, check.sizes.context, timer.precision)
    traced = gpu_graphs.trace_target(backbone)
    ms = timer.time_target(traced, check.attention)
    draft_ms = found.attempt(f"{shape.name}, drafter", timer.time_drafter, backbone, traced)
    for n, verify_ms in ms.items():
        row: TableRow = {"shape": shape.name, "n": n, "verify ms": verify_ms}
        row["overhead"] = verify_ms / ms[1]
        if draft_ms is not None:
            row |= {"draft ms": draft_ms, "drafter's share": draft_ms / (draft_ms + verify_ms)}
        found.add(row)
    if draft_ms is not None:
        for row in _predictions(check, shape, ms, draft_ms):
            found.add(row, "predicted")


def _predictions(
    check: Check, shape: Shape, ms: dict[int, float], draft_ms: float
) -> Iterator[TableRow]:
    """Yields the speed-up predicted from each accepted length that is known.

    `ms` maps numbers of rows to milliseconds of verifying them. A length measured here takes the
    number that comes nearest to its tree.
    """
    sources: list[tuple[str, float, int]] = [
        (f"measured here: {name}", length, min(ms, key=lambda n: abs(n - nodes)))
        for name, (length, nodes) in check.lengths.items()
        if "parallelspec" in name
    ]
    sources += [(f"paper: {name}", x, n) for where, name, x, n in PAPER if where == shape.name]
    for source, length, n in sources:
        step = (ms[n] + draft_ms) / ms[1]
        row: TableRow = {"shape": shape.name, "accepted length": length, "of": source, "n": n}
        yield row | {"step / verify(1)": step, "predicted speed-up": length / step}


def require_export() -> None:
    """Raises LeftOut, which says so, if the packages that make graphs are not installed."""
    try:
        import onnxscript  # noqa: F401
        import torch  # noqa: F401

        import spec_export  # noqa: F401
    except ImportError as error:
        raise LeftOut(f"making random graphs needs the extra export: {error}") from error
