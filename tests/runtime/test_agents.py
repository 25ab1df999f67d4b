"""What agents send: requests of clients as they sent them, tools that nobody runs here,
pictures, choices of several tools, forms of other servers, and thinking that is kept for us."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from apis import APIS, FUNCTION, TEXTS
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    RESPONSES,
    chunks_of,
    in_process,
    post,
    prompts_read,
    tool_engine,
)

from spec_runtime import GenerationResult, Stats
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.dialogue.messages import plain_message
from spec_runtime.dialogue.response_template import Tags
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.serve.anthropic.requests import MessagesRequest
from spec_runtime.serve.ignored import HEADER
from spec_runtime.serve.openai.schemas import ChatRequest, CompletionRequest
from spec_runtime.serve.responses.replies import ResponseReply, Shape
from spec_runtime.serve.responses.requests import ENCRYPTED, ResponsesRequest, messages_of
from spec_runtime.serve.responses.tools import Tools

CHAT_API, RESPONSES_API, MESSAGES_API = APIS
# Rows of a client, the path, the body, and what was left out; long texts are cut.
CLIENTS: dict[str, list[Any]] = {}
for _row in json.loads((Path(__file__).parent / "clients.json").read_text("utf-8")):
    CLIENTS.setdefault(_row["client"], []).append(_row)
CODEX, CLAUDE = (
    [row["body"] for row in CLIENTS[name]] for name in ("Codex CLI 0.171.0", "Claude Code 2.1.197")
)
PARTS = ("text", "content", "output", "input", "system", "instructions", "prompt")
MOST = {
    **dict.fromkeys((CHAT, COMPLETIONS, MESSAGES), "max_tokens"),
    RESPONSES: "max_output_tokens",
}
HERMES = AnswerForm(
    Tags("<think>", "</think>"), family="hermes", tools=[{"type": "function", "function": FUNCTION}]
)
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "tools": [{"type": "function", **FUNCTION}],
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with in_process(tool_engine()) as made:
        yield made


# ---- clients' own requests ----


@pytest.fixture(scope="module")
def large() -> Iterator[Any]:
    """Has room for all tools of Codex."""
    engine = tool_engine(8000)
    with in_process(engine) as made:
        yield made, engine.tokenizer


def texts_of(said: Any) -> Iterator[str]:
    """Gives the texts for the model in a part of a request."""
    for value in said if isinstance(said, list) else ():
        yield from texts_of(value)
    for name, value in said.items() if isinstance(said, dict) else ():
        if isinstance(value, str) and name in PARTS:
            yield value
        elif name in ("messages", *PARTS):
            yield from texts_of(value)


@pytest.mark.parametrize("name", CLIENTS)
def test_requests_of_a_client_are_read_and_answered(
    large: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the client said is missing in the prompt; what changes nothing and the tools
    that nobody runs here are named, and nothing else is."""
    client, tokenizer = large
    prompts = prompts_read(monkeypatch)
    for row in CLIENTS[name]:
        path, body = row["path"], {**row["body"]}
        if path in MOST:
            body.pop("max_completion_tokens", None)
            body |= {MOST[path]: 4, "temperature": 0}
        reply = client.post(path, json=body)
        assert reply.status_code == 200, (body, reply.text)
        assert reply.headers.get(HEADER) == row.get("ignored"), body
        if path in MOST:
            prompt = tokenizer.spelled(prompts.pop())
            assert not [text for text in texts_of(body) if text not in prompt], body
        if body.get("stream"):
            *_, last = reply.text.strip().split("\n\n")
            assert re.search(r"\[DONE\]|response\.(completed|incomplete)|message_stop", last), last


def test_tools_of_claude_code_are_functions_and_calls_are_written_as_it_sends_them() -> None:
    tools = CLAUDE[0]["tools"]
    asked = MessagesRequest.model_validate(CLAUDE[0]).as_chat()
    assert [each["function"]["parameters"] for each in asked.tools or ()] == [
        each["input_schema"] for each in tools
    ]
    (block,) = CLAUDE[1]["messages"][2]["content"]
    form = replace(HERMES, tools=[{"type": "function", "function": {"name": block["name"]}}])
    text = called(block["name"], block["input"])
    result = GenerationResult(text, [1], "stop", Stats(), form=form)
    for said in MESSAGES_API.written(result, 5):
        assert said.whole["content"] == [{**block, "id": said.ids[0]}]


def test_all_of_codex_tools_are_functions_of_a_chat() -> None:
    asked = ResponsesRequest.model_validate(CODEX[0])
    functions = asked.as_chat(HELLO).tools or []
    names = [each["function"]["name"] for each in functions]
    assert {"exec_command", "spawn_agent", "wait_agent"} <= {*names}
    assert len(names) == len({*names}) == 7 + 5


# ---- calls of other kinds ----


def written(text: str, tools: list[Any], **more: Any) -> tuple[list[Any], Any]:
    """Returns the events and the items of an answer that calls these tools."""
    made = Tools(tools)
    form = replace(HERMES, tools=made.functions)
    result = GenerationResult(text, [1], "stop", Stats(), form=form)
    shape = Shape(made, **more)
    streamed, whole = (ResponseReply("toy", {}, TEXTS, lambda r: None, shape) for _ in range(2))
    events = [each for chunk in chunks_of(result, 3) for each in streamed.parts(chunk, form)]
    output = whole.whole([result])["output"]
    told = events[-1]["response"]["output"]
    own = ("id", "call_id")
    assert [{k: v for k, v in each.items() if k not in own} for each in told] == [
        {k: v for k, v in each.items() if k not in own} for each in output
    ]
    return events, told


def called(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def test_a_custom_tool_is_called_with_a_text() -> None:
    text = 'a\n"b"'
    events, (item,) = written(called("patch", {"input": text}), [PATCH])
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert item["id"].startswith("ctc_")
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (events[3]["delta"], events[4]["input"]) == (text, text)
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    (function,) = Tools([{**PATCH, "format": grammar}]).functions
    assert function["function"]["description"].startswith("Changes files.")
    assert "start: /a/" in function["function"]["description"]


def test_a_call_names_its_namespace() -> None:
    """Without it Codex says that it knows no such function."""
    _, (item,) = written(called("look_up", {"name": "Ada"}), [AGENTS])
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "look_up")
    _, (item,) = written(called("look_up", {"name": "Ada"}), AGENTS["tools"])
    assert "namespace" not in item


def test_calls_of_all_kinds_are_taken_back() -> None:
    items: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call", "call_id": "b", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "b", "output": "files"},
    ]
    said = messages_of([*HELLO, *items])
    calls = [each["tool_calls"][0] for each in said if "tool_calls" in each]
    assert [(each["id"], each["function"]["name"]) for each in calls] == [
        ("a", "patch"),
        ("b", "local_shell"),
    ]
    assert json.loads(calls[0]["function"]["arguments"]) == {"input": "x"}
    assert json.loads(calls[1]["function"]["arguments"]) == {"command": ["ls"]}
    results = [(each["tool_call_id"], each["content"]) for each in said if each["role"] == "tool"]
    assert results == [("a", "done"), ("b", "files")]
    asked = ResponsesRequest.model_validate({"input": [*HELLO, *items]})
    assert asked._ignored == ["web_search_call"]


# ---- tools that nobody runs here, and choices ----


@pytest.mark.parametrize(
    ("api", "kind"), [*zip(APIS, ("web_search", "web_search", "web_search_20250305"), strict=True)]
)
def test_tools_of_other_servers_are_left_out_and_named(client: Any, api: Any, kind: str) -> None:
    search, own = {"type": kind, "name": "web_search"}, api.tool(FUNCTION)
    for tools in ([search], [own, search, search]):
        reply = client.post(api.path, json={**api.body(3), "tools": tools})
        assert reply.status_code == 200, reply.text
        assert reply.headers[HEADER] == f"tools: {kind}"
    assert HEADER not in client.post(api.path, json=api.body(3, tools=[FUNCTION])).headers


def test_blocks_of_anthropics_own_tools_are_left_out_and_named(client: Any) -> None:
    use = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "a", "content": []}
    said = {"role": "assistant", "content": [use, found, {"type": "text", "text": "Yes."}]}
    body = {"messages": [*HELLO, said, *HELLO], "max_tokens": 3}
    reply = client.post(MESSAGES, json={**body, "output_config": {"task_budget": {"total": 9}}})
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == "tools: server_tool_use, tools: web_search_tool_result"
    chat = MessagesRequest.model_validate(body).as_chat()
    assert [each.content for each in chat.messages] == ["hello", "Yes.", "hello"]


TWO: list[dict[str, Any]] = [
    {"type": "function", "function": {**FUNCTION, "name": name}} for name in ("a", "b")
]
NAMED = {"type": "function", "function": {"name": "b"}}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("any", "required", "ab"),
        ("b", NAMED, "ab"),
        (NAMED, NAMED, "ab"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            "required",
            "b",
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "a"}]}, "auto", "a"),
        ("none", "none", "ab"),
    ],
)
def test_choices_of_tools(choice: Any, expected: Any, names: str) -> None:
    body = {"messages": HELLO, "tools": TWO, "tool_choice": choice}
    chat = ChatRequest.model_validate(body)
    assert chat.tool_choice == expected
    assert "".join(each["function"]["name"] for each in chat.tools or ()) == names
    flat = [{"type": "function", **each["function"]} for each in TWO]
    if isinstance(choice, dict) and "mode" in choice:
        asked = ResponsesRequest.model_validate(
            {"input": "x", "tools": flat, "tool_choice": choice}
        )
        made = asked.as_chat(HELLO)
        assert (made.tool_choice, len(made.tools or ())) == (expected, len(names))


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_without_tools_asks_for_nothing(client: Any, choice: str) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "tools": [], "tool_choice": choice}
    post(client, CHAT, **body)
    assert client.post(CHAT, json={**body, "tool_choice": "required"}).status_code == 400


# ---- forms of other servers ----

SCHEMA = {"type": "object"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
STRUCTURAL = {**TAG, "type": "structural_tag"}
WORD = {"type": "regex", "regex": r"yes|no\?"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"guided_json": SCHEMA}, JSON_SCHEMA),
        ({"json_schema": SCHEMA}, JSON_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON_SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_SCHEMA),
        ({"structured_outputs": {"structural_tag": json.dumps(STRUCTURAL)}}, STRUCTURAL),
        ({"guided_structural_tag": TAG}, STRUCTURAL),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"structured_outputs": {"choice": ["yes", "no?"]}}, WORD),
        ({"guided_choice": ["yes", "no?"]}, WORD),
        ({"grammar": 'root ::= "a"'}, {"type": "ebnf", "grammar": 'root ::= "a"'}),
        ({"guided_grammar": 'root ::= "a"'}, {"type": "ebnf", "grammar": 'root ::= "a"'}),
    ],
)
def test_formats_of_other_servers_are_ours(asked: Any, expected: Any) -> None:
    for kind, body in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "x"})):
        assert kind.model_validate({**body, **asked}).response_format == expected


def test_what_asks_for_nothing_is_ignored_by_name(client: Any) -> None:
    """Unknown fields that are null, false or empty, and known ones that have to be null."""
    nothing: dict[str, Any] = {
        "unheard": None,
        "unseen": False,
        "unfelt": [],
        "functions": [],
        "audio": {},
    }
    for path, body in ((CHAT, {"messages": HELLO}), (RESPONSES, {"input": "x"})):
        reply = client.post(path, json={**body, **nothing})
        assert reply.status_code == 200, reply.text
        assert reply.headers[HEADER] == ", ".join(nothing)
    assert client.post(CHAT, json={"messages": HELLO, "unheard": 0}).status_code == 400


def test_results_of_the_old_functions_are_results(client: Any) -> None:
    result = {"role": "function", "name": "look_up", "content": "1815"}
    message = ChatRequest.model_validate({"messages": [*HELLO, result]}).messages[1]
    assert message.plain() == {**result, "role": "tool"}
    post(client, CHAT, messages=[*HELLO, result], max_tokens=2)


# ---- sampling and thinking, on every address ----


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_seed_gives_the_same_answer_again(client: Any, api: Any) -> None:
    more = {"temperature": 0.9, "seed": 5, "min_p": 0.01, "presence_penalty": 0.1}
    texts = [api.answer(client, 12, **{**more, "seed": seed}).text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == CHAT_API.answer(client, 12, **more).text


THOUGHT = "<think>Hm, ü.</think>\n\nYes."


def test_thinking_has_a_summary_and_is_kept_where_that_is_asked_for() -> None:
    events, (item, message) = written(THOUGHT, [], summarises=True, encrypts=True)
    assert item["summary"] == [{"type": "summary_text", "text": "Hm, ü."}]
    told = [each for each in events if "reasoning_summary" in each["type"]]
    assert [each["type"].rpartition(".")[2] for each in told] == ["added", "delta", "done", "done"]
    assert (told[1]["delta"], told[2]["text"]) == ("Hm, ü.", "Hm, ü.")
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    said = messages_of([*HELLO, sealed, message])
    assert said[1]["reasoning_content"] == "Hm, ü."
    for strange in ("gAAAAB", "****", "c3BlY3M="):
        said = messages_of([*HELLO, {**sealed, "encrypted_content": strange}, message])
        assert "reasoning_content" not in said[1]
    _, (item, _) = written(THOUGHT, [])
    assert (item["summary"], "encrypted_content" in item) == ([], False)


def test_what_a_request_says_of_thinking_shapes_its_reply() -> None:
    asked = {"input": "x", "reasoning": {"summary": "auto"}, "include": [ENCRYPTED]}
    request = ResponsesRequest.model_validate(asked)
    assert request.has_summary
    assert request.repeated()["reasoning"] == {"effort": None, "summary": "auto"}
    assert not ResponsesRequest.model_validate({"input": "x", "reasoning": {}}).has_summary


# ---- further addresses and names ----


def test_tokens_of_a_responses_input_are_counted(client: Any) -> None:
    body = {"input": HELLO, "instructions": "Be brief.", "tools": AGENTS["tools"]}
    answered = post(client, RESPONSES, **body, max_output_tokens=2)
    counted = post(client, f"{RESPONSES}/input_tokens", **body)
    assert counted["input_tokens"] == answered["usage"]["input_tokens"]
    assert counted["object"] == "response.input_tokens"
    more = {"input": "And?", "previous_response_id": answered["id"]}
    counted = post(client, f"{RESPONSES}/input_tokens", **more)
    told = post(client, RESPONSES, **more, max_output_tokens=2)
    assert counted["input_tokens"] == told["usage"]["input_tokens"]


def test_a_kept_response_is_not_streamed(client: Any) -> None:
    """A stream would end without an event; the error says what there is."""
    kept = post(client, RESPONSES, input="hello", max_output_tokens=2)["id"]
    assert client.get(f"{RESPONSES}/{kept}?stream=false").status_code == 200
    reply = client.get(f"{RESPONSES}/{kept}?stream=true")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stream"


def test_the_page_has_a_head(client: Any) -> None:
    assert client.head("/").status_code == 200


def test_models_are_listed_as_anthropics_clients_read_them(client: Any) -> None:
    asked = {"headers": {"anthropic-version": "2023-06-01"}}
    found = client.get("/v1/models", **asked).json()
    (model,) = found["data"]
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("toy", "toy", False)
    assert (model["type"], model["id"], model["display_name"]) == ("model", "toy", "toy")
    assert model["created_at"].endswith("Z")
    assert client.get("/v1/models/toy", **asked).json() == model
    assert client.get("/v1/models/toy").json()["object"] == "model"


def test_one_model_may_stand_for_every_name() -> None:
    with in_process(aliases=("*",)) as client:
        for name in ("gpt-9", "toy"):
            body = {"messages": HELLO, "max_tokens": 2, "model": name}
            assert post(client, CHAT, **body)["model"] == "toy"
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["toy"]


# ---- messages ----


def template_that(refuses: str) -> ChatTemplate:
    """Returns a template that refuses a message where this holds."""
    raising = f"{{% if {refuses} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    shown = "[{{ m.role }}]{{ m.content }}"
    return ChatTemplate(f"{{% for m in messages %}}{raising}{shown}{{% endfor %}}")


@pytest.mark.parametrize(
    ("refuses", "expected"),
    [
        ("false", "[system]a[system]b[user]hello[assistant]x[system]c[user]hello"),
        (
            "m.role == 'system' and not loop.first",
            "[system]a\n\nb\n\nc[user]hello[assistant]x[user]hello",
        ),
        ("m.role == 'system'", "[user]a\n\nb\n\nc\n\nhello[assistant]x[user]hello"),
    ],
)
def test_a_system_that_speaks_later_is_heard_first(refuses: str, expected: str) -> None:
    """As Codex and Claude Code have it, and templates of Qwen and Gemma refuse it."""
    a, b, c = ({"role": "system", "content": each} for each in "abc")
    talk = [a, b, *HELLO, {"role": "assistant", "content": "x"}, c, *HELLO]
    assert template_that(refuses).render(talk) == expected


@pytest.mark.parametrize("name", ["images", "audio", "videos"])
def test_pictures_beside_the_text_are_refused(client: Any, name: str) -> None:
    message = {"role": "user", "content": "hello"}
    reply = client.post(CHAT, json={"messages": [{**message, name: ["aGk="]}]})
    assert reply.status_code == 400
    assert name in reply.json()["error"]["message"]
    post(client, CHAT, messages=[{**message, name: []}], max_tokens=2)


@pytest.mark.parametrize(
    ("api", "kind"), [*zip(APIS, ("image_url", "input_file", "image"), strict=True)]
)
def test_a_picture_that_a_tool_gave_does_not_end_the_conversation(
    client: Any, api: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is told what it does not see, and the header names it."""
    result = GenerationResult(called("look_up", {"name": "Ada"}), [1], "stop", Stats(), form=HERMES)
    said, prompts = api.written(result, 9)[0], prompts_read(monkeypatch)
    told = {"type": "text", "text": f"[{kind}: left out, this model reads texts only]"}
    picture, text = {"type": kind, kind: "aGk="}, {"type": "text", "text": "hi"}
    for first, named in ((picture, f"results: {kind}"), (told, None)):
        body = api.body(2, messages=api.returned(said, [first, text]))
        reply = client.post(api.path, json=body)
        assert (reply.status_code, reply.headers.get(HEADER)) == (200, named), reply.text
    assert prompts[0] == prompts[1]


def test_a_refusal_that_was_said_is_text() -> None:
    parts = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "will not."}]
    assert plain_message({"role": "assistant", "content": parts})["content"] == "I will not."


# ---- what strangers send in these places ----


def test_a_header_has_a_few_names_and_no_line_of_its_own(client: Any) -> None:
    """Names of unknown fields are the client's: a header holds no line break, nor a megabyte."""
    odd: dict[str, Any] = {"a\r\nSet-Cookie: b": None, "ü": False, "x" * 500: [], "\ud800": None}
    body = {"messages": HELLO, "max_tokens": 2}
    content, kind = json.dumps({**body, **odd}), {"Content-Type": "application/json"}
    reply = client.post(CHAT, content=content.encode(), headers=kind)
    assert reply.status_code == 200
    assert reply.headers[HEADER] == rf"a\r\nSet-Cookie: b, \xfc, {'x' * 80}, \ud800"
    assert "set-cookie" not in reply.headers
    many = {f"f{i}": None for i in range(20_000)}
    found = client.post(CHAT, json={**body, **many}).headers[HEADER]
    assert found.split(", ") == [*many][:32]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": 3},
        {"tools": {"a": 1}},
        {"tools": [3]},
        {"tools": [{"function": {"name": ["x"]}}]},
        {"tools": [{"type": ["function"], "function": {}}]},
        {"guided_json": "x"},
        {"guided_regex": ["x"]},
        {"grammar": {"a": 1}},
        {"structured_outputs": {"choice": [1]}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"response_format": {**STRUCTURAL, "triggers": ["<g="]}},
        {"response_format": {**STRUCTURAL, "structures": [3]}},
        {"response_format": {"type": "json_object", "schema": 3}},
    ],
    ids=str,
)
@pytest.mark.parametrize("choice", ["x", "any", {"type": "allowed_tools", "allowed_tools": 3}])
def test_forms_of_others_that_are_none_are_refused(client: Any, more: Any, choice: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "tool_choice": choice, **more}
    assert client.post(CHAT, json=body).status_code == 400


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "namespace", "name": "a", "tools": [{"type": "function", **FUNCTION}] * 129}],
        [{"type": ["custom"]}],
        [{"type": "custom"}],
        [{"type": "custom", "name": "a b"}],
        [{"type": "namespace", "tools": [{"type": "namespace", "tools": [{}]}]}],
    ],
    ids=lambda tools: str(tools)[:40],
)
def test_tools_of_responses_that_are_none_are_refused(client: Any, tools: Any) -> None:
    reply = client.post(RESPONSES, json={"input": "x", "max_output_tokens": 2, "tools": tools})
    assert reply.status_code == 400, reply.text
