"""Uses the page of a running server in headless Chromium, by keyboard and by touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SYSTEM, FIRST = "Answer in plain English.", 'What isn\'t made of "wood" in a kitchen?'
BEYOND = "((tree) => tree.scrollWidth - tree.clientWidth)(document.getElementById('tree'))"
PATIENCE = 600  # tenths of a second until an answer has to be complete
# name -> width, height, colour scheme
WINDOWS = {
    "desktop": (1280, 900, "light"),
    "desktop-dark": (1280, 900, "dark"),
    "phone": (390, 844, "dark"),
    "phone-light": (390, 844, "light"),
}


@dataclass
class Visit:
    """What was seen on one visit to the page."""

    picture: bytes
    name: str  # of the model
    result: str  # what the page says of the two answers
    answers: list[str]  # of the second turn, with the drafter and without
    curl: str  # the second turn's request
    python: str
    after_escape: str  # what it says when a run was stopped
    focused: list[str]  # by the tab key, in this order
    faults: list[str] = field(default_factory=list)


def visit(browser: Any, url: str, window: str, prompt: str, tokens: int) -> Visit:
    """Has two turns of a conversation, each with the drafter and without, takes a picture, then
    begins a third turn and stops it.

    Waits by asking the page, whose policy forbids evaluated strings.
    """
    width, height, scheme = WINDOWS[window]
    has_touch = window.startswith("phone")
    viewport = {"width": width, "height": height}
    page = browser.new_page(
        viewport=viewport,
        color_scheme=scheme,
        has_touch=has_touch,
        permissions=["clipboard-read", "clipboard-write"],
    )
    faults: list[str] = []
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))

    def look(request: Any) -> None:
        if not request.url.startswith((f"{url}/", "data:")):
            faults.append(f"request: {request.url}")

    page.on("request", look)
    page.goto(f"{url}/")
    page.fill("#system", SYSTEM)
    page.fill("#most", str(tokens))

    def run(text: str) -> None:
        page.fill("#prompt", text)
        if has_touch:
            page.tap("#run")
        else:
            page.keyboard.press("Control+Enter")

    for text in (FIRST, prompt):
        run(text)
        wait(page)
    if has_touch:
        page.tap("#numbers")
    result = page.inner_text("#result") or page.inner_text("#error")
    if (inner := page.evaluate("document.documentElement.scrollWidth")) > width:
        faults.append(f"the page is {inner} pixels wide in a window of {width}")
    if (inner := page.evaluate(BEYOND)) > 0:
        faults.append(f"the tree is {inner} pixels wider than its card")
    answers = [page.text_content(f"#{id} .text") for id in ("drafted", "plain")]
    picture = page.screenshot(full_page=True)
    page.click("#drafted .copy")
    page.wait_for_selector("#drafted .copy:text('Copied')")
    if page.evaluate("navigator.clipboard.readText()") != answers[0]:
        faults.append("what was copied is not the answer")
    curl, python = (page.text_content(f"#{id}") for id in ("curl", "python"))
    focused = []
    page.focus("#prompt")
    for _ in range(5):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id"))
    page.fill("#most", "4096")
    run(prompt)
    page.keyboard.press("Escape")
    wait(page)
    after_escape = page.inner_text("#error")
    name = page.inner_text("h1")
    page.close()
    return Visit(picture, name, result, answers, curl, python, after_escape, focused, faults)


def wait(page: Any) -> None:
    """Waits until the page is ready for another run."""
    for _ in range(PATIENCE):
        if page.is_enabled("#run"):
            return
        page.wait_for_timeout(100)
    raise TimeoutError("the page's run does not end")
