"""The tool that measures everything: its stages are commands that verbs and tools understand."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.measure import measure_all

PLACE = ["--prompts", "p.jsonl", "--bundles", "b", "--results", "r"]


def test_the_stages_are_the_headline_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_all.main([*PLACE, "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert sorted(names) == sorted(
        [
            *(
                "bench-fp32",
                "bench-int8",
                "lookup-fp32",
                "lookup-int8",
                "acceptance-int8",
                "memory-fp32",
            ),
            *("audit-fp32", "audit-int8", "audit-int4", "audit-fp32-strict"),
            *(f"{what}-{each}" for what in ("tune", "sweep") for each in ("fp32", "int8", "int4")),
            *(
                "transformers-fp32",
                "spec-bench-fp32",
                "spec-bench-int8",
                "rivals",
                "check",
                "threads-int8",
                "steps",
            ),
        ]
    )
    for precision in ("fp32", "int8", "int4"):
        assert names.index(f"tune-{precision}") < names.index(f"sweep-{precision}")
    assert names.index("tune-int8") < names.index("acceptance-int8")


def test_every_command_is_understood(tmp_path: Path) -> None:
    """Every flag that a stage gives is one that its verb or tool lists; none runs here."""
    stages = measure_all.stages(tmp_path / "p", measure_all.Sizes())
    helped: dict[str, str] = {}
    for stage in stages:
        command = measure_all.command_of(stage, tmp_path, tmp_path)
        first = stage.command[0]
        if first not in helped:
            program = command[: command.index(first) + 1]
            done = subprocess.run(
                [*program, "--help"],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "COLUMNS": "200"},
            )
            helped[first] = done.stdout
        for word in command[1:]:
            if word.startswith("--"):
                assert word in helped[first], (stage.name, word)


def test_stages_run_alone_and_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n")
    codes = {"audit-int8": 1, "bench-fp32": 2}
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = Path(command[command.index("--json") + 1]).stem
        ran.append(name)
        return subprocess.CompletedProcess(command, codes[name])

    monkeypatch.setattr(subprocess, "run", run)
    built: list[str] = []
    monkeypatch.setattr(measure_all, "build", lambda precision, folder: built.append(precision))
    place = ["--prompts", prompts, "--bundles", tmp_path, "--results", tmp_path / "r"]
    words = [*map(str, place), "--stages", "bench-fp32", "audit-int8"]
    assert measure_all.main(words) == 1
    assert (ran, built) == (["bench-fp32", "audit-int8"], ["fp32", "int8"])
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("bench-fp32: 0 s, exit code 2, FAILED")
    assert lines[1] == "audit-int8: 0 s, exit code 1"
    with pytest.raises(SystemExit):
        measure_all.main([*words, "nosuch"])
    assert "got stages nosuch, expected some of" in capsys.readouterr().err
