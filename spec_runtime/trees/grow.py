"""Grows token trees from a drafter's candidates, by the rule that a budget gives."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_runtime.trees import payoff
from spec_runtime.trees.budget import Budget, DrawRule
from spec_runtime.trees.tree import Draws, TokenTree


class TreeBuilder:
    """Grows a tree node by node; an equal sibling is found again, not added twice."""

    def __init__(self, root_token: int) -> None:
        self.tokens = [root_token]
        self.parents = [0]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def has(self, parent: int, token: int) -> bool:
        return (parent, token) in self._child

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` carrying `token`, made if it is not there yet."""
        node = self._child.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def build(
        self,
        log_probs: Sequence[float] | None = None,
        draws: Mapping[int, Draws] | None = None,
    ) -> TokenTree:
        """`log_probs`: of the path to each node, if known."""
        log_prob_N = None if log_probs is None else np.array(log_probs, np.float64)
        tokens, parents = np.array(self.tokens, np.int64), np.array(self.parents, np.int64)
        return TokenTree(tokens, parents, log_prob_N, draws or {})


def grow(
    root_token: int, token_KC: np.ndarray, log_prob_KC: np.ndarray, budget: Budget
) -> TokenTree:
    """The most probable paths of K independent guesses, best first.

    Row k of `token_KC` i64[K, C] holds the candidates at depth k + 1, best first, with their
    `log_prob_KC` f32[K, C]; a path's probability is the product over its depths. Nodes come in
    order of falling probability, which also puts parents first.

    Example: candidates [[7, 8], [9, 6]] of probability [[.6, .3], [.5, .1]], 4 nodes:
    7 (.6), then 8 (.3) or 7-9 (.3), the one found first winning the tie.
    """
    tree = TreeBuilder(root_token)
    max_depth = len(token_KC) if budget.max_depth is None else min(len(token_KC), budget.max_depth)
    if max_depth == 0:
        return tree.build()
    if not budget.is_grown:
        level = itertools.count()

        def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
            k = [next(level)] * (len(nodes) - first)
            return token_KC[k], log_prob_KC[k]

        return _grow_given(root_token, expand, budget, max_depth, budget.max_nodes)
    token, log_prob = token_KC.tolist(), log_prob_KC.tolist()
    floor = math.log(budget.min_probability) if budget.min_probability > 0 else -math.inf
    num_candidates = len(token[0])
    # an entry: (-log probability, ticket, depth index, rank, parent node, parent log probability)
    heap = [(-log_prob[0][0], 0, 0, 0, 0, 0.0)]
    ticket = 0
    path_log_prob = [0.0]
    while heap and len(tree) < budget.max_nodes:
        cost, _, k, rank, parent, parent_log_prob = heapq.heappop(heap)
        if -cost < floor or cost == math.inf:
            break
        node = tree.add(parent, token[k][rank])
        if node == len(path_log_prob):
            path_log_prob.append(-cost)
        if rank + 1 < num_candidates:
            sibling = -(parent_log_prob + log_prob[k][rank + 1])
            ticket += 1
            heapq.heappush(heap, (sibling, ticket, k, rank + 1, parent, parent_log_prob))
        if k + 1 < max_depth:
            ticket += 1
            heapq.heappush(heap, (cost - log_prob[k + 1][0], ticket, k + 1, 0, node, -cost))
    return _paying(tree.build(path_log_prob), budget)


def grow_by_levels(
    root_token: int,
    expand: Callable[[TreeBuilder, int], tuple[np.ndarray, np.ndarray]],
    budget: Budget,
    num_levels: int,
    max_width: int,
) -> TokenTree:
    """The most probable paths of a drafter that reads its own guesses: a level at a time, then the
    best nodes of all levels (EAGLE-2's expansion and rerank).

    `expand(nodes, first)` runs the drafter at nodes `first` … of the tree grown so far (the root
    alone at first) and returns their candidates, best first: token ids i64[n, C] and
    log-probabilities f32[n, C]. Only nodes that would be kept so far are expanded, at most
    `max_width` a level; so many levels are run, fewer when none is left or no more can pay. Of a
    static tree all inner nodes are expanded (EAGLE-1).
    """
    max_depth = num_levels if budget.max_depth is None else min(num_levels, budget.max_depth)
    if not budget.is_grown:
        return _grow_given(root_token, expand, budget, max_depth, max_width)
    floor = math.log(budget.min_probability) if budget.min_probability > 0 else -math.inf
    expanded = TreeBuilder(root_token)
    log_prob = [0.0]  # of each expanded node's path
    pool: list[tuple[float, int, int, int]] = []  # (-log probability, ticket, parent, token)
    first = num_run = 0
    for depth in range(1, max_depth + 1):
        if first == len(expanded) or budget.max_nodes == 1:
            break
        id_NC, log_prob_NC = expand(expanded, first)
        num_run = depth
        num_before = len(pool)
        rows = zip(id_NC.tolist(), log_prob_NC.tolist(), strict=True)
        for node, (ids, values) in enumerate(rows, first):
            for token, value in zip(ids, values, strict=True):
                path = log_prob[node] + value
                if path >= floor and path > -math.inf:
                    pool.append((-path, len(pool), node, token))
        first = len(expanded)
        if depth < max_depth:
            kept = heapq.nsmallest(budget.max_nodes - 1, pool)
            level = [entry for entry in kept if entry[1] >= num_before][:max_width]
            if budget.step_ms and not payoff.another_level_pays(
                _worth(kept, budget),
                _worth(level, budget),
                budget.step_ms,
                budget.level_ms,
                num_run=depth,
                num_left=max_depth - depth,
            ):
                break
            for cost, _, parent, token in level:
                expanded.add(parent, token)
                log_prob.append(-cost)
    tree, new_id, path_log_prob = TreeBuilder(root_token), {0: 0}, [0.0]
    for cost, _, parent, token in heapq.nsmallest(budget.max_nodes - 1, pool):
        node = tree.add(new_id[parent], token)
        if node == len(path_log_prob):
            path_log_prob.append(-cost)
        if expanded.has(parent, token):
            new_id[expanded.add(parent, token)] = node
    return _paying(tree.build(path_log_prob), budget, num_run)


def _worth(entries: list[tuple[float, int, int, int]], budget: Budget) -> np.ndarray:
    return payoff.probabilities([-cost for cost, *_ in entries], budget.reliability)


def _paying(tree: TokenTree, budget: Budget, num_levels: int = 1) -> TokenTree:
    """Its best prefix, by the budget's times if it has any; nodes are in order of falling
    probability."""
    if not budget.step_ms or tree.num_nodes == 1:
        return tree
    assert tree.log_prob_N is not None, "a tree without probabilities"
    worth_N = payoff.probabilities(tree.log_prob_N[1:], budget.reliability)
    extra_ms = (num_levels - 1) * budget.level_ms
    n, _ = payoff.best_size(worth_N, budget.step_ms, extra_ms)
    return TokenTree(tree.token_N[:n], tree.parent_N[:n], tree.log_prob_N[:n])


def _grow_given(
    root_token: int,
    expand: Callable[[TreeBuilder, int], tuple[np.ndarray, np.ndarray]],
    budget: Budget,
    max_depth: int,
    max_width: int,
) -> TokenTree:
    """A tree whose nodes the budget gives; `expand` is called as by `grow_by_levels`."""
    if budget.draw is not None:
        return _grow_drawn(root_token, expand, budget, budget.draw, max_depth, max_width)
    if budget.truth is not None:
        return _grow_along(root_token, expand, budget.truth[:max_depth])
    assert budget.paths is not None
    return _grow_static(root_token, expand, budget.paths, max_depth)


def _grow_along(
    root_token: int,
    expand: Callable[[TreeBuilder, int], tuple[np.ndarray, np.ndarray]],
    truth: Sequence[int],
) -> TokenTree:
    """All candidates, best first, behind the root and each token of `truth`, until one of these is
    not among them."""
    tree, chain = TreeBuilder(root_token), TreeBuilder(root_token)
    log_prob, parent = [0.0], 0
    for depth, true_token in enumerate(truth):
        id_NC, log_prob_NC = expand(chain, depth)
        for token, value in zip(id_NC[0].tolist(), log_prob_NC[0].tolist(), strict=True):
            if tree.add(parent, token) == len(log_prob):
                log_prob.append(log_prob[parent] + value)
        if not tree.has(parent, true_token):
            break
        parent = tree.add(parent, true_token)
        chain.add(depth, true_token)
    return tree.build(log_prob)


def _grow_static(
    root_token: int,
    expand: Callable[[TreeBuilder, int], tuple[np.ndarray, np.ndarray]],
    paths: tuple[tuple[int, ...], ...],
    max_depth: int,
) -> TokenTree:
    """The nodes of `paths` down to `max_depth`; `expand` is called as by `grow_by_levels`."""
    tree, expanded = TreeBuilder(root_token), TreeBuilder(root_token)
    node_of: dict[tuple[int, ...], int] = {(): 0}
    row_of = dict(node_of)  # path -> node in `expanded`, which holds no leaf
    inner = {path[:-1] for path in paths}
    by_depth = sorted((path for path in paths if len(path) <= max_depth), key=len)
    first = 0
    for _, level in itertools.groupby(by_depth, key=len):
        id_NC, _ = expand(expanded, first)
        begin, first = first, len(expanded)
        for path in level:
            parent = path[:-1]
            token = int(id_NC[row_of[parent] - begin, path[-1]])
            node_of[path] = tree.add(node_of[parent], token)
            if path in inner:
                row_of[path] = expanded.add(row_of[parent], token)
    return tree.build()


def _grow_drawn(
    root_token: int,
    expand: Callable[[TreeBuilder, int], tuple[np.ndarray, np.ndarray]],
    budget: Budget,
    rule: DrawRule,
    max_depth: int,
    max_width: int,
) -> TokenTree:
    """Children drawn level by level down to `max_depth`; `expand` is called as by
    `grow_by_levels`, on the first `max_width` nodes of a level.

    Whether a node gets children, and how many are drawn, may depend on everything but these draws
    themselves. Equal draws share a node.
    """
    tree, expanded = TreeBuilder(root_token), TreeBuilder(root_token)
    draws: dict[int, Draws] = {}
    level, first = [0], 0  # nodes of `tree`; in `expanded`, which holds no leaf, from `first` on
    for width in rule.widths[:max_depth]:
        if not level or len(tree) >= budget.max_nodes:
            break
        id_NC, log_prob_NC = expand(expanded, first)
        rows = list(enumerate(level, first))
        level = []
        for row, node in rows:
            room = min(width, budget.max_nodes - len(tree))
            drawn = rule.draw(id_NC[row - first], log_prob_NC[row - first], room) if room else None
            if drawn is None:
                continue
            draws[node] = drawn
            for token in dict.fromkeys(drawn.id_C[list(drawn.order)].tolist()):
                child = tree.add(node, token)
                if len(level) < max_width:
                    level.append(child)
                    expanded.add(row, token)
        first += len(rows)
    return tree.build(draws=draws)


def merge(a: TokenTree, b: TokenTree, max_nodes: int) -> TokenTree:
    """Union of two trees with the same root: all of `a`, then as much of `b` as fits."""
    assert a.token_N[0] == b.token_N[0], (a.token_N[0], b.token_N[0])
    # leaving out a draw for want of room would not be lossless
    assert not a.draws, a.draws
    assert not b.draws, b.draws
    tree = TreeBuilder(int(a.token_N[0]))
    for source in (a, b):
        new_id = {0: 0}
        pairs = zip(source.token_N.tolist()[1:], source.parent_N.tolist()[1:], strict=True)
        for node, (token, parent) in enumerate(pairs, 1):
            if parent not in new_id:
                continue  # its parent did not fit
            if len(tree) < max_nodes or tree.has(new_id[parent], token):
                new_id[node] = tree.add(new_id[parent], token)
    return tree.build()
