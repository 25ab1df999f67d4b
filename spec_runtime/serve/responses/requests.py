"""Describes the requests of OpenAI's Responses API that the server takes, as chats that say the
same.

Unknown fields are refused, and known ones without an effect on the answer are taken and ignored.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, ConfigDict, model_validator

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief
from spec_runtime.serve.ignored import Tolerant
from spec_runtime.serve.openai.schemas import (
    MAX_TOP_LOGPROBS,
    ChatMessage,
    ChatRequest,
    Flag,
    List,
    Whole,
    has,
    sampled,
    sampling_of,
)
from spec_runtime.serve.responses.tools import MOST_TOOLS, Tools, chosen, message_call

Object = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# Items of tools that OpenAI's servers run, which say nothing to a model that has none of them.
SERVERS_CALLS = re.compile(r"(web_search|file_search|image_generation|code_interpreter|mcp)_\w+")
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
OWN = "specsplit:"  # before thinking of this server's in `encrypted_content`
# Fields that a response repeats as they were asked for.
REPEATED = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "previous_response_id",
    "metadata",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
)


class ReasoningConfig(BaseModel):
    """Says how much the model thinks; the summary, where one is asked for, is all that it
    thought."""

    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    max_tokens: Annotated[Whole, Ge(0)] | None = None  # of thinking, as others have it
    summary: str | None = None


class TextConfig(BaseModel):
    """Says how the answer is written; its verbosity changes nothing."""

    model_config = ConfigDict(extra="forbid")

    format: Object | None = None
    verbosity: str | None = None


@sampled
class ResponsesRequest(Tolerant):
    """Holds the body of a request to /v1/responses."""

    model: str | None = None
    input: str | List[Object]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Ge(1)] | None = None
    previous_response_id: str | None = None
    store: Flag | None = None
    stream: Flag | None = None
    text: TextConfig | None = None
    tools: Annotated[List[Object], MaxLen(MOST_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    reasoning: ReasoningConfig | None = None
    include: List[str] | None = None  # LOGPROBS, ENCRYPTED; others are ignored
    top_logprobs: Annotated[Whole, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Object | None = None
    parallel_tool_calls: Flag | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    drafter: str | None = None  # an extension, as in chats

    # Taken where they ask for nothing more.
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None

    # Taken and ignored. A conversation that is too long is refused, also with truncation "auto".
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: Object | None = None
    service_tier: str | None = None
    context_management: List[Object] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponsesRequest:
        if self.top_logprobs and not self.has_logprobs:
            raise UserError(f"'top_logprobs' is only allowed when 'include' has {LOGPROBS!r}")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise UserError("'tool_choice' is only allowed when 'tools' are specified")
        return self

    def left_out(self) -> Iterator[str]:
        kinds = (str(item.get("type")) for item in self.items)
        yield from (kind for kind in kinds if SERVERS_CALLS.fullmatch(kind))
        yield from (f"tools: {kind}" for kind in self.known_tools.left_out)

    @functools.cached_property
    def known_tools(self) -> Tools:
        """Returns the tools, those among them that the model can call."""
        return Tools(self.tools or ())

    @property
    def has_logprobs(self) -> bool:
        """Says whether the log-probabilities of the answer's tokens are asked for."""
        return LOGPROBS in (self.include or ())

    @property
    def has_summary(self) -> bool:
        """Says whether a summary of the thinking is asked for."""
        return self.reasoning is not None and self.reasoning.summary not in (None, "none")

    @property
    def _format(self) -> Object | None:
        return None if self.text is None else self.text.format

    @property
    def _budget(self) -> Object:
        budget = None if self.reasoning is None else self.reasoning.max_tokens
        return {} if budget is None else {"thinking_budget": budget}

    @property
    def items(self) -> list[Object]:
        """Returns what this request adds to the conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input

    def found_items(self, find: Callable[[str], Object]) -> Iterator[Object]:
        """Yields the items, among them those that the request refers to, which `find` finds by
        their ids. Raises UserError for one that is referred to twice: a short request would so
        become a very long one."""
        names = set()
        for item in self.items:
            if item.get("type") == "item_reference" and has(item, "id"):
                if item["id"] in names:
                    name = brief(item["id"], 80)
                    message = f"got item_reference {name} twice, expected each item once"
                    raise UserError(message, param="input")
                names.add(item["id"])
                item = find(item["id"])
            yield item

    def as_chat(self, messages: Sequence[Object]) -> ChatRequest:
        """Returns the chat that says the same; `messages` are those of the conversation. Raises
        UserError for tools that cannot be served."""
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        if not messages:
            raise UserError("got input [], expected at least one message", param="input")
        format = self._format
        choice, functions = chosen(self.tool_choice, self.known_tools.functions)
        return ChatRequest.model_construct(
            model=self.model,
            messages=[ChatMessage(**message) for message in messages],
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs,
            tools=functions or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            drafter=self.drafter,
            response_format=None if format is None else _response_format(format),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
            **sampling_of(self) | self._budget,
        )

    def repeated(self) -> Object:
        """Returns the fields of a response that say what was asked for, with OpenAI's defaults."""
        said: Object = {name: getattr(self, name) for name in REPEATED}
        said["text"] = {"format": self._format or {"type": "text"}}
        defaults: Object = {
            "parallel_tool_calls": True,
            "metadata": {},
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
        }
        for name, value in defaults.items():
            if said[name] is None:
                said[name] = value
        if self.reasoning is not None:
            said["reasoning"] = {
                name: getattr(self.reasoning, name) for name in ("effort", "summary")
            }
        truncation = self.truncation or "disabled"
        return {**said, "truncation": truncation, "store": self.store is not False}


def messages_of(items: Iterable[Object], before: Sequence[Object] = ()) -> list[Object]:
    """Returns the messages of a chat for the items of a conversation, after the messages that go
    before: calls join the assistant's message before them. Raises UserError for an item that cannot
    be served."""
    found = [*before]
    thoughts = ""  # that no message has yet
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        place = f"item {number} of the conversation"
        if kind == "message" and item.get("role") in ROLES:
            found.append({"role": item["role"], "content": _text_of(item.get("content"), place)})
        elif (call := message_call(item)) is not None:
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind in OUTPUTS and (has(item, "call_id") or has(item, "id")):
            text, name = _text_of(item.get("output"), place), item.get("call_id", item.get("id"))
            found.append({"role": "tool", "tool_call_id": name, "content": text})
        elif kind == "reasoning":
            thoughts = _lines(thoughts, _thinking_of(item))
        elif SERVERS_CALLS.fullmatch(str(kind)):
            continue
        else:
            raise UserError(
                f"got {brief(repr(item), 120)} as {place}, expected a message with its role, a "
                "function_call with call_id, name and arguments, or a function_call_output with "
                "its call_id",
                param="input",
            )
        if thoughts and kind != "reasoning":
            if found[-1]["role"] == "assistant":
                said = found[-1].get("reasoning_content")
                found[-1]["reasoning_content"] = _lines(said, thoughts)
            thoughts = ""
    return found


def _lines(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))


def encrypted(thinking: str) -> str:
    """Returns thinking as the text that clients keep for a server that keeps nothing."""
    return base64.b64encode(f"{OWN}{thinking}".encode()).decode()


def _thinking_of(item: Object) -> str:
    """Returns what a model of this server thought; an item of another one's may have no text that
    can be read."""
    parts = item.get("content") or ()
    text = "".join(part["text"] for part in parts if isinstance(part, dict) and has(part, "text"))
    if text or not has(item, "encrypted_content"):
        return text
    try:
        kept = base64.b64decode(item["encrypted_content"], validate=True).decode()
    except ValueError:
        return ""
    return kept.removeprefix(OWN) if kept.startswith(OWN) else ""


def _text_of(content: Any, place: str) -> str:
    """Returns the text of a content, whose parts stand one after the other."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS and has(part, "text")
        if not is_text:
            raise UserError(
                f"got content {brief(repr(part), 80)} in {place}, expected a text or parts of type "
                "'input_text' or 'output_text': send what it shows or says as text",
                param="input",
            )
        texts.append(part["text"])
    return "".join(texts)


def _response_format(format: Object) -> Object:
    """Returns a chat's form of what an answer has to be; what is none, the engine refuses."""
    if format.get("type") != "json_schema":
        return format
    schema = {"name": format.get("name"), "schema": format.get("schema")}
    return {"type": "json_schema", "json_schema": schema}
