"""Writes answers as Anthropic's API does: whole messages, and the typed events of a stream."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from spec_runtime import Chunk, GenerationResult, Part
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.openai.replies import ends_in_calls
from spec_runtime.serve.streams import typed_event_of

Object = dict[str, Any]
# Blocks as they begin in a stream. The signature is checked nowhere, but clients expect one.
_BEGUN: dict[str, Object] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
# The type of the deltas of each kind of block, and their field that has the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageReply:
    """Writes one message. Its thinking is left out unless the request `shows_thinking`."""

    def __init__(self, model: str, shows_thinking: bool = True) -> None:
        self._model = model
        self._shows_thinking = shows_thinking
        self._is_begun = False
        self._num_blocks = 0  # of a stream, that have begun
        self._open = ""  # the kind of the block that has begun and not ended

    def whole(self, results: Sequence[GenerationResult]) -> Object:
        (result,) = results
        content: list[Object] = []
        if result.reasoning and self._shows_thinking:
            content.append({**_BEGUN["thinking"], "thinking": result.reasoning})
        if result.content:
            content.append({"type": "text", "text": result.content})
        for name, arguments in result.tool_calls:
            content.append({**_tool_use(name), "input": json.loads(arguments)})
        end = _end(result)
        return {**self._message(), "content": content, **end, "usage": _usage(result)}

    def events(self, answers: Answers, index: int, chunk: Chunk) -> Iterator[str]:
        """Yields the events for one chunk.

        What the prompt has cost is known in the end: only then is it said how much of it was
        reused.
        """
        if not self._is_begun:
            self._is_begun = True
            yield typed_event_of(self._start(answers.prompt_tokens))
        yield from map(typed_event_of, self.parts(chunk))

    def last_events(self, answers: Answers) -> Iterator[str]:
        return iter(())

    def parts(self, chunk: Chunk) -> Iterator[Object]:
        """Yields the events for one chunk of the answer; the last chunk's end the message."""
        for part in chunk.parts:
            if part.kind != "thinking" or self._shows_thinking:
                yield from self._events_of(part)
        if chunk.result is None:
            return
        yield from self._end_block()
        delta = _end(chunk.result)
        yield {"type": "message_delta", "delta": delta, "usage": _usage(chunk.result)}
        yield {"type": "message_stop"}

    def _events_of(self, part: Part) -> Iterator[Object]:
        """Yields the events for a part of the answer: its block begins if it is another one."""
        kind = "call" if part.kind == "arguments" else part.kind
        if part.kind == "call" or kind != self._open:
            yield from self._end_block()
            self._open = kind
            self._num_blocks += 1
            block = _tool_use(part.text) if kind == "call" else _BEGUN[kind]
            yield self._block_event("start", content_block=block)
        if part.kind != "call":
            name, field = _DELTAS[kind]
            yield self._block_event("delta", delta={"type": name, field: part.text})

    def _end_block(self) -> Iterator[Object]:
        if self._open:
            yield self._block_event("stop")
        self._open = ""

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


def _tool_use(name: str) -> Object:
    """Returns the block of a call as it begins in a stream, without its input."""
    identity = f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": identity, "name": name, "input": {}}


def _end(result: GenerationResult) -> Object:
    """Returns why a message ended, and by which stop sequence."""
    if ends_in_calls(result):
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
