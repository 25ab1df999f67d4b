"""Finds tool calls in answers as models write them, and hands their arguments on as they come.

The forms are those of constraints/tools.py, whatever the model's family: after a marker, in a
fenced block, or bare where an answer begins or after another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from spec_runtime.constraints.tools import NAME, ToolCall, checked_tools, require_family
from spec_runtime.text.messages import Tools
from spec_runtime.text.stream import overlap

_MARKERS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "functools", "```")
_MARKER = re.compile("|".join([*map(re.escape, _MARKERS[:-1]), r"```\w*"]))
_CLOSINGS = ("</tool_call>", "<|/tool_call|>", "[/TOOL_CALLS]")
_SPACE = re.compile(r"\s*")

# The beginning of a call: `{"name": "f", "arguments": `, with further keys before.
_KEY = re.compile(r'\s*"(\w+)"\s*:\s*(?=\S)')
_BEGUN_KEY = re.compile(r'\s*(?:"\w*(?:"\s*(?::\s*)?)?)?\Z')
_STRING = r'"(?:[^"\\]|\\.)*'
_VALUE = re.compile(rf'\s*({_STRING}"|[\w.+-]+)\s*([,}}])')
_BEGUN_VALUE = re.compile(rf'\s*(?:{_STRING}(?:\\|"\s*)?|[\w.+-]*\s*)\Z')
_NAMED = re.compile(rf"({NAME.pattern})(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?={{)")
_BEGUN_NAMED = re.compile(rf"({NAME.pattern})(?:\[[\w\]\[]*)?\s*\Z")
_MAX_HEAD = 1000  # characters of that beginning

# What stands between two calls: the rest of the first one's object, separators, closing marks.
_MEMBER = rf',\s*"\w+"\s*:\s*(?:{_STRING}"|[\w.+-]+)(?=\s*[,}}])'
_BETWEEN = re.compile(rf"(?:{_MEMBER}|[\s,;}}\]]|{'|'.join(map(re.escape, _CLOSINGS))})*")
_BEGUN_MEMBER = re.compile(rf'"\w*(?:"\s*(?::\s*(?:{_STRING}(?:\\|"\s*)?|[\w.+-]*)?)?)?\Z')
_BRACKET = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class Part(NamedTuple):
    """A piece of an answer: of its thinking or its text, the name of a call that begins, or a piece
    of that call's arguments, which are JSON."""

    kind: Literal["thinking", "text", "call", "arguments"]
    text: str


class _Head(NamedTuple):
    """Holds where the object of a call begins, its name, where its arguments begin, and how deep
    inside the object that is. Without a name the object has to be read to its end first."""

    begin: int
    name: str | None
    arguments: int
    depth: int


def parse_calls(text: str, family: str, tools: Any = None) -> tuple[str, list[ToolCall]]:
    """Returns an answer's text without its calls, and the calls in their order.

    With `tools`, functions in OpenAI's form, calls of functions that are not among them stay text.
    Raises UserError for an unknown family and for tools in another form.

    Example, hermes: 'Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>' gives
    'Let me see.' and one call of `now` with the arguments '{}'.
    """
    return joined(CallReader(family, tools, streams=False).push(text, is_end=True))


def joined(parts: list[Part]) -> tuple[str, list[ToolCall]]:
    """Returns the text and the calls that these parts make up."""
    calls: list[ToolCall] = []
    for part in parts:
        if part.kind == "call":
            calls.append(ToolCall(part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments_json + part.text)
    return "".join(part.text for part in parts if part.kind == "text"), calls


class CallReader:
    """Reads one answer that may hold calls of `tools`, None for any, and takes `at_most` of them.

    `push` returns the parts that a piece of the answer completes. Where it `streams`, arguments
    come out as they are written, as soon as the name of a tool and the beginning of its arguments
    are there; what is no JSON after that is given out all the same, and `is_cut` says so. Otherwise
    a call comes out once its arguments are whole, and what is no whole call stays text.

    Example: "Let me", " see. <tool", '_call>{"name": "now", "arguments": {', "}}</tool_call>" give
    the texts "Let me" and " see.", the call "now", and the arguments "{" and "}".
    """

    def __init__(
        self,
        family: str,
        tools: Tools | None = None,
        at_most: int | None = None,
        streams: bool = True,
    ) -> None:
        require_family(family)
        self.is_cut = False  # whether the last call's arguments are no whole JSON object
        self._is_named = family == "mistral"  # whose calls may be names before their arguments
        self._names: set[str] | None = None
        if tools is not None:
            self._names = {tool["function"]["name"] for tool in checked_tools(tools)}
        self._at_most, self._streams = at_most, streams
        self._text = ""
        self._at = 0  # up to here it is read
        self._sent = 0  # up to here it is given out, or left out
        self._is_end = False
        self._is_begin = True  # nothing but white space was read
        self._is_fenced = False  # whether the last call stands in a fenced block
        self._has_text = self._follows_call = False
        self._num_calls = 0
        self._head = _Head(0, None, 0, 0)  # of the call on its way
        self._depth, self._is_string = 0, False  # where `_at` is inside of it
        self._parts: list[Part] = []
        self._step: Callable[[], bool] = self._read_text

    def push(self, text: str, is_end: bool = False) -> list[Part]:
        """Returns the parts that this text completes; at the end, also what was held back."""
        self._text += text
        self._is_end = is_end
        self._parts = []
        while self._step():
            pass
        if is_end:
            self._release(len(self._text))
        return self._parts

    # ---- the three states; each returns whether there is more to read ----

    def _read_text(self) -> bool:
        """Gives out text up to what is a call, or may be one."""
        text = self._text
        if self._is_begin:
            begin = self._after_space(self._at)
            if begin == len(text):
                return False
            head = self._head_at(begin, self._is_named)
            if head is True:
                return False
            self._is_begin = False
            if head:
                return self._begin_call(begin, head)
        for found in _MARKER.finditer(text, self._at):
            is_named = self._is_named and found[0] == "[TOOL_CALLS]"
            head = self._head_at(found.end(), is_named)
            if head is False:
                continue
            self._at = found.start()
            self._release(self._at)
            return head is not True and self._begin_call(self._at, head)
        self._at = len(text) - overlap(text[self._at :], *_MARKERS)
        self._release(self._at)
        return False

    def _read_between(self) -> bool:
        """Leaves out what stands after a call, up to the next one or to text."""
        text = self._text
        found = _BETWEEN.match(text, self._at)
        at = self._at if found is None else found.end()
        if self._is_fenced and text.startswith("```", at):
            self._is_fenced, self._at = False, at + 3
            return True
        marks = (*_CLOSINGS, *(["```"] if self._is_fenced else []))
        rest = text[at : at + _MAX_HEAD]
        if any(mark.startswith(rest) for mark in marks):  # also where nothing is left
            self._sent = len(text)
            return False
        if _BEGUN_MEMBER.match(rest) and not self._is_end:
            return False
        head = self._head_at(at, self._is_named)
        if head is True:
            return False
        self._at = self._sent = at
        if head:
            return self._begin_call(at, head)
        self._step = self._read_text
        return True

    def _read_call(self) -> bool:
        """Reads the arguments of a call whose name is known, or else its whole object."""
        head, is_whole = self._head, self._find_end()
        is_out = self._streams and head.name is not None and self._is_wanted
        if is_out:
            self._give("arguments", self._text[self._sent : self._at])
            self._sent = self._at
        if not is_whole:
            if not self._is_end:
                return False
            self.is_cut = is_out
            self._at, self._step = len(self._text), self._read_text
            return True
        if head.name is None:
            call = _call(_parsed(self._text[head.begin : self._at]))
        else:
            arguments = self._text[head.arguments : self._at]
            is_object = isinstance(_parsed(arguments), dict)
            call = ToolCall(head.name, arguments) if is_object else None
        if is_out:
            self.is_cut = call is None
        elif call is None or not self._is_known(call.name):
            self._step = self._read_text
            return True
        elif self._is_wanted:
            self._give("call", call.name)
            self._give("arguments", call.arguments_json)
        self._num_calls += 1
        self._sent, self._follows_call, self._step = self._at, True, self._read_between
        return True

    def _begin_call(self, begin: int, head: _Head) -> bool:
        self._release(begin)
        self._is_fenced = self._is_fenced or self._text.startswith("```", begin)
        self._head, self._depth, self._is_string = head, head.depth, False
        self._at = head.arguments
        if self._streams and head.name is not None and self._is_wanted:
            self._give("call", head.name)
            self._sent = self._at
        self._step = self._read_call
        return True

    # ---- looking ahead ----

    def _head_at(self, at: int, is_named: bool) -> _Head | bool:
        """Returns the beginning of a call that stands here, False if there is none, and True if
        there may be one once more has come."""
        text, at = self._text, self._after_space(at)
        if text.startswith("[", at):
            at = self._after_space(at + 1)
        begin, name, depth = at, None, 1
        if at == len(text):
            return not self._is_end
        if not text.startswith("{", at):
            return self._named_at(at) if is_named else False
        at += 1
        while at - begin < _MAX_HEAD:
            key = _KEY.match(text, at)
            if key is None:
                return _BEGUN_KEY.match(text, at) is not None and not self._is_end
            at = key.end()
            if key[1] in ("arguments", "parameters"):
                if name is not None and text[at] == "{":
                    return _Head(begin, name, at, depth)
                return _Head(begin, None, begin, 0)
            if key[1] == "function" and text[at] == "{":
                at, depth = at + 1, depth + 1
                continue
            value = _VALUE.match(text, at)
            if key[1] not in ("name", "type", "id"):
                return False
            if value is None:
                return _BEGUN_VALUE.match(text, at) is not None and not self._is_end
            if key[1] == "name":
                name = _parsed(value[1])
                if not self._is_known(name):
                    return False
            if value[2] == "}":
                return False
            at = value.end()
        return False

    def _named_at(self, at: int) -> _Head | bool:
        """Does what `_head_at` does for a name before its arguments, as Mistral's."""
        found = _NAMED.match(self._text, at)
        if found is not None:
            is_known = self._is_known(found[1])
            return _Head(at, found[1], found.end(), 0) if is_known else False
        begun = _BEGUN_NAMED.match(self._text, at)
        if begun is None or self._is_end:
            return False
        return self._names is None or any(name.startswith(begun[1]) for name in self._names)

    def _find_end(self) -> bool:
        """Moves `_at` to the end of the arguments, or of the object, and returns True; to the end
        of the text if they go on."""
        text, outer = self._text, self._head.depth
        for found in _BRACKET.finditer(text, self._at):
            bracket = found[0]
            self._at = found.end()
            if bracket == '"':
                self._is_string = not self._is_string
            elif self._is_string or bracket.startswith("\\"):
                continue
            elif bracket in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= outer:
                    return True
        waits = text.endswith("\\") and self._at < len(text) and not self._is_end
        self._at = len(text) - waits  # what this escapes has still to come
        return False

    def _after_space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return at if found is None else found.end()

    # ---- what comes out ----

    @property
    def _is_wanted(self) -> bool:
        """Says whether one more call may come out."""
        return self._at_most is None or self._num_calls < self._at_most

    def _is_known(self, name: object) -> bool:
        return isinstance(name, str) and (self._names is None or name in self._names)

    def _give(self, kind: Literal["text", "call", "arguments"], text: str) -> None:
        if text:
            self._parts.append(Part(kind, text))

    def _release(self, end: int) -> None:
        """Gives out the text up to `end`, but for the white space at its end, which a call may
        follow. Texts before and after a call stand on lines of their own."""
        begin = self._after_space(self._sent) if self._follows_call else self._sent
        if self._num_calls or not self._is_end or end < len(self._text):
            end = begin + len(self._text[begin:end].rstrip())
        if end > begin:
            is_next = self._follows_call and self._has_text
            self._give("text", "\n" * is_next + self._text[begin:end])
            self._has_text, self._follows_call, self._sent = True, False, end


def _parsed(text: str) -> Any:
    """Returns what a JSON text says, None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    """Returns a parsed JSON value as a call, None if it is none."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = _parsed(arguments or "{}")
        arguments = False if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        return None
    return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False))
