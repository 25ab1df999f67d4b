"""Makes engines on the toy target, and such as keep the rows of earlier conversations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from small import ToyOpener, target_of
from toy_backend import FEATURE_WIDTH, ByteTokenizer, ToyDrafter, ToyTarget

from spec_runtime.backends import RowBackend
from spec_runtime.bundle.manifest import feature_names
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.engine import Engine
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.proposer import OpenedDrafter, PlainProposer, Proposer
from spec_runtime.proposers.heads import OnePassProposer
from spec_runtime.proposers.lookahead import LookaheadProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget

DRAFTERS = ("none", "prompt_lookup", "lookahead", "parallelspec")
MODEL: dict[str, Any] = {"peak": 9.0, "num_successors": 97}
MAX_LENGTH, SCRATCH = 600, 32


def make_engine(
    drafter: str = "none",
    *,
    vocab_size: int = ByteTokenizer.vocab_size,
    max_length: int = 200,
    scratch: int = 32,
    form: str = "slots",
    taps: tuple[int, ...] = (),
    budget: Budget | None = None,
    with_features: bool = True,
    num_masks: int = 3,
    tokenizer: Any = None,
    **toy: Any,
) -> Engine:
    """Returns an engine on a fresh target; equal arguments make equal models."""
    capacity = max_length + scratch
    backend = ToyTarget(vocab_size=vocab_size, capacity=capacity, form=form, **toy)
    target = target_of(backend, max_length)
    budget = budget or Budget(max_nodes=8)
    tokenizer = tokenizer or ByteTokenizer()
    proposer = make_proposer(drafter, backend, form, with_features, len(taps), num_masks)
    return Engine(target, tokenizer, OpenedDrafter(drafter, proposer, budget, feature_names(taps)))


def engine_of(drafter: str = "parallelspec", **options: Any) -> Engine:
    """Returns an engine whose drafts are mostly right."""
    return make_engine(drafter, **MODEL, **options)


def make_proposer(
    drafter: str,
    target: ToyTarget,
    form: str = "slots",
    with_features: bool = True,
    num_taps: int = 0,
    num_masks: int = 3,
) -> Proposer:
    if drafter == "none":
        return PlainProposer()
    if drafter == "prompt_lookup":
        return MergedProposer(PlainProposer())
    if drafter == "lookahead":
        return LookaheadProposer(level=4, window=2, pool=2)
    network = ToyDrafter(
        target,
        num_masks=num_masks,
        capacity=target.capacity,
        form=form,
        with_features=with_features,
        num_taps=num_taps,
    )
    cache = open_cache(form, target.capacity)
    base = network.mask_token_base
    rows = DrafterRows(network, cache, wants_features=with_features)
    return OnePassProposer(rows, range(base, base + num_masks))


def random_prompt(seed: int, length: int = 12, vocab_size: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


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
    target = target_of(backend, MAX_LENGTH, feature_widths={"features": FEATURE_WIDTH})
    opened = OpenedDrafter(drafter, make_proposer(drafter, backend), Budget(8))
    opener = KeepingOpener(kept_bytes)
    return Engine(target, ByteTokenizer(template), opened, opener, kept_bytes, beside)
