"""Checks tools, and forces an answer to be a call of one, in the form of the model's family."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from spec_runtime.dialogue.families import CALLS, FAMILIES, KEYED, THINKING
from spec_runtime.dialogue.values import parameter_types
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json
from spec_runtime.grammar.json_schema import NAMED, VALUES

_NAME = re.compile(r"[\w-][\w.-]{0,127}")
_NAMED = re.compile(r"\(\?P<name>[^()]*\)")  # in an expression


class ToolCall(NamedTuple):
    """A call of one tool: its name, and its arguments as a JSON object."""

    name: str
    arguments_json: str


class CheckedTools(list[dict[str, Any]]):
    """Tools in OpenAI's form as plain dictionaries. `types` are those of each tool's parameters, by
    their names, see `values.parameter_types`."""

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.types: dict[str, dict[str, Set[str]]] = {}
        for function in (tool["function"] for tool in self):
            self.types[function["name"]] = parameter_types(function.get("parameters") or {})


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
    if (form := FAMILIES.get(family)) is None:
        raise unknown_family(family)
    definitions: dict[str, Any] = {}
    calls = [_call_schema(function, form.key, definitions) for function in functions]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    schema["$defs"] = definitions
    return {"type": "tagged_json", "begin": form.begin, "schema": schema, "end": form.end}


def answer_or_call(response_format: Any, tools: Any, family: str) -> dict[str, Any]:
    """Returns the `response_format` of an answer that fits this one, or is one call of one of these
    tools. Raises UserError as `forced_call` does; a format of kind ebnf, or free text, is refused
    once it is read."""
    return {"type": "any_of", "formats": [response_format, forced_call(tools, family)]}


def strict_calls(tools: Any) -> dict[str, Any] | None:
    """Returns the `response_format` of a free text in which the arguments of each call of a
    `strict` tool fit its parameters, None if no tool is strict. It holds for arguments that are
    JSON and follow the name. Raises UserError for tools that are not in OpenAI's form."""
    functions = [tool["function"] for tool in checked_tools(tools)]
    triggers = [
        {"regex": _before_arguments(each["name"]), "schema": _parameters(each)}
        for each in functions
        if each.get("strict") is True
    ]
    return {"type": "triggered_json", "triggers": triggers} if triggers else None


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


def checked_tools(tools: Any) -> CheckedTools:
    """Returns tools in OpenAI's form as plain dictionaries, and those that were checked before as
    they are; raises UserError for others."""
    if isinstance(tools, CheckedTools):
        return tools
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise UserError(
            f"got tools {brief(repr(tools), 80)}, expected a list of functions", param="tools"
        )
    return CheckedTools(map(_checked_tool, tools))


def _checked_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    is_tool = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    if not is_tool or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"got tool {brief(repr(tool), 80)}, expected type 'function' and a function with a "
            "name of 1 to 128 letters, digits, '_', '-' and, after the first, '.'",
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
    definitions[name] = _with_references(_parameters(function), name)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _parameters(function: Mapping[str, Any]) -> Any:
    """Returns the JSON schema of a function's arguments."""
    return function.get("parameters") or {"type": "object", "properties": {}}


def _with_references(schema: Any, name: str) -> Any:
    """Returns a schema whose references start at its place among the definitions: "#" becomes
    "#/$defs/name", and "#/properties/x" becomes "#/$defs/name/properties/x". Values, such as those
    of "const", stay as they are."""
    if isinstance(schema, list):
        return [_with_references(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for key, value in schema.items():
        if key in VALUES:
            changed[key] = value
        elif key in NAMED and isinstance(value, dict):
            changed[key] = {each: _with_references(inner, name) for each, inner in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            changed[key] = f"#/$defs/{name}{value[1:]}"
        else:
            changed[key] = _with_references(value, name)
    return changed


def _before_arguments(name: str) -> str:
    """Returns a regular expression that fits the end of what stands before a call's arguments, for
    a tool of this name and every form in which they are JSON and follow the name."""
    forms = [KEYED[0], *(each["tool_calls"] for each in THINKING.values() if "tool_calls" in each)]
    forms += CALLS
    exact = [each for each in forms if each["content"] == "json" and "content_args" not in each]
    others = {_head(each["open_pattern"]) for each in forms if each not in exact}
    heads = [_head(each["open_pattern"]) for each in exact]
    # in a list, after the call before
    heads += [
        rf"\}}\s*,\s*{_head(each['next_pattern'])}" for each in exact if "next_pattern" in each
    ]
    named = (_NAMED.sub(lambda _: re.escape(name), each) for each in heads if each not in others)
    return "|".join(dict.fromkeys(named))


def _head(pattern: str) -> str:
    """Returns an expression without what it only looks at, and the white space at its end. What may
    be left out at its end has to be there: where it ends, nothing but arguments may follow."""
    pattern = re.sub(r"\(\?=(?:[^()\\]|\\.)*\)$", "", pattern).removesuffix(r"\s*")
    return pattern.removesuffix("?") if pattern.endswith(")?") else pattern


def unknown_family(family: str) -> UserError:
    """Returns the error of a family that is not known."""
    return UserError(f"got tool family {family!r:.60}, expected one of {', '.join(FAMILIES)}")
