"""Tests what a command says: one bar on a terminal, plain lines elsewhere, and no library's."""

import datetime
import re
from pathlib import Path

import pytest
from said import Said
from screen import screen
from tiny_gguf import write_gguf

from spec_export.cli import report as reports
from spec_export.cli.report import ProgressLines, TerminalReport
from spec_export.model import target
from spec_export.report import expected_end

PROGRAM = """
import sys
from spec_export.cli.report import TerminalReport

report = TerminalReport()
with report.stages(1):
    with report.stage("loading [red]the target"):
        report.line("a line [bold]as it is")
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
    assert [line for line in lines if line] == ["a line [bold]as it is", "a warning", "done"]


def test_elsewhere_each_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = TerminalReport()
    with report.stages(2):
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


def test_a_log_has_a_line_for_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part's speed tells the end, and what an earlier run has done is not counted."""
    clock, said = iter([100.0, 100.0, 110.0, 120.0, 130.0, 430.0, 440.0]), Said()
    monkeypatch.setattr(reports.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(reports, "expected_end", lambda seconds: f"{seconds:.0f} s left")
    lines = ProgressLines(said, "answers", done=20)
    # nothing new; the first part; the same tenth; the next; the same after a silence; the end
    for done in (20, 25, 29, 32, 33, 100):
        lines(done, 100, "9 tokens/s")
    assert said.lines == [
        "answers: 25 of 100 (25%), 150 s left, 9 tokens/s",
        "answers: 32 of 100 (32%), 170 s left, 9 tokens/s",
        "answers: 33 of 100 (33%), 1701 s left, 9 tokens/s",
    ]


def test_an_end_that_is_known_is_said_before_the_first_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said()
    monkeypatch.setattr(reports, "expected_end", lambda seconds: f"{seconds:.0f} s left")
    lines = ProgressLines(said, "answers")
    assert lines(0, 1000, "9 tokens/s", seconds_left=50.0) == "50 s left, 9 tokens/s"
    assert said.lines == ["answers: 0 of 1,000 (0%), 50 s left, 9 tokens/s"]


def test_progress_and_tables_reach_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    report = TerminalReport()
    with report.progress("answers [i]") as advance:
        for done in (0, 3, 6):
            advance(done, 6, "9 tokens/s")
    report.table(("graph", "MB"), [("target", "1.5")])
    shown = capsys.readouterr().err
    assert "answers [i]: 3 of 6 (50%), under 1 min left, ends " in shown
    assert re.search("answers \\[i\\] ━+ 6/6 9 tokens/s", shown)
    assert re.search("│ target │ 1.5 │", shown)


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
