"""Tests the server by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from served import HELLO, Served, held, served, tool_engine, toy_engine

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")


def client_of(server: Served, api_key: str) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with client_of(server, "secret") as made:
        yield made


def ask(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "toy", "messages": HELLO, **more})


def test_a_streamed_chat(client: Any) -> None:
    expected = toy_engine().generate(HELLO, max_new_tokens=25)
    options = {"max_completion_tokens": 25, "stream_options": {"include_usage": True}}
    *parts, last = ask(client, temperature=0, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 25


def test_logprobs_and_choices(client: Any) -> None:
    reply = ask(client, max_tokens=6, logprobs=True, top_logprobs=3, n=2, seed=4)
    assert len(reply.choices) == 2
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 6
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    assert reply._request_id.startswith("req_")


def test_a_completion_and_the_models(client: Any) -> None:
    (model,) = client.models.list().data
    options = {"max_tokens": 5, "temperature": 0, "logprobs": 2}
    reply = client.completions.create(model=model.id, prompt="hello", **options)
    assert reply.usage.completion_tokens == 5
    assert len(reply.choices[0].logprobs.token_logprobs) == 5


def test_a_response_whole_streamed_and_gone_on_from(client: Any) -> None:
    body = {"model": "toy", "max_output_tokens": 25, "temperature": 0}
    expected = toy_engine().generate(HELLO, max_new_tokens=25)
    whole = client.responses.create(**body, input="hello")
    assert whole.output_text == expected.text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 25
    with client.responses.stream(**body, input=HELLO, store=False) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert len(deltas) > 2
    assert client.responses.retrieve(whole.id).output_text == expected.text
    more = client.responses.create(**body, input="and you?", previous_response_id=whole.id)
    turns = [*HELLO, {"role": "assistant", "content": expected.text}]
    turns.append({"role": "user", "content": "and you?"})
    assert more.output_text == toy_engine().generate(turns, max_new_tokens=25).text
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError) as lost:
        client.responses.retrieve(whole.id)
    assert lost.value.code == "response_not_found"


def test_a_responses_log_probabilities_whole_and_streamed(client: Any) -> None:
    body = {"model": "toy", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    asked = {**body, "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    (part,) = client.responses.create(**asked).output[0].content
    assert len(part.logprobs) == 6
    for entry in part.logprobs:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    with client.responses.stream(**asked) as stream:
        events = [event for event in stream if hasattr(event, "logprobs")]
    *deltas, done = events
    assert done.type == "response.output_text.done"
    streamed = [entry for event in deltas for entry in event.logprobs]
    for found in (streamed, done.logprobs):
        assert [each.to_dict() for each in found] == [each.to_dict() for each in part.logprobs]


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def test_a_response_is_parsed_and_calls_a_tool() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    body = {"model": "toy", "input": HELLO, "temperature": 0, "max_output_tokens": 90}
    look_up = openai.pydantic_function_tool(Person, name="look_up")["function"]
    tools = [{"type": "function", **look_up}]
    with served(tool_engine()) as server, client_of(server, "any") as client:
        parsed = client.responses.parse(**body, text_format=Person).output_parsed
        assert parsed.name in ("Ada", "Bob")
        forced = {**body, "tools": tools, "tool_choice": "required"}
        with client.responses.stream(**forced) as stream:
            events = list(stream)
            response = stream.get_final_response()
        (call,) = response.output
        assert call.parsed_arguments.keys() == {"name"}
        arguments = [e.arguments for e in events if e.type.endswith("arguments.done")]
        assert arguments == [call.arguments]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        turn = {**body, "input": [output], "previous_response_id": response.id}
        assert client.responses.create(**turn, tools=tools).output_text


def test_errors_are_the_clients(client: Any, server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-5")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"colour": "red"})
    assert refused.value.param == "colour"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "x" * 900}])
    assert long.value.code == "context_length_exceeded"
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_an_error_in_the_midst_of_a_stream_is_raised() -> None:
    with (
        held(num_runs=2, timeout=0.4) as (server, _, _),
        client_of(server, "any") as client,
        pytest.raises(openai.APIError, match=r"not complete after 0.4 s"),
    ):
        list(ask(client, temperature=0, stream=True))
    with (
        held(num_runs=2, timeout=0.4) as (server, _, _),
        client_of(server, "any") as client,
        pytest.raises(openai.APIError, match=r"not complete after 0.4 s"),
    ):
        list(client.responses.create(model="toy", input="hello", temperature=0, stream=True))
