"""Tests the page on `/`, and what it asks the server for."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from page_elements import Elements
from served import events, served, toy_engine
from toy_backend import ByteTokenizer

from spec_runtime.serving.page import drawn, page_html
from spec_runtime.step import Step
from spec_runtime.trees.tree import TokenTree
from tools.docs import page_screenshots


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served() as running, running.client() as made:
        yield made


def answer(client: Any, **body: Any) -> tuple[list[Any], Any]:
    """Returns the pieces of an answer, and its last event."""
    found = events(client.post("/page/answer", json=body).text)
    tokens = sum(event.get("tokens", 0) for event in found)
    assert tokens == found[-1]["result"]["tokens"] == body["max_tokens"]
    return [piece for event in found for piece in event.get("pieces", ())], found[-1]


def test_the_page_needs_nothing_else(client: Any) -> None:
    reply = client.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    elements = Elements(reply.text).found
    addresses = [
        value
        for _, attributes in elements
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset")
    ]
    assert addresses == ["data:,"], "an empty icon, so that browsers ask for none"
    assert not re.search(r"https?://|@import|url\(|innerHTML|document\.write", reply.text)
    assert reply.text == page_html()


def test_the_page_names_its_fields_and_fits_phones() -> None:
    elements = Elements(page_html()).found
    labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    is_inside_label = {"compare", "numbers"}
    for tag, attributes in elements:
        if tag in ("input", "textarea"):
            assert attributes["id"] in labelled | is_inside_label, attributes
    assert ("html", {"lang": "en"}) in elements
    assert any(each.get("name") == "viewport" for tag, each in elements if tag == "meta")
    for query in ("max-width", "prefers-color-scheme: dark", "prefers-reduced-motion"):
        assert f"@media ({query}" in page_html()


def test_the_pieces_are_the_answer_with_its_depths(client: Any) -> None:
    expected = toy_engine().generate("hello", max_new_tokens=40)
    pieces, last = answer(client, prompt="hello", max_tokens=40)
    assert "".join(text for text, _ in pieces) == expected.text
    assert {depth for _, depth in pieces} > {0, 1}
    result = last["result"]
    assert result["drafter"] == "parallelspec"
    assert result["accepted_length"] == expected.stats.accepted_length > 1
    assert result["acceptance_by_depth"] == expected.stats.acceptance_by_depth
    ElementTree.fromstring(last["tree"])
    assert "The last step of parallelspec" in last["tree"]


def test_plain_decoding_gives_the_same_text_without_a_tree(client: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 30, "temperature": 0.7, "seed": 3}
    drafted, _ = answer(client, **body)
    plain, last = answer(client, **body, drafter=False)
    assert "".join(text for text, _ in drafted) == "".join(text for text, _ in plain)
    assert {depth for _, depth in plain} == {0}
    assert last["tree"] is None
    assert last["result"]["accepted_length"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": 5},
        {"prompt": "x", "max_tokens": 5000},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "drafter": "medusa"},
        {"prompt": "x", "system": "y"},
        {"prompt": "x" * 500},
    ],
)
def test_what_the_page_cannot_have_is_refused(client: Any, body: dict[str, Any]) -> None:
    reply = client.post("/page/answer", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_a_step_is_drawn_with_the_text_of_its_tokens() -> None:
    tree = TokenTree(np.frombuffer(b"ab<", np.uint8).astype(np.int64), np.array([0, 0, 1]))
    step = Step([ord("b"), 257], num_accepted=1, path=[0, 1])
    svg = drawn(ByteTokenizer(), "medusa", tree, step)
    ElementTree.fromstring(svg)
    assert "The last step of medusa: 2 drafted, 1 accepted, 2 committed" in svg
    assert "&lt;" in svg
    assert "(end)" in svg, "the EOS has no text of its own"


def test_the_page_works_in_a_browser(client: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for window in page_screenshots.WINDOWS:
            seen = page_screenshots.visit(browser, str(client.base_url), window, "hello", tokens=60)
            assert seen.faults == []
            assert seen.result.endswith("both texts are the same.")
            assert seen.after_escape in ("Stopped.", ""), "the toy may have been faster"
            assert seen.focused == ["most", "temperature", "compare", "numbers", "run"]
            assert len(seen.picture) > 10_000
        browser.close()
