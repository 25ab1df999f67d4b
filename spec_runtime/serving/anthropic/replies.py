"""Writes answers as Anthropic's API does: whole messages, and the typed events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from spec_runtime import Chunk, GenerationResult
from spec_runtime.constraints.tools import ToolCall
from spec_runtime.serving.answers import Answers
from spec_runtime.serving.streams import typed_event_of
from spec_runtime.serving.tool_calls import MakeReader

Object = dict[str, Any]


class MessageReply:
    """Writes one message; `make_reader` makes a reader of the tool calls in it, where the request
    has tools."""

    def __init__(self, model: str, make_reader: MakeReader | None = None) -> None:
        self._model = model
        self._reader = None if make_reader is None else make_reader()
        self._num_blocks = 0  # of a stream, that have begun
        self._is_open = False  # whether a block of text has begun and not ended

    def whole(self, results: Sequence[GenerationResult]) -> Object:
        (result,) = results
        text, calls = result.text, list[ToolCall]()
        if self._reader is not None:
            text, calls = self._reader.read(text)
        content: list[Object] = [{"type": "text", "text": text}] if text else []
        for call in calls:
            content.append({**_tool_use(call), "input": json.loads(call.arguments_json)})
        end = _end(result, bool(calls))
        return {**self._message(), "content": content, **end, "usage": _usage(result)}

    async def events(self, answers: Answers) -> AsyncGenerator[str, None]:
        """Yields the events up to message_stop.

        What the prompt has cost is known in the end: only then is it said how much of it was
        reused.
        """
        is_begun = False
        async for _, chunk in answers:
            if not is_begun:
                is_begun = True
                yield typed_event_of(self._start(answers.prompt_tokens))
            for event in self.parts(chunk):
                yield typed_event_of(event)

    def parts(self, chunk: Chunk) -> Iterator[Object]:
        """Yields the events for one chunk of the answer; the last chunk's end the message."""
        yield from self._text(chunk.text if self._reader is None else self._reader.push(chunk.text))
        if chunk.result is None:
            return
        calls: list[ToolCall] = []
        if self._reader is not None:
            rest, calls = self._reader.finish()
            yield from self._text(rest)
        if self._is_open:
            yield self._block_event("stop")
        for call in calls:
            self._num_blocks += 1
            yield self._block_event("start", content_block=_tool_use(call))
            delta = {"type": "input_json_delta", "partial_json": call.arguments_json}
            yield self._block_event("delta", delta=delta)
            yield self._block_event("stop")
        delta = _end(chunk.result, bool(calls))
        yield {"type": "message_delta", "delta": delta, "usage": _usage(chunk.result)}
        yield {"type": "message_stop"}

    def _text(self, text: str) -> Iterator[Object]:
        if not text:
            return
        if not self._is_open:
            self._is_open = True
            self._num_blocks += 1
            yield self._block_event("start", content_block={"type": "text", "text": ""})
        yield self._block_event("delta", delta={"type": "text_delta", "text": text})

    def _block_event(self, kind: str, **more: Object) -> Object:
        """Returns an event of the block that began last."""
        return {"type": f"content_block_{kind}", "index": self._num_blocks - 1, **more}

    def _start(self, prompt_tokens: int) -> Object:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None}
        message = {**self._message(), "content": [], **ends, "usage": usage}
        return {"type": "message_start", "message": message}

    def _message(self) -> Object:
        identity = f"msg_{uuid.uuid4().hex}"
        return {"id": identity, "type": "message", "role": "assistant", "model": self._model}


def _tool_use(call: ToolCall) -> Object:
    """Returns the block of a call as it begins in a stream, without its input."""
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid.uuid4().hex[:24]}",
        "name": call.name,
        "input": {},
    }


def _end(result: GenerationResult, has_calls: bool) -> Object:
    """Returns why a message ended, and by which stop sequence."""
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(result.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": result.stop}
    reason = "max_tokens" if result.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(result: GenerationResult) -> Object:
    """Returns the tokens by kind; those read from the cache do not count as input."""
    reused = result.stats.reused_tokens
    return {
        "input_tokens": result.stats.prompt_tokens - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": len(result.token_ids),
    }
