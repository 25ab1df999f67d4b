"""Finds tool calls in answers, and holds back of a stream what may become one."""

from __future__ import annotations

import uuid
from typing import Any

from spec_runtime.constraints.tools import ToolCall, parse_calls

Object = dict[str, Any]
_TAG = "<tool_call>"
_TAGGED = ("hermes", "smollm")  # families whose calls follow that tag, wherever it is


class CallReader:
    """Reads one answer that may hold calls, as it comes.

    `push` returns the text that is surely none of a call: of tagged families what stands before the
    tag, of all others nothing. `finish` returns the rest of the text, and the calls.

    Example, hermes: "Let me", " see. <tool", "_call>…" give "Let me", " see.", "".
    """

    def __init__(self, family: str, at_most: int | None) -> None:
        self._family = family
        self._at_most = at_most
        self._text = ""
        self._num_sent = 0

    def push(self, text: str) -> str:
        self._text += text
        if self._family not in _TAGGED:
            return ""
        at = self._text.find(_TAG)
        if at < 0:
            at = len(self._text) - _overlap(self._text)
        free = max(self._num_sent, len(self._text[:at].rstrip()))  # as content is stripped
        sent, self._num_sent = self._text[self._num_sent : free], free
        return sent

    def finish(self) -> tuple[str, list[ToolCall]]:
        content, calls = parse_calls(self._text, self._family)
        if not calls:
            return self._text[self._num_sent :], []
        return content.removeprefix(self._text[: self._num_sent].strip()), calls[: self._at_most]


def _overlap(text: str) -> int:
    """Returns the length of the longest end of `text` with which the tag begins."""
    return next((n for n in range(len(_TAG) - 1, 0, -1) if text.endswith(_TAG[:n])), 0)


def written(calls: list[ToolCall]) -> list[Object]:
    """Returns calls as OpenAI's API writes them."""
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for call in calls
    ]
