"""Reads an answer while it comes: whole, by steps, in pieces of text or in chunks."""

from collections.abc import Generator
from contextlib import closing

from spec_runtime.loop.answering import Answering
from spec_runtime.loop.call import Call
from spec_runtime.loop.result import Chunk, GenerationResult, Piece
from spec_runtime.loop.step import Step


def read_result(answering: Answering) -> GenerationResult:
    """Returns the whole answer."""
    with closing(answering):
        while answering.next_step() is not None:
            pass
    return _result(answering)


def read_steps(answering: Answering) -> Generator[Step, None, GenerationResult]:
    """Yields what each step commits; returns the result."""
    with closing(answering):
        while (step := answering.next_step()) is not None:
            yield step
    return _result(answering)


def read_texts(answering: Answering) -> Generator[str, None, GenerationResult]:
    """Yields pieces of the text as they come; returns the result."""
    text = answering.call.text
    with closing(answering):
        while answering.next_step() is not None:
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
    return _result(answering)


def read_chunks(answering: Answering) -> Generator[Chunk, None, GenerationResult]:
    """Yields a chunk a step, and a last one with the result, which is returned, too."""
    reader = ChunkReader(answering.call)
    with closing(answering):
        while (step := answering.next_step()) is not None:
            yield reader.chunk(step)
        result = _result(answering)
        yield reader.last(result)
    return result


def _result(answering: Answering) -> GenerationResult:
    assert answering.result is not None, "it goes on"
    return answering.result


class ChunkReader:
    """Makes a chunk of each step of a call, and a last one of its result."""

    def __init__(self, call: Call) -> None:
        self._text, self._reader = call.text, call.form.reader()
        self._has_logprobs = call.params.logprobs is not None
        self._depths: list[int] = []  # of all tokens so far

    def chunk(self, step: Step) -> Chunk:
        """Returns what the step adds to the answer."""
        before = len(self._depths)
        self._depths += step.depths
        pieces, text = self._take()
        text_ends = tuple(self._text.ends[before : len(self._depths)])
        return Chunk(
            text=text,
            token_ids=tuple(step.tokens),
            logprobs=tuple(step.logprobs) if self._has_logprobs else None,
            depths=tuple(step.depths),
            pieces=pieces,
            num_drafted=step.num_drafted,
            text_ends=text_ends,
            parts=tuple(self._reader.push(text, False, step.tokens, text_ends)),
        )

    def last(self, result: GenerationResult) -> Chunk:
        """Returns what was held back of the text, with the result."""
        pieces, text = self._take()
        parts = tuple(self._reader.push(text, is_end=True, is_cut=result.is_cut))
        none = () if self._has_logprobs else None
        return Chunk(text=text, logprobs=none, pieces=pieces, result=result, parts=parts)

    def _take(self) -> tuple[tuple[Piece, ...], str]:
        """Returns the text released since the last call, with the depths of its tokens."""
        taken = self._text.take_pieces()
        pieces = tuple(Piece(piece, self._depths[token]) for token, piece in taken)
        return pieces, "".join(piece.text for piece in pieces)
