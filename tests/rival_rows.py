"""Rows of a race that never was, whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

from tools.measure.rivals import report
from tools.measure.rivals.field import OURS, PLAIN, Contender
from tools.measure.rivals.race import Row

LOOKUP = f"{OURS}, lookup"
RIVAL = "Other, plain"
WORSE = "Other, lookup"


def contender(name: str, weights: str = "float32") -> Contender:
    engine, mode = name.split(", ")
    return Contender(name, engine, mode, weights, ("python",), {"threads": 1})


CONTENDERS = [
    contender(f"{OURS}, {PLAIN}"),
    contender(LOOKUP),
    contender(RIVAL),
    contender(WORSE, "rounded"),
]


def row(name: str, number: int, prompt: str, tokens: list[int], seconds: float) -> Row:
    """A job of one second of prefill, which gives one token, and of `seconds` in all."""
    return {
        "precision": "fp32",
        "context": "short",
        "round": number,
        "prompt": prompt,
        "contender": name,
        "tokens": tokens,
        "first": 1,
        "prefill_seconds": 1.0,
        "seconds": seconds,
        "prompt_tokens": 10,
        "others_cpu_seconds": 0.01,
        "version": "1.2",
        "peak_rss": 3_000_000,
        "pss": 2_000_000,
    }


def rows() -> list[Row]:
    """Two rounds of two prompts. In decoding, our plain mode gives 4 tokens a second, our lookup 8
    and then 10, the rival 5 in both; its lookup 2, in other words."""
    text = list(range(11))  # 10 tokens of decoding
    found = []
    for number, lookup_seconds in enumerate((1.25, 1.0)):
        for prompt in ("a", "b"):
            found += [
                row(CONTENDERS[0].name, number, prompt, text, 3.5),
                row(LOOKUP, number, prompt, text, 1 + lookup_seconds),
                row(RIVAL, number, prompt, text, 3.0),
                row(WORSE, number, prompt, [0, 1, 2, 99, *range(7)], 6.0),
            ]
    return found


def figures() -> dict[str, Any]:
    """What the tool writes of these rows."""
    contexts = report.summarise(rows(), CONTENDERS, {"short": {WORSE: 0.25, LOOKUP: 1.0}})
    return {
        "threads": 2,
        "rounds": 2,
        "max_new_tokens": 11,
        "lookup_tokens": 5,
        "contexts": {"short": {"prompts": 2, "tokens": 10.0}},
        "versions": {"Other": "1.2"},
        "precisions": {"fp32": contexts},
        "best": report.aims("fp32", contexts),
        "left_out": [{"engine": "Third", "what": "all of it", "reason": "it is not there"}],
        "failed": [],
    }
