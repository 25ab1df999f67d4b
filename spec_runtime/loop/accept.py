"""Accepts a path of the tree, by pure functions of the tree and of what the target says.

- By target sampling (the default): draw y ~ p and see whether a child carries it.
- By rejection, for children drawn from the drafter's q: accept x with probability
  min(1, p(x) / q(x)), else go on with norm(max(0, p - q)) (Leviathan; SpecInfer's and
  ParallelSpec's algorithm 1 for several children).
- Typical (Medusa): accept x where p(x) > min(eps, delta exp(-H(p))), which changes the
  distribution.

Each asks only for the rows that it visits. A path is node ids, root first; the bonus is the token
after it.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from spec_runtime.trees.tree import TokenTree


def by_target_sampling(tree: TokenTree, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Draws the target's own token at a node and walks to the child that carries it, if one does.

    `draw(node)` is a draw from p at that node (greedy: the argmax), the same whatever the tree is.
    Every emitted token is such a draw, so no tree changes the text, not even one that follows the
    noise of the draws (trees/coupling.py).

    Returns the path and the bonus, which is the first draw that no child carries.

    Example: root 5 with children 7 and 8; the target draws 8 at the root and 3 at node 2:
    path [0, 2], bonus 3, committed tokens 8 and 3.
    """
    path = [0]
    while True:
        token = draw(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return path, token
        path.append(child)


def by_rejection(
    tree: TokenTree, p: Callable[[int], np.ndarray], uniform: Callable[[], float]
) -> tuple[list[int], int]:
    """Tries the drawn children of a node in the order of their draws; draws the bonus from what the
    refused ones leave of p.

    `p(node)` is the target's distribution f64[V] after that node, `uniform()` a fresh draw from
    [0, 1). The result follows p exactly if every node's `tree.draws` were drawn as they say and
    without looking at p. Children that were not drawn (of a deterministic tree, or of prompt
    lookup) are point masses; for them the rule is target sampling on the rest of p.

    Returns the path and the bonus.

    Example: q = (.5, .5), p = (.8, .2), one draw. Token 0 is always accepted, token 1 with
    probability .4; if it is not, norm(max(0, p - q)) = (1, 0) makes 0 the bonus: .5 + .3 = .8.
    """
    path = [0]
    while True:
        node = path[-1]
        child, p_V = _try_drawn(tree, node, p(node), uniform)
        if child is None:
            token = _pick(p_V, uniform())
            child = tree.child(node, token)
            if child is None:
                return path, token
        path.append(child)


def _try_drawn(
    tree: TokenTree, node: int, p_V: np.ndarray, uniform: Callable[[], float]
) -> tuple[int | None, np.ndarray]:
    """Returns the child accepted, or None, and the rest of p."""
    draws = tree.draws.get(node)
    if draws is None:
        return None, p_V
    id_C, q_C = draws.id_C, draws.q_C
    for index in draws.order:
        token = int(id_C[index])
        # strictly less: what p excludes is never accepted
        is_accepted = uniform() * q_C[index] < p_V[token]
        if not is_accepted:
            left_V = p_V.copy()
            left_V[id_C] = np.maximum(0, p_V[id_C] - q_C)
            mass = left_V.sum()
            # p and q are the same: refused only by rounding, unless p excludes the token
            is_accepted = mass == 0 and p_V[token] > 0
        if is_accepted:
            child = tree.child(node, token)
            assert child is not None, (node, token)
            return child, p_V
        p_V = left_V / mass if mass > 0 else p_V
        if not draws.with_replacement:
            q_C = q_C.copy()
            q_C[index] = 0
            q_C /= q_C.sum() or 1  # 0 after the last candidate
    return None, p_V


def _pick(p_V: np.ndarray, u: float) -> int:
    """Returns the token at u in [0, 1) of the cumulated p, which need not sum to exactly 1."""
    ids = np.flatnonzero(p_V)
    cumulated = np.cumsum(p_V[ids])
    index = np.searchsorted(cumulated, u * cumulated[-1], side="right")
    return int(ids[min(int(index), len(ids) - 1)])


def by_typical(
    tree: TokenTree, p: Callable[[int], np.ndarray], epsilon: float, delta: float
) -> tuple[list[int], int]:
    """Accepts by Medusa's typical acceptance, which does not preserve the target's distribution.

    A node is accepted if its parent is and its token x has p(x) > min(epsilon, delta exp(-H(p)))
    at the parent; p(node) f64[V] is the processed distribution and H its entropy in nats. The
    longest accepted path wins, among equally long ones the likeliest, and its bonus is the argmax
    of p. Returns the path and the bonus.

    Medusa's "greedy first token" is that bonus: it is the root of the next tree, committed
    already, so a child of the root has to pass the test like any other node.

    Example: p = (.6, .3, .1) has H = .9 and, with epsilon .2 and delta .45, the threshold .18:
    children 0 and 1 pass, child 2 does not.
    """
    p = cache(p)  # that of the last node is asked for twice
    level, best = [(0.0, 0)], 0  # (log probability of the path, node)
    while level:
        _, best = max(level, key=lambda entry: entry[0])  # the first of equals
        passed = []
        for score, node in level:
            if children := tree.children(node):
                p_V = p(node)
                threshold = _typical_threshold(p_V, epsilon, delta)
                shares = [(float(p_V[tree.token_N[child]]), child) for child in children]
                passed += [(score + math.log(x), child) for x, child in shares if x > threshold]
        level = passed
    return tree.path(best), int(p(best).argmax())


def _typical_threshold(p_V: np.ndarray, epsilon: float, delta: float) -> float:
    p = p_V.astype(np.float32)  # ten times as fast over V as float64's log
    p = p[p > 0]  # some that float64 still holds are 0 by now, whose log would be infinite
    entropy = -float(p @ np.log(p))
    return min(epsilon, delta * math.exp(-entropy))
