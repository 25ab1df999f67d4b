"""Tests targets that take chains only (attention "chain"): trees become chains or are refused.

The graph is a toy that works like GroupQueryAttention without a bias: it takes no mask and no
slots, writes N rows as the last ones and lets each attend all before it. A tree would go wrong in
silence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_backend import ToyDrafter, ToyTarget
from toy_bundle import write_bundle

import spec_runtime
from spec_runtime import backends, bundle
from spec_runtime.engine import Engine
from spec_runtime.kv import ChainCache, SlotCache, open_cache
from spec_runtime.measure.tune import tune
from spec_runtime.proposers.base import Proposer
from spec_runtime.target import NEAR_TIE, Target
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.templates import EAGLE26, from_counts
from spec_runtime.trees.tree import TokenTree, chain_parents, is_chain

DRAFTERS = ("parallelspec", "prompt_lookup")
PROMPTS = ("hello hello hello", "abcabcab", "x")
TREE = np.array([0, 0, 0, 1])


class ChainToy(ToyTarget):
    """A toy target that reads `seqlens_k` in place of mask and slots."""

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        n, end = feeds["input_ids"].shape[1], int(feeds["seqlens_k"][0]) + 1
        slots = np.arange(end - n, end)
        mask = np.arange(self.capacity) <= slots[:, None]
        return super().run(feeds | {"slots": slots, "mask": mask[None, None]}, outputs)


@pytest.fixture(autouse=True)
def toy_graphs(monkeypatch: pytest.MonkeyPatch) -> list[ToyTarget]:
    """Opens toys for graphs; returns the targets opened so far, of which drafters use the first."""
    opened: list[ToyTarget] = []

    def open_graph(
        opened_bundle: bundle.Bundle, graph: bundle.Graph, capacity: int, runtime: backends.Runtime
    ) -> backends.Backend:
        if graph is not opened_bundle.manifest.graphs["target"]:
            return ToyDrafter(opened[0], capacity=capacity, num_taps=1)
        kind = ChainToy if graph.attention == "chain" else ToyTarget
        vocab_size = opened_bundle.manifest.target.dims.vocab_size
        # Two successors make loops, which prompt lookup guesses.
        opened.append(kind(vocab_size=vocab_size, capacity=capacity, peak=9.0, num_successors=2))
        return opened[-1]

    monkeypatch.setattr(backends, "open_graph", open_graph)
    return opened


def write(folder: Path, attention: str = "chain", **changes: Any) -> Path:
    """Writes a bundle with a drafter, whose target's graph has this attention."""
    folder.mkdir(exist_ok=True)
    write_bundle(folder, ("parallelspec",), **changes)
    manifest = bundle.read(folder).manifest
    graph = dataclasses.replace(manifest.graphs["target"], attention=attention)
    bundle.write_manifest(folder, dataclasses.replace(manifest, graphs={"target": graph}))
    return folder


def load(folder: Path, drafter: str = "parallelspec", **options: Any) -> Engine:
    return spec_runtime.load(folder, drafter, threads=1, **options)


# ------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("seed", range(10))
def test_with_chains_alone_the_lowest_free_slots_are_the_rows_in_order(seed: int) -> None:
    """Whatever was accepted, left over, rolled back or interrupted: row t is in slot t."""
    rng, capacity = np.random.default_rng(seed), 48
    caches = SlotCache(capacity), ChainCache(capacity)
    for _ in range(120):
        length = caches[0].length
        if length > capacity - 10 or (length and rng.random() < 0.1):
            length = int(rng.integers(0, length + 1))
            for cache in caches:
                cache.truncate(length)
        n, first = int(rng.integers(1, 9)), 0
        for cache in caches:
            feeds = cache.place(chain_parents(n))
            assert feeds["slots"].tolist() == list(range(length, length + n))
            assert feeds["position_ids"][0].tolist() == feeds["slots"].tolist()
            assert feeds["seqlens_k"].tolist() == [length + n - 1]
            upto = np.arange(capacity) <= feeds["slots"][:, None]
            assert (feeds["mask"][0, 0] == upto).all(), "all rows before it and its own"
        if n > 1 and rng.random() < 0.3:  # level by level, as a drafter in the target's cache does
            first = int(rng.integers(1, n))
            for cache in caches:
                cache.unplace(first)
                assert cache.place(chain_parents(n), first)["slots"][0] == length + first
        if rng.random() < 0.9:
            num_kept = int(rng.integers(0, n + 1))
            for cache in caches:
                cache.commit(range(num_kept))


@pytest.mark.parametrize("parents", [[0, 0, 0], [0, 1], [0, 0, 1, 1], [0, 0, 1, 3]])
@pytest.mark.parametrize("first", [0, 1])
def test_any_other_tree_is_refused_and_changes_nothing(parents: list[int], first: int) -> None:
    cache = open_cache("slots", 16, "chain")
    cache.place(chain_parents(3))
    cache.commit(range(2))
    if first:
        cache.place(chain_parents(1))
    with pytest.raises(ValueError, match=f"got a tree of {len(parents)} nodes with branches, exp"):
        cache.place(np.array(parents), first)
    assert cache.length == 2
    assert cache.place(chain_parents(2), first)["slots"].tolist() == [2, 3][first:]


def test_rows_are_kept_from_the_root_on() -> None:
    cache = open_cache("slots", 16, "chain")
    cache.place(chain_parents(4))
    with pytest.raises(AssertionError):
        cache.commit([0, 2])


def test_the_target_refuses_a_tree_before_it_runs() -> None:
    """So it does with the one-row pass of strict decoding, which is a sibling."""
    backend = ChainToy(capacity=64)
    cache = open_cache("slots", 64, "chain")
    target = Target(backend, cache, vocab_size=64, max_length=50, strict_gap=NEAR_TIE)
    target.prefill([1, 2, 3])
    num_runs = backend.num_runs
    with pytest.raises(ValueError, match="with branches, expected a chain: the target of this"):
        target.verify(TokenTree(np.arange(4), TREE))
    assert backend.num_runs == num_runs
    chain = TokenTree.chain([4, 5, 6])
    target.verify(chain)
    with pytest.raises(ValueError, match="with branches"):
        target.redo(chain, 1)
    assert backend.num_runs == num_runs + 1


# -------------------------------------------------------------------------------------- generating


@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 5, "acceptance": "typical"},
        {"temperature": 0.8, "seed": 5, "acceptance": "rejection"},
        {"temperature": 0.8, "seed": 5, "acceptance": "rejection", "draw_widths": (1, 1)},
    ],
    ids=lambda sampling: "-".join(map(str, sampling.values())) or "greedy",
)
def test_every_drafter_drafts_chains(
    tmp_path: Path, drafter: str, sampling: dict[str, Any]
) -> None:
    """Tokens are those of plain decoding with masks, unless acceptance changes them."""
    engine = load(write(tmp_path / "chain"), drafter)
    plain = load(write(tmp_path / "bias", "bias"), "none")
    depth = 0
    for prompt in PROMPTS:
        for step in engine.steps(prompt, max_new_tokens=40, ignore_eos=True, **sampling):
            if step.verified is not None:
                assert is_chain(step.verified.tree.parent_N)
                depth = max(depth, step.num_accepted)
        assert engine.last_result is not None
        if "acceptance" not in sampling:
            expected = plain.generate(prompt, max_new_tokens=40, ignore_eos=True, **sampling)
            assert engine.last_result.token_ids == expected.token_ids
    assert depth >= (2 if drafter != "none" else 0), "no chain was right"


@pytest.mark.parametrize(
    "trees",
    [
        {"paths": [list(path) for path in from_counts(EAGLE26)][:12], "max_nodes": 13},
        {"template": "cartesian:3,2"},
        {"max_nodes": 16, "min_probability": 0.001},
    ],
)
def test_trees_of_the_bundle_become_chains(tmp_path: Path, trees: dict[str, Any]) -> None:
    engine = load(write(tmp_path, trees=trees | {"max_nodes": trees.get("max_nodes", 10)}))
    sizes = set()
    for step in engine.steps("hello", max_new_tokens=30, ignore_eos=True):
        if step.verified is not None:
            assert is_chain(step.verified.tree.parent_N)
            sizes.add(step.verified.tree.num_nodes)
    assert max(sizes) == 5, "the root and four guesses"


def test_a_budget_set_later_becomes_a_chain_too(tmp_path: Path) -> None:
    """`bench --nodes` sets one so."""
    engine = load(write(tmp_path)).with_budget(Budget(3))
    sizes = {
        step.verified.tree.num_nodes
        for step in engine.steps("hello", max_new_tokens=30, ignore_eos=True)
        if step.verified is not None
    }
    assert max(sizes) == 3


def test_a_conversation_reuses_its_rows(tmp_path: Path) -> None:
    engine, plain = load(write(tmp_path / "a")), load(write(tmp_path / "b", "bias"), "none")
    for prompt in ("ab", "ab cd", "ab cd ef", "ab"):
        expected = plain.generate(prompt, raw=True, max_new_tokens=12, ignore_eos=True)
        result = engine.generate(prompt, raw=True, max_new_tokens=12, ignore_eos=True)
        assert result.token_ids == expected.token_ids
    assert result.stats.reused_tokens > 0


# ---------------------------------------------------------------------------------------- refusals


class Wilful:
    """A proposer that proposes a tree whatever its budget says."""

    def __init__(self, inner: Proposer) -> None:
        self.wants_features, self.run_seconds = inner.wants_features, 0.0
        self.start, self.commit, self.truncate = inner.start, inner.commit, inner.truncate

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree(np.array([token, 1, 2, 3]), TREE)


def test_a_proposer_that_branches_is_stopped_before_a_wrong_token(
    tmp_path: Path, toy_graphs: list[ToyTarget]
) -> None:
    engine = load(write(tmp_path), "none").observed(Wilful)
    steps = engine.steps("hello", max_new_tokens=10)
    first = next(steps)
    num_runs = toy_graphs[0].num_runs
    with pytest.raises(ValueError, match="got a tree of 4 nodes with branches"):
        next(steps)
    assert toy_graphs[0].num_runs == num_runs
    assert engine.last_result is not None
    assert engine.last_result.token_ids == first.tokens


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({}, {"drafter": "lookahead"}, "got drafter lookahead, expected another one: its window"),
        ({}, {"lookup": True}, "got prompt lookup beside drafter parallelspec, expected"),
        ({"trees": {"lookup_nodes": 3}}, {}, "got prompt lookup beside drafter parallelspec, exp"),
        ({}, {"strict": True}, "got strict with attention chain, expected bias: it judges"),
    ],
)
def test_what_needs_trees_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    folder = write(tmp_path / "chain", **changes)
    with pytest.raises(ValueError, match=why) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    load(write(tmp_path / "bias", "bias", **changes), **options)  # nothing else is wrong with it
    if "trees" in changes:
        load(folder, lookup=False)
    if "drafter" in options:
        with pytest.raises(ValueError, match=why):
            load(folder).with_drafter(options["drafter"])


def test_wider_draws_are_refused(tmp_path: Path) -> None:
    engine = load(write(tmp_path))
    sampling: dict[str, Any] = {"temperature": 1.0, "draw_widths": (1, 2), "max_new_tokens": 5}
    with pytest.raises(ValueError, match=r"got draw_widths \(1, 2\), expected 1 at each depth"):
        engine.generate("hello", acceptance="rejection", **sampling)
    engine.generate("hello", **sampling)  # nothing is drawn from the drafter here


def test_there_is_nothing_to_tune(tmp_path: Path, toy_graphs: list[ToyTarget]) -> None:
    engine = load(write(tmp_path))
    key: Any = None
    with pytest.raises(ValueError, match=r"takes chains only .*expected one built with another"):
        tune(engine, [[1, 2]], key)
    assert toy_graphs[0].num_runs == 0


# ----------------------------------------------------------------------------------- the manifest


def test_the_manifest_says_which_and_older_ones_need_not(tmp_path: Path) -> None:
    folder = write(tmp_path, "bias")
    file = folder / bundle.MANIFEST
    data = json.loads(file.read_text())
    assert "attention" not in data["graphs"]["target"]
    assert bundle.read(folder).manifest.graphs["target"].attention == "bias"
    for attention in ("full_buffer", "chain"):
        write(tmp_path, attention)
        assert json.loads(file.read_text())["graphs"]["target"]["attention"] == attention
        assert bundle.read(folder).manifest.graphs["target"].attention == attention


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention": "flash"}, "got attention 'flash', expected one of bias, full_buffer, chain"),
        ({"attention": "chain", "form": "contiguous"}, "chain with the contiguous form, expected"),
        ({"attention": 3}, "attention: got int 3, expected str"),
    ],
)
def test_a_manifest_that_cannot_be(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    folder = write(tmp_path)
    file = folder / bundle.MANIFEST
    data = json.loads(file.read_text())
    data["graphs"]["target"] |= changes
    file.write_text(json.dumps(data))
    with pytest.raises(bundle.BundleError, match=why):
        bundle.read(folder)
