"""Decides how much to draft where several requests share a pass; docs/architecture/pace.md has the
equation.

It is that of a request by itself, with the drafted nodes of all requests in one order. What a pass
takes is learnt from those that were run, since it depends on who shares it.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np

from spec_runtime.pace.pacer import LONGEST_PAUSE, MOST_CREDIT, WEIGHT, Pacer, Pause
from spec_runtime.trees.worth import Terms

LEARNT_PASSES = 12  # which take all nodes, half of them or none, in turn, to learn what they cost
EXPLORING = 64  # of so many passes one takes all nodes, to learn what they cost now
COST_WEIGHT = 1 / 32  # of the newest pass in what a row costs
LEVEL_WEIGHT = 1 / 8  # the same of the mean pass, which changes with every context
TRIAL = 16  # of so many requests one drafts, whatever became of others' drafts
SHARED_ROWS = 32  # of all trees that requests draft for one pass


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


class SharedPace:
    """Cuts the trees of requests that share a pass, and says what their drafts have won."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}  # by number of requests
        self._rate = 0.0  # tokens a second of all requests
        self._num_begun = 0  # requests
        self._won: dict[int, float] = {}  # tokens by a step that drafted, by number of requests
        self._host_seconds = {False: 0.0003, True: 0.001}  # of a request's step, with a draft: True

    def line(self, num_requests: int) -> Line:
        """Returns what passes with so many requests take."""
        return self._lines.get(num_requests, Line())

    def most_rows(self, num_requests: int) -> int:
        """Returns how many nodes each of so many requests may draft, the root among them."""
        return max(2, SHARED_ROWS // num_requests)

    def sizes(
        self, worths: Sequence[np.ndarray], num_requests: int, num_rows: int, seconds: float
    ) -> list[int]:
        """Returns how many of each tree's first nodes a pass over them should have. `worths` has
        the falling probabilities of their drafted nodes. The pass has `num_rows` other rows of
        trees, so many requests in all, and prompts that take `seconds`."""
        line, whole = self.line(num_requests), [1 + len(worth) for worth in worths]
        if line.num_seen < LEARNT_PASSES:
            return [whole, [(n + 1) // 2 for n in whole], [1] * len(whole)][line.num_seen % 3]
        if line.num_seen % EXPLORING == 0 or not whole:
            return whole
        falling = -np.sort(-np.concatenate(worths))
        rows = num_rows + len(whole) + np.arange(len(falling) + 1)
        seconds += num_requests * self._host_seconds[True]
        step_seconds = np.maximum(line.seconds(rows) + seconds, 1e-9)
        best, _ = Terms(step_seconds, num_requests=num_requests).best_size(falling)
        least = falling[best - 2] if best > 1 else np.inf
        return [1 + int((worth >= least).sum()) for worth in worths]

    def add(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """Takes in what a pass over trees took; the first with so many requests opens their
        graph."""
        if num_requests in self._lines:
            self._lines[num_requests].add(num_rows, seconds)
        else:
            self._lines[num_requests] = self._nearest(num_requests)

    def _nearest(self, num_requests: int) -> Line:
        """Returns a copy of the line of nearly as many requests, where one has been learnt: its
        rows cost much the same, and its trees need not be tried again."""
        learnt = [n for n, line in self._lines.items() if line.num_seen >= LEARNT_PASSES]
        if not learnt:
            return Line()
        return copy(self._lines[min(learnt, key=lambda n: abs(n - num_requests))])

    def add_cycle(self, num_tokens: int, seconds: float) -> None:
        """Takes in how many tokens all requests committed from one pass to the next."""
        if seconds > 0:
            self._rate += WEIGHT * (num_tokens / seconds - self._rate)

    def first_pause(self, num_requests: int) -> Pause | None:
        """Returns what a request that begins beside others begins with: where drafts won nothing
        lately a long pause, but for one request of TRIAL; None where nothing is known."""
        self._num_begun += 1
        won = self._won.get(num_requests)
        if won is None or self._num_begun % TRIAL == 0:
            return None
        pause = Pause(MOST_CREDIT)
        pause.left = LONGEST_PAUSE if won < 0 else 0
        return pause

    def judge(
        self, pacer: Pacer, num_requests: int, num_nodes: int, num_accepted: int, seconds: float
    ) -> None:
        """Takes in a request's step with so many granted nodes and these seconds of the host.

        Its draft has won what was accepted, less what all requests would have committed in the time
        that the draft and the rows of its nodes took, as they do now or without drafts, whichever
        is more.
        """
        host, line = self._host_seconds, self.line(num_requests)
        host[pacer.has_drafted] += WEIGHT * (seconds - host[pacer.has_drafted])
        plain_seconds = float(line.seconds(num_requests)) + num_requests * host[False]
        rate = max(self._rate, num_requests / plain_seconds) if line.num_seen else self._rate
        rows = float(line.seconds(num_nodes) - line.seconds(0))
        won = num_accepted - rate * (max(0.0, host[True] - host[False]) + rows)
        if pacer.has_drafted:
            before = self._won.get(num_requests, won)
            self._won[num_requests] = before + WEIGHT / num_requests * (won - before)
        pacer.pause.add(won)
