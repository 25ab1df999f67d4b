#!/usr/bin/env python3
"""Checks on a GPU host that ONNX Runtime's CUDA backend computes the same, loses nothing, and how
fast it is.

    python tools/gpu_check.py --bundle DIR [DIR …] --prompts FILE.jsonl --json OUT --markdown OUT
        [--device cuda|cpu] [--minutes 10] [--sections NAME …]
    python tools/gpu_check.py --toy --device cpu --json OUT --markdown OUT

Sections, in this order:

environment    GPU, driver, versions, providers
parity         every graph of every bundle, random but valid feeds, device against CPU provider
losslessness   every drafter against plain decoding on the device (spec_runtime/measure/audit.py)
capture        CUDA graphs on and off (--no-cuda-graphs): same tokens, ratio of speeds
attention      milliseconds of four layers with each form of attention, by context and rows
bench          every drafter, prompt lookup and the fused step: accepted length, tokens/s, speed-up
shapes         Llama-2-7B and Llama-3-8B dimensions, random weights: verify(n) / verify(1), and the
               speed-up *predicted* from it = accepted length / ((verify(n) + draft) / verify(1))

The 7B shapes have one decoder layer's weights in all 32 layers, see gpu_graphs.py. A piece that
cannot run is reported with its reason and the rest goes on; no piece is begun after --minutes.
Files are written anew after every section. The exit code is 1 if a check (parity, losslessness,
equal tokens) failed or a section crashed, else 0. `--device cpu` is a dry run, which shows that the
script runs and no more. `--toy` takes tiny sizes, and a random bundle if none is given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_graphs
import gpu_report
import numpy as np
from gpu_graphs import BACKEND_FOR, PRECISION_FOR, Feeder, Shape, milliseconds
from gpu_report import Findings, TableRow, finite, left_out, measured_on

import spec_runtime
from spec_runtime import backends
from spec_runtime import bundle as bundles
from spec_runtime.backends import cuda
from spec_runtime.backends.copies import Copies
from spec_runtime.backends.shapes import is_cache
from spec_runtime.measure import audit, bench
from spec_runtime.measure.prompts import NO_CATEGORY, BenchPrompt, read_prompts
from spec_runtime.target import ARGMAX, LOGSUMEXP, NEAR_TIE, TOP_IDS, TOP_LOGITS
from spec_runtime.trees.tree import chain_parents

# By precision, how far a row may differ, as the largest |difference| over the row's range: rows of
# logits and log-probabilities first, then features and other hidden rows. At fp32 the bounds are
# for the worst row, so that TF32 products would show; elsewhere for the mean row, as in
# spec_export/check.py, because the outliers of a text's first row spoil any rounding.
TOLERANCES = {
    "fp32": (1e-4, 1e-3),
    "fp16": (0.01, 0.02),
    "bf16": (0.05, 0.1),
    "int8": (0.1, 0.15),
    "int4": (0.1, 0.15),
}
EAGER = "cuda, no graphs"  # given in place of a backend: --no-cuda-graphs
OWN_STREAMS = "cuda, own streams"  # given in place of a backend, see `own_streams`
SCORES = ("logits", "guess_log_probs", TOP_LOGITS)
BEST = ("guess_ids", ARGMAX, TOP_IDS)  # outputs whose first column is the best token


@dataclass(frozen=True)
class Sizes:
    """Says how much is measured.

    `contexts` and `widths` are the slots and rows at which forms of attention are compared.
    `context` and `verify_widths` are those of the 7B shapes, `draft_rows` the rows of their
    drafter's run.
    """

    num_prompts: int
    num_audited: int
    max_new_tokens: int
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    context: int
    verify_widths: tuple[int, ...]
    repeats: int
    attention: Shape
    shapes: tuple[Shape, ...]
    draft_rows: int = 3 + gpu_graphs.NUM_MASKS  # accepted tokens of a step, and the masks


REAL = Sizes(
    num_prompts=16,
    num_audited=6,
    max_new_tokens=128,
    contexts=(1024, 2048, 4096),
    widths=(1, 4, 8, 16, 32, 64),
    context=1024,
    verify_widths=(1, 8, 16, 32, 64),
    repeats=20,
    attention=Shape("four layers", 1024, 1024, 1024, 4, 32, 8, 128, 1024),
    shapes=(
        Shape("Llama-2-7B", 32_000, 4096, 11_008, 32, 32, 32, 128, 32_000),
        Shape("Llama-3-8B", 128_256, 4096, 14_336, 32, 32, 8, 128, 32_000),
    ),
)
TINY = Shape("toy", 96, 64, 96, 2, 4, 2, 16, 96)
TOY = Sizes(2, 2, 16, (80, 96), (1, 4, 8), 48, (1, 4, 8), 2, TINY, (TINY,))
TOY_PROMPTS = ("abc abc abc abc", "one two one two one")

# The ParallelSpec paper's figures on Spec-Bench at temperature 0: shape, drafter, its accepted
# length, and the number of rows measured here that comes nearest to its tree.
PAPER = (
    ("Llama-2-7B", "ParallelSpec, EAGLE-style", 3.49, 32),
    ("Llama-2-7B", "ParallelSpec, Medusa-style, on Vicuna-7B", 3.31, 64),
    ("Llama-3-8B", "ParallelSpec, EAGLE-style", 3.36, 32),
)


@dataclass
class Check:
    """Holds what is checked, and what sections leave for later ones.

    `limits` are the rounding between forms of a row, by bundle; `lengths` accepted length and
    number of nodes, by drafter; `attention` is the form that the 7B shapes take.
    """

    opened: list[bundles.Bundle]
    prompts: list[BenchPrompt]
    device: str
    sizes: Sizes
    work: Path
    limits: dict[Path, float] = field(default_factory=dict)
    lengths: dict[str, tuple[float, float]] = field(default_factory=dict)
    attention: str = "bias"
    _engines: dict[tuple[Any, ...], spec_runtime.Engine] = field(default_factory=dict)

    def engine(
        self, opened: bundles.Bundle, name: str, backend: str | None = None
    ) -> spec_runtime.Engine:
        """Returns the engine of a contender, see `contenders`, opened once.

        All but the fused ones share a target.
        """
        backend = backend or BACKEND_FOR[self.device]
        key = (opened.path, name, backend)
        if key not in self._engines:
            drafter, is_fused = name.removeprefix("fused "), name.startswith("fused ")
            with own_streams() if backend == OWN_STREAMS else contextlib.nullcontext():
                if is_fused or name == "none":
                    self._engines[key] = spec_runtime.load(
                        opened.path,
                        drafter,
                        verify=False,
                        profile=False,
                        backend="cuda" if backend in (EAGER, OWN_STREAMS) else backend,
                        cuda_graphs=backend != EAGER,
                        fused=is_fused,
                    )
                else:
                    self._engines[key] = self.engine(opened, "none", backend).with_drafter(drafter)
        return self._engines[key]

    def close(self, backend: str) -> None:
        """Drops the engines on this backend, and the memory they hold."""
        for key in [key for key in self._engines if key[-1] == backend]:
            del self._engines[key]

    @property
    def generating(self) -> Any:
        """Returns the options of a greedy generation."""
        return {"max_new_tokens": self.sizes.max_new_tokens}


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Gives each session opened meanwhile a stream of its own, for which ONNX Runtime copies."""
    opener = cuda.open_copies
    cuda.open_copies = lambda: Copies()  # type: ignore[assignment]
    try:
        yield
    finally:
        cuda.open_copies = opener


def label(opened: bundles.Bundle) -> str:
    """Returns the bundle's name, precision and what is unusual about its graphs."""
    graph = opened.manifest.graphs["target"]
    words = [opened.manifest.name, opened.manifest.target.precision]
    words += [word for word in (graph.form, graph.attention) if word not in ("slots", "bias")]
    return " ".join(words)


def contenders(opened: bundles.Bundle) -> list[str]:
    """Returns the names of the bundle's drafters, prompt lookup, and the fused steps it has."""
    names = [drafter.name for drafter in opened.manifest.drafters]
    fused = [name for name in names if bundles.fused_name(name) in opened.manifest.graphs]
    return [*names, "prompt_lookup", *(f"fused {name}" for name in fused)]


# ---------------------------------------------------------------------------------- environment


def environment(check: Check, found: Findings) -> None:
    """Reports what the rest is measured on."""
    for what, ask in gpu_report.MACHINE.items():
        value = found.attempt(what, ask)
        if value is not None:
            found.add({"what": what, "value": value})
    found.add({"what": "device asked for", "value": check.device})


# --------------------------------------------------------------------------------------- parity


def parity(check: Check, found: Findings) -> None:
    """Compares every graph, fed alike, on the device and on ONNX Runtime's CPU provider."""
    for opened in check.opened:
        manifest = opened.manifest
        graphs: dict[str, tuple[bundles.Graph, bundles.DrafterInfo | None]] = {
            name: (graph, None) for name, graph in manifest.graphs.items() if name != "probe"
        }
        for info in manifest.drafters:
            for role, graph in info.graphs.items():
                graphs[f"{info.name} {role}"] = graph, info
            if graphs.pop(bundles.fused_name(info.name), None) is not None:
                found.miss(f"{label(opened)}, fused {info.name}", "its texts are compared instead")
        for name, (graph, drafter) in graphs.items():
            what = f"{label(opened)}, {name}"
            row = found.attempt(what, _compare_graph, check, opened, graph, drafter)
            if row is not None:
                found.add({"bundle": label(opened), "graph": name, **row})
                if row["verdict"] != "ok":
                    found.failures.append(f"{what}: {row['verdict']}")
    found.note = (
        "|Δ| of a row over its range; judged is the worst row at fp32, the mean row elsewhere. "
        "Equal best token is for information: rounding decides near ties."
    )
    if check.device == "cpu":
        found.note += " Here the CPU is compared with itself."


def _compare_graph(
    check: Check,
    opened: bundles.Bundle,
    graph: bundles.Graph,
    drafter: bundles.DrafterInfo | None,
) -> TableRow:
    target, config = opened.manifest.target, drafter.config if drafter else {}
    capacity = target.max_length + target.scratch
    vocab_size = config.get("mask_token_base", target.dims.vocab_size) + config.get("num_masks", 0)
    feeder = Feeder(graph, capacity, vocab_size, config.get("num_guesses", 1))
    both = [
        backends.open_graph(opened, graph, capacity, backends.Runtime(backend))
        for backend in (BACKEND_FOR[check.device], BACKEND_FOR["cpu"])
    ]
    # LOGSUMEXP is no row, and it follows from the logits.
    outputs = [s.name for s in graph.outputs if not is_cache(s) and s.name != LOGSUMEXP]
    for backend in both:
        gpu_graphs.fill_banks(backend, graph)
    errors: dict[str, list[float]] = {"scores": [], "hidden": []}
    same: list[bool] = []
    for parent_N, path in gpu_graphs.random_trees():
        feeds = feeder.feeds(parent_N)
        got, expected = (
            {name: array.copy() for name, array in backend.run(feeds, outputs).items()}
            for backend in both
        )
        feeder.keep(path)
        kept = (gpu_graphs.written_rows(backend, graph, feeds) for backend in both)
        for pair in zip(*kept, strict=True):
            errors["hidden"] += gpu_graphs.row_errors(*pair)
        for name in outputs:
            if name in BEST:
                pairs = (x.reshape(len(x), -1)[:, 0] for x in (got[name], expected[name]))
                same += np.equal(*pairs).tolist()
            else:
                kind = "scores" if name in SCORES else "hidden"
                errors[kind] += gpu_graphs.row_errors(got[name], expected[name])
            if name == "logits":
                same += (got[name].argmax(-1) == expected[name].argmax(-1)).tolist()
    return _judge_rows(errors, same, target.precision)


def _judge_rows(errors: dict[str, list[float]], same: list[bool], precision: str) -> TableRow:
    """Returns a line of the table: the rows' errors by kind with their bounds, and the verdict."""
    row: TableRow = {"rows": max(map(len, errors.values()))}
    verdict = "ok"
    for (kind, values), bound in zip(errors.items(), TOLERANCES[precision], strict=True):
        mean, worst = (np.mean(values), np.max(values)) if values else (0.0, 0.0)
        judged = worst if precision == "fp32" else mean
        if values:
            row |= {f"{kind}, mean": finite(mean), f"{kind}, worst": finite(worst)}
            row[f"{kind}, bound"] = bound
        if not judged <= bound:  # so that NaN fails
            verdict = f"{kind} differ by {judged:.3g} of a row's range, expected {bound:g} at most"
    return row | {"equal best": float(np.mean(same)) if same else None, "verdict": verdict}


# --------------------------------------------------------------------------------- losslessness


def losslessness(check: Check, found: Findings) -> None:
    """Compares greedy texts with plain decoding's; a difference that rounding does not explain
    ("real") fails."""
    for opened in check.opened:
        for name in contenders(opened):
            compare = _texts if name.startswith("fused ") else _audit
            row = found.attempt(f"{label(opened)}, {name}", compare, check, opened, name)
            if row is not None:
                _judge(found, f"{label(opened)}, {name}", row)
                found.add({"bundle": label(opened), "drafter": name, **row})
    found.note = "real: differences from plain decoding that rounding does not explain."


def _judge(found: Findings, what: str, row: TableRow) -> None:
    if row["real"]:
        found.failures.append(f"{what}: {row['real']} real differences, expected none")


def _audit(check: Check, opened: bundles.Bundle, name: str) -> TableRow:
    """Compares texts and the rows behind them; keeps how far forms of a row round apart."""
    precision = opened.manifest.target.precision
    prompts = check.prompts[: check.sizes.num_audited]
    report = audit.run(check.engine(opened, name), prompts, check.generating, precision)
    if not report.answers:
        raise ValueError("got no prompt that fits the context")
    figures = audit.summarise(report)
    limits = check.limits.get(opened.path, 0.0), figures["rounding_limit"]
    check.limits[opened.path] = max(limits)
    row = {key: figures[key] for key in ("prompts", "tokens", "identical")}
    row["accepted length"] = figures["accepted_length"]
    row |= figures["counts"] | {"real": figures["real"]}
    return row | {"first divergence": _first(figures["divergences"])}


def _texts(check: Check, opened: bundles.Bundle, name: str) -> TableRow:
    """Compares texts alone, because the fused step shows no rows."""
    engines = [check.engine(opened, each) for each in ("none", name)]
    partings: list[TableRow] = []
    num_tokens, num_steps = 0, 0
    prompts = check.prompts[: check.sizes.num_audited]
    for prompt in prompts:
        ids = engines[0].encode(prompt.content)
        plain, other = (each.generate(ids, reuse=False, **check.generating) for each in engines)
        partings += _parting(check, opened, prompt.id, ids, plain.token_ids, other.token_ids)
        num_tokens += other.stats.committed_tokens
        num_steps += other.stats.steps
    kinds = [parting["class"] for parting in partings]
    row = {
        "prompts": len(prompts),
        "tokens": num_tokens,
        "identical": 1 - len(partings) / len(prompts),
        "accepted length": num_tokens / max(1, num_steps),
    }
    row |= {kind: kinds.count(kind) for kind in audit.CLASSES}
    return row | {"first divergence": _first(partings)}


def _parting(
    check: Check,
    opened: bundles.Bundle,
    prompt: str | int,
    prompt_ids: list[int],
    one: list[int],
    other: list[int],
) -> list[TableRow]:
    """Returns where two texts part and why, as a list of one, or an empty list if they are equal.

    Where no audit has measured the rounding of a reduced precision, all counts as rounding.
    """
    target = check.engine(opened, "none").target
    divergence = audit.compare(prompt, prompt_ids, one, other, target)
    if divergence is None:
        return []
    spread = np.ptp(audit.replay(target, [*prompt_ids, *one[: divergence.position]]))
    limit = check.limits.get(opened.path, 0.0)
    if limit == 0 and opened.manifest.target.precision != "fp32":
        limit = np.inf
    kind = audit.classify(divergence.gap, NEAR_TIE * float(spread), limit)
    return [{**dataclasses.asdict(divergence), "class": kind}]


def _first(divergences: Sequence[TableRow]) -> str | None:
    for each in divergences:
        gap = "one text ended" if each["gap"] is None else f"gap {each['gap']:.3g}"
        return f"prompt {each['prompt']}, token {each['position']}: {gap}, {each['class']}"
    return None


# -------------------------------------------------------------------------------------- capture


def capture(check: Check, found: Findings) -> None:
    """Compares tokens and speed with and without captured CUDA graphs, on one stream and on
    several."""
    if check.device != "cuda":
        raise ValueError("got --device cpu, expected cuda: CUDA graphs need a GPU")
    for opened in check.opened:
        for name in ("none", *contenders(opened)):
            row = found.attempt(f"{label(opened)}, {name}", _capture, check, opened, name)
            if row is not None:
                _judge(found, f"{label(opened)}, {name}, captured against eager", row)
                found.add({"bundle": label(opened), "drafter": name, **row})
        for backend in (EAGER, OWN_STREAMS):
            check.close(backend)


def _capture(check: Check, opened: bundles.Bundle, name: str) -> TableRow:
    kinds = ("cuda", EAGER, OWN_STREAMS)
    engines = [check.engine(opened, name, backend) for backend in kinds]
    prompts = check.prompts[: check.sizes.num_audited]
    one, *others = _race(engines, prompts, check.sizes.max_new_tokens)
    partings: list[TableRow] = []
    for other in others:
        for a, b in zip(one.pairs, other.pairs, strict=True):
            ids = engines[0].encode(a.prompt.content)
            texts = [pair.turns[0].speculative.token_ids for pair in (a, b)]
            partings += _parting(check, opened, a.prompt.id, ids, *texts)
    captured, eager, own = (
        bench.summarise(report)["overall"]["tokens_per_second"] for report in (one, *others)
    )
    return {
        "captured tokens/s": captured,
        "eager tokens/s": eager,
        "captured / eager": captured / eager,
        "one stream / own streams": captured / own,
        "identical": 1 - len(partings) / (len(others) * len(one.pairs)),
        "real": sum(parting["class"] == "real" for parting in partings),
    }


def _race(
    engines: Sequence[spec_runtime.Engine], prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> list[bench.BenchReport]:
    """Returns a report for each engine; CUDA graphs are captured before the clock starts."""
    bench.run(engines, prompts[:1], max_new_tokens)
    reports = bench.run(engines, prompts, max_new_tokens)
    if not reports[0].pairs:
        raise ValueError("got no prompt that fits the context")
    return reports


# ------------------------------------------------------------------------------------ attention


def attention(check: Check, found: Findings) -> None:
    """Times a few layers with wide heads, with each form of attention."""
    from spec_export.graphs.slots import ATTENTIONS

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
                found.failures.append(f"{what}: logits differ by {row['Δ']}, expected {bound:g}")
            elif capacity == min(sizes.contexts):
                totals[variant] = sum(row[f"n = {n}"] for n in sizes.widths)
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


# ---------------------------------------------------------------------------------------- bench


def benchmark(check: Check, found: Findings) -> None:
    """Runs all drafters of a bundle in turns, against plain decoding on the same backend."""
    for opened in check.opened:
        engines = {
            name: found.attempt(f"{label(opened)}, {name}", check.engine, opened, name)
            for name in ("none", *contenders(opened))
        }
        ready = {name: engine for name, engine in engines.items() if engine is not None}
        reports = found.attempt(
            label(opened), _race, [*ready.values()], check.prompts, check.sizes.max_new_tokens
        )
        for (name, engine), report in zip(ready.items(), reports or (), strict=reports is not None):
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
    steps = engine.steps(ids, reuse=False, **check.generating)
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


# --------------------------------------------------------------------------------------- shapes


def shapes(check: Check, found: Findings) -> None:
    """Times steps at the size of real targets, and predicts speed-ups from them."""
    sizes = check.sizes
    check.close(BACKEND_FOR[check.device])
    for shape in sizes.shapes:
        found.attempt(shape.name, _shape, check, found, shape)
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


# ----------------------------------------------------------------------------------------- main

SECTIONS: dict[str, Callable[[Check, Findings], None]] = {
    "environment": environment,
    "parity": parity,
    "losslessness": losslessness,
    "capture": capture,
    "attention": attention,
    "bench": benchmark,
    "shapes": shapes,
}


def main(words: Sequence[str] | None = None) -> int:
    """Reads the command line and runs the sections; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, nargs="+", default=[])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path, required=True)
    parser.add_argument("--device", choices=BACKEND_FOR, default="cuda")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args(words)
    if not arguments.toy and not (arguments.bundle and arguments.prompts):
        parser.error("got no --bundle or no --prompts, expected both, or --toy")
    with tempfile.TemporaryDirectory(prefix="specsplit-gpu-check-") as folder:
        check = Check([], [], arguments.device, TOY if arguments.toy else REAL, Path(folder))
        try:
            if arguments.prompts is None:
                texts = enumerate(TOY_PROMPTS, 1)
                check.prompts = [BenchPrompt(i, NO_CATEGORY, text) for i, text in texts]
            else:
                check.prompts = read_prompts(arguments.prompts, check.sizes.num_prompts)
            paths = arguments.bundle or [gpu_graphs.toy_bundle(check.work, TINY, check.device)]
            check.opened = [bundles.read(path) for path in paths]
        except (OSError, ValueError) as error:
            parser.error(" ".join(str(error).split()))
        return run(check, arguments)


def run(check: Check, arguments: argparse.Namespace) -> int:
    """Runs the sections and writes both files after each; returns the exit code.

    The exit code is 1 if a check failed or a section crashed.
    """
    begin = time.monotonic()
    deadline = begin + 60 * arguments.minutes
    entries = {name: left_out("the run ended before it") for name in SECTIONS}
    figures: TableRow = {
        "device": check.device,
        "toy": arguments.toy,
        "measured_on": measured_on(check.device, entries["environment"]),
        "bundles": [label(opened) for opened in check.opened],
        "sections": entries,
    }
    for name, section in SECTIONS.items():
        start, found = time.monotonic(), Findings(deadline)
        if name not in arguments.sections:
            entries[name] = left_out("not asked for")
        elif start > deadline:
            entries[name] = left_out(f"{arguments.minutes:g} minutes were over")
        else:
            found.run_section(name, section, check, found)
            entries[name] = found.as_dict(time.monotonic() - start)
        if name == "environment":
            figures["measured_on"] = measured_on(check.device, entries[name])
        figures["exit_code"] = int(any(e["status"] == "failed" for e in entries.values()))
        figures["seconds"] = round(time.monotonic() - begin, 2)
        gpu_report.write(figures, arguments.json, arguments.markdown)
        print(f"{name}: {entries[name]['status']}, {entries[name]['seconds']} s", flush=True)
    return int(figures["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
