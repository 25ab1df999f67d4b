"""Makes trees and features small enough to be written out, and a drafter of random guesses."""

from collections.abc import Sequence

import numpy as np

from spec_runtime.trees.budget import Budget, RankPath, Static
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import TokenTree


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    return TokenTree(np.array(tokens), np.array(parents))


def budget_of(ranks: Sequence[RankPath]) -> Budget:
    """Returns the budget that has just enough nodes for these paths and the root."""
    return Budget(1 + len(ranks), growth=Static(tuple(ranks)))


def grid(mask: np.ndarray) -> str:
    return "\n".join("".join("x" if cell else "." for cell in row) for row in mask)


def paths(tree: TokenTree) -> list[list[int]]:
    """Returns each node but the root as the tokens from below the root to it."""
    return [tree.token_N[tree.path(i)[1:]].tolist() for i in range(1, tree.num_nodes)]


def features_of(positions: Sequence[int]) -> np.ndarray:
    """Returns features f32[P, 2] that tell positions apart: row p is [p, p + 0.5]."""
    return np.array([[p, p + 0.5] for p in positions], np.float32)


class Table:
    """A drafter that reads its own guesses: candidates of random probability behind each path."""

    def __init__(self, seed: int, num_candidates: int = 3) -> None:
        self.seed, self.num_candidates = seed, num_candidates
        self.levels: list[list[tuple[int, ...]]] = []  # what was expanded, as token paths

    def guess(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, *path])
        probability = rng.dirichlet(np.ones(self.num_candidates + 1))[: self.num_candidates]
        tokens = rng.permutation(20)[: self.num_candidates]
        return tokens, np.log(np.sort(probability)[::-1]).astype(np.float32)

    def expand(self, nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
        done = sum(len(level) for level in self.levels)
        assert first == done, "every node is expanded once, in order"
        tree = nodes.build()
        level = [tuple(tree.token_N[tree.path(i)[1:]].tolist()) for i in range(first, len(nodes))]
        self.levels.append(level)
        ids, log_probs = zip(*(self.guess(path) for path in level), strict=True)
        return np.stack(ids), np.stack(log_probs)

    def everything(self, depth: int) -> dict[tuple[int, ...], float]:
        """Returns all paths down to `depth` with their log-probabilities."""
        found: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(depth):
            level = {
                (*path, int(token)): log_prob + float(value)
                for path, log_prob in level.items()
                for token, value in zip(*self.guess(path), strict=True)
            }
            found |= level
        return found


class Recorder:
    """A graph that writes down its feeds; a subclass says what it answers."""

    form, capacity = "slots", 64

    def __init__(self) -> None:
        self.calls: list[dict[str, np.ndarray]] = []

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        self.calls.append(feeds)
        answer = self.answer(feeds)
        return {name: answer[name] for name in outputs}

    def answer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gives each row its own number."""
        return {"guess_ids": feeds["logit_rows"][:, None] + 0.5}
