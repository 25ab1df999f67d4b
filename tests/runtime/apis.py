"""Says how each of the server's APIs is asked for a behaviour, and how its answers are read, whole
and streamed, so that tests can be tables of APIs and behaviours."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    PERSON,
    RESPONSES,
    chunks_of,
    post,
    stream,
    toy_engine,
)
from toy_backend import ByteTokenizer

from spec_runtime import GenerationResult
from spec_runtime.serve.anthropic.replies import MessageReply
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.serve.openai.writers import ChatWriter
from spec_runtime.serve.responses.replies import ResponseReply

Object = dict[str, Any]
FUNCTION: Object = {"name": "look_up", "description": "Looks up.", "parameters": PERSON}
TEXTS = TokenTexts(ByteTokenizer(), frozenset())
# What differs from one answer to the next.
OWN = {"id", "call_id", "created", "created_at", "prompt_tokens_details", "input_tokens_details"}
OWN |= {"timings"}


@dataclass
class Said:
    """What an answer says, in words that the APIs share. It ends by its `length`, a `stop`, or
    `calls`; these are names with arguments. `whole` is its JSON, `events` those of its stream."""

    ending: str
    usage: tuple[int, int]  # tokens of the prompt and of the answer
    whole: Any
    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # of the calls
    events: list[Any] = field(default_factory=list)


class Api:
    """One API of the server; `head` is what every whole answer of it has."""

    name = ""
    path = ""
    head: ClassVar[Object] = {}
    limit = "max_tokens"

    def body(self, most: int | None = 20, **asked: Any) -> Object:
        """Returns a greedy request that says hello. `messages`, `tools`, `choice` and `schema` are
        written as the API has them, and other fields as they are."""
        messages, tools = asked.pop("messages", HELLO), asked.pop("tools", None)
        choice, schema = asked.pop("choice", None), asked.pop("schema", None)
        body = {**self.prompt(messages), "temperature": 0, self.limit: most}
        body |= {} if tools is None else {"tools": [self.tool(each) for each in tools]}
        body |= {} if choice is None else {"tool_choice": self.choice(choice)}
        return body | ({} if schema is None else self.format(schema)) | asked

    def answer(self, client: Any, most: int | None = 20, **asked: Any) -> Said:
        """Returns an answer, which is the same whole and streamed."""
        body = self.body(most, **asked)
        whole, events = post(client, self.path, **body), self.stream(client, **body)
        assert _shared(self.joined(events)) == _shared(whole)
        assert whole.items() >= self.head.items()
        said = self.read(whole)
        said.events = events
        return said

    def stream(self, client: Any, **body: Any) -> list[Any]:
        return stream(client, self.path, **body)

    def generate(self, most: int = 20, **options: Any) -> GenerationResult:
        """Returns what the engine itself answers."""
        messages = options.pop("messages", HELLO)
        return toy_engine().generate(messages, max_new_tokens=most, **options)

    def error(self, reply: Any) -> Object:
        """Returns an error whose form is the API's."""
        found: Object = reply.json()
        assert set(found) == {"error"}
        assert set(found["error"]) - {"partial"} == {"message", "type", "param", "code"}
        return dict(found["error"])

    # How a request is written.

    def prompt(self, messages: list[Object]) -> Object:
        return {"messages": messages}

    def tool(self, function: Object) -> Object:
        return {"type": "function", "function": function}

    def choice(self, choice: str) -> Any:
        """Writes one of OpenAI's words, or the name of a tool."""
        named = {"type": "function", "function": {"name": choice}}
        return choice if choice in ("auto", "required", "none") else named

    def format(self, schema: Object) -> Object:
        named = {"name": "person", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    # How an answer is read.

    def joined(self, events: list[Any]) -> Any:
        """Returns the whole answer that a client puts together from a stream."""
        raise NotImplementedError

    def read(self, whole: Any) -> Said:
        raise NotImplementedError

    def returned(self, said: Said, result: str) -> list[Object]:
        """Returns the conversation that goes on with the result of an answer's only call."""
        raise NotImplementedError

    def written(self, result: GenerationResult, size: int) -> list[Said]:
        """Returns how an answer is written in chunks of so many characters, and whole."""
        raise NotImplementedError


class Chat(Api):
    name, path = "chat", CHAT
    head: ClassVar[Object] = {"object": "chat.completion", "model": "toy"}
    begun: ClassVar[Object] = {"role": "assistant", "content": ""}

    def stream(self, client: Any, **body: Any) -> list[Any]:
        return stream(client, self.path, **body, stream_options={"include_usage": True})

    def joined(self, events: list[Any]) -> Any:
        *parts, last, done = events
        assert (last["choices"], done) == ([], "[DONE]")
        assert all(part["usage"] is None for part in parts)
        (head,) = {(each["id"], each["created"], each["model"]) for each in (*parts, last)}
        choice = self.choice_of([part["choices"][0] for part in parts])
        return {
            **dict(zip(("id", "created", "model"), head, strict=True)),
            "object": self.head["object"],
            "choices": [choice],
            **{key: last[key] for key in ("usage", "metrics") if key in last},
        }

    def choice_of(self, parts: list[Any]) -> Object:
        """Returns the choice that the parts of a stream make."""
        first, *rest, last = parts
        assert first["delta"] in (self.begun, {**self.begun, "content": None})
        assert last["delta"] == {}
        assert {each["finish_reason"] for each in (first, *rest)} == {None}
        message: Object = {"role": "assistant", "content": "", "refusal": None}
        calls: list[Any] = []
        for delta in (each["delta"] for each in rest):
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for key in {"content", "reasoning_content", "reasoning"} & delta.keys():
                message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                index, function = call.pop("index"), call["function"]
                if "id" in call:
                    assert (index, function["arguments"]) == (len(calls), "")
                    calls.append(call)
                else:
                    calls[index]["function"]["arguments"] += function["arguments"]
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        shown = [each["logprobs"] for each in rest if each["logprobs"]]
        tokens = [token for each in shown for token in each["content"]]
        logprobs = {"content": tokens, "refusal": None} if shown else None
        end = {"index": last["index"], "finish_reason": last["finish_reason"]}
        return {**end, "message": message, "logprobs": logprobs}

    def read(self, whole: Any) -> Said:
        (choice,), usage = whole["choices"], whole.get("usage")
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert all(each["type"] == "function" and each["id"][:5] == "call_" for each in calls)
        found = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
        return Said(
            {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"]),
            (usage["prompt_tokens"], usage["completion_tokens"]) if usage else (0, 0),
            whole,
            message["content"] or "",
            message.get("reasoning_content", ""),
            [(name, _json_or_text(arguments)) for name, arguments in found],
            [each["id"] for each in calls],
        )

    def returned(self, said: Said, result: str) -> list[Object]:
        (choice,) = said.whole["choices"]
        output = {"role": "tool", "tool_call_id": said.ids[0], "content": result}
        return [*HELLO, choice["message"], output]

    def written(self, result: GenerationResult, size: int) -> list[Said]:
        writer = ChatWriter("toy", TEXTS)
        parts = [
            part for each in chunks_of(result, size) for part in writer.parts(0, each, result.form)
        ]
        whole = ChatWriter("toy", TEXTS).whole(0, result)
        found = [self.read({"choices": [each]}) for each in (self.choice_of(parts), whole)]
        found[0].events = parts
        return found


class Completions(Chat):
    name, path = "completions", COMPLETIONS
    head: ClassVar[Object] = {"object": "text_completion", "model": "toy"}

    def prompt(self, messages: list[Object]) -> Object:
        return {"prompt": messages[-1]["content"]}

    def generate(self, most: int = 20, **options: Any) -> GenerationResult:
        return super().generate(most, messages="hello", raw=True, **options)

    def choice_of(self, parts: list[Any]) -> Object:
        shown = [each["logprobs"] for each in parts if each["logprobs"]]
        keys = shown[0] if shown else ()
        logprobs = {key: [one for each in shown for one in each[key]] for key in keys} or None
        text = "".join(each["text"] for each in parts)
        assert {each["finish_reason"] for each in parts[:-1]} <= {None}
        return {**parts[-1], "text": text, "logprobs": logprobs}

    def read(self, whole: Any) -> Said:
        (choice,), usage = whole["choices"], whole["usage"]
        used = (usage["prompt_tokens"], usage["completion_tokens"])
        return Said(choice["finish_reason"], used, whole, choice["text"])


class Responses(Api):
    name, path, limit = "responses", RESPONSES, "max_output_tokens"
    head: ClassVar[Object] = {"object": "response", "model": "toy", "error": None}

    def prompt(self, messages: list[Object]) -> Object:
        return {"input": messages}

    def tool(self, function: Object) -> Object:
        return {"type": "function", **function}

    def choice(self, choice: str) -> Any:
        word = choice in ("auto", "required", "none")
        return choice if word else {"type": "function", "name": choice}

    def format(self, schema: Object) -> Object:
        return {"text": {"format": {"type": "json_schema", "name": "person", "schema": schema}}}

    def joined(self, events: list[Any]) -> Any:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        first, second, *middle, last = events
        assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
        assert first["response"] == second["response"]
        assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
        response = last["response"]
        assert last["type"] == f"response.{response['status']}"
        assert set(first["response"]) == set(response)
        items: list[Any] = []
        for event in middle:
            kind = event["type"].removeprefix("response.")
            assert event["output_index"] == len(items) - (kind != "output_item.added")
            if kind == "output_item.added":
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
            elif kind == "content_part.added":
                items[-1]["content"].append(event["part"])
            elif kind in ("output_text.delta", "reasoning_text.delta"):
                part = items[-1]["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in part:
                    part["logprobs"] += event["logprobs"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert items[-1]["content"][0]["text"] == event["text"]
                assert items[-1]["content"][0].get("logprobs") == event.get("logprobs")
            elif kind == "content_part.done":
                assert items[-1]["content"] == [event["part"]]
            elif kind == "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            elif kind == "function_call_arguments.done":
                told = (event["name"], event["arguments"])
                assert (items[-1]["name"], items[-1]["arguments"]) == told
            else:
                assert kind == "output_item.done"
                assert {**items[-1], "status": event["item"]["status"]} == event["item"]
                items[-1] = event["item"]
            assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        assert items == response["output"]
        return response

    def read(self, whole: Any) -> Said:
        status, usage = whole["status"], whole["usage"]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert whole["incomplete_details"] == reason
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        said = Said("", (usage["input_tokens"], usage["output_tokens"]), whole)
        for item in whole["output"]:
            if item["type"] == "function_call":
                assert (item["id"][:3], item["call_id"][:5]) == ("fc_", "call_")
                said.calls.append((item["name"], _json_or_text(item["arguments"])))
                said.ids.append(item["call_id"])
                continue
            (part,) = item["content"]
            if item["type"] == "reasoning":
                assert (part["type"], item["summary"]) == ("reasoning_text", [])
                said.thoughts += part["text"]
            else:
                assert (item["role"], item["id"][:4]) == ("assistant", "msg_")
                assert part["type"] == "output_text"
                said.text += part["text"]
        assert {each["status"] for each in whole["output"][:-1]} <= {"completed"}
        assert whole["output"][-1]["status"] == status
        said.ending = "length" if status == "incomplete" else "calls" if said.calls else "stop"
        return said

    def returned(self, said: Said, result: str) -> list[Object]:
        output = {"type": "function_call_output", "call_id": said.ids[0], "output": result}
        return [*HELLO, *said.whole["output"], output]

    def written(self, result: GenerationResult, size: int) -> list[Said]:
        kept: list[Any] = []
        reply, other = (ResponseReply("toy", {}, TEXTS, kept.append) for _ in range(2))
        chunks = chunks_of(result, size)
        events = [event for each in chunks for event in reply.parts(each, result.form)]
        answers = [self.joined(events), other.whole([result])]
        assert kept == answers
        found = [self.read(each) for each in answers]
        found[0].events = events
        return found


class Messages(Api):
    name, path = "messages", MESSAGES
    head: ClassVar[Object] = {"type": "message", "role": "assistant", "model": "toy"}

    def tool(self, function: Object) -> Object:
        renamed = {"parameters": "input_schema"}
        return {renamed.get(key, key): value for key, value in function.items()}

    def choice(self, choice: str) -> Any:
        kind = {"auto": "auto", "required": "any", "none": "none"}.get(choice)
        return {"type": kind} if kind else {"type": "tool", "name": choice}

    def format(self, schema: Object) -> Object:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def error(self, reply: Any) -> Object:
        found: Object = reply.json()
        assert (set(found), found["type"]) == ({"type", "error"}, "error")
        assert {"type", "message"} <= set(found["error"]) <= {"type", "message", "partial"}
        return dict(found["error"])

    def joined(self, events: list[Any]) -> Any:
        start, *blocks, delta, stop = events
        ends = (start["type"], delta["type"], stop["type"])
        assert ends == ("message_start", "message_delta", "message_stop")
        message = start["message"]
        is_open, written = False, ""
        for event in blocks:
            begins = event["type"] == "content_block_start"
            assert event["index"] == len(message["content"]) - (not begins)
            assert is_open == (not begins)
            is_open = event["type"] != "content_block_stop"
            if begins:
                message["content"].append(dict(event["content_block"]))
            elif is_open and event["delta"]["type"] in ("text_delta", "thinking_delta"):
                kind = event["delta"]["type"].removesuffix("_delta")
                message["content"][-1][kind] += event["delta"][kind]
            elif is_open:
                assert message["content"][-1]["input"] == {}
                written += event["delta"]["partial_json"]
            elif message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"], written = _json_or_text(written), ""
        assert not is_open
        return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}

    def read(self, whole: Any) -> Said:
        ending = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
        usage, reason = whole["usage"], whole["stop_reason"]
        assert (reason == "stop_sequence") == (whole["stop_sequence"] is not None)
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        said = Said(ending.get(reason, "calls"), (prompt, usage["output_tokens"]), whole)
        for block in whole["content"]:
            if block["type"] == "tool_use":
                assert block["id"][:6] == "toolu_"
                said.calls.append((block["name"], block["input"]))
                said.ids.append(block["id"])
            elif block["type"] == "thinking":
                assert block["signature"] == ""
                said.thoughts += block["thinking"]
            else:
                said.text += block["text"]
        return said

    def returned(self, said: Said, result: str) -> list[Object]:
        output = {"type": "tool_result", "tool_use_id": said.ids[0], "content": result}
        answered = {"role": "assistant", "content": said.whole["content"]}
        return [*HELLO, answered, {"role": "user", "content": [output]}]

    def written(self, result: GenerationResult, size: int, shows: bool = True) -> list[Said]:
        reply, other = (MessageReply("toy", shows) for _ in range(2))
        events = [event for each in chunks_of(result, size) for event in reply.parts(each)]
        start = {"type": "message_start", "message": {"content": [], "usage": {}}}
        streamed, whole = self.joined([start, *events]), other.whole([result])
        found = [self.read(each) for each in (streamed, whole)]
        found[0].events = events
        return found


def _json_or_text(text: str) -> Any:
    """Returns what a call's arguments say; those of a call that was cut off are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shared(value: Any) -> Any:
    """Returns JSON without ids, times, and what was read from the cache."""
    if isinstance(value, list):
        return [_shared(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _shared(each) for key, each in value.items() if key not in OWN}
    if "cache_read_input_tokens" in found:
        found["input_tokens"] += found.pop("cache_read_input_tokens")
    return found


APIS = (Chat(), Responses(), Messages())
COMPLETIONS_API = Completions()
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
each_door = pytest.mark.parametrize("api", [*APIS, COMPLETIONS_API], ids=lambda api: api.name)
