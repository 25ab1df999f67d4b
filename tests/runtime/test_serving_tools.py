"""Tests structured output and tool calls over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from served import CHAT, HELLO, MESSAGES, RESPONSES, chunks_of, post, served, stream, tool_engine
from toy_backend import ByteTokenizer

from spec_runtime import GenerationResult, Stats
from spec_runtime.dialogue.thinking import Tags
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.anthropic.replies import MessageReply
from spec_runtime.serve.openai.replies import TokenTexts
from spec_runtime.serve.openai.writers import ChatWriter
from spec_runtime.serve.responses.replies import ResponseReply

for module in ("tokenizers", "llguidance"):
    pytest.importorskip(module, reason=f"{module} is not installed")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "fame": {"type": "boolean"}},
    "required": ["name", "fame"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": PERSON}},
    {"type": "function", "function": {"name": "give_up"}},
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(tool_engine()) as running, running.client() as made:
        yield made


def choice_of(client: Any, **body: Any) -> Any:
    """Returns the choice of an answer, which is the same whole and streamed."""
    body = {"messages": HELLO, "temperature": 0, **body}
    (whole,) = post(client, CHAT, **body)["choices"]
    streamed = stream(client, CHAT, **body)[:-1]
    deltas = [part["choices"][0]["delta"] for part in streamed]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == (whole["message"]["content"] or "")
    expected = whole["message"].get("tool_calls", [])
    assert calls_of(deltas) == [call["function"] for call in expected]
    assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    return whole


def calls_of(deltas: list[Any]) -> list[dict[str, str]]:
    """Returns the calls that a stream's deltas make up."""
    found: list[dict[str, str]] = []
    for call in (each for delta in deltas for each in delta.get("tool_calls", ())):
        if "id" in call:
            assert (call["type"], call["index"]) == ("function", len(found))
            found.append({"arguments": "", **call["function"]})
        else:
            found[call["index"]]["arguments"] += call["function"]["arguments"]
    return found


def test_an_answer_fits_its_schema(client: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    choice = choice_of(client, response_format=format)
    found = json.loads(choice["message"]["content"])
    assert set(found) == {"name", "fame"}
    assert choice["finish_reason"] == "stop"
    expected = tool_engine().generate(HELLO, response_format=format)
    assert choice["message"]["content"] == expected.text


def test_an_answer_fits_its_expression_or_grammar(client: Any) -> None:
    regex = {"type": "regex", "regex": "[0-9]{3}-[ab]{2}"}
    found = choice_of(client, response_format=regex)["message"]["content"]
    assert re.fullmatch(regex["regex"], found)
    ebnf = {"type": "ebnf", "grammar": 'start: "yes" | "no"'}
    assert choice_of(client, response_format=ebnf)["message"]["content"] in ("yes", "no")
    assert choice_of(client, response_format={"type": "text"}, max_tokens=3)["message"]["content"]


@pytest.mark.parametrize("format", [None, {"type": "json_object"}])
def test_a_call_is_forced(client: Any, format: dict[str, Any] | None) -> None:
    """Whatever a text would have to be."""
    named = {"type": "function", "function": {"name": "look_up"}}
    for tool_choice in ("required", named):
        body = {"tools": TOOLS, "tool_choice": tool_choice, "response_format": format}
        choice = choice_of(client, **body)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"]["name"] in ("look_up", "give_up")
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) <= {"name", "fame"}
    assert call["function"]["name"] == "look_up"


def test_a_strict_tool_has_to_be_one_that_can_be_kept_to(client: Any) -> None:
    """A schema that says what no grammar can, in each API's form of a tool."""
    schema = {"type": "object", "properties": {"v": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "f", "strict": True}
    for path, body in (
        (CHAT, {"tools": [{"type": "function", "function": {**tool, "parameters": schema}}]}),
        (RESPONSES, {"tools": [{"type": "function", **tool, "parameters": schema}]}),
        (MESSAGES, {"max_tokens": 2, "tools": [{**tool, "input_schema": schema}]}),
    ):
        said: dict[str, Any] = {"input" if path == RESPONSES else "messages": HELLO, **body}
        refused = client.post(path, json=said)
        assert refused.status_code == 400, path
        assert "uniqueItems" in refused.json()["error"]["message"]
        function = body["tools"][0].get("function", body["tools"][0])  # type: ignore[index]
        function["strict"] = False
        limit = {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
        assert client.post(path, json={**said, **limit}).status_code == 200


def test_a_response_format_beside_tools_allows_a_call(client: Any) -> None:
    """The bias opens an object, as the schema asks for, or the tag of a call."""
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    body: dict[str, Any] = {"tools": TOOLS, "response_format": format}
    tag = tool_engine().tokenizer.encode("<tool_call>", special_tokens=False)[0]
    called = choice_of(client, **body, logit_bias={str(tag): 50})
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["content"] is None
    answered = choice_of(client, **body, logit_bias={str(tag): -50})
    assert set(json.loads(answered["message"]["content"])) == {"name", "fame"}
    refused = client.post(
        CHAT, json={"messages": HELLO, **body, "response_format": {"type": "ebnf", "grammar": "x"}}
    )
    assert refused.status_code == 400
    assert "beside tools" in refused.json()["error"]["message"]


def test_tools_are_shown_to_the_model_unless_none_may_be_called(client: Any) -> None:
    def num_prompt_tokens(**more: Any) -> int:
        reply = post(client, CHAT, messages=HELLO, max_tokens=1, **more)
        return int(reply["usage"]["prompt_tokens"])

    assert num_prompt_tokens(tools=TOOLS) > num_prompt_tokens() + 100
    assert num_prompt_tokens(tools=TOOLS, tool_choice="none") == num_prompt_tokens()
    answered = choice_of(client, tools=TOOLS, tool_choice="auto", max_tokens=8)
    assert answered["message"]["content"]
    assert "tool_calls" not in answered["message"]


def test_calls_and_their_results_go_back_to_the_model(client: Any) -> None:
    function = {"name": "look_up", "arguments": '{"name": "Ada"}'}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "born in 1815"},
    ]
    assert choice_of(client, messages=messages, tools=TOOLS, max_tokens=4)["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "fragment"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format", "regex"),
        ({"response_format": {"type": "regex"}}, "response_format", "None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"tools": [{"type": "custom"}]}, "tools", "custom"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "required"),
        ({"tool_choice": "auto"}, None, "'tools' are specified"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "'fly'",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_formats_and_tools_that_are_none_are_refused(
    client: Any, body: dict[str, Any], param: str | None, fragment: str, is_stream: bool
) -> None:
    reply = client.post(CHAT, json={"messages": HELLO, "stream": is_stream, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert fragment in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    "end",
    [
        '{"a": "b',
        "{'a': 1}}</tool_call>",
        '{"a": <tool_call>{"name": "look_up", "arguments": {}}</tool_call>',  # a call in the text
    ],
)
@pytest.mark.parametrize(
    "whole", ["", '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>']
)
def test_a_stream_whose_last_call_is_cut_ends_as_its_text(whole: str, end: str) -> None:
    text = f'{whole}<tool_call>{{"name": "look_up", "arguments": {end}'
    form = AnswerForm(family="hermes", tools=TOOLS)
    result = GenerationResult(text, [1], "length", Stats(), form=form)
    texts = TokenTexts(ByteTokenizer(), frozenset())
    chat, message = ChatWriter("toy", texts), MessageReply("toy")
    response = ResponseReply("toy", {}, texts, lambda _: None)
    chunks = chunks_of(result, 1)
    *_, choice = [each for chunk in chunks for each in chat.parts(0, chunk)]
    assert choice["finish_reason"] == "length"
    *_, delta, _ = [each for chunk in chunks for each in message.parts(chunk)]
    assert delta["delta"]["stop_reason"] == "max_tokens"
    *_, last = [each for chunk in chunks for each in response.parts(chunk, form)]
    assert last["response"]["status"] == "incomplete"


def test_a_streamed_call_follows_the_thinking_and_the_text_before_it() -> None:
    form = AnswerForm(Tags("<think>", "</think>"), family="hermes", tools=TOOLS)
    writer = ChatWriter("toy", TokenTexts(ByteTokenizer(), frozenset()))
    called = '_call>{"name": "look_up", "arguments": {"name": "Ada"}}'
    pieces = ["<think>\nHm", ".\n</think>\n\n", "Let me", " see. <tool", called, "</tool_call>"]
    whole = GenerationResult("".join(pieces), [1], "stop", Stats(), form=form)
    choices = [choice for chunk in chunks_of(whole, pieces) for choice in writer.parts(0, chunk)]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:3] == [{"reasoning_content": "Hm"}, {"reasoning_content": "."}]
    assert deltas[3:5] == [{"content": "Let me"}, {"content": " see."}]
    (call,) = calls_of(deltas)
    assert call == {"name": "look_up", "arguments": '{"name": "Ada"}'}
    assert choices[-1]["finish_reason"] == "tool_calls"
    message = writer.whole(0, whole)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    assert [each["function"] for each in message["tool_calls"]] == [call]
