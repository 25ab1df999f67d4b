"""Finds tool calls in answers, and holds back of a stream what may become one."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

from spec_runtime.constraints.tools import ToolCall, parse_calls
from spec_runtime.text.messages import Tools

Object = dict[str, Any]
_TAG = "<tool_call>"
_TAGGED = ("hermes", "smollm")  # families whose calls follow that tag, wherever it is
_BARE = '{"name":'  # begins a call without the tag, perhaps in a list


class CallReader:
    """Reads one answer that may hold calls of `tools`, as it comes, and takes `at_most` of them.

    `push` returns the text that is surely none of a call: of tagged families what stands before the
    tag, unless it begins as a call does; of all others nothing. `finish` returns the rest of the
    text, and the calls.

    Example, hermes: "Let me", " see. <tool", "_call>…" give "Let me", " see.", "".
    """

    def __init__(self, family: str, tools: Tools, at_most: int | None = None) -> None:
        self._family = family
        self._tools = tools
        self._at_most = at_most
        self._text = ""
        self._num_sent = 0

    def push(self, text: str) -> str:
        self._text += text
        if self._family not in _TAGGED or _may_be_bare(self._text):
            return ""
        at = self._text.find(_TAG)
        if at < 0:
            at = len(self._text) - _overlap(self._text)
        free = max(self._num_sent, len(self._text[:at].rstrip()))  # as content is stripped
        sent, self._num_sent = self._text[self._num_sent : free], free
        return sent

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns a whole answer's text without its calls, and the calls."""
        begin = self.push(text)
        rest, calls = self.finish()
        return begin + rest, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        content, calls = parse_calls(self._text, self._family, self._tools)
        is_sent_as_text = self._num_sent > 0 and _TAG not in self._text
        if not calls or is_sent_as_text:
            return self._text[self._num_sent :], []
        return content.removeprefix(self._text[: self._num_sent].strip()), calls[: self._at_most]


MakeReader = Callable[[], CallReader]  # makes one for each answer


def _may_be_bare(text: str) -> bool:
    """Returns whether an answer that begins so may be nothing but calls without tags."""
    return _BARE.startswith(re.sub(r"\s", "", text[:200]).removeprefix("[")[: len(_BARE)])


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
