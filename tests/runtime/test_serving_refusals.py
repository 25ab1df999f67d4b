"""Tests what requests are refused, by the parameter and the code that programs read, and that each
refusal is one line for people."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apis import APIS, COMPLETIONS_API, FUNCTION, Api
from pydantic import BaseModel
from served import CHAT, COMPLETIONS, HELLO, MESSAGES, in_process
from toy_bundle import patch_graphs, write_bundle

import spec_runtime
from spec_runtime.serve.anthropic.requests import MessagesRequest
from spec_runtime.serve.errors import FIELDS as FIELDS_ELSEWHERE
from spec_runtime.serve.openai.schemas import ChatRequest, CompletionRequest
from spec_runtime.serve.responses.requests import ResponsesRequest

CHAT_API, RESPONSES_API, MESSAGES_API = APIS
JSON = {"Content-Type": "application/json"}
LONG = "x" * 310
LOGPROBS = "message.output_text.logprobs"
COUNT = f"{MESSAGES}/count_tokens"
VALUE, LENGTH, MISSING = "invalid_value", "context_length_exceeded", "missing_required_parameter"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with in_process(max_body=20_000, max_prompt=300) as made:
        yield made


def bare_deflate(data: bytes) -> bytes:
    """Returns what some clients send as "deflate", without zlib's head."""
    return zlib.compress(data)[2:-4]


REFUSING = (
    "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('so bad') }}{% endif %}"
    "{% if messages[-1]['content'] == 'worse' %}{{ messages + 1 }}{% endif %}a"
)


@pytest.mark.parametrize("word", ["bad", "worse"])
def test_what_a_template_refuses_is_told_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    patch_graphs(monkeypatch)
    write_bundle(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(REFUSING)
    engine = spec_runtime.load(tmp_path, "none", verify=False, profile=False)
    asked = [{"role": "user", "content": word}]
    with in_process(engine) as client:
        for api in APIS:
            for more in ({}, {"stream": True}):
                reply = client.post(api.path, json=api.body(messages=asked, **more))
                assert reply.status_code == 400
                assert "these messages: " in api.error(reply)["message"]
                assert str(tmp_path) not in reply.text
        reply = client.post(COUNT, json={"messages": asked})
        assert (reply.status_code, str(tmp_path) in reply.text) == (400, False)
        reply = client.post("/tokenize", json={"messages": asked})
        assert (reply.status_code, str(tmp_path) in reply.text) == (400, False)


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_what_is_not_installed_is_told_without_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    """It names the environment's programs by their paths."""
    patch_graphs(monkeypatch)
    engine = spec_runtime.load(write_bundle(tmp_path), "none", profile=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with in_process(engine) as client:
        reply = client.post(api.path, json=api.body(schema={"type": "object"}))
        assert reply.status_code == 400
        assert "llguidance is not installed" in api.error(reply)["message"]
        assert "install " not in reply.text


@pytest.mark.parametrize("api", [*APIS, COMPLETIONS_API], ids=lambda api: api.name)
def test_a_bundle_that_is_damaged_meanwhile_is_no_clients_fault_nor_concern(
    tmp_path: Path, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """The drafter, which is opened when it is first asked for."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    tiny_bundle = pytest.importorskip("tiny_bundle")
    folder = tiny_bundle.write(tmp_path / "tiny")
    engine = spec_runtime.load(folder, "none", profile=False, threads=1)
    (folder / "drafters/parallelspec/drafter.onnx").write_bytes(b"damaged")
    with in_process(engine) as client:
        for more in ({}, {"stream": True}):
            reply = client.post(api.path, json=api.body(drafter="parallelspec", **more))
            assert reply.status_code == 500
            assert "Its log says more" in api.error(reply)["message"]
            assert str(tmp_path) not in reply.text
            assert "drafter.onnx" in caplog.text
        assert client.post(api.path, json=api.body()).status_code == 200


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    " deflate ": bare_deflate,
    "identity": bytes,
    "": bytes,
}


@pytest.mark.parametrize("api", [*APIS, COMPLETIONS_API], ids=lambda api: api.name)
@pytest.mark.parametrize("encoding", PACKED)
def test_a_compressed_body_is_read(client: Any, api: Api, encoding: str) -> None:
    asked = json.dumps(api.body(temperature=0)).encode()
    headers = JSON | {"Content-Encoding": encoding}
    reply = client.post(api.path, content=PACKED[encoding](asked), headers=headers)
    assert reply.status_code == 200, reply.text
    plain = client.post(api.path, content=asked, headers=JSON)
    assert api.read(reply.json()).text == api.read(plain.json()).text


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_a_compressed_body_that_cannot_be_read_is_said(client: Any, api: Api) -> None:
    packed = gzip.compress(json.dumps(api.body()).encode())

    def refused(status: int, fragment: str, encoding: str, content: bytes) -> None:
        headers = JSON | {"Content-Encoding": encoding}
        reply = client.post(api.path, content=content, headers=headers)
        assert (reply.status_code, fragment in api.error(reply)["message"]) == (status, True)
        known = reply.headers.get("accept-encoding")
        assert known == ("gzip, x-gzip, deflate" if status == 415 else None)

    for encoding in ("zstd", "br", "gzip, gzip", "x" * 500):
        refused(415, f"got Content-Encoding '{encoding[:60]}", encoding, packed)
    twice = [("Content-Encoding", "identity"), ("Content-Encoding", "gzip"), *JSON.items()]
    reply = client.post(api.path, content=packed, headers=twice)
    assert reply.status_code == 415
    refused(400, "is not gzip", "gzip", b"{}")
    refused(400, "is not deflate", "deflate", b"\xff\xff")
    refused(400, "not one whole gzip stream", "gzip", packed[:-4])
    refused(400, "not one whole gzip stream", "gzip", packed + packed)
    refused(400, "We could not parse", "gzip", gzip.compress(b"{"))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_grows_is_bounded_as_a_plain_one_is(client: Any, encoding: str) -> None:
    bomb = PACKED[encoding](bytes(10_000_000))
    assert len(bomb) < 20_000
    headers = JSON | {"Content-Encoding": encoding}
    tracemalloc.start()
    reply = client.post(CHAT, content=bomb, headers=headers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert peak < 2_000_000
    full = json.dumps(COMPLETIONS_API.body()).encode()
    whole = PACKED[encoding](full + b" " * (20_000 - len(full)))
    assert client.post(COMPLETIONS, content=whole, headers=headers).status_code == 200
    more = PACKED[encoding](full + b" " * (20_001 - len(full)))
    assert client.post(COMPLETIONS, content=more, headers=headers).status_code == 413


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SHOWN = {"type": "input_image", "image_url": "https://example.com/a.png"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"name": "Ada"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": 3}
TOOL = {"name": "look_up", "input_schema": {}}
Row = tuple[dict[str, Any], str | None, str | None]
# Of Anthropic's API, also where tokens are counted: its errors have no parameter and no code.
COUNTED: list[Row] = [
    ({"messages": []}, None, "'messages'"),
    ({"messages": None}, None, "'messages'"),
    ({"messages": [{"role": "king", "content": "x"}]}, None, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, None, "messages[0].content"),
    (said(IMAGE), None, "type 'image' in messages[1].content[0]"),
    (said({"type": "text", "text": "a"}, {"type": "document"}), None, "messages[1].content[1]"),
    (said({"type": "search_result"}), None, "'search_result' in messages[1].content[0]"),
    (said({"type": ["text"]}), None, "['text']"),
    (said({"text": "x"}), None, "type None"),
    (said({"type": "text"}), None, "expected a text block with a text"),
    (said(USE), None, "'tool_use'"),
    (said(RESULT, role="assistant"), None, "'tool_result'"),
    (said({**USE, "input": "{}"}, role="assistant"), None, "an object as input"),
    (said(USE, role="assistant"), None, "a last message of the assistant's"),
    ({"messages": [{"role": "assistant", "content": "I am"}]}, None, "nothing before it"),
    (said({"type": "tool_result"}), None, "its tool_use_id"),
    (said({**RESULT, "content": [USE]}), None, "messages[1].content[0].content[0]"),
    (said({**RESULT, "content": 3}), None, "expected a text or blocks"),
    (said({**RESULT, "content": ["x"]}), None, "expected a text or blocks"),
    ({"system": [IMAGE]}, None, "system[0]"),
    ({"tools": [{"name": "look up", "input_schema": {}}]}, None, "look up"),
    ({"tools": [{"name": "look_up"}]}, None, "input_schema"),
    ({"tools": [{"input_schema": {}}]}, None, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, None, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, None, "expected a name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "look_up"}}, None, "expected a name"),
    ({"tool_choice": {"type": "auto"}}, None, "'tools' are specified"),
    ({"mcp_servers": [{}]}, None, "mcp_servers"),
    ({"colour": "red"}, None, "colour"),
]
# What a request that says hello has as well or instead, the parameter that is wrong, and the code;
# of errors without a parameter, words of the message.
REFUSED: dict[Api, list[Row]] = {
    CHAT_API: [
        ({"messages": None}, "messages", VALUE),
        ({"messages": []}, "messages", VALUE),
        ({"colour": 1}, "colour", None),
        ({"max-tokens": 3}, "max-tokens", None),
        ({"str": 3}, "str", None),
        ({"functions": [1]}, "functions", VALUE),
        (
            {"stream": True, "stream_options": {"usage please": True}},
            *("stream_options.usage please", None),
        ),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", VALUE),
        ({"messages": [{"role": "user"}]}, "messages", VALUE),
        ({"messages": [{"role": "user", "content": LONG}]}, "messages", LENGTH),
        ({"top_logprobs": 2}, None, "only allowed when 'logprobs' is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
        ({"max_tokens": 0}, "max_tokens", VALUE),
        ({"max_tokens": None, "max_completion_tokens": -2}, "max_completion_tokens", VALUE),
        ({"add_special_tokens": True}, "add_special_tokens", VALUE),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", VALUE),
        ({"min_tokens": 5, "response_format": {"type": "json_object"}}, None, "'min_tokens' is"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", VALUE),
        ({"n_predict": 4}, "n_predict", None),
        ({"temprature": 1}, "temprature", None),
        ({"typical_p": 0.9}, "typical_p", None),
        ({"draft_model": "small"}, "draft_model", None),
        ({"guided_json": True, "response_format": {"type": "text"}}, "guided_json", None),
        ({"guided_choice": "ab"}, None, "expected a list of texts"),
        ({"structured_outputs": {"regex": "a", "json": True}}, "structured_outputs", None),
        ({"max_tokens": 1, "max_completion_tokens": 1}, None, "'max_completion_tokens' exclude"),
        ({"stream_options": {}, "stream": False}, None, "only allowed when 'stream' is true."),
        ({"n": 9}, "n", VALUE),
        ({"stop": [*"abcdefghijklmnopq"]}, "stop", VALUE),
        ({"stop": [""]}, "stop", VALUE),
        ({"stream": "yes"}, "stream", VALUE),
        ({"modalities": ["audio"]}, "modalities[0]", VALUE),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"drafter": "hydra"}, "drafter", "unknown_drafter"),
        ({"tools": [{"type": "function"}]}, "tools", VALUE),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any"}, "tools": [{}]}, None, "a mode"),
        ({"tool_choice": "any"}, None, "only allowed when 'tools' are specified."),
    ],
    COMPLETIONS_API: [
        ({"temperature": 2.5}, "temperature", VALUE),
        ({"temperature": "1"}, "temperature", VALUE),
        ({"top_p": -1}, "top_p", VALUE),
        ({"seed": 1.5}, "seed", VALUE),
        ({"logprobs": 6}, "logprobs", VALUE),
        ({"best_of": 3}, None, "'best_of' has to equal 'n'"),
        ({"suffix": "y"}, "suffix", VALUE),
        ({"top_k": -2}, "top_k", VALUE),
        ({"min_tokens": 17, "max_tokens": None}, "min_tokens", VALUE),
        ({"max_tokens": 1, "max_completion_tokens": 1}, None, "'max_completion_tokens' exclude"),
        ({"content": "x"}, "content", None),
        ({"prompt": []}, None, "got prompt [], expected at least one prompt"),
        ({"prompt": ["x"] * 9}, "n", VALUE),
        ({"prompt": [1, 999]}, "prompt", VALUE),
        ({"prompt": [99999999999], "echo": True}, "prompt", VALUE),
        ({"prompt": {"a": 1}}, "prompt", VALUE),
        ({"prompt": LONG}, "prompt", LENGTH),
        ({"prompt": "x" * 2000}, "prompt", LENGTH),
        ({"prompt": "\ud800"}, "prompt", VALUE),
        ({"prompt": "", "add_special_tokens": False}, "prompt", VALUE),
        ({"logit_bias": {"5": 101}}, "logit_bias", VALUE),
        ({"response_format": {"type": "poem"}}, "response_format", VALUE),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"drafter": "hydra"}, "drafter", "unknown_drafter"),
    ],
    RESPONSES_API: [
        ({"input": None}, "input", VALUE),
        ({"input": []}, "input", VALUE),
        ({"input": [{"role": "user", "content": [SHOWN]}]}, "input", VALUE),
        ({"input": [{"role": "user"}]}, "input", VALUE),
        ({"input": [{"role": "king", "content": "x"}]}, "input", VALUE),
        ({"input": [*HELLO, {"type": "item_reference"}]}, "input", VALUE),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", VALUE),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", VALUE),
        ({"input": [OUTPUT]}, "input", VALUE),
        ({"input": LONG}, "input", LENGTH),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_not_found"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "response_not_found"),
        ({"tools": [{"name": "x"}]}, None, "expected one with a type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", VALUE),
        ({"tool_choice": "required"}, None, "only allowed when 'tools' are specified."),
        ({"top_logprobs": 2}, None, f"only allowed when 'include' has '{LOGPROBS}'"),
        ({"background": True}, "background", VALUE),
        ({"truncation": "x"}, "truncation", VALUE),
        ({"conversation": "c"}, "conversation", VALUE),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs", VALUE),
        ({"max_output_tokens": 0}, "max_output_tokens", VALUE),
        ({"temperature": 3}, "temperature", VALUE),
        ({"metadata": {"a": 1}}, "metadata.a", VALUE),
        ({"messages": HELLO}, "messages", None),
        ({"model": "gpt"}, "model", "model_not_found"),
        ({"drafter": "hydra"}, "drafter", "unknown_drafter"),
    ],
    MESSAGES_API: [
        *COUNTED,
        (said({"type": "text", "text": "\ud800"}), None, "surrogate"),
        ({"max_tokens": None}, None, "max_tokens"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"temperature": 1.5}, None, "temperature"),
        ({"top_k": -2}, None, "top_k"),
        ({"top_p": 2}, None, "top_p"),
        ({"stop_sequences": "x"}, None, "stop_sequences"),
        ({"stop_sequences": [""]}, None, "stop_sequences"),
        ({"stop_sequences": 65 * ["x"]}, None, "stop_sequences"),
        ({"stream": "yes"}, None, "stream"),
        ({"container": "c"}, None, "container"),
        ({"messages": [{"role": "user", "content": LONG}]}, None, "prompt is too long"),
        ({"messages": [{"role": "user", "content": "x" * 900}]}, None, "prompt is too long"),
    ],
}


def format_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **more}}


FLY = {"name": "fly"}
# Of an engine that can keep answers inside grammars: in a request with a tool.
UNKEPT: dict[Api, list[Row]] = {
    CHAT_API: [
        (format_of("xml"), "response_format", VALUE),
        (format_of("regex", regex="("), "response_format", VALUE),
        (format_of("regex"), "response_format", VALUE),
        (format_of("json_schema"), "response_format", VALUE),
        (format_of("ebnf", grammar="x"), "response_format", VALUE),  # beside tools
        (format_of("json_schema", json_schema={"schema": {"not": {}}}), "response_format", VALUE),
        ({"tool_choice": "perhaps"}, "tool_choice", VALUE),
        ({"tool_choice": {"type": "function", "function": FLY}}, "tool_choice", VALUE),
    ],
    RESPONSES_API: [
        ({"text": {"format": {"type": "xml"}}}, "text.format", VALUE),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", VALUE),
        ({"tool_choice": "perhaps"}, "tool_choice", VALUE),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", VALUE),
        ({"tool_choice": {"type": "function", **FLY}}, "tool_choice", VALUE),
    ],
    MESSAGES_API: [
        ({"output_config": {"format": {"type": "xml"}}}, None, "'xml'"),
        ({"tool_choice": {"type": "tool", **FLY}}, None, "'fly', expected one of look_up"),
    ],
}


ROWS = [(api, "client", *row) for api, rows in REFUSED.items() for row in rows]
ROWS += [(api, "calling", *row) for api, rows in UNKEPT.items() for row in rows]


def asked(client: Any, api: Api, body: dict[str, Any], path: str = "") -> Any:
    """Sends JSON that may hold half a character, which httpx would not write."""
    return client.post(path or api.path, content=json.dumps(body), headers=JSON)


# Refusals of other kinds than a value: of fields, and of two that do not go together.
FIELDS = re.compile(
    r"Unrecognized request argument supplied: |Missing required parameter: '[^']+'\.$"
    r"|'\w+' (is (only|not) allowed |has to equal )|'\w+' and '\w+' exclude each other"
    r"|The model `.*` does not exist; this server has `|(Item|Response) with id '\w+' not found: "
)


@pytest.mark.parametrize(("api", "name", "more", "param", "said"), ROWS)
def test_what_is_refused(
    request: Any, api: Api, name: str, more: Any, param: str | None, said: str | None
) -> None:
    """In one line, with what was got and expected."""
    client, tools = request.getfixturevalue(name), [FUNCTION] if name == "calling" else None
    bodies = [{**api.body(tools=tools, stream=each), **more} for each in (False, True)]
    replies = [asked(client, api, body) for body in bodies]
    if (more, param, said) in COUNTED:
        replies.append(asked(client, api, {"messages": HELLO, **more}, COUNT))
    for reply in replies:
        error = api.error(reply)
        assert reply.status_code == (404 if (said or "").endswith("not_found") else 400)
        assert error["type"] == "invalid_request_error"
        assert param is not None or str(said) in error["message"]
        assert (error.get("param"), error.get("code")) == (param, said if param else None)
        message = error["message"]
        assert message.isprintable(), message
        assert re.search(r"got .+[,;] expected .", message) or FIELDS.match(message), message
        assert " should " not in message, "a library's words"


UNKNOWN = "Unrecognized request argument supplied: "
# One sentence of each kind.
SENTENCES: list[tuple[Api, dict[str, Any], str]] = [
    (CHAT_API, {"colour": 1}, f"{UNKNOWN}colour"),
    (CHAT_API, {"presence_penality": 1}, f"{UNKNOWN}presence_penality; use 'presence_penalty'"),
    (CHAT_API, {"stop_words": "a"}, f"{UNKNOWN}stop_words; use 'stop'"),
    (
        RESPONSES_API,
        {"reasoning_effort": "low"},
        f"{UNKNOWN}reasoning_effort; use 'reasoning.effort'",
    ),
    (CHAT_API, {"typical_p": 0.9}, f"{UNKNOWN}typical_p; here it is always 1"),
    (MESSAGES_API, {"n": 3}, f"{UNKNOWN}n"),
    (CHAT_API, {"messages": []}, "Invalid 'messages': got [], expected 1 or more items."),
    (CHAT_API, {"temperature": 3}, "Invalid 'temperature': got 3, expected at most 2."),
    (CHAT_API, {"stream": "yes"}, "Invalid 'stream': got 'yes', expected bool."),
    (
        RESPONSES_API,
        {"truncation": "x"},
        "Invalid 'truncation': got 'x', expected 'auto' or 'disabled'.",
    ),
    (CHAT_API, {"functions": [1]}, "Invalid 'functions': got [1], expected null; use 'tools'."),
    (
        CHAT_API,
        {"max_tokens": 0},
        "Invalid 'max_tokens': got 0, expected 1 or more, or -1 for as many as fit.",
    ),
    (CHAT_API, {"stop": [""]}, "got stop [''], expected 1 or more characters"),
    (CHAT_API, {"model": "gpt"}, "The model `gpt` does not exist; this server has `toy`."),
    (CHAT_API, {"drafter": "no"}, "got drafter 'no', expected one of parallelspec, none"),
    (CHAT_API, {"n": 9}, "got 9 answers in one request, expected at most 8"),
    (COMPLETIONS_API, {"prompt": [1, 999]}, "got token ids from 1 to 999, expected 0 to 257"),
    (
        MESSAGES_API,
        {"messages": [{"role": "user", "content": LONG}]},
        "prompt is too long: got a prompt of 331 tokens, expected at most 300 at this server",
    ),
]


@pytest.mark.parametrize(("api", "more", "sentence"), SENTENCES)
def test_a_sentence_of_each_kind(client: Any, api: Api, more: Any, sentence: str) -> None:
    assert api.error(asked(client, api, {**api.body(), **more}))["message"] == sentence


def test_a_hint_names_a_field_that_the_address_takes(client: Any) -> None:
    """Of every field of the four schemas, sent to each address, and of those of other servers; a
    hint is about a field that the request has not, and following it leads to no other hint."""
    kinds: dict[Api, type[BaseModel]] = {
        CHAT_API: ChatRequest,
        COMPLETIONS_API: CompletionRequest,
        RESPONSES_API: ResponsesRequest,
        MESSAGES_API: MessagesRequest,
    }
    names = {*FIELDS_ELSEWHERE}.union(*(kind.model_fields for kind in kinds.values()))
    num_hints = 0
    for api, kind in kinds.items():
        body = api.body()
        for name in sorted(names):
            reply = client.post(api.path, json={**body, name: 7})
            if reply.status_code == 200:
                continue
            for hint in re.findall(r"; use '([\w.]+)'", api.error(reply)["message"]):
                field = hint.partition(".")[0]
                assert field in kind.model_fields, (api.name, name, hint)
                assert kind.model_fields[field].annotation is not type(None), (api.name, name, hint)
                assert field not in body, (api.name, name, hint)
                assert field != name, (api.name, name, hint)
                num_hints += 1
    assert num_hints > 60


def test_a_field_that_is_missing(client: Any) -> None:
    for api, name in (
        (CHAT_API, "messages"),
        (RESPONSES_API, "input"),
        (COMPLETIONS_API, "prompt"),
    ):
        error = api.error(asked(client, api, {}))
        assert error["message"] == f"Missing required parameter: '{name}'."
        assert (error["param"], error["code"]) == (name, MISSING)


# ---- bodies ----


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": [',
        b'"\xff\xfe\xc3"',
        b'{"messages": "\xff"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 15_000,
        b'{"prompt": NaN}',
        b"\x00\x01",
        json.dumps({"messages": HELLO}).encode(),  # of the kind that other sites' pages may send
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_body_that_is_no_json_object_is_refused(client: Any, data: bytes) -> None:
    kinds = ("application/json", "text/plain")
    for kind in kinds[data.endswith(b"}]}") :]:
        reply = client.post(CHAT, content=data, headers={"Content-Type": kind})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_too_large_is_refused(
    client: Any, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And read up to the limit, however large that is."""

    def status(data: bytes) -> int:
        content: Any = iter([data[:1000], data[1000:]]) if is_chunked else data
        return int(client.post(COMPLETIONS, content=content, headers=JSON).status_code)

    exact = json.dumps({"prompt": "x"}).encode()
    padded = exact + b" " * (20_000 - len(exact))
    for most in (None, 10):
        if most:
            monkeypatch.setattr("spec_runtime.serve.guards.MOST_DISCARDED", most)
        assert (status(padded), status(padded + b" "), status(padded * 15)) == (200, 413, 413)


@pytest.mark.parametrize(
    ("path", "what", "expected"),
    [
        ("/chat/completions", "misses /v1", CHAT),
        ("/messages", "misses /v1", MESSAGES),
        ("/v1/v1/messages", "has one /v1 too many", MESSAGES),
        ("/v1/v1/v1/chat/completions", "has one /v1 too many", CHAT),
        ("/v1/tokenize", "has one /v1 too many", "/tokenize"),
    ],
)
def test_a_base_address_with_too_few_or_too_many_versions_is_told_so(
    client: Any, path: str, what: str, expected: str
) -> None:
    reply = client.post(path, json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")
    message = reply.json()["error"]["message"]
    assert f"got an address that {what}, expected {expected};" in message


@pytest.mark.parametrize("path", ["/v1/v1", "/v1", "/v1nothing", "/nothing", "/v1/v1/nothing"])
def test_an_address_that_is_none_by_any_base_is_only_refused(client: Any, path: str) -> None:
    message = client.post(path, json={}).json()["error"]["message"]
    assert message == f"Invalid URL (POST {path})"
