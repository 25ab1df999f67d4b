"""The parts of tools/gpu/check.py that ask whether results are the same: as on the CPU, of each
drafter, alone and in lanes."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime import Engine
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.target import NEAR_TIE
from spec_runtime.measure import audit
from spec_runtime.trace.record import record
from spec_runtime.trees.tree import TokenTree
from tools.gpu.job import BACKEND_FOR, Check, contenders, label, open_engine
from tools.gpu.report import Findings, LeftOut, TableRow, finite

# By precision, how far a row of logits may differ, as the largest |difference| over its range, and
# how far the probability of a guess. At fp32 the bounds are for the worst, so that TF32 products
# would show; elsewhere for the mean, because outliers spoil any rounding.
TOLERANCES = {
    "fp32": (1e-4, 1e-3),
    "fp16": (0.01, 0.02),
    "bf16": (0.05, 0.1),
    "int8": (0.1, 0.15),
    "int4": (0.1, 0.15),
}
LEAST_SAME = 0.8  # of the CPU's guesses, that the device makes too: rounding swaps the last ones

# How texts are decoded to be compared: greedy, and drawn with a seed.
DECODINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seed 1": {"temperature": 0.8, "seed": 1}}

# --------------------------------------------------------------------------------------- parity


def parity(check: Check, found: Findings) -> None:
    """Decodes the same prompts on the device and on ONNX Runtime's CPU provider, and compares the
    target's logits and the probabilities of what each drafter guesses."""
    for opened in check.opened:
        cpu = found.attempt(f"{label(opened)} on the CPU", open_engine, opened, BACKEND_FOR["cpu"])
        for name in () if cpu is None else ("none", *contenders(opened)):
            what = f"{label(opened)}, {name}"
            row = found.attempt(what, _compare, check, opened, name, cpu)
            if row is not None:
                found.add({"bundle": label(opened), "drafter": name, **row})
                if row["verdict"] != "ok":
                    found.fail_number(f"{what}: {row['verdict']}")
    rows = found.tables.get("measured", [])
    right = sum(row["verdict"] == "ok" for row in rows)
    found.figure = f"{right} of {len(rows)} ways to decode compute what the CPU computes"
    if check.device == "cuda":
        taken = sum(row["CUDA graphs"] == "yes" for row in rows)
        found.figure += f", {taken} with CUDA graphs"
    found.note = (
        "|Δ| of a row over its range, and of the probability of a guess; judged is the worst at "
        "fp32, the mean elsewhere. A session without CUDA graphs runs all the same; the reason is "
        "ONNX Runtime's."
    )


def _compare(check: Check, opened: bundles.Bundle, name: str, cpu: Engine) -> TableRow:
    with warnings_of("spec_runtime") as warnings:
        engine = check.engine(opened, name)
    both = engine, cpu.with_drafter(name)
    errors: dict[str, list[float]] = {"logits": [], "guesses": []}
    num_same = num_guesses = 0
    for prompt in check.prompts[: check.sizes.num_audited]:
        ids = engine.encode(prompt.content)
        options: Any = {"max_new_tokens": check.sizes.audited_tokens, "reuse": False}
        traces = [record(each, ids, **options) for each in both]
        text = [*ids, *traces[1].result.token_ids[:-1]]
        errors["logits"] += row_errors(*(audit.replay(each.target, text) for each in both))
        for steps in zip(*(trace.steps for trace in traces), strict=False):
            got, expected = (guesses(step.tree) for step in steps)
            common = got.keys() & expected.keys()
            num_guesses += len(expected)
            num_same += len(common)
            errors["guesses"] += [abs(got[path] - expected[path]) for path in common]
            if steps[0].tokens != steps[1].tokens:
                break  # the texts part at a near tie
    if num_same < LEAST_SAME * num_guesses:
        errors["guesses"].append(1.0)
    about: TableRow = {}
    if check.device == "cuda":
        about = {"CUDA graphs": "no" if warnings else "yes", "reason": "; ".join(warnings) or None}
    about["same guesses"] = num_same / num_guesses if num_guesses else None
    return about | _judge_rows(errors, opened.manifest.target.precision)


def row_errors(got: np.ndarray, expected: np.ndarray) -> list[float]:
    """Returns the largest |Δ| of each row over the row's range, or over 1 if the range is less."""
    got, expected = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (got, expected))
    spread = np.maximum(np.ptp(expected, axis=1), 1.0)
    errors: list[float] = (np.abs(got - expected).max(axis=1) / spread).tolist()
    return errors


def guesses(tree: TokenTree | None) -> dict[tuple[int, ...], float]:
    """Returns the probability of each drafted path of a tree, by its tokens."""
    if tree is None or tree.log_prob_N is None:
        return {}
    paths = (tree.token_N[tree.path(node)] for node in range(1, tree.num_nodes))
    probabilities = np.exp(tree.log_prob_N[1:]).tolist()
    return {tuple(path.tolist()): p for path, p in zip(paths, probabilities, strict=True)}


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


def _judge_rows(errors: dict[str, list[float]], precision: str) -> TableRow:
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
            verdict = f"{kind} differ by {judged:.3g}, expected {bound:g} at most"
    return row | {"verdict": verdict}


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
        if check.kept.get("answers"):
            row = found.attempt(f"{label(opened)}, the small target's own", _own, check, opened)
            if row is not None:
                _judge(found, f"{label(opened)}, inflated", row)
                found.add({"bundle": label(opened), "drafter": "none", "decoding": "small", **row})
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


def _own(check: Check, opened: bundles.Bundle) -> TableRow:
    """Compares plain decoding with what the target said before it was inflated."""
    engine, texts, answers = (
        check.engine(opened, "none"),
        check.kept["texts"],
        check.kept["answers"],
    )
    # Other shapes round otherwise at a reduced precision, as parity's two providers do.
    bound = TOLERANCES[opened.manifest.target.precision][0]
    partings: list[TableRow] = []
    for i, (ids, answer) in enumerate(zip(texts, answers, strict=True), 1):
        got = engine.generate(ids, max_new_tokens=check.sizes.audited_tokens, reuse=False).token_ids
        partings += _parting(check, opened, i, ids, got, answer, bound)
    row: TableRow = {"prompts": len(texts), "tokens": sum(map(len, answers))}
    row |= {"identical": 1 - len(partings) / len(texts), "first divergence": _first(partings)}
    return row | {"real": sum(parting["class"] == "real" for parting in partings)}


def _parting(
    check: Check,
    opened: bundles.Bundle,
    prompt: str | int,
    prompt_ids: list[int],
    one: list[int],
    other: list[int],
    rounded: float = 0.0,
) -> list[TableRow]:
    """Returns where two texts part and why, as a list of one, or an empty list if they are equal.

    A gap of up to `rounded` of the row's range counts as rounding. Where no audit has measured the
    rounding of a reduced precision, all does.
    """
    target = check.engine(opened, "none").target
    divergence = audit.compare(prompt, prompt_ids, one, other, target)
    if divergence is None:
        return []
    spread = float(np.ptp(audit.replay(target, [*prompt_ids, *one[: divergence.position]])))
    limit = max(check.limits.get(str(opened.path), 0.0), rounded * spread)
    if limit == 0 and opened.manifest.target.precision != "fp32":
        limit = np.inf
    kind = audit.classify(divergence.gap, NEAR_TIE * spread, limit)
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
        check.close()
        for name in ("none", *contenders(opened)):
            for decoding, options in DECODINGS.items():
                what = f"{label(opened)}, {name}, {decoding}"
                row = found.attempt(what, _together, check, opened, name, options)
                if row is not None:
                    _judge(found, f"{what}, together against alone", row)
                    about = {"bundle": label(opened), "drafter": name, "decoding": decoding}
                    found.add({**about, **row})
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
