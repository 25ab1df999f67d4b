"""Tests what the server answers: OpenAI's replies, streams and errors, by a toy engine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import small
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    choice_of,
    events,
    held,
    metrics,
    post,
    served,
    stream,
    toy_engine,
    wait_until,
)
from toy_backend import ByteTokenizer

from spec_runtime import TokenLogprob
from spec_runtime.serve.openai.replies import TokenTexts

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served(max_body=20_000, max_prompt=300) as running, running.client() as made:
        yield made


# ---- answers ----


def test_a_chat_is_answered_as_by_the_engine_whole_or_streamed(client: Any) -> None:
    engine = toy_engine()
    expected = engine.generate(HELLO, max_new_tokens=30)
    body = {"messages": HELLO, "max_completion_tokens": 30, "temperature": 0, "model": "toy"}
    reply = post(client, CHAT, **body)
    assert reply["object"] == "chat.completion"
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(engine.encode(HELLO))
    assert usage["completion_tokens"] == 30
    assert usage["total_tokens"] == usage["prompt_tokens"] + 30

    *parts, last, done = stream(client, CHAT, **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30
    assert all(part["usage"] is None for part in parts)
    assert {part["id"] for part in [*parts, last]} == {last["id"]}
    choices = [part["choices"][0] for part in parts]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"].get("content", "") for each in choices) == expected.text
    assert [each["finish_reason"] for each in choices] == [None] * (len(parts) - 1) + ["length"]
    assert len(parts) < 30, "several tokens come in one part where the drafter was right"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.9, "seed": 6, "top_p": 0.7},
        {"temperature": 1.0, "seed": 7, "top_k": 3, "min_p": 0.01},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0, "logit_bias": {65: 50}},
    ],
)
def test_sampling_is_the_engines(client: Any, sampling: dict[str, Any]) -> None:
    expected = toy_engine().generate("hello", raw=True, max_new_tokens=12, **sampling)
    assert choice_of(client, COMPLETIONS, **{**BODY, **sampling})["text"] == expected.text


def test_without_a_temperature_it_is_one(client: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
    default, one, greedy = (
        choice_of(client, COMPLETIONS, **body, **more)["text"]
        for more in ({}, {"temperature": 1}, {"temperature": 0})
    )
    assert default == one != greedy


def test_a_stop_string_ends_the_answer(client: Any) -> None:
    body = {**BODY, "max_tokens": 40}
    text = choice_of(client, COMPLETIONS, **body)["text"]
    stop = text[10:12]
    choice = choice_of(client, COMPLETIONS, **body, stop=stop)
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    others = [f"no {number}" for number in range(15)]
    assert choice_of(client, COMPLETIONS, **body, stop=[*others, stop]) == choice


def test_choices_of_several_prompts(client: Any) -> None:
    body = {"max_tokens": 6, "temperature": 1.5, "seed": 11}
    reply = post(client, COMPLETIONS, prompt=["one", "two"], n=2, **body)
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert texts == [
        choice_of(client, COMPLETIONS, prompt=prompt, **{**body, "seed": seed})["text"]
        for prompt in ("one", "two")
        for seed in (11, 12)
    ]
    assert len(set(texts)) == 4
    assert reply["usage"]["prompt_tokens"] == 8  # each prompt once: three letters and BOS
    assert reply["usage"]["completion_tokens"] == 24
    streamed = ["", "", "", ""]
    for part in stream(client, COMPLETIONS, prompt=["one", "two"], n=2, **body)[:-1]:
        streamed[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert streamed == texts


def test_cached_tokens_are_those_of_all_prompts() -> None:
    with served() as running, running.client() as client:
        counts = []
        for prompt in ("one two", ["one two", "one three"]):
            usage = post(client, COMPLETIONS, prompt=prompt, n=2, max_tokens=6)["usage"]
            counts.append(usage["prompt_tokens_details"]["cached_tokens"])
    # what the prompts share with what was read before, BOS too; the last such token is read anew
    assert counts == [0, len("one two") + len("one t")]


def test_a_prompt_may_be_token_ids_and_is_echoed(client: Any) -> None:
    ids = toy_engine().encode("hello", raw=True)
    text = choice_of(client, COMPLETIONS, **BODY)["text"]
    assert choice_of(client, COMPLETIONS, **{**BODY, "prompt": ids})["text"] == text
    assert choice_of(client, COMPLETIONS, **BODY, echo=True)["text"] == "hello" + text
    parts = stream(client, COMPLETIONS, **{**BODY, "prompt": [ids]}, echo=True)[:-1]
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello" + text


@pytest.mark.parametrize("is_stream", [False, True])
def test_ids_that_are_no_tokens_are_refused_before_they_are_echoed(
    client: Any, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    decode = ByteTokenizer.decode

    def decode_strictly(self: ByteTokenizer, ids: Sequence[int]) -> str:
        assert max(ids) < self.vocab_size, "real tokenizers raise an error as well"
        return decode(self, ids)

    monkeypatch.setattr(ByteTokenizer, "decode", decode_strictly)
    body = {"prompt": [99999999999], "echo": True, "max_tokens": 2, "stream": is_stream}
    reply = client.post(COMPLETIONS, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "prompt"


def test_logprobs_of_a_chat_are_the_engines(client: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "temperature": 0}
    expected = toy_engine().generate(HELLO, max_new_tokens=9, logprobs=2).logprobs
    assert expected is not None
    entries = choice_of(client, CHAT, **body, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx([e.logprob for e in expected])
    for entry, ours in zip(entries, expected, strict=True):
        assert entry["token"] == entry["top_logprobs"][0]["token"], "greedy"
        assert entry["bytes"] == ([ours.token_id] if ours.token_id < 128 else None)
        assert len(entry["top_logprobs"]) == 2
    parts = stream(client, CHAT, **body, logprobs=True, top_logprobs=2)[:-1]
    streamed = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for each in streamed if each for entry in each["content"]] == entries
    assert choice_of(client, CHAT, **body)["logprobs"] is None


@pytest.fixture(scope="module")
def letters() -> Iterator[Any]:
    """Returns a client of an engine whose tokens are letters."""
    with served(small.toy_engine()) as running, running.client() as made:
        yield made


@pytest.mark.parametrize("has_stop", [False, True])
def test_logprobs_of_a_completion(letters: Any, has_stop: bool) -> None:
    """Whole and streamed: the tokens shown are those of the text, and no more."""
    text = choice_of(letters, COMPLETIONS, **BODY)["text"]
    stop = text[4:7]
    body = {**BODY, "logprobs": 1, "stop": [stop] if has_stop else []}
    choice = choice_of(letters, COMPLETIONS, **body)
    found = choice["logprobs"]
    count = text.index(stop) if has_stop else len(text)
    assert "".join(found["tokens"]) == choice["text"] == text[:count]
    assert found["text_offset"] == list(range(count))
    pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
    assert found["top_logprobs"] == [{token: logprob} for token, logprob in pairs]
    parts = [part["choices"][0] for part in stream(letters, COMPLETIONS, **body)[:-1]]
    assert len(parts) > 2
    for key, values in found.items():
        assert [each for part in parts for each in (part["logprobs"] or {key: []})[key]] == values


class Alike(ByteTokenizer):
    """Has a token 1 whose text is that of "a", and half a character, 200."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([ord("a") if i == 1 else i for i in ids])


def test_of_tokens_with_one_text_none_is_lost() -> None:
    texts = TokenTexts(Alike(), frozenset())
    entry = TokenLogprob(1, -0.5, [(1, -0.5), (ord("a"), -1.5), (200, -2.5), (201, -3.5)])
    found = texts.completion([(entry, 7)], 3)
    half = "\ufffd"
    expected = {"a": -0.5, "token_id:97": -1.5, half: -2.5, "token_id:201": -3.5}
    assert found["top_logprobs"] == [expected]
    assert found["text_offset"] == [10]
    (content,) = texts.chat([(entry, 7)])["content"]
    assert [top["logprob"] for top in content["top_logprobs"]] == [-0.5, -1.5, -2.5, -3.5]


class Spaced(ByteTokenizer):
    """Drops the space before its first word, as SentencePiece does."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


def test_a_tokens_text_has_its_space() -> None:
    (entry,) = TokenTexts(Spaced(), frozenset()).chat([(TokenLogprob(32, -1.0, []), 0)])["content"]
    assert (entry["token"], entry["bytes"]) == (" ", [32])


def test_the_token_that_ends_an_answer_has_no_logprob(client: Any) -> None:
    body = {"messages": HELLO, "temperature": 0, "logprobs": True, "logit_bias": {"257": 100}}
    choice = choice_of(client, CHAT, **body)
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == []


def test_a_developers_message_is_the_systems(client: Any) -> None:
    def num_prompt_tokens(role: str) -> int:
        messages = [{"role": role, "content": "be brief"}, *HELLO]
        return int(post(client, CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"])

    assert num_prompt_tokens("developer") == num_prompt_tokens("system")
    assert num_prompt_tokens("system") == num_prompt_tokens("user") + len("system") - len("user")


def test_health_and_readiness(client: Any) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == client.get("/health").headers["content-length"]
    assert client.get("/ready").json() == {"status": "ready"}
    assert {CHAT, COMPLETIONS} <= set(client.get("/openapi.json").json()["paths"])


# ---- refusals ----

LONG = "x" * 310
# Fields that a chat which says hello has as well or instead, the wrong one, and the message.
REFUSED_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": None}, "messages", "Invalid 'messages': got None"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"colour": 1}, "colour", "Unrecognized request argument"),
    ({"max-tokens": 3}, "max-tokens", "supplied: max-tokens"),
    ({"str": 3}, "str", "supplied: str"),
    ({"functions": []}, "functions", "'functions'"),
    (
        {"stream": True, "stream_options": {"usage please": True}},
        "stream_options.usage please",
        "supplied: stream_options.usage please",
    ),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "'king'"),
    ({"messages": [{"role": "user"}]}, "messages", "expected a string or a list"),
    ({"messages": [{"role": "user", "content": LONG}]}, "messages", "at most 300"),
    ({"top_logprobs": 2}, None, "'logprobs' is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_completion_tokens": -2}, "max_completion_tokens", "equal to -1"),
    ({"add_special_tokens": True}, "add_special_tokens", "False"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most the 4 tokens"),
    ({"min_tokens": 5, "response_format": {"type": "json_object"}}, None, "'response_format'"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "use 'echo' with 'logprobs' at /v1/completions"),
    ({"n_predict": 4}, "n_predict", "supplied: n_predict; use 'max_tokens'"),
    ({"temprature": 1}, "temprature", "supplied: temprature; use 'temperature'"),
    ({"typical_p": 0.9}, "typical_p", "supplied: typical_p; here it is always 1"),
    ({"draft_model": "small"}, "draft_model", "supplied: draft_model; use 'drafter'"),
    ({"guided_json": {}}, "guided_json", "use 'response_format' of type 'json_schema'"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, None, "exclude"),
    ({"stream_options": {}, "stream": False}, None, "'stream' is true"),
    ({"n": 9}, "n", "at most 8"),
    ({"stop": [*"abcdefghijklmnopq"]}, "stop", "at most 16 items"),
    ({"stop": [""]}, "stop", "got stop ['']"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"modalities": ["audio"]}, "modalities[0]", "'audio'"),
]
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": 2.5}, "temperature", "equal to 2"),
    ({"temperature": "1"}, "temperature", "'1'"),
    ({"top_p": -1}, "top_p", "equal to 0"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"logprobs": 6}, "logprobs", "equal to 5"),
    ({"best_of": 3}, None, "'best_of' has to equal 'n'"),
    ({"suffix": "y"}, "suffix", "'y', input should be None; use a 'prompt'"),
    ({"top_k": -2}, "top_k", "equal to -1"),
    ({"min_tokens": 17}, "min_tokens", "at most the 16 tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, None, "exclude"),
    ({"content": "x"}, "content", "use 'prompt'"),
    ({"prompt": []}, None, "at least one prompt"),
    ({"prompt": ["x"] * 9}, "n", "at most 8"),
    ({"prompt": [1, 999]}, "prompt", "expected 0 to 257"),
    ({"prompt": {"a": 1}}, "prompt", "{'a': 1}"),
    ({"prompt": LONG}, "prompt", "at most 300 tokens"),
    ({"prompt": "x" * 2000}, "prompt", "context"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "equal to 100"),
]
REFUSED = [
    *((CHAT, {"messages": HELLO, **more}, 400, *why) for more, *why in REFUSED_CHATS),
    *((COMPLETIONS, {"prompt": "x", **more}, 400, *why) for more, *why in REFUSED_COMPLETIONS),
    (CHAT, {}, 400, "messages", "Missing required parameter: 'messages'"),
    (CHAT, {"messages": HELLO, "model": "gpt"}, 404, "model", "`gpt` does not exist"),
    ("/v1/nothing", {}, 404, None, "Invalid URL (POST /v1/nothing)"),
    ("/health", {}, 405, None, "Invalid URL (POST /health)"),
]


@pytest.mark.parametrize(
    ("path", "what", "expected"),
    [
        ("/chat/completions", "misses /v1", CHAT),
        ("/messages", "misses /v1", "/v1/messages"),
        ("/v1/v1/messages", "has one /v1 too many", "/v1/messages"),
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


@pytest.mark.parametrize(("path", "body", "status", "param", "fragment"), REFUSED)
@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
def test_what_is_refused_says_why(
    client: Any,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    fragment: str,
    more: dict[str, Any],
) -> None:
    reply = client.post(path, content=json.dumps({**more, **body}), headers=JSON)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert fragment in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param


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
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_body_that_is_no_json_object_is_refused(client: Any, data: bytes) -> None:
    for kind in ("application/json", "text/plain"):
        reply = client.post(CHAT, content=data, headers={"Content-Type": kind})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_form_of_another_site_is_no_request(client: Any) -> None:
    """A page of another origin can send JSON as text/plain without asking first, and no other."""
    data = json.dumps({"messages": HELLO, "max_tokens": 1})
    reply = client.post(CHAT, content=data, headers={"Content-Type": "text/plain"})
    assert reply.status_code == 400
    reply = client.post(CHAT, content=data, headers=JSON)
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_too_large_is_refused(client: Any, is_chunked: bool) -> None:
    data = json.dumps({"prompt": "x" * 300_000}).encode()
    content: Any = iter([data[:1000], data[1000:]]) if is_chunked else data
    reply = client.post(COMPLETIONS, content=content, headers=JSON)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    exact = json.dumps({"prompt": "x"}).encode()
    padded = exact + b" " * (20_000 - len(exact))
    assert client.post(COMPLETIONS, content=padded, headers=JSON).status_code == 200
    assert client.post(COMPLETIONS, content=padded + b" ", headers=JSON).status_code == 413


def test_a_body_is_read_up_to_the_limit_however_large_that_is(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_runtime.serve.guards.MOST_DISCARDED", 10)
    assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert client.post(COMPLETIONS, json={"prompt": "x" * 20_000}).status_code == 413


# ---- who may ask ----


def test_an_api_key_is_required_and_only_known_names_address_the_server() -> None:
    names = ("LocalHost", "127.0.0.1", "::1", "Proxy.Example.:443")
    with served(api_key="sésame", hosts=names) as running, running.client() as client:
        right = {b"Authorization": "Bearer sésame".encode()}
        basic = {b"Authorization": "Basic sésame".encode()}
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 401
            assert client.get(path, headers=basic).is_error
            assert client.get(path, headers=right).status_code == 200
        for path in ("/", "/health", "/ready"):
            assert client.get(path).status_code == 200
        reply = client.post(CHAT, json={"messages": HELLO})
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
        reply = client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}, headers=right)
        assert reply.status_code == 200

        known = ("localhost", "localhost:80", "[::1]:8000", "127.0.0.1")
        for host in (*known, "LOCALHOST", "localhost.:80", "proxy.example", "PROXY.example.:80"):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        strange = ("evil.example", "evil.example:8000", "[::2]", "localhost.evil.example", "")
        forged = ("[127.0.0.1]evil.com", "localhost:evil.com", "127.0.0.1:80@evil.com", "[::1]:8:0")
        broken = ("[localhost", "localhost]", "localhost/evil.com", "localhost, evil.com", "[]")
        for host in strange + forged + broken:
            reply = client.get("/health", headers={"Host": host})
            assert reply.status_code == 403, host
            assert reply.json()["error"]["code"] == "unknown_host"


# ---- metrics and logs ----


def test_metrics_count_what_was_done() -> None:
    def num_requests_but_metrics() -> float:
        counted = metrics(client).items()
        return sum(n for name, n in counted if "requests_total" in name and "metrics" not in name)

    with served() as running, running.client() as client:
        post(client, COMPLETIONS, prompt="hello", max_tokens=20, temperature=0)
        stream(client, COMPLETIONS, prompt="hello", max_tokens=10, temperature=0)
        client.post(COMPLETIONS, json={})
        client.get("/a/path/of/a/stranger")
        # a request is counted once its response is out, the stream's perhaps after the last one's
        wait_until(lambda: num_requests_but_metrics() == 4)
        values = metrics(client)

    assert values[f'requests_total{{path="{COMPLETIONS}",status="200"}}'] == 2
    assert values[f'requests_total{{path="{COMPLETIONS}",status="400"}}'] == 1
    assert values['requests_total{path="other",status="404"}'] == 1
    assert values['answers_total{finish_reason="length"}'] == 2
    assert values['tokens_total{kind="prompt"}'] == 12
    assert values['tokens_total{kind="completion"}'] == 30
    assert values['tokens_total{kind="reused"}'] == 5
    by_depth = [values[f'draft_accepts_total{{depth="{depth}"}}'] for depth in (1, 2, 3)]
    assert 0 < values['tokens_total{kind="accepted"}'] == sum(by_depth)
    assert by_depth[0] <= values['draft_trials_total{depth="1"}']
    assert values["first_token_seconds_count"] == values["prefill_seconds_count"] == 2
    assert values["queue_seconds_count"] == values["tokens_per_second_count"] == 2
    assert values["accepted_length_sum"] > 2
    assert values["step_seconds_count"] == values["steps_total"] > 0
    assert values['phase_seconds_total{phase="verify"}'] > 0
    assert values["running_requests"] == values["waiting_requests"] == values["open_streams"] == 0


def test_the_wait_for_the_engine_is_in_the_metrics() -> None:
    with held() as (_, client, runs), ThreadPoolExecutor(2) as pool:
        begun = time.monotonic()
        body = {"prompt": "hello", "max_tokens": 9, "temperature": 0}
        replies = [pool.submit(client.post, COMPLETIONS, json=body)]
        runs.wait_for_run()
        replies.append(pool.submit(client.post, COMPLETIONS, json=body))
        wait_until(lambda: metrics(client)["waiting_requests"] == 1)
        both_there = time.monotonic()
        time.sleep(0.05)
        waited = time.monotonic() - both_there
        runs.let_through()
        assert [each.result().status_code for each in replies] == [200, 200]
        seconds = time.monotonic() - begun
        values = metrics(client)
    assert values["queue_seconds_count"] == 2
    assert waited <= values["queue_seconds_sum"] <= 2 * seconds


@pytest.mark.parametrize(
    ("prompt", "n", "tokens"), [("secret", 1, (7, 3)), (["secret", "a secret"], 2, (16, 12))]
)
def test_the_access_log_counts_each_prompt_once_and_has_no_text(
    client: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    prompt: object,
    n: int,
    tokens: tuple[int, int],
) -> None:
    monkeypatch.setattr(logging.getLogger("spec_runtime.access"), "propagate", True)
    with caplog.at_level(logging.INFO, "spec_runtime.access"):
        body = {"prompt": prompt, "n": n, "max_tokens": 3, "temperature": 0}
        reply = client.post(COMPLETIONS + "?q=secret", json=body)
        bad = client.post(COMPLETIONS, json={"prompt": "secret", "secret": 1})
        wait_until(lambda: len(caplog.records) == 2)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    first, second = sorted(lines, key=lambda line: line["status"])  # 200 and 400
    assert first["id"] == reply.headers["x-request-id"] != bad.headers["x-request-id"]
    assert (first["path"], first["status"], first["method"]) == (COMPLETIONS, 200, "POST")
    assert (first["prompt_tokens"], first["completion_tokens"]) == tokens
    assert first["finish_reason"] == "length"
    assert second["status"] == 400
    assert "secret" not in caplog.text


def test_a_mistake_of_ours_is_an_error_without_details(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patched:
        patched.setattr("spec_runtime.serve.openai.writers.finish_reason", fail)
        reply = client.post(COMPLETIONS, json=BODY)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        wait_until(lambda: "boom" in caplog.text)
    assert client.post(COMPLETIONS, json=BODY).status_code == 200
    monkeypatch.setattr("spec_runtime.serve.metrics.Metrics.count_answer", fail)
    *parts, last = events(client.post(COMPLETIONS, json={**BODY, "stream": True}).text)
    assert parts
    assert last["error"]["code"] == "internal_error", "in the midst of a stream, its last event"
    assert "boom" not in json.dumps(last)
