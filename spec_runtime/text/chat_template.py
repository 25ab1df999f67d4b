"""Renders chat templates, which are programs of strangers, in a sandbox with limits.

jinja2's sandbox keeps a template from Python's internals, but not from looping for ever or from
filling the memory. Here every loop, call, filter and operator that can make something large is
metered: a rendering that takes longer than MAX_SECONDS, makes a value larger than MAX_WEIGHT, or
makes more than MAX_TOTAL in all, is refused in one line.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
import types
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from spec_runtime.errors import UserError
from spec_runtime.mapping import brief

Message = Mapping[str, Any]

MAX_SECONDS = 5.0  # of one rendering
MAX_SOURCE = 1 << 18  # characters of a template
MAX_WEIGHT = 16 << 20  # of one value, see _weight
MAX_TOTAL = 1 << 30  # of all values that one rendering makes
_ITEM_WEIGHT = 8  # of a number, and of each item of a list
_MAX_BITS = 1 << 13  # of an integer

# Filters that nobody needs for a prompt and whose work is hard to bound.
_DROPPED_FILTERS = (
    *("batch", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordwrap"),
    *("wordcount", "xmlattr"),
)
_DROPPED_GLOBALS = ("cycler", "joiner", "lipsum")
# What may return more than it was given: at most its value times its largest argument.
_GROWING_FILTERS = frozenset(("center", "indent", "join", "replace", "tojson"))
_GROWING_METHODS = frozenset(
    ("center", "expandtabs", "join", "ljust", "replace", "rjust", "to_bytes", "translate", "zfill")
)
_FORMAT_METHODS = frozenset(("format", "format_map"))
_WIDE_FIELD = re.compile(r"[%{][^%{}]{0,100}\d{6}|%[^%a-zA-Z]{0,100}\*|\{[^{}]{0,100}\{")

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateLimitError(UserError):
    """Says which limit a chat template has gone beyond."""


class _MessageRefusedError(UserError):
    """Holds what the template says against the messages."""


class MeteredTemplate:
    """Renders a Hugging Face chat template in a sandbox, within the limits of this file.

    `name` is what messages call the template. Raises ValueError if it is not valid.
    """

    def __init__(
        self, source: str, bos_token: str, eos_token: str, name: str = "the chat template"
    ) -> None:
        self._name = name
        self._names = {"bos_token": bos_token, "eos_token": eos_token}
        if len(source) > MAX_SOURCE:
            raise UserError(
                f"{name} is not valid: got {len(source)} characters, expected at most {MAX_SOURCE}"
            )
        self._meter = _Meter()
        environment = _MeteredEnvironment(self._meter)
        try:
            tree = _LoopMeter().visit(environment.parse(source))
            tree.set_lineno(1)
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except Exception as error:  # parsing and compiling what a stranger wrote raises anything
            raise UserError(f"{name} is not valid: {_reason(error)}") from None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Returns the messages as one text that ends where the assistant's answer begins.

        `tools` are functions in OpenAI's form, which the template shows to the model.
        Raises ValueError if the template refuses them, fails, or goes beyond a limit.
        """
        self._meter.start()
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None if tools is None else list(tools),
                documents=None,
                **self._names,
            )
        except _MessageRefusedError as error:
            raise UserError(f"{self._name} refuses these messages: {error}") from None
        except Exception as error:  # the program of a stranger raises anything
            raise UserError(
                f"{self._name} cannot render these messages: {_reason(error)}"
            ) from None
        finally:
            self._meter.stop()


def _reason(error: Exception) -> str:
    """Returns an error's text in one line, after its kind unless jinja2 or this file wrote it."""
    text = brief(error)
    is_plain = isinstance(error, TemplateLimitError) or type(error).__module__.startswith("jinja2")
    return text if is_plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


class _Meter(threading.local):
    """Counts time and sizes of the rendering that runs in this thread."""

    def __init__(self) -> None:
        self.stop()

    def start(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._left = MAX_TOTAL

    def stop(self) -> None:
        self._deadline = float("inf")
        self._left = MAX_TOTAL

    def tick(self) -> None:
        """Raises TemplateLimitError when the time is over."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s; mend its loops")

    def require(self, weight: int) -> None:
        """Raises TemplateLimitError if a value of this weight may not be made; counts it."""
        self._left -= weight
        if weight > MAX_WEIGHT or self._left < 0:
            raise TemplateLimitError(
                f"it makes more text than {MAX_WEIGHT >> 20} MB at once or {MAX_TOTAL >> 20} MB in "
                "all; mend it or shorten the messages"
            )


def _weight(value: Any) -> int:
    """Returns about how many bytes a value would print, counted up to a little above MAX_WEIGHT.

    What is in a list twice counts twice.
    """
    total, waiting = 0, [value]
    while waiting and total <= MAX_WEIGHT:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += _ITEM_WEIGHT + item.bit_length() // 3
        elif isinstance(item, range):
            total += _ITEM_WEIGHT * len(item)
        elif isinstance(item, Mapping):
            total += _ITEM_WEIGHT * len(item)
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, _CONTAINERS):
            total += _ITEM_WEIGHT * len(item)
            waiting += item
        else:
            total += _ITEM_WEIGHT
    return total


class _LoopMeter(NodeTransformer):
    """Rewrites a template's syntax tree: a tick at the start of each loop's body, and meters around
    what makes text and containers without a call: `a ~ b`, lists, tuples and dictionaries."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("metered", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("metered", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("metered", [node]) if node.ctx == "load" else node


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """Returns a call of this method of the environment, which templates cannot name."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _PlainNamespace(Namespace):
    """A namespace that prints as its name: one inside another could print without end."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """Renders {% generation %} … {% endgeneration %} as what is inside: some templates mark the
    assistant's answers so, for training."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as an instance's

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, operators, calls, filters and outputs report to `meter`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, meter: _Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self.printed,
        )
        self._meter = meter
        self.tick = meter.tick
        self.concat = self._concat  # type: ignore[method-assign]
        for name in _DROPPED_GLOBALS:
            del self.globals[name]
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson  # jinja's own escapes for HTML
        self.filters = {name: self._filter(name, each) for name, each in self.filters.items()}
        self.globals["namespace"] = _PlainNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)

    # ---- what the rewritten syntax tree calls ----

    def joined(self, *values: Any) -> str:
        """Returns what `a ~ b` stands for."""
        return self._concat(str(self.printed(value)) for value in values)

    def metered(self, value: Any) -> Any:
        """Returns the value, if it may be so large; an iterator becomes a list."""
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            value = self._listed(value)
        if isinstance(value, (str, bytes, Mapping, *_CONTAINERS)):
            self._meter.require(_weight(value))
        return value

    def printed(self, value: Any) -> Any:
        """Returns a value that is about to be printed, if its text may be so long."""
        if not isinstance(value, str):
            self._meter.require(_weight(value))
        return value

    # ---- what jinja2 calls ----

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._meter.tick()
        if operator == "%" and isinstance(left, str):
            self._require_format(left, right)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._require_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            number, rest = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(number, int) and isinstance(rest, str | bytes | list | tuple):
                self._meter.require(_weight(rest) * max(number, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._require_bits(left.bit_length() * abs(right))
        elif operator == "+" and not isinstance(left, int | float):
            self._meter.require(_weight(left) + _weight(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names with underscores are jinja2's: a template may pass one called `self`.
        __self._meter.tick()
        if isinstance(__obj, types.BuiltinMethodType):
            __self._require_method(__obj, [*args, *kwargs.values()])
        return __self.metered(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            self._require_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return limited

    # ---- limits ----

    def _concat(self, parts: Iterable[str]) -> str:
        """Returns the joined parts; what is too much is not collected first."""
        kept, total = [], 0
        for part in parts:
            total += len(part)
            if total > MAX_WEIGHT:
                break
            kept.append(part)
        self._meter.require(total)
        return "".join(kept)

    def _listed(self, values: Iterator[Any]) -> list[Any]:
        listed: list[Any] = []
        total = 0
        for value in values:
            self._meter.tick()
            total += _ITEM_WEIGHT
            if total > MAX_WEIGHT:
                self._meter.require(total)
            listed.append(value)
        return listed

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the filter with meters before and behind it."""
        # jinja2 may pass the context or the environment as the first argument
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            self._meter.tick()
            given = [*args[first:], *kwargs.values()]
            if name in _GROWING_FILTERS:
                given[0] = self.metered(given[0])
                self._require_growth(name, given[0], given[1:])
            elif name == "format":
                self._require_format(str(given[0]), given[1:])
            elif name == "sum" and not all(
                isinstance(each, int | float | str) for each in given[1:]
            ):
                raise TemplateLimitError("it sums what are no numbers; mend it")
            elif name in ("string", "escape", "e", "forceescape"):
                self.printed(given[0])
            if name in _GROWING_FILTERS:
                args = (*args[:first], given[0], *args[first + 1 :])
            return self.metered(function(*args, **kwargs))

        return filtered

    def _require_method(self, method: types.BuiltinMethodType, given: list[Any]) -> None:
        name = method.__name__
        if name in _FORMAT_METHODS and isinstance(method.__self__, str):
            self._require_format(method.__self__, given)
        elif name == "join":
            for each in given:
                self._require_growth(name, each, [method.__self__])
        elif name in _GROWING_METHODS:
            self._require_growth(name, method.__self__, given)

    def _require_growth(self, name: str, value: Any, given: Sequence[Any]) -> None:
        """Raises TemplateLimitError if what this filter or method makes of `value` may be too
        large: `value` times the largest argument, less for the two that prompts need."""
        weight = _weight(value)
        if name == "replace" and isinstance(value, str) and len(given) > 1:
            self._meter.require(weight + value.count(str(given[0])) * _weight(given[1]))
        elif name == "join" and isinstance(value, list | tuple | str):
            self._meter.require(weight + len(value) * max(map(_weight, given), default=0))
        else:
            sizes = [abs(each) if isinstance(each, int) else _weight(each) for each in given]
            self._meter.require(max(1, weight) * max(sizes, default=1))

    def _require_format(self, text: str, given: Any) -> None:
        """Raises TemplateLimitError for formats that make much of little: wide fields."""
        if _WIDE_FIELD.search(text):
            raise TemplateLimitError("it formats fields of a width that is not bounded; mend it")
        self._meter.require(len(text) + (text.count("%") + text.count("{")) * _weight(given))

    def _require_bits(self, num_bits: int) -> None:
        if num_bits > _MAX_BITS:
            raise TemplateLimitError(f"it makes numbers of more than {_MAX_BITS} bits; mend it")


def _raise_exception(message: Any) -> None:
    raise _MessageRefusedError(brief(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON, with the arguments of transformers' own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
