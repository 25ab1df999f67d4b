"""Shows tools, calls and their results to a model, whether its chat template knows tools or not."""

import functools
import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_runtime.dialogue.messages import Message
from spec_runtime.dialogue.reader import ResponseReader, joined
from spec_runtime.dialogue.response_template import HARMONY, tags_of, template_of
from spec_runtime.dialogue.tools import checked_tools
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str | None]

_INSTRUCTIONS = (
    "You can call functions. These are the ones there are, with their parameters as JSON schemas:\n"
    "<tools>{tools}</tools>\n"
    "To call them, answer with the calls and nothing else, in this form:\n"
    '<tool_call>[{{"name": "a function", "arguments": {{"a parameter": "its value"}}}}]</tool_call>'
)
_THINKING = re.compile(r"message(?:\.|\[['\"])thinking\b")

# A conversation and a tool by which a template shows what it can read.
_ASKED = {"role": "user", "content": "a"}
_VALUES = ("qz7", "qz8")  # no words of a template's own
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # all that Mistral's templates take
_MORE: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}


class Habits(NamedTuple):
    """What a chat template can read: a message without content beside calls, arguments that are
    objects, several calls in a message, calls' ids of any length, tools without a description, and
    a message of the system's, and further ones later."""

    no_content: bool
    objects: bool
    several: bool
    any_ids: bool
    no_description: bool
    system: bool
    later_systems: bool


class ToolPrompter:
    """Prepares messages and tools for one chat template, by what its source reads.

    Most templates with tools read a variable `tools`; Phi-4's reads them from the system message. A
    template that knows neither gets them as text in the system prompt, and the results of calls as
    a user's messages. A template that knows no calls gets these in the assistant's text. `render`
    renders messages and tools by the template, and returns None if it fails: what the template can
    read is tried once, see `Habits`. Without content, for instance, some fail or print "None".

    Example of a result: {"role": "tool", "content": "12 °C"} becomes a user's message
    "<tool_response>\\n12 °C\\n</tool_response>".
    """

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        self._reads_variable = re.search(r"(?<![\w.'\"])tools\b", source) is not None
        self._reads_message = re.search(r"message(\[['\"]|\.)tools\b", source) is not None
        self._reads_calls = "tool_calls" in source
        self._reads_thinking = _THINKING.search(source) is not None
        self._has_channels = tags_of(source) is HARMONY

    def prepared(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Returns the messages and the variable `tools` to render; raises UserError for tools that
        are not in OpenAI's form."""
        if self._has_channels:
            messages = [_with_final_text(message) for message in messages]
        prepared = self._with_one_system(messages)
        messages = prepared
        if any(message.get("tool_calls") for message in messages):
            prepared = prepared if self.habits.several else _one_by_one(messages)
            prepared = prepared if self.habits.any_ids else _with_short_ids(prepared)
            prepared = _with_names([self._with_calls(message) for message in prepared])
        if not (self._reads_calls or self._reads_variable or self._reads_message):
            prepared = _with_results_as_text(prepared)
        if not tools:
            return prepared, None
        checked: list[dict[str, Any]] = checked_tools(tools)
        if self._reads_variable:
            is_whole = all(_MORE.keys() <= tool["function"].keys() for tool in checked)
            if not (is_whole or self.habits.no_description):
                checked = [_tool(**_MORE | tool["function"]) for tool in checked]
            return prepared, checked
        text = json.dumps(checked, ensure_ascii=False)
        is_shown = bool(prepared) and prepared[0].get("role") == "system"
        if not is_shown and (self.habits.system or not prepared):
            prepared.insert(0, {"role": "system", "content": ""})
        first = prepared[0]
        if self._reads_message:
            prepared[0] = {**first, "tools": text}
        else:
            content = f"{first.get('content') or ''}\n\n{_INSTRUCTIONS.format(tools=text)}"
            prepared[0] = {**first, "content": content.strip()}
        return prepared, None

    @functools.cached_property
    def habits(self) -> Habits:
        """Returns what the template can read, everything where it fails in any case."""
        forms = list(itertools.product((True, False), (True, False)))
        one, other = _VALUES
        texts = [self._render([_ASKED, *_called(*form, one)], [_tool(**_MORE)]) for form in forms]
        # One that does not show the arguments, or as Python prints them, was written for others.
        shown = {
            form: text.count("None")
            for form, text in zip(forms, texts, strict=True)
            if text is not None and one in text and str({"key": one}) not in text
        }
        least = min(shown.values(), default=0)
        content, objects = next((form for form, n in shown.items() if n == least), forms[0])
        both = self._render([_ASKED, *_called(content, objects, *_VALUES)], [_tool(**_MORE)])
        several = not shown or other in (both or "")
        any_ids = not shown or one in (
            self._render(
                [_ASKED, *_called(content, objects, one, id_of="call_{}")], [_tool(**_MORE)]
            )
            or ""
        )
        whole, bare = (self._render([_ASKED], [each]) for each in (_tool(**_MORE), _tool()))
        system = {"role": "system", "content": "c"}
        alone, told = (self._render(each, None) for each in ([_ASKED], [system, _ASKED]))
        twice = self._render([system, _ASKED, system, _ASKED], None)
        described, system_first = whole is None or bare is not None, not alone or bool(told)
        later = not told or bool(twice)
        return Habits(content, objects, several, any_ids, described, system_first, later)

    def _with_one_system(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with what the system says before all others, where the template
        refuses it later, and in the first message of the user where it refuses it everywhere."""
        said = [message for message in messages if message.get("role") == "system"]
        is_first = bool(said) and said == [*messages[:1]]
        if not said or (self.habits.system and (is_first or self.habits.later_systems)):
            return [*messages]
        text = "\n\n".join(str(message.get("content") or "") for message in said)
        rest = [message for message in messages if message.get("role") != "system"]
        if self.habits.system:
            return [{"role": "system", "content": text}, *rest]
        if rest and rest[0].get("role") == "user":
            text, rest = f"{text}\n\n{rest[0].get('content') or ''}", rest[1:]
        return [{"role": "user", "content": text}, *rest]

    def _with_calls(self, message: Message) -> Message:
        """Returns a message whose calls are written as the template reads them."""
        calls, content = message.get("tool_calls"), message.get("content")
        if not isinstance(calls, list | tuple) or not calls:
            return message
        write = _as_object if self.habits.objects else _as_text
        message = {**message, "tool_calls": [_rewritten(call, write) for call in calls]}
        if not self._reads_calls:
            return _with_calls_as_text(message)
        if self._reads_thinking and not content and message.get("reasoning_content"):
            message = {"thinking": message["reasoning_content"], **message}
        if content is None and not self.habits.no_content:
            message = {**message, "content": ""}
        return message


def _with_final_text(message: Message) -> Message:
    """Returns an answer without the messages of its thinking, whose marks gpt-oss refuses."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    reader = ResponseReader(template_of(HARMONY, "harmony"), has_calls=False)
    parts = reader.push(content, is_end=True)
    return {**message, "content": joined(parts)[0]}


def _tool(name: str = "f", **more: Any) -> dict[str, Any]:
    """Returns a function in OpenAI's form."""
    return {"type": "function", "function": {"name": name, **more}}


def _called(
    no_content: bool, objects: bool, *values: str, id_of: str = "abcdefgh{}"
) -> list[Message]:
    """Returns calls with these values in their arguments, and the results."""
    arguments = [{"key": value} for value in values]
    calls = [
        {"id": id_of.format(i), **_tool(arguments=each if objects else json.dumps(each))}
        for i, each in enumerate(arguments)
    ]
    said = {"role": "assistant", "content": None if no_content else "", "tool_calls": calls}
    result = {"role": "tool", "content": "b", "name": "f"}
    return [said, *({**result, "tool_call_id": call["id"]} for call in calls)]


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Returns messages of one call each, every one before its result, as if made in turn."""
    parted: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            parted.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        content = message["content"]
        for call in calls:
            parted.append({**message, "content": content, "tool_calls": [call]})
            content = None
            number = call.get("id") if isinstance(call, Mapping) else None
            found = [each.get("tool_call_id") == number for each in results]
            if results:
                parted.append(results.pop(found.index(True) if any(found) else 0))
        parted += results
    return parted


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose calls have ids of nine letters and digits, always the same for one
    id, and whose results name these."""

    def short(identity: Any) -> str:
        text = str(identity)
        is_short = _SHORT_ID.fullmatch(text) is not None
        return text if is_short else hashlib.sha256(text.encode()).hexdigest()[:9]

    found: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            known = [
                {**call, "id": short(call.get("id"))} if isinstance(call, Mapping) else call
                for call in calls
            ]
            message = {**message, "tool_calls": known}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": short(message.get("tool_call_id"))}
        found.append(message)
    return found


def _with_names(messages: list[Message]) -> list[Message]:
    """Returns messages in which results name their tools, which clients leave to the call's id."""
    names: dict[Any, Any] = {}
    named = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list | tuple) else ():
            if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                names[str(call.get("id"))] = call["function"].get("name")
        name = names.get(str(message.get("tool_call_id"))) if message["role"] == "tool" else None
        named.append(message if name is None else {"name": name, **message})
    return named


def _rewritten(call: Any, write: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": write(function["arguments"])}}


def _as_text(arguments: Any) -> Any:
    is_object = isinstance(arguments, Mapping)
    return json.dumps(arguments, ensure_ascii=False) if is_object else arguments


def _as_object(arguments: Any) -> Any:
    """Returns arguments as an object. Those of a broken call, which templates cannot take apart,
    become one that shows what the model wrote."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = arguments
    if isinstance(value, Mapping):
        return value
    return {} if value is None else {"arguments": arguments}


def _with_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which the user tells results, those of several calls in one message:
    templates may refuse two of the user's that follow each other."""
    told: list[Message] = []
    for message, before in zip(messages, [None, *messages], strict=False):
        if message.get("role") != "tool":
            told.append(message)
            continue
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if before is not None and before.get("role") == "tool":
            text = f"{told.pop()['content']}\n{text}"
        told.append({"role": "user", "content": text})
    return told


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
