"""The parts of tools/gpu/check.py that ask whether results are the same: of each drafter, as the
small target's, alone and in lanes."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.target import NEAR_TIE
from spec_runtime.measure import audit
from tools.gpu.job import SMALL_LOGITS, Check, contenders, label
from tools.gpu.report import Findings, LeftOut, TableRow

# By precision, how far a row of logits may be on the mean from the small target's, as the largest
# |difference| over its range.
TOLERANCES = {"fp32": 1e-4, "fp16": 0.01, "bf16": 0.05, "int8": 0.1, "int4": 0.1}

# How texts are decoded to be compared: greedy, and drawn with a seed.
DECODINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seed 1": {"temperature": 0.8, "seed": 1}}


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
        if check.kept:
            what = f"{label(opened)}, against the small target"
            row = found.attempt(what, _own, check, opened, found)
            if row is not None:
                _judge(found, what, row)
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


def _own(check: Check, opened: bundles.Bundle, found: Findings) -> TableRow:
    """Compares plain decoding, and the logits behind the prompts, with the small target's."""
    kept, engine = check.kept, check.engine(opened, "none")
    bound = TOLERANCES[opened.manifest.target.precision]  # other shapes round otherwise
    partings: list[TableRow] = []
    for i, (ids, answer) in enumerate(zip(kept["texts"], kept["answers"], strict=True), 1):
        got = engine.generate(ids, max_new_tokens=len(answer), reuse=False).token_ids
        partings += _parting(check, opened, i, ids, got, answer, bound)
    small_PV = np.load(check.work / SMALL_LOGITS)
    got_PV = np.stack([audit.replay(engine.target, ids) for ids in kept["texts"]])
    error = float(np.mean(row_errors(got_PV[:, : small_PV.shape[1]], small_PV)))
    if not error <= bound:  # so that NaN fails
        found.fail_number(f"{label(opened)}: logits differ by {error:.3g}, expected {bound:g}")
    return {
        "prompts": len(answers := kept["answers"]),
        "tokens": sum(map(len, answers)),
        "identical": 1 - len(partings) / len(answers),
        "logits differ": error,
        "real": sum(parting["class"] == "real" for parting in partings),
        "first divergence": _first(partings),
    }


def row_errors(got: np.ndarray, expected: np.ndarray) -> list[float]:
    """Returns the largest |Δ| of each row over the row's range, or over 1 if the range is less."""
    got, expected = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (got, expected))
    spread = np.maximum(np.ptp(expected, axis=1), 1.0)
    errors: list[float] = (np.abs(got - expected).max(axis=1) / spread).tolist()
    return errors


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
    if not all(0 <= token < target.vocab_size for token in (*one, *other)):
        return [{"prompt": prompt, "position": 0, "gap": np.inf, "class": "real"}]
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
