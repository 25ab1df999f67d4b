"""Writes answers as OpenAI's Responses API does: whole responses, and the typed events of a
stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from spec_runtime import Chunk, GenerationResult
from spec_runtime.constraints.tools import ToolCall
from spec_runtime.serving.answers import Answers
from spec_runtime.serving.streams import typed_event_of
from spec_runtime.serving.tool_calls import MakeReader

Object = dict[str, Any]


class ResponseReply:
    """Writes one response.

    `repeated` are the fields that say what was asked for. `make_reader` makes a reader of the tool
    calls in it, where the request has tools. `keep` is called with the response once it is
    complete.
    """

    def __init__(
        self,
        model: str,
        repeated: Object,
        make_reader: MakeReader | None,
        keep: Callable[[Object], None],
    ) -> None:
        self._head: Object = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "error": None,
            **repeated,
        }
        self._reader = None if make_reader is None else make_reader()
        self._keep = keep
        self._message = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._output: list[Object] = []  # items of a stream that are complete
        self._is_open = False  # whether a message has begun and not ended
        self._num_events = 0

    def whole(self, results: Sequence[GenerationResult]) -> Object:
        (result,) = results
        text, calls = result.text, list[ToolCall]()
        if self._reader is not None:
            text, calls = self._reader.read(text)
        items = [_call_item(call) for call in calls]
        if text or not items:
            items.insert(0, self._message_item(text, result))
        return self._finished(items, result)

    async def events(self, answers: Answers) -> AsyncGenerator[str, None]:
        """Yields the events up to response.completed or response.incomplete."""
        async for _, chunk in answers:
            for event in self.parts(chunk):
                yield typed_event_of(event)

    def parts(self, chunk: Chunk) -> Iterator[Object]:
        """Yields the events for one chunk of the answer; the last chunk's end the response."""
        if not self._num_events:
            begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
            begun["incomplete_details"] = None
            yield self._event("created", response=begun)
            yield self._event("in_progress", response=begun)
        yield from self._deltas(
            chunk.text if self._reader is None else self._reader.push(chunk.text)
        )
        if chunk.result is None:
            return
        calls: list[ToolCall] = []
        if self._reader is not None:
            rest, calls = self._reader.finish()
            yield from self._deltas(rest)
        if not (self._is_open or calls):  # an empty answer is a message, too
            yield from self._begin_message()
        if self._is_open:
            yield from self._end_message(chunk.result)
        for call in calls:
            yield from self._call_events(call)
        response = self._finished(self._output, chunk.result)
        yield self._event(response["status"], response=response)

    def _deltas(self, text: str) -> Iterator[Object]:
        if not text:
            return
        if not self._is_open:
            yield from self._begin_message()
        self._text += text
        yield self._part_event("output_text.delta", delta=text, logprobs=[])

    def _begin_message(self) -> Iterator[Object]:
        self._is_open = True
        item = {**self._message_item("", None), "content": []}
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._part_event("content_part.added", part=_part(""))

    def _end_message(self, result: GenerationResult) -> Iterator[Object]:
        item = self._message_item(self._text, result)
        self._output.append(item)
        yield self._part_event("output_text.done", text=self._text, logprobs=[])
        yield self._part_event("content_part.done", part=_part(self._text))
        yield self._event("output_item.done", output_index=0, item=item)

    def _call_events(self, call: ToolCall) -> Iterator[Object]:
        item, place = _call_item(call), {"output_index": len(self._output)}
        self._output.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("output_item.added", **place, item=begun)
        named = {**place, "item_id": item["id"]}
        yield self._event("function_call_arguments.delta", **named, delta=call.arguments_json)
        told = {"name": call.name, "arguments": call.arguments_json}
        yield self._event("function_call_arguments.done", **named, **told)
        yield self._event("output_item.done", **place, item=item)

    def _part_event(self, kind: str, **more: Any) -> Object:
        """Returns an event of the message's only part."""
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more: Any) -> Object:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **more}

    def _message_item(self, text: str, result: GenerationResult | None) -> Object:
        """Returns the message; without a result it is on its way."""
        status = "in_progress"
        if result is not None:
            status = "incomplete" if result.finish_reason == "length" else "completed"
        head = {"id": self._message, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [_part(text)]}

    def _finished(self, items: list[Object], result: GenerationResult) -> Object:
        """Returns the complete response, which is kept."""
        has_calls = any(item["type"] == "function_call" for item in items)
        is_cut = result.finish_reason == "length" and not has_calls
        response = {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": _usage(result),
        }
        self._keep(response)
        return response


def _part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall) -> Object:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{uuid.uuid4().hex[:24]}",
        "name": call.name,
        "arguments": call.arguments_json,
    }


def _usage(result: GenerationResult) -> Object:
    stats, answer = result.stats, len(result.token_ids)
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.prompt_tokens + answer,
    }
