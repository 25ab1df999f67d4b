"""Reads the tool calls in an answer, and forces an answer to be one.

Each family of models writes calls in its own way:

- llama3 (Llama 3.1 to 3.3): `{"name": "f", "parameters": {…}}`, several separated by ";";
- mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, or newer `[TOOL_CALLS]f[ARGS]{…}`;
- hermes (Qwen, Hermes, SmolLM3): `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`;
- phi (Phi-4): `<|tool_call|>[{"name": "f", "arguments": {…}}]<|/tool_call|>`, `functools[…]`;
- smollm (SmolLM2): `<tool_call>[{"name": "f", "arguments": {…}}]</tool_call>`.

Markers in brackets or bars, and some models' tags, are special tokens, which an answer's text does
not show, so that bare calls are read too. Anything but a whole, valid call stays text: a broken
answer is no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_runtime.errors import UserError
from spec_runtime.mapping import brief, parse_json


class ToolCall(NamedTuple):
    """A call of one tool: its name, and its arguments as a JSON object."""

    name: str
    arguments_json: str


class _Found(NamedTuple):
    """Calls, and where in the text they stand."""

    calls: list[ToolCall]
    begin: int
    end: int


_DECODER = json.JSONDecoder()
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_OPENING_TAG, _CLOSING_TAG = "<tool_call>", "</tool_call>"
_ENDING = re.compile(r"\s*(<\|/tool_call\|>|\[/TOOL_CALLS\])")
_NAMED_CALL = re.compile(
    rf"\s*(?:\[TOOL_CALLS\])?\s*({_NAME.pattern})(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?={{)"
)


def parse_calls(text: str, family: str, tools: Any = None) -> tuple[str, list[ToolCall]]:
    """Returns an answer's text without its calls, and the calls in their order.

    With `tools`, functions in OpenAI's form, calls of functions that are not among them stay text.
    Raises UserError for an unknown family and for tools in another form.

    Example, hermes: 'Let me see. <tool_call>{"name": "now", "arguments": {}}</tool_call>' gives
    'Let me see.' and one call of `now` with the arguments '{}'.
    """
    found = _reader(family)(text)
    if tools is not None:
        names = {tool["function"]["name"] for tool in checked_tools(tools)}
        found = [piece for piece in found if names.issuperset(call.name for call in piece.calls)]
    if not found:
        return text, []
    content, at = [], 0
    for piece in found:
        content.append(text[at : piece.begin].strip())
        at = piece.end
    content.append(text[at:].strip())
    calls = [call for piece in found for call in piece.calls]
    return "\n".join(part for part in content if part), calls


def family_of(chat_template: str | None) -> str:
    """Returns the family whose calls a model of this chat template writes.

    A template without tools is smollm's: its prompts are written by tool_prompts.py.
    """
    source = chat_template or ""
    if re.search(r"\btools\b", source) is None:
        return "smollm"
    for marks, family in _MARKS:
        if any(mark in source for mark in marks):
            return family
    return "hermes"


def forced_call(tools: Any, family: str, name: str | None = None) -> dict[str, Any]:
    """Returns the `response_format` of an answer that is one call of one of these tools, or of the
    tool `name`. Raises UserError for tools that are not in OpenAI's form and for an unknown name.
    """
    functions = [tool["function"] for tool in checked_tools(tools)]
    if name is not None:
        known = [function["name"] for function in functions]
        if name not in known:
            raise UserError(
                f"got tool {name!r:.80}, expected one of {brief(', '.join(known))}",
                param="tool_choice",
            )
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        raise UserError(
            "got no tools, expected at least one for an answer that calls one", param="tools"
        )
    _reader(family)
    key = "parameters" if family == "llama3" else "arguments"
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, key, definitions) for function in functions]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    begin, end = "", ""
    if family in ("mistral", "phi", "smollm"):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    if family == "smollm":
        begin, end = _OPENING_TAG, _CLOSING_TAG
    elif family == "hermes":
        begin, end = f"{_OPENING_TAG}\n", f"\n{_CLOSING_TAG}"
    schema["$defs"] = definitions
    return {"type": "tagged_json", "begin": begin, "schema": schema, "end": end}


def format_of_choice(tools: Any, tool_choice: Any, family: str) -> dict[str, Any] | None:
    """Returns the `response_format` that OpenAI's `tool_choice` asks for: None, "none" and "auto"
    leave the answer free (None), "required" and {"type": "function", "function": {"name": …}}
    force one call. Raises UserError for another choice, see also `forced_call`."""
    if tool_choice in (None, "none", "auto"):
        return None
    if tool_choice == "required":
        return forced_call(tools, family)
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"got tool_choice {brief(repr(tool_choice), 80)}, expected none, auto, required, or a "
            "function with its name",
            param="tool_choice",
        )
    return forced_call(tools, family, function["name"])


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns tools in OpenAI's form as plain dictionaries; raises UserError for others."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UserError(
            f"got tools {brief(repr(tools), 80)}, expected a list of functions", param="tools"
        )
    return [_checked_tool(tool) for tool in tools]


def _checked_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    is_tool = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    if not is_tool or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"got tool {brief(repr(tool), 80)}, expected type 'function' and a function with a "
            "name of letters, digits, '_', '.' and '-'",
            param="tools",
        )
    assert isinstance(function, Mapping)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UserError(
            f"got parameters {brief(repr(parameters), 80)} of tool {name}, expected a JSON schema",
            param="tools",
        )
    try:
        copied: dict[str, Any] = parse_json(json.dumps({"type": "function", "function": function}))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"got tool {name} that cannot be written as JSON ({brief(error, 80)}), expected "
            "objects, arrays, strings, numbers, booleans and null",
            param="tools",
        ) from None
    return copied


def _call_schema(
    function: Mapping[str, Any], key: str, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Returns the JSON schema of a call of one function; adds that of its arguments to
    `definitions` by the function's name, so that what refers to a part of it finds that there."""
    name = function["name"]
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    if "properties" in parameters:  # what the schema does not name is not made up
        parameters.setdefault("additionalProperties", False)
    definitions[name] = _with_references(parameters, name)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _with_references(schema: Any, name: str) -> Any:
    """Returns a schema whose references start at its place among the definitions: "#" becomes
    "#/$defs/name", and "#/properties/x" becomes "#/$defs/name/properties/x"."""
    if isinstance(schema, list):
        return [_with_references(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _with_references(value, name) for key, value in schema.items()}
    reference = changed.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        changed["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return changed


def _call(value: Any) -> ToolCall | None:
    """Returns a parsed JSON value as a call, None if it is none."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if "arguments" not in value and "parameters" not in value:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        return None
    return ToolCall(name, json.dumps(arguments or {}, ensure_ascii=False))


def _calls(value: Any) -> list[ToolCall]:
    """Returns the calls of a JSON value, one or a list of them; none if any part is no call."""
    values = value if isinstance(value, list) else [value]
    calls = [call for each in values if (call := _call(each)) is not None]
    return calls if len(calls) == len(values) else []


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `at`, after white space, and where it ends; None where
    none does."""
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return value, end


def _read_tagged(text: str) -> list[_Found]:
    """Reads what stands between <tool_call> and </tool_call>, of which the last closing tag may be
    missing; without any tag, an answer that is nothing but calls."""
    if _OPENING_TAG not in text:
        return _read_bare(text)
    found, at = [], 0
    while (begin := text.find(_OPENING_TAG, at)) >= 0:
        at = begin + len(_OPENING_TAG)
        value, end = _json_at(text, at)
        rest = text[end:].lstrip()
        is_closed = rest.startswith(_CLOSING_TAG)
        if (calls := _calls(value)) and (is_closed or not rest):
            at = len(text) - len(rest) + len(_CLOSING_TAG) * is_closed
            found.append(_Found(calls, begin, at))
    return found


def _read_llama(text: str) -> list[_Found]:
    """Reads an answer that is nothing but calls, perhaps after <|python_tag|>."""
    tag = re.match(r"\s*<\|python_tag\|>", text)
    return _read_bare(text, tag.end() if tag else 0, separators=" \t\r\n;,")


def _read_listed(*markers: str) -> Callable[[str], list[_Found]]:
    """Returns a reader of JSON lists (or objects) of calls: after these markers, or, without any
    marker, of an answer that is nothing else."""
    opening = re.compile("|".join(map(re.escape, markers)))

    def read(text: str) -> list[_Found]:
        found, at = [], 0
        while match := opening.search(text, at):
            value, end = _json_at(text, match.end())
            at = max(end, match.end())
            if calls := _calls(value):
                ending = _ENDING.match(text, end)
                at = ending.end() if ending else end
                found.append(_Found(calls, match.start(), at))
        return found if opening.search(text) else _read_bare(text)

    return read


def _read_bare(text: str, at: int = 0, separators: str | None = None) -> list[_Found]:
    """Reads an answer that, from `at` on, is nothing but JSON lists (or objects) of calls, with
    these characters between them (None: white space)."""
    calls: list[ToolCall] = []
    while rest := text[at:].lstrip(separators):
        value, at = _json_at(text, len(text) - len(rest))
        if not (more := _calls(value)):
            return []
        calls += more
    return [_Found(calls, 0, len(text))] if calls else []


_read_mistral_list = _read_listed("[TOOL_CALLS]")


def _read_mistral(text: str) -> list[_Found]:
    """Reads a list of calls, or names that are each followed by their arguments."""
    if found := _read_mistral_list(text):
        return found
    begin = max(0, text.find("[TOOL_CALLS]"))
    at, calls = begin, list[ToolCall]()
    while match := _NAMED_CALL.match(text, at):
        value, at = _json_at(text, match.end())
        call = _call({"name": match[1], "arguments": value})
        if call is None or value is None:
            return []
        calls.append(call)
    return [_Found(calls, begin, len(text))] if calls and not text[at:].strip() else []


_READERS: dict[str, Callable[[str], list[_Found]]] = {
    "llama3": _read_llama,
    "mistral": _read_mistral,
    "hermes": _read_tagged,
    "phi": _read_listed("<|tool_call|>", "functools"),
    "smollm": _read_tagged,
}
FAMILIES = tuple(_READERS)
# What a family's chat template is known by.
_MARKS = (
    (("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), "mistral"),
    (("<|tool_call|>", "<|tool|>", "functools"), "phi"),
    (("<|python_tag|>", '"parameters": dictionary of argument name'), "llama3"),
)


def _reader(family: str) -> Callable[[str], list[_Found]]:
    if family not in _READERS:
        raise UserError(f"got tool family {family!r:.60}, expected one of {', '.join(FAMILIES)}")
    return _READERS[family]
