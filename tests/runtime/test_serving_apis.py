"""Tests what a server does alike behind each of its APIs: see `apis` for how each is asked."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import product
from typing import Any

import pytest
from apis import APIS, COMPLETIONS_API, FUNCTION, Api, Messages, each_api, each_door
from served import (
    COMPLETIONS,
    HELLO,
    MESSAGES,
    PERSON,
    RESPONSES,
    events,
    held,
    in_process,
    post,
    prompts_read,
    tool_engine,
    toy_engine,
)
from small import known, raising
from toy_backend import ByteTokenizer
from toy_engine import make_engine

from spec_runtime import GenerationResult, Stats, TokenLogprob
from spec_runtime.dialogue.response_template import Tags
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.anthropic.replies import MessageReply
from spec_runtime.serve.anthropic.requests import MessagesRequest
from spec_runtime.serve.openai.schemas import SMALLEST_TOP_P, ChatRequest
from spec_runtime.serve.responses.replies import ResponseReply
from spec_runtime.serve.responses.requests import ResponsesRequest, messages_of

CHAT_API, RESPONSES_API, MESSAGES_API = APIS
COUNT = f"{MESSAGES}/count_tokens"
BRIEF = {"role": "system", "content": "Be brief."}
BEGUN = [*HELLO, {"role": "assistant", "content": "I am"}]
CALL = '<tool_call>{"name": "look_up", "arguments": {"name": "Ada"}}</tool_call>'
TOOLS = [{"type": "function", "function": FUNCTION}]
LOGPROBS = "message.output_text.logprobs"


# ---- answers ----

SHOWN: dict[Api, dict[str, Any]] = {
    RESPONSES_API: {
        "metadata": {"a": "b"},
        "user": "u",
        "max_output_tokens": 20,
        "temperature": 0,
        "top_p": 1,
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
        "store": True,
    },
    MESSAGES_API: {"stop_reason": "max_tokens", "stop_sequence": None},
}


@each_door
def test_an_answer_is_the_engines(client: Any, api: Api) -> None:
    expected = api.generate()
    asked = {"metadata": {"a": "b"}, "user": "u"} if api is RESPONSES_API else {"model": "toy"}
    said = api.answer(client, **asked)
    raw = api is COMPLETIONS_API
    num_prompt_tokens = len(toy_engine().encode("hello" if raw else HELLO, raw=raw))
    assert (said.text, said.ending) == (expected.text, "length")
    assert said.usage == (num_prompt_tokens, 20)
    assert (said.thoughts, said.calls) == ("", [])
    assert said.whole.items() >= SHOWN.get(api, {}).items()
    assert len(said.events) < 25, "several tokens come in one part where the drafter was right"


@pytest.mark.parametrize(
    ("api", "asked"),
    [
        (CHAT_API, {"messages": [BRIEF, *HELLO]}),
        (CHAT_API, {"messages": [{**BRIEF, "role": "developer"}, *HELLO]}),
        (RESPONSES_API, {"instructions": "Be brief."}),
        (RESPONSES_API, {"messages": [BRIEF, *HELLO]}),
        (MESSAGES_API, {"system": "Be brief."}),
    ],
)
def test_the_systems_message_stands_before_everything(
    client: Any, api: Api, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = toy_engine().encode([BRIEF, *HELLO])
    prompts = prompts_read(monkeypatch)
    api.answer(client, **asked)
    assert prompts == [expected] * 2


@pytest.mark.parametrize(
    ("api", "field", "most"),
    [(CHAT_API, "stop", 16), (COMPLETIONS_API, "stop", 16), (MESSAGES_API, "stop_sequences", 64)],
)
def test_one_of_many_stop_strings_ends_an_answer(
    client: Any, api: Api, field: str, most: int
) -> None:
    text = api.answer(client, 40).text
    stop = text[10:12]
    others = [f"?{number}!" for number in range(most - 1)]
    found = api.answer(client, 40, **{field: [*others, stop]})
    assert (found.text, found.ending) == (text[: text.index(stop)], "stop")
    if api is MESSAGES_API:
        assert found.whole["stop_sequence"] == stop
    else:
        assert api.answer(client, 40, stop=stop).text == found.text


@each_api
@pytest.mark.parametrize(
    ("stop", "reason", "ending"),
    [(257, "stop", "stop"), ("ab", "stop", "stop"), (None, "length", "length")],
)
def test_an_empty_answer_is_one(api: Api, stop: Any, reason: str, ending: str) -> None:
    for said in api.written(GenerationResult("", [1], reason, Stats(), stop=stop), 1):
        assert (said.text, said.ending, said.calls) == ("", ending, [])
        if api is MESSAGES_API:
            assert said.whole["content"] == [], "without a text there is no block"
            assert said.whole["stop_sequence"] == (stop if isinstance(stop, str) else None)


def test_log_probabilities_are_the_engines(client: Any) -> None:
    """Of a chat and a response, whole and streamed, with the likeliest tokens and without."""
    expected = known(toy_engine().generate(HELLO, max_new_tokens=20, logprobs=2).logprobs)
    found = CHAT_API.answer(client, logprobs=True, top_logprobs=2).whole["choices"][0]["logprobs"]
    entries = found["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx([e.logprob for e in expected])
    for entry, ours in zip(entries, expected, strict=True):
        assert entry["token"] == entry["top_logprobs"][0]["token"], "greedy"
        assert entry["bytes"] == ([ours.token_id] if ours.token_id < 128 else None)
        assert len(entry["top_logprobs"]) == 2
        for each in (entry, *entry["top_logprobs"]):
            each["bytes"] = each["bytes"] or []
    assert CHAT_API.answer(client).whole["choices"][0]["logprobs"] is None

    def shown(**asked: Any) -> Any:
        whole = RESPONSES_API.answer(client, include=[LOGPROBS], **asked).whole
        assert whole["top_logprobs"] == asked.get("top_logprobs", 0)
        return whole["output"][0]["content"][0]["logprobs"]

    assert shown(top_logprobs=2) == entries
    assert shown() == [{**entry, "top_logprobs": []} for entry in entries]


def test_an_answer_that_has_begun_goes_on(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = toy_engine().encode(BEGUN, continue_final=True)
    prompts = prompts_read(monkeypatch)
    blocks = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I am"}]}]
    for messages in (BEGUN, blocks):
        MESSAGES_API.answer(client, messages=messages)
    assert prompts == [expected] * 4
    assert expected != toy_engine().encode(BEGUN)


def test_a_stream_says_first_what_the_prompt_has_and_last_what_was_reused(client: Any) -> None:
    size = len(toy_engine().encode(HELLO))
    for _ in range(2):
        first, *_, last, _ = MESSAGES_API.stream(client, **MESSAGES_API.body())
        assert first["message"]["usage"] == {"input_tokens": size, "output_tokens": 0}
        assert first["message"]["content"] == []
    reused = last["usage"]["cache_read_input_tokens"]
    assert 0 < reused < size
    assert last["usage"]["input_tokens"] == size - reused


def test_tokens_are_counted_as_they_are_read(client: Any) -> None:
    said = MESSAGES_API.answer(client, 1, system="Be brief.")
    count = post(client, COUNT, messages=HELLO, system="Be brief.")
    assert count == {"input_tokens": said.usage[0]}
    (begun,) = post(client, COUNT, messages=BEGUN).values()
    assert begun == len(toy_engine().encode(BEGUN, continue_final=True))
    long = [{"role": "user", "content": "x" * 900}]  # more than the context
    (more,), (less,) = (post(client, COUNT, messages=each).values() for each in (long, HELLO))
    assert more - less == 900 - len("hello")


# ---- formats, tools and thinking ----


@each_api
def test_an_answer_fits_its_schema(calling: Any, api: Api) -> None:
    said = api.answer(calling, 90, schema=PERSON)
    assert (set(json.loads(said.text)), said.ending) == ({"name"}, "stop")
    if api is RESPONSES_API:
        assert said.whole["text"] == api.format(PERSON)["text"]
    format = CHAT_API.format(PERSON)["response_format"]
    assert said.text == tool_engine().generate(HELLO, response_format=format).text


def test_an_answer_fits_its_expression_or_grammar(calling: Any) -> None:
    for format, fits in (
        ({"type": "regex", "regex": "[0-9]{3}-[ab]{2}"}, "[0-9]{3}-[ab]{2}"),
        ({"type": "ebnf", "grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"type": "text"}, ".+"),
    ):
        text = CHAT_API.answer(calling, response_format=format).text
        assert re.fullmatch(fits, text, re.DOTALL)


@each_api
@pytest.mark.parametrize("choice", ["required", "look_up"])
def test_a_call_is_forced_and_its_result_goes_back(calling: Any, api: Api, choice: str) -> None:
    """Whatever a text would have to be: there is none."""
    said = api.answer(calling, 90, tools=[FUNCTION], choice=choice, schema={})
    ((name, arguments),) = said.calls
    assert (name, set(arguments), said.ending) == ("look_up", {"name"}, "calls")
    assert said.text == ""
    if api is CHAT_API:
        begun = api.stream(calling, **api.body(90, tools=[FUNCTION], choice=choice))[0]
        assert begun["choices"][0]["delta"] == {"role": "assistant", "content": None}
    messages = api.returned(said, "born in 1815")
    answered = api.answer(calling, messages=messages, tools=[FUNCTION])
    assert answered.text
    if api is RESPONSES_API:  # which keeps the turns before
        body = api.body(messages=messages[-1:], tools=[FUNCTION])
        body["previous_response_id"] = said.whole["id"]
        assert api.read(post(calling, RESPONSES, **body)).text == answered.text


@each_api
def test_tools_are_shown_to_the_model_unless_none_may_be_called(calling: Any, api: Api) -> None:
    def size(**asked: Any) -> int:
        return api.answer(calling, 8, **asked).usage[0]

    bare = size()
    assert size(tools=[FUNCTION]) > bare + 50
    assert size(tools=[FUNCTION], choice="none") == bare
    free = api.answer(calling, 8, tools=[FUNCTION], choice="auto")
    assert (bool(free.text), free.calls) == (True, [])
    if api is MESSAGES_API:
        for asked in ({}, {"tools": [FUNCTION], "choice": "none"}, {"tools": [FUNCTION]}):
            body = api.body(**asked)
            counted = {
                key: body[key] for key in ("messages", "tools", "tool_choice") if key in body
            }
            assert post(calling, COUNT, **counted)["input_tokens"] == size(**asked)


@pytest.mark.parametrize(("begin", "ending"), [("<tool_call>", "calls"), ("{", "stop")])
def test_a_format_beside_tools_allows_a_call(calling: Any, begin: str, ending: str) -> None:
    """The bias opens an object, as the schema asks for, or the tag of a call."""
    (token,) = tool_engine().tokenizer.encode(begin, special_tokens=False)
    asked: dict[str, Any] = {"tools": [FUNCTION], "schema": PERSON, "logit_bias": {str(token): 50}}
    said = CHAT_API.answer(calling, 90, **asked)
    assert said.ending == ending
    found = json.loads(said.text) if said.text else said.calls[0][1]
    assert set(found) == {"name"}


@each_api
def test_a_strict_tool_has_to_be_one_that_can_be_kept_to(calling: Any, api: Api) -> None:
    """Its schema says what no grammar can."""
    schema = {"type": "object", "properties": {"v": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "f", "strict": True, "parameters": schema}
    refused = calling.post(api.path, json=api.body(2, tools=[tool]))
    assert refused.status_code == 400
    assert "uniqueItems" in api.error(refused)["message"]
    loose = api.body(2, tools=[{**tool, "strict": False}])
    assert calling.post(api.path, json=loose).status_code == 200


def thoughtful(said: str, is_begun: bool = False, **more: Any) -> GenerationResult:
    """Returns an answer each character of which is a token."""
    form = AnswerForm(Tags("<think>", "</think>"), is_begun, family="hermes", tools=TOOLS)
    entries = [TokenLogprob(ord(each), -1.0, []) for each in said]
    ends = list(range(1, len(said) + 1))
    return GenerationResult(said, [1], "stop", Stats(), "greedy", entries, None, ends, form)


@each_api
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_calls_follow_the_thinking_and_the_text_before_them(
    api: Api, size: int, is_begun: bool
) -> None:
    begin = "" if is_begun else "<think>"
    result = thoughtful(f"{begin}\nHm, {{}}.\n</think>\n\nLet me see. {CALL}\n{CALL}", is_begun)
    found = api.written(result, size)
    assert size > 1 or len(found[0].events) > 40, "thinking and calls in pieces, too"
    for said in found:
        assert (said.thoughts, said.text.strip()) == ("Hm, {}.", "Let me see.")
        assert said.calls == [("look_up", {"name": "Ada"})] * 2
        assert (said.ending, len(set(said.ids))) == ("calls", 2)
        if api is RESPONSES_API:
            (part,) = said.whole["output"][1]["content"]
            assert part["text"] == "".join(each["token"] for each in part["logprobs"])
        if api is CHAT_API:
            entries = said.whole["choices"][0]["logprobs"]["content"]
            assert said.text == "".join(each["token"] for each in entries)
    if isinstance(api, Messages):
        for said in api.written(result, size, shows=False):
            assert (said.thoughts, said.text, len(said.calls)) == ("", "Let me see.", 2)


@each_api
@pytest.mark.parametrize(
    "end",
    [
        '{"a": "b',
        """{"a": 'b'}}</tool_call>""",
        f'{{"a": {CALL}',  # a call in the text
    ],
)
@pytest.mark.parametrize("whole", ["", CALL])
def test_an_answer_whose_last_call_is_cut_ends_as_its_text(api: Api, whole: str, end: str) -> None:
    text = f'{whole}<tool_call>{{"name": "look_up", "arguments": {end}'
    form = AnswerForm(family="hermes", tools=TOOLS)
    for said in api.written(GenerationResult(text, [1], "length", Stats(), form=form), 1):
        assert said.ending == "length", "streamed and whole alike"


@each_api
def test_an_answer_that_is_cut_after_whole_calls_is_whole(api: Api) -> None:
    result = dataclasses.replace(thoughtful(f"{CALL}\n"), finish_reason="length")
    for said in api.written(result, 7):
        assert (said.ending, len(said.calls)) == ("calls", 1)


# ---- what a request says ----

USE = {"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"name": "Ada"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "call_1"}
ASKED = {"call_id": "call_1", "name": "look_up", "arguments": '{"name": "Ada"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "born 1815"}
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"name": "Ada"}'},
}
LOOKED = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
FOUND = {"role": "tool", "tool_call_id": "call_1", "content": "born 1815"}


def user(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(*texts: str) -> list[dict[str, Any]]:
    ending = {"cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": each, **ending} for each in texts]


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


BLOCKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"system": "Be brief."}, [BRIEF, *HELLO]),
    ({"system": text("Be", "brief.")}, [{"role": "system", "content": "Be\nbrief."}, *HELLO]),
    ({"system": ""}, HELLO),
    ({"messages": [user(*text("a", "b")), *HELLO]}, [{"role": "user", "content": "a\nb\nhello"}]),
    ({"messages": [*HELLO, BRIEF]}, [*HELLO, BRIEF]),
    (
        {
            "messages": [
                *HELLO,
                user(THOUGHT, *text("I look."), USE, role="assistant"),
                user({**RESULT, "content": "born 1815"}),
            ]
        },
        [*HELLO, {**LOOKED, "tool_calls": [CALLED]}, FOUND],
    ),
    (
        {
            "messages": [
                user(USE, role="assistant"),
                user(
                    *text("And?"),
                    {**RESULT, "content": text("born", "1815"), "is_error": False},
                    {**RESULT, "is_error": True, "content": "no such name"},
                ),
            ]
        },
        [
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {**FOUND, "content": "born\n1815"},
            {**FOUND, "content": "Error: no such name"},
            {"role": "user", "content": "And?"},
        ],
    ),
]
ITEMS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (HELLO, HELLO),
    (
        [{"type": "message", **user(part("a"), part("b"), role="developer")}],
        [{"role": "developer", "content": "ab"}],
    ),
    (
        [
            *HELLO,
            {"type": "reasoning", "summary": []},
            {"type": "reasoning", "content": [part("Hm.", "reasoning_text")]},
            user(part("I look.", "output_text"), role="assistant"),
            {"type": "function_call", **ASKED},
            {"type": "reasoning", "content": [part("Twice.", "reasoning_text")]},
            {"type": "function_call", **ASKED, "id": "fc_1", "status": "completed"},
            OUTPUT,
            {"type": "function_call", **ASKED},
            {**OUTPUT, "output": [part("1815")]},
        ],
        [
            *HELLO,
            {**LOOKED, "reasoning_content": "Hm.\nTwice.", "tool_calls": [CALLED, CALLED]},
            FOUND,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {**FOUND, "content": "1815"},
        ],
    ),
]


def chat_of(api: Api, **asked: Any) -> ChatRequest:
    """Returns the chat that a request is taken for."""
    body = api.body(**asked)
    if api is RESPONSES_API:
        return ResponsesRequest.model_validate(body).as_chat(HELLO)
    kind = ChatRequest if api is CHAT_API else MessagesRequest
    found = kind.model_validate(body)
    return found if isinstance(found, ChatRequest) else found.as_chat()


@pytest.mark.parametrize(("body", "expected"), BLOCKS)
def test_blocks_become_the_messages_of_a_chat(body: Any, expected: Any) -> None:
    assert [each.plain() for each in chat_of(MESSAGES_API, **body).messages] == expected


@pytest.mark.parametrize(("items", "expected"), ITEMS)
def test_items_become_the_messages_of_a_chat(items: Any, expected: Any) -> None:
    assert messages_of(items) == expected


@each_api
@pytest.mark.parametrize("choice", ["auto", "required", "none", "look_up"])
def test_tools_and_sampling_are_the_chats(api: Api, choice: str) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9}
    chat = chat_of(api, tools=[{**FUNCTION, "strict": True}], choice=choice, **sampling)
    assert chat.tools == [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert chat.tool_choice == CHAT_API.choice(choice)
    assert chat.options(99).items() >= {**sampling, "max_new_tokens": 20}.items()
    assert chat_of(api, temperature=None).options(99)["temperature"] == 1
    assert chat_of(api, top_p=0).options(99)["top_p"] == SMALLEST_TOP_P > 0
    if api is not MESSAGES_API:  # which has to say how many
        assert chat_of(api, most=None).options(99)["max_new_tokens"] == 99


def test_what_only_one_api_has_is_the_chats() -> None:
    assert chat_of(RESPONSES_API, parallel_tool_calls=False).parallel_tool_calls is False
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"tools": [{**FUNCTION, "type": "custom"}], "tool_choice": choice}
    chat = chat_of(MESSAGES_API, **asked, top_k=7, stop_sequences=["a"])
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.options(99).items() >= {"top_k": 7, "stop": ["a"]}.items()
    assert "top_k" not in chat_of(MESSAGES_API, top_k=0).options(99)
    assert chat_of(MESSAGES_API, tools=[FUNCTION], choice="auto").parallel_tool_calls is True


NO_EFFECT: list[tuple[Api, dict[str, Any]]] = [
    (CHAT_API, dict.fromkeys(("tools", "functions", "function_call", "audio", "top_k"))),
    (
        CHAT_API,
        {**dict.fromkeys(("web_search_options", "min_tokens")), "add_special_tokens": False},
    ),
    (COMPLETIONS_API, dict.fromkeys(("min_tokens", "cache_prompt", "prompt_logprobs", "top_k"))),
    (COMPLETIONS_API, {"add_special_tokens": None}),
    (RESPONSES_API, {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}),
    (RESPONSES_API, {"truncation": "disabled", "background": False, "prompt_cache_key": "k"}),
    (RESPONSES_API, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
    (MESSAGES_API, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "mcp_servers": []}),
    (MESSAGES_API, {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": None}),
    (MESSAGES_API, {"output_config": {"effort": "low"}}),
]


@pytest.mark.parametrize(("api", "asked"), NO_EFFECT)
def test_features_that_change_nothing_may_be_asked_for(client: Any, api: Api, asked: Any) -> None:
    assert api.answer(client, **asked).text == api.generate().text


FOREIGN = {"use_beam_search": False, "cache_salt": "x", "typical_p": 1.0, "guided_json": None}


@each_door
@pytest.mark.parametrize("is_stream", [False, True])
def test_fields_of_other_servers_that_change_nothing_are_named_in_a_header(
    client: Any, api: Api, is_stream: bool
) -> None:
    body = api.body(3, stream=is_stream)
    plain = client.post(api.path, json=body)
    assert (plain.status_code, "X-Specsplit-Ignored" in plain.headers) == (200, False)
    reply = client.post(api.path, json={**body, **FOREIGN})
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Specsplit-Ignored"] == ", ".join(FOREIGN)
    for name in ("use_beam_search", "typical_p"):  # other values would change the answer
        reply = client.post(api.path, json={**body, **FOREIGN, name: 0.5})
        assert reply.status_code == 400
        assert name in api.error(reply)["message"]


# ---- what goes wrong ----


@each_door
def test_an_answer_that_takes_too_long_is_504_or_a_streams_last_event(api: Api) -> None:
    """With the text so far, which a stream has given already."""
    message = "The answer was not complete after 0.4 s, the most that this server allows."
    with held(num_runs=2, timeout=0.4) as (_, client, _):
        several = {"n": 2} if api in (CHAT_API, COMPLETIONS_API) else {}
        reply = client.post(api.path, json=api.body(30, **several))
    assert reply.status_code == 504
    error = api.error(reply)
    assert (error["type"], error["message"]) == ("timeout_error", message)
    assert error.get("code") == (None if api is MESSAGES_API else "timeout")
    (partial,) = error["partial"]
    assert partial["index"] == 0
    assert 0 < len(partial["text"]) < 30
    assert api.generate(30).text.startswith(partial["text"])
    with held(num_runs=2, timeout=0.4) as (_, client, runs):
        *parts, last = api.stream(client, **api.body())
        assert runs.num_begun == 3, "it was in the midst of a step"
        for is_stream in (False, True):  # which never have their turn
            late = client.post(api.path, json=api.body(30, stream=is_stream))
            assert (late.status_code, api.error(late)["message"]) == (504, message)
    assert len(parts) >= 1
    assert last["error"]["message"] == message
    assert (last["error"]["type"], "partial" in last["error"]) == ("timeout_error", False)
    if api is RESPONSES_API:
        told = (last["type"], last["code"], last["param"], last["message"])
        assert told == ("error", "timeout", None, message)


def test_a_full_server_says_when_to_come_again() -> None:
    with (
        held(max_waiting=0, parallel=1) as (server, client, runs),
        server.open_request(COMPLETIONS, COMPLETIONS_API.body()),
    ):
        runs.wait_for_run()
        for api, is_stream in product((*APIS, COMPLETIONS_API), (False, True)):
            reply = client.post(api.path, json=api.body(stream=is_stream))
            assert reply.status_code == 429
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            error = api.error(reply)
            assert error["type"] == "rate_limit_error"
            assert error.get("code", "rate_limit_exceeded") == "rate_limit_exceeded"
        assert client.post(COUNT, json={"messages": HELLO}).status_code == 200


@pytest.mark.parametrize(
    ("api", "place"),
    [
        (CHAT_API, "spec_runtime.serve.openai.writers.finish_reason"),
        (COMPLETIONS_API, "spec_runtime.serve.openai.writers.finish_reason"),
        (RESPONSES_API, f"{ResponseReply.__module__}.ResponseReply.whole"),
        (MESSAGES_API, f"{MessageReply.__module__}.MessageReply.whole"),
    ],
)
def test_a_mistake_of_ours_is_an_error_without_details(
    client: Any,
    api: Api,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = "api_error" if api is MESSAGES_API else "server_error"
    with monkeypatch.context() as patched:
        patched.setattr(place, raising(RuntimeError("boom")))
        reply = client.post(api.path, json=api.body())
        assert (reply.status_code, api.error(reply)["type"]) == (500, kind)
        assert "boom" not in reply.text
        assert "boom" in caplog.text
    assert client.post(api.path, json=api.body()).status_code == 200
    monkeypatch.setattr(
        "spec_runtime.serve.metrics.Metrics.count_answer", raising(RuntimeError("boom"))
    )
    text = client.post(api.path, json=api.body(stream=True)).text
    assert "boom" not in text
    *parts, last = events(text, has_names=api in (RESPONSES_API, MESSAGES_API))
    assert len(parts) > 2
    assert last["error"]["type"] == kind, "in the midst of a stream, its last event"


@each_door
def test_other_errors_have_the_apis_form(api: Api) -> None:
    """Of requests that no API reads, and of a stranger."""
    none, incorrect = "You didn't provide an API key.", "Incorrect API key provided."
    key = {"Authorization": "Bearer key"}
    form = {"Content-Type": "application/json"}
    names = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    with in_process(api_key="key", max_body=20_000) as client:

        def refused(status: int, fragment: str, method: str = "POST", **asked: Any) -> None:
            reply = client.request(method, **{"url": api.path, "headers": key, **asked})
            error = api.error(reply)
            assert reply.status_code == status
            assert fragment in error["message"]
            if api is MESSAGES_API:
                assert error["type"] == names.get(status, "invalid_request_error")
                assert reply.headers["request-id"] == reply.headers["x-request-id"]
            else:
                assert "request-id" not in reply.headers
            assert reply.headers["x-request-id"].startswith("req_")

        refused(401, none, json=api.body(), headers={})
        refused(401, incorrect, json=api.body(), headers={"Authorization": "Bearer no"})
        refused(404, "`claude` does not exist", json=api.body(model="claude"))
        refused(400, "JSON", content=b"{", headers=key | form)
        refused(413, "20000 bytes", content=b" " * 20_001, headers=key | form)
        refused(404, f"Invalid URL (POST {api.path}/a/b)", url=f"{api.path}/a/b", json={})
        refused(405, f"Invalid URL (PUT {api.path})", "PUT")
        other = client.post("/v1/messagesx", json={}, headers=key)
        assert set(other.json()) == {"error"}, "OpenAI's form"


def test_messages_without_a_chat_template_are_refused() -> None:
    with in_process(make_engine("parallelspec", tokenizer=ByteTokenizer())) as client:
        for api in APIS:
            talk = [*HELLO, {"role": "assistant", "content": "hi"}, *HELLO]
            reply = client.post(api.path, json=api.body(messages=talk))
            assert reply.status_code == 400
            assert "no chat template" in api.error(reply)["message"]
        reply = client.post(COUNT, json={"messages": HELLO})
        assert (reply.status_code, "no chat template" in reply.text) == (400, True)


def test_a_client_hears_that_no_conversation_is_kept(client: Any) -> None:
    """Anthropic's client then sends the whole conversation, by the code in `details`."""
    for path, body in ((MESSAGES, MESSAGES_API.body()), (COUNT, {"messages": HELLO})):
        reply = client.post(path, json={**body, "thread": {"type": "create"}})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "send all messages" in error["message"]
