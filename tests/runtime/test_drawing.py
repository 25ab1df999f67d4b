"""The tree of a step as the trace shows it, and what `spec-runtime show` prints."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from small import CALIBRATION, small_manifest, write_small_bundle

from spec_runtime import cli
from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli.show import readable
from spec_runtime.trace.page import _tree
from spec_runtime.trace.record import TracedStep
from spec_runtime.trees.tree import TokenTree

# root 5 with children 7 and 8; 9 and 6 below 7; 4 below 8
TREE = TokenTree(np.array([5, 7, 8, 9, 6, 4]), np.array([0, 0, 0, 1, 1, 2]))
TEXTS = [" <root>", " a", "b&c", "\n", "a very long text of a token", "語"]


def test_an_accepted_tree_is_lists_whose_path_comes_first() -> None:
    step = TracedStep((8, 3), 1, {}, (), TREE, (0, 2), tuple(TEXTS), " the")
    (drawn,) = ElementTree.fromstring(_tree(step))

    def read(of: ElementTree.Element) -> list[Any]:
        """Returns the kind, the text and the children of each node of a list."""
        return [
            (li.attrib["class"], li[0].text, *(read(below) for below in li.findall("ul")))
            for li in of
        ]

    kept = ("node accepted", "b&c", [("node bonus", "␣the"), ("node refused", "語")])
    left = [("node refused", "↵"), ("node refused", "a␣very␣long␣text␣…")]
    assert read(drawn) == [("node root", "␣<root>", [kept, ("node refused", "␣a", left)])]


# ---- the whole of `spec-runtime show`: nested values as indented lines, never Python's own ----


PROVENANCE = {
    "command": ["spec-export", "build", "--model", "my model"],
    "git_commit": None,
    "drafters": {
        "parallelspec": {
            "recipe": {"train": {"lr": 0.0006, "betas": [0.9, 0.95], "steps": 2310000}, "data": {}},
            "is_joint": False,
            "validation": {"accepted_length": 2.542440726675562},
            "sources": {"": 16},
            "earlier": [{"steps": 10}, {"steps": 20}],
        }
    },
}
LINES = """\
command: spec-export build --model 'my model'
git_commit: none
drafters:
  parallelspec:
    recipe:
      train:
        lr: 0.0006
        betas: 0.9, 0.95
        steps: 2310000
      data: none
    is_joint: no
    validation:
      accepted_length: 2.542
    sources:
      (no name): 16
    earlier:
      1:
        steps: 10
      2:
        steps: 20
"""


LONG = {"data": {"prompts": "greedy, by the target itself"}}  # goes on at its own indent


@pytest.mark.parametrize(
    ("width", "values", "lines"),
    [(80, PROVENANCE, LINES), (20, LONG, "data:\n  prompts: greedy,\n  by the target\n  itself")],
)
def test_nested_values_are_indented_under_their_keys(width: int, values: Any, lines: str) -> None:
    console = Console(width=width, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(readable(values))
    assert [line.rstrip() for line in captured.get().splitlines()] == lines.splitlines()


def test_show_prints_no_python_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small_bundle(tmp_path / "small")
    manifest = small_manifest()
    drafter = dataclasses.replace(
        manifest.drafters[0],
        config={"taps": [1, 2], "style": None},
        trees={"paths": [[0], [0, 1]], "lookup_nodes": 8},
        calibration=CALIBRATION,
    )
    manifest = dataclasses.replace(manifest, provenance=PROVENANCE, drafters=(drafter,))
    bundles.write_manifest(folder, manifest)

    def show(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["show", "--bundle", str(folder), *arguments])
        assert not end.value.code
        return capsys.readouterr().out

    shown = show()
    for word in ("llama", "fp32", "parallelspec", "prompt_lookup", "lookahead", "target.onnx"):
        assert word in shown, word
    cells = [line.split("│")[2].rstrip() for line in shown.splitlines() if line.startswith("│")]
    for line in (
        *LINES.splitlines(),
        "taps: 1, 2",
        "style: none",
        "trees:",
        "  paths: (0), (0, 1)",
        "  lookup_nodes: 8",
    ):
        assert f" {line}" in cells, line
    assert "calibrated on 9 positions" in " ".join(" ".join(cells).split())
    assert not any(mark in cell for cell in cells for mark in ("{", "[", "None", "False"))
    found = json.loads(show("--json"))
    assert found["provenance"] == PROVENANCE, "the whole, as it is"
    assert found["target"]["family"] == "llama"
    assert found["sizes"]["tokenizer.json"] == len("tokenizer.json") * 10
