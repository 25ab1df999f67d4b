"""The tool that fits how a drafter's guesses and lookup's speak against each other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import fit_merge
from fit_merge import Seen
from workshop import Workshop

from spec_runtime.proposers.merged import combined
from spec_runtime.trees.tree import TokenTree


def test_places_follow_the_answer_as_far_as_either_guessed_it() -> None:
    """The drafter guesses 2 or 9 behind the first 1, and 3 behind the 2. The prompt has "1 2 3 4",
    so lookup guesses the same 2 and 3, and 4 behind them, where the tree has ended. At the second
    position, a 2, the drafter guesses nothing, and lookup what followed."""
    tree = TokenTree(np.array([1, 2, 9, 3]), np.array([0, 0, 0, 1]), np.log([1.0, 0.5, 0.25, 0.4]))
    trees = [tree, TokenTree.root(2)]
    seen = list(fit_merge.places([1, 2, 3, 4, 7], [1, 2, 3, 8], trees, ()))
    guessed = [pytest.approx(each) for each in ({2: 0.5, 9: 0.25}, {3: 0.8}, {}, {}, {})]
    assert [each.guessed for each in seen] == guessed
    assert [list(each.found) for each in seen] == [[2], [3], [4], [3], [4]]
    assert [each.truth for each in seen] == [2, 3, 8, 3, 8], "each ends where the 8 was not guessed"


def test_reliability_is_what_a_drafters_probability_is_worth() -> None:
    tree = TokenTree(np.array([1, 2]), np.array([0, 0]), np.log([1.0, 0.5]))
    seen = list(fit_merge.places([5], [1, 2], [tree], ((0.5, 0.25), (1.0, 1.0))))
    assert [each.guessed for each in seen] == [pytest.approx({2: 0.25})]


def test_cross_entropy_judges_each_guess_of_a_place() -> None:
    seen = [Seen({1: 0.5, 2: 0.25}, {}, 1), Seen({}, {3: 0.2}, 1)]
    expected = -(math.log(0.5) + math.log(0.75) + math.log(0.8)) / 2
    assert fit_merge.cross_entropy(seen, (0.3, 0.6)) == pytest.approx(expected)
    both = [Seen({1: 0.5}, {1: 0.2}, 1)]
    assert fit_merge.cross_entropy(both, None) == pytest.approx(-math.log(0.5))
    assert math.isfinite(fit_merge.surprise({1: 1.0}, 2)), "a wrong guess that was held for certain"


@pytest.mark.parametrize("pair", [(0.3, 2.2), (0.9, 0.6)])
def test_fit_finds_the_pair_that_the_answers_were_drawn_with(pair: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    seen = []
    for d, found in rng.uniform(0.05, 0.6, (4000, 2)).tolist():
        guesses = {1: d}, {2: found}
        p = combined(*guesses, *pair)
        drawn = rng.random()
        seen.append(Seen(*guesses, 1 if drawn < p[1] else 2 if drawn < p[1] + p[2] else 0))
    best = fit_merge.fit(seen)
    assert best == (pytest.approx(pair[0], abs=0.11), pytest.approx(pair[1], abs=0.41))


def test_answers_of_a_bundle_are_fitted(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    turn = {"prompt": [5, 6, 7, 5, 6, 7, 5], "response": [1]}
    rows = [turn, {"turns": [turn, {"prompt": [9], "response": [1]}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in 2 * rows))
    bundle = str(workshop.bundle("parallelspec"))
    fit_merge.main([str(path), "--bundle", bundle, "--max-new-tokens", "6"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("4 prompts, ")
    figures = [line.split() for line in shown[2:]]
    assert [float(line[0]) for line in figures] == [float(line[1]) for line in figures], (
        "all rows are alike"
    )
    assert float(figures[1][0]) <= min(float(line[0]) for line in figures), "the best of the grid"
