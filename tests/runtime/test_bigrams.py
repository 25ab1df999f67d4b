"""Tables of bigrams: biases by search, probabilities below a parent, files that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_engine import make_engine, random_prompt

from spec_runtime import bundle as bundles
from spec_runtime.bundle import BundleError, DrafterInfo
from spec_runtime.proposers.bigrams import Bigrams
from spec_runtime.proposers.heads import GuessReader, OnePassProposer
from spec_runtime.trees.guesses import Guesses

BIAS = {(7, 4): 2.0, (7, 6): -1.0, (8, 5): 1.5, (300, 4): 0.25}
UNSEEN = {7: -0.5, 8: -3.0, 300: -1.0}


def arrays() -> dict[str, np.ndarray]:
    previous, following = zip(*BIAS, strict=True)
    return {
        "previous": np.array(previous, np.int32),
        "next": np.array(following, np.int32),
        "bias": np.array(list(BIAS.values()), np.float16),
        "token": np.array(list(UNSEEN), np.int32),
        "unseen": np.array(list(UNSEEN.values()), np.float16),
    }


def bias_of(previous: int, following: int) -> float:
    return BIAS.get((previous, following), UNSEEN.get(previous, 0.0))


def test_the_bias_of_a_pair_is_its_own_or_that_of_its_first_token() -> None:
    table = Bigrams(*arrays().values())
    tokens = np.array([0, 4, 5, 6, 7, 8, 9, 300, 301, 2**31 - 1])
    found = table.bias(tokens[:, None], tokens[None, :])
    expected = [[bias_of(p, c) for c in tokens.tolist()] for p in tokens.tolist()]
    assert found.tolist() == expected
    empty = [array[:0] for array in arrays().values()]
    assert not Bigrams(*empty).bias(tokens[:, None], tokens[None, :]).any()


def test_probabilities_below_a_parent_follow_the_formula() -> None:
    """Of the second guess 4, 5 and 6 have probability .5, .2 and .1, and all others .2."""
    tokens = np.array([[7, 8, 9], [4, 5, 6], [7, 4, 300]])
    q = np.array([[0.6, 0.3, 0.1], [0.5, 0.2, 0.1], [0.4, 0.3, 0.2]])
    guesses = Guesses(tokens, np.log(q).astype(np.float32))
    pair_KCC = Bigrams(*arrays().values()).conditioned(guesses).pair_KCC
    assert pair_KCC is not None
    for k in range(2):
        for i, parent in enumerate(tokens[k].tolist()):
            raised = q[k + 1] * np.exp([bias_of(parent, c) for c in tokens[k + 1].tolist()])
            expected = raised / (raised.sum() + 1 - q[k + 1].sum())
            assert np.exp(pair_KCC[k, i]) == pytest.approx(expected, rel=1e-5)
    alone = np.exp(pair_KCC[0, 2])  # below 9, of which the table knows nothing
    assert alone == pytest.approx(q[1], rel=1e-5)


def test_guesses_that_are_sure_stay_probabilities() -> None:
    log_prob = np.array([[0.0, -np.inf], [0.0, -np.inf], [-1e-9, -30.0]], np.float32)
    guesses = Guesses(np.array([[7, 8], [4, 5], [6, 7]]), log_prob)
    pair_KCC = Bigrams(*arrays().values()).conditioned(guesses).pair_KCC
    assert pair_KCC is not None
    assert (np.exp(pair_KCC).sum(-1) <= 1 + 1e-6).all()
    assert not np.isnan(pair_KCC).any()


def test_pairs_of_the_graph_are_kept() -> None:
    pair_KCC = np.zeros((1, 1, 1), np.float32)
    guesses = Guesses(np.array([[7], [4]]), np.zeros((2, 1), np.float32), pair_KCC)
    assert Bigrams(*arrays().values()).conditioned(guesses) is guesses


def test_the_table_shapes_trees_and_changes_no_token() -> None:
    """A table in which no token follows another keeps trees from growing deep."""
    token = np.arange(258, dtype=np.int32)
    none, unseen = np.zeros(0, np.int32), np.full(258, -30.0, np.float32)
    table = Bigrams(none, none, none.astype(np.float32), token, unseen)
    answers, depths = [], []
    for reader in (GuessReader(), GuessReader(bigrams=table)):
        engine = make_engine("parallelspec", peak=9.0, noise=4.0)
        assert isinstance(engine.proposer, OnePassProposer)
        engine.proposer.reader = reader
        result = engine.generate(random_prompt(0), max_new_tokens=60, ignore_eos=True)
        answers.append(result.token_ids)
        depths.append(len(result.stats.depth_accepts))
    assert answers[0] == answers[1]
    assert depths[1] < depths[0]


# ---- files


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Returns what writes arrays and opens them as the table of a bundle's drafter."""
    numpy = pytest.importorskip("safetensors.numpy")
    tiny = pytest.importorskip("tiny_bundle").write(tmp_path / "tiny")

    def open_with(**changes: np.ndarray) -> Bigrams | None:
        name = "drafters/parallelspec/bigrams.safetensors"
        numpy.save_file(arrays() | changes, tiny / name)
        manifest = bundles.read_manifest(tiny)
        info = dataclasses.replace(manifest.drafters[0], bigrams=name)
        others = manifest.drafters[1:]
        bundles.write_manifest(tiny, dataclasses.replace(manifest, drafters=(info, *others)))
        opened = bundles.read(tiny)
        return GuessReader.open(opened, opened.manifest.drafters[0]).bigrams

    return open_with


def test_a_bundle_brings_its_table(write: Any) -> None:
    table = write()
    assert table.bias(np.array([7]), np.array([4])).tolist() == [2.0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"previous": np.array([7, 7, 8], np.int32)}, "could not be broadcast"),
        ({"next": np.array([4, 4, 5, 4], np.int32)}, "do not ascend"),
        ({"previous": np.array([-7, 7, 8, 300], np.int32)}, "do not ascend from 0"),
        ({"bias": np.array([1, np.nan, 1, 1], np.float16)}, "not finite"),
        ({"bias": np.array([1, 1, 1, 1], np.int32)}, "int32"),
        ({"token": np.array([7, 7, 8], np.int32)}, "tokens that do not ascend"),
        ({"unseen": np.array([[1, 2, 3]], np.float16)}, "tokens of shape"),
        ({"bias": np.ones(4, np.float64)}, "F64"),
    ],
)
def test_a_bad_table_is_one_line(changes: dict[str, np.ndarray], why: str, write: Any) -> None:
    with pytest.raises(BundleError, match=r"bigrams\.safetensors is no table") as caught:
        write(**changes)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_without_a_table_has_none(tmp_path: Path) -> None:
    entry = DrafterInfo("x", {}, {}, None, None, {}, None)
    manifest: Any = None
    assert GuessReader.open(bundles.Bundle(tmp_path, manifest), entry).bigrams is None
