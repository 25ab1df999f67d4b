"""Tests the server's form of OpenAI's Responses API: answers, tools, streams and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from served import (
    CHAT,
    HELLO,
    PERSON,
    RESPONSES,
    choice_of,
    chunks_of,
    held,
    post,
    served,
    stream,
    tool_engine,
    toy_engine,
)
from toy_backend import ByteTokenizer

from spec_runtime import Chunk, GenerationResult, Stats, TokenLogprob
from spec_runtime.dialogue.thinking import Tags
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.errors import ApiError
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.serve.responses import store
from spec_runtime.serve.responses.replies import ResponseReply
from spec_runtime.serve.responses.requests import ResponsesRequest, messages_of
from spec_runtime.serve.responses.store import ResponseStore

BODY = {"input": "hello", "max_output_tokens": 20, "temperature": 0}
TOOLS = [{"type": "function", "name": "look_up", "parameters": PERSON, "strict": True}]
CALL = {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": "{}"}
LOGPROBS = "message.output_text.logprobs"
TEXTS = TokenTexts(ByteTokenizer(), frozenset())
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "born in 1815"}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(max_prompt=300) as running, running.client() as made:
        yield made


def response_of(events: list[Any]) -> Any:
    """Returns the response that ends a stream, whose items the events before give piece by
    piece."""
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
            assert (items[-1]["name"], items[-1]["arguments"]) == (
                event["name"],
                event["arguments"],
            )
        else:
            assert kind == "output_item.done"
            assert {**items[-1], "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
    assert items == response["output"]
    return response


def answer(client: Any, **body: Any) -> Any:
    """Returns a response, which is the same whole and streamed but for ids and cached tokens."""
    whole = post(client, RESPONSES, **{**BODY, **body})
    streamed = response_of(stream(client, RESPONSES, **{**BODY, **body}))
    plain = []
    for each in (whole, streamed):
        assert each["id"].startswith("resp_")
        each = json.loads(json.dumps(each))
        del each["id"], each["created_at"], each["usage"]["input_tokens_details"]
        for item in each["output"]:
            assert item.pop("id").startswith(("msg_", "fc_"))
            item.pop("call_id", None)
        plain.append(each)
    assert plain[0] == plain[1]
    return whole


def text_of(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    return str(part["text"])


# ---- answers ----


def test_a_response_is_the_engines_answer_whole_or_streamed(client: Any) -> None:
    engine = toy_engine()
    expected = engine.generate(HELLO, max_new_tokens=20)
    found = answer(client, metadata={"a": "b"}, user="u")
    assert text_of(found) == expected.text
    assert (found["object"], found["status"], found["model"]) == ("response", "incomplete", "toy")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    usage = found["usage"]
    assert usage["input_tokens"] == len(engine.encode(HELLO))
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == 20
    assert (found["metadata"], found["user"], found["max_output_tokens"]) == ({"a": "b"}, "u", 20)
    assert (found["temperature"], found["top_p"], found["tool_choice"]) == (0, 1, "auto")
    assert (found["tools"], found["parallel_tool_calls"], found["store"]) == ([], True, True)


def test_instructions_stand_before_everything(client: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = toy_engine().generate([system, *HELLO], max_new_tokens=20)
    assert text_of(answer(client, instructions="Be brief.")) == expected.text
    assert text_of(answer(client, input=[system, *HELLO])) == expected.text


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_empty_answer_is_a_message(reason: str, status: str) -> None:
    result = GenerationResult("", [1], reason, Stats())
    kept: list[Any] = []
    whole = ResponseReply("toy", {}, TEXTS, kept.append).whole([result])
    reply = ResponseReply("toy", {}, TEXTS, kept.append)
    streamed = response_of(list(reply.parts(Chunk(text="", result=result), AnswerForm())))
    for found in (whole, streamed):
        assert text_of(found) == ""
        assert found["status"] == found["output"][0]["status"] == status
        assert (found["incomplete_details"] is None) == (status == "completed")
    assert kept == [whole, streamed]


def test_log_probabilities_are_the_chats(client: Any) -> None:
    asked = {"max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    entries = choice_of(client, CHAT, messages=HELLO, **asked)["logprobs"]["content"]
    for entry in entries:
        for each in (entry, *entry["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    found = answer(client, include=[LOGPROBS], top_logprobs=2)
    assert len(entries) == 20
    assert found["output"][0]["content"][0]["logprobs"] == entries
    assert found["top_logprobs"] == 2
    (part,) = answer(client, include=[LOGPROBS])["output"][0]["content"]
    assert [each["logprob"] for each in part["logprobs"]] == [each["logprob"] for each in entries]
    assert all(each["top_logprobs"] == [] for each in part["logprobs"])


# ---- requests ----


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (HELLO, HELLO),
        (
            [{"type": "message", "role": "developer", "content": [part("a"), part("b")]}],
            [{"role": "developer", "content": "ab"}],
        ),
        (
            [
                *HELLO,
                {"type": "reasoning", "summary": []},
                {"type": "reasoning", "content": [part("Hm.", "reasoning_text")]},
                {"role": "assistant", "content": [part("I look.", "output_text")]},
                CALL,
                {**CALL, "id": "fc_1", "status": "completed"},
                OUTPUT,
                CALL,
                {**OUTPUT, "output": [part("1815")]},
            ],
            [
                *HELLO,
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [CALLED, CALLED],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "born in 1815"},
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "call_1", "content": "1815"},
            ],
        ),
    ],
)
def test_items_become_the_messages_of_a_chat(
    items: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    assert messages_of(items) == expected


def test_what_is_asked_for_is_the_chats() -> None:
    asked = {
        **BODY,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "look_up"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    body = ResponsesRequest.model_validate(asked)
    chat = body.as_chat(())
    function = {"name": "look_up", "parameters": PERSON, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "look_up"}}
    assert chat.parallel_tool_calls is False
    options = chat.options(99)
    expected = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 20}
    assert options.items() >= expected.items()
    free = ResponsesRequest(input="hello").as_chat(()).options(99)
    assert (free["temperature"], free["max_new_tokens"]) == (1, 99)


# ---- tools and formats ----


def test_a_call_is_forced_and_its_output_goes_back() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as running, running.client() as client:
        for choice in ("required", {"type": "function", "name": "look_up"}):
            body: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": 90}
            body["text"] = {"format": {"type": "json_object"}}  # of a text, which there is none
            found = answer(client, **body)
            assert found["status"] == "completed"
            (call,) = found["output"]
            assert (call["type"], call["name"]) == ("function_call", "look_up")
            assert set(json.loads(call["arguments"])) == {"name"}
            assert call["call_id"].startswith("call_")
        output = {**OUTPUT, "call_id": call["call_id"]}
        more = {"tools": TOOLS, "temperature": 0}
        kept = text_of(answer(client, **more, input=[output], previous_response_id=found["id"]))
        whole = [*HELLO, call, output]
        assert text_of(answer(client, **more, input=whole)) == kept
        for choice, why in (
            ({"type": "function", "name": "fly"}, "'fly', expected one of look_up"),
            ({"type": "web_search"}, "expected none, auto, required, or a function"),
            ("perhaps", "expected none, auto, required, or a function"),
        ):
            reply = client.post(RESPONSES, json={**BODY, "tools": TOOLS, "tool_choice": choice})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "tool_choice")
            assert why in error["message"]


def test_an_answer_fits_the_schema_of_its_format() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as running, running.client() as client:
        format = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
        found = answer(client, text={"format": format}, max_output_tokens=90)
        assert set(json.loads(text_of(found))) == {"name"}
        assert (found["status"], found["text"]["format"]) == ("completed", format)
        reply = client.post(RESPONSES, json={**BODY, "text": {"format": {"type": "xml"}}})
        assert "'xml'" in reply.json()["error"]["message"]


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_streamed_calls_follow_the_thinking_and_the_text_before_them(
    size: int, is_begun: bool
) -> None:
    """Each character is a token; the text's are those with log-probabilities."""
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": PERSON}}]
    form = AnswerForm(Tags("<think>", "</think>"), is_begun, family="hermes", tools=tools)
    reply, other = (ResponseReply("toy", {}, TEXTS, lambda _: None) for _ in range(2))
    call = '<tool_call>{"name": "look_up", "arguments": {"name": "Ada"}}</tool_call>'
    said = f"\nHm, {{}}.\n</think>\n\nLet me see. {call}\n{call}"
    said = said if is_begun else f"<think>{said}"
    entries = [TokenLogprob(ord(each), -1.0, []) for each in said]
    ends = list(range(1, len(said) + 1))
    result = GenerationResult(said, [1], "stop", Stats(), "greedy", entries, None, ends, form)
    chunks = chunks_of(result, size)
    streamed = response_of([event for chunk in chunks for event in reply.parts(chunk, form)])
    for response in (streamed, other.whole([result])):
        thought, message, *calls = response["output"]
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, {}."}]
        (part,) = message["content"]
        assert part["text"] == "".join(each["token"] for each in part["logprobs"]) == "Let me see."
        assert {each["status"] for each in response["output"]} == {"completed"}
        assert [(each["name"], each["arguments"]) for each in calls] == 2 * [
            ("look_up", '{"name": "Ada"}')
        ]
        assert len({each["call_id"] for each in calls}) == 2


# ---- what is kept ----


def test_a_conversation_goes_on_from_a_kept_response(client: Any) -> None:
    engine, messages = toy_engine(), [*HELLO]
    previous, more = None, {"temperature": 0, "max_output_tokens": 9}
    for text in ("hello", "and you?", "well"):
        body = {**more, "input": text, "previous_response_id": previous}
        found = answer(client, **body, instructions="Be brief." if previous is None else None)
        if previous is None:
            messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        else:  # instructions are those of one request
            messages = [each for each in messages if each["role"] != "system"]
            messages.append({"role": "user", "content": text})
        expected = engine.generate(messages, max_new_tokens=9)
        assert text_of(found) == expected.text
        assert found["previous_response_id"] == previous
        messages.append({"role": "assistant", "content": expected.text})
        previous = found["id"]


def test_an_item_may_be_referred_to(client: Any) -> None:
    found = post(client, RESPONSES, **BODY)
    (item,) = found["output"]
    more = {"role": "user", "content": "And?"}
    whole = [*HELLO, item, more]
    reference = {"type": "item_reference", "id": item["id"]}
    expected = text_of(post(client, RESPONSES, **{**BODY, "input": whole}))
    referring = post(client, RESPONSES, **{**BODY, "input": [*HELLO, reference, more]})
    assert text_of(referring) == expected
    goes_on = {**BODY, "input": "Well?", "previous_response_id": referring["id"]}
    again = [*whole, referring["output"][0], {"role": "user", "content": "Well?"}]
    assert text_of(post(client, RESPONSES, **goes_on)) == text_of(
        post(client, RESPONSES, **{**BODY, "input": again})
    )
    unknown = [{"type": "item_reference", "id": "msg_1"}]
    reply = client.post(RESPONSES, json={**BODY, "input": unknown})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "item_not_found")


def test_a_kept_response_is_shown_and_deleted(client: Any) -> None:
    whole = post(client, RESPONSES, **BODY)
    streamed = stream(client, RESPONSES, **BODY)[-1]["response"]
    for response in (whole, streamed):
        path = f"{RESPONSES}/{response['id']}"
        assert client.get(path).json() == response
        assert client.delete(path).json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
        for reply in (client.get(path), client.delete(path)):
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "response_not_found"
        reply = client.post(RESPONSES, json={**BODY, "previous_response_id": response["id"]})
        assert reply.status_code == 404
        assert reply.json()["error"]["param"] == "previous_response_id"
        assert "'input'" in reply.json()["error"]["message"]


def test_what_shall_not_be_stored_is_not(client: Any) -> None:
    found = post(client, RESPONSES, **BODY, store=False)
    assert found["store"] is False
    assert client.get(f"{RESPONSES}/{found['id']}").status_code == 404


def responded(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "output": [{"role": "assistant", "content": text}]}


def test_the_store_is_bounded_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ResponseStore()
    monkeypatch.setattr(store, "MOST_RESPONSES", 3)
    for name in "abc":
        kept.keep(responded(name), None, HELLO)
    kept.get("a", "")  # which makes it the last used
    kept.keep(responded("d"), kept.get("c", ""), HELLO)
    assert len(kept.get("d", "").items) == 4
    with pytest.raises(ApiError, match="'b' not found"):
        kept.get("b", "")
    assert len(kept) == 3
    monkeypatch.setattr(store, "MOST_BYTES", 2000)
    kept.keep(responded("e", 900 * "x"), None, HELLO)
    assert len(kept) == 1
    kept.keep(responded("f", 3000 * "x"), kept.get("e", ""), HELLO)
    assert len(kept) == 0
    kept.keep(responded("g", 900 * "x"), None, HELLO)
    kept.remove("g", "")
    kept.keep(responded("h", 900 * "x"), None, HELLO)
    assert len(kept) == 1


# ---- refusals ----

IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "'input'"),
    ({"input": []}, "input", "at least one message"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "send what it shows or says"),
    ({"input": [{"role": "user"}]}, "input", "got content None in item 0"),
    ({"input": [{"role": "king", "content": "x"}]}, "input", "a message with its role"),
    ({"input": [*HELLO, {"type": "item_reference"}]}, "input", "item 1"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input", "call_id, name and arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "its call_id"),
    ({"input": [{**OUTPUT, "output": 3}]}, "input", "got content 3"),
    ({"input": 310 * "x"}, "input", "at most 300"),
    ({"tools": [{"type": "web_search"}]}, "tools", "no tools by itself"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "a b"),
    ({"tool_choice": "required"}, None, "'tools' are specified"),
    ({"top_logprobs": 2}, None, f"only allowed when 'include' has '{LOGPROBS}'"),
    ({"background": True}, "background", "False"),
    ({"truncation": "auto"}, "truncation", "'disabled'"),
    ({"conversation": "c"}, "conversation", "'c'"),
    ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", "equal to 20"),
    ({"max_output_tokens": 0}, "max_output_tokens", "equal to 1"),
    ({"temperature": 3}, "temperature", "equal to 2"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"messages": HELLO}, "messages", "Unrecognized request argument"),
]


@pytest.mark.parametrize(("body", "param", "fragment"), REFUSED)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_refused_says_why(
    client: Any, body: dict[str, Any], param: str | None, fragment: str, is_stream: bool
) -> None:
    reply = client.post(RESPONSES, json={**BODY, "stream": is_stream, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert fragment in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param


def test_features_that_change_nothing_may_be_asked_for(client: Any) -> None:
    ignored = {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
    more = {"truncation": "disabled", "background": False, "prompt_cache_key": "k"}
    assert text_of(answer(client, **ignored, **more)) == text_of(answer(client))


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    with held(num_runs=2, timeout=0.4) as (_, client, _):
        *parts, last = stream(client, RESPONSES, **BODY)
    assert parts[0]["type"] == "response.created"
    assert (last["type"], last["code"], last["param"]) == ("error", "timeout", None)
    assert last["message"] == last["error"]["message"]
