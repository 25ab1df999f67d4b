"""Renders chat templates, which are programs of strangers, in a sandbox with limits.

The sandbox is that of transformers: jinja2's immutable one, with the same filters and functions. It
keeps a template from Python's internals, but not from looping for ever or from filling the memory.
Here every turn of a loop, call, filter and operator looks at the clock, and every value that it
makes is weighed. Those few that make much of little are refused before they run.
"""

import datetime
import functools
import json
import re
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from spec_runtime.dialogue.messages import Message, Tools
from spec_runtime.dialogue.response_template import (
    ResponseTemplate,
    family_of,
    tags_of,
    template_of,
)
from spec_runtime.dialogue.tool_prompts import ToolPrompter
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json

MAX_SECONDS = 5.0  # of one rendering
TRIED_SECONDS = 1.0  # of one that only shows what the template reads
MAX_SOURCE = 1 << 18  # characters of a template
MAX_WEIGHT = 16 << 20  # of one value, see _weight
MAX_TOTAL = 1 << 30  # of all values that one rendering makes
_ITEM_WEIGHT = 8  # of everything that is no text
_MAX_BITS = 1 << 13  # of an integer

# Variables that say whether the model thinks; most templates read one of them.
SWITCHES = ("enable_thinking", "thinking")
# Variables that are the renderer's own.
_OWN = frozenset(("messages", "tools", "add_generation_prompt"))

# Filters that no prompt needs and whose work is hard to bound.
_DROPPED_FILTERS = (
    *("batch", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordwrap"),
    *("wordcount", "xmlattr"),
)
_DROPPED_GLOBALS = ("cycler", "joiner", "lipsum")
# Filters and methods that may return up to their value times their largest argument.
_GROWING = frozenset(
    ("center", "expandtabs", "indent", "ljust", "rjust", "round", "to_bytes", "tojson")
) | {"replace", "translate", "zfill"}
_TICK, _JOIN, _WEIGH = "a turn", "a join", "a value"  # filters that no template can name
_WIDE_FIELD = re.compile(r"[%{][^%{}]{0,100}\d{6}|%[^%a-zA-Z]{0,100}\*|\{[^{}]{0,100}\{")


class ChatTemplate:
    """Renders a Hugging Face chat template within the limits of this file.

    `source` is the template, and `special_tokens` are the texts that it knows by name, such as
    `eos_token`; `name` is what error messages call the template. `response_template` says how the
    model's answers are read, if the model ships one. Raises UserError if either is not valid.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.tool_family = family_of(source)  # in whose form a call is forced
        # how answers are read
        self.answers = template_of(tags_of(source), self.tool_family)
        if response_template is not None:
            self.answers = ResponseTemplate(response_template, self.tool_family)
        self._prompter = ToolPrompter(source, self._tried)
        self._name = name
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE:
            raise UserError(
                f"{name} is not valid: got {len(source)} characters, expected at most {MAX_SOURCE}"
            )
        self._environment = environment = _Environment()
        try:
            parsed = environment.parse(source)
            found = meta.find_undeclared_variables(parsed)
            tree = _Weighing().visit(parsed)
            tree.set_lineno(1)
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except Exception as error:  # parsing and compiling what a stranger wrote raises anything
            raise UserError(f"{name} is not valid: {_reason(error)}") from None
        # what callers may set: everything that the template reads besides
        self.variables = frozenset(found - _OWN - self.special_tokens.keys())
        self.tags = self.answers.tags

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        is_asked: bool = True,
    ) -> str:
        """Returns the messages as one text that ends where the assistant's answer begins, or before
        what the template writes there, if no answer `is_asked`.

        `tools` are functions in OpenAI's form. A template that knows none gets them, and calls and
        their results, as text. `variables` are further ones that the template reads, see
        `checked_variables`. Raises UserError if the template refuses the messages, fails, or goes
        beyond a limit, and for tools in another form.
        """
        prepared, checked_tools = self._prompter.prepared(messages, tools)
        self._environment.limits.start()
        try:
            return self._text(prepared, checked_tools, is_asked, variables)
        except _MessagesRefused as error:
            raise UserError(f"{self._name} refuses these messages: {error}") from None
        except Exception as error:  # the program of a stranger raises anything
            raise UserError(
                f"{self._name} cannot render these messages: {_reason(error)}"
            ) from None

    def _tried(self, messages: Sequence[Message], tools: Tools | None) -> str | None:
        """Returns the text of messages and tools as they are, None if the template cannot render
        them."""
        self._environment.limits.start(TRIED_SECONDS)
        try:
            return self._text(messages, tools)
        except Exception:  # as in `render`
            return None

    def _text(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        is_asked: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        given = {"documents": None, **(variables or {})}
        return self._template.render(
            self.special_tokens,
            messages=messages,
            add_generation_prompt=is_asked,
            tools=tools,
            **given,
        )

    def checked_variables(self, variables: Any) -> dict[str, Any]:
        """Returns variables for `render` as plain values of JSON. Raises UserError for names that
        the template does not read, and for values of another kind."""
        if not isinstance(variables, Mapping):
            raise _variable_error(
                f"got template_kwargs {brief(repr(variables), 80)}", "a mapping of names to values"
            )
        for name in variables:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none: it reads no variables"
                raise _variable_error(
                    f"got {brief(repr(name), 80)}, which the chat template does not read", known
                )
        try:
            plain: dict[str, Any] = parse_json(json.dumps(dict(variables)))
        except (TypeError, ValueError, RecursionError) as error:
            raise _variable_error(
                f"got a value that cannot be written as JSON ({brief(error, 80)})",
                "objects, arrays, strings, numbers, booleans and null",
            ) from None
        return plain

    def switched(self, thinks: bool) -> dict[str, Any]:
        """Returns the variables by which this template lets the model think, or not; none where it
        has no such variable."""
        return {name: thinks for name in SWITCHES if name in self.variables}

    @functools.cached_property
    def opening(self) -> str:
        """Returns what the template writes before every answer, such as "<assistant>"; an empty
        text where that cannot be told."""
        messages: list[Message] = [{"role": "user", "content": "a"}]
        try:
            before, asked = (self.render(messages, is_asked=each) for each in (False, True))
        except UserError:
            return ""
        return asked.removeprefix(before) if asked.startswith(before) else ""


def _variable_error(got: str, expected: str) -> UserError:
    return UserError(f"{got}, expected {expected}", param="template_kwargs")


class _MessagesRefused(Exception):
    """Holds what the template says against the messages."""


def _reason(error: Exception) -> str:
    """Returns an error's text in one line, after its kind unless jinja2 or this file wrote it."""
    text = brief(error)
    is_plain = isinstance(error, UserError) or type(error).__module__.startswith("jinja2")
    return text if is_plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


# ---- limits ----


class _Limits(threading.local):
    """Counts the time and the weights of the rendering that runs in this thread."""

    def __init__(self) -> None:
        self.start()

    def start(self, seconds: float | None = None) -> None:
        self._deadline = time.monotonic() + (MAX_SECONDS if seconds is None else seconds)
        self._left = MAX_TOTAL

    def tick(self) -> None:
        """Raises UserError when the time is over."""
        if time.monotonic() > self._deadline:
            raise UserError(f"it takes longer than {MAX_SECONDS:g} s; mend its loops")

    def require(self, weight: int) -> None:
        """Raises UserError if a value of this weight may not be made."""
        if weight > min(MAX_WEIGHT, self._left):
            raise UserError(
                f"it makes more text than {MAX_WEIGHT >> 20} MB at once or {MAX_TOTAL >> 20} MB in "
                "all; mend it or shorten the messages"
            )

    def require_bits(self, num_bits: int) -> None:
        """Raises UserError if an integer of this many bits may not be made."""
        if num_bits > _MAX_BITS:
            raise UserError(f"it makes numbers of more than {_MAX_BITS} bits; mend it")

    def weighed(self, value: Any) -> Any:
        """Returns a new value and counts its weight; an iterator becomes a list."""
        if isinstance(value, Iterator):
            value = list(islice(value, MAX_WEIGHT // _ITEM_WEIGHT + 1))
        if isinstance(value, int):
            self.require_bits(value.bit_length())
        weight = _weight(value)
        self.require(weight)
        self._left -= weight
        return value


def _weight(value: Any) -> int:
    """Returns about how many characters a value would print, counted up to a little above
    MAX_WEIGHT.

    What is in a list twice counts twice.
    """
    total, waiting = 0, [value]
    while waiting and total <= MAX_WEIGHT:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item)
            continue
        total += _ITEM_WEIGHT
        if isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, Collection):
            waiting += item
    return total


def _most(name: str, value: Any, given: Sequence[Any]) -> int:
    """Returns the most that a filter or method of this name may make of `value`, 0 if that is never
    much more than it was given. Raises UserError where no bound is known."""
    if name in ("format", "format_map"):
        text = str(value)
        if _WIDE_FIELD.search(text):
            raise UserError("it formats fields of a width that is not bounded; mend it")
        return len(text) + (text.count("%") + text.count("{")) * _weight(list(given))
    if name == "sum" and not all(isinstance(each, int | float | str) for each in given):
        raise UserError("it sums what are no numbers; mend it")
    if name == "replace" and isinstance(value, str) and len(given) > 1:
        return len(value) + value.count(str(given[0])) * _weight(given[1])
    if name == "join" and isinstance(value, Collection):
        return _weight(value) + len(value) * _weight(list(given))
    if name in _GROWING:
        return max(1, _weight(value)) * max(map(_factor, given), default=1)
    return 0


def _factor(value: Any) -> int:
    """Returns by how much an operand may multiply the other one."""
    return abs(value) if isinstance(value, int) else _weight(value)


# ---- the sandbox ----


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, operators, calls and filters keep to `limits`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # constants are not computed while a template is compiled
        )
        self.limits = _Limits()
        self.concat = self._concat  # type: ignore[method-assign]
        for name in _DROPPED_GLOBALS:
            del self.globals[name]
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson  # jinja2's own escapes for HTML
        self.filters = {name: self._limited(name, each) for name, each in self.filters.items()}
        self.filters |= {_TICK: lambda value: self.limits.tick(), _WEIGH: self.limits.weighed}
        self.filters[_JOIN] = lambda values: self._concat(map(str, values))
        self.globals["namespace"] = _PlainNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)

    def _concat(self, parts: Iterable[str]) -> str:
        """Returns the joined parts; what is too much is not collected first."""
        kept, total = list[str](), 0
        for part in parts:
            total += len(part)
            self.limits.require(total)
            kept.append(part)
        return str(self.limits.weighed("".join(kept)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.limits.tick()
        if operator == "%" and isinstance(left, str):
            self.limits.require(_most("format", left, [right]))
        elif operator == "*" and any(
            isinstance(each, str | bytes | list | tuple) for each in (left, right)
        ):
            self.limits.require(_factor(left) * _factor(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.limits.require_bits(left.bit_length() * abs(right))
        return self.limits.weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names with underscores are jinja2's: a template may pass one called `self`.
        __self.limits.tick()
        if isinstance(__obj, types.BuiltinMethodType):
            name, value, given = __obj.__name__, __obj.__self__, [*args, *kwargs.values()]
            if name == "join" and given:
                value, given[0] = given[0], value
            __self.limits.require(_most(name, value, given))
        return __self.limits.weighed(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else self._limited("format", wrapped, value.__self__)

    def _limited(self, name: str, function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
        """Returns a filter, or a method `bound` to its value, that keeps to the limits."""
        # jinja2 may pass the context or the environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.limits.tick()
            passed = list(args)
            if not bound and isinstance(passed[first], Iterator):
                passed[first] = self.limits.weighed(passed[first])
            value, *given = (*bound, *passed[first:], *kwargs.values())
            self.limits.require(_most(name, value, given))
            return self.limits.weighed(function(*passed, **kwargs))

        return limited


class _Weighing(NodeTransformer):
    """Rewrites a template's syntax tree: looks at the clock in each turn of a loop, and weighs what
    is made without a call: `a ~ b`, lists, tuples and dictionaries."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), _TICK)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOIN)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WEIGH)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _WEIGH) if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


class _PlainNamespace(Namespace):
    """A namespace that prints as its name: one inside another could print without end."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """Renders the inside of {% generation %} … {% endgeneration %}, with which some templates mark
    the assistant's answers for training."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as an instance's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: Any) -> None:
    raise _MessagesRefused(brief(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON, with the arguments of transformers' own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
