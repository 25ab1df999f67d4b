"""Tests the server by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

for module in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(module, reason=f"{module} is not installed; the extra serve has it")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
from served import Served, held_engine, served, toy_engine, wait_until  # noqa: E402

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(toy_engine(), api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_a_streamed_chat(client: Any) -> None:
    expected = toy_engine().generate(HELLO, max_new_tokens=25)
    stream = client.chat.completions.create(
        model="toy",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=25,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == expected.text
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 25


def test_logprobs_and_choices(client: Any) -> None:
    reply = client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3, n=2, seed=4
    )
    assert len(reply.choices) == 2
    for choice in reply.choices:
        assert len(choice.logprobs.content) == 6
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    assert reply._request_id.startswith("req_")


def test_a_completion_and_the_models(client: Any) -> None:
    (model,) = client.models.list().data
    reply = client.completions.create(
        model=model.id, prompt="hello", max_tokens=5, temperature=0, logprobs=2
    )
    assert reply.usage.completion_tokens == 5
    assert len(reply.choices[0].logprobs.token_logprobs) == 5


def test_errors_are_the_clients(client: Any, server: Served) -> None:
    def ask(asked: Any, **more: Any) -> None:
        asked.chat.completions.create(**{"model": "toy", "messages": HELLO, **more})

    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-5")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"colour": "red"})
    assert refused.value.param == "colour"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "x" * 900}])
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_an_error_in_the_midst_of_a_stream_is_raised() -> None:
    engine, holder = held_engine()
    holder.allowed.release(1)
    with served(engine, timeout=1.0) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="toy", messages=HELLO, temperature=0, stream=True
            )
            with pytest.raises(openai.APIError, match=r"not complete after 1 s"):
                list(stream)
        holder.free()


def test_a_closed_stream_ends_the_answer() -> None:
    engine, holder = held_engine()
    with served(engine) as server, server.client() as raw:

        async def ask() -> None:
            url = f"{server.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
                stream = await client.chat.completions.create(
                    model="toy", messages=HELLO, temperature=0, stream=True
                )
                async for _ in stream:
                    break
                await stream.close()

        asyncio.run(ask())
        wait_until(lambda: "running_requests 0.0" in raw.get("/metrics").text)
        holder.free()
        assert holder.num_begun <= 1
