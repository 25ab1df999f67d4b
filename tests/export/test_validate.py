"""Tests the measures of validation: simulated drafting, accuracy, calibration."""

import numpy as np
import pytest

from spec_export.training import validate
from spec_runtime.trees.budget import Budget

#                    0  1  2  3  4  5    answer: 6 7 8 9, root of the first step: 6
TOKENS = np.array([3, 5, 6, 7, 8, 9])


ANSWER = np.array([0, 0, 1, 1, 1, 1], dtype=bool)


WRONG = 50


def guesses(right: dict[int, list[bool]], num_guesses: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """ids and log-probabilities [R, K, 2]: the first choice right where told, else wrong."""
    ids = np.full((5, num_guesses, 2), WRONG)
    ids[..., 1] += 1
    for t, row in right.items():
        for k, is_right in enumerate(row):
            if is_right and t + 2 + k < len(TOKENS):
                ids[t, k, 0] = TOKENS[t + 2 + k]
    return ids, np.log(np.broadcast_to([0.6, 0.3], ids.shape))


@pytest.mark.parametrize(
    ("right", "steps"),
    [
        ({}, 3),  # one token a step
        ({1: [True, True]}, 1),  # 7 8 and the bonus 9
        ({1: [True, False], 3: [False]}, 2),  # 7 and bonus 8, then bonus 9
        ({1: [False, True]}, 3),  # a guess below a wrong one is of no use
        ({1: [True, True, True]}, 1),  # 7 8 9: nothing is left for the bonus
        ({2: [True], 3: [True]}, 2),  # bonus 7; then 8 and the bonus 9
    ],
)
def test_simulated_drafting(right: dict[int, list[bool]], steps: int) -> None:
    ids, log_probs = guesses(right)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(8)) == (3, steps)


def test_simulated_drafting_takes_the_second_choice_if_the_budget_has_it() -> None:
    ids, log_probs = guesses({})
    ids[1, 0] = [WRONG, 7]
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(8)) == (3, 2)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(2)) == (3, 3)


def test_an_answer_from_the_first_token_on_is_simulated_from_the_second() -> None:
    ids, log_probs = guesses({})
    everything = np.ones(6, dtype=bool)
    assert validate.simulate(TOKENS, everything, ids, log_probs, Budget(8)) == (4, 4)


def test_each_answer_of_a_sequence_is_simulated_apart() -> None:
    """Two answers of two tokens with a question between them: 6 7 ? ? 6 7."""
    token_T = np.array([3, 5, 6, 7, 1, 2, 6, 7])
    loss_T = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    ids = np.full((7, 2, 1), WRONG)
    ids[[1, 5], 0] = 7
    assert validate.simulate(token_T, loss_T, ids, np.zeros(ids.shape), Budget(4)) == (2, 2)


def test_guess_accuracy_counts_answer_tokens() -> None:
    """Rows 0 … 3 guess 6 7 8 9; one and two later: 7 8 9 and 8 9."""
    ids, _ = guesses({0: [True, True, True], 1: [True, False], 2: [False, True]})
    ids[3, 0] = [WRONG, 9]
    hit, hit5, count = validate.guess_accuracy(TOKENS, ANSWER, ids)
    assert count.tolist() == [4, 3, 2]
    assert hit.tolist() == [2, 2, 1]
    assert hit5.tolist() == [3, 2, 1]
    gap = ANSWER.copy()
    gap[3] = False
    assert validate.guess_accuracy(TOKENS, gap, ids)[2].tolist() == [3, 1, 1]
    assert validate.guess_accuracy(TOKENS[:2], ANSWER[:2], ids[:1])[2].tolist() == [0, 0, 0]


def conditioned() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, log q [5, 2, 2] and pairs [5, 1, 2, 2]: row 1 (root 6) guesses 7 or 50, then 50 or 8,
    which is likelier only behind 7."""
    ids, log_probs = guesses({1: [True]}, 2)
    ids[1, 1] = [WRONG, 8]
    pairs = np.log(np.broadcast_to([[0.1, 0.8], [0.7, 0.2]], (5, 1, 2, 2)))
    return ids, log_probs, pairs


def test_conditioned_guesses_are_measured_behind_the_true_token() -> None:
    ids, log_probs, pairs = conditioned()
    assert validate.guess_accuracy(TOKENS, ANSWER, ids)[0].tolist() == [1, 0]
    behind, log_behind = validate.behind_truth(TOKENS, ids, log_probs, pairs)
    assert behind[1].tolist() == [[7, 51], [8, WRONG]]
    assert np.allclose(np.exp(log_behind[1]), [[0.6, 0.3], [0.8, 0.1]])
    # where the true token is no candidate, q stays
    assert behind[2].tolist() == ids[2].tolist()
    assert np.array_equal(log_behind[2], log_probs[2])
    assert validate.guess_accuracy(TOKENS, ANSWER, behind)[0].tolist() == [1, 1]


def test_the_conditioned_tree_is_simulated() -> None:
    """With two nodes the second one is 8 behind 7 (.48), not the 50 that q prefers there."""
    ids, log_probs, pairs = conditioned()
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(3)) == (3, 2)
    assert validate.simulate(TOKENS, ANSWER, ids, log_probs, Budget(3), pairs) == (3, 1)


def test_the_calibration_error_is_by_bins() -> None:
    """Guess 0 says 0.6 four times and is right twice; one of 0.95 is wrong in another sequence."""
    ids, log_probs = guesses({0: [True], 1: [True]}, 1)
    calibration = validate.Calibration()
    calibration.add(TOKENS, ANSWER, ids, log_probs)
    assert calibration.errors() == pytest.approx((0.1,))
    calibration.add(TOKENS[:3], ANSWER[:3], np.full((2, 1, 1), WRONG), np.log([[[0.95]]] * 2))
    assert calibration.errors() == pytest.approx(((4 * 0.1 + 0.95) / 5,))
