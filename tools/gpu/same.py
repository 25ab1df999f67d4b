"""The parts of tools/gpu/check.py that ask whether results are the same: one step of each graph,
the texts of each drafter, alone and in lanes."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime import backends
from spec_runtime.backends.shapes import is_cache
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.target import ARGMAX, LOGSUMEXP, NEAR_TIE, TOP_IDS, TOP_LOGITS
from spec_runtime.measure import audit
from spec_runtime.proposers.heads import PAIRS
from tools.gpu import graphs
from tools.gpu.graphs import BACKEND_FOR, Feeder
from tools.gpu.job import Check, contenders, graphs_of, label
from tools.gpu.report import Findings, LeftOut, TableRow, finite

# By precision, how far a row may differ, as the largest |difference| over the row's range: rows of
# logits and log-probabilities first, then features and other hidden rows. At fp32 the bounds are
# for the worst row, so that TF32 products would show; elsewhere for the mean row, as in
# spec_export/check/check.py, because the outliers of a text's first row spoil any rounding.
TOLERANCES = {
    "fp32": (1e-4, 1e-3),
    "fp16": (0.01, 0.02),
    "bf16": (0.05, 0.1),
    "int8": (0.1, 0.15),
    "int4": (0.1, 0.15),
}
SCORES = ("logits", "guess_log_probs", PAIRS, TOP_LOGITS)
BEST = ("guess_ids", ARGMAX, TOP_IDS)  # outputs whose first column is the best token

# How texts are decoded to be compared: greedy, and drawn with a seed.
DECODINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seed 1": {"temperature": 0.8, "seed": 1}}

# --------------------------------------------------------------------------------------- parity


def parity(check: Check, found: Findings) -> None:
    """Opens every graph on the device and on ONNX Runtime's CPU provider, feeds both alike and
    compares their rows."""
    for opened in check.opened:
        for name, (graph, drafter) in graphs_of(opened).items():
            what = f"{label(opened)}, {name}"
            row = found.attempt(what, _compare_graph, check, opened, graph, drafter)
            if row is not None:
                found.add({"bundle": label(opened), "graph": name, **row})
                if row["verdict"] != "ok":
                    found.fail_number(f"{what}: {row['verdict']}")
    rows = found.tables.get("measured", [])
    right = sum(row["verdict"] == "ok" for row in rows)
    found.figure = f"{right} of {len(rows)} graphs compute what the CPU computes"
    if check.device == "cuda":
        taken = sum(row["CUDA graphs"] == "yes" for row in rows)
        found.figure += f", {taken} with CUDA graphs"
    found.note = (
        "|Δ| of a row over its range; judged is the worst row at fp32, the mean row elsewhere. "
        "Equal best token is for information: rounding decides near ties. A session without CUDA "
        "graphs runs all the same; the reason is ONNX Runtime's."
    )


def _compare_graph(
    check: Check, opened: bundles.Bundle, graph: bundles.Graph, drafter: bundles.DrafterInfo | None
) -> TableRow:
    target, config = opened.manifest.target, drafter.config if drafter else {}
    capacity = target.max_length + target.scratch
    vocab_size = config.get("mask_token_base", target.dims.vocab_size) + config.get("num_masks", 0)
    feeder = Feeder(graph, capacity, vocab_size, config.get("num_guesses", 1))
    begin = time.monotonic()
    with warnings_of("spec_runtime") as warnings:
        runtime = backends.Runtime(BACKEND_FOR[check.device])
        device = backends.open_graph(opened, graph, capacity, runtime)
    about: TableRow = {"seconds to open": time.monotonic() - begin}
    if check.device == "cuda":
        about |= {"CUDA graphs": "no" if warnings else "yes", "reason": "; ".join(warnings) or None}
    cpu = backends.open_graph(opened, graph, capacity, backends.Runtime(BACKEND_FOR["cpu"]))
    return about | _compare_runs((device, cpu), graph, feeder, target.precision)


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Collects what is logged meanwhile as a warning or worse."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _compare_runs(
    both: tuple[Any, Any], graph: bundles.Graph, feeder: Feeder, precision: str
) -> TableRow:
    """Runs two backends of a graph over the same trees, and judges how far their rows differ."""
    # LOGSUMEXP is no row, and it follows from the logits.
    outputs = [s.name for s in graph.outputs if not is_cache(s) and s.name != LOGSUMEXP]
    for backend in both:
        graphs.fill_banks(backend, graph)
    errors: dict[str, list[float]] = {"scores": [], "hidden": []}
    same: list[bool] = []
    for parent_N, path in graphs.random_trees():
        feeds = feeder.feeds(parent_N)
        got, expected = (
            {name: array.copy() for name, array in backend.run(feeds, outputs).items()}
            for backend in both
        )
        feeder.keep(path)
        kept = (graphs.written_rows(backend, graph, feeds) for backend in both)
        for pair in zip(*kept, strict=True):
            errors["hidden"] += graphs.row_errors(*pair)
        for name in outputs:
            if name == PAIRS:
                for pair in _pair_rows(got, expected):
                    errors["scores"] += graphs.row_errors(*pair)
            elif name in BEST:
                pairs = (x.reshape(len(x), -1)[:, 0] for x in (got[name], expected[name]))
                same += np.equal(*pairs).tolist()
            else:
                kind = "scores" if name in SCORES else "hidden"
                errors[kind] += graphs.row_errors(got[name], expected[name])
            if name == "logits":
                same += (got[name].argmax(-1) == expected[name].argmax(-1)).tolist()
    return _judge_rows(errors, same, precision)


def _pair_rows(
    got: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields what two runs give for each guess after each other one that both of them name.

    Guesses stand in the order of their scores, in which rounding swaps near ties, so that entry
    [k, p, c] of `pair_log_probs` need not be about the same two tokens in both.
    """
    num_levels = min(len(got[PAIRS]), len(got["guess_ids"]) - 1)  # fewer if fed too few rows
    for k in range(num_levels):
        both = (
            np.intersect1d(got["guess_ids"][i], expected["guess_ids"][i], return_indices=True)[1:]
            for i in (k, k + 1)
        )
        places, others = (np.ix_(*each) for each in zip(*both, strict=True))
        if places[0].size and places[1].size:
            yield got[PAIRS][k][places], expected[PAIRS][k][others]


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
    """Compares texts with plain decoding's on the device; a difference that rounding does not
    explain ("real") fails."""
    for opened in check.opened:
        for decoding, options in DECODINGS.items():
            for name in contenders(opened):
                what = f"{label(opened)}, {name}, {decoding}"
                row = found.attempt(what, _audit, check, opened, name, options)
                if row is not None:
                    _judge(found, what, row)
                    about = {"bundle": label(opened), "drafter": name, "decoding": decoding}
                    found.add({**about, **row})
    texts = found.tables.get("measured", [])
    right = sum(not row["real"] for row in texts)
    tokens = sum(row["tokens"] for row in texts)
    found.figure = f"{right} of {len(texts)} ways of drafting lossless over {tokens} tokens"
    found.note = "real: differences from plain decoding that rounding does not explain."


def _judge(found: Findings, what: str, row: TableRow) -> None:
    if row["real"]:
        found.fail_number(f"{what}: {row['real']} real differences, expected none")


def _audit(check: Check, opened: bundles.Bundle, name: str, options: Any) -> TableRow:
    """Compares texts and the rows they came from; keeps how far forms of a row round apart."""
    precision = opened.manifest.target.precision
    prompts = check.prompts[: check.sizes.num_audited]
    engine = check.engine(opened, name)
    whole = {"max_new_tokens": check.sizes.audited_tokens, **options}
    report = audit.run(engine, prompts, whole, precision)  # type: ignore[arg-type]
    if not report.answers:
        raise ValueError("got no prompt that fits the context")
    figures = audit.summarise(report)
    key = str(opened.path)
    check.limits[key] = max(check.limits.get(key, 0.0), figures["rounding_limit"])
    row = {key: figures[key] for key in ("prompts", "tokens", "identical")}
    row["accepted length"] = figures["accepted_length"]
    row |= figures["counts"] | {"real": figures["real"]}
    return row | {"first divergence": _first(figures["divergences"])}


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
    limit = check.limits.get(str(opened.path), 0.0)
    if limit == 0 and opened.manifest.target.precision != "fp32":
        limit = np.inf
    kind = audit.classify(divergence.gap, NEAR_TIE * float(spread), limit)
    return [{**dataclasses.asdict(divergence), "class": kind}]


def _first(divergences: Sequence[TableRow]) -> str | None:
    for each in divergences:
        gap = "one text ended" if each["gap"] is None else f"gap {each['gap']:.3g}"
        return f"prompt {each['prompt']}, token {each['position']}: {gap}, {each['class']}"
    return None


# ---------------------------------------------------------------------------------------- lanes


def lanes(check: Check, found: Findings) -> None:
    """Compares texts of several prompts that share passes with those that each gets by itself."""
    for opened in check.opened:
        for name in ("none", *contenders(opened)):
            for decoding, options in DECODINGS.items():
                what = f"{label(opened)}, {name}, {decoding}"
                row = found.attempt(what, _together, check, opened, name, options)
                if row is not None:
                    _judge(found, f"{what}, together against alone", row)
                    about = {"bundle": label(opened), "drafter": name, "decoding": decoding}
                    found.add({**about, **row})
        check.close()
    ratios = [row["together / alone"] for row in found.tables.get("measured", [])]
    if ratios:
        found.figure = f"together / alone {min(ratios):.2f} to {max(ratios):.2f} in tokens/s"


def _together(check: Check, opened: bundles.Bundle, name: str, options: Any) -> TableRow:
    engine = check.engine(opened, name)
    num_lanes = 1 if engine.lanes.passes is None else engine.lanes.passes.max_lanes
    if num_lanes == 1:
        raise LeftOut("the bundle has no graphs for several lanes")
    whole = {"max_new_tokens": check.sizes.audited_tokens, "reuse": False, **options}
    prompts = check.prompts[: check.sizes.num_audited]
    ids = [engine.encode(prompt.content) for prompt in prompts]
    ways: list[Callable[[], list[spec_runtime.GenerationResult]]] = [
        lambda: [engine.generate(each, **whole) for each in ids],
        lambda: engine.generate_many(ids, parallel=num_lanes, **whole),
    ]
    seconds = []
    for answer in ways:
        answer()  # captures
        begin = time.perf_counter()
        results = answer()
        seconds.append((time.perf_counter() - begin, results))
    (alone_s, alone), (together_s, together) = seconds
    partings: list[TableRow] = []
    for prompt, each, one, other in zip(prompts, ids, alone, together, strict=True):
        partings += _parting(check, opened, prompt.id, each, one.token_ids, other.token_ids)
    num_tokens = sum(len(result.token_ids) for result in together)
    return {
        "lanes": num_lanes,
        "alone tokens/s": num_tokens / alone_s,
        "together tokens/s": num_tokens / together_s,
        "together / alone": alone_s / together_s,
        "identical": 1 - len(partings) / len(prompts),
        "real": sum(parting["class"] == "real" for parting in partings),
        "first divergence": _first(partings),
    }
