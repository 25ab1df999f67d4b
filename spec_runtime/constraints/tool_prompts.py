"""Shows tools, calls and their results to a model, whether its chat template knows tools or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spec_runtime.constraints.tools import checked_tools

Message = Mapping[str, Any]

_INSTRUCTIONS = (
    "You can call functions. These are the ones there are, with their parameters as JSON schemas:\n"
    "<tools>{tools}</tools>\n"
    "To call them, answer with the calls and nothing else, in this form:\n"
    '<tool_call>[{{"name": "a function", "arguments": {{"a parameter": "its value"}}}}]</tool_call>'
)


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Returns messages for a template that knows tools: arguments that came as JSON text, as in
    OpenAI's form, become objects, which such templates write as JSON themselves."""
    return [_with_objects(message) for message in messages]


def written_out(messages: Sequence[Message], tools: Any) -> list[Message]:
    """Returns messages for a template that knows no tools: these stand in the system prompt, calls
    in the assistant's text, and results in a user's.

    Example: {"role": "tool", "content": "12 °C"} becomes a user's message
    "<tool_response>\\n12 °C\\n</tool_response>".
    """
    plain = [_written(message) for message in messages]
    if not tools:
        return plain
    text = _INSTRUCTIONS.format(tools=json.dumps(checked_tools(tools), ensure_ascii=False))
    if plain and plain[0].get("role") == "system":
        first = {**plain[0], "content": f"{plain[0].get('content') or ''}\n\n{text}".strip()}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    """Returns a call whose arguments are an object, if they are JSON text of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _written(message: Message) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content or ''}\n</tool_response>"}
    if not isinstance(calls, list | tuple) or not calls:
        return message
    written = [_function_of(_with_object(call)) for call in calls]
    text = f"<tool_call>{json.dumps(written, ensure_ascii=False)}</tool_call>"
    return {"role": message.get("role"), "content": f"{content or ''}\n{text}".strip()}


def _function_of(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"got tool call {call!r:.80}, expected a function with a name")
    return {"name": function["name"], "arguments": function.get("arguments", {})}
