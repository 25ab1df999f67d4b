"""One call on its way: what it asks for, the text it has so far, and whether it has to end."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing

from spec_runtime.backends.turns import Turn
from spec_runtime.calls.interruption import Interruption
from spec_runtime.calls.options import Request
from spec_runtime.calls.result import Chunk, GenerationResult, Piece
from spec_runtime.sampling import SamplingParams
from spec_runtime.step import Step
from spec_runtime.text import TextStream

Steps = Generator[Step, None, GenerationResult]


class Call:
    """A checked prompt with its options, for one generation, see Engine.prepare.

    Its time runs from its making on. `is_stream` says that its thread leaves it between two steps.
    """

    def __init__(self, prompt: list[int], request: Request, text: TextStream) -> None:
        self.prompt = prompt
        self.params: SamplingParams = request.params
        self.reuse = request.reuse
        self.text = text
        self.interruption: Interruption = request.interruption()
        self.turn = Turn()
        self.is_stream = True
        self._is_left = threading.Event()  # set while no thread is inside
        self._is_left.set()

    def enter(self) -> None:
        """Notes that this thread begins or goes on with the call."""
        self._is_left.clear()
        self.turn.resume()

    def leave(self) -> None:
        """Notes that no thread is inside the call."""
        self._is_left.set()

    def end(self) -> None:
        """Ends the call from any thread: at its next step, or at once if it waits for its turn."""
        self.interruption.end()
        self.turn.wake()

    def wait_until_left(self) -> None:
        """Waits until no other thread is inside the call."""
        if self.turn.thread is not threading.current_thread():
            self._is_left.wait()


def read_result(steps: Steps) -> GenerationResult:
    """Runs the steps to their end and returns the result."""
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: GenerationResult = end.value
                return result


def read_texts(steps: Steps, text: TextStream) -> Generator[str, None, GenerationResult]:
    """Yields pieces of the text as they come; returns the result."""
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: GenerationResult = end.value
                break
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
        return result


def read_chunks(
    steps: Steps, text: TextStream, has_logprobs: bool
) -> Generator[Chunk, None, GenerationResult]:
    """Yields a chunk a step, and a last one with the result, which is returned, too."""
    depths: list[int] = []  # of all tokens so far
    none = () if has_logprobs else None
    with closing(steps):
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: GenerationResult = end.value
                break
            depths += step.depths
            pieces = _pieces(text, depths)
            yield Chunk(
                text="".join(piece.text for piece in pieces),
                token_ids=tuple(step.tokens),
                logprobs=tuple(step.logprobs) if has_logprobs else None,
                depths=tuple(step.depths),
                pieces=pieces,
                num_drafted=step.num_drafted,
            )
        pieces = _pieces(text, depths)
        rest = "".join(piece.text for piece in pieces)
        yield Chunk(text=rest, logprobs=none, pieces=pieces, result=result)
        return result


def _pieces(text: TextStream, depths: list[int]) -> tuple[Piece, ...]:
    """Returns the text released since the last call, with the depths of its tokens."""
    return tuple(Piece(piece, depths[token]) for token, piece in text.take_pieces())
