"""Answers calls on a lane in place of its engine: without a drafter, with the log-probabilities of
the prompt, or not beyond the prompt."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from spec_runtime.backends import run_each
from spec_runtime.engine import Engine, OpenedDrafter
from spec_runtime.loop.call import Call
from spec_runtime.loop.generate import Gate
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.loop.target import Verified
from spec_runtime.sampling import TokenLogprob, token_logprob
from spec_runtime.trees.budget import Budget


class Answering(Protocol):
    """Answers calls on a lane, see Engine.answer."""

    def answer(
        self, call: Call, gate: Gate | None = None
    ) -> Generator[Chunk, None, GenerationResult]: ...


Observe = Callable[[Engine], Answering]


def undrafted(engine: Engine) -> Engine:
    """Returns an engine on the same target that drafts nothing, and reuses no rows of this one."""
    plain = OpenedDrafter("none", PlainProposer(), Budget(1))
    return Engine(engine.target, engine.tokenizer, plain)


class ScoringEngine:
    """Answers calls as `engine` does, and says how likely the tokens of their prompts were.

    `scores` has a list for each call, which takes the log-probability of each token of its prompt
    but the first, under the target itself and after all tokens before it, and those of the
    `num_top` likeliest. They are all there when the answer's first chunk comes. A call must reuse
    no rows, whose logits are gone.
    """

    def __init__(
        self, engine: Engine, num_top: int, scores: Mapping[Call, list[TokenLogprob]]
    ) -> None:
        self._engine = engine
        self._num_top = num_top
        self._scores = scores

    def answer(
        self, call: Call, gate: Gate | None = None
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields the chunks of a prepared call, see Engine.answer.

        The engine answers with a gate in any case: there its passes over the prompt are asked for
        the logits of all rows.
        """
        assert not call.reuse, "rows that are there have no logits"
        own = Gate() if gate is None else gate
        chunks = self._engine.answer(call, own)
        with closing(chunks):
            while True:
                try:
                    chunk = next(chunks)
                except StopIteration as end:
                    result: GenerationResult = end.value
                    return result
                is_prompt = own.asked is not None and own.asked.last_only
                if own.asked is not None and is_prompt:
                    own.asked = own.asked._replace(last_only=False)
                if gate is not None or not (own.asked or own.drafting):
                    yield chunk
                elif own.drafting is not None:
                    run_each([own.drafting])
                elif own.asked is not None:
                    own.verified = self._engine.target.verify(*own.asked)
                if own.verified is not None and is_prompt:
                    own.verified = self._read(call, own.verified)

    def _read(self, call: Call, verified: Verified) -> Verified:
        """Takes the log-probabilities that the rows of a chunk of the prompt have, and returns what
        generation goes on from: its last row."""
        scores = self._scores[call]
        first = len(scores) + 1
        following = call.prompt[first : first + verified.tree.num_nodes]
        for row, token in enumerate(following):
            scores.append(token_logprob(verified.row(row), token, self._num_top))
        return verified.last()


class ReadingEngine:
    """Reads prompts, and answers nothing: each of its calls of one token ends as one of none."""

    def __init__(self, engine: Answering) -> None:
        self._engine = engine

    def answer(
        self, call: Call, gate: Gate | None = None
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields the chunks of a prepared call, see Engine.answer, but for its token's."""
        assert call.params.max_new_tokens == 1, call.params.max_new_tokens
        with closing(self._engine.answer(call, gate)) as chunks:
            for chunk in chunks:
                if (answered := chunk.result) is not None:
                    reason = answered.finish_reason
                    result = replace(
                        answered,
                        text="",
                        token_ids=[],
                        finish_reason="length" if reason == "stop" else reason,
                        logprobs=None if answered.logprobs is None else [],
                        stop=None,
                        text_ends=[],
                    )
                    yield Chunk(text="", logprobs=chunk.logprobs, result=result)
                    return result
                if not chunk.token_ids:  # it waits for a run
                    yield chunk
        raise AssertionError("an answer without a result")
