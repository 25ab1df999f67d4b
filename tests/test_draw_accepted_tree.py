"""The tool that draws the best step of a generation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from small import toy_engine

import spec_runtime
from spec_runtime.step import Step
from spec_runtime.trees.tree import TokenTree

FILE = Path(__file__).parents[1] / "tools/docs/draw_accepted_tree.py"
spec = importlib.util.spec_from_file_location("draw_accepted_tree", FILE)
assert spec is not None
assert spec.loader is not None
draw: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)

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
    assert max(steps) >= 2
    # the last step may be cut short before its bonus, and is then not drawn
    assert kinds.count("accepted") in (max(steps[:-1]), max(steps))
    assert (kinds.count("root"), kinds.count("bonus")) == (1, 1)
    assert f"{kinds.count('accepted')} accepted" in out.read_text()


def test_only_whole_steps_with_an_accepted_token_count() -> None:
    tree = TokenTree.chain([1, 2, 3])
    nothing, cut = Step([9], 0, [0]), Step([2, 3], 2, [0, 1])
    first, second = Step([2, 9], 1, [0, 1]), Step([2, 8], 1, [0, 1])
    assert draw.best_step([(tree, each) for each in (nothing, first, second, cut)])[1] is first
    with pytest.raises(ValueError, match="got no step with an accepted token"):
        draw.best_step([(tree, nothing), (tree, cut)])
