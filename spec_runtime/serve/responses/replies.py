"""Writes answers as OpenAI's Responses API does: whole responses, and the typed events of a
stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from spec_runtime import Chunk, GenerationResult, Part
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.openai.replies import (
    Shown,
    ShownCalls,
    ShownParts,
    TokenTexts,
    whole_chunk,
)
from spec_runtime.serve.responses.requests import encrypted
from spec_runtime.serve.responses.tools import Tools, input_of
from spec_runtime.serve.streams import typed_event_of

Object = dict[str, Any]
_PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}  # of the items' ids
_EVENTS = {
    "text": "output_text",
    "thinking": "reasoning_text",
    "call": "function_call_arguments",
}


class Shape(NamedTuple):
    """Says how items are written: calls as those of these tools, and thinking with a summary, or
    with the text that clients keep, where the request asks for these."""

    tools: Tools = Tools(())
    summarises: bool = False
    encrypts: bool = False


class ResponseReply:
    """Writes one response.

    `repeated` are the fields that say what was asked for. `texts` writes the tokens whose
    log-probabilities are asked for. `keep` is called with the response once it is complete.
    """

    def __init__(
        self,
        model: str,
        repeated: Object,
        texts: TokenTexts,
        keep: Callable[[Object], None],
        shape: Shape | None = None,
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
        self._texts = texts
        self._keep = keep
        self._shape = shape or Shape()
        self._shown = ShownParts(texts.tokens_of_choice())
        self._calls = ShownCalls()
        self._output: list[Object] = []  # items that are complete
        self._item: _Item | None = None  # the one that is on its way
        self._num_events = 0

    def whole(self, results: Sequence[GenerationResult]) -> Object:
        (result,) = results
        *_, last = self.parts(whole_chunk(result), result.form)
        response: Object = last["response"]
        return response

    def events(self, answers: Answers, index: int, chunk: Chunk) -> Iterator[str]:
        yield from map(typed_event_of, self.parts(chunk, answers.form))

    def last_events(self, answers: Answers) -> Iterator[str]:
        return iter(())

    def parts(self, chunk: Chunk, form: AnswerForm) -> Iterator[Object]:
        """Yields the events for one chunk of an answer of this form; the last chunk's end the
        response."""
        if not self._num_events:
            begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
            begun["incomplete_details"] = None
            yield self._event("created", response=begun)
            yield self._event("in_progress", response=begun)
        for part, shown in self._shown.push(chunk, form):
            self._calls.add(part)
            yield from self._events_of(part, shown)
        if chunk.result is None:
            return
        if not (self._item or self._output):  # an empty answer is a message, too
            yield from self._begin(_Item("text", self._shape))
        is_whole = self._calls.are_whole(chunk.result)
        is_cut = chunk.result.finish_reason == "length" and not is_whole
        yield from self._end("incomplete" if is_cut else "completed")
        response = self._finished(chunk.result, is_cut)
        yield self._event(response["status"], response=response)

    def _events_of(self, part: Part, shown: Shown) -> Iterator[Object]:
        """Yields the events for a part of the answer and the tokens that it shows. Begins a new
        item where the part is not of the one on its way."""
        kind = "call" if part.kind == "arguments" else part.kind
        if part.kind == "call" or self._item is None or kind != self._item.kind:
            yield from self._end("completed")
            yield from self._begin(_Item(kind, self._shape, part.text))
        if part.kind != "call":
            assert self._item is not None
            self._item.text += part.text
            more: Object = {}
            if kind == "text":
                more["logprobs"] = self._texts.response(shown)
                self._item.logprobs += more["logprobs"]
            if not self._item.is_custom:
                yield self._item_event(f"{_EVENTS[kind]}.delta", delta=part.text, **more)

    def _begin(self, item: _Item) -> Iterator[Object]:
        self._item = item
        begun = item.written("in_progress")
        if item.kind != "call":
            begun["content"] = []
        yield self._event("output_item.added", output_index=len(self._output), item=begun)
        if item.kind != "call":
            yield self._item_event("content_part.added", part=item.part())

    def _end(self, status: str) -> Iterator[Object]:
        """Yields the events that end the item on its way, if there is one."""
        item = self._item
        if item is None:
            return
        event = _EVENTS[item.kind]
        if item.is_custom:
            event, text = "custom_tool_call_input", input_of(item.text)
            yield self._item_event(f"{event}.delta", delta=text)
            told: Object = {"input": text}
        elif item.kind == "call":
            told = {"name": item.name, "arguments": item.text}
        else:
            told = {"text": item.text}
            if item.kind == "text":
                told["logprobs"] = item.logprobs
        yield self._item_event(f"{event}.done", **told)
        if item.kind != "call":
            yield self._item_event("content_part.done", part=item.part())
        yield from self._summary(item)
        written = item.written(status)
        yield self._event("output_item.done", output_index=len(self._output), item=written)
        self._output.append(written)
        self._item = None

    def _summary(self, item: _Item) -> Iterator[Object]:
        """Yields the events of thinking's summary, which is all of it, where one is asked for."""
        for part in item.summary:
            place: Object = {"item_id": item.id, "output_index": len(self._output)}
            place["summary_index"], text = 0, part["text"]
            begun = {**part, "text": ""}
            yield self._event("reasoning_summary_part.added", **place, part=begun)
            yield self._event("reasoning_summary_text.delta", **place, delta=text)
            yield self._event("reasoning_summary_text.done", **place, text=text)
            yield self._event("reasoning_summary_part.done", **place, part=part)

    def _item_event(self, kind: str, **more: Any) -> Object:
        """Returns an event of the item on its way, or of its only part."""
        assert self._item is not None
        place: Object = {"item_id": self._item.id, "output_index": len(self._output)}
        if self._item.kind != "call":
            place["content_index"] = 0
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more: Any) -> Object:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **more}

    def _finished(self, result: GenerationResult, is_cut: bool) -> Object:
        """Returns the complete response, which is kept."""
        response = {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(result),
        }
        self._keep(response)
        return response


class _Item:
    """An item of the output that is on its way: a message, thinking, or a call of `name`."""

    def __init__(self, kind: str, shape: Shape, name: str = "") -> None:
        self.kind, self.name, self._shape = kind, name, shape
        self.is_custom = kind == "call" and shape.tools.is_custom(name)
        self.id = f"{'ctc' if self.is_custom else _PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.text = ""  # or the arguments
        self.logprobs: list[Object] = []  # of a message's tokens
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    @property
    def summary(self) -> list[Object]:
        """Returns the parts of thinking's summary: all of it, where one is asked for."""
        is_asked = self.kind == "thinking" and self._shape.summarises and self.text
        return [{"type": "summary_text", "text": self.text}] if is_asked else []

    def part(self) -> Object:
        """Returns the only part of the item's content."""
        if self.kind == "thinking":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": [*self.logprobs],
        }

    def written(self, status: str) -> Object:
        """Returns the item as it is so far."""
        if self.kind == "call":
            called = self._shape.tools.called(self.name, self.text)
            return {"id": self.id, "status": status, "call_id": self._call_id, **called}
        said: Object = {"status": status, "content": [self.part()]}
        if self.kind == "thinking":
            if self._shape.encrypts:
                said["encrypted_content"] = encrypted(self.text)
            return {"id": self.id, "type": "reasoning", "summary": self.summary, **said}
        return {"id": self.id, "type": "message", "role": "assistant", **said}


def _usage(result: GenerationResult) -> Object:
    stats, answer = result.stats, len(result.token_ids)
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": result.usage.reasoning_tokens},
        "total_tokens": stats.prompt_tokens + answer,
    }
