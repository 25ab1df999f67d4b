"""The tool that sweeps budgets: who races, and what its table makes of the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small import toy_engine, write_small_bundle

import spec_runtime
from spec_runtime.stats import Stats
from spec_runtime.trees.budget import Budget
from tools.measure import sweep_budgets as sweep


def decoded(num_tokens: int, seconds: float) -> Stats:
    stats = Stats(steps=num_tokens // 2, committed_tokens=num_tokens, drafted_tokens=num_tokens)
    stats.timings["verify"] = seconds
    return stats


def test_speedups_are_ratios_of_one_repeat() -> None:
    """Two repeats of a prompt each of two categories; the machine is half as fast in the second,
    so that only ratios within a repeat tell what the budget does."""
    runs = {
        "plain": [[decoded(10, 1.0), decoded(10, 1.0)], [decoded(10, 2.0), decoded(10, 2.0)]],
        "2 nodes": [[decoded(10, 0.5), decoded(10, 1.0)], [decoded(10, 1.0), decoded(10, 4.0)]],
    }
    figures = sweep.summarise(runs, ["qa", "rag"])
    own = figures["2 nodes"]
    assert own["speedup"]["qa"] == {"median": 2.0, "least": 2.0, "greatest": 2.0}
    assert own["speedup"]["rag"] == {"median": 0.75, "least": 0.5, "greatest": 1.0}
    assert own["speedup"]["all"]["greatest"] == pytest.approx(2.0 / 1.5)
    assert own["speedup"]["all"]["least"] == pytest.approx(4.0 / 5.0)
    assert (own["nodes"], own["accepted_length"]) == (3.0, 2.0)
    spread = figures["plain"]["speedup"]["all"]
    assert spread == pytest.approx({"median": 1.0, "least": 2 / 3, "greatest": 4 / 3})


def test_everybody_decodes_every_prompt_in_each_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = []

    def load(path: Path, profile: bool = True, **_: Any) -> spec_runtime.Engine:
        engine = toy_engine("prompt_lookup")
        if profile:
            engine = engine.with_budget(Budget(3))
            tuned.append(engine)
        return engine

    monkeypatch.setattr(spec_runtime, "load", load)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"prompt": text, "category": text[0]} for text in ("abcabcabc", "bcdbcdbcd")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--bundle", write_small_bundle(tmp_path / "small"), "--prompts", prompts]
    words += ["--repeats", 2, "--nodes", 1, 4, "--threshold", 0.5, "--max-new-tokens", 20]
    monkeypatch.setattr(sys, "argv", ["sweep", *map(str, words), "--json", str(out)])
    sweep.main()
    figures = json.loads(out.read_text())
    assert figures["provenance"]["prompts"]["ids"] == [1, 2]
    rows_of = figures["contenders"]
    assert list(rows_of) == ["plain", "bundle", "tuned", "1 nodes", "4 nodes", "p >= 0.5"]
    assert len(tuned) == 1
    for name, row in rows_of.items():
        assert list(row["speedup"]) == ["all", "a", "b"], name
    assert rows_of["1 nodes"]["nodes"] == rows_of["plain"]["nodes"] == 1
    assert 1 < rows_of["tuned"]["nodes"] <= 3 < rows_of["4 nodes"]["nodes"] <= 4
    assert figures["best"] in ("1 nodes", "4 nodes", "p >= 0.5")
    assert f"best of the sweep ({figures['best']})" in capsys.readouterr().out
