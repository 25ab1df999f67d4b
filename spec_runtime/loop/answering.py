"""Answers one call: waits for the target, brings back rows, decodes, and keeps the result."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from spec_runtime.files.machine import give_back_memory
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import CANCELLED, Interrupted
from spec_runtime.loop.call import Call
from spec_runtime.loop.conversations import Conversations
from spec_runtime.loop.generate import Decoding, take_pass
from spec_runtime.loop.proposer import OpenedDrafter, Proposer
from spec_runtime.loop.result import GenerationResult
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Ending, Step
from spec_runtime.loop.target import Target
from spec_runtime.sampling import TokenLogprob

JUDGED_STEPS = 64  # a shorter generation says little about its drafter
JUDGED_DRAFTS = 12  # and so do fewer drafts, where it paused
# Drafted tokens accepted a step: at a sixth of those expected weights are doubted. The shipped
# drafter has a quarter on the hardest of 60 texts, and a twentieth where it reads no features.
FEW = 6

log = logging.getLogger("spec_runtime")

# Keeps a drafter's trees, of at most so many nodes, inside of a grammar.
Constrain = Callable[[Proposer, PathMasks, int], Proposer]


class Parts(NamedTuple):
    """What calls run on; released when their engine is closed."""

    target: Target
    drafter: OpenedDrafter
    conversations: Conversations


class Calls:
    """Holds what the calls of one engine share: what they run on, which of them wait or run, and
    the last result."""

    def __init__(self, parts: Parts, constrain: Constrain) -> None:
        self.last_result: GenerationResult | None = None
        self.running: set[Call] = set()  # or waiting
        self.constrain = constrain
        self._parts: Parts | None = parts
        self._drafter = parts.drafter.name
        self._expected = parts.drafter.expected_accepted_length  # None once a warning is out

    @property
    def parts(self) -> Parts:
        """Returns what calls run on; raises RuntimeError if the engine is closed."""
        self.require_open()
        assert self._parts is not None
        return self._parts

    def require_open(self) -> None:
        """Raises RuntimeError if the engine is closed."""
        if self._parts is None:
            raise RuntimeError("this engine is closed; load the bundle again")

    def cancel(self) -> None:
        """Ends the call that runs, from any thread, but none that waits."""
        for call in self.running.copy():
            if not call.holder.is_waiting:
                call.end()

    def release(self) -> None:
        """Refuses all further calls."""
        self._parts = None

    def end(self) -> None:
        """Ends all calls and waits until other threads have left them."""
        calls = self.running.copy()
        for call in calls:
            call.end()
        for call in calls:
            call.wait_until_left()

    def leave(self, call: Call) -> None:
        """Notes that this call is over."""
        self.running.discard(call)
        call.leave()
        if self._parts is None:
            give_back_memory()

    def judge(self, stats: Stats, is_greedy: bool) -> None:
        """Warns, once, of the two signatures of wrong weights.

        Few accepted guesses are also what weights give that have learnt too little. A wrong drafter
        changes no token, only the speed, so that nothing else would show it.
        """
        expected, got = self._expected, stats.drafted_length
        if expected is None or stats.steps < JUDGED_STEPS or stats.drafted_steps < JUDGED_DRAFTS:
            return
        doubt = None
        if sum(stats.depth_trials) == sum(stats.depth_accepts) > 0:
            doubt = f"all drafted tokens were accepted in {stats.drafted_steps} steps"
        elif is_greedy and got - 1 < (expected - 1) / FEW:  # sampled texts are harder to guess
            doubt = f"accepted length {got:.2f} in {stats.drafted_steps} steps, expected about "
            doubt += f"{expected:.2f}"
        if doubt is not None:
            self._expected = None
            log.warning(
                "drafter %s: %s; unless the text is unusual, its weights are wrong or have learnt "
                "too little: run spec-export check, build the bundle again or train longer",
                self._drafter,
                doubt,
            )


class Answering:
    """One call that waits for the target, has it, or is over.

    It waits when it is first asked `goes_on`, and has the target until that says no, or until
    `close`; the `result` is there then. In between its `decoding` goes from pass to pass, by
    `next_step`, or in a batch, which calls `take_step` after each.
    """

    def __init__(self, calls: Calls, call: Call, wrap: Callable[[Proposer], Proposer]) -> None:
        self.call = call
        self.decoding: Decoding | None = None
        self.result: GenerationResult | None = None
        self._calls, self._wrap = calls, wrap
        self._conversations: Conversations | None = None
        self._held = ExitStack()
        self._logprobs: list[TokenLogprob] = []

    def next_step(self) -> Step | None:
        """Goes from pass to pass by itself until there is a step; returns None at the end."""
        self.call.enter()
        try:
            while self.goes_on():
                assert self.decoding is not None
                if errors := take_pass([self.decoding]):
                    raise errors.pop(self.decoding)
                if (step := self.take_step()) is not None:
                    return step
        finally:
            self.call.leave()
        return None

    def goes_on(self) -> bool:
        """Asks, before a pass, whether there is one, and ends the call where there is none."""
        if self.result is not None:
            return False
        try:
            decoding = self._begun() if self.decoding is None else self.decoding
        except Interrupted:  # while it waited
            self._calls.require_open()
            reason = self.call.interruption.reason or CANCELLED
            self._finish([], Stats(prompt_tokens=len(self.call.prompt)), reason)
        else:
            if decoding.goes_on():
                return True
            if decoding.is_in_step:
                decoding.drop_rows()
        self.close()
        return False

    def take_step(self) -> Step | None:
        """Takes what the last pass committed, once; None within the prompt."""
        if self.decoding is None or self.decoding.step is None:
            return None
        assert self._conversations is not None
        step, self.decoding.step = self.decoding.step, None
        self._logprobs += step.logprobs
        self._conversations.add(step)
        return step

    def close(self) -> None:
        """Ends the call here, if it is not over: what was computed so far is its answer."""
        decoding, conversations, call = self.decoding, self._conversations, self.call
        with self._held:
            if self.result is not None or decoding is None or conversations is None:
                return
            if decoding.is_in_step:
                conversations.fail()
            else:
                conversations.end(call.holder, decoding.prompt + decoding.tokens)
            reason = decoding.ending.finish_reason or call.interruption.reason or CANCELLED
            self._finish(decoding.tokens, decoding.stats, reason)

    def _begun(self) -> Decoding:
        """Waits for the target and begins; raises Interrupted if the call ends while it waits, and
        RuntimeError if the engine is closed."""
        calls, call = self._calls, self.call
        calls.running.add(call)
        self._held.callback(calls.leave, call)
        lock = calls.parts.target.lock
        self._held.enter_context(lock.hold(call.holder, call.interruption))
        target, drafter, conversations = calls.parts
        proposer, params, prompt = self._wrap(drafter.proposer), call.params, call.prompt
        # plain decoding stays plain: it drafts no forced tokens
        if call.masks is not None and drafter.name != "none":
            proposer = calls.constrain(proposer, call.masks, target.max_nodes)
        self._conversations = conversations
        reused, restored = conversations.begin(call)
        self.decoding = Decoding(
            target,
            proposer,
            drafter.budget,
            prompt,
            params,
            Ending(
                min(params.max_new_tokens, target.max_length - len(prompt)),
                call.stop_ids,
                call.text.push,
                lambda: call.interruption.reason,
            ),
            Stats(prompt_tokens=len(prompt), reused_tokens=reused),
            reused,
            drafter.features,
            restored,
            call.masks,
            call.scores,
            call.only_reads,
        )
        self.decoding.meanwhile = call.text.settle
        target.truncate(reused)
        proposer.truncate(reused if restored is None else 0)
        return self.decoding

    def _finish(self, tokens: list[int], stats: Stats, reason: str) -> None:
        """Makes the result, which is also the engine's last one."""
        call, text, params = self.call, self.call.text, self.call.params
        text.finish()
        stop: str | int | None = text.stop
        if stop is None and reason == "stop":
            stop = tokens[-1]
        logprobs = None if params.logprobs is None else self._logprobs
        self.result = self._calls.last_result = GenerationResult(
            text.text, tokens, reason, stats, params.rule, logprobs, stop, text.ends, call.form
        )
        # what a threshold or a grammar makes of the lengths says little about the drafter
        if self.decoding is not None and params.rule != "typical" and not params.reads_text:
            self._calls.judge(stats, is_greedy=params.temperature == 0)
