"""Tests load_server.py on a toy: every kind of request ends as it should, and is counted."""

from __future__ import annotations

import asyncio
import os

from served import served
from test_serving_models import shelved

from tools.measure import load_server
from tools.measure.load_server import Load, Outcome


def test_every_kind_of_request_ends_as_it_should() -> None:
    kinds = load_server.kinds(21, seed=1)
    assert set(kinds) == set(load_server.KINDS)
    with served() as server:
        before = load_server.resources(os.getpid())
        load = Load(server.url, 40, kinds)
        asyncio.run(load.run(num_clients=4))
        after = load_server.resources(os.getpid())
    figures = load_server.summary(load.outcomes)
    assert figures["wrong"] == 0, figures
    assert figures["requests"] == 21
    assert figures["outcomes"]["oversized body"] == {"413": kinds.count("oversized body")}
    assert figures["tokens"] > 40
    assert 0 < figures["first_token_seconds"]["p50"] <= figures["first_token_seconds"]["p99"]
    assert after["peak_mb"] >= before["resident_mb"] > 1
    assert {"threads", "files"} < set(after)


def test_no_request_is_lost_while_bundles_are_opened_and_closed() -> None:
    kinds = load_server.kinds(21, seed=1)
    with shelved(most_open=1) as (shelf, client):
        load = Load(str(client.base_url), 40, kinds, ["letters", "bytes"])
        asyncio.run(load.run(num_clients=4))
        found = load_server.openings(load.url)
    figures = load_server.summary(load.outcomes)
    assert figures["wrong"] == 0, figures
    assert figures["requests"] == 21
    assert found == {name: shelf.opened.count(name) for name in ("letters", "bytes")}
    assert len(shelf.opened) > 2, "bundles were closed and opened again"


def test_wrong_ends_are_counted() -> None:
    outcomes = [
        Outcome("stream", 0.0, "answered"),
        Outcome("stream", 0.0, "cut off"),
        Outcome("malformed JSON", 0.0, "answered"),
        Outcome("disconnect", 0.0, "hung"),
    ]
    assert load_server.summary(outcomes)["wrong"] == 3
    before = {"threads": 5.0, "files": 7.0}
    assert load_server.kept(before, {"threads": 7.0, "files": 7.0}) == []
    assert load_server.kept(before, {"threads": 50.0, "files": 8.0}) == ["threads", "files"]


def test_speed_and_order_are_those_of_the_parts() -> None:
    first = Outcome("stream", sent=0.0, first=2.0, last=4.0, tokens=11)
    later = Outcome("stream", sent=1.0, first=1.5, last=3.0, tokens=3)
    close = Outcome("stream", sent=0.02, first=1.9, last=3.0, tokens=3)
    assert first.tokens_per_second == 5
    assert Outcome("stream", 0.0, first=2.0, last=2.0, tokens=3).tokens_per_second is None
    pairs = ([first, later], [first, close], [later, close])
    assert [load_server.num_overtaken(pair) for pair in pairs] == [1, 0, 1]
