"""Makes engines on the toy target."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy_backend import ByteTokenizer, ToyDrafter, ToyTarget

from spec_runtime.bundle.manifest import feature_names
from spec_runtime.engine import Engine
from spec_runtime.loop.kv import open_cache
from spec_runtime.loop.proposer import OpenedDrafter, PlainProposer, Proposer
from spec_runtime.loop.target import Target
from spec_runtime.proposers.heads import OnePassProposer
from spec_runtime.proposers.lookahead import LookaheadProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.trees.budget import Budget

DRAFTERS = ("none", "prompt_lookup", "lookahead", "parallelspec")


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
    target = Target(
        backend,
        open_cache(form, capacity),
        vocab_size=vocab_size,
        max_length=max_length,
    )
    budget = budget or Budget(max_nodes=8)
    tokenizer = tokenizer or ByteTokenizer()
    proposer = make_proposer(drafter, backend, form, with_features, len(taps), num_masks)
    return Engine(target, tokenizer, OpenedDrafter(drafter, proposer, budget, feature_names(taps)))


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
