"""Hands out the rows of a pass that several lanes share, by what they are worth.

With L lanes, drafted nodes on paths of probability P_1 ≥ P_2 ≥ …, whoever drafted them, and a cycle
of drafting and one pass that takes t(n) seconds with n rows, k nodes commit

    rate(k) = (L + Σ_{i≤k} P_i) / t(L + k)

tokens a second in expectation (trees/payoff.py has the same for one lane). The nodes up to the best
k stay in their trees. What a pass takes is learnt from the passes that were run.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from spec_runtime.trees.tree import TokenTree

LEARNT_PASSES = 12  # which take all nodes, half of them or none, in turn, to learn what they cost
EXPLORING = 64  # of so many passes one takes all nodes, to learn what they cost now
COST_WEIGHT = 1 / 32  # of the newest pass in what a row costs
LEVEL_WEIGHT = 1 / 8  # the same of the mean pass, which changes with every context
WEIGHT = 1 / 16  # of the newest step in the other averages
TRUST_WEIGHT = 1 / 64  # of the newest pass in what a probability is worth
LARGEST_TRUST = 2.0  # the smallest is its inverse
PROBE_STEPS = 4  # drafts after a rest before they are judged
MARGIN = 1.25  # what a draft has to be worth, over its price, whose parts are known roughly
FIRST_REST, LONGEST_REST = 32, 256  # steps without a draft; each rest after a failed probe doubles
TRIAL = 16  # of so many calls one drafts, whatever became of others' drafts
SHARED_ROWS = 32  # of all trees that lanes draft for one pass


class Line:
    """Fits seconds = level + slope · (rows - mean) to the passes seen, the newest counting most.

    Each pass moves the level by its error, and the slope by its error times its distance from the
    mean, so that passes of one size change the level only. One slow pass counts as twice as slow as
    expected at most.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._mean = self._variance = self._level = self._slope = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Takes in a pass."""
        self.num_seen += 1
        if self.num_seen == 1:
            self._mean, self._level = float(rows), seconds
            return
        weight, distance = max(COST_WEIGHT, 1 / self.num_seen), rows - self._mean
        error = min(seconds - float(self.seconds(rows)), self._level)
        self._variance += weight * (distance * distance - self._variance)
        self._slope += weight * error * distance / max(1.0, self._variance)
        self._mean += weight * distance
        self._level += weight * self._slope * distance + max(LEVEL_WEIGHT, weight) * error
        # a further row costs something, and no more than those that there are
        self._slope = min(max(0.0, self._slope), self._level / self._mean)

    def seconds(self, rows: np.ndarray | int) -> np.ndarray:
        """Returns f64: what passes with so many rows take."""
        distance = np.asarray(rows, np.float64) - self._mean
        return np.maximum(0.0, self._level + self._slope * distance)


class Gain:
    """Says whether drafting pays for one lane, and lets it rest where it does not.

    `tokens` is what a draft of any lane had accepted lately, where the average begins; None where
    that is not known, and the first drafts tell.
    """

    def __init__(self, tokens: float | None = None) -> None:
        self._tokens = tokens
        self._rest, self._next_rest = 0, FIRST_REST
        self._probe = PROBE_STEPS if tokens is None else 0

    @property
    def is_resting(self) -> bool:
        return self._rest > 0

    def add(self, num_accepted: int, price: float) -> None:
        """Takes in a step: what was accepted of its draft, and how many tokens all lanes would have
        committed in the time that draft and nodes took."""
        if self.is_resting:
            self._rest -= 1
            self._probe = PROBE_STEPS
            return
        tokens = num_accepted if self._tokens is None else self._tokens
        self._tokens = tokens + WEIGHT * (num_accepted - tokens)
        self._probe = max(0, self._probe - 1)
        self.judge(price)

    def judge(self, price: float, rest: int = 0) -> None:
        """Begins a rest, of at least so many steps, if drafting does not pay at this price."""
        if self._probe or self._tokens is None:
            return
        if self._tokens >= MARGIN * price:
            self._next_rest = FIRST_REST
        else:
            self._rest, self._tokens = max(rest, self._next_rest), None
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)


class RowBudget:
    """Cuts the trees of lanes that share a pass, and learns from the pass what rows cost."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}  # by number of lanes
        self._expected = self._accepted = 1.0  # of granted nodes, a pass
        self._rate = 0.0  # tokens a second
        self._num_begun = 0  # calls
        self._prices: dict[int, float] = {}  # of a draft, by number of lanes
        self._gains: dict[int, float] = {}  # the drafted tokens that it had accepted
        self._host_seconds = {False: 0.0003, True: 0.001}  # of a lane's step, with a draft: True

    def line(self, num_lanes: int) -> Line:
        """Returns what passes with so many lanes take."""
        return self._lines.get(num_lanes, Line())

    def most_rows(self, num_lanes: int) -> int:
        """Returns how many nodes each of so many lanes may draft, the root among them."""
        return max(2, SHARED_ROWS // num_lanes)

    def sizes(
        self, trees: Sequence[TokenTree], num_lanes: int, num_rows: int, seconds: float
    ) -> list[int]:
        """Returns how many of each tree's first nodes a pass over them should have, which has
        `num_rows` other rows of trees, so many lanes in all, and prompts that take `seconds`."""
        line = self.line(num_lanes)
        worths = [self._worth(tree) for tree in trees]
        whole = [tree.num_nodes for tree in trees]
        if line.num_seen < LEARNT_PASSES:
            return [whole, [(n + 1) // 2 for n in whole], [1] * len(whole)][line.num_seen % 3]
        if line.num_seen % EXPLORING == 0:
            return whole
        if not trees:
            return []
        falling = -np.sort(-np.concatenate(worths))
        tokens = num_lanes + np.concatenate([[0.0], np.cumsum(falling)])
        pass_seconds = line.seconds(num_rows + len(trees) + np.arange(len(tokens)))
        seconds += num_lanes * self._host_seconds[True]
        best = int((tokens / np.maximum(pass_seconds + seconds, 1e-9)).argmax())
        least = falling[best - 1] if best else np.inf
        return [1 + int((worth >= least).sum()) for worth in worths]

    def add(self, num_lanes: int, num_rows: int, seconds: float) -> None:
        """Takes in what a pass over trees took; the first with so many lanes opens their graph."""
        if num_lanes in self._lines:
            self._lines[num_lanes].add(num_rows, seconds)
        else:
            self._lines[num_lanes] = self._nearest(num_lanes)

    def _nearest(self, num_lanes: int) -> Line:
        """Returns a copy of the line of nearly as many lanes, where one has been learnt: its rows
        cost much the same, and its trees need not be tried again."""
        learnt = [n for n, line in self._lines.items() if line.num_seen >= LEARNT_PASSES]
        if not learnt:
            return Line()
        return copy(self._lines[min(learnt, key=lambda n: abs(n - num_lanes))])

    def add_cycle(self, num_tokens: int, seconds: float) -> None:
        """Takes in how many tokens all lanes committed from one pass to the next."""
        if seconds > 0:
            self._rate += WEIGHT * (num_tokens / seconds - self._rate)

    def add_host(self, seconds: float, is_drafting: bool) -> None:
        """Takes in what a lane's step took besides the pass, with or without a draft."""
        before = self._host_seconds[is_drafting]
        self._host_seconds[is_drafting] += WEIGHT * (seconds - before)

    def add_step(self, tree: TokenTree, num_accepted: int) -> None:
        """Takes in how many nodes of a granted tree were accepted."""
        if tree.num_nodes > 1 and tree.log_prob_N is not None:
            expected = float(np.exp(tree.log_prob_N[1:]).sum())
            self._expected += TRUST_WEIGHT * (expected - self._expected)
            self._accepted += TRUST_WEIGHT * (num_accepted - self._accepted)

    def new_gain(self, num_lanes: int) -> Gain:
        """Returns what judges the drafts of a call that begins beside others. Where drafts did not
        pay lately, it rests for long, but for one call of TRIAL."""
        self._num_begun += 1
        gain = Gain(None if self._num_begun % TRIAL == 0 else self._gains.get(num_lanes))
        gain.judge(self._prices.get(num_lanes, 0.0), LONGEST_REST)
        return gain

    def judge(self, gain: Gain, num_lanes: int, num_nodes: int, num_accepted: int) -> None:
        """Takes in a lane's step with so many granted nodes.

        The price of its draft is how many tokens all lanes would commit in the time that it and the
        rows of its nodes take, as they do now or without drafts, whichever is more.
        """
        line, host = self.line(num_lanes), self._host_seconds
        rows = float(line.seconds(num_nodes) - line.seconds(0))
        seconds = float(line.seconds(num_lanes)) + num_lanes * host[False]
        rate = max(self._rate, num_lanes / seconds) if line.num_seen else self._rate
        price = rate * (max(0.0, host[True] - host[False]) + rows)
        if not gain.is_resting:
            for means, value in ((self._prices, price), (self._gains, num_accepted)):
                before = means.get(num_lanes, value)
                means[num_lanes] = before + WEIGHT / num_lanes * (value - before)
        gain.add(num_accepted, price)

    def _worth(self, tree: TokenTree) -> np.ndarray:
        """Returns f64[N - 1]: how likely each drafted node's path is accepted, falling."""
        assert tree.log_prob_N is not None, "a tree without probabilities"
        trust = self._accepted / max(self._expected, 1e-9)
        trust = min(LARGEST_TRUST, max(1 / LARGEST_TRUST, trust))
        return np.minimum.accumulate(np.minimum(1.0, trust * np.exp(tree.log_prob_N[1:])))
