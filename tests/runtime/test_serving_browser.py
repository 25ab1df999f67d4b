"""Uses the page in headless Chromium, by keyboard and by touch; waits by asking the page, whose
policy forbids evaluated strings."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from served import served
from test_serving_models import shelved
from test_serving_page import printed_by

TURNS = ('What isn\'t made of "wood" in a kitchen?', "hello")
WIDER = "document.documentElement.scrollWidth - innerWidth"
TREE = "(tree => tree.scrollWidth - tree.clientWidth)(document.getElementById('tree'))"
TOP = "document.getElementById('plain').getBoundingClientRect().top / innerHeight"
PATIENCE = 600  # tenths of a second until an answer has to be complete


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("openai", reason="openai is not installed")
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("curl") is None:
        pytest.skip("no Chromium is installed, or no curl")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait(page: Any) -> None:
    """Waits until the page is ready for another run."""
    for _ in range(PATIENCE):
        if page.is_enabled("#run"):
            return
        page.wait_for_timeout(100)
    raise TimeoutError("the page's run does not end")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844), (375, 667)])
def test_the_page_works_in_a_browser(browser: Any, width: int, height: int, scheme: str) -> None:
    """Two turns of a conversation, each with the drafter and without, and a third that is
    stopped."""
    with served() as running:
        is_phone = width < 600
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
            has_touch=is_phone,
            permissions=["clipboard-read", "clipboard-write"],
        )
        faults: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{running.url}/")
        page.fill("#system", "Answer in plain English.")
        page.fill("#most", "60")

        def run(text: str) -> None:
            page.fill("#prompt", text)
            if is_phone:
                page.tap("#run")
            else:
                page.keyboard.press("Control+Enter")

        for text in TURNS:
            run(text)
            wait(page)
            assert not is_phone or 0 <= page.evaluate(TOP) < 0.5, "the second answer is in view"
        page.click("#numbers")
        assert page.inner_text("#result").endswith("both texts are the same.")
        assert page.inner_text("h1") == "toy"
        assert max(page.evaluate(WIDER), page.evaluate(TREE)) <= 0, "nothing is cut at the right"
        answer = page.text_content("#drafted .text")
        page.click("#drafted .copy")
        page.wait_for_selector("#drafted .copy:text('Copied')")
        assert page.evaluate("navigator.clipboard.readText()") == answer
        said = json.loads(printed_by("bash", f"{page.text_content('#curl')} --silent"))
        assert said["choices"][0]["message"]["content"] == answer
        assert printed_by(sys.executable, page.text_content("#python")) == f"{answer}\n"
        page.focus("#prompt")
        for name in ("most", "temperature", "compare", "numbers", "run"):
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == name
        page.fill("#most", "4096")
        run(TURNS[-1])
        page.keyboard.press("Escape")
        wait(page)
        assert page.inner_text("#error") in ("Stopped.", ""), "the toy may have been faster"
        assert faults == []
        assert all(url.startswith((f"{running.url}/", "data:")) for url in asked)
        page.close()


def test_the_page_asks_for_a_key_and_offers_models(browser: Any) -> None:
    with shelved(api_key="secret") as (shelf, client):
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#models")
        assert page.locator("#models option").all_inner_texts() == ["letters", "bytes", "other"]
        page.select_option("#models", "bytes")
        page.fill("#most", "9")
        page.click("#run")
        wait(page)
        assert page.inner_text("#error") == ""
        assert shelf.opened == ["bytes"]
        assert page.text_content("#curl").count("secret") == 0
        assert '"model": "bytes"' in page.text_content("#curl")
        page.click("#undo")
        assert page.input_value("#prompt").startswith("Explain")
        assert page.text_content("#drafted .text") == page.text_content("#log") == ""
        page.close()
