"""Tests the server by clients that stand on OpenAI's: each chats, streams and calls a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from served import HELLO, PERSON, Served, served, tool_engine, toy_engine

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PERSON}}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    """Serves an engine that can be made to call a tool."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    with served(tool_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> str:
    return toy_engine().generate(HELLO, max_new_tokens=25).text


@pytest.mark.parametrize("form", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server: Served, calling: Served, expected: str, form: str) -> None:
    reason = "pydantic-ai is not installed; pip install 'pydantic-ai-slim[openai]'"
    agents = pytest.importorskip("pydantic_ai", reason=reason)
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    def model(server: Served) -> Any:
        provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="any")
        return getattr(models, form)("toy", provider=provider)

    async def talk() -> None:
        settings = {"temperature": 0, "max_tokens": 25}
        agent = agents.Agent(model(server), model_settings=settings)
        assert (await agent.run("hello")).output == expected
        async with agent.run_stream("hello") as result:
            texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
        assert "".join(texts) == expected
        assert len(texts) > 2
        settings["max_tokens"] = 90
        caller = agents.Agent(model(calling), output_type=Person, model_settings=settings)
        found = await caller.run("hello")
        assert found.output.name in ("Ada", "Bob")
        parts = [part for each in found.all_messages() for part in each.parts]
        assert "final_result" in [getattr(part, "tool_name", None) for part in parts]

    asyncio.run(talk())


def test_litellm(
    server: Served, calling: Served, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or the import asks the network
    litellm = pytest.importorskip("litellm", reason="litellm is not installed; pip install litellm")

    def ask(server: Served, ask: Any = litellm.completion, **body: Any) -> Any:
        base = {"api_base": f"{server.url}/v1", "api_key": "any", "temperature": 0}
        return ask(model="openai/toy", **base, **body)

    whole = ask(server, messages=HELLO, max_tokens=25)
    assert whole.choices[0].message.content == expected
    parts = list(ask(server, messages=HELLO, max_tokens=25, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    called = ask(calling, messages=HELLO, max_tokens=90, tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"name"}
    response = ask(server, litellm.responses, input="hello", max_output_tokens=25)
    assert response.output[0].content[0].text == expected


def test_instructor(calling: Served) -> None:
    reason = "instructor is not installed; pip install instructor"
    instructor = pytest.importorskip("instructor", reason=reason)
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    body = {"model": "toy", "messages": HELLO, "temperature": 0, "response_model": Person}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="any") as plain:
            client = instructor.from_openai(plain, mode=mode)
            found = client.chat.completions.create(**body, max_tokens=90)
            assert found.name in ("Ada", "Bob")
            *_, last = client.chat.completions.create_partial(**body, max_tokens=90)
            assert last.name in ("Ada", "Bob")


def test_openai_agents(calling: Served) -> None:
    """Asks for answers that end, since the client takes one that is cut for an error."""
    reason = "openai-agents is not installed; pip install openai-agents"
    agents = pytest.importorskip("agents", reason=reason)
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def look_up(name: Literal["Ada", "Bob"]) -> str:
        """Looks up a name."""
        return f"{name} was found"

    async def talk() -> None:
        client = openai.AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="any")
        model = agents.OpenAIResponsesModel(model="toy", openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=90)
        chatting = agents.Agent("a", model=model, model_settings=settings, output_type=Person)
        whole = await agents.Runner.run(chatting, "hello")
        assert whole.final_output.name in ("Ada", "Bob")
        streamed = agents.Runner.run_streamed(chatting, "hello")
        kinds = [event.type async for event in streamed.stream_events()]
        assert kinds.count("raw_response_event") > 5
        assert streamed.final_output == whole.final_output
        settings = agents.ModelSettings(temperature=0, max_tokens=90, tool_choice="required")
        caller = agents.Agent(
            "b",
            model=model,
            model_settings=settings,
            tools=[look_up],
            tool_use_behavior="stop_on_first_tool",
        )
        found = await agents.Runner.run(caller, "hello")
        assert found.final_output in ("Ada was found", "Bob was found")

    asyncio.run(talk())
