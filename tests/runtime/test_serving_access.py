"""Tests who may ask a server, from where, and what it counts and logs."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    RESPONSES,
    held,
    in_process,
    metrics,
    post,
    stream,
    wait_until,
)

from spec_runtime.serve.app import router

SITE = "https://chat.example:8443"


def test_health_and_readiness(client: Any) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == client.get("/health").headers["content-length"]
    assert client.get("/ready").json() == {"status": "ready"}
    paths = set(client.get("/openapi.json").json()["paths"])
    assert {CHAT, COMPLETIONS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens"} <= paths


def test_an_api_key_is_required_and_only_known_names_address_the_server() -> None:
    names = ("LocalHost", "127.0.0.1", "::1", "Proxy.Example.:443")
    with in_process(api_key="sésame", hosts=names) as client:
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


KEY = "sésame".encode()
NONE, INCORRECT = "You didn't provide an API key.", "Incorrect API key provided."
HEADERS: list[tuple[dict[bytes, bytes], str]] = [
    ({b"x-api-key": KEY}, ""),
    ({b"Authorization": b"Bearer " + KEY}, ""),
    ({b"x-api-key": KEY, b"Authorization": b"Bearer none"}, ""),
    ({b"x-api-key": b"none", b"Authorization": b"Bearer " + KEY}, ""),
    ({}, NONE),
    ({b"x-api-key": b""}, NONE),
    ({b"Authorization": KEY}, NONE),
    ({b"x-api-key": b"sesame"}, INCORRECT),
    ({b"x-api-key": b"Bearer " + KEY}, INCORRECT),
    ({b"Authorization": b"Basic " + KEY}, INCORRECT),
]


def test_a_key_may_stand_in_either_header() -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    with in_process(api_key="sésame") as client:
        for headers, message in HEADERS:
            for path in (MESSAGES, CHAT):
                reply = client.post(path, json=body, headers=headers)
                assert reply.status_code == (401 if message else 200)
                assert message in reply.text


def asked_first(client: Any, origin: str, method: str = "POST", **headers: str) -> Any:
    """Returns what a browser hears that asks whether a script may send JSON with a key."""
    asks = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return client.options(CHAT, headers={**asks, **headers})


def test_scripts_of_a_named_site_may_ask() -> None:
    with in_process(api_key="key", cors_origins=(SITE,)) as client:
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

        methods = {each for route in router.routes for each in getattr(route, "methods", ())}
        assert {"GET", "POST", "DELETE"} <= methods
        for method in methods - {"HEAD"}:  # of which browsers ask nothing first
            assert asked_first(client, SITE, method).status_code == 200, method
        assert asked_first(client, SITE, "PUT").status_code == 400

        other = "https://chat.example"
        assert asked_first(client, other).status_code == 400
        reply = client.post(CHAT, json=body, headers={"Origin": other, **key})
        assert "access-control-allow-origin" not in reply.headers


def test_without_named_sites_no_script_may_ask(client: Any) -> None:
    reply = asked_first(client, SITE)
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_metrics_count_what_was_done() -> None:
    def num_requests_but_metrics() -> float:
        counted = metrics(client).items()
        return sum(n for name, n in counted if "requests_total" in name and "metrics" not in name)

    with in_process() as client:
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
