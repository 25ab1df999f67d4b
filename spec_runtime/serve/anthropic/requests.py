"""Describes the requests of Anthropic's API that the server takes, as chats that say the same.

As with OpenAI's, unknown fields are refused, and known ones without an effect on the answer are
taken and ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, model_validator

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief
from spec_runtime.serve.errors import NO_THREADS
from spec_runtime.serve.ignored import Tolerant
from spec_runtime.serve.openai.schemas import (
    ChatMessage,
    ChatRequest,
    Flag,
    List,
    Number,
    Whole,
    has,
    sampled,
    sampling_of,
)

Object = dict[str, Any]
# The blocks that may stand in a message of each role.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
SERVERS_BLOCK = re.compile(r"server_tool_use|tool_reference|(?!tool_result)\w+_tool_result")
MAX_STOPS = 64  # each is looked for after every token
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # OpenAI's words for Anthropic's


class Turn(BaseModel):
    """Holds one message: a text or blocks. What else a block has, such as `cache_control`, is
    ignored."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: str | List[Object]


class Tool(BaseModel):
    """Holds one tool. Further keys change nothing; one of another type than custom is run by
    Anthropic's servers, and by nobody here."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: Object | None = None
    strict: bool | None = None

    @property
    def is_ours(self) -> bool:
        """Says whether the client runs the tool."""
        return self.type in (None, "custom")

    def as_function(self) -> Object:
        """Returns the tool in OpenAI's form. Raises UserError for one without a schema."""
        if self.input_schema is None:
            raise UserError(
                f"got tool {brief(self.name, 80)} without an input_schema, expected one",
                param="tools",
            )
        function: Object = {"name": self.name, "parameters": self.input_schema}
        if self.strict is not None:
            function["strict"] = self.strict
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(BaseModel):
    """Says which tools may be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise UserError("expected a name if its type is 'tool', and only then")
        return self

    def as_openais(self) -> str | Object:
        """Returns the choice in OpenAI's form."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return CHOICES[self.type]


class Thinking(BaseModel):
    """Says whether the model thinks before it answers; further keys, such as `display`, change
    nothing."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Whole, Ge(0)] | None = None


class OutputConfig(BaseModel):
    """Says how the answer is written; the effort is that of thinking."""

    model_config = ConfigDict(extra="forbid")

    effort: str | None = None
    format: Object | None = None
    task_budget: Object | None = None  # ignored: it tells Anthropic's models how long to go on


class CountRequest(Tolerant):
    """Holds the body of a request to /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[List[Turn], Field(min_length=1)]
    system: str | List[Object] | None = None
    tools: Annotated[List[Tool], MaxLen(128)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Object | None = None

    thread: Object | None = None  # a conversation that the server keeps: refused, see as_chat

    # Taken as null or empty only.
    mcp_servers: Annotated[List[Object], MaxLen(0)] | None = None

    # Taken and ignored.
    cache_control: Object | None = None
    context_management: Object | None = None
    speed: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> CountRequest:
        if self.tool_choice is not None and not self.tools:
            raise UserError("'tool_choice' is only allowed when 'tools' are specified")
        return self

    def left_out(self) -> Iterator[str]:
        yield from (f"tools: {each.type}" for each in self.tools or () if not each.is_ours)
        contents = (turn.content for turn in self.messages if isinstance(turn.content, list))
        blocks = (block for content in contents for block in content)
        yield from (f"tools: {block['type']}" for block in blocks if _is_servers(block))

    @property
    def _format(self) -> Object | None:
        return None if self.output_config is None else self.output_config.format

    @property
    def _effort(self) -> str | None:
        """Returns the effort of the thinking, if the request asks for thinking at all."""
        return self.output_config.effort if self.output_config and self.thinks else None

    @property
    def thinks(self) -> bool:
        """Says whether thinking is asked for: as Anthropic's models, one does not think unasked,
        where its chat template can switch that off."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def is_begun(self) -> bool:
        """Says whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    def as_chat(self) -> ChatRequest:
        """Returns the chat that says the same. Raises UserError for blocks and tools that cannot be
        served, and for a conversation that the server would have to keep."""
        if self.thread is not None:
            raise UserError(
                f"got thread {brief(repr(self.thread), 80)}, expected none: this server keeps no "
                "conversations, so send all messages",
                param="thread",
                code=NO_THREADS,
            )
        choice = self.tool_choice
        return ChatRequest.model_construct(
            model=self.model,
            messages=[ChatMessage(**each) for each in self._chat_messages()],
            tools=[tool.as_function() for tool in self.tools or () if tool.is_ours] or None,
            tool_choice=None if choice is None else choice.as_openais(),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            response_format=None if self._format is None else _response_format(self._format),
            reasoning_effort=self._effort,
            chat_template_kwargs=self.chat_template_kwargs,
            **self._said(),
        )

    def _said(self) -> Object:
        """Returns further fields of the chat."""
        return {}

    def _chat_messages(self) -> list[Object]:
        """Returns the messages of the chat; neighbours of one role are one."""
        found: list[Object] = []
        if self.system:
            blocks = _blocks(self.system, "system", "system")
            found.append({"role": "system", "content": _text_of(blocks)})
        numbered = enumerate(self.messages)
        for role, turns in groupby(numbered, key=lambda each: each[1].role):
            blocks = []
            for number, turn in turns:
                blocks += _blocks(turn.content, role, f"messages[{number}].content")
            found += _messages_of(role, blocks)
        if self.is_begun and (len(found) == 1 or "tool_calls" in found[-1]):
            raise UserError(
                "got a last message of the assistant's with tool_use or with nothing before it, "
                "expected a user's message, perhaps before a text that begins the answer",
                param="messages",
            )
        return found


@sampled
class MessagesRequest(CountRequest):
    """Holds the body of a request to /v1/messages."""

    max_tokens: Annotated[Whole, Ge(1)]
    stop_sequences: Annotated[List[Annotated[str, MinLen(1)]], MaxLen(MAX_STOPS)] | None = None
    stream: Flag | None = None
    temperature: Annotated[Number, Ge(0), Le(1)] | None = None
    drafter: str | None = None  # an extension, as in OpenAI's form

    # Taken as null only.
    container: None = None

    # Taken and ignored.
    metadata: Object | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Object | None = None

    def _said(self) -> Object:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        return {
            **sampling_of(self),
            **({} if budget is None else {"thinking_budget": budget}),
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "drafter": self.drafter,
            **({} if self.stop_sequences is None else {"stop": self.stop_sequences}),
        }


def _blocks(content: str | list[Object], role: str, place: str) -> list[Object]:
    """Returns a content's blocks, checked; `place` is where they are in the request."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    said = []
    for number, block in enumerate(content):
        if not _is_servers(block):
            _check_block(block, BLOCKS[role], f"{place}[{number}]")
            said.append(block)
    return said


def _is_servers(block: Object) -> bool:
    """Says whether a block tells of a tool that Anthropic's servers run."""
    return SERVERS_BLOCK.fullmatch(str(block.get("type"))) is not None


def _check_block(block: Object, allowed: tuple[str, ...], place: str) -> None:
    """Raises UserError for a block of another type, or one that lacks what its type has."""
    kind = block.get("type")
    if kind not in allowed:
        raise UserError(
            f"got a block of type {brief(repr(kind), 80)} in {place}, expected one of "
            f"{', '.join(allowed)}: send what it shows or says in a block of text",
            param="messages",
        )
    is_right = {
        "text": has(block, "text"),
        "tool_use": has(block, "id", "name") and isinstance(block.get("input"), Mapping),
        "tool_result": has(block, "tool_use_id"),
        "thinking": has(block, "thinking"),
    }
    if not is_right.get(kind, True):
        raise UserError(
            f"got {brief(repr(block), 120)} in {place}, expected a text block with a text, "
            "thinking with its text, a tool_use with id, name and an object as input, or a "
            "tool_result with its tool_use_id",
            param="messages",
        )
    if kind == "tool_result":
        result = block.get("content") or ""
        is_list = isinstance(result, list) and all(isinstance(each, dict) for each in result)
        if not is_list and not isinstance(result, str):
            raise UserError(
                f"got content {brief(repr(result), 80)} in {place}, expected a text or blocks",
                param="messages",
            )
        _blocks(result, "system", f"{place}.content")


def _text_of(blocks: list[Object]) -> str:
    """Returns the texts among blocks, each on lines of its own."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _messages_of(role: str, blocks: list[Object]) -> list[Object]:
    """Returns the messages of a chat for the blocks of neighbouring messages of one role: results
    of tools come first, since they answer the calls before them."""
    results = [_result_message(block) for block in blocks if block["type"] == "tool_result"]
    message: Object = {"role": role, "content": _text_of(blocks)}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [_call_of(block) for block in blocks if block["type"] == "tool_use"]:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return results if results and not message["content"] else [*results, message]


def _result_message(block: Object) -> Object:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _text_of(content)
    if block.get("is_error"):  # no chat template has a place for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _call_of(block: Object) -> Object:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def _response_format(format: Object) -> Object:
    """Returns OpenAI's form of what an answer has to be; what is none, the engine refuses."""
    schema = {"name": "answer", "schema": format.get("schema")}
    return {"type": format.get("type"), "json_schema": schema}
