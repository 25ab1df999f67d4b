"""The tool that measures passes: every size has its row, and operators their share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.measure import step_costs as tool

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")
import tiny_bundle


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    tiny_bundle.write(tmp_path / "bundles" / "fp32")
    return tmp_path / "bundles"


def test_every_context_and_size_is_measured(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["--bundles", bundles, "--precisions", "fp32", "--contexts", 8, 20, "--nodes", 1, 3]
    words += ["--repeats", 2, "--runs", 2, "--threads", 1, "--operators", "--json", out]
    tool.main([str(word) for word in words])
    figures = json.loads(out.read_text())
    rows = figures["passes"]["fp32"]
    assert [(row["context"], row["nodes"]) for row in rows] == [(8, 1), (8, 3), (20, 1), (20, 3)]
    for row in rows:
        assert 0 < row["ms"]["least"] <= row["ms"]["median"] <= row["ms"]["greatest"]
    first, _, longer, last = rows
    assert (first["over_one_node"], first["over_first"], longer["over_one_node"]) == (1, 1, 1)
    ratio = last["ms"]["median"] / longer["ms"]["median"]
    assert last["over_one_node"] == pytest.approx(ratio)
    profiles = figures["operators"]["fp32"]
    assert [(each["context"], each["nodes"]) for each in profiles] == [
        *((8, 1), (8, 8)),
        *((20, 1), (20, 8)),
    ]
    for each in profiles:
        assert {"Mod", "others"} < set(each["ms"])
        assert sum(each["ms"].values()) > 0
    assert "context    20,  3 nodes:" in capsys.readouterr().out


def test_a_context_that_the_bundle_has_no_room_for_is_one_line(bundles: Path) -> None:
    words = ["--bundles", str(bundles), "--precisions", "fp32", "--contexts", "100000"]
    with pytest.raises(ValueError, match="got contexts 100000, expected 1 to ") as caught:
        tool.main(words)
    assert "\n" not in str(caught.value)
