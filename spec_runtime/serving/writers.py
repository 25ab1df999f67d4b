"""Turns the chunks and results of a request into the choices of OpenAI's two kinds of replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from spec_runtime import Chunk, GenerationResult
from spec_runtime.serving.replies import (
    Heading,
    Object,
    TokenTexts,
    chat_heading,
    completion_heading,
    finish_reason,
)


class Writer(Protocol):
    """Writes the choices of one request."""

    heading: Heading

    def parts(self, index: int, chunk: Chunk) -> Iterator[Object]:
        """Yields the choices that a stream has for this chunk; the last chunk's says why it
        ended."""
        ...

    def whole(self, index: int, result: GenerationResult) -> Object:
        """Returns the whole choice."""
        ...


class ChatWriter:
    """Writes choices of /v1/chat/completions."""

    def __init__(self, model: str, texts: TokenTexts) -> None:
        self.heading = chat_heading(model)
        self._texts = texts
        self._begun: set[int] = set()

    def parts(self, index: int, chunk: Chunk) -> Iterator[Object]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._part(index, {"role": "assistant", "content": ""})
        logprobs = self._texts.chat(chunk.logprobs) if chunk.logprobs else None
        if chunk.text or logprobs:
            yield self._part(index, {"content": chunk.text}, logprobs)
        if chunk.result is not None:
            yield {**self._part(index, {}), "finish_reason": finish_reason(chunk.result)}

    def _part(self, index: int, delta: Object, logprobs: Object | None = None) -> Object:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def whole(self, index: int, result: GenerationResult) -> Object:
        logprobs = result.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None if logprobs is None else self._texts.chat(logprobs),
            "finish_reason": finish_reason(result),
        }


class CompletionWriter:
    """Writes choices of /v1/completions; `echoes` are the prompts that go before the texts, by
    choice, or None."""

    def __init__(self, model: str, texts: TokenTexts, echoes: list[str] | None) -> None:
        self.heading = completion_heading(model)
        self._texts = texts
        self._echoes = echoes
        self._lengths: dict[int, int] = {}  # of the text so far

    def parts(self, index: int, chunk: Chunk) -> Iterator[Object]:
        offset = self._lengths.get(index)
        text = chunk.text
        if offset is None and self._echoes is not None:
            text = self._echoes[index] + text
        offset = offset or 0
        self._lengths[index] = offset + len(text)
        logprobs = self._texts.completion(chunk.logprobs, offset) if chunk.logprobs else None
        if text or logprobs or chunk.result is not None:
            reason = None if chunk.result is None else finish_reason(chunk.result)
            yield self._choice(index, text, logprobs, reason)

    def whole(self, index: int, result: GenerationResult) -> Object:
        text = result.text if self._echoes is None else self._echoes[index] + result.text
        logprobs = result.logprobs
        shown = None if logprobs is None else self._texts.completion(logprobs, 0)
        return self._choice(index, text, shown, finish_reason(result))

    def _choice(self, index: int, text: str, logprobs: Object | None, reason: str | None) -> Object:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
