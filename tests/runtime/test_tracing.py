"""The trace of a generation, and the page that shows it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_elements import Elements
from small import Run, toy_engine

from spec_runtime.loop.step import Step
from spec_runtime.trace.page import page
from spec_runtime.trace.record import Trace, node_texts, record, whole_path
from spec_runtime.trees.tree import TokenTree

PROMPT = "abcdabcdabcd"
HOSTILE = (
    '</script><script>document.title="got you"</script><img src=x onerror=alert(1)>"&\u202e\x00'
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return record(toy_engine(), PROMPT, max_new_tokens=60)


def test_a_trace_has_every_step_and_changes_none(trace: Trace) -> None:
    plain = toy_engine().generate(PROMPT, max_new_tokens=60)
    assert trace.result.token_ids == plain.token_ids
    assert trace.drafter == "prompt_lookup"
    assert [token for step in trace.steps for token in step.tokens] == plain.token_ids
    first, *others = trace.steps
    assert (first.tree, first.num_accepted, len(others)) == (None, 0, plain.stats.steps)
    assert max(step.num_accepted for step in others) >= 2
    for before, step in zip(trace.steps, others, strict=False):
        assert step.tree is not None
        assert step.tree.token_N[0] == before.tokens[-1]
        accepted = step.tree.token_N[list(step.path[1:])].tolist()
        assert accepted == list(step.tokens[: step.num_accepted])
        assert (step.bonus_text is None) == (step.num_accepted == len(step.tokens))
        assert len(step.node_texts) == step.tree.num_nodes


def test_its_seconds_and_texts_add_up(trace: Trace) -> None:
    for phase, seconds in trace.result.stats.timings.items():
        assert sum(step.seconds[phase] for step in trace.steps) == pytest.approx(seconds)
    pieces = [piece for step in trace.steps for piece, _ in step.pieces]
    assert "".join(pieces) == trace.result.text
    depths = [depth for step in trace.steps for _, depth in step.pieces]
    assert sum(depth > 0 for depth in depths) == sum(step.num_accepted for step in trace.steps)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_stop_string_is_not_shown(trace: Trace, as_tuple: bool) -> None:
    seen: list[str] = []
    stop: Any = trace.result.text[30:33]
    stop = (stop, "nowhere") if as_tuple else stop
    trace = record(toy_engine(), PROMPT, seen.append, max_new_tokens=60, stop=stop)
    assert trace.result.finish_reason == "stop"
    assert "".join(seen) == trace.result.text
    assert "".join(piece for step in trace.steps for piece, _ in step.pieces) == trace.result.text


def test_a_step_that_ends_with_a_drafted_token_has_no_bonus() -> None:
    tree = TokenTree.chain([97, 98, 99])
    cut, whole = Step([98], 1, [0]), Step([98, 120], 1, [0, 1])
    codec = toy_engine().tokenizer
    assert whole_path(tree, cut) == whole_path(tree, whole) == [0, 1]
    assert node_texts(codec, tree, [0, 1], cut) == (["a", "b", "c"], None)
    assert node_texts(codec, tree, [0, 1], whole) == (["a", "b", "c"], "x")


def test_texts_read_as_they_do_behind_what_is_before_them() -> None:
    tree = TokenTree.chain(list("né".encode()))
    step = Step([*tree.token_N[1:].tolist(), ord("e")], 2, [0, 1, 2])
    texts, bonus = node_texts(toy_engine().tokenizer, tree, step.path, step)
    assert (texts, bonus) == (["n", *["\ufffd"] * 2], "e"), "halves of a character are no blanks"


# ---- the page ----


def test_the_page_shows_every_step(trace: Trace) -> None:
    text = page(trace)
    elements = Elements(text)
    assert len(elements.of_class("step")) == len(trace.steps)
    pieces = elements.of_class("piece")
    assert [int(a["data-step"] or -1) for a in pieces] == [
        number for number, step in enumerate(trace.steps) for _ in step.pieces
    ]
    assert len(elements.of_class("tree")) == len(trace.steps) - 1
    nodes = sum(step.tree.num_nodes for step in trace.steps if step.tree is not None)
    bonuses = sum(step.bonus_text is not None for step in trace.steps)
    assert len(elements.of_class("node")) == nodes + bonuses
    assert f"accepted length {trace.result.stats.accepted_length:.2f}" in text
    for name in ("prompt", "draft", "verify", "accept"):
        assert re.search(rf"</i>{name} \d+\.\d\d ms", text)


def test_the_page_asks_for_nothing_outside_of_itself(trace: Trace) -> None:
    text = page(trace)
    elements = Elements(text)
    names = {name for _, attributes in elements.found for name in attributes}
    assert not names & {"src", "href", "srcset", "style", "action"}
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def hostile_trace() -> Trace:
    """A trace of a prompt and an answer that try to break out of the page."""
    engine = toy_engine()
    assert engine.tokenizer.template is not None
    trace = record(engine, HOSTILE, max_new_tokens=12)
    steps = tuple(
        replace(
            step,
            pieces=tuple((HOSTILE, depth) for _, depth in step.pieces),
            node_texts=(HOSTILE,) * len(step.node_texts),
            bonus_text=step.bonus_text and HOSTILE,
        )
        for step in trace.steps
    )
    return Trace(trace.prompt, HOSTILE, steps, trace.result)


def test_texts_stay_texts() -> None:
    harmless, hostile = record(toy_engine(), PROMPT, max_new_tokens=12), hostile_trace()
    elements = Elements(page(hostile))
    assert [tag for tag, _ in elements.found].count("script") == 1
    assert not [tag for tag, _ in elements.found if tag == "img"]
    assert {tag for tag, _ in elements.found} == {tag for tag, _ in Elements(page(harmless)).found}
    whole = "".join(elements.texts)
    assert "document.title=" in whole
    assert not {"\u202e", "\x00"} & set(page(hostile))
    page(hostile).encode()


def test_the_page_runs_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    file = tmp_path / "trace.html"
    file.write_text(page(hostile_trace()), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'p'}"]
    shown = subprocess.run(
        [browser, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60
    ).stdout
    assert '<html lang="en" class="js">' in shown
    assert shown.count('class="step here"') == 1
    assert re.search(r"<output[^>]*>1 / \d+</output>", shown)
    assert "<title>Trace: " in shown


# ---- the command ----


GENERATE = ("generate", PROMPT, "--bundle", "b", "--max-new-tokens", 20)


@pytest.mark.usefixtures("engines")
def test_generate_writes_the_page(run: Run, tmp_path: Path) -> None:
    out_file = tmp_path / "new" / "trace.html"
    _, expected, _ = run(*GENERATE)
    code, out, err = run(*GENERATE, "--trace", out_file)
    assert (code, out) == (0, expected)
    assert err.startswith("20 tokens, ")
    assert 'class="step"' in out_file.read_text()
    code, out, err = run(*GENERATE, "--trace", out_file, "--json")
    assert (code, err, json.loads(out)["text"]) == (0, "", expected.strip())


@pytest.mark.usefixtures("engines")
def test_generate_refuses_what_a_trace_cannot_show(run: Run, tmp_path: Path) -> None:
    code, _, err = run(*GENERATE, "--trace", tmp_path / "t.html", "--show-accepted")
    assert (code, err) == (2, "error: got --trace with --show-accepted, expected one of them\n")
    code, out, err = run(*GENERATE, "--trace", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
