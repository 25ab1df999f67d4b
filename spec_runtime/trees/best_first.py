"""Grows a tree best path first from children that are asked for node by node.

Serves candidates that cost next to nothing, so that each node may have its own. grow.py grows trees
from a drafter's rows of candidates.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.grow import TreeBuilder, cut
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import Outlook

Place = TypeVar("Place")  # what the caller knows of a node


def grow_best_first(
    root_token: int,
    root: Place,
    children: Callable[[Place, float], Iterable[tuple[int, float]]],
    enter: Callable[[Place, int], Place],
    budget: Budget,
    num_levels: int = 1,
) -> TokenTree:
    """Returns the likeliest paths, as many as the budget's growth says. A growth that is not
    `Grown` counts as one without limits. `num_levels` of drafting were run before.

    `children(place, least)` gives different tokens, each with its probability after that place;
    those below `least` may be missing. `enter(place, token)` gives the place of such a child. Nodes
    come in order of falling probability; of equal ones the first that was found comes first. A
    budget with a coupling turns the probabilities into those of being drawn.
    """
    tree, log_prob = TreeBuilder(root_token), [0.0]
    growth = budget.growth if isinstance(budget.growth, Grown) else Grown()
    min_probability, outlook = growth.min_probability, None
    if growth.terms is not None:
        outlook = Outlook(growth.terms, growth.reliability, num_levels)
    max_depth = math.inf if budget.max_depth is None else budget.max_depth
    coupling = budget.coupling
    # an entry: (- probability of the path, ticket, depth, parent node, parent's place, token)
    heap: list[tuple[float, int, int, int, Place, int]] = []
    ticket, node, depth, place, path = 0, 0, 0, root, 1.0
    while True:
        if depth < max_depth and len(tree) < budget.max_nodes:
            if coupling is None:
                found = children(place, min_probability / path)
            else:
                found = coupling.probabilities(depth + 1, children(place, 0.0))
            for token, probability in found:
                worth = path * probability
                if worth >= min_probability and worth > 0.0:
                    heapq.heappush(heap, (-worth, ticket, depth + 1, node, place, token))
                    ticket += 1
        if not heap or len(tree) >= budget.max_nodes:
            break
        if outlook is not None and not outlook.add(-heap[0][0]):
            break
        cost, _, depth, parent, place, token = heapq.heappop(heap)
        node, path = tree.add(parent, token), -cost
        log_prob.append(math.log(path))
        place = enter(place, token)
    return cut(tree.build(log_prob), growth, num_levels)
