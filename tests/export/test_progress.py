"""A build's progress: one bar on a terminal, plain lines elsewhere, and none of a library's."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from screen import screen
from tiny_gguf import write_gguf

from spec_export import progress, target
from spec_export.progress import StageReport, TenthLines, expected_end
from spec_runtime.cli.terminal import Console

PROGRAM = """
import sys
from spec_export.progress import StageReport

with StageReport(1) as report:
    with report.stage("loading [red]the target"):
        report.print("a table")
        print("a warning", file=sys.stderr)
    report.expect(2)
    for name in ("a", "b"):
        with report.stage(f"exporting {name}"):
            pass
print("done")
"""


def test_a_terminal_shows_one_bar() -> None:
    """Each state takes the place of the one before, what others print stays, and in the end the bar
    is gone."""
    with screen(PROGRAM) as terminal:
        assert terminal.end() == 0
    assert "0/1 loading [red]the target" in terminal.text
    assert "2/3 exporting b" in terminal.text
    lines: list[str] = [""]
    for part in re.split(r"(\r|\n|\x1b\[2K|\x1b\[1A)", terminal.raw):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part == "\x1b[1A":
            lines.pop()  # nothing stands below it
        elif part != "\r":
            lines[-1] += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part)
    assert [line for line in lines if line] == ["a table", "a warning", "done"]


def test_elsewhere_each_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with StageReport(2) as report:
        for what in ("loading the target", "hashing the files"):
            with report.stage(what):
                pass
    found = re.sub(r" +\d+\.\d s", "SECONDS", capsys.readouterr().err)
    assert found == "SECONDS  loading the target\nSECONDS  hashing the files\n"


def test_loading_a_target_draws_no_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even transformers' own over the tensors of a GGUF file, which heeds no setting."""
    from transformers.utils import logging

    path = tmp_path / "model.gguf"
    write_gguf(path)
    logging.enable_progress_bar()
    target.load(target.resolve(str(path)))
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled(), "as it was"


def test_a_log_has_a_line_for_each_tenth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first part's speed tells the end, and what an earlier run has done is not counted."""
    clock = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress, "expected_end", lambda seconds: f"{seconds:.0f} s left")
    lines = TenthLines(Console(stderr=True), "answers", done=20)
    for done in (20, 25, 29, 32, 100):  # nothing new; the first part; the same tenth; the end
        lines(done, 100, ", 9 tokens/s")
    assert capsys.readouterr().err.splitlines() == [
        "answers: 25%, 150 s left, 9 tokens/s",
        "answers: 32%, 170 s left, 9 tokens/s",
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (30, "under 1 min left, ends 21:31"),
        (41 * 60, "41 min left, ends 22:11"),
        (300 * 60, "300 min left, ends Mar 05 02:30"),
    ],
)
def test_the_expected_end_names_the_time_of_day(seconds: float, expected: str) -> None:
    now = datetime.datetime(2026, 3, 4, 21, 30, 45)
    assert expected_end(seconds, now) == expected
