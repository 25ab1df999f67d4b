"""Shows tools, calls and their results to a model, whether its chat template knows tools or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_runtime.constraints.tools import checked_tools
from spec_runtime.errors import UserError
from spec_runtime.mapping import brief
from spec_runtime.text.messages import Message

_INSTRUCTIONS = (
    "You can call functions. These are the ones there are, with their parameters as JSON schemas:\n"
    "<tools>{tools}</tools>\n"
    "To call them, answer with the calls and nothing else, in this form:\n"
    '<tool_call>[{{"name": "a function", "arguments": {{"a parameter": "its value"}}}}]</tool_call>'
)
# Arguments that a template joins to a text as they are, as DeepSeek's do: `+ call['arguments'] +`.
_JOINED = re.compile(r"\+\s*[\w.\[\]'\"]*arguments(?:['\"]\])?\s*(?:\+|-?}})")


class ToolPrompter:
    """Prepares messages and tools for one chat template, by what its source reads.

    Most templates with tools read a variable `tools`; Phi-4's reads them from the system message. A
    template that knows neither gets them as text in the system prompt, and the results of calls as
    a user's messages. A template that knows no calls gets these in the assistant's text. Arguments
    are objects, or JSON text for a template that joins them to its own.

    Example of a result: {"role": "tool", "content": "12 °C"} becomes a user's message
    "<tool_response>\\n12 °C\\n</tool_response>".
    """

    def __init__(self, source: str) -> None:
        self._reads_variable = re.search(r"(?<![\w.'\"])tools\b", source) is not None
        self._reads_message = re.search(r"message(\[['\"]|\.)tools\b", source) is not None
        self._reads_calls = "tool_calls" in source
        self._joins_arguments = _JOINED.search(source) is not None

    def prepared(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Returns the messages and the variable `tools` to render; raises UserError for tools that
        are not in OpenAI's form."""
        write = _as_text if self._joins_arguments else _as_object
        prepared = [_with_arguments(message, write) for message in messages]
        if not (self._joins_arguments or self._reads_calls):
            prepared = [_with_calls_as_text(message) for message in prepared]
        if not (self._reads_calls or self._reads_variable or self._reads_message):
            prepared = [_with_result_as_text(message) for message in prepared]
        if not tools:
            return prepared, None
        checked = checked_tools(tools)
        if self._reads_variable:
            return prepared, checked
        text = json.dumps(checked, ensure_ascii=False)
        if not prepared or prepared[0].get("role") != "system":
            prepared.insert(0, {"role": "system", "content": ""})
        first = prepared[0]
        if self._reads_message:
            prepared[0] = {**first, "tools": text}
        else:
            content = f"{first.get('content') or ''}\n\n{_INSTRUCTIONS.format(tools=text)}"
            prepared[0] = {**first, "content": content.strip()}
        return prepared, None


def _with_arguments(message: Message, write: Callable[[Any], Any]) -> Message:
    """Returns a message whose calls have their arguments as `write` returns them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_rewritten(call, write) for call in calls]}


def _rewritten(call: Any, write: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": write(function["arguments"])}}


def _as_text(arguments: Any) -> Any:
    is_object = isinstance(arguments, Mapping)
    return json.dumps(arguments, ensure_ascii=False) if is_object else arguments


def _as_object(arguments: Any) -> Any:
    """Returns arguments as an object, if they are JSON text of one."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _with_result_as_text(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    content = message.get("content") or ""
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


def _with_calls_as_text(message: Message) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not calls:
        return message
    functions = [_function_of(call) for call in calls]
    text = f"<tool_call>{json.dumps(functions, ensure_ascii=False)}</tool_call>"
    return {"role": message.get("role"), "content": f"{content or ''}\n{text}".strip()}


def _function_of(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"got tool call {brief(repr(call), 80)}, expected a function with a name and arguments"
        )
    return {"name": function["name"], "arguments": function.get("arguments", {})}
