"""Trees as drawings, read back; and `spec-runtime show --tree`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from small import ACCURACY, CALIBRATION, write_small_bundle

from spec_runtime import bundle as bundles
from spec_runtime import cli
from spec_runtime.trees import drawing
from spec_runtime.trees.templates import RankPath, cartesian, parse_tree, searched

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


@pytest.mark.parametrize("paths", [parse_tree("medusa64").paths, cartesian([3, 3, 2]), ((2,),)])
def test_no_two_nodes_share_a_place(paths: tuple[RankPath, ...]) -> None:
    place = drawing.layout(paths)
    assert len(set(place.values())) == len(place) == len(paths) + 1
    for path in paths:
        (column, row), (parent_column, parent_row) = place[path], place[path[:-1]]
        assert column == parent_column + 1
        assert row >= parent_row
    rows = {row for _, row in place.values()}
    assert rows == set(range(len(rows)))


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


def test_png_is_a_picture_of_that_size() -> None:
    pytest.importorskip("matplotlib")
    content = drawing.png(PATHS, ACCURACY, "title")
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    expected_width, expected_height = Svg(drawing.svg(PATHS, ACCURACY, "title")).size
    assert (width, height) == pytest.approx((1.5 * expected_width, 1.5 * expected_height), abs=1)


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs `show --tree` on a bundle with a calibration: (exit code, stdout, stderr)."""

    def show(
        *arguments: object,
        calibration: dict[str, Any] | None = CALIBRATION,
        trees: dict[str, Any] | None = None,
    ) -> tuple[int, str, str]:
        folder = write_small_bundle(tmp_path / "small")
        manifest = bundles.read(folder).manifest
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


def test_show_draws_templates_into_the_terminal_and_files(show: Show, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "new" / "tree.svg", tmp_path / "new" / "tree.png"
    code, out, err = show("--tree", "cartesian:2,2", "--svg", svg, "--png", png)
    assert (code, err) == (0, "")
    assert "parallelspec, cartesian:2,2: 7 nodes, accepted length 2.19 expected" in out
    assert "0.1  30%  p 0.150" in out
    drawn = Svg(svg.read_text())
    assert (len(drawn.nodes), len(drawn.lines)) == (7, 6)
    assert drawn.title is not None
    assert "accepted length 2.19" in drawn.title
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(svg.parent.iterdir()) == [png, svg], "nothing half-written is left"
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


def test_png_without_matplotlib_names_the_extra(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = show("--tree", "--png", tmp_path / "t.png")
    assert (code, err.count("\n")) == (2, 1)
    assert "matplotlib is not installed" in err
    assert "specsplit[export]" in err
    assert not (tmp_path / "t.png").exists()
