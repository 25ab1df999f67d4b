"""Tests fields that clients of other servers send, and sites whose scripts ask from browsers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from served import CHAT, COMPLETIONS, HELLO, choice_of, post, served, stream, toy_engine

from spec_runtime import UserError
from spec_runtime.serve.settings import Settings

BODY = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
SITE = "https://chat.example:8443"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served() as running, running.client() as made:
        yield made


@pytest.mark.parametrize("also_at_the_end", [False, True])
def test_each_event_counts_the_tokens_so_far(client: Any, also_at_the_end: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": also_at_the_end}
    parts = stream(client, COMPLETIONS, **BODY, n=2, stream_options=options)[:-1]
    if also_at_the_end:
        last = parts.pop()
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 24
    prompt = post(client, COMPLETIONS, **BODY)["usage"]["prompt_tokens"]
    assert all(part["usage"]["prompt_tokens"] == prompt for part in parts)
    assert parts[-1]["usage"]["total_tokens"] == prompt + 24
    chat = {"messages": HELLO, "max_tokens": 5, "stream_options": options}
    parts = [part for part in stream(client, CHAT, **chat)[:-1] if part["choices"]]
    assert parts[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_keeps_all_tokens(client: Any, top_k: int) -> None:
    body = {**BODY, "temperature": 2.0, "seed": 3}
    found = choice_of(client, COMPLETIONS, **body, top_k=top_k)
    assert found == choice_of(client, COMPLETIONS, **body)
    assert found != choice_of(client, COMPLETIONS, **body, top_k=1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": -1}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": -1}),
        (COMPLETIONS, {"prompt": ["hello"], "max_completion_tokens": -1, "echo": True}),
    ],
)
def test_an_answer_may_fill_the_context(client: Any, path: str, body: dict[str, Any]) -> None:
    reply = post(client, path, **body, temperature=0, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == toy_engine().target.max_length
    assert reply["choices"][0]["finish_reason"] == "length"


def test_another_name_of_the_number_of_tokens(client: Any) -> None:
    body = {"prompt": "hello", "temperature": 0}
    found = post(client, COMPLETIONS, **body, max_completion_tokens=7)
    assert found["usage"]["completion_tokens"] == 7
    assert choice_of(client, COMPLETIONS, **body, max_completion_tokens=0)["text"] == ""


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True, "stop_token_ids": [257, 9999]}])
def test_an_answer_has_its_least_number_of_tokens(
    client: Any, sampling: dict[str, Any], ending: dict[str, Any]
) -> None:
    """Exactly: the tokens are those of the engine where these have no probability until then."""
    least, engine = 6, toy_engine()
    length = len(engine.encode("hello", raw=True)) + least

    def suppress(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        if len(tokens) < length:
            logits_V[257] = -np.inf
        return logits_V

    bias = {"logit_bias": {257: 100.0}}
    options = {**sampling, **ending, **bias, "max_new_tokens": 20}
    expected = engine.generate("hello", raw=True, logits_processor=suppress, **options)
    assert len(expected.token_ids) == least + 1
    body = {"prompt": "hello", "max_tokens": 20, **sampling, **ending, **bias}
    reply = post(client, COMPLETIONS, **body, min_tokens=least)
    assert reply["choices"][0]["text"] == expected.text
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == least + 1
    assert post(client, COMPLETIONS, **body)["usage"]["completion_tokens"] == 1
    chat = {"messages": HELLO, "max_tokens": 20, "min_tokens": least, **sampling, **ending, **bias}
    assert post(client, CHAT, **chat)["usage"]["completion_tokens"] == least + 1


def test_a_completion_without_bos(client: Any) -> None:
    reply = post(client, COMPLETIONS, **BODY, add_special_tokens=False)
    assert reply["usage"]["prompt_tokens"] == len("hello")
    ids = list(b"hello")
    assert reply["choices"] == post(client, COMPLETIONS, **{**BODY, "prompt": ids})["choices"]
    assert post(client, COMPLETIONS, **BODY, add_special_tokens=True)["usage"]["prompt_tokens"] == 6
    empty = client.post(COMPLETIONS, json={"prompt": "", "add_special_tokens": False})
    assert empty.status_code == 400
    post(client, CHAT, messages=HELLO, max_tokens=1, add_special_tokens=False)


def test_a_completion_keeps_to_a_format(client: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed, of the extra grammar")
    form = {"type": "regex", "regex": "[ab]{3}x"}
    for prompt in ("hello", ["hello", "you"]):
        reply = post(client, COMPLETIONS, **{**BODY, "prompt": prompt}, response_format=form)
        for choice in reply["choices"]:
            assert re.fullmatch("[ab]{3}x", choice["text"])
    bad = client.post(COMPLETIONS, json={**BODY, "response_format": {"type": "poem"}})
    assert bad.status_code == 400
    assert "poem" in bad.json()["error"]["message"]


def test_a_prompt_may_be_read_anew(client: Any) -> None:
    def num_cached(**more: Any) -> Any:
        usage = post(client, COMPLETIONS, **{**BODY, "prompt": "read me anew"}, **more)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    num_cached()
    assert num_cached(cache_prompt=True) == num_cached() == len("read me anew")
    assert num_cached(cache_prompt=False) == 0


def test_features_that_are_off_may_be_null(client: Any) -> None:
    names = ("min_tokens", "cache_prompt", "prompt_logprobs", "add_special_tokens", "top_k")
    chats = ("tools", "functions", "function_call", "audio", "web_search_options")
    post(client, COMPLETIONS, prompt="x", max_tokens=1, **dict.fromkeys(names))
    post(client, CHAT, messages=HELLO, max_tokens=1, **dict.fromkeys((*names, *chats)))


FOREIGN = {"use_beam_search": False, "cache_salt": "x", "typical_p": 1.0, "guided_json": None}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_fields_of_other_servers_that_change_nothing_are_named_in_a_header(
    client: Any, path: str
) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3, "temperature": 0}
    if path == COMPLETIONS:
        body = BODY
    if path == "/v1/responses":
        body = {"input": "hello", "max_output_tokens": 3}
    plain = client.post(path, json=body)
    assert plain.status_code == 200, plain.text
    assert "X-Specsplit-Ignored" not in plain.headers
    is_stream = path == CHAT
    reply = client.post(path, json={**body, **FOREIGN, "stream": is_stream})
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Specsplit-Ignored"] == ", ".join(FOREIGN)
    for name in ("use_beam_search", "typical_p"):  # other values would change the answer
        reply = client.post(path, json={**body, **FOREIGN, name: 0.5})
        assert reply.status_code == 400
        assert name in reply.text


# ---- other sites' scripts ----


def asked_first(client: Any, origin: str, **headers: str) -> Any:
    """Returns what a browser hears that asks whether a script may send JSON with a key."""
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return client.options(CHAT, headers={**asks, **headers})


def test_scripts_of_a_named_site_may_ask() -> None:
    with served(api_key="key", cors_origins=(SITE,)) as running, running.client() as client:
        reply = asked_first(client, SITE, **{"Access-Control-Request-Private-Network": "true"})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == SITE
        assert "POST" in reply.headers["access-control-allow-methods"]
        allowed = reply.headers["access-control-allow-headers"]
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed.split(","))
        assert reply.headers["access-control-allow-private-network"] == "true"

        body = {"messages": HELLO, "max_tokens": 1}
        key = {"Authorization": "Bearer key"}
        for more, status in ((key, 200), ({}, 401)):  # errors are read, too
            reply = client.post(CHAT, json=body, headers={"Origin": SITE, **more})
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == SITE
            assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in reply.headers

        other = "https://chat.example"
        assert asked_first(client, other).status_code == 400
        reply = client.post(CHAT, json=body, headers={"Origin": other, **key})
        assert "access-control-allow-origin" not in reply.headers


def test_without_named_sites_no_script_may_ask(client: Any) -> None:
    reply = asked_first(client, SITE)
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://a.example/", "", "https://A.example", "https://*.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(UserError, match="got origin"):
        Settings("toy", cors_origins=("*", origin))
