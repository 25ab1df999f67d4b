"""Proves that the fuzzing runner finds faults; `tools/ci/endure.py` has it try every kind."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("onnx")

import mutations
import planted
import runner
from cases import ACCEPTED, FAILED, REFUSED, Kind, draw
from kinds import KINDS

from tools.ci import fuzz


@pytest.mark.parametrize(("fault", "cause"), planted.CAUSES.items(), ids=planted.CAUSES)
def test_the_runner_finds_a_planted_fault_and_goes_on(fault: str, cause: str) -> None:
    seen: dict[int, str] = {}

    def note(kind: str, case: int, outcome: runner.Outcome) -> None:
        assert kind == fault
        seen[case] = outcome.verdict

    report = runner.run([planted.kind(fault)], planted.NUM_CASES, 0, 1, note)
    assert seen == {
        case: FAILED if case == planted.BAD else ACCEPTED if case % 2 else REFUSED
        for case in range(planted.NUM_CASES)
    }
    (failure,) = report.failures
    assert (failure["kind"], failure["case"]) == (fault, planted.BAD)
    assert cause in failure["cause"]
    tally = report.kinds[fault]
    assert (tally.cases, tally.accepted, tally.refused, tally.failed) == (8, 3, 4, 1)
    again = runner.run_one(planted.kind(fault), failure["case"])
    assert (again.verdict, again.cause) == (FAILED, failure["cause"])


def test_a_proper_refusal_is_no_failure() -> None:
    report = runner.run([planted.kind("good refusal")], planted.NUM_CASES, 0, 1)
    tally = report.kinds["good refusal"]
    assert (tally.accepted, tally.refused, tally.failed) == (3, 5, 0)


@pytest.mark.slow
def test_equal_seeds_give_equal_cases_whatever_the_number_of_workers() -> None:
    kinds = [KINDS["chat template"], KINDS["recipe"]]
    for kind in kinds:
        assert draw(kind, 40, 3) == draw(kind, 40, 3)
        assert draw(kind, 40, 3) != draw(kind, 40, 4)
    planted_kinds = [planted.kind("wrong"), planted.kind("escape")]
    one, two = (runner.run(planted_kinds, 16, 5, workers) for workers in (1, 2))
    digests = [{name: t.digest for name, t in r.kinds.items()} for r in (one, two)]
    assert digests[0] == digests[1]
    assert runner.run(planted_kinds, 16, 6, 1).kinds["wrong"].digest != digests[0]["wrong"]


def test_a_plan_shares_cases_by_weight() -> None:
    kinds = list(KINDS.values())
    batches = runner.plan(kinds, 10_000, 1)
    counts = {kind.name: sum(b.count for b in batches if b.kind == kind.name) for kind in kinds}
    assert abs(sum(counts.values()) - 10_000) <= len(kinds)
    assert counts["sampling parameters"] > 3 * counts["model folder"] > 0
    assert max(batch.count for batch in batches) <= runner.BATCH
    assert len({batch.seed for batch in batches}) == len(batches)


def test_the_page_of_reliability_says_what_each_kind_tries() -> None:
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text()
    table = page.partition("| kind | what is tried |")[2].partition("\n\n")[0]
    assert {line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]} == {*KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_cases_are_json(name: str) -> None:
    cases = draw(KINDS[name], 30, 0)
    assert len(cases) == 30
    assert repr(json.loads(json.dumps(cases))) == repr(cases)


def test_the_command_writes_counts_and_failures_that_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {name: planted.kind(name) for name in ("wrong", "good refusal")}
    monkeypatch.setattr(fuzz, "KINDS", kinds)
    out, inputs = tmp_path / "a/out.json", tmp_path / "inputs.jsonl.xz"
    words = ["--cases", "16", "--seed", "3", "--json", str(out), "--inputs", str(inputs)]
    assert fuzz.main(words) == 1
    shown = capsys.readouterr().out
    assert "16 cases, 1 failures, seed 3" in shown
    found = json.loads(out.read_text())
    assert (found["cases"], found["failures"], found["seed"]) == (16, 1, 3)
    assert found["kinds"]["good refusal"]["refused"] == 5
    assert len(fuzz.lzma.open(inputs).readlines()) == 16
    assert fuzz.main(["--replay", f"{out}#0"]) == 1
    assert "tokens differ" in capsys.readouterr().out
    assert fuzz.main(["--cases", "8", "--kinds", "good refusal", "--both-ways"]) == 0
    kinds["willing"] = Kind("willing", planted.cases, planted.open_willing)
    assert fuzz.main(["--cases", "8", "--kinds", "good refusal,willing", "--both-ways"]) == 1
    assert "all cases of willing end alike" in capsys.readouterr().out


def test_changes_of_documents_and_bytes() -> None:
    document = {"a": 1, "b": [2, {"c": "x"}]}
    changes: list[dict[str, Any]] = [
        {"do": "set", "at": [0], "value": {"$": "repeat", "text": "ab", "times": 2}},
        {"do": "shift", "at": [1, 2], "value": 5},
        {"do": "rename", "at": [3, 1, 0], "value": "d"},
    ]
    assert mutations.edited(document, changes) == {"a": "abab", "b": [7, {"d": "x"}]}
    assert document == {"a": 1, "b": [2, {"c": "x"}]}
    nested = mutations.edited(
        document, [{"do": "set", "at": [1], "value": {"$": "nest", "depth": 3}}]
    )
    assert mutations.dump(nested) == '{"a": 1, "b": [[[]]]}'
    half = 2**23
    for change, expected in (
        ({"do": "flip", "at": 0, "bit": 1}, b"cbcd"),
        ({"do": "cut", "at": half}, b"ab"),
        ({"do": "zero", "at": half, "size": 9}, b"ab\0\0"),
        ({"do": "ones", "at": 0, "size": 1}, b"\xffbcd"),
        ({"do": "drop", "at": 0, "size": 2}, b"cd"),
        ({"do": "insert", "at": 0, "text": "7a"}, b"zabcd"),
        ({"do": "swap", "at": 0, "to": half, "size": 1}, b"cbad"),
    ):
        assert mutations.damaged(b"abcd", [change]) == expected, change
