"""The tool that decodes with every drafter: its rows, and what a stopped run does not do again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from workshop import Workshop

from spec_runtime.measure import bench
from tools.measure import compare_drafters


@pytest.fixture
def words(workshop: Workshop, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"say {text}", "category": text} for text in ("abc, abc, abc", "xyz")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--bundle", str(workshop.bundle("parallelspec")), "--prompts", str(prompts)]
    return [*words, "--max-new-tokens", "8", "--json", str(tmp_path / "out.json")]


def test_every_drafter_has_a_row_for_each_temperature_and_size(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first run is stopped after one subset of the prompts, and the second goes on."""
    words = [*words, "--temperature", "0", "1", "--nodes", "2", "4"]
    decoded: list[str] = []
    run_bench = bench.run

    def recorded(engines: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        if len(decoded) == 1:
            decoded.append("stopped")
            raise KeyboardInterrupt
        decoded.append(prompts[0].category)
        return run_bench(engines, prompts, *rest, **options)

    monkeypatch.setattr(bench, "run", recorded)
    with pytest.raises(KeyboardInterrupt):
        compare_drafters.main(words)
    compare_drafters.main(words)
    first, second = ("abc, abc, abc", "xyz")
    assert decoded == [first, "stopped", second, *(5 * [first, second])]
    found = json.loads((tmp_path / "out.json").read_text())
    names = ("parallelspec", "prompt_lookup", "lookahead")
    keys = [(row["drafter"], row["temperature"], row["size"]) for row in found["rows"]]
    assert keys == [(name, t, size) for name in names for t in (0, 1) for size in (2, 4)]
    for row in found["rows"]:
        assert (row["prompts"], row["identical"]) == (2, 1.0), "not what plain decoding writes"
        assert 1 <= row["accepted_length"] <= row["nodes"] <= row["size"]
        assert len(row["categories"]) == 2
    tokens = [row["tokens"] for row in found["rows"] if row["temperature"] == 0]
    assert len(set(tokens)) == 1, "greedy texts do not depend on the tree"
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(found["rows"])

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(bench, "run", never)
    compare_drafters.main(words)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == found["rows"]
    with pytest.raises(AssertionError, match="decoded again"):
        compare_drafters.main([*words, "--nodes", "3"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--drafter", "medusa"], "got drafter 'medusa', expected one of parallelspec"),
        (["--prompts", "no-such-file.jsonl"], "No such file or directory: 'no-such-file.jsonl'"),
        (["--nodes", "2", "1000"], "got 1000 nodes, expected at most the bundle's"),
    ],
)
def test_what_a_command_line_is_refused_for(
    words: list[str], changed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        compare_drafters.main([*words, *changed])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_figures_of_another_task_are_not_gone_on_with(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = {"settings": {"max_new_tokens": 9}, "decoded": {}}
    (tmp_path / "out.parts.json").write_text(json.dumps(ledger))
    with pytest.raises(SystemExit):
        compare_drafters.main(words)
    assert "out.parts.json holds figures of other settings" in capsys.readouterr().err
