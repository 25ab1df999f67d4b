"""Takes the tools of OpenAI's Responses API as a chat's functions, and writes their calls as items
of the API's kinds."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json
from spec_runtime.serve.openai import elsewhere
from spec_runtime.serve.openai.schemas import has

Object = dict[str, Any]
MOST_TOOLS = 128  # those of namespaces included
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Tools:
    """Tells the tools that a model can call from those that only OpenAI's servers run.

    `functions` are in a chat's form: those of a namespace stand among the others, and a custom tool
    is a function with one string, `input`. `left_out` are the kinds of tools that nobody runs here.
    Raises UserError for a tool without a type.
    """

    def __init__(self, tools: Sequence[Object]) -> None:
        self.functions: list[Object] = []
        self.left_out: list[str] = []
        self._namespaces: dict[str, str] = {}  # by the function's name
        self._custom: set[str] = set()
        for tool in tools:
            self._add(tool)

    def _add(self, tool: Object, namespace: str | None = None) -> None:
        kind, name = tool.get("type"), str(tool.get("name"))
        if not isinstance(kind, str) or (kind == "custom" and not has(tool, "name")):
            raise UserError(
                f"got tool {brief(repr(tool), 80)}, expected one with a type, such as 'function', "
                "and a name",
                param="tools",
            )
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            for each in tool["tools"]:
                if isinstance(each, dict):
                    self._add(each, name)
            return
        if kind == "custom":
            self._custom.add(name)
            tool = {"name": name, "description": _described(tool), "parameters": _INPUT}
        elif kind != "function":
            self.left_out.append(kind)
            return
        if namespace is not None:
            self._namespaces[name] = namespace
        known = {"name", "description", "parameters", "strict"}
        function = {key: value for key, value in tool.items() if key in known and value is not None}
        self.functions.append({"type": "function", "function": function})
        if len(self.functions) > MOST_TOOLS:
            message = f"got more than {MOST_TOOLS} functions, expected fewer tools"
            raise UserError(message, param="tools")

    def is_custom(self, name: str) -> bool:
        """Says whether a call of this name has a text as its input."""
        return name in self._custom

    def called(self, name: str, arguments: str) -> Object:
        """Returns what an item says of a call with these arguments, which may be cut off."""
        if self.is_custom(name):
            return {"type": "custom_tool_call", "name": name, "input": input_of(arguments)}
        called = {"type": "function_call", "name": name, "arguments": arguments}
        namespace = self._namespaces.get(name)
        return called if namespace is None else {**called, "namespace": namespace}


def input_of(arguments: str) -> str:
    """Returns the text that a custom tool is called with; arguments in another form are it."""
    try:
        found = parse_json(arguments).get("input")
    except (ValueError, RecursionError, AttributeError):
        found = None
    return found if isinstance(found, str) else arguments


def _described(tool: Object) -> str:
    """Returns a custom tool's description, with the grammar that its input has to follow."""
    text, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, Mapping) and has(dict(form), "syntax", "definition"):
        text += f"\nThe input follows this grammar ({form['syntax']}):\n{form['definition']}"
    return text.strip()


def chosen(choice: Any, functions: list[Object]) -> tuple[Any, list[Object]]:
    """Returns a choice in a chat's form, and the functions that it leaves to be called."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}, functions
    return elsewhere.chosen(choice, functions)


def message_call(item: Object) -> Object | None:
    """Returns the call of a chat's message that an item of the conversation is, None for others."""
    kind, name = item.get("type"), item.get("name")
    if kind == "function_call" and has(item, "call_id", "name", "arguments"):
        arguments = item["arguments"]
    elif kind == "custom_tool_call" and has(item, "call_id", "name", "input"):
        arguments = json.dumps({"input": item["input"]})
    elif (
        kind == "local_shell_call" and has(item, "call_id") and isinstance(item.get("action"), dict)
    ):
        name, arguments = "local_shell", json.dumps(item["action"])
    else:
        return None
    function = {"name": name, "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}
