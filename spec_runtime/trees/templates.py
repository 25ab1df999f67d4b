"""Makes static trees: by name, by a search over accuracies, and as a bundle's manifest gives them.

A tree is written as the paths of `Static`: each node by its candidates' ranks from the root down.
Its accepted length follows from the accuracies a_k^(r), where a_k^(r) is the share of positions at
which the target's token at depth k is the drafter's guess of rank r, given that the tokens before
it were among the guesses:

    E[accepted length] = 1 + sum over nodes of prod_j a_j^(r_j)             (Medusa, section 2.3)
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from spec_runtime.bundle.manifest import BundleError, DrafterInfo
from spec_runtime.errors import UserError
from spec_runtime.trees.budget import Budget, RankPath
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses

Accuracy = Sequence[Sequence[float]]  # [k][r]: at depth k + 1, of rank r

DEFAULT_NODES = 16  # of a searched tree, root included
MAX_NODES = 1024  # no machine verifies more at once
TEMPLATES = "chain:DEPTH, cartesian:WIDTH,WIDTH,…, medusa64, eagle26, searched or searched:NODES"

# The papers' trees: how many children each inner node has. Medusa's tree of 64 nodes
# ("mc_sim_7b_63" in its repository), which its authors found by the search below, and EAGLE-1's
# tree of 26.
MEDUSA64: dict[RankPath, int] = {
    (): 10,
    **{(rank,): count for rank, count in enumerate([10, 7, 3, 2, 1, 1, 1, 1, 1, 1])},
    **{(0, rank): count for rank, count in enumerate([10, 3, 2, 1, 1, 1, 1, 1])},
    **{(1, 0): 2, (2, 0): 1, (0, 0, 0): 2},
}
EAGLE26: dict[RankPath, int] = {
    (): 4,
    **{(rank,): count for rank, count in enumerate([3, 2, 2, 1])},
    **{(0, rank): count for rank, count in enumerate([3, 2, 2])},
    **{(1, 0): 1, (0, 0, 0): 3, (0, 0, 0, 0): 2},
}


def chain(depth: int) -> tuple[RankPath, ...]:
    """Returns the best guess after the best guess: 2 -> (0,), (0, 0)."""
    return tuple((0,) * d for d in range(1, depth + 1))


def cartesian(widths: Sequence[int]) -> tuple[RankPath, ...]:
    """Returns the `widths[k]` best guesses of depth k + 1 after every node above: [2, 1] ->
    (0,), (1,), (0, 0), (1, 0)."""
    depths = range(1, len(widths) + 1)
    return tuple(path for d in depths for path in itertools.product(*map(range, widths[:d])))


def from_counts(children: Mapping[RankPath, int]) -> tuple[RankPath, ...]:
    """Returns the tree whose inner nodes have this many children: {(): 2, (0,): 1} ->
    (0,), (0, 0), (1,)."""
    return tuple(sorted((*path, r) for path, count in children.items() for r in range(count)))


def searched(accuracy: Accuracy, num_nodes: int) -> tuple[RankPath, ...]:
    """Returns the tree of `num_nodes` nodes, root included, with the longest expected accepted
    length.

    The tree is grown greedily by the node of the highest product, which is exact because no path is
    likelier than its beginning. It is smaller if all nodes that are left were never right.
    """
    accuracy_KC = np.array(accuracy, np.float64)
    rank_KC = np.argsort(-accuracy_KC, axis=1, kind="stable")
    with np.errstate(divide="ignore"):
        log_KC = np.log(np.take_along_axis(accuracy_KC, rank_KC, axis=1))
    tree = grow(0, Guesses(rank_KC, log_KC), Budget(num_nodes))  # its tokens are ranks
    nodes = range(1, tree.num_nodes)
    return tuple(tuple(tree.token_N[tree.path(node)[1:]].tolist()) for node in nodes)


def expected_accepted_length(paths: Sequence[RankPath], accuracy: Accuracy) -> float:
    """Returns the committed tokens per verify step, bonus included, by the formula above."""
    return 1 + sum(math.prod(accuracy[k][r] for k, r in enumerate(path)) for path in paths)


def parse_tree(
    text: str, accuracy: Accuracy | None = None, num_nodes: int = DEFAULT_NODES
) -> tuple[RankPath, ...]:
    """Returns the static tree that `text` names, one of TEMPLATES.

    `accuracy` and `num_nodes` are for "searched". Raises UserError for any other text, for a tree
    of more than MAX_NODES nodes, and for "searched" without accuracies.

    >>> parse_tree("cartesian:2,1")
    ((0,), (1,), (0, 0), (1, 0))
    """
    name, colon, numbers = text.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", numbers):
        raise UserError(f"got tree {text!r:.80}, expected one of {TEMPLATES}")
    match name, [int(number) for number in numbers.split(",") if number]:
        case "chain", [depth] if depth < MAX_NODES:
            return chain(depth)
        case "cartesian", [_, *_] as widths if sum(accumulate(widths, mul)) < MAX_NODES:
            return cartesian(widths)
        case "medusa64", []:
            return from_counts(MEDUSA64)
        case "eagle26", []:
            return from_counts(EAGLE26)
        case "searched", [] | [_] as number:
            if accuracy is None:
                raise UserError(
                    "got tree searched for a drafter without calibration: run spec-export "
                    "calibrate first"
                )
            return searched(accuracy, min(*number, MAX_NODES) if number else num_nodes)
        case _:
            raise UserError(
                f"got tree {text!r:.80}, expected one of {TEMPLATES}, of {MAX_NODES} nodes at most"
            )


def paths_of(entry: DrafterInfo, num_nodes: int = DEFAULT_NODES) -> tuple[RankPath, ...] | None:
    """Returns the static tree of a bundle's drafter, or None if its trees are grown.

    The manifest's `trees` give it as "paths", or as "template" by its name. A searched template has
    the manifest's max_nodes nodes, or `num_nodes` if that key is missing; until the drafter has a
    calibration to search by, its trees are grown. Raises BundleError for a tree that is not valid.
    """
    paths, template = entry.trees.get("paths"), entry.trees.get("template")
    if template is not None:
        if paths is not None:
            raise BundleError(f"drafter {entry.name!r}: got trees paths and template, expected one")
        accuracy = entry.calibration["accuracy"] if entry.calibration else None
        if accuracy is None and str(template).startswith("searched"):
            return None
        size = entry.trees.get("max_nodes", num_nodes)
        try:
            paths = [list(path) for path in parse_tree(f"{template!s:.80}", accuracy, size)]
        except UserError as error:
            raise BundleError(f"drafter {entry.name!r}: {error}") from None
    if paths is None:
        return None
    top_k = entry.config.get("top_k", math.inf)
    is_list = isinstance(paths, list) and all(isinstance(path, list) for path in paths)
    if is_list and max(len(paths), *map(len, paths), 0) >= MAX_NODES:
        raise BundleError(
            f"drafter {entry.name!r}: got {len(paths)} trees paths, expected fewer than "
            f"{MAX_NODES}, and none as deep"
        )
    if not is_list or not all(type(r) is int and r < top_k for path in paths for r in path):
        raise BundleError(
            f"drafter {entry.name!r}: got trees paths {paths!r:.80}, expected lists of ranks "
            f"below its top_k, {top_k}"
        )
    return tuple(tuple(path) for path in paths)
