"""Tests the server by Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from served import HELLO, Served, held, served, tool_engine, toy_engine
from test_serving_messages import TOOLS

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

# The client has no argument for the temperature any more.
BODY = {"model": "toy", "messages": HELLO, "max_tokens": 25, "extra_body": {"temperature": 0}}


def client_of(server: Served, api_key: str) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(api_key="secret") as server, client_of(server, "secret") as made:
        yield made


def test_a_message_whole_and_streamed(client: Any) -> None:
    expected = toy_engine().generate(HELLO, max_new_tokens=25)
    whole = client.messages.create(**BODY)
    assert [block.text for block in whole.content] == [expected.text]
    assert whole.stop_reason == "max_tokens"
    assert whole._request_id.startswith("req_")
    with client.messages.stream(**BODY) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == message.content[0].text == expected.text
    assert len(texts) > 2
    for usage in (whole.usage, message.usage):
        size = usage.input_tokens + usage.cache_read_input_tokens
        assert size == len(toy_engine().encode(HELLO))
        assert usage.output_tokens == 25


def test_tokens_are_counted(client: Any) -> None:
    found = client.messages.count_tokens(model="toy", messages=HELLO, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert found.input_tokens == len(toy_engine().encode([system, *HELLO]))


def test_a_tool_is_called_and_its_result_goes_back() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as server, client_of(server, "any") as client:
        body = {**BODY, "max_tokens": 90, "tools": TOOLS}
        forced = {**body, "tool_choice": {"type": "tool", "name": "look_up"}}
        message = client.messages.create(**forced)
        assert message.stop_reason == "tool_use"
        with client.messages.stream(**forced) as stream:
            streamed = stream.get_final_message()
        (call,), (same,) = message.content, streamed.content
        assert (same.name, same.input) == (call.name, call.input)
        assert set(call.input) == {"name"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "born in 1815"}
        turns = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        answer = client.messages.create(**{**body, "messages": turns})
        assert answer.content[0].text


def test_the_clients_own_loop_runs_a_tool() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    seen = []

    @anthropic.beta_tool
    def look_up(name: Literal["Ada", "Bob"]) -> str:
        """Looks up a name."""
        seen.append(name)
        return "born in 1815"

    with served(tool_engine()) as server, client_of(server, "any") as client:
        runner = client.beta.messages.tool_runner(
            **{**BODY, "max_tokens": 90},
            tools=[look_up],
            tool_choice={"type": "any"},
            max_iterations=2,
        )
        turns = [message.content[0].type for message in runner]
    assert turns == ["tool_use", "tool_use"]
    assert set(seen) <= {"Ada", "Bob"}
    assert seen


def test_errors_are_the_clients() -> None:
    with served(api_key="secret") as server, client_of(server, "secret") as client:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**BODY, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="colour"):
            client.messages.create(**{**BODY, "extra_body": {"colour": "red"}})
        long = [{"role": "user", "content": "x" * 900}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(**{**BODY, "messages": long})
        image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="block of text"):
            client.messages.create(**{**BODY, "messages": [{"role": "user", "content": [image]}]})
        with client_of(server, "wrong") as other, pytest.raises(anthropic.AuthenticationError):
            other.messages.create(**BODY)
        with anthropic.Anthropic(base_url=server.url, auth_token="secret") as bearer:
            assert bearer.messages.create(**BODY).content


def test_an_error_in_the_midst_of_a_stream_is_raised() -> None:
    with (
        held(num_runs=2, timeout=0.4) as (server, _, _),
        client_of(server, "any") as client,
        client.messages.stream(**BODY) as stream,
        pytest.raises(anthropic.APIStatusError, match=r"not complete after 0.4 s"),
    ):
        stream.until_done()
