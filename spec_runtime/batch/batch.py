"""Answers several calls at a time: each on a lane, and one pass of the target for all lanes.

What a call gets does not depend on who shares its passes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from spec_runtime.backends import run_each
from spec_runtime.batch.lane import Lane, Observe
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.loop.call import Call
from spec_runtime.loop.generate import Decoding, take_pass
from spec_runtime.loop.result import Chunk
from spec_runtime.loop.target import PREFILL_ROWS, Asked, Verified, verify_together
from spec_runtime.pace.shared import SharedPace

MIN_SHARED = 32  # tokens at the beginning of prompts, for which one waits for the other's rows
MOST_AWAITED = 2  # times its own prompt, of another's tokens that a call waits to see read
MIN_CHUNK = 8  # rows of prompts in a pass, however slow that is
MIN_SHARE = 3  # of each, so that it is never read by rows one at a time
CHUNK_WEIGHT = 1 / 8  # of the newest chunk in what a prompt's row takes
MAX_GAP = 0.25  # seconds of a pass in which some decode and prompts' chunks ride along

log = logging.getLogger("spec_runtime")

Owner = Any
Found = tuple[Owner, Chunk | Exception]
Give = Callable[[Found], object]
MayGoOn = Callable[[Owner], bool]


@dataclass(frozen=True)
class Pass:
    """Says what one pass of the target carried: how many lanes and rows, how many of the rows were
    drafted nodes or tokens of prompts, and how many nodes were drafted in all."""

    lanes: int
    rows: int
    granted: int
    drafted: int
    prompt_rows: int
    seconds: float


class Batch:
    """Decodes up to `parallel` calls together, a pass for all of them.

    Lanes and the graphs of shared passes are opened when first used. After `open_beside` threads
    open them, and no call waits for what it does not need: others go on while a lane is opened,
    and lanes run by themselves, or a few together, until there are graphs for more.
    Prompts are read in chunks that ride along with what others decode, as many rows as a pass
    of `max_gap` seconds has room for; the prompt that came first gets half of them. Where
    several decode, a SharedPace hands out the rows of their trees. One thread uses it at a time.

    Raises UserError for less than one lane, or for several if the engine was not loaded from a
    bundle.
    """

    def __init__(self, engine: Engine, parallel: int = 1, max_gap: float = MAX_GAP) -> None:
        if parallel < 1:
            raise UserError(f"got parallel {parallel}, expected 1 or more", param="parallel")
        if parallel > 1:
            engine.share_rows()
        self._engine, self._max_gap = engine, max_gap
        self._passes = engine.lanes.passes if parallel > 1 else None
        self._openers: ThreadPoolExecutor | None = None  # of lanes, and of the passes' graphs
        self._opening: dict[Lane | None, Future[None]] = {}  # None: those graphs
        self._on_open: Callable[[], None] = lambda: None
        # see `lane_for`
        self._awaited: WeakKeyDictionary[Call, Call] = WeakKeyDictionary()
        self._opened_for: WeakKeyDictionary[Call, Future[None]] = WeakKeyDictionary()
        self._lanes = [Lane(engine, k) for k in range(parallel)]
        self._order: list[Lane] = []  # those that answer, the one that began first comes first
        self._num_begun = 0  # calls
        self._pace = SharedPace()
        self._row_seconds = 0.005  # of a prompt's row, until it is known
        self._cycle_begun, self._cycle_tokens = 0.0, 0  # since the passes before
        self.on_pass: Callable[[Pass], None] = lambda ran: None
        self.has_gone_on = False

    @property
    def parallel(self) -> int:
        return len(self._lanes)

    @property
    def num_active(self) -> int:
        """Counts the lanes that answer a call."""
        return len(self._order)

    def open_passes(self) -> None:
        """Opens the graphs of shared passes, so that no call waits for that."""
        if self._passes is not None:
            self._passes.open(self._engine.target.lend()[0], self.parallel)

    def open_beside(self, on_open: Callable[[], None]) -> None:
        """Has threads open what is needed from now on; `on_open` is told of each lane. Where one or
        a graph cannot be opened no call fails: fewer are then decoded together."""
        self._openers, self._on_open = ThreadPoolExecutor(2, "spec_runtime.open"), on_open

    def open_passes_beside(self) -> None:
        """Has a thread do what `open_passes` does, once."""
        if self._passes is not None:
            self._open(None, self.open_passes)

    def end_opening(self) -> None:
        """Waits for the threads of `open_beside`, which open nothing further."""
        if self._passes is not None:
            self._passes.closing.set()
        if self._openers is not None:
            self._openers.shutdown(cancel_futures=True)

    def _open(self, what: Lane | None, work: Callable[[], object]) -> Future[None]:
        """Has a thread open a lane, or the graphs of passes, once; returns what ends with that."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                log.warning("fewer answers are decoded together than could be: %s", error)
            self._on_open()

        if what not in self._opening:
            assert self._openers is not None, "`open_beside` comes first"
            self._opening[what] = self._openers.submit(run)
        return self._opening[what]

    def lane_for(self, call: Call) -> Lane | None:
        """Returns the free lane where least is lost (see `_cost`), and of these the one that has
        most of the prompt's rows, or None where the call has to wait: for a lane, or for another to
        read the same prompt, whose rows it can then copy. It waits for one other only, however many
        come that begin alike."""
        free = [lane for lane in self._lanes if lane.is_free]
        if not free:
            return None
        reads = [lane.call for lane in self._order if _share(lane, call)]
        if reads and self._awaited.setdefault(call, reads[0]) in reads:
            return None
        closed = [lane for lane in free if self._openers is not None and not lane.is_open]
        free = [lane for lane in free if lane not in closed]
        untaken = [lane for lane in free if not lane.is_taken]
        is_opening = False
        if closed and not untaken:
            if call not in self._opened_for:  # each that waits has a lane opened
                new = next((lane for lane in closed if lane not in self._opening), closed[0])
                self._opened_for[call] = self._open(new, lambda: new.engine)
            is_opening = not self._opened_for[call].done()
        if untaken or self._order or is_opening:
            free = untaken
        return min(free, key=lambda lane: self._cost(lane, call.prompt), default=None)

    def _cost(self, lane: Lane, prompt: list[int]) -> tuple[bool, float, int]:
        """Returns what a call on this lane costs later ones, to be compared: whether the lane has
        to be opened; the rows that are overwritten, each the less the more calls have begun since
        that conversation's last one, less those that only this lane spares the call, as none can
        copy another's; and how few rows it has."""
        num_common = _least(lane.num_common(prompt))
        lost = _least(lane.num_held - num_common) / (1 + self._num_begun - lane.begun)
        spared = 0 if self._engine.target.keeps_rows else num_common
        return not lane.is_open, lost - spared, -num_common

    def begin(self, lane: Lane, owner: Owner, call: Call, observe: Observe | None = None) -> None:
        """Begins to answer a call on a free lane, by the engine that `observe` makes of its own."""
        self._num_begun += 1
        lane.begun = self._num_begun
        lane.begin(owner, call, observe, self._pace.first_pause(1 + len(self._order)))
        self._awaited.pop(call, None)
        self._order.append(lane)

    def turn(
        self, give: Give = lambda found: None, may_go_on: MayGoOn = lambda owner: True
    ) -> None:
        """Takes all calls on by one pass; gives what comes of them, each with its call's owner.

        What a pass on a device has committed is given while the device runs the next one.
        Calls that may not go on wait. An error ends its own call only, or all that share a run that
        fails. `has_gone_on` says whether any went on.
        """
        lanes = [lane for lane in self._order if may_go_on(lane.owner)]
        self.has_gone_on = bool(lanes)
        calls = [lane.call for lane in lanes]
        for call in calls:
            call.enter()
        try:
            for lane in lanes:
                if not lane.puts_off():
                    self._read(lane, give)  # it begins, or was ended meanwhile
            lanes = self._share_out([lane for lane in lanes if not lane.is_free])
            self._count_cycle(len(lanes))
            num_groups = -(-len(lanes) // self._most_lanes)
            for group in range(num_groups):
                self._run(lanes[group::num_groups], give)
        finally:
            for call in calls:
                call.leave()
        self._order = [lane for lane in self._order if not lane.is_free]

    def answer(self, calls: Sequence[Call]) -> Generator[tuple[int, Chunk], None, None]:
        """Yields the chunks of prepared calls as they come, each with its call's number.

        Calls begin in their order as lanes become free. A call whose interruption ends it gives a
        result too. Closing the iterator ends all calls; an error of one is raised, and ends them.
        """
        waiting = deque(enumerate(calls))
        try:
            while waiting or self._order:
                while waiting and (lane := self.lane_for(waiting[0][1])) is not None:
                    self.begin(lane, *waiting.popleft())
                found: list[Found] = []
                self.turn(found.append)
                for number, chunk in found:
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield number, chunk
        finally:
            self.close()

    def close(self) -> None:
        """Ends all calls."""
        for lane in self._order:
            lane.close()
        self._order = []

    @property
    def _most_lanes(self) -> int:
        """Returns how many lanes one pass takes now."""
        if self._passes is None:
            return 1
        return self._passes.max_lanes if self._openers is None else self._passes.most_open

    def _count_cycle(self, num_lanes: int) -> None:
        """Tells the budget how many tokens came between the passes before and these."""
        now = time.perf_counter()
        if self._cycle_begun:
            self._pace.add_cycle(self._cycle_tokens, now - self._cycle_begun)
        self._cycle_begun, self._cycle_tokens = now if num_lanes > 1 else 0.0, 0

    def _share_out(self, lanes: list[Lane]) -> list[Lane]:
        """Sets how many rows each lane may ask of the next pass; returns the lanes that take part:
        all, but for prompts without a share."""
        if len(lanes) == 1:
            lanes[0].limit(PREFILL_ROWS, PREFILL_ROWS, is_shared=False)
            return lanes
        most = self._pace.most_rows(max(1, len(lanes)))
        reading = [lane for lane in lanes if lane.num_unread > 0]
        left = PREFILL_ROWS
        if len(reading) < len(lanes):  # others decode
            line = self._pace.line(len(lanes))
            room = self._max_gap - float(line.seconds(len(lanes)))
            left = max(MIN_CHUNK, min(PREFILL_ROWS, int(room / self._row_seconds)))
        wanted = [lane.num_unread for lane in reading]
        by_lane = dict(zip(reading, _shares(left, wanted, self._most_lanes > 1), strict=True))
        for lane in lanes:
            lane.limit(most, 1, is_shared=True)
        for lane, share in by_lane.items():
            lane.limit(most, share, is_shared=True)
        return [lane for lane in lanes if by_lane.get(lane, 1)]

    def _run(self, lanes: Sequence[Lane], give: Give) -> None:
        """Takes these lanes on by one pass that they share."""
        decodings = {lane.decoding: lane for lane in lanes}
        failed: dict[Decoding, Exception] = {}
        for decoding, lane in decodings.items():
            decoding.host_seconds = 0.0
            decoding.meanwhile = partial(self._give_put_off, lane, give, failed)
        run_drafts = run_each if self._passes is None else self._passes.run_drafts

        def verify(drafted: Sequence[Decoding], asked: Sequence[Asked]) -> list[Verified]:
            return self._verify([decodings[each] for each in drafted], [*asked])

        errors = take_pass([*decodings], run_drafts, verify) | failed
        for decoding, lane in decodings.items():
            if (error := errors.pop(decoding, None)) is not None:
                decoding.meanwhile()  # where there was no pass
                lane.close()
                give((lane.owner, error))
                continue
            begin, step = time.perf_counter(), decoding.step
            if not lane.puts_off():
                self._read(lane, give)
            decoding.host_seconds += time.perf_counter() - begin
            num_lanes = len(self._order)
            if step is not None and lane.pacer.is_shared and num_lanes > 1 and not lane.is_free:
                drafted, accepted = step.num_drafted, step.num_accepted
                seconds = decoding.host_seconds
                self._pace.judge(lane.pacer, num_lanes, drafted, accepted, seconds)

    def _read(self, lane: Lane, give: Give) -> None:
        """Gives out what the lane's last pass committed, and frees the lane if its call is over."""
        try:
            chunks = lane.read()
        except Exception as error:
            lane.close()
            give((lane.owner, error))
        else:
            self._give(lane, chunks, give)

    def _give_put_off(self, lane: Lane, give: Give, failed: dict[Decoding, Exception]) -> None:
        try:
            chunks = lane.read_put_off()
        except Exception as error:
            failed[lane.decoding] = error
        else:
            self._give(lane, chunks, give)

    def _give(self, lane: Lane, chunks: Sequence[Chunk], give: Give) -> None:
        for chunk in chunks:
            self._cycle_tokens += len(chunk.token_ids)
            give((lane.owner, chunk))

    def _verify(self, lanes: Sequence[Lane], asked: list[Asked]) -> list[Verified]:
        """Runs one pass for these lanes, over as many nodes of their trees as pay."""
        sizes_by_lane = [each.tree.num_nodes for each in asked]
        is_reading = [lane.num_unread > 0 for lane in lanes]
        prompt_rows = sum(n for n, reads in zip(sizes_by_lane, is_reading, strict=True) if reads)
        num_decoding = len(lanes) - sum(is_reading)
        drafted = sum(sizes_by_lane) - prompt_rows - num_decoding
        if len(lanes) > 1:
            cut = [
                k
                for k, lane in enumerate(lanes)
                if not is_reading[k] and lane.cuts_trees and asked[k].tree.log_prob_N is not None
            ]
            whole = sum(each.tree.num_nodes for k, each in enumerate(asked) if k not in cut)
            read = prompt_rows * self._row_seconds
            worths = [lanes[k].pacer.worth_N(asked[k].tree) for k in cut]
            sizes = self._pace.sizes(worths, len(lanes), whole - prompt_rows, read)
            for k, size in zip(cut, sizes, strict=True):
                asked[k] = asked[k]._replace(tree=asked[k].tree.first(size))
        begin = time.perf_counter()
        found = verify_together(self._passes, [lane.decoding.target for lane in lanes], asked)
        seconds = time.perf_counter() - begin
        rows = sum(each.tree.num_nodes for each in asked)
        self._learn(len(lanes), rows, prompt_rows, seconds)
        granted = rows - prompt_rows - num_decoding
        self.on_pass(Pass(len(lanes), rows, granted, drafted, prompt_rows, seconds))
        return found

    def _learn(self, num_lanes: int, rows: int, prompt_rows: int, seconds: float) -> None:
        """Learns what later passes cost from one, unless lanes shared it and it ran eagerly or was
        captured."""
        if self._passes is not None and num_lanes > 1 and not self._passes.is_warm:
            return
        if not prompt_rows:
            self._pace.add(num_lanes, rows, seconds)
            return
        of_trees = float(self._pace.line(num_lanes).seconds(rows - prompt_rows))
        row_seconds = max(1e-5, (seconds - of_trees) / prompt_rows)
        self._row_seconds += CHUNK_WEIGHT * (row_seconds - self._row_seconds)


def _share(lane: Lane, call: Call) -> bool:
    """Says whether the lane reads a prompt that begins as the first half of this call's does, whose
    rows the call may copy soon: not much later than its own prompt could be read."""
    length = max(MIN_SHARED, len(call.prompt) // 2)
    reads = lane.call.prompt if lane.num_unread > 0 else []
    is_alike = length <= len(call.prompt) and reads[:length] == call.prompt[:length]
    is_soon = is_alike and lane.num_unread <= MOST_AWAITED * len(call.prompt)
    return is_soon and lane.engine.conversations.may_reuse(call)


def _least(num_common: int) -> int:
    """Returns 0 for so few rows that they decide nothing."""
    return num_common if num_common >= MIN_SHARED else 0


def _shares(rows: int, wanted: Sequence[int], is_shared: bool = True) -> list[int]:
    """Divides the rows of a pass among prompts: half to the first, the rest in equal parts, and
    what one does not want to those after it; each gets at least MIN_SHARE.

    Where each prompt has a pass of its own, whose cost is hardly one of rows, parts are not equal:
    the next ones are read whole, and those that would get less than MIN_CHUNK wait.

    >>> _shares(64, [20, 100, 100]), _shares(64, [100, 20, 30, 30], False)
    ([20, 22, 22], [32, 20, 12, 0])
    """
    shares = []
    for i, most in enumerate(wanted):
        num_left = len(wanted) - i
        part = rows // 2 if i == 0 and num_left > 1 else rows // (num_left if is_shared else 1)
        waits = not is_shared and i > 0 and part < min(most, MIN_CHUNK)
        shares.append(0 if waits else max(MIN_SHARE, min(part, most)))
        rows = max(0, rows - shares[-1])
    return shares
