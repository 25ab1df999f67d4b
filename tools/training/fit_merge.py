"""Fits how a drafter's guesses and prompt lookup's speak against each other: the two numbers of
`proposers/merged.py`.

    python -m tools.training.fit_merge --bundle DIR answers.jsonl.xz --rows 200 [--drafter NAME]

Each file has one JSON object a line with "prompt", token ids, or with "turns" that have one (see
`spec-export distill`). Take prompts that the drafter did not learn from. Each is answered anew by
plain decoding while the drafter drafts at every position. A *place* is one that a tree's path along
the answer comes to: the probabilities that the drafter gives to the next token there, those that
lookup gives, and the token that followed. All pairs of a grid are judged by the cross entropy of a
place, which is summed over all tokens guessed there, each right or wrong. One third of the prompts
is kept for the check.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from spec_export.calibrate import largest, recorded
from spec_runtime import load
from spec_runtime.proposers.merged import AGAINST_DRAFTER, AGAINST_LOOKUP, combined, guessed_below
from spec_runtime.proposers.text_index import TextIndex
from spec_runtime.trees import payoff
from spec_runtime.trees.budget import Grown
from spec_runtime.trees.tree import TokenTree
from tools.training.fit_lookup import HELD_OUT, read

LEAST = 1e-6  # no probability is nearer to 0 or 1
DRAFTER_GRID = [round(0.1 * step, 1) for step in range(11)]
LOOKUP_GRID = [round(0.2 * step, 1) for step in range(16)]


class Seen(NamedTuple):
    """One place: what the drafter and lookup gave there, and the token that followed."""

    guessed: Mapping[int, float]
    found: Mapping[int, float]
    truth: int


def places(
    prompt: Sequence[int],
    tokens: Sequence[int],
    trees: Iterable[TokenTree],
    reliability: Sequence[Sequence[float]],
) -> Iterator[Seen]:
    """Yields the places of one answer at which the drafter or lookup guessed anything.

    trees: the drafter's at each position, whose roots are `tokens`. reliability: as Grown has it.
    """
    index = TextIndex()
    index.extend(prompt)
    for position, tree in enumerate(trees):
        index.extend([tokens[position]])
        if tree.log_prob_N is None:
            worth = [1.0] * tree.num_nodes
        else:
            worth = [1.0, *payoff.probabilities(tree.log_prob_N[1:], reliability).tolist()]
        node: int | None = 0
        place = index.end()
        for truth in tokens[position + 1 :]:
            found = dict(index.continuations(place))
            guessed = guessed_below(tree, worth, node)
            if not guessed and not found:
                break
            yield Seen(guessed, found, truth)
            if truth not in guessed and truth not in found:
                break
            node = None if node is None else tree.child(node, truth)
            place = index.advance(place, truth)


def surprise(probability: Mapping[int, float], truth: int) -> float:
    """Returns the cross entropy, in nats, of the guesses at one place: -log p of a right one,
    -log(1 - p) of each wrong one."""
    total = 0.0
    for token, p in probability.items():
        right = p if token == truth else 1.0 - p
        total -= math.log(min(max(right, LEAST), 1.0 - LEAST))
    return total


def larger(guessed: Mapping[int, float], found: Mapping[int, float]) -> dict[int, float]:
    """Returns the larger of both probabilities of each token."""
    tokens = {**found, **guessed}
    return {token: max(guessed.get(token, 0.0), found.get(token, 0.0)) for token in tokens}


def cross_entropy(seen: Sequence[Seen], pair: tuple[float, float] | None) -> float:
    """Returns the mean cross entropy of a place with these two numbers, or, for None, with the
    larger of both probabilities."""
    total = 0.0
    for guessed, found, truth in seen:
        merged = larger(guessed, found) if pair is None else combined(guessed, found, *pair)
        total += surprise(merged, truth)
    return total / len(seen)


def fit(seen: Sequence[Seen]) -> tuple[float, float]:
    """Returns the pair of the grid with the least cross entropy."""
    return min(
        itertools.product(DRAFTER_GRID, LOOKUP_GRID), key=lambda pair: cross_entropy(seen, pair)
    )


def main(words: Sequence[str] | None = None) -> None:
    """Answers the prompts, fits the pair and prints what each has on the prompts kept apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--drafter", help="default: the bundle's own")
    parser.add_argument("--rows", type=int, default=200, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(words)
    engine = load(args.bundle, args.drafter, profile=False, lookup=False)
    growth = engine.budget.growth
    points = growth.reliability if isinstance(growth, Grown) else ()
    rng = random.Random(1)
    fitted, kept = list[Seen](), list[Seen]()
    rows = [row for path in args.files for row in read(path, args.rows, rng)]
    for number, row in enumerate(rows):
        tokens, trees = recorded(engine, row["prompt"], args.max_new_tokens, largest)
        into = fitted if number % HELD_OUT else kept
        into.extend(places(row["prompt"], tokens, trees, points))
    best = fit(fitted)
    print(f"{len(rows)} prompts, {len(fitted)} places to fit, {len(kept)} to check")
    print("cross entropy a place: fitted, kept")
    for name, pair in (
        ("the larger of both", None),
        (f"the best pair, {best[0]} and {best[1]}", best),
        (f"today's, {AGAINST_DRAFTER} and {AGAINST_LOOKUP}", (AGAINST_DRAFTER, AGAINST_LOOKUP)),
    ):
        print(f"  {cross_entropy(fitted, pair):.3f} {cross_entropy(kept, pair):.3f} {name}")


if __name__ == "__main__":
    main()
