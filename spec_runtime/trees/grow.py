"""Grows token trees from a drafter's candidates, by the growth that a budget names."""

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown, RankPath, Static
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import Draws, TokenTree
from spec_runtime.trees.worth import probabilities


class TreeBuilder:
    """Collects a tree node by node; adding an equal sibling returns the node that is there."""

    def __init__(self, root_token: int) -> None:
        self.tokens = [root_token]
        self.parents = [0]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def has(self, parent: int, token: int) -> bool:
        """True if `parent` has a child that carries `token`."""
        return (parent, token) in self._child

    def add(self, parent: int, token: int) -> int:
        """Returns the child of `parent` that carries `token`; makes it if it is not there yet."""
        node = self._child.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def build(
        self, log_probs: Sequence[float] | None = None, draws: Mapping[int, Draws] | None = None
    ) -> TokenTree:
        """Returns the tree. `log_probs`: of the path to each node, if known. `draws`: of the nodes
        whose children were drawn."""
        log_prob_N = None if log_probs is None else np.array(log_probs, np.float64)
        tokens, parents = np.array(self.tokens, np.int64), np.array(self.parents, np.int64)
        return TokenTree(tokens, parents, log_prob_N, draws or {})


Level = tuple[TreeBuilder, int]  # the nodes so far, and the first that is to be expanded
Candidates = tuple[np.ndarray, np.ndarray]  # token ids i64[n, C] and log-probabilities f32[n, C]
Growing = Generator[Level, Candidates, TokenTree]  # see growing
# a guess in the pool: (-log probability of its path, its number, parent in `expanded`, token)
_Guess = tuple[float, int, int, int]


def grow(root_token: int, guesses: Guesses, budget: Budget) -> TokenTree:
    """Returns the tree of a one-pass drafter's guesses that `budget` asks for.

    A path's probability is the product over its depths, each candidate's conditioned on its own
    parent if the guesses are pairs. Nodes of a grown tree come in order of falling probability,
    which also puts parents first.

    Example: candidates [[7, 8], [9, 6]] of probability [[.6, .3], [.5, .1]] without pairs and 4
    nodes give 7 (.6), then 8 (.3) and 7-9 (.3).
    """
    growth = budget.growth
    if isinstance(growth, Grown):
        if budget.coupling is not None:
            guesses = guesses.coupled(budget.coupling)
        max_depth = _max_depth(budget, len(guesses))
        tree = _best_paths(root_token, guesses, max_depth, budget.max_nodes, growth.log_floor)
        return cut(tree, growth)
    level = itertools.count()

    def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
        return guesses.after(next(level), nodes.tokens[first:])

    return grow_by_levels(root_token, expand, budget, len(guesses), max_width=budget.max_nodes)


def grow_by_levels(
    root_token: int,
    expand: Callable[[TreeBuilder, int], Candidates],
    budget: Budget,
    num_levels: int,
    max_width: int,
) -> TokenTree:
    """Returns the tree that `growing` grows, of the candidates that `expand(nodes, first)` finds
    for the nodes of each level."""
    levels = growing(root_token, budget, num_levels, max_width)
    try:
        level = next(levels)
        while True:
            level = levels.send(expand(*level))
    except StopIteration as end:
        tree: TokenTree = end.value
        return tree


def growing(root_token: int, budget: Budget, num_levels: int, max_width: int) -> Growing:
    """Returns the tree that `budget` asks for, of a drafter that reads its own guesses and is run
    level by level.

    Yields each level to run: the tree grown so far (at first only the root), and its node from
    which on the drafter has to be run. It is sent these nodes' candidates, best first. At most
    `num_levels` levels are run, and of a grown or drawn tree at most `max_width` nodes a level.
    """
    max_depth = _max_depth(budget, num_levels)
    match budget.growth:
        case Grown() as grown:
            max_nodes, coupling = budget.max_nodes, budget.coupling
            return _grow_best(root_token, grown, max_nodes, max_depth, max_width, coupling)
        case Static(paths):
            return _grow_static(root_token, paths, max_depth)
        case Drawn() as drawn:
            return _grow_drawn(root_token, drawn, budget.max_nodes, max_depth, max_width)
        case AlongTruth(tokens):
            return _grow_along(root_token, tokens[:max_depth])


def _max_depth(budget: Budget, num_levels: int) -> int:
    return num_levels if budget.max_depth is None else min(num_levels, budget.max_depth)


def _best_paths(
    root_token: int, guesses: Guesses, max_depth: int, max_nodes: int, floor: float
) -> TokenTree:
    """Returns the likeliest paths, none below `floor`, likeliest first.

    No child is likelier than its parent, so the best paths of all depths are found exactly if each
    depth keeps as many as there are nodes to take.
    """
    width = max_nodes - 1
    if max_depth == 0 or width == 0:
        return TokenTree.root(root_token)
    num_candidates = guesses.token_KC.shape[1]
    rank_W = np.arange(min(width, num_candidates))
    cost_W = -guesses.log_prob_KC[0, : len(rank_W)].astype(np.float64)
    costs, tokens = [cost_W], [guesses.token_KC[0, : len(rank_W)]]
    parents = [np.full(len(rank_W), -1)]  # of each path the index of the one before its last node
    first = 0
    for k in range(1, max_depth):
        pair_WC = np.minimum(guesses.after_parent_KCC[k - 1][rank_W], 0.0)
        cost_P = (cost_W[:, None] - pair_WC).reshape(-1)
        best_W = cost_P.argpartition(width)[:width] if len(cost_P) > width else slice(None)
        parent_W, rank_W = np.divmod(np.arange(len(cost_P))[best_W], num_candidates)
        parents.append(parent_W + first)
        first += len(cost_W)
        cost_W = cost_P[best_W]
        costs.append(cost_W)
        tokens.append(guesses.token_KC[k][rank_W])
    cost_P = np.concatenate(costs)
    order_W = cost_P.argsort(kind="stable")[:width]  # stable: of equals the parent comes first
    cost_W = cost_P[order_W]
    order_W = order_W[(cost_W <= -floor) & (cost_W < math.inf)]
    node_P = np.zeros(len(cost_P) + 1, np.int64)  # the last entry, at -1, is the root
    node_P[order_W] = np.arange(1, len(order_W) + 1)
    return TokenTree(
        np.concatenate([[root_token], np.concatenate(tokens)[order_W]]),
        np.concatenate([[0], node_P[np.concatenate(parents)[order_W]]]),
        np.concatenate([[0.0], -cost_P[order_W]]),
    )


def _grow_best(
    root_token: int,
    growth: Grown,
    max_nodes: int,
    max_depth: int,
    max_width: int,
    coupling: Coupling | None,
) -> Growing:
    """Returns the most probable paths: expands a level at a time, then takes the best nodes of all
    levels (EAGLE-2's expansion and rerank).

    Only nodes that would be kept so far are expanded, at most `max_width` a level. Fewer levels
    than `max_depth` are run if no node is left to expand or if no further level can pay. With a
    coupling, probabilities are those of being drawn.
    """
    expanded = TreeBuilder(root_token)
    log_prob = [0.0]  # of each expanded node's path
    pool: list[_Guess] = []
    first = num_run = 0
    for depth in range(1, max_depth + 1):
        if first == len(expanded) or max_nodes == 1:
            break
        num_before = len(pool)
        id_NC, log_prob_NC = yield expanded, first
        if coupling is not None:
            log_prob_NC = coupling.log_probs(coupling.noise_at(depth, id_NC), log_prob_NC)
        _guess(pool, id_NC, log_prob_NC, first, log_prob, growth.log_floor)
        num_run, first = depth, len(expanded)
        if depth == max_depth:
            break
        kept = heapq.nsmallest(max_nodes - 1, pool)
        level = [guess for guess in kept if guess[1] >= num_before][:max_width]
        if growth.terms is not None and not growth.terms.is_another_level_worth_it(
            _probabilities(kept, growth), _probabilities(level, growth), depth, max_depth - depth
        ):
            break
        for cost, _, parent, token in level:
            expanded.add(parent, token)
            log_prob.append(-cost)
    best = heapq.nsmallest(max_nodes - 1, pool)
    return cut(_rerank(root_token, best, expanded), growth, num_run)


def _guess(
    pool: list[_Guess],
    id_NC: np.ndarray,
    log_prob_NC: np.ndarray,
    first: int,
    log_prob: list[float],
    floor: float,
) -> None:
    """Adds to `pool` the candidates of the nodes from `first` on whose paths are not below `floor`.

    `log_prob`: of the path to each expanded node. No candidate is likelier than its parent,
    whatever a drafter says, and none whose log-probability is not a number is added.
    """
    rows = zip(id_NC.tolist(), np.minimum(log_prob_NC, 0.0).tolist(), strict=True)
    for node, (ids, values) in enumerate(rows, first):
        for token, value in zip(ids, values, strict=True):
            path = log_prob[node] + value
            if path >= floor and path > -math.inf:
                pool.append((-path, len(pool), node, token))


def _rerank(root_token: int, guesses: list[_Guess], expanded: TreeBuilder) -> TokenTree:
    """Returns the tree of these guesses, best first; their parents are nodes of `expanded`."""
    tree, new_id, path_log_prob = TreeBuilder(root_token), {0: 0}, [0.0]
    for cost, _, parent, token in guesses:
        node = tree.add(new_id[parent], token)
        if node == len(path_log_prob):
            path_log_prob.append(-cost)
        if expanded.has(parent, token):
            new_id[expanded.add(parent, token)] = node
    return tree.build(path_log_prob)


def _probabilities(guesses: list[_Guess], growth: Grown) -> np.ndarray:
    return probabilities([-cost for cost, *_ in guesses], growth.reliability)


def cut(tree: TokenTree, growth: Grown, num_levels: int = 1) -> TokenTree:
    """Cuts the tree where more nodes are not worth their time by the growth's terms, if it has any.

    Nodes are in order of falling probability, so the best tree is one of the prefixes. `num_levels`
    of drafting were run.
    """
    if growth.terms is None or tree.num_nodes == 1:
        return tree
    assert tree.log_prob_N is not None, "a tree without probabilities"
    accepted_N = probabilities(tree.log_prob_N[1:], growth.reliability)
    return tree.first(growth.terms.best_size(accepted_N, num_levels)[0])


def _grow_along(root_token: int, truth: Sequence[int]) -> Growing:
    """Returns all candidates, best first, after the root and each token of `truth`, down to the
    first of these that is not among them."""
    tree, chain = TreeBuilder(root_token), TreeBuilder(root_token)
    log_prob, parent = [0.0], 0
    for depth, true_token in enumerate(truth):
        id_NC, log_prob_NC = yield chain, depth
        for token, value in zip(id_NC[0].tolist(), log_prob_NC[0].tolist(), strict=True):
            if tree.add(parent, token) == len(log_prob):
                log_prob.append(log_prob[parent] + value)
        if not tree.has(parent, true_token):
            break
        parent = tree.add(parent, true_token)
        chain.add(depth, true_token)
    return tree.build(log_prob)


def _grow_static(root_token: int, paths: tuple[RankPath, ...], max_depth: int) -> Growing:
    """Returns the nodes of `paths` down to `max_depth`; expands all inner nodes (EAGLE-1). Ranks
    that the drafter has no candidates for are left out, and so are the nodes after them."""
    tree, expanded = TreeBuilder(root_token), TreeBuilder(root_token)
    node_of: dict[RankPath, int] = {(): 0}
    row_of = dict(node_of)  # path -> node in `expanded`, which holds no leaf
    inner = {path[:-1] for path in paths}
    by_depth = sorted((path for path in paths if len(path) <= max_depth), key=len)
    first = 0
    for _, level in itertools.groupby(by_depth, key=len):
        if first == len(expanded):
            break
        id_NC, _ = yield expanded, first
        begin, first = first, len(expanded)
        for path in level:
            parent = path[:-1]
            if parent not in row_of or path[-1] >= id_NC.shape[1]:
                continue
            token = int(id_NC[row_of[parent] - begin, path[-1]])
            node_of[path] = tree.add(node_of[parent], token)
            if path in inner:
                row_of[path] = expanded.add(row_of[parent], token)
    return tree.build()


def _grow_drawn(
    root_token: int, growth: Drawn, max_nodes: int, max_depth: int, max_width: int
) -> Growing:
    """Returns children drawn level by level down to `max_depth`; equal draws share a node.

    The first `max_width` nodes of a level are expanded. Acceptance by rejection is exact only if
    the choice of which nodes get children, and how many are drawn, does not depend on these very
    draws; it may depend on everything else.
    """
    tree, expanded = TreeBuilder(root_token), TreeBuilder(root_token)
    draws: dict[int, Draws] = {}
    level, first = [0], 0  # nodes of `tree`; in `expanded`, which holds no leaf, from `first` on
    for width in growth.widths[:max_depth]:
        if not level or len(tree) >= max_nodes:
            break
        id_NC, log_prob_NC = yield expanded, first
        rows = list(enumerate(level, first))
        level = []
        for row, node in rows:
            room = min(width, max_nodes - len(tree))
            drawn = (
                growth.draw(id_NC[row - first], log_prob_NC[row - first], room) if room else None
            )
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
    """Returns the union of two trees with the same root: all of `a`, then as much of `b` as fits.

    Neither tree may be drawn: leaving out a draw for want of room would not be lossless.
    """
    assert a.token_N[0] == b.token_N[0], (a.token_N[0], b.token_N[0])
    assert not a.draws, a.draws
    assert not b.draws, b.draws
    tree = TreeBuilder(int(a.token_N[0]))
    for source in (a, b):
        new_ids = [0]
        pairs = zip(source.token_N.tolist()[1:], source.parent_N.tolist()[1:], strict=True)
        for token, parent in pairs:
            if len(tree) >= max_nodes:
                break
            new_ids.append(tree.add(new_ids[parent], token))
    return tree.build()
