"""Finds tool calls in answers as models write them, and hands their arguments on as they come.

A call is read whatever the model's family: after a mark of dialogue/call_forms.py, in a fenced
block, or bare where an answer begins or after another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from spec_runtime.dialogue.call_forms import (
    CLOSINGS,
    FORMS,
    MISTRAL,
    OPENINGS,
    PYTHON,
    RUN,
    CallForm,
    LiteralEnd,
    Parameters,
    after_wrappers,
    read_pieces,
    typed,
)
from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.stream import overlap
from spec_runtime.dialogue.tools import ToolCall, checked_tools, require_family

_MARKERS = (*OPENINGS, "```")
_MARKER = re.compile("|".join([RUN, *map(re.escape, OPENINGS), r"```\w{0,30}"]))
_SPACE = re.compile(r"\s*")
_FEW_SPACES = re.compile(r"\s{0,1000}")  # within a call; more of them end it

# The beginning of a call: `{"name": "f", "arguments": `, with further keys before.
_KEY = re.compile(r'\s*"(\w+)"\s*:\s*(?=\S)')
_BEGUN_KEY = re.compile(r'\s*(?:"\w*(?:"\s*(?::\s*)?)?)?\Z')
_STRING = r'"(?:[^"\\]|\\.){0,1000}'
_VALUE = re.compile(rf'\s*({_STRING}"|[\w.+-]+)\s*([,}}])')
_BEGUN_VALUE = re.compile(rf'\s*(?:{_STRING}(?:\\|"\s*)?|[\w.+-]*\s*)\Z')
_NAME_KEYS = ("name", "tool_name")
_MAX_HEAD = 1000  # characters of that beginning, within which each of its strings begins
_MAX_HELD = 2 * _MAX_HEAD  # characters that wait for what follows to say what they are

# What stands between two calls: the rest of the first one's object, separators, closing marks.
_MEMBER = rf',\s*"\w+"\s*:\s*(?:{_STRING}"|[\w.+-]+)(?=\s*[,}}])'
_BETWEEN = re.compile(rf"(?:{_MEMBER}|[\s,;}}\]]|{'|'.join(map(re.escape, CLOSINGS))})*")
_BEGUN_MEMBER = re.compile(rf'"\w*(?:"\s*(?::\s*(?:{_STRING}(?:\\|"\s*)?|[\w.+-]*)?)?)?\Z')
_BRACKET = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class Part(NamedTuple):
    """A piece of an answer: of its thinking or its text, the name of a call that begins, or a piece
    of that call's arguments, which are JSON."""

    kind: Literal["thinking", "text", "call", "arguments"]
    text: str


class _Head(NamedTuple):
    """Holds where a call begins, its name, and where its arguments begin.

    `depth` says how deep inside the call's JSON object the arguments lie; or the call has a `form`.
    Without a name the object has to be read to its end first.
    """

    begin: int
    name: str | None
    arguments: int
    depth: int = 0
    form: CallForm | None = None

    @property
    def parameters(self) -> Parameters | None:
        """Says how the arguments are written if they are no JSON."""
        return self.form and self.form.parameters


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
    calls: list[tuple[str, list[str]]] = []  # names, and the pieces of their arguments
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, []))
        elif part.kind == "arguments":
            calls[-1][1].append(part.text)
    text = "".join(part.text for part in parts if part.kind == "text")
    return text, [ToolCall(name, "".join(pieces)) for name, pieces in calls]


class CallReader:
    """Reads one answer that may hold calls of `tools`, None for any, and takes `at_most` of them.

    `push` returns the parts that a piece of the answer completes. Where it `streams`, arguments
    come out as they are written, as soon as the name of a tool and the beginning of its arguments
    are there; what is no JSON after that is given out all the same. Otherwise a call comes out once
    its arguments are whole, and what is no whole call stays text.

    Example: "Let me", " see. <tool", '_call>{"name": "now", "arguments": {', "}}</tool_call>" give
    the texts "Let me" and " see.", the call "now", and the arguments "{" and "}".

    A push takes as long as its own text is, however much came before: what is read is not read
    again, and at most `_MAX_HELD` characters wait for what follows them.
    """

    def __init__(
        self,
        family: str,
        tools: Tools | None = None,
        at_most: int | None = None,
        streams: bool = True,
    ) -> None:
        require_family(family)
        self._is_named = family == "mistral"  # whose calls may be names before their arguments
        # types of the tools' parameters
        self._types = None if tools is None else checked_tools(tools).types
        self._at_most, self._streams = at_most, streams
        self._text = ""
        self._at = 0  # up to here it is read
        self._sent = 0  # up to here it is given out, or left out
        self._blank = 0  # from there to here is nothing but white space
        self._is_end = False
        self._is_begin = True  # nothing but white space was read
        self._is_fenced = False  # whether the last call stands in a fenced block
        self._has_text = self._follows_call = False
        self._num_calls = 0
        self._head = _Head(0, None, 0)  # of the call on its way
        self._depth, self._is_string = 0, False  # where `_at` is inside of it
        self._is_list = True  # nothing has ended the list in which the last call stands
        self._written: list[str] = []  # pieces of its arguments that are not given out
        self._has_parameters = False  # among these, or those given out
        self._searched = 0  # the parameter on its way does not end before this place
        self._literal = LiteralEnd(0)  # of that parameter
        self._parts: list[Part] = []
        self._step: Callable[[], bool] = self._read_text

    def push(self, text: str, is_end: bool = False) -> list[Part]:
        """Returns the parts that this text completes; at the end, also what was held back."""
        whole, self._text = self._text, ""
        whole += text  # in place, which Python does for a local name alone
        self._text = whole
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
            begin = self._at = self._after_space(self._at)
            if begin == len(text):
                return False
            head = self._head_at(begin, True)
            if head is True:
                return False
            self._is_begin = False
            if head:
                return self._begin_call(begin, head)
        for found in _MARKER.finditer(text, self._at):
            head = self._head_at(found.end() if found[0][0] == "`" else found.start())
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
        self._is_list = self._is_list and "]" not in text[self._at : at]
        if self._is_fenced and text.startswith("```", at):
            self._is_fenced, self._at = False, at + 3
            return True
        # a comma may be the beginning of a member
        comma = text.rfind(",", max(self._at, at - _MAX_HEAD), at)
        self._at = at if comma < 0 or text[comma + 1 : at].strip() else comma
        marks = (*CLOSINGS, *(["```"] if self._is_fenced else []))
        rest = text[at : at + _MAX_HEAD]
        if any(mark.startswith(rest) for mark in marks):  # also where nothing is left
            self._sent = len(text)
            return False
        if _BEGUN_MEMBER.match(rest) and self._waits(at):
            return False
        head = self._head_at(at, True, self._head.form if self._is_list else None)
        if head is True:
            return False
        self._at = self._sent = at
        if head:
            return self._begin_call(at, head)
        self._step = self._read_text
        return True

    def _read_call(self) -> bool:
        """Reads the arguments of a call whose name is known, or else its whole object."""
        head, begin = self._head, self._at
        if head.parameters is None:
            is_whole: bool | None = self._find_end()
            self._written.append(self._text[begin : self._at])
        else:
            is_whole = self._read_parameters()
            self._written += ["}"] * (is_whole is True)
        is_out = self._streams and head.name is not None and self._is_wanted
        if is_out:
            self._give("arguments", "".join(self._written))
            self._written, self._sent = [], self._at
        if not is_whole:
            if is_whole is False:
                if not self._is_end:
                    return False
                self._at = len(self._text)
                self._sent = self._at if is_out else self._sent
            self._step = self._read_text
            return True
        if not is_out:
            call = _call(head.name, "".join(self._written))
            if call is None or not self._is_known(call.name):
                self._step = self._read_text
                return True
            if self._is_wanted:
                self._give("call", call.name)
                self._give("arguments", call.arguments_json)
        self._num_calls += 1
        self._sent, self._follows_call, self._step = self._at, True, self._read_between
        self._is_list = True
        return True

    def _begin_call(self, begin: int, head: _Head) -> bool:
        self._release(begin)
        self._is_fenced = self._is_fenced or "```" in self._text[begin : head.arguments]
        self._head, self._depth, self._is_string = head, head.depth, False
        self._written = [] if head.parameters is None else ["{"]
        self._has_parameters = False
        self._at = self._searched = head.arguments
        if self._streams and head.name is not None and self._is_wanted:
            self._give("call", head.name)
            self._sent = self._at
        self._step = self._read_call
        return True

    # ---- looking ahead ----

    def _head_at(
        self, at: int, is_bare: bool = False, last: CallForm | None = None
    ) -> _Head | bool:
        """Returns the beginning of the call at this place, False if there is none, and True if one
        may be there once more text has come. If it `is_bare`, a list of Python's calls needs no
        mark, nor does one in Mistral's form where that is the family's. It may be the next one of
        a list, whose `last` call had this form."""
        text, after = self._text, after_wrappers(self._text, at)
        rest = text[after : after + _MAX_HEAD]
        if any(mark.startswith(rest) for mark in _MARKERS):  # also where nothing is left
            return not self._is_end
        found = self._object_at(after)
        if found is not False:
            return found
        heads = [(form, form.head, text.rfind(str(form.head[0]), at, after)) for form in FORMS]
        if is_bare:
            heads.append((PYTHON, PYTHON.head[2:], after))
        if is_bare and self._is_named:
            heads.append((MISTRAL, MISTRAL.head[1:], after))
        if last is not None and last.next:
            heads.append((last, last.head[last.next :], after))
        may_come = False
        for form, pieces, start in heads:
            start = after if start < 0 else start
            read = read_pieces(pieces, text, start, self._may_be_known)
            if isinstance(read, bool):
                may_come = may_come or read
            elif read[1] - at <= _MAX_HEAD:
                return _Head(start, *read, form=form)
        return may_come and self._waits(at)

    def _waits(self, begin: int) -> bool:
        """Says whether what begins there may wait for more text."""
        return not self._is_end and len(self._text) - begin < _MAX_HELD

    def _object_at(self, at: int) -> _Head | bool:
        """Does what `_head_at` does, for a call that is JSON: an object, or the first of a list."""
        text = self._text
        if text.startswith("[", at):
            at = self._after_space(at + 1, _FEW_SPACES)
        begin, name, depth = at, None, 1
        if at == len(text):
            return not self._is_end
        if not text.startswith("{", at):
            return False
        at += 1
        while at - begin < _MAX_HEAD:
            key = _KEY.match(text, at)
            if key is None:
                return _BEGUN_KEY.match(text, at) is not None and self._waits(begin)
            at = key.end()
            if key[1] in ("arguments", "parameters"):
                if name is not None and text[at] == "{":
                    return _Head(begin, name, at, depth)
                return _Head(begin, None, begin)
            if key[1] == "function" and text[at] == "{":
                at, depth = at + 1, depth + 1
                continue
            value = _VALUE.match(text, at)
            if key[1] not in (*_NAME_KEYS, "type", "id", "tool_call_id"):
                return False
            if value is None:
                return _BEGUN_VALUE.match(text, at) is not None and self._waits(begin)
            if key[1] in _NAME_KEYS:
                name = _parsed(value[1])
                if not self._is_known(name):
                    return False
            if value[2] == "}":
                return False
            at = value.end()
        return False

    def _read_parameters(self) -> bool | None:
        """Reads the parameters that are whole and moves `_at` after them. Returns True at the end
        of the call, False if more has to come, and None for what is no parameter."""
        text, form = self._text, self._head.parameters
        assert form is not None
        types = (self._types or {}).get(self._head.name or "", {})
        while True:
            at = self._after_space(self._at, _FEW_SPACES)
            if form.read is not None and text.startswith(",", at):
                at = self._after_space(at + 1, _FEW_SPACES)
            for end in form.ends:
                if text.startswith(end, at):
                    self._at = at + len(end)
                    return True
            opened = read_pieces(form.opening, text, at, lambda key, is_begun: True)
            if isinstance(opened, bool):
                rest = text[at : at + _MAX_HEAD]
                may_come = opened or any(end.startswith(rest) for end in form.ends)
                return False if may_come and len(text) - at < _MAX_HELD else None
            key, begin = opened
            if form.read is None:
                end_of_value = self._end_of_value(form, text, begin)
            else:
                if self._literal.begin != begin:
                    self._literal = LiteralEnd(begin)
                end_of_value = self._literal.find(text)
            if end_of_value is None:
                return False
            if form.read is not None and end_of_value == begin:
                return None
            value: Any = text[begin:end_of_value]
            if form.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if form.read is not None and (read := form.read(value.strip())) is not None:
                value = read
            else:
                value = typed(value, types.get(key, frozenset()))
            member = json.dumps({key: value}, ensure_ascii=False)
            self._written.append(", " * self._has_parameters + member[1:-1])
            self._has_parameters = True
            self._at = end_of_value + len(form.closing)

    def _end_of_value(self, form: Parameters, text: str, begin: int) -> int | None:
        """Returns where the value that begins there ends, None if its end has still to come. It
        ends at a closing tag after which another parameter, or the end of the call, stands."""
        next_ones = (str(form.opening[0]), *form.ends)
        start = max(begin, self._searched)
        while (at := text.find(form.closing, start)) >= 0:
            start = at + len(form.closing)
            after = self._after_space(start, _FEW_SPACES)
            if text.startswith(next_ones, after):
                return at
            rest = text[after : after + _MAX_HEAD]
            if any(each.startswith(rest) for each in next_ones):
                self._searched = at
                return None
        self._searched = max(begin, len(text) - len(form.closing) + 1)
        return None

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

    def _after_space(self, at: int, pattern: re.Pattern[str] = _SPACE) -> int:
        found = pattern.match(self._text, at)
        return at if found is None else found.end()

    # ---- what comes out ----

    @property
    def _is_wanted(self) -> bool:
        """Says whether one more call may come out."""
        return self._at_most is None or self._num_calls < self._at_most

    def _is_known(self, name: object) -> bool:
        return isinstance(name, str) and (self._types is None or name in self._types)

    def _may_be_known(self, name: str, is_begun: bool) -> bool:
        """Says whether a name is that of a tool, or, if it is only begun, may become one."""
        is_part = is_begun and any(each.startswith(name) for each in self._types or ())
        return is_part or self._is_known(name)

    def _give(self, kind: Literal["text", "call", "arguments"], text: str) -> None:
        if text:
            self._parts.append(Part(kind, text))

    def _release(self, end: int) -> None:
        """Gives out the text up to `end`, but for the white space at its end, which a call may
        follow. Texts before and after a call stand on lines of their own."""
        start = max(self._sent, self._blank)
        start = self._after_space(start) if self._follows_call else start
        begin = start if self._follows_call else self._sent
        is_last = self._is_end and end == len(self._text) and not self._num_calls
        self._blank = max(self._blank, end)
        if not is_last:
            said = len(self._text[start:end].rstrip())
            end = start + said if said else begin
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


def _call(name: str | None, text: str) -> ToolCall | None:
    """Returns the call of this name with these arguments, or, without a name, the call that is this
    JSON object; None if it is none."""
    value = _parsed(text)
    if not isinstance(value, dict):
        return None
    if name is not None:
        return ToolCall(name, text)
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if key in value), None)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = _parsed(arguments or "{}")
        arguments = False if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        return None
    return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False))
