"""Makes engines on the toy target that keep the rows of earlier conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from small import ToyOpener
from toy_backend import FEATURE_WIDTH, ByteTokenizer, ToyTarget
from toy_engine import make_proposer

from spec_runtime import Engine
from spec_runtime.backends import RowBackend
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.proposer import OpenedDrafter
from spec_runtime.loop.target import Target
from spec_runtime.trees.budget import Budget

MODEL: dict[str, Any] = {"peak": 9.0, "num_successors": 97}
MAX_LENGTH, SCRATCH = 600, 32


class RowTarget(ToyTarget, RowBackend):  # type: ignore[misc]
    """A toy target whose rows can be copied; the records of a slot are its row's bytes."""

    def read_rows(self, slot_N: np.ndarray) -> dict[str, np.ndarray]:
        return {"kv": self._rows.row_SW[None, slot_N].view(np.uint8)}

    def write_rows(self, slot_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        self._rows.row_SW[...] = -1  # whatever is not written is gone
        self._rows.row_SW[slot_N] = rows["kv"][0, : len(slot_N)].view(np.int64)


class KeepingOpener(ToyOpener):
    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes

    def open_lane(self, engine: Engine) -> Engine:
        return keeping(engine.drafter, self._kept_bytes, beside=engine)


def keeping(
    drafter: str,
    kept_bytes: int = 1 << 20,
    template: ChatTemplate | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Returns an engine with a drafter of its own that keeps rows; a lane `beside` another, if one
    is given."""
    vocab_size, capacity = ByteTokenizer.vocab_size, MAX_LENGTH + SCRATCH
    backend = RowTarget(vocab_size=vocab_size, capacity=capacity, **MODEL)
    target = Target(
        backend,
        open_cache("slots", capacity),
        vocab_size=vocab_size,
        max_length=MAX_LENGTH,
        feature_widths={"features": FEATURE_WIDTH},
    )
    opened = OpenedDrafter(drafter, make_proposer(drafter, backend), Budget(8))
    opener = KeepingOpener(kept_bytes)
    return Engine(target, ByteTokenizer(template), opened, opener, kept_bytes, beside)
