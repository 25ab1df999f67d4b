#!/usr/bin/env python3
"""Uses the page of a running server in headless Chromium, by keyboard and by touch, and takes
pictures of it.

usage: python tools/docs/page_screenshots.py URL OUT [--prompt TEXT] [--browser /usr/bin/chromium]

Needs `pip install playwright pillow` and a Chromium, for instance Debian's package. Writes
OUT/serve-desktop.png and serve-phone.png, the one light and run by Ctrl+Enter, the other dark, run
by touch and with depths as numbers, and serve-desktop-dark.png and serve-phone-light.png. Exit code
1 if the page printed an error, asked for anything elsewhere, was wider than its window or its tree
than its card, copied something else than its answer, or went on after Escape.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "List five everyday uses of a wooden spoon, each with one short sentence."
SYSTEM, FIRST = "Answer in plain English.", 'What isn\'t made of "wood" in a kitchen?'
TOKENS = 120
BEYOND = "((tree) => tree.scrollWidth - tree.clientWidth)(document.getElementById('tree'))"
PATIENCE = 600  # tenths of a second until an answer has to be complete
COLOURS = 192  # of a picture's palette, which makes it a third as large
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


def write_picture(picture: bytes, path: Path) -> None:
    """Writes a picture with few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv: Sequence[str] | None = None) -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    arguments = parser.parse_args(argv)
    faults = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=arguments.browser, args=["--no-sandbox"]
        )
        for window in WINDOWS:
            seen = visit(browser, arguments.url.rstrip("/"), window, arguments.prompt, TOKENS)
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_picture(seen.picture, arguments.out / f"serve-{window}.png")
            print(f"{window}: {seen.result}")
            faults += seen.faults
            if seen.after_escape != "Stopped.":
                faults.append(f"{window}: Escape did not stop the run")
        browser.close()
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
