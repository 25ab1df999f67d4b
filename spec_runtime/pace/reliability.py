"""Says how often the paths of a drafter's trees are accepted, and what recorded trees would have
given at other costs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from spec_runtime.pace.costs import Costs, Gain
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.grow import cut
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import Terms

# a path probability falls into one of these bins; the ratio of neighbours is about 1.4
EDGES = (*(0.7**k for k in range(20)), 0.0)

Points = tuple[tuple[float, float], ...]  # see Grown.reliability
Seen = tuple[TokenTree, list[int]]  # a tree and the path in it (node ids) that came true


def observed(seen: Sequence[Seen]) -> Points:
    """Returns the reliability of the trees of a run; empty if they have no probabilities."""
    count_B, predicted_B, hit_B = np.zeros((3, len(EDGES)))
    for tree, path in seen:
        if tree.log_prob_N is None:
            continue
        p_N = np.exp(tree.log_prob_N[1:])
        bin_N = np.searchsorted(-np.array(EDGES), -p_N)
        np.add.at(count_B, bin_N, 1)
        np.add.at(predicted_B, bin_N, p_N)
        np.add.at(hit_B, bin_N, np.isin(np.arange(1, tree.num_nodes), path))
    used = count_B > 0
    rows = np.stack([predicted_B, hit_B, count_B * count_B], axis=1)[used] / count_B[used, None]
    return monotone((p, hit, n) for p, hit, n in rows.tolist())


def monotone(rows: Iterable[tuple[float, float, float]]) -> Points:
    """Returns rows (predicted, observed, weight) as points (predicted, observed) ascending in both:
    neighbours in the wrong order get their common mean.

    Example: (.1, .3, 1), (.2, .1, 3) -> (.1, .15), (.2, .15).
    """
    blocks: list[tuple[float, float, list[float]]] = []
    by_predicted = {min(row[0], 1.0): row for row in rows if row[0] > 0 and row[2] > 0}
    for predicted, (_, observed, weight) in sorted(by_predicted.items()):
        block = (observed, weight, [predicted])
        while blocks and blocks[-1][0] >= block[0]:
            seen, w, members = blocks.pop()
            total = w + block[1]
            block = ((seen * w + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    return tuple((p, seen) for seen, _, members in blocks for p in members)


def replayed(seen: Sequence[Seen], budget: Budget, costs: Costs) -> tuple[float, Gain]:
    """Returns the nodes of a tree and the gain that recorded trees would have with this budget,
    cut by their worth at these costs where its growth has a reliability.

    Trees come likeliest nodes first, so that the first nodes of a larger one are the smaller one.
    """
    rate, own = 1 / costs.plain, budget.growth
    for _ in range(2):  # the first time says what rate there is
        nodes = tokens = ms = 0.0
        growth = None
        if isinstance(own, Grown) and own.reliability:
            terms = Terms(costs.step_ms(budget.max_nodes), costs.level, rate)
            growth = replace(own, terms=terms)
        for whole, path in seen:
            num_levels = max(1, int(whole.depth_N.max()))
            tree = whole.first(budget.max_nodes)
            if growth is not None and tree.log_prob_N is not None:
                tree = cut(tree, growth, num_levels)
            nodes += tree.num_nodes
            tokens += sum(node < tree.num_nodes for node in path)
            ms += costs.of(tree.num_nodes, num_levels)
        rate = max(rate, tokens / ms)
    gain = Gain(round(tokens / len(seen), 4), round(tokens * costs.plain / ms, 4))
    return nodes / len(seen), gain
