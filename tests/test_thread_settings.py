"""The tool that compares thread settings: what is measured where, and that settings arrive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.measure import thread_settings as tool

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")
import tiny_bundle


def test_each_case_leaves_the_settings_two_that_differ() -> None:
    found = tool.cases(2)
    assert (found[0].threads, found[0].neighbours, found[0].settings) == (2, 0, tool.SETTINGS)
    assert {(each.threads, each.neighbours) for each in found[1:]} == {
        (4, 0),
        (2, 1),
        (1, 0),
        (1, 1),
    }
    assert all(each.settings == ("stop", "none") for each in found[1:])
    assert [each.threads for each in tool.cases(1)] == [1, 2, 1]


def test_a_process_for_each_setting_decodes_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case = tool.Case(1, 1, ("always", "one pool"))
    monkeypatch.setattr(tool, "cases", lambda cpus: [case])
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text(json.dumps({"prompt": "abcabc", "category": "a"}) + "\n")
    words = ["--bundle", tiny_bundle.write(tmp_path / "tiny"), "--prompts", prompts]
    words += ["--max-new-tokens", 4, "--rounds", 1, "--json", out]
    tool.main([str(word) for word in words])
    rows = json.loads(out.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["always", "one pool"]
    for row in rows:
        for mode in ("plain", "drafter"):
            assert row[mode]["median"] == row[mode]["least"] == row[mode]["greatest"] > 0
    shown = capfd.readouterr()
    assert "1 threads, beside 1 busy, one pool: plain " in shown.out
    assert shown.err == ""
