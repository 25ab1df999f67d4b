"""Tests the server's form of Anthropic's API: messages, tools, streams, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import (
    CHAT,
    HELLO,
    MESSAGES,
    PERSON,
    chunks_of,
    held,
    post,
    served,
    stream,
    tool_engine,
    toy_engine,
)
from toy_backend import ByteTokenizer
from toy_engine import make_engine

from spec_runtime import Chunk, GenerationResult, Stats
from spec_runtime.dialogue.thinking import Tags
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.anthropic.replies import MessageReply
from spec_runtime.serve.anthropic.requests import MessagesRequest

COUNT = "/v1/messages/count_tokens"
BODY = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
JSON = {"Content-Type": "application/json"}
TOOLS = [{"name": "look_up", "description": "Looks up.", "input_schema": PERSON}]
FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": PERSON}
CALL = '{"name": "look_up", "arguments": {"name": "Ada"}}'


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(max_body=20_000, max_prompt=300) as running, running.client() as made:
        yield made


def message_of(events: list[Any]) -> Any:
    """Returns the message that a stream's events make, as a client puts it together."""
    start, *blocks, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == (
        *("message_start", "message_delta"),
        "message_stop",
    )
    message = start["message"]
    is_open, written = False, ""
    for event in blocks:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        assert is_open == (event["type"] != "content_block_start")
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif is_open and event["delta"]["type"] in ("text_delta", "thinking_delta"):
            kind = event["delta"]["type"].removesuffix("_delta")
            message["content"][-1][kind] += event["delta"][kind]
        elif is_open:
            assert message["content"][-1]["input"] == {}
            written += event["delta"]["partial_json"]
        elif message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"], written = json.loads(written), ""
    assert not is_open
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def answer(client: Any, **body: Any) -> Any:
    """Returns a message, which is the same whole and streamed but for ids and cached tokens."""
    whole = post(client, MESSAGES, **{**BODY, **body})
    streamed = message_of(stream(client, MESSAGES, **{**BODY, **body}))
    assert set(streamed) == set(whole)
    for key in ("type", "role", "model", "stop_reason", "stop_sequence"):
        assert streamed[key] == whole[key]
    for ours, theirs in zip(whole["content"], streamed["content"], strict=True):
        assert ours.pop("id", "toolu_")[:6] == theirs.pop("id", "toolu_")[:6] == "toolu_"
        assert ours == theirs
    for usage in (whole["usage"], streamed["usage"]):
        usage["input_tokens"] += usage["cache_read_input_tokens"]
        del usage["cache_read_input_tokens"]
    assert streamed["usage"] == whole["usage"]
    return whole


# ---- answers ----


def test_a_message_is_answered_as_by_the_engine_whole_or_streamed(client: Any) -> None:
    engine = toy_engine()
    expected = engine.generate(HELLO, max_new_tokens=20)
    found = answer(client)
    assert found.pop("id").startswith("msg_")
    size = len(engine.encode(HELLO))
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": expected.text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": size,
            "cache_creation_input_tokens": 0,
            "output_tokens": 20,
        },
    }


def test_a_stream_says_first_what_the_prompt_has_and_last_what_was_reused(client: Any) -> None:
    size = len(toy_engine().encode(HELLO))
    for _ in range(2):
        first, *_, last, _ = stream(client, MESSAGES, **BODY)
        assert first["message"]["usage"] == {"input_tokens": size, "output_tokens": 0}
        assert first["message"]["content"] == []
    reused = last["usage"]["cache_read_input_tokens"]
    assert 0 < reused < size
    assert last["usage"]["input_tokens"] == size - reused


def test_one_of_many_stop_sequences_ends_a_message(client: Any) -> None:
    text = answer(client, max_tokens=40)["content"][0]["text"]
    stop = text[10:12]
    found = answer(client, max_tokens=40, stop_sequences=[*(f"?{i}!" for i in range(12)), stop])
    assert found["content"][0]["text"] == text[: text.index(stop)]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)


def test_an_answer_that_has_begun_goes_on(client: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    expected = toy_engine().generate(begun, continue_final=True, max_new_tokens=20)
    assert answer(client, messages=begun)["content"][0]["text"] == expected.text
    blocks = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    assert answer(client, messages=blocks)["content"][0]["text"] == expected.text
    closed = toy_engine().generate(begun, max_new_tokens=20)
    assert closed.text != expected.text


@pytest.mark.parametrize(
    ("stop", "reason", "expected"),
    [
        (257, "stop", ("end_turn", None)),
        ("ab", "stop", ("stop_sequence", "ab")),
        (None, "length", ("max_tokens", None)),
    ],
)
def test_how_a_message_ended(
    stop: str | int | None, reason: str, expected: tuple[str, str | None]
) -> None:
    """A message without a text has no block."""
    result = GenerationResult("", [1], reason, Stats(), stop=stop)
    whole = MessageReply("toy").whole([result])
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert whole["content"] == []
    delta, last = MessageReply("toy").parts(Chunk(text="", result=result))
    assert delta["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert last == {"type": "message_stop"}


# ---- requests ----


def chat_of(**body: Any) -> Any:
    return MessagesRequest(**{**BODY, **body}).as_chat()


def text(*texts: str) -> list[dict[str, Any]]:
    ending = {"cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": each, **ending} for each in texts]


USE = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"name": "Ada"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
CALLS = [
    {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"name": "Ada"}'},
    }
]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *HELLO]),
        ({"system": text("Be", "brief.")}, [{"role": "system", "content": "Be\nbrief."}, *HELLO]),
        ({"system": ""}, HELLO),
        (
            {"messages": [{"role": "user", "content": text("a", "b")}, *HELLO]},
            [{"role": "user", "content": "a\nb\nhello"}],
        ),
        (
            {"messages": [*HELLO, {"role": "system", "content": "Now be brief."}]},
            [*HELLO, {"role": "system", "content": "Now be brief."}],
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [THOUGHT, *text("I look."), USE]},
                    {"role": "user", "content": [{**RESULT, "content": "born 1815"}]},
                ]
            },
            [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": CALLS,
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "born 1815"},
            ],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {
                        "role": "user",
                        "content": [
                            *text("And?"),
                            {**RESULT, "content": text("born", "1815"), "is_error": False},
                            {**RESULT, "is_error": True, "content": "no such name"},
                        ],
                    },
                ]
            },
            [
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "tool_call_id": "toolu_1", "content": "born\n1815"},
                {
                    "role": "tool",
                    "tool_call_id": "toolu_1",
                    "content": "Error: no such name",
                },
                {"role": "user", "content": "And?"},
            ],
        ),
    ],
)
def test_blocks_become_the_messages_of_a_chat(
    body: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert [message.plain() for message in chat_of(**body).messages] == expected


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "look_up"},
            {"type": "function", "function": {"name": "look_up"}},
            True,
        ),
    ],
)
def test_tools_and_the_choice_among_them_become_openais(
    choice: dict[str, Any], expected: Any, is_parallel: bool
) -> None:
    chat = chat_of(tools=[{**TOOLS[0], "type": "custom", "strict": True}], tool_choice=choice)
    assert chat.tools == [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert chat.tool_choice == expected
    assert chat.parallel_tool_calls is is_parallel


def test_sampling_is_the_chats() -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["a"]}
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ["a"]}
    options = chat_of(**said, stream=True).options(99)
    assert options.items() >= {**expected, "max_new_tokens": 20}.items()
    bare = chat_of(temperature=None, top_k=0, top_p=0).options(99)
    assert bare["temperature"] == 1
    assert "top_k" not in bare
    assert 0 < bare["top_p"] < 1e-5


def test_an_answer_fits_the_schema_of_its_format() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as running, running.client() as client:
        format = {"type": "json_schema", "schema": PERSON}
        found = answer(client, output_config={"format": format, "effort": "low"}, max_tokens=60)
        assert set(json.loads(found["content"][0]["text"])) == {"name"}
        assert found["stop_reason"] == "end_turn"
        reply = client.post(MESSAGES, json={**BODY, "output_config": {"format": {"type": "xml"}}})
        assert "'xml'" in reply.json()["error"]["message"]


# ---- tools ----


def test_a_call_is_forced_and_its_result_goes_back() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as running, running.client() as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
            output = {"format": {"type": "json_schema", "schema": {}}}  # of a text: there is none
            forced = {"tool_choice": choice, "output_config": output}
            found = answer(client, tools=TOOLS, max_tokens=90, **forced)
            assert found["stop_reason"] == "tool_use"
            (block,) = found["content"]
            assert (block["type"], block["name"]) == ("tool_use", "look_up")
            assert set(block["input"]) == {"name"}
        use = {**block, "id": "toolu_1"}
        result = {**RESULT, "content": "born in 1815"}
        messages = [
            *HELLO,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        found = answer(client, messages=messages, tools=TOOLS)
        assert found["content"][0]["type"] == "text"
        free = post(client, COUNT, messages=HELLO)["input_tokens"]
        none = post(client, COUNT, messages=HELLO, tools=TOOLS, tool_choice={"type": "none"})
        assert none["input_tokens"] == free
        assert post(client, COUNT, messages=HELLO, tools=TOOLS)["input_tokens"] > free + 50
        fly = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}
        reply = client.post(MESSAGES, json={**BODY, **fly})
        assert_refused(reply, 400, "invalid_request_error", "'fly', expected one of look_up")


@pytest.mark.parametrize("shows_thinking", [True, False])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_streamed_calls_follow_the_thinking_and_the_text_before_them(
    size: int, shows_thinking: bool
) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    form = AnswerForm(Tags("<think>", "</think>"), family="hermes", tools=tools)
    calls = f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"
    said = f"<think>\nHm, {{}}.\n</think>\n\nLet me see. {calls}"
    result = GenerationResult(said, [1], "stop", Stats(), stop="x", form=form)
    reply, other = (MessageReply("toy", shows_thinking) for _ in range(2))
    start = {"type": "message_start", "message": {"content": [], "usage": {}}}
    streamed = message_of(
        [start, *(event for each in chunks_of(result, size) for event in reply.parts(each))]
    )
    thoughts = [{"type": "thinking", "thinking": "Hm, {}.", "signature": ""}] * shows_thinking
    for message in (streamed, other.whole([result])):
        *thought, before, first, second = message["content"]
        assert thought == thoughts
        assert before == {"type": "text", "text": "Let me see."}
        for call in (first, second):
            assert (call["name"], call["input"]) == ("look_up", {"name": "Ada"})
        assert first["id"] != second["id"]
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


# ---- counts ----


def test_tokens_are_counted_as_they_are_read(client: Any) -> None:
    body = {"messages": HELLO, "system": "Be brief."}
    (count,) = post(client, COUNT, **body).values()
    used = answer(client, **body, max_tokens=1)["usage"]
    assert count == used["input_tokens"]
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    (count,) = post(client, COUNT, messages=begun).values()
    assert count == len(toy_engine().encode(begun, continue_final=True))


def test_a_prompt_too_long_is_counted_all_the_same(client: Any) -> None:
    long = [{"role": "user", "content": "x" * 900}]
    (count,) = post(client, COUNT, messages=long).values()
    (less,) = post(client, COUNT, messages=HELLO).values()
    assert count - less == 900 - len("hello")


# ---- refusals ----

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": list(blocks)}]}


# Fields that a request which says hello has as well or instead, and a part of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "'messages'"),
    ({"messages": None}, "'messages'"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (said(IMAGE), "type 'image' in messages[1].content[0]"),
    (said(*text("a"), {"type": "document"}), "type 'document' in messages[1].content[1]"),
    (said({"type": "search_result"}), "in a block of text"),
    (said({"type": ["text"]}), "['text']"),
    (said({"text": "x"}), "type None"),
    (said({"type": "text"}), "expected a text block with a text"),
    (said({"type": "text", "text": "\ud800"}), "surrogate"),
    (said(USE), "'tool_use'"),
    (said(RESULT, role="assistant"), "'tool_result'"),
    (said({**USE, "input": "{}"}, role="assistant"), "an object as input"),
    (said(USE, role="assistant"), "a last message of the assistant's"),
    ({"messages": [{"role": "assistant", "content": "I am"}]}, "nothing before it"),
    (said({"type": "tool_result"}), "its tool_use_id"),
    (said({**RESULT, "content": [IMAGE]}), "type 'image' in messages[1].content[0].content[0]"),
    (said({**RESULT, "content": 3}), "expected a text or blocks"),
    (said({**RESULT, "content": ["x"]}), "expected a text or blocks"),
    ({"system": [IMAGE]}, "type 'image' in system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools by itself"),
    ({"tools": [{"name": "look up", "input_schema": {}}]}, "look up"),
    ({"tools": [{"name": "look_up"}]}, "input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "has a name"),
    ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "look_up"}}, "has a name"),
    ({"tool_choice": {"type": "auto"}}, "'tools' are specified"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"colour": "red"}, "supplied: colour"),
]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 1.5}, "equal to 1"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 2}, "top_p"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": 65 * ["x"]}, "at most 64 items"),
    ({"stream": "yes"}, "stream"),
    ({"container": "c"}, "container"),
    ({"seed": 3}, "supplied: seed"),
    (
        {"messages": [{"role": "user", "content": "x" * 310}]},
        "prompt is too long: This server takes prompts of at most 300",
    ),
    ({"messages": [{"role": "user", "content": "x" * 900}]}, "prompt is too long: got a prompt of"),
]


def assert_refused(reply: Any, status: int, kind: str, fragment: str) -> None:
    assert reply.status_code == status, reply.text
    found = reply.json()
    assert set(found) == {"type", "error"}
    assert found["type"] == "error"
    assert set(found["error"]) == {"type", "message"}
    assert found["error"]["type"] == kind
    assert fragment in found["error"]["message"]
    assert "\n" not in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "fragment"),
    [
        *((MESSAGES, {**BODY, **body}, why) for body, why in REFUSED + REFUSED_MESSAGES),
        *((MESSAGES, {**BODY, **body, "stream": True}, why) for body, why in REFUSED),
        *(
            (COUNT, {"messages": HELLO, **body}, why)
            for body, why in REFUSED
            if "surrogate" not in why
        ),
    ],
)
def test_what_is_refused_says_why(
    client: Any, path: str, body: dict[str, Any], fragment: str
) -> None:
    reply = client.post(path, content=json.dumps(body), headers=JSON)
    assert_refused(reply, 400, "invalid_request_error", fragment)


def test_other_errors_have_the_form_too(client: Any) -> None:
    for path in (MESSAGES, COUNT):
        body = {**(BODY if path == MESSAGES else {"messages": HELLO}), "model": "claude"}
        reply = client.post(path, json=body)
        assert_refused(reply, 404, "not_found_error", "`claude` does not exist")
        reply = client.post(path, content=b"{", headers=JSON)
        assert_refused(reply, 400, "invalid_request_error", "JSON")
        reply = client.post(path, content=b" " * 20_001, headers=JSON)
        assert_refused(reply, 413, "request_too_large", "20000 bytes")
    reply = client.post(f"{MESSAGES}/batches", json={})
    assert_refused(reply, 404, "not_found_error", "Invalid URL")
    reply = client.get(MESSAGES)
    assert_refused(reply, 405, "invalid_request_error", "Invalid URL")
    assert set(client.post("/v1/messagesx", json={}).json()) == {"error"}, "OpenAI's form"


def test_a_client_hears_that_no_conversation_is_kept(client: Any) -> None:
    """Anthropic's client then sends the whole conversation, by the code in `details`."""
    for path in (MESSAGES, COUNT):
        body = BODY if path == MESSAGES else {"messages": HELLO}
        reply = client.post(path, json={**body, "thread": {"type": "create"}})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "send all messages" in error["message"]


def test_features_that_change_nothing_may_be_asked_for(client: Any) -> None:
    ignored = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "cache_control": None}
    more = {"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": []}
    assert answer(client, **ignored, **more)["content"] == answer(client)["content"]


def test_a_mistake_of_ours_is_an_error_without_details(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patched:
        patched.setattr(MessageReply, "whole", fail)
        reply = client.post(MESSAGES, json=BODY)
        assert_refused(reply, 500, "api_error", "had an error")
        assert "boom" not in reply.text
    monkeypatch.setattr("spec_runtime.serve.metrics.Metrics.count_answer", fail)
    *parts, last = stream(client, MESSAGES, **BODY)
    assert parts[-1]["type"] == "content_block_delta"
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    with held(num_runs=2, timeout=0.4) as (_, client, _):
        *parts, last = stream(client, MESSAGES, **BODY)
    assert parts[0]["type"] == "message_start"
    assert last["error"] == {
        "type": "timeout_error",
        "message": "The answer was not complete after 0.4 s, the most that this server allows.",
    }
    with held(timeout=0.4) as (_, client, _):
        assert_refused(client.post(MESSAGES, json=BODY), 504, "timeout_error", "0.4 s")


def test_a_full_server_says_when_to_come_again() -> None:
    with held(max_waiting=0, parallel=1) as (server, client, runs):
        first = server.open_request(MESSAGES, BODY)
        runs.wait_for_run()
        for path, body in ((MESSAGES, BODY), (COUNT, {"messages": HELLO})):
            reply = client.post(path, json=body)
            assert_refused(reply, 429, "rate_limit_error", "")
            assert int(reply.headers["retry-after"]) >= 1
        first.close()


# ---- who may ask ----


def test_a_key_may_stand_in_either_header() -> None:
    with served(api_key="sésame") as running, running.client() as client:
        key = "sésame".encode()
        right: list[dict[bytes, bytes]] = [
            {b"x-api-key": key},
            {b"Authorization": b"Bearer " + key},
            {b"x-api-key": key, b"Authorization": b"Bearer none"},
            {b"x-api-key": b"none", b"Authorization": b"Bearer " + key},
        ]
        none, incorrect = "You didn't provide an API key.", "Incorrect API key provided."
        wrong: list[tuple[dict[bytes, bytes], str]] = [
            ({}, none),
            ({b"x-api-key": b""}, none),
            ({b"Authorization": key}, none),
            ({b"x-api-key": b"sesame"}, incorrect),
            ({b"x-api-key": b"Bearer " + key}, incorrect),
            ({b"Authorization": b"Basic " + key}, incorrect),
        ]
        for headers in right:
            body = {**BODY, "max_tokens": 1}
            for path in (MESSAGES, CHAT):
                assert client.post(path, json=body, headers=headers).status_code == 200
        for headers, message in wrong:
            reply = client.post(MESSAGES, json=BODY, headers=headers)
            assert_refused(reply, 401, "authentication_error", message)
            assert client.post(CHAT, json=BODY, headers=headers).status_code == 401


def test_a_request_has_its_id_under_both_names(client: Any) -> None:
    headers = client.post(MESSAGES, json={}).headers
    assert headers["request-id"] == headers["x-request-id"]
    assert headers["request-id"].startswith("req_")
    assert "request-id" not in client.post(CHAT, json={}).headers


def test_the_addresses_are_described(client: Any) -> None:
    assert {MESSAGES, COUNT} <= set(client.get("/openapi.json").json()["paths"])


def test_messages_without_a_chat_template_are_refused() -> None:
    engine = make_engine("parallelspec", tokenizer=ByteTokenizer())
    with served(engine) as running, running.client() as client:
        for path, body in ((MESSAGES, BODY), (COUNT, {"messages": HELLO})):
            reply = client.post(path, json=body)
            assert_refused(reply, 400, "invalid_request_error", "no chat template")
