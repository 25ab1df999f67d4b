"""Lists the forms of calls whose name stands before their arguments, and the marks around calls.

Each form is a row of `FORMS`, which holds the pieces before the arguments and says whether these
are JSON or parameters between tags. A call that is JSON as a whole needs no row.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from spec_runtime.files.mapping import parse_json
from spec_runtime.grammar.json_schema import References

NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_KEY = re.compile(r'[^<>"\n]{1,128}')
_SPACE = re.compile(r"\s*")
_OBJECT, _TAG = re.compile(r"(?={)"), re.compile(r"(?=<)")
_QUOTE = '<|"|>'  # Gemma 4's, around strings
_BARE_KEY = re.compile(r"(?<![\w.$-])[\w.$-]++(?=\s*+:)")
_MAX_DEPTH = 32  # of references and alternatives in a schema

Piece = str | re.Pattern[str]  # a fixed text, or whatever fits a pattern


class Parameters(NamedTuple):
    """Says how parameters are written between tags.

    `opening` holds the pieces before a value, one of them the parameter's name, and `closing` is
    the tag after it. One of `ends` ends the call. `has_lines` says that a value stands on lines of
    its own: one line break before and one after it do not belong to it. Where commas part them in
    place of tags, `read` returns what a value says, None for none.
    """

    opening: tuple[Piece, ...]
    closing: str
    ends: tuple[str, ...]
    has_lines: bool = False
    read: Callable[[str], Any] | None = None


def literal(text: str) -> Any:
    """Returns the value of a Python literal that JSON can hold, None for any other text."""
    try:
        return parse_json(json.dumps(ast.literal_eval(text)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _gemma_value(text: str) -> Any:
    """Returns the value of an argument as Gemma 4 writes it, None for any other text: a string
    stands between two of its quotes, and no key has any."""
    pieces = text.split(_QUOTE)
    pieces[1::2] = map(json.dumps, pieces[1::2])
    pieces[::2] = (_BARE_KEY.sub(r'"\g<0>"', piece) for piece in pieces[::2])
    try:
        return parse_json("".join(pieces))
    except ValueError:
        return None


class CallForm(NamedTuple):
    """Says how a call is written: the pieces before its arguments, one of them the tool's name, and
    how `parameters` are written, None for arguments that are a JSON object. Where calls stand in a
    list, the first has all pieces, and the others those from `next` on."""

    head: tuple[Piece, ...]
    parameters: Parameters | None = None
    next: int = 0


_DEEPSEEK, _DSML = "<｜tool▁call▁begin｜>", "｜DSML｜"
MISTRAL = CallForm(("[TOOL_CALLS]", _SPACE, NAME, re.compile(r"(?:\[[\w\[\]]*)?\s*"), _OBJECT))
PYTHON = CallForm(  # a list of calls: LFM2; without the mark Llama 3.2 and 4
    ("<|tool_call_start|>", _SPACE, "[", NAME, "("),
    Parameters((NAME, "="), "", (")",), read=literal),
    next=3,
)
_CHANNEL = ("<|channel|>", "commentary to=functions.", NAME)
FORMS = (
    MISTRAL,
    PYTHON,
    CallForm((*_CHANNEL, "<|message|>", _SPACE, _OBJECT)),  # gpt-oss
    CallForm((*_CHANNEL, " ", "<|constrain|>", "json", "<|message|>", _SPACE, _OBJECT)),
    CallForm(("<function=", NAME, ">", _SPACE, _OBJECT)),  # Functionary, Llama 3.1's custom tools
    CallForm(  # Apertus
        ("<|tools_prefix|>", _SPACE, "[", _SPACE, '{"', NAME, '":', _SPACE, _OBJECT), next=4
    ),
    CallForm(  # Solar Open
        (
            *("<|tool_call:begin|>", re.compile(r"\w*"), "<|tool_call:name|>", NAME),
            *("<|tool_call:args|>", _SPACE, _OBJECT),
        )
    ),
    CallForm(  # Gemma 4
        ("<|tool_call>", "call:", NAME, "{"),
        Parameters((NAME, ":"), "", ("}",), read=_gemma_value),
    ),
    CallForm(  # DeepSeek-V3 and R1
        (_DEEPSEEK, "function", "<｜tool▁sep｜>", NAME, _SPACE, "```json", _SPACE, _OBJECT)
    ),
    CallForm((_DEEPSEEK, NAME, "<｜tool▁sep｜>", _SPACE, _OBJECT)),  # DeepSeek-V3.1
    CallForm(  # Kimi-K2
        (
            *("<|tool_call_begin|>", "functions.", NAME, re.compile(r":\d*"), _SPACE),
            *("<|tool_call_argument_begin|>", _SPACE, _OBJECT),
        )
    ),
    CallForm(  # Qwen3-Coder, Seed-OSS
        ("<function=", NAME, ">", _SPACE, _TAG),
        Parameters(
            ("<parameter=", _KEY, ">"), "</parameter>", ("</function>", "</tool_call>"), True
        ),
    ),
    CallForm(  # GLM-4.5 to 4.7
        ("<tool_call>", _SPACE, NAME, _SPACE, _TAG),
        Parameters(
            ("<arg_key>", _KEY, "</arg_key>", _SPACE, "<arg_value>"),
            "</arg_value>",
            ("</tool_call>",),
        ),
    ),
    CallForm(  # MiniMax-M2
        ('<invoke name="', NAME, '">'),
        Parameters(('<parameter name="', _KEY, '">'), "</parameter>", ("</invoke>",)),
    ),
    CallForm(  # DeepSeek-V3.2
        (f'<{_DSML}invoke name="', NAME, '">'),
        Parameters(
            (f'<{_DSML}parameter name="', _KEY, '" string="', re.compile(r"\w*"), '">'),
            f"</{_DSML}parameter>",
            (f"</{_DSML}invoke>",),
        ),
    ),
)
# Marks that may stand before a call, several in a row, and marks after it.
WRAPPERS = (
    *("<tool_call>", "<tool_calls>", "<seed:tool_call>", "<minimax:tool_call>", "<|tool_call|>"),
    *("[TOOL_CALLS]", "<|python_tag|>", "functools", "<|START_ACTION|>"),
    *("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>"),
    *(f"<{_DSML}function_calls>", "<TOOLCALL>", "<|tool_call_start|>"),
    *("<|function_call|>", "<|tool_calls|>", "<|message_sep|>", "function call<|role_sep|>"),
)
OPENINGS = tuple(dict.fromkeys((*WRAPPERS, *(str(form.head[0]) for form in FORMS))))
CLOSINGS = (
    *("</tool_call>", "</tool_calls>", "</seed:tool_call>", "</minimax:tool_call>"),
    *("<|/tool_call|>", "[/TOOL_CALLS]", "<|END_ACTION|>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *(f"</{_DSML}function_calls>", "</TOOLCALL>", "<|call|>", "<tool_call|>"),
    *("<|tools_suffix|>", "<|tool_call:end|>", "<|calls|>", "<|message_sep|>", "</function>"),
)
# All texts that may be tokens: the pieces and marks above, and six more.
MARKS = frozenset(
    piece
    for form in FORMS
    for piece in (*form.head, *(form.parameters.opening if form.parameters else ()))
    if isinstance(piece, str)
) | {*OPENINGS, *CLOSINGS, _DSML, "</arg_value>", "[ARGS]", "[CALL_ID]", _QUOTE, "<|role_sep|>"}
# What a literal is searched for: outside of quotes, and inside of each kind of them.
_INSIDE = {
    "": re.compile(r"""[][(){},']|(?<!<\|)"|<\|"\|>"""),
    "'": re.compile(r"\\.|'", re.DOTALL),
    '"': re.compile(r'\\.|"', re.DOTALL),
    _QUOTE: re.compile(re.escape(_QUOTE)),
}
# Marks that stand before a call; what is longer has none after it.
RUN = rf"(?:(?:{'|'.join(map(re.escape, WRAPPERS))})\s{{0,100}}){{1,8}}"
_SKIPPED = re.compile(rf"\s{{0,100}}(?:{RUN})?")


def after_wrappers(text: str, at: int) -> int:
    """Returns where the marks and the white space that begin at this place end."""
    found = _SKIPPED.match(text, at)
    return at if found is None else found.end()


def read_pieces(
    pieces: tuple[Piece, ...], text: str, at: int, is_known: Callable[[str, bool], bool]
) -> tuple[str, int] | bool:
    """Reads these pieces at this place of a text, and returns the name among them and where they
    end. Returns False if other text stands there, and True if the text ends before that is sure.

    `is_known` says whether a name may stand there. Its second argument is true for a name at the
    end of the text, which may be only the beginning of one.
    """
    name = ""
    for piece in pieces:
        if isinstance(piece, str):
            if not text.startswith(piece, at):
                return piece.startswith(text[at : at + len(piece)])
            at += len(piece)
            continue
        found = piece.match(text, at)
        if found is None:
            return at == len(text)
        at = found.end()
        if piece in (NAME, _KEY):
            name, is_begun = found[0], at == len(text)
            if not is_known(name, is_begun):
                return False
    return name, at


class LiteralEnd:
    """Finds the end of a value, Python's or Gemma's, that begins at this place of a text: a comma
    or a bracket that is not inside of it."""

    def __init__(self, begin: int) -> None:
        self.begin = self._at = begin
        self._depth, self._quote = 0, ""

    def find(self, text: str) -> int | None:
        """Returns the end, None if it has still to come. The text is that of the last call, and
        what has come since; no more than that is read."""
        while found := _INSIDE[self._quote].search(text, self._at):
            mark = found[0]
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in _INSIDE:
                self._quote = mark
            elif self._depth == 0 and mark in ",)]}":
                return found.start()
            else:
                self._depth += (mark in "([{") - (mark in ")]}")
            self._at = found.end()
        self._at = max(self._at, len(text) - len(_QUOTE) + 1)  # where a mark may have begun
        return None


def before_arguments(name: str) -> str:
    """Returns a regular expression that fits the end of what stands before a call's arguments, for
    a tool of this name and every form in which they are JSON and follow the name."""
    name = re.escape(name)
    keyed = rf'name"\s*:\s*"{name}"\s*,\s*"(arguments|parameters)"\s*:'
    mistral = rf"\]\s*{name}(\[CALL_ID\]\w+)?\[ARGS\]"
    deepseek = rf"<｜tool▁sep｜>{name}\s*```json|>{name}<｜tool▁sep｜>"
    kimi = rf"functions\.{name}:\d*\s*<\|tool_call_argument_begin\|>"
    harmony = rf"to=functions\.{name}[^\{{\}}]*<\|message\|>"
    apertus = rf'(<\|tools_prefix\|>\s*\[\s*|\}}\s*,\s*)\{{"{name}":'
    solar = rf"<\|tool_call:name\|>{name}<\|tool_call:args\|>"
    return "|".join((keyed, mistral, deepseek, kimi, harmony, apertus, solar))


def typed(value: str, allowed: Set[str]) -> Any:
    """Returns the value of a parameter that stands as text between tags.

    Reads the text as JSON, or a list or an object as Python, and returns that if its type is
    `allowed`, as all are if none is named. Otherwise, and where strings alone are allowed, returns
    the text itself.

    Example: "5" is the number 5 for {"integer"} and for no types, but "5" for {"string"}.
    """
    if allowed == {"string"}:
        return value
    plain = value.strip()
    try:
        read = parse_json(_PYTHON.get(plain, plain))
    except ValueError:
        # as templates write them that leave it to Python, Seed-OSS's for instance
        read = literal(plain) if plain.startswith(("[", "{")) else None
        if read is None:
            return value
    return read if not allowed or allowed & _KINDS[type(read)] else value


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write them
_KINDS: dict[type, set[str]] = {
    **{bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}},
    **{list: {"array"}, dict: {"object"}, type(None): {"null"}},
}


def parameter_types(schema: Mapping[str, Any]) -> dict[str, Set[str]]:
    """Returns the types that a tool's schema allows for each parameter, none if it allows any.
    Takes as long as the schema is, whatever refers to what in it."""
    properties, references = schema.get("properties"), References(schema)
    known: dict[int, Set[str]] = {}
    if not isinstance(properties, Mapping):
        return {}
    return {key: _types(each, references, known, 0) for key, each in properties.items()}


def _types(schema: Any, references: References, known: dict[int, Set[str]], depth: int) -> Set[str]:
    """Returns the types that a schema allows, asks and fills `known` by the schemas' identities."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = frozenset()  # of one that is an alternative of itself
        known[id(schema)] = _types_of(schema, references, known, depth + 1)
    return known[id(schema)]


def _types_of(
    schema: Mapping[str, Any], references: References, known: dict[int, Set[str]], depth: int
) -> Set[str]:
    named, values = schema.get("type"), schema.get("enum", [schema.get("const", ...)])
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    if isinstance(values, list) and values != [...]:
        return set[str]().union(*(_KINDS[kind] for kind in set(map(type, values))))
    if isinstance(schema.get("$ref"), str):
        return _types(references.resolved(schema), references, known, depth)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [_types(each, references, known, depth) for each in schema[key]]
            return set[str]().union(*parts) if all(parts) else set()
    return set()
