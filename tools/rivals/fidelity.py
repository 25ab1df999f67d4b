"""Says how far each contender's texts are fp32's: of quantised weights, what their speed costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import spec_runtime
from rivals import report
from rivals.race import Context, Row
from spec_runtime.measure import quality


def choices(
    bundle: Path, threads: int, contexts: Sequence[Context], rows: Sequence[Row]
) -> dict[str, dict[str, float]]:
    """Returns, by context and contender, the share of its tokens that fp32 would choose there.

    The fp32 target in `bundle` reads each text and gives its own best token behind every prefix of
    it (teacher forcing), so that a token that differs counts once and not for all that follow.
    """
    engine = spec_runtime.load(bundle, "none", threads)
    known: dict[tuple[str, str, tuple[int, ...]], int] = {}

    def agreed(context: Context, prompt: str, tokens: Sequence[int]) -> int:
        key = (context.name, prompt, tuple(tokens))
        if key not in known:
            answer = quality.answer_rows(engine.target, context.prompts[prompt], tokens)
            best = [int(row_V.argmax()) for row_V in answer]
            known[key] = sum(a == b for a, b in zip(tokens, best, strict=True))
        return known[key]

    found: dict[str, dict[str, float]] = {}
    for context in contexts:
        here = [row for row in rows if row["context"] == context.name]
        for name in _names(here):
            texts = report.texts(here, name)
            same = sum(agreed(context, prompt, tokens) for prompt, tokens in texts.items())
            share = same / sum(map(len, texts.values()))
            found.setdefault(context.name, {})[name] = share
    return found


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in rows))
