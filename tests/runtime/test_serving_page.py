"""Tests the page on `/`, and what it asks the server for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from page_elements import Elements
from served import HELLO, events, served, toy_engine
from toy_backend import ByteTokenizer

from spec_runtime.loop.step import Step
from spec_runtime.serve import page
from spec_runtime.serve.page import PageRequest, page_html, shown_tree
from spec_runtime.trees.tree import TokenTree


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served() as running, running.client() as made:
        yield made


def answer(client: Any, **body: Any) -> tuple[list[Any], Any]:
    """Returns the pieces of an answer, and its last event."""
    found = events(client.post("/page/answer", json=body).text)
    tokens = sum(event.get("tokens", 0) for event in found)
    assert tokens == len(found[-1]["result"]["token_ids"]) <= body["max_tokens"]
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
    pieces, last = answer(client, messages=HELLO, max_tokens=40)
    assert "".join(text for text, _ in pieces) == expected.text
    assert {depth for _, depth in pieces} > {0, 1}
    result = last["result"]
    assert result["drafter"] == "parallelspec"
    assert result["accepted_length"] == expected.stats.accepted_length > 1
    assert result["acceptance_by_depth"] == expected.stats.acceptance_by_depth
    assert result["token_ids"] == expected.token_ids
    assert result["prompt_ids"] == toy_engine().encode("hello")
    assert last["tree"]["title"].startswith("The last step of parallelspec: ")


def test_the_page_is_told_what_the_text_hides_and_who_else_was_at_work(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([(5.0, 100.0), (30.0, 200.0)])
    monkeypatch.setattr(page, "cpu_ticks", lambda: next(ticks))
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 2.0, "seed": 23}
    pieces, last = answer(client, **body)
    expected = toy_engine().generate("hello", max_new_tokens=60, temperature=2.0, seed=23)
    assert expected.finish_reason == "stop"
    assert "".join(piece[0] for piece in pieces) == expected.text
    assert [piece[2] for piece in pieces if len(piece) > 2] == ["<eos>"]
    assert last["result"]["names"] == {"257": "<eos>"}
    assert last["result"]["busy"] == "while other programs used 25% of the CPUs"


# Follows two functions of the page, which need no browser.
PROGRAM = r"""
(async () => {
  const data = new Blob([': ping\n\ndata: {"a": "é: x"}\n\n: ping\n\ndata: {"b": 1}\n\n']);
  for await (const event of events({body: data.stream()})) console.log(JSON.stringify(event));
  for (const [count, rate, busy] of [[60, 30, ""], [7, 9, ""], [60, 9, "while it rained"]]) {
    const [drafted, plain] = [[count, rate, busy], [60, 20, ""]].map(
      ([size, tokens_per_second, busy]) => ({token_ids: Array(size), tokens_per_second, busy}));
    console.log(speeds(drafted, plain, "noon"));
  }
})();
"""


def test_the_page_skips_pings_and_compares_only_what_it_can() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed, which runs the page's script")
    wanted = r"^(?:const LEAST_TOKENS\b.*?$|(?:async )?function\*? (?:events|speeds)\(.*?^}$)"
    parts = re.findall(wanted, page_html(), re.DOTALL | re.MULTILINE)
    without = "tokens/s with the drafter and 20.0 without, over"
    assert printed_by(node, "\n".join([*parts, PROGRAM]), "-e").splitlines() == [
        *('{"a":"é: x"}', '{"b":1}'),
        f"30.0 {without} 60 and 60 tokens at noon: 1.50 times as fast; ",
        f"9.0 {without} 7 and 60 tokens at noon, too few to compare; ",
        f"9.0 {without} 60 and 60 tokens at noon, while it rained; ",
    ]


def test_the_page_goes_on_with_a_conversation(client: Any) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *HELLO]
    said = [*turns, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    pieces, last = answer(client, messages=said, max_tokens=9)
    expected = toy_engine().generate(said, max_new_tokens=9)
    assert "".join(text for text, _ in pieces) == expected.text
    assert last["result"]["prompt_ids"] == toy_engine().encode(said)


def test_a_first_message_needs_no_template() -> None:
    for messages, prompt in ((HELLO, "hello"), ([*HELLO, *HELLO], [*HELLO, *HELLO])):
        assert PageRequest.model_validate({"messages": messages}).prompt == prompt


def test_plain_decoding_gives_the_same_text_without_a_tree(client: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "temperature": 0.7, "seed": 3}
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
        {"messages": []},
        {"messages": 5},
        {"messages": [{"role": "user"}]},
        {"messages": HELLO, "max_tokens": 5000},
        {"messages": HELLO, "temperature": -1},
        {"messages": HELLO, "drafter": "medusa"},
        {"messages": HELLO, "system": "y"},
        {"messages": [{"role": "user", "content": "x" * 500}]},
    ],
)
def test_what_the_page_cannot_have_is_refused(client: Any, body: dict[str, Any]) -> None:
    reply = client.post("/page/answer", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_a_step_is_shown_with_the_text_of_its_tokens() -> None:
    tree = TokenTree(np.frombuffer(b"a <", np.uint8).astype(np.int64), np.array([0, 0, 1]))
    step = Step([ord(" "), 257], num_accepted=1, path=[0, 1])
    shown = shown_tree(ByteTokenizer(), "medusa", tree, step)
    assert shown["title"] == "The last step of medusa: 2 drafted, 1 accepted, 2 committed"
    nodes = [(0, "root", "a"), (0, "accepted", "␣"), (1, "refused", "<")]
    assert shown["nodes"] == [*nodes, (1, "bonus", "<eos>")], "it has no text of its own"
    cut = Step([ord(" ")], num_accepted=1, path=[0])
    assert shown_tree(ByteTokenizer(), "medusa", tree, cut)["nodes"] == nodes


def printed_by(interpreter: str, program: str, flag: str = "-c") -> str:
    """Returns what a program prints on standard output."""
    return subprocess.run(
        [interpreter, flag, program], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
