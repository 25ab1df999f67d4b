"""Tests the server by clients that people use: OpenAI's and Anthropic's own, and such as stand on
OpenAI's. Each chats, streams and calls a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from served import HELLO, PERSON, Served, held, served, tool_engine, toy_engine

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

MODEL: dict[str, Any] = {"model": "toy", "temperature": 0}
CHAT = {**MODEL, "messages": HELLO, "max_tokens": 25}
ASKED = {**MODEL, "input": "hello", "max_output_tokens": 25}
# Anthropic's client has no argument for the temperature any more.
MESSAGE = {"model": "toy", "messages": HELLO, "max_tokens": 25, "extra_body": {"temperature": 0}}
FUNCTION = {"type": "function", "function": {"name": "look_up", "parameters": PERSON}}
TOOL = {"name": "look_up", "input_schema": PERSON}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_key="secret") as running:
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


def openais(server: Served, key: str = "secret") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def anthropics(server: Served, key: str = "secret") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


# Each returns a whole text, the pieces of a stream, and the arguments of a call.
Talk = Callable[[Served, Served], tuple[str, list[str], Any]]


def by_openais_chat(server: Served, calling: Served) -> tuple[str, list[str], Any]:
    create = openais(server).chat.completions.create
    whole = create(**CHAT)
    assert whole._request_id.startswith("req_")
    *parts, last = create(**CHAT, stream=True, stream_options={"include_usage": True})
    assert (parts[-1].choices[0].finish_reason, last.usage.completion_tokens) == ("length", 25)
    forced = {**CHAT, "max_tokens": 90, "tools": [FUNCTION], "tool_choice": "required"}
    (choice,) = openais(calling).chat.completions.create(**forced).choices
    pieces = [part.choices[0].delta.content or "" for part in parts]
    called = json.loads(choice.message.tool_calls[0].function.arguments)
    return whole.choices[0].message.content, pieces, called


def by_openais_responses(server: Served, calling: Served) -> tuple[str, list[str], Any]:
    whole = openais(server).responses.create(**ASKED)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 25
    with openais(server).responses.stream(**ASKED, store=False) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    look_up = openai.pydantic_function_tool(Person, name="look_up")["function"]
    body = {**ASKED, "max_output_tokens": 90, "tools": [{"type": "function", **look_up}]}
    client = openais(calling)
    with client.responses.stream(**body, tool_choice="required") as stream:
        events = list(stream)
        response = stream.get_final_response()
    (call,) = response.output
    done = [event.arguments for event in events if event.type.endswith("arguments.done")]
    assert done == [call.arguments]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    turn = {**body, "input": [output], "previous_response_id": response.id}
    assert client.responses.create(**turn).output_text
    parsed = client.responses.parse(**{**ASKED, "max_output_tokens": 90}, text_format=Person)
    assert parsed.output_parsed.name in ("Ada", "Bob")
    return whole.output_text, pieces, call.parsed_arguments


def by_anthropics(server: Served, calling: Served) -> tuple[str, list[str], Any]:
    messages = anthropics(server).messages
    whole = messages.create(**MESSAGE)
    assert (whole.stop_reason, whole._request_id[:4]) == ("max_tokens", "req_")
    with messages.stream(**MESSAGE) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert message.content[0].text == "".join(pieces)
    for usage in (whole.usage, message.usage):
        size = usage.input_tokens + usage.cache_read_input_tokens
        assert (size, usage.output_tokens) == (len(toy_engine().encode(HELLO)), 25)
    counted = messages.count_tokens(model="toy", messages=HELLO, system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert counted.input_tokens == len(toy_engine().encode([system, *HELLO]))

    body = {**MESSAGE, "max_tokens": 90, "tools": [TOOL]}
    forced = {**body, "tool_choice": {"type": "tool", "name": "look_up"}}
    called = anthropics(calling).messages.create(**forced)
    assert called.stop_reason == "tool_use"
    with anthropics(calling).messages.stream(**forced) as stream:
        streamed = stream.get_final_message()
    (call,), (same,) = called.content, streamed.content
    assert (same.name, same.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "born in 1815"}
    turns = [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = anthropics(calling).messages.create(**{**body, "messages": [*HELLO, *turns]})
    assert answer.content[0].text
    return whole.content[0].text, pieces, call.input


def by_pydantic_ai(form: str) -> Talk:
    def talk(server: Served, calling: Served) -> tuple[str, list[str], Any]:
        reason = "pydantic-ai is not installed; pip install 'pydantic-ai-slim[openai]'"
        agents = pytest.importorskip("pydantic_ai", reason=reason)
        models = pytest.importorskip("pydantic_ai.models.openai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")

        def agent(server: Served, most: int, **more: Any) -> Any:
            provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="secret")
            settings = {"temperature": 0, "max_tokens": most}
            model = getattr(models, form)("toy", provider=provider)
            return agents.Agent(model, model_settings=settings, **more)

        async def ask() -> tuple[str, list[str], Any]:
            chatting = agent(server, 25)
            whole = (await chatting.run("hello")).output
            async with chatting.run_stream("hello") as result:
                pieces = [text async for text in result.stream_text(delta=True, debounce_by=None)]
            found = await agent(calling, 90, output_type=Person).run("hello")
            parts = [part for each in found.all_messages() for part in each.parts]
            assert "final_result" in [getattr(part, "tool_name", None) for part in parts]
            return whole, pieces, found.output.model_dump()

        return asyncio.run(ask())

    return talk


def by_litellm(server: Served, calling: Served) -> tuple[str, list[str], Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or the import asks the network
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")

    def ask(server: Served, ask: Any, **body: Any) -> Any:
        base = {"api_base": f"{server.url}/v1", "api_key": "secret", "temperature": 0}
        return ask(model="openai/toy", **base, **body)

    chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 25}
    whole = ask(server, litellm.completion, **chat).choices[0].message.content
    parts = ask(server, litellm.completion, **chat, stream=True)
    forced = {**chat, "max_tokens": 90, "tools": [FUNCTION], "tool_choice": "required"}
    (call,) = ask(calling, litellm.completion, **forced).choices[0].message.tool_calls
    response = ask(server, litellm.responses, input="hello", max_output_tokens=25)
    assert response.output[0].content[0].text == whole
    pieces = [part.choices[0].delta.content or "" for part in parts]
    return whole, pieces, json.loads(call.function.arguments)


CLIENTS: dict[str, Talk] = {
    "OpenAI's chat": by_openais_chat,
    "OpenAI's responses": by_openais_responses,
    "Anthropic's": by_anthropics,
    "pydantic-ai's chat": by_pydantic_ai("OpenAIChatModel"),
    "pydantic-ai's responses": by_pydantic_ai("OpenAIResponsesModel"),
    "litellm": by_litellm,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_chats_streams_and_calls_a_tool(
    server: Served, calling: Served, expected: str, name: str
) -> None:
    whole, pieces, arguments = CLIENTS[name](server, calling)
    assert whole == "".join(pieces) == expected
    assert len(pieces) > 2
    assert set(arguments) == {"name"}


def test_openais_client_reads_log_probabilities_and_choices(server: Served) -> None:
    client = openais(server)
    reply = client.chat.completions.create(
        **{**CHAT, "max_tokens": 6}, logprobs=True, top_logprobs=3, n=2, seed=4
    )
    assert len(reply.choices) == 2
    asked = {**ASKED, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
    (part,) = client.responses.create(**asked, top_logprobs=3).output[0].content
    for entries in (*(choice.logprobs.content for choice in reply.choices), part.logprobs):
        assert len(entries) == 6
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    with client.responses.stream(**asked, top_logprobs=3) as stream:
        *deltas, done = [event for event in stream if hasattr(event, "logprobs")]
    assert done.type == "response.output_text.done"
    streamed = [entry for event in deltas for entry in event.logprobs]
    for found in (streamed, done.logprobs):
        assert [each.to_dict() for each in found] == [each.to_dict() for each in part.logprobs]
    (model,) = client.models.list().data
    options = {"max_tokens": 5, "temperature": 0, "logprobs": 2}
    completion = client.completions.create(model=model.id, prompt="hello", **options)
    assert completion.usage.completion_tokens == 5
    assert len(completion.choices[0].logprobs.token_logprobs) == 5


def test_openais_client_goes_on_from_a_response(server: Served, expected: str) -> None:
    responses = openais(server).responses
    whole = responses.create(**ASKED)
    assert responses.retrieve(whole.id).output_text == expected
    more = responses.create(**{**ASKED, "input": "and you?"}, previous_response_id=whole.id)
    turns = [*HELLO, {"role": "assistant", "content": expected}]
    turns.append({"role": "user", "content": "and you?"})
    assert more.output_text == toy_engine().generate(turns, max_new_tokens=25).text
    responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError) as lost:
        responses.retrieve(whole.id)
    assert lost.value.code == "response_not_found"


def test_anthropics_own_loop_runs_a_tool(calling: Served) -> None:
    seen = []

    @anthropic.beta_tool
    def look_up(name: Literal["Ada", "Bob"]) -> str:
        """Looks up a name."""
        seen.append(name)
        return "born in 1815"

    runner = anthropics(calling).beta.messages.tool_runner(
        **{**MESSAGE, "max_tokens": 90},
        tools=[look_up],
        tool_choice={"type": "any"},
        max_iterations=2,
    )
    assert [message.content[0].type for message in runner] == ["tool_use", "tool_use"]
    assert {"Ada", "Bob"} >= set(seen) > set()


@pytest.mark.parametrize("library", [openai, anthropic], ids=["openai", "anthropic"])
def test_errors_are_the_clients(server: Served, library: Any) -> None:
    is_openais = library is openai

    def ask(key: str = "secret", **more: Any) -> Any:
        client = openais(server, key) if is_openais else anthropics(server, key)
        create = client.chat.completions.create if is_openais else client.messages.create
        return create(**{**(CHAT if is_openais else MESSAGE), **more})

    long = [{"role": "user", "content": "x" * 900}]
    with pytest.raises(library.NotFoundError) as unknown:
        ask(model="gpt-5")
    with pytest.raises(library.BadRequestError, match="colour") as refused:
        ask(extra_body={"colour": "red"})
    with pytest.raises(library.BadRequestError) as too_long:
        ask(messages=long)
    with pytest.raises(library.AuthenticationError):
        ask("wrong")
    if is_openais:
        found = (unknown.value.code, refused.value.param, too_long.value.code)
        assert found == ("model_not_found", "colour", "context_length_exceeded")
    else:
        assert "prompt is too long" in str(too_long.value)
        image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="block of text"):
            ask(messages=[{"role": "user", "content": [image]}])
        with anthropic.Anthropic(base_url=server.url, auth_token="secret") as bearer:
            assert bearer.messages.create(**MESSAGE).content


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_an_error_in_the_midst_of_a_stream_is_raised(api: str) -> None:
    with held(num_runs=2, timeout=0.4) as (server, _, _):
        streams: dict[str, Callable[[], Any]] = {
            "chat": lambda: openais(server).chat.completions.create(**CHAT, stream=True),
            "responses": lambda: openais(server).responses.create(**ASKED, stream=True),
            "messages": lambda: anthropics(server).messages.create(**MESSAGE, stream=True),
        }
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="not complete after"):
            list(streams[api]())


def test_instructor(calling: Served) -> None:
    reason = "instructor is not installed; pip install instructor"
    instructor = pytest.importorskip("instructor", reason=reason)
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
