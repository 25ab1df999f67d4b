"""Finds tool calls in answers, and holds back of a stream what may become one."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from spec_runtime.constraints.tools import parse_calls
from spec_runtime.text.messages import Tools
from spec_runtime.text.stream import overlap

_TAG = "<tool_call>"
_TAGGED = ("hermes", "smollm")  # families whose calls follow that tag, wherever it is
_BARE = '{"name":'  # begins a call without the tag, perhaps in a list


class Part(NamedTuple):
    """A piece of an answer: of its thinking or its text, the name of a call that begins, or a piece
    of that call's arguments, which are JSON."""

    kind: Literal["thinking", "text", "call", "arguments"]
    text: str


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

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._family not in _TAGGED or _may_be_bare(self._text):
            return []
        at = self._text.find(_TAG)
        if at < 0:
            at = len(self._text) - overlap(self._text, _TAG)
        free = max(self._num_sent, len(self._text[:at].rstrip()))  # as content is stripped
        sent, self._num_sent = self._text[self._num_sent : free], free
        return [Part("text", sent)]

    def finish(self) -> list[Part]:
        content, calls = parse_calls(self._text, self._family, self._tools)
        is_sent_as_text = self._num_sent > 0 and _TAG not in self._text
        if not calls or is_sent_as_text:
            return [Part("text", self._text[self._num_sent :])]
        parts = [Part("text", content.removeprefix(self._text[: self._num_sent].strip()))]
        for call in calls[: self._at_most]:
            parts += [Part("call", call.name), Part("arguments", call.arguments_json)]
        return parts


def _may_be_bare(text: str) -> bool:
    """Returns whether an answer that begins so may be nothing but calls without tags."""
    return _BARE.startswith(re.sub(r"\s", "", text[:200]).removeprefix("[")[: len(_BARE)])
