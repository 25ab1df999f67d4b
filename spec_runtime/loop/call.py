"""One call on its way: what it asks for, the text it has so far, and whether it has to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress

from spec_runtime.dialogue.stream import TextStream
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import Interrupted, Interruption
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.loop.fair_lock import Holder
from spec_runtime.loop.options import Request
from spec_runtime.loop.result import Chunk, GenerationResult, Piece
from spec_runtime.loop.step import Step
from spec_runtime.sampling import SamplingParams

Steps = Generator[Step, None, GenerationResult]


class Call:
    """A checked prompt with its options, for one generation, see Engine.prepare.

    Its time runs from its making on. `is_stream` says that its thread leaves it between two steps.
    `form` says how the answer is read. `compile_grammar` makes the masks of the grammar that it has
    to keep to; None is free text.
    """

    def __init__(
        self,
        prompt: list[int],
        request: Request,
        text: TextStream,
        form: AnswerForm,
        compile_grammar: Callable[[Interruption], PathMasks] | None = None,
    ) -> None:
        self.prompt = prompt
        self.params: SamplingParams = request.sampling
        self.reuse = request.reuse
        self.text = text
        self.form = form
        self.masks: PathMasks | None = None
        self._compile_grammar = compile_grammar
        self.interruption: Interruption = request.interruption()
        self.holder = Holder()
        self.is_stream = True
        self._is_left = threading.Event()  # set while no thread is inside
        self._is_left.set()

    @property
    def is_compiled(self) -> bool:
        """Says whether `compile` has nothing left to do."""
        return self._compile_grammar is None

    def compile(self) -> None:
        """Compiles the grammar, if there is one, or leaves that if the call has to end before. Has
        to come before the call is answered. Raises UserError for a bad grammar."""
        if self._compile_grammar is not None:
            with suppress(Interrupted):
                self.masks = self._compile_grammar(self.interruption)
            self._compile_grammar = None

    def enter(self) -> None:
        """Notes that this thread begins or goes on with the call."""
        self._is_left.clear()
        self.holder.resume()

    def leave(self) -> None:
        """Notes that no thread is inside the call."""
        self._is_left.set()

    def end(self) -> None:
        """Ends the call from any thread: at its next step, or at once if it waits for its turn."""
        self.interruption.end()
        self.holder.wake()

    def wait_until_left(self) -> None:
        """Waits until no other thread is inside the call."""
        if self.holder.thread is not threading.current_thread():
            self._is_left.wait()


class Run:
    """Iterates over steps, and has the result that they return once they are through."""

    result: GenerationResult

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Step]:
        self.result = yield from self._steps


def read_result(steps: Steps) -> GenerationResult:
    """Runs the steps to their end and returns the result."""
    run = Run(steps)
    with closing(steps):
        for _ in run:
            pass
    return run.result


def read_texts(steps: Steps, text: TextStream) -> Generator[str, None, GenerationResult]:
    """Yields pieces of the text as they come; returns the result."""
    run = Run(steps)
    with closing(steps):
        for _ in run:
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
    return run.result


def read_chunks(steps: Steps, call: Call) -> Generator[Chunk, None, GenerationResult]:
    """Yields a chunk a step, and a last one with the result, which is returned, too."""
    text, reader = call.text, call.form.reader()
    depths: list[int] = []  # of all tokens so far
    has_logprobs = call.params.logprobs is not None
    none = () if has_logprobs else None
    run = Run(steps)
    with closing(steps):
        for step in run:
            depths += step.depths
            pieces = _pieces(text, depths)
            released = "".join(piece.text for piece in pieces)
            yield Chunk(
                text=released,
                token_ids=tuple(step.tokens),
                logprobs=tuple(step.logprobs) if has_logprobs else None,
                depths=tuple(step.depths),
                pieces=pieces,
                num_drafted=step.num_drafted,
                text_ends=tuple(text.ends[len(depths) - len(step.tokens) : len(depths)]),
                parts=tuple(reader.push(released)),
            )
        pieces = _pieces(text, depths)
        rest = "".join(piece.text for piece in pieces)
        parts = tuple(reader.push(rest, is_end=True))
        yield Chunk(text=rest, logprobs=none, pieces=pieces, result=run.result, parts=parts)
    return run.result


def _pieces(text: TextStream, depths: list[int]) -> tuple[Piece, ...]:
    """Returns the text released since the last call, with the depths of its tokens."""
    return tuple(Piece(piece, depths[token]) for token, piece in text.take_pieces())
