"""The tree of a step as a drawing, read back, and what `spec-runtime show` prints."""

import dataclasses
import itertools
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
from spec_runtime.trees import drawing
from spec_runtime.trees.tree import TokenTree

# root 5 with children 7 and 8; 9 and 6 below 7; 4 below 8
TREE = TokenTree(np.array([5, 7, 8, 9, 6, 4]), np.array([0, 0, 0, 1, 1, 2]))
TEXTS = [" <root>", " a", "b&c", "\n", "a very long text of a token", "語"]


class AcceptedSvg:
    """What a reader sees of one accepted tree: boxes with a text and a kind, and lines by kind."""

    def __init__(self, picture: drawing.AcceptedTree) -> None:
        root = ElementTree.fromstring(f"<svg>{''.join(picture.elements)}</svg>")
        self.size = picture.right, picture.bottom + drawing.BOX_HEIGHT
        groups = [g for g in root.iter("g") if g.attrib["class"].startswith("node ")]
        self.kinds = [g.attrib["class"].split()[1] for g in groups]
        self.texts = ["".join(t.text or "" for t in g.iter("text")) for g in groups]
        self.boxes = [
            tuple(float(g[0].attrib[key]) for key in ("x", "y", "width", "height")) for g in groups
        ]
        self.edges = [
            e.attrib["class"].split()[1]
            for e in root.iter("path")
            if e.attrib["class"].startswith("edge")
        ]

    def overlaps(self) -> list[tuple[int, int]]:
        return [
            (i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(self.boxes), 2)
            if a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3]
            if b[1] < a[1] + a[3]
        ]

    def is_inside(self) -> bool:
        return all(
            x > 0 and x + width < self.size[0] and y > 0 and y + height < self.size[1]
            for x, y, width, height in self.boxes
        )


def test_an_accepted_tree_shows_its_path_and_the_bonus() -> None:
    step = AcceptedSvg(drawing.accepted_tree(TREE, [0, 2], TEXTS, " the"))
    assert step.texts == ["␣<root>", "␣a", "b&c", "↵", "a␣very␣long␣text␣…", "語", "␣the"]
    assert step.kinds == ["root", "refused", "accepted", "refused", "refused", "refused", "bonus"]
    assert sorted(step.edges) == ["accepted", "bonus", *["refused"] * 4]
    assert not step.overlaps()
    assert step.is_inside()
    x, y = ([box[i] for box in step.boxes] for i in (0, 1))
    # the path goes along the first row: root, node 2, the bonus; the others stand below
    assert y[0] == y[2] == y[6] == min(y)
    assert all(y[node] > y[0] for node in (1, 3, 4, 5))
    assert x[0] < x[1] == x[2] < x[3] == x[4] == x[5] == x[6]


@pytest.mark.parametrize("seed", range(10))
def test_accepted_trees_of_any_shape_do_not_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    parents = [0, *(int(rng.integers(0, node)) for node in range(1, n))]
    tree = TokenTree(np.arange(n), np.array(parents))
    texts = ["x" * int(rng.integers(0, 30)) for _ in range(n)]
    path = tree.path(int(rng.integers(0, n)))
    step = AcceptedSvg(drawing.accepted_tree(tree, path, texts, ""))
    assert len(step.boxes) == n + 1
    assert not step.overlaps()
    assert step.is_inside()
    accepted = [node for node, kind in enumerate(step.kinds) if kind == "accepted"]
    assert accepted == sorted(path[1:])


@pytest.mark.parametrize(
    ("path", "texts"), [([], TEXTS), ([0, 3], TEXTS), ([1], TEXTS), ([0, 2], TEXTS[:-1])]
)
def test_an_accepted_tree_is_refused_without_a_path_or_texts(
    path: list[int], texts: list[str]
) -> None:
    with pytest.raises(ValueError, match="expected a path from the root and one text a node"):
        drawing.accepted_tree(TREE, path, texts, "")


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
