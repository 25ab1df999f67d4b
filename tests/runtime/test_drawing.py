"""Trees as drawings, read back: static ones, one of a real step, and `spec-runtime show --tree`."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from small import ACCURACY, CALIBRATION, known, small_manifest, write_small_bundle

from spec_runtime import cli
from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli.show import readable
from spec_runtime.trees import drawing
from spec_runtime.trees.budget import RankPath
from spec_runtime.trees.templates import searched
from spec_runtime.trees.tree import TokenTree

PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
Show = Callable[..., tuple[int, str, str]]


class Svg:
    """What a reader sees: nodes at their places, with the text beside each, and lines."""

    def __init__(self, text: str) -> None:
        root = ElementTree.fromstring(text)

        def all_of(tag: str) -> list[dict[str, str]]:
            return [each.attrib for each in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]

        texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
        self.title, self.labels = texts[0], texts[1:]
        self.size = float(root.attrib["width"]), float(root.attrib["height"])
        self.nodes = [(float(c["cx"]), float(c["cy"])) for c in all_of("circle")]
        self.radii = [float(c["r"]) for c in all_of("circle")]
        self.lines = {
            ((float(e["x1"]), float(e["y1"])), (float(e["x2"]), float(e["y2"])))
            for e in all_of("line")
        }
        self.text_at = [(float(t["x"]), float(t["y"])) for t in all_of("text")][1:]


def test_svg_has_every_node_label_and_edge() -> None:
    svg = Svg(drawing.svg(PATHS, ACCURACY, "a <b> & c"))
    assert svg.title == "a <b> & c"
    expected = {
        "root": None,
        "0  50%  p 0.500": "root",
        "1  20%  p 0.200": "root",
        "0.0  40%  p 0.200": "0  50%  p 0.500",
        "0.1  30%  p 0.150": "0  50%  p 0.500",
        "1.0  40%  p 0.080": "1  20%  p 0.200",
    }
    assert sorted(map(str, svg.labels)) == sorted(expected)
    place = dict(zip(map(str, svg.labels), svg.nodes, strict=True))
    assert len(set(svg.nodes)) == len(PATHS) + 1, "no node on another"
    edges = {(place[parent], place[child]) for child, parent in expected.items() if parent}
    assert svg.lines == edges
    # each text beside its own circle, all inside the picture
    for (x, y), (text_x, text_y) in zip(svg.nodes, svg.text_at, strict=True):
        assert 0 < text_x - x < 20
        assert 0 < y - text_y < 20
        assert 0 < x < svg.size[0] - 100
        assert 0 < y < svg.size[1]
    # the likelier the larger
    radius = dict(zip(map(str, svg.labels), svg.radii, strict=True))
    by_probability = sorted(radius, key=radius.__getitem__)
    assert by_probability[0] == "1.0  40%  p 0.080"
    assert by_probability[-2:] == ["0  50%  p 0.500", "root"]


def test_terminal_nests_children_below_their_parents() -> None:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(drawing.terminal(PATHS, ACCURACY, "title"))
    lines = captured.get().splitlines()
    assert lines[0] == "title"
    depth = [len(line) - len(line.lstrip("│├└─ ")) for line in lines]
    names = [line.lstrip("│├└─ ").split()[0] for line in lines[1:]]
    assert names == ["0", "0.0", "0.1", "1", "1.0"]
    assert depth == [0, 4, 8, 8, 4, 8]


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


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs `show --tree` on a bundle with a calibration: (exit code, stdout, stderr)."""

    def show(
        *arguments: object,
        calibration: dict[str, Any] | None = CALIBRATION,
        trees: dict[str, Any] | None = None,
        validation: Any = None,
    ) -> tuple[int, str, str]:
        folder = write_small_bundle(tmp_path / "small")
        manifest = bundles.read(folder).manifest
        about = {"drafters": {"parallelspec": {"validation": validation}}}
        manifest = dataclasses.replace(manifest, provenance=about)
        drafter = dataclasses.replace(manifest.drafters[0], calibration=calibration)
        if trees is not None:
            drafter = dataclasses.replace(drafter, trees=trees)
        bundles.write_manifest(folder, dataclasses.replace(manifest, drafters=(drafter,)))
        with pytest.raises(SystemExit) as end:
            cli.main(["show", "--bundle", str(folder), *map(str, arguments)])
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, captured.out, captured.err

    return show


def shown_paths(out: str) -> list[RankPath]:
    return [tuple(node["path"]) for node in json.loads(out)["nodes"]]


def test_show_draws_the_bundles_own_tree(show: Show) -> None:
    """A grown tree has no shape of its own: the best static one of its size stands for it."""
    code, out, err = show("--tree", "--json", trees={"max_nodes": 5})
    assert (code, err) == (0, "")
    assert shown_paths(out) == list(searched(ACCURACY, 5))
    _, out, _ = show("--tree", "--json", trees={"paths": [[0], [1], [1, 1]]})
    assert shown_paths(out) == [(0,), (1,), (1, 1)]
    nodes = json.loads(out)["nodes"]
    assert [node["acceptance"] for node in nodes] == [0.5, 0.2, 0.3]
    assert [node["probability"] for node in nodes] == pytest.approx([0.5, 0.2, 0.06])
    assert json.loads(out)["accepted_length"] == pytest.approx(1.76)
    _, out, _ = show("--tree", "--json", trees={"template": "chain:2"})
    assert shown_paths(out) == [(0,), (0, 0)]


def test_show_draws_templates_into_the_terminal_and_a_file(show: Show, tmp_path: Path) -> None:
    svg = tmp_path / "new" / "tree.svg"
    code, out, err = show("--tree", "cartesian:2,2", "--svg", svg)
    assert (code, err) == (0, "")
    assert "parallelspec, cartesian:2,2: 7 nodes, accepted length 2.19 expected" in out
    assert "0.1  30%  p 0.150" in out
    drawn = Svg(svg.read_text())
    assert (len(drawn.nodes), len(drawn.lines)) == (7, 6)
    assert "accepted length 2.19" in known(drawn.title)
    assert [*svg.parent.iterdir()] == [svg], "nothing half-written is left"
    _, out, _ = show("--tree", "--nodes", 3, "--json")
    assert shown_paths(out) == list(searched(ACCURACY, 3))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tree", "nosuch"], "got tree 'nosuch', expected one of chain:DEPTH"),
        (["--tree", "medusa64"], "got a tree of 4 levels and 10 candidates, expected at most 2"),
        (["--tree", "chain:2", "--nodes", 4], "got --nodes with tree chain:2"),
        (["--tree", "--drafter", "medusa"], "got drafter 'medusa', expected one this bundle"),
        (["chain:2"], "expected --tree with them"),
        (["--nodes", 3], "expected --tree with them"),
    ],
)
def test_show_refuses_in_one_line(show: Show, arguments: list[object], why: str) -> None:
    code, out, err = show(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert why in err


def test_without_calibration_show_says_how_to_get_one(show: Show) -> None:
    code, out, err = show("--tree", calibration=None)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run spec-export calibrate --bundle" in err
    code, out, _ = show(calibration=None)
    assert code == 0
    code, out, _ = show()
    assert "calibrated on 9 positions" in " ".join(out.replace("│", " ").split())


VALIDATION = {"top1_0": 0.5, "top5_0": 0.8, "top1_1": 0.4, "top5_1": 0.4, "accepted_length": 1.8}


def test_a_tree_needs_nothing_of_training(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its packages nor a calibration: what training validated will do."""
    for name in ("torch", "transformers", "onnx", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = show("--tree", "--nodes", 5, calibration=None, validation=VALIDATION)
    assert (code, err) == (0, "")
    title = "5 nodes, accepted length 1.94 estimated from the validation of its training"
    assert title in " ".join(out.split())  # 1 + 0.5 + 0.5 * 0.4 + 0.16 + 0.08
    _, out, _ = show("--tree", "--json", "--nodes", 3, calibration=None, validation=VALIDATION)
    assert json.loads(out)["is_estimated"]
    assert [node["acceptance"] for node in json.loads(out)["nodes"]] == [0.5, 0.4]
    _, out, _ = show("--tree", "--json", "--nodes", 3)
    assert not json.loads(out)["is_estimated"]


@pytest.mark.parametrize(
    "validation", [{}, [], {"top1_0": "0.5", "top5_0": 0.8}, {"top1_0": 0.9, "top5_0": 0.8}]
)
def test_a_validation_that_says_nothing_is_as_none(show: Show, validation: Any) -> None:
    code, _, err = show("--tree", calibration=None, validation=validation)
    assert (code, err.count("\n")) == (2, 1)
    assert "has no calibration" in err


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
    assert not any(mark in cell for cell in cells for mark in ("{", "[", "None", "False"))
    found = json.loads(show("--json"))
    assert found["provenance"] == PROVENANCE, "the whole, as it is"
    assert found["target"]["family"] == "llama"
    assert found["sizes"]["tokenizer.json"] == len("tokenizer.json") * 10
