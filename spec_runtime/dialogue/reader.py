"""Tells thinking, text and calls of tools apart in an answer, whole or as it comes."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from spec_runtime.dialogue.families import MEMBER, SEPARATORS, WRAPPERS
from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.patterns import MORE, Pattern
from spec_runtime.dialogue.response_template import (
    MARK,
    NEVER,
    CallForm,
    Region,
    ResponseTemplate,
    any_of,
    template_of,
)
from spec_runtime.dialogue.tools import ToolCall, checked_tools
from spec_runtime.dialogue.values import READERS, typed
from spec_runtime.files.mapping import parse_json

_SPACE = re.compile(r"\s*")
_FEW_SPACES = re.compile(r"\s{0,1000}")  # within a call; more of them end it
_MAX_HEAD = 1000  # characters of what opens a call
_MAX_HELD = 2 * _MAX_HEAD  # characters that wait for what follows to say what they are
_MEMBER, _SEPARATORS, _FENCE = Pattern(MEMBER), Pattern(SEPARATORS), Pattern("```")


_Head = tuple[CallForm, str | None, int]  # its form, its name, and where its arguments begin
_Opened = tuple[Region, int, int]  # where its mark begins, and ends


class Part(NamedTuple):
    """A piece of an answer: of its thinking or its text, the name of a call that begins, or a piece
    of that call's arguments, which are JSON."""

    kind: Literal["thinking", "text", "call", "arguments"]
    text: str


@functools.lru_cache(64)
def _marks_of(content: str, quote: str) -> dict[str, re.Pattern[str]]:
    """Returns what a value is searched for: outside of quotes, and inside of each kind of them."""
    is_object = content in ("json", "keyed")
    quotes = [quote, '"'] if quote else ['"'] if is_object else ["'", '"']
    # a mark that holds the other one is none of that
    single = f'(?<!{re.escape(quote[: quote.index(chr(34))])})"' if '"' in quote else '"'
    outside = "|".join(single if each == '"' else re.escape(each) for each in quotes)
    inside = {"": re.compile(rf"[][(){{}},]|{outside}")}
    for each in quotes:
        escapes = "" if each == quote else r"\\.|"
        raw = r"|[\x00-\x1f]" if is_object else ""
        inside[each] = re.compile(rf"{escapes}{re.escape(each)}{raw}", re.DOTALL)
    return inside


class _Value:
    """Finds the end of a value that begins at `at`: of an object, or, where it is a parameter, the
    comma or the bracket that is not inside of it."""

    def __init__(self, at: int, content: str, quote: str = "") -> None:
        self.at, self._is_object = at, content in ("json", "keyed")
        self._inside = _marks_of(content, quote)
        self._depth, self._quote = int(self._is_object), ""
        self._back = max(map(len, ["ab", *self._inside])) - 1  # characters of half a mark

    def read(self, text: str, pieces: list[str] | None = None, is_end: bool = False) -> int | None:
        """Returns where the value ends, None if that has still to come. No more is read than what
        has come since the last time. `pieces` takes what is read, in which line breaks inside of
        strings, which JSON does not allow, are escaped."""
        begin, end = self.at, None
        while end is None and (found := self._inside[self._quote].search(text, self.at)):
            mark = found[0]
            self.at = found.end()
            if self._quote:
                if mark == self._quote:
                    self._quote = ""
                elif pieces is not None and mark < " ":
                    pieces += text[begin : found.start()], json.dumps(mark)[1:-1]
                    begin = self.at
            elif mark in self._inside:
                self._quote = mark
            elif not self._is_object and self._depth == 0 and mark in ",)]}":
                self.at = end = found.start()
            else:
                self._depth += (mark in "([{") - (mark in ")]}")
                if self._is_object and self._depth <= 0 and mark != ",":
                    end = self.at
        if pieces is not None:
            if end is None:
                # what a backslash escapes has still to come
                waits = text.endswith("\\") and self.at < len(text) and not is_end
                self.at = len(text) - (waits and bool(self._quote))
            pieces.append(text[begin : self.at])
        elif end is None:
            self.at = max(self.at, len(text) - self._back)
        return end


@dataclass
class _Call:
    """The call on its way; without a `name` its object has to be read to its end first."""

    form: CallForm
    name: str | None
    begin: int  # of its mark
    at: int  # up to here it is read
    is_shown: bool  # whether its name is given out
    pieces: list[str]  # of its arguments that are not given out
    num_parameters: int = 0
    searched: int = 0  # a parameter between tags does not end before this place
    depth: int = 0  # parameters that have begun inside of its value before it
    value: _Value | None = None


class ResponseReader:
    """Reads one answer of a model that writes as a template says, and that may call `tools`.

    `tools` are None for any, and calls are text unless `has_calls`; `at_most` of them are taken.
    The prompt ends inside of the thinking if it `is_begun`. `push` returns the parts that a piece
    of the answer completes. Where it `streams`, arguments come out as they are written, as soon as
    the name of a tool and the beginning of its arguments are there. Otherwise a call comes out once
    its arguments are whole, and what is no whole call stays text. `marks` are the control tokens by
    which regions are found, by their ids: their names in ordinary letters are text.

    Example: "Let me", " see. <tool", '_call>{"name": "now", "arguments": {', "}}</tool_call>" give
    the texts "Let me" and " see.", the call "now", and the arguments "{" and "}".

    `spans` say of each part of the last push from which place of the answer to which it stands,
    where it is thinking or text.

    A push takes as long as its own text is, however much came before: what is read is not read
    again, and at most `_MAX_HELD` characters wait for what follows them.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        tools: Tools | None = None,
        at_most: int | None = None,
        streams: bool = True,
        is_begun: bool = False,
        has_calls: bool = True,
        marks: dict[int, str] | None = None,
    ) -> None:
        self._template, self._at_most, self._streams = template, at_most, streams
        self._tools, self._has_calls = tools, has_calls
        self._types = None if tools is None else checked_tools(tools).types
        self._marks, self._names = marks or {}, frozenset((marks or {}).values())
        self._places: set[int] = set()  # where these tokens begin
        self._has_ids = False  # without ids letters count
        self._is_begun = is_begun
        self._text = ""
        self._at = 0  # up to here it is read
        self._is_end = self._is_over = False
        self._parts: list[Part] = []
        self.spans: list[tuple[int, int]] = []
        # the stretch of thinking or text on its way
        self._kind: Literal["thinking", "text"] = "text"
        self._close = NEVER  # what ends the thinking
        self._sent = 0  # up to here it is given out, or left out
        self._blank = 0  # from `_sent` to here is nothing but white space
        self._is_new = True  # nothing of it is out
        self._said: set[str] = set()  # kinds of which a stretch is out
        self._is_later = False  # whether a stretch or a call came before
        self.heads: list[tuple[int, int]] = []  # what is thinking, or a mark of it or of text
        self._num_calls = 0
        self._call: _Call | None = None
        self._last: CallForm | None = None  # of the call before, if its list may go on
        self._is_fenced = False  # whether that call stands in a fenced block
        self._has_depths = True  # whether what opens a parameter inside of a value is closed there
        self._step: Callable[[], bool] = self._read_begin

    def push(
        self,
        text: str,
        is_end: bool = False,
        token_ids: Sequence[int] = (),
        text_ends: Sequence[int] = (),
        is_cut: bool = False,
    ) -> list[Part]:
        """Returns the parts that this text completes; at the end, also what was held back. Of
        tokens `text_ends` says where in the answer their text ends. An answer that `is_cut` has an
        end that the model did not write, where no call leaves its arguments out."""
        whole, self._text = self._text, ""
        whole += text  # in place, which Python does for a local name alone
        self._text = whole
        self._has_ids = self._has_ids or len(token_ids) > 0
        for token, end in zip(token_ids, text_ends, strict=False):
            if token in self._marks:
                self._places.add(end - len(self._marks[token]))
        self._is_end, self._is_over = is_end, is_end and not is_cut
        self._parts, self.spans = [], []
        while self._step():
            pass
        if is_end:
            self._finish()
        return self._parts

    @property
    def begin_of_text(self) -> int | None:
        """Returns where the text on its way begins, None within thinking or a mark of it."""
        if self.is_thinking or self._step == self._read_begin:
            return None
        return self._after(_SPACE, self.heads[-1][1]) if self.heads else 0

    @property
    def is_thinking(self) -> bool:
        """Says whether the answer is inside of thinking so far."""
        return self._kind == "thinking"

    # ---- the states; each returns whether there is more to read ----

    def _read_begin(self) -> bool:
        """Reads what may begin an answer, or follow thinking or a call, without a mark of its own:
        thinking, or a bare call."""
        begin = self._after(_SPACE, self._at)
        if begin == len(self._text) and not self._is_end:
            return False
        if self._has_calls and not self._is_begun:
            after = self._last and self._last.next and self._last._replace(open=self._last.next)
            known = self._template.wrapped if self._last else self._template.bare
            bare = [*known, *([after] if after else [])]
            if (head := self._head_at(begin, bare)) is not False:
                return head is not None and self._begin_call(begin, *head)
        if (region := self._region_at(begin, True)) is None:
            return False
        if not region and self._is_begun and self._template.thinking is not None:
            region = (self._template.thinking, 0, begin)
        if region:
            return self._open(*region)
        self._last, self._step = None, self._read_text
        return True

    def _read_text(self) -> bool:
        """Gives out text up to what is a call or a stretch of another kind, or may be one."""
        text, template = self._text, self._template
        marker, marks = template.markers[self._has_calls]
        for found in marker.finditer(text, self._at):
            self._at = place = found.start()
            head: Any = False
            region: Any = False
            if self._has_calls:
                is_fence = found[0][0] == "`"
                bare = template.keyed if is_fence else ()
                head = self._head_at(found.end() if is_fence else place, bare)
            if head is False:
                region = self._region_at(place, False)
            if head is None or region is None:
                self._release(place)
                return False
            if head or region:
                return self._begin_call(place, *head) if head else self._open(*region)
            end, _ = template.text_end.match(text, place)
            if end > place:
                self._cut(place, end)
                return True
        self._at = max(self._at, len(text) - overlap(text[self._at :], *marks))
        self._release(self._at)
        return False

    def _read_thinking(self) -> bool:
        """Gives out thinking up to what ends it."""
        text, close = self._text, self._close
        for found in self._template.thinking_ends.finditer(text, self._at):
            self._at = place = found.start()
            end, _ = close.match(text, place, is_mark=self._is_mark)
            if end == MORE and self._waits(place):
                self._release(place)
                return False
            if end >= 0:
                self.heads[-1] = (self.heads[-1][0], end)
                self._cut(place, end)
                return True
            self._at = place + 1
        self._at = max(self._at, len(text) - overlap(text[self._at :], *close.beginnings()))
        self._release(self._at)
        return False

    def _read_between(self) -> bool:
        """Leaves out what stands after a call, up to the next one or to text."""
        text, at = self._text, self._at
        for pattern in (_MEMBER, _SEPARATORS, self._template.closing, *[_FENCE] * self._is_fenced):
            end, _ = pattern.match(text, at)
            if end == MORE and (self._is_end or self._waits(at)):
                self._sent = self._blank = len(text)  # at the end it is half a mark
                return False
            if at < end <= at + _MAX_HEAD:
                if pattern is _SEPARATORS and (comma := text.rfind(",", at, end)) > at:
                    end = comma  # it may be the beginning of a member
                self._last = None if "]" in text[at:end] else self._last
                self._is_fenced = self._is_fenced and pattern is not _FENCE
                self._at = end
                return True
        self._sent = self._blank = at
        self._cut(at, at)
        return True

    def _read_call(self) -> bool:
        """Reads the arguments of a call whose name is known, or else its whole object."""
        call = self._call
        assert call is not None
        if call.form.opening is not None:
            is_whole = self._read_parameters(call, call.form.opening)
        else:
            assert call.value is not None
            is_whole = call.value.read(self._text, call.pieces, self._is_end) is not None
            call.at = call.value.at
        if call.is_shown:
            self._give("arguments", "".join(call.pieces))
            call.pieces = []
        if is_whole is False and not self._is_end:
            return False
        self._at = call.at if is_whole is not False else len(self._text)
        self._step = self._read_text
        if not call.is_shown:
            made = _made(call.name, "".join(call.pieces)) if is_whole else None
            if made is None or not self._is_known(made.name, False):
                return True  # it stays text
            if self._is_wanted:
                self._give("call", made.name)
                self._give("arguments", made.arguments_json)
        elif is_whole is None:  # what is no parameter ends the call
            self._give("arguments", "}")
        self._cut(call.begin, self._at)
        if is_whole:
            self._num_calls += 1
            self._last, self._step = call.form, self._read_between
        else:
            self._step = self._read_text
        return True

    # ---- beginnings and ends ----

    def _open(self, region: Region, begin: int, end: int) -> bool:
        """Begins a stretch of thinking or text after its mark."""
        self._cut(begin, end)
        self._is_begun = False
        self._kind, self._close = region.kind, region.close
        is_thinking = region.kind == "thinking"
        self.heads.append((begin, len(self._text) if is_thinking else end))
        self._step = self._read_thinking if is_thinking else self._read_begin
        return True

    def _cut(self, begin: int, end: int) -> None:
        """Ends the stretch on its way; what follows begins at `end`."""
        self._release(begin)
        self._kind, self._is_new, self._is_later = "text", True, True
        self._at = self._sent = self._blank = end
        self._step = self._read_begin

    def _begin_call(self, begin: int, form: CallForm, name: str | None, at: int) -> bool:
        self._release(begin)
        self._is_fenced = self._is_fenced or "```" in self._text[begin:at]
        is_shown = self._streams and name is not None and self._is_wanted
        self._call = call = _Call(form, name, begin, at, is_shown, [] if is_shown else ["{"])
        if form.opening is None:
            call.value = _Value(at + 1, form.content)
        if is_shown and name is not None:
            self._cut(begin, at)
            self._give("call", name)
            self._give("arguments", "{")
        self._step = self._read_call
        return True

    def _finish(self) -> None:
        """Gives out what is left at the end of the answer."""
        end, kind = len(self._text), self._kind
        self._release(end)
        if kind == "thinking":
            self.heads[-1] = (self.heads[-1][0], end)
            for part in self._calls_within(self._text[self.heads[-1][0] :]):
                self._give(*part)
        elif not self._num_calls and not (self._is_new and self._is_later):
            self._give("text", self._text[self._sent : end], self._sent, end)
        self._sent = self._blank = end

    def _calls_within(self, thinking: str) -> list[Part]:
        """Returns the calls with which thinking ends that was not closed."""
        if not self._has_calls:
            return []
        plain = template_of(None, self._template.family)
        reader = ResponseReader(plain, self._tools, self._at_most, False)
        parts = reader.push(thinking, is_end=True, is_cut=not self._is_over)
        is_last = bool(parts) and parts[-1].kind == "arguments"
        return [part for part in parts if is_last and part.kind in ("call", "arguments")]

    # ---- looking ahead ----

    def _region_at(self, at: int, is_begin: bool) -> _Opened | Literal[False] | None:
        """Returns the stretch that begins at this place with its mark, False if there is none, and
        None if one may be there once more text has come."""
        text = self._text
        for region in self._template.regions:
            # a second time, at the beginning of a line, or as a token of its own
            is_sure = text[at - 1 : at] == "\n" or (self._has_ids and bool(self._marks))
            if not (is_begin or region.repeats or (self.heads and is_sure)):
                continue
            end, _ = region.open.match(text, at, is_mark=self._is_mark)
            if end == MORE and self._waits(at):
                return None
            if end > at:
                return region, at, end
        return False

    def _head_at(self, at: int, bare: Sequence[CallForm]) -> _Head | Literal[False] | None:
        """Returns the form of the call at this place, its name and where its arguments begin, False
        if there is none, and None if one may be there once more text has come. The forms `bare`
        need no mark."""
        text, template = self._text, self._template
        after = self._after(template.wrappers, at)
        held = text[after : after + _MAX_HEAD]
        if self._waits(at) and any(mark.startswith(held) for mark in template.call_marks):
            return None
        last = max([at, *(text.rfind(mark, at, after) for mark in WRAPPERS)])
        tries = [(place, form) for place in sorted({at, last, after}) for form in template.forms]
        if after > at:
            bare = template.wrapped if text[at:after].strip() else template.bare
        tries += [(after, form) for form in bare]
        for place, form in tries:
            end, found = form.open.match(text, place, self._is_known, is_end=self._is_over)
            if end == MORE and self._waits(at):
                return None
            is_object = form.content == "keyed"
            if at - is_object < end <= at + _MAX_HEAD:
                name = None if is_object else found["name"]
                return form, name, text.index("{", end) if is_object else end
        return False

    def _read_parameters(self, call: _Call, opening: Pattern) -> bool | None:
        """Reads the parameters that are whole. Returns True at the end of the call, False if more
        has to come, and None for what is no parameter."""
        text, form = self._text, call.form
        assert form.ends is not None
        types = (self._types or {}).get(call.name or "", {})
        while True:
            at = self._after(_FEW_SPACES, call.at)
            if form.content != "tags" and text.startswith(",", at):
                at = self._after(_FEW_SPACES, at + 1)
            end, _ = form.ends.match(text, at)
            if end >= 0:
                call.pieces.append("}")
                call.at = end
                return True
            begin, found = opening.match(text, at)
            if begin < 0:
                waits = MORE in (begin, end) and len(text) - at < _MAX_HELD
                return False if waits else None
            if form.content == "tags":
                close = self._end_of_value(call, opening, begin)
            else:
                call.value = call.value or _Value(begin, form.content, form.quote)
                close = call.value.read(text)
            if close is None:
                return False
            call.value, call.depth = None, 0
            value: Any = text[begin:close]
            if form.content != "tags" and not value:
                return None
            if form.trim == "space":
                value = value.strip()
            elif form.trim == "line":
                value = value.removeprefix("\n").removesuffix("\n")
            read = (
                READERS[form.content](value.strip(), form.quote) if form.content != "tags" else None
            )
            value = typed(value, types.get(found["key"], frozenset())) if read is None else read
            member = json.dumps({found["key"]: value}, ensure_ascii=False)
            call.pieces.append(", " * bool(call.num_parameters) + member[1:-1])
            call.num_parameters += 1
            call.at = close + len(form.closing)

    def _end_of_value(self, call: _Call, opening: Pattern, begin: int) -> int | None:
        """Returns where the value that begins there ends, None if its end has still to come. It
        ends at a closing tag after which another parameter, or the end of the call, stands, and
        which closes none that began inside of it: values may hold calls."""
        text, form = self._text, call.form
        assert form.ends is not None
        marks = [form.closing, *opening.beginnings() * self._has_depths]
        mark, start = any_of(marks), max(begin, call.searched)
        while found := mark.search(text, start):
            at, start = found.span()
            is_closing = found[0] == form.closing
            after = self._after(_FEW_SPACES, start) if is_closing else at
            tried = (opening, form.ends) if is_closing and not call.depth else (opening,)
            ends = [each.match(text, after)[0] for each in tried]
            if is_closing and not call.depth and max(ends) >= 0:
                return at
            if MORE in ends and not self._is_end and len(text) - after < _MAX_HELD:
                call.searched = at
                return None
            if is_closing:
                call.depth = max(0, call.depth - 1)
            else:
                call.depth += ends[0] >= 0
        call.searched = max(start, len(text) - max(map(len, marks)) + 1)
        if self._is_end and self._has_depths:  # what opens one in this value may be a word
            self._has_depths, call.searched, call.depth = False, begin, 0
            return self._end_of_value(call, opening, begin)
        return None

    def _after(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self._text, at)
        return at if found is None else found.end()

    def _waits(self, begin: int) -> bool:
        """Says whether what begins there may wait for more text."""
        return not self._is_end and len(self._text) - begin < _MAX_HELD

    @property
    def _is_wanted(self) -> bool:
        """Says whether one more call may come out."""
        return self._at_most is None or self._num_calls < self._at_most

    def _is_known(self, name: str, is_begun: bool) -> bool:
        """Says whether a name is that of a tool, or, if it is only begun, may become one."""
        if self._types is None:
            return bool(name)
        return name in self._types or (
            is_begun and any(map(str.startswith, self._types, [name] * len(self._types)))
        )

    def _is_mark(self, literal: str, at: int) -> bool:
        """Says whether the control tokens of a literal that stands at this place are tokens."""
        return not (self._names and self._has_ids) or all(
            at + found.start() in self._places
            for found in MARK.finditer(literal)
            if found[0] in self._names
        )

    # ---- what comes out ----

    def _give(
        self,
        kind: Literal["thinking", "text", "call", "arguments"],
        text: str,
        begin: int = 0,
        end: int = 0,
    ) -> None:
        if text:
            self._parts.append(Part(kind, text))
            self.spans.append((begin, end))

    def _release(self, end: int) -> None:
        """Gives out the stretch up to `end`, but for the white space at its end. Before its first
        text white space is left out, where anything came before; stretches of a kind stand on
        lines of their own."""
        start = max(self._sent, self._blank)
        said = self._text[start:end].rstrip()
        self._blank = max(self._blank, end)
        if not said:
            return
        begin, end = self._sent, start + len(said)
        if self._is_new and self._is_later:
            begin = self._after(_SPACE, start)
        line_break = "\n" * (self._is_new and self._kind in self._said)
        self._give(self._kind, line_break + self._text[begin:end], begin, end)
        self._said.add(self._kind)
        self._is_new, self._sent = False, end


def joined(parts: Sequence[Part]) -> tuple[str, list[ToolCall]]:
    """Returns the text and the calls that these parts make up."""
    calls: list[tuple[str, list[str]]] = []  # names, and the pieces of their arguments
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, []))
        elif part.kind == "arguments":
            calls[-1][1].append(part.text)
    text = "".join(part.text for part in parts if part.kind == "text")
    return text, [ToolCall(name, "".join(pieces)) for name, pieces in calls]


def _parsed(text: str) -> Any:
    """Returns what a JSON text says, None for what is no JSON."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def _made(name: str | None, text: str) -> ToolCall | None:
    """Returns the call of this name with these arguments, or, without a name, the call that is this
    JSON object; None if it is none."""
    value = _parsed(text)
    if not isinstance(value, dict):
        return None
    if name is not None:
        return ToolCall(name, text)
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in ("name", "tool_name") if key in value), None)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON
        arguments = _parsed(arguments or "{}")
        arguments = False if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        return None
    return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False))


def overlap(text: str, *marks: str) -> int:
    """Returns the length of the longest end of `text` with which one of the marks begins, without
    being whole: ("abEN", "END") -> 2."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        end = text[len(text) - length :]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
