"""Draws README's picture of a step from a toy."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from small import toy_engine

import spec_runtime
from spec_runtime.trace import record
from tools.docs import draw_accepted_tree as draw

SVG = "{http://www.w3.org/2000/svg}"
PROMPT = "abcdabcdabcd"


def test_the_step_with_the_most_accepted_tokens_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_runtime, "load", lambda *_, **__: toy_engine("prompt_lookup"))
    out = tmp_path / "new" / "tree.svg"
    draw.main([PROMPT, "--bundle", "b", "--out", str(out), "--max-new-tokens", "60"])
    root = ElementTree.fromstring(out.read_text())
    kinds = [
        group.attrib["class"].split()[1]
        for group in root.iter(f"{SVG}g")
        if group.attrib["class"].startswith("node ")
    ]
    steps = [step.num_accepted for step in toy_engine("prompt_lookup").steps(PROMPT)]
    # The last step may be cut short before its bonus, and is then not drawn.
    assert kinds.count("accepted") in (max(steps[:-1]), max(steps))
    assert (kinds.count("root"), kinds.count("bonus")) == (1, 1)
    trace = record.record(toy_engine("none"), PROMPT, max_new_tokens=4)
    with pytest.raises(ValueError, match="got no step with an accepted token"):
        draw.drawn(trace)
