"""Reads regular expressions of a subset that is safe, and matches text that is still coming.

Response templates are written by strangers, and their expressions run in the thread that answers
all clients. What is read here never goes back: a class of characters takes as many as there are, up
to a bound, the first alternative that fits is taken, and an expression that would need another
choice is refused. So a match takes as long as the text that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spec_runtime.errors import UserError

MAX_RUN = 1000  # characters that a repeated class takes, and times that a group is repeated
MAX_STEPS = 5000  # of one match; what needs more does not match
MAX_SOURCE = 2000  # characters of an expression
NO, MORE = -1, -2  # other text stands there; or the text ends before that is sure
END = "\0"  # as a literal, the end of a text to which nothing is added: no answer has it
_CLASS = re.compile(r"\\[sSdDwW]|\[\^?\]?(?:\\.|[^]\\])*\]|\.", re.DOTALL)
_GROUP = re.compile(r"\((?:\?P<(\w+)>|\?:|(\?=))?")
_REPEAT = re.compile(r"([*+?]|\{(\d{1,4})(,?)(\d{0,4})\})(\??)")
_LITERAL = re.compile(r"\\([^\w\s]|[nrt])|([^\\()|*+?{}\[\]^$.])", re.DOTALL)
_ASCII = [*map(chr, range(128))]
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}

Accepts = Callable[[str, bool], bool]


class _Group(NamedTuple):
    """One of `options`, repeated; `name` is that of a capture."""

    options: tuple[tuple[_Node, ...], ...]
    name: str | None
    is_ahead: bool
    least: int
    most: int


_Node = str | re.Pattern[str] | _Group


class Pattern:
    """Matches an expression of the subset: literals, classes of characters, groups with
    alternatives, lookaheads of a positive kind, and repeats. Raises UserError for another one.

    Example: r"<f=(?P<name>\\w+)>" matches "<f=now>" up to 7 with the name "now", says MORE of
    "<f=no", and NO of "<g".
    """

    def __init__(self, source: str) -> None:
        self.source = source
        reader = _Reader(source)
        try:
            options = reader.options()
        except RecursionError:
            raise reader.error() from None
        self._nodes: tuple[_Node, ...] = (_Group(options, None, False, 1, 1),)
        # texts of which one begins every match, which are quick to ask for
        firsts = [each[0] for each in options if each and isinstance(each[0], str)]
        self._firsts = tuple(firsts) if len(firsts) == len(options) else ()
        self._longest = max(map(len, firsts), default=0)
        if reader.at < len(source) or len(source) > MAX_SOURCE:
            raise reader.error()

    def match(
        self,
        text: str,
        at: int,
        accepts: Accepts | None = None,
        is_mark: Callable[[str, int], bool] | None = None,
        is_end: bool = False,
    ) -> tuple[int, dict[str, str]]:
        """Returns where the match that begins at this place ends, or NO, or MORE, and the captures.

        `accepts` says whether a capture "name" may be that, its second argument whether the text
        ends with it, so that it may be only the beginning of one. `is_mark` says whether a literal
        text that stands at a place may be taken for what it looks like. At the end of an answer,
        where it `is_end`, nothing is MORE, and a literal END fits.
        """
        is_whole = self._firsts and len(text) - at >= self._longest
        if is_whole and not text.startswith(self._firsts, at):
            return NO, {}
        reading = _Reading(text, accepts, is_mark, is_end)
        return reading.read(self._nodes, at), reading.found

    def beginnings(self) -> list[str]:
        """Returns the literal texts of which one begins every match, apart from white space; none
        if a match may begin otherwise."""
        found = [*_beginnings(self._nodes)]
        return [] if None in found else [each for each in found if each]

    @property
    def names(self) -> set[str]:
        """Returns the names of the captures."""
        return set(re.findall(r"\(\?P<(\w+)>", self.source))


class _Reading:
    """Reads one match; in functions inside of one another, `text` would be kept too long."""

    def __init__(
        self,
        text: str,
        accepts: Accepts | None,
        is_mark: Callable[[str, int], bool] | None,
        is_end: bool,
    ) -> None:
        self._text, self._accepts, self._is_mark = text, accepts, is_mark
        self._more = NO if is_end else MORE
        self.found: dict[str, str] = {}
        self._left = MAX_STEPS

    def read(self, nodes: tuple[_Node, ...], at: int) -> int:
        """Returns where these nodes end, or NO, or MORE."""
        text = self._text
        for node in nodes:
            self._left -= 1
            if self._left < 0:
                return NO
            if isinstance(node, str):
                if not text.startswith(node, at):
                    if node == END and at == len(text) and self._more == NO:
                        continue
                    return self._more if node.startswith(text[at : at + len(node)]) else NO
                if self._is_mark is not None and not self._is_mark(node, at):
                    return NO
                at += len(node)
            elif isinstance(node, re.Pattern):
                if (taken := node.match(text, at)) is None:
                    return self._more if at == len(text) else NO
                at = taken.end()
            elif (at := self._repeated(node, at)) < 0:
                return at
        return at

    def _repeated(self, group: _Group, begin: int) -> int:
        at = begin
        for number in range(group.most):
            end = NO
            for option in group.options:
                if (end := self.read(option, at)) != NO:
                    break
            if end == MORE:
                return MORE
            if end == NO and number < group.least:
                return NO
            if end in (NO, at):
                break
            at = end
        if group.name is not None:
            self.found[group.name] = name = self._text[begin:at]
            is_end = self._more == MORE and at == len(self._text)
            accepts = self._accepts
            if group.name == "name" and accepts is not None and not accepts(name, is_end):
                return NO
        return begin if group.is_ahead else at


def _beginnings(nodes: tuple[_Node, ...]) -> Iterator[str | None]:
    """Yields the literals with which these nodes may begin; None if that may be any text."""
    for node in nodes:
        if isinstance(node, str):
            yield node
            return
        if isinstance(node, re.Pattern):
            if (none := node.match("a")) is not None and not none[0]:
                continue  # white space that may stand there
            yield None
            return
        for option in node.options:
            yield from _beginnings(option)
        if node.least:
            return
    yield None


class _Reader:
    """Reads one expression."""

    def __init__(self, source: str) -> None:
        self._source, self.at = source, 0

    def error(self) -> UserError:
        """Returns the error of the place that is read."""
        return UserError(
            f"got the expression {self._source!r:.120}, expected one of literals, classes of "
            "characters, groups, alternatives and repeats that never goes back: see character "
            f"{self.at}"
        )

    def options(self) -> tuple[tuple[_Node, ...], ...]:
        """Reads alternatives."""
        options = [self._sequence()]
        while self._source.startswith("|", self.at):
            self.at += 1
            options.append(self._sequence())
        return tuple(options)

    def _sequence(self) -> tuple[_Node, ...]:
        nodes: list[_Node] = []
        while self.at < len(self._source) and self._source[self.at] not in "|)":
            node = self._node()
            last = nodes[-1] if nodes else None
            if isinstance(last, str) and isinstance(node, str):
                nodes[-1] = last + node
                continue
            if isinstance(last, re.Pattern) and not last.pattern.endswith("{1,1}+"):
                taken = [last.match(each) for each in _firsts(node)]
                if taken and all(found is not None and found[0] for found in taken):
                    raise self.error()  # the run before takes what has to follow
            nodes.append(node)
        return tuple(nodes)

    def _node(self) -> _Node:
        source, begin = self._source, self.at
        if (group := _GROUP.match(source, begin)) is not None:
            self.at = group.end()
            options = self.options()
            if not source.startswith(")", self.at):
                raise self.error()
            self.at += 1
            least, most = self._repeat()
            return _Group(options, group[1], group[2] is not None, least, most)
        if (kind := _CLASS.match(source, begin)) is not None:
            self.at = kind.end()
            least, most = self._repeat()
            try:
                return re.compile(f"{kind[0]}{{{least},{most}}}+", re.DOTALL)
            except re.error:
                raise self.error() from None
        found = _LITERAL.match(source, begin)
        if found is None:
            raise self.error()
        self.at = found.end()
        literal = found[2] or _ESCAPES.get(found[1], found[1])
        least, most = self._repeat()
        return literal if least == most == 1 else _Group(((literal,),), None, False, least, most)

    def _repeat(self) -> tuple[int, int]:
        """Reads how often what stands before is repeated."""
        found = _REPEAT.match(self._source, self.at)
        if found is None:
            return 1, 1
        self.at = found.end()
        if found[2] is None:
            least, most = int(found[1] == "+"), 1 if found[1] == "?" else MAX_RUN
        else:
            least = int(found[2])
            most = int(found[4] or MAX_RUN) if found[3] else least
        if not least <= most <= MAX_RUN:
            raise self.error()
        return least, most


def _firsts(node: _Node) -> set[str]:
    """Returns the ASCII characters with which a node may begin, none if it may be left out."""
    if isinstance(node, str):
        return {node[0]}
    if isinstance(node, re.Pattern):
        return set() if node.match("") else {each for each in _ASCII if node.match(each)}
    return (
        set().union(*(_firsts(each[0]) for each in node.options if each)) if node.least else set()
    )
