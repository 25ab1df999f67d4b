"""Says how far each contender's texts are fp32's: of quantised weights, what their speed costs."""

import functools
from collections.abc import Sequence
from pathlib import Path

import spec_runtime
from tools.measure import quality
from tools.measure.rivals import report
from tools.measure.rivals.race import Context, Row


def choices(
    bundle: Path, threads: int, contexts: Sequence[Context], rows: Sequence[Row]
) -> dict[str, dict[str, float]]:
    """Returns, by context and contender, the share of its tokens that fp32 would choose there.

    The fp32 target in `bundle` reads each text and gives its own best token after every prefix of
    it (teacher forcing), so that a token that differs counts once and not for all that follow.
    """
    found: dict[str, dict[str, float]] = {}
    with spec_runtime.load(bundle, "none", threads=threads) as engine:

        @functools.cache  # most modes of an engine write the same texts
        def agreed(prompt_ids: tuple[int, ...], tokens: tuple[int, ...]) -> int:
            answer = quality.answer_rows(engine.target, prompt_ids, tokens)
            best = [int(row_V.argmax()) for row_V in answer]
            return sum(a == b for a, b in zip(tokens, best, strict=True))

        for context in contexts:
            here = [row for row in rows if row["context"] == context.name]
            for name in dict.fromkeys(row["contender"] for row in here):
                texts = report.texts(here, name)
                same = sum(
                    agreed(tuple(context.prompts[prompt]), tuple(tokens))
                    for prompt, tokens in texts.items()
                )
                share = same / sum(map(len, texts.values()))
                found.setdefault(context.name, {})[name] = share
    return found
