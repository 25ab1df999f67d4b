"""Tests the server by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from served import HELLO, Served, held, served, toy_engine

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
