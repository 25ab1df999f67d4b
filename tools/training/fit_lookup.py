"""Fits how likely prompt lookup's tokens are: prints the tables of `proposers/text_index.py`.

    python -m tools.training.fit_lookup smollm2-135m-*.jsonl.xz --rows 900

Each file has one JSON object a line with "prompt" and "response", both token ids, or with "turns"
that have them (see `spec-export distill`). Every position of an answer gives one trial a candidate:
did the token that followed the longest match before follow again, and if none of these did, that of
a shorter match? One third of the rows is kept for the check that is printed below the tables.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spec_runtime.proposers.suffix_automaton import SuffixAutomaton
from spec_runtime.proposers.text_index import LONGEST, MAX_FOLLOWERS, MAX_LEVELS, SHORTER
from tools.figures import command_line, run

BINS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
HELD_OUT = 3  # each third row

# (row of the data, level, match length, count, total, is newest, is right)
Trial = tuple[int, int, int, int, int, bool, bool]


def trials(number: int, prompt: list[int], response: list[int]) -> Iterator[Trial]:
    """Yields the trials of one answer, whose row has this number."""
    text = SuffixAutomaton()
    text.extend(prompt)
    for truth in response:
        match, seen, level = text.suffix(), set[int](), 0
        while match.length and level < MAX_LEVELS:
            followers = text.followers(match)
            fresh = [each for each in followers if each[2] not in seen]
            if fresh:
                total = sum(count for count, _, _ in fresh)
                newest = max(last for _, last, _ in fresh)
                for count, last, token in fresh[:MAX_FOLLOWERS]:
                    is_right = token == truth
                    yield number, level, match.length, count, total, last == newest, is_right
                level += 1
            if any(token == truth for _, _, token in followers):
                break
            seen.update(token for _, _, token in followers)
            match = text.shorter(match)
        text.extend([truth])


def fit(inputs_NI: np.ndarray, right_N: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """Returns the weights f64[I] of a logistic regression, by Newton's method."""
    weight_I = np.zeros(inputs_NI.shape[1])
    for _ in range(30):
        p_N = 1 / (1 + np.exp(-inputs_NI @ weight_I))
        curvature_II = inputs_NI.T @ (inputs_NI * (p_N * (1 - p_N))[:, None])
        slope_I = inputs_NI.T @ (right_N - p_N) - ridge * weight_I
        weight_I += np.linalg.solve(curvature_II + ridge * np.eye(len(weight_I)), slope_I)
    return weight_I


def fit_table(
    trial_NT: np.ndarray, lengths: tuple[int, ...], is_fitted_N: np.ndarray
) -> tuple[list[tuple[float, ...]], np.ndarray]:
    """Returns a row (a, b, c, d) for matches from each length on, and what the rows say of all
    trials."""
    length_N, count_N, total_N, newest_N, right_N = trial_NT.T[2:]
    inputs_NI = np.stack(
        [np.ones(len(trial_NT)), np.log(count_N), np.log(total_N - count_N + 1), newest_N], axis=1
    )
    row_N = np.searchsorted(lengths, length_N, side="right") - 1
    rows, estimate_N = [], np.zeros(len(trial_NT))
    for number in range(len(lengths)):
        is_here = row_N == number
        used_NI, right = inputs_NI[is_here & is_fitted_N], right_N[is_here & is_fitted_N]
        weight_I = fit(used_NI, right)
        if weight_I[1] < 0:  # more often was never worse
            weight_I = np.insert(fit(np.delete(used_NI, 1, axis=1), right), 1, 0.0)
        rows.append(tuple(weight_I.round(2).tolist()))
        estimate_N[is_here] = 1 / (1 + np.exp(-inputs_NI[is_here] @ np.array(rows[-1])))
    return rows, estimate_N


def read(path: Path, num_rows: int, rng: random.Random) -> list[dict[str, list[int]]]:
    """Returns rows of a file, drawn at random. Of a row with turns it returns the first turn."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lines = list(file)
    rows = [json.loads(line) for line in rng.sample(lines, min(num_rows, len(lines)))]
    return [row["turns"][0] if "turns" in row else row for row in rows]


def main(words: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=900, help="of each file")
    arguments = parser.parse_args(words)
    rng = random.Random(1)
    rows = [row for path in arguments.files for row in read(path, arguments.rows, rng)]
    found = [t for i, row in enumerate(rows) for t in trials(i, row["prompt"], row["response"])]
    trial_NT = np.array(found, np.float64)
    print(f"{len(rows)} rows, {len(trial_NT)} trials")
    for name, table, at_level in (
        ("LONGEST", LONGEST, trial_NT[:, 1] == 0),
        ("SHORTER", SHORTER, trial_NT[:, 1] > 0),
    ):
        chosen_NT = trial_NT[at_level]
        is_fitted_N = chosen_NT[:, 0] % HELD_OUT != 0
        fitted, estimate_N = fit_table(chosen_NT, table.lengths, is_fitted_N)
        print(f"{name}: from length, row (a, b, c, d)")
        for length, row in zip(table.lengths, fitted, strict=True):
            print(f"  {length:3d} {row}")
        print("rows kept for the check: estimated, observed, trials")
        bin_N = np.digitize(estimate_N, BINS)
        for number in np.unique(bin_N).tolist():
            kept = ~is_fitted_N & (bin_N == number)
            if kept.any():
                means = estimate_N[kept].mean(), chosen_NT[kept, -1].mean()
                print(f"  {means[0]:.3f} {means[1]:.3f} {int(kept.sum()):6d}")


if __name__ == "__main__":
    run(main)
