"""One run of the bench compares a real drafter with and without prompt lookup, and lookup alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spec_runtime import cli

if TYPE_CHECKING:
    from workshop import Workshop

MERGED, ALONE, LOOKUP = "parallelspec+prompt_lookup", "parallelspec", "prompt_lookup"


def bench(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *map(str, words)])
    assert isinstance(end.value.code, int | None)
    return end.value.code or 0


def test_lookup_is_compared_at_equal_nodes(workshop: "Workshop", tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    texts = ("one two. one two. one two.", "abc, abc, abc, abc, xyz")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = ["--bundle", workshop.bundle(ALONE), "--prompts", prompts, "--json", out]
    names = [word for name in (MERGED, ALONE, LOOKUP) for word in ("--drafter", name)]
    assert bench(*words, *names, "--nodes", 8, "--max-new-tokens", 32, "--ignore-eos") == 0
    figures = json.loads(out.read_text())
    assert list(figures["drafters"]) == [MERGED, ALONE, LOOKUP]
    assert (figures["nodes"], figures["tuned"]) == (8, [])
    rows = {name: each["overall"] for name, each in figures["drafters"].items()}
    assert {row["tokens"] for row in rows.values()} == {62}
    assert {row["identical"] for row in rows.values()} == {1.0}
    # 7 nodes besides the root at most, near the end of an answer fewer
    assert rows[LOOKUP]["nodes_per_step"] < rows[ALONE]["nodes_per_step"] <= 7
    assert rows[ALONE]["nodes_per_step"] - 1 < rows[MERGED]["nodes_per_step"] <= 7
    assert rows[MERGED]["acceptance_by_depth"] != rows[ALONE]["acceptance_by_depth"]
    sizes = {name: each["parameters"] for name, each in figures["drafters"].items()}
    assert sizes[LOOKUP] == 0 < sizes[MERGED] == sizes[ALONE]


def test_the_same_drafter_twice_is_refused(
    workshop: "Workshop", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    words = ["--bundle", workshop.bundle(ALONE), "--prompts", prompts]
    names = ["--drafter", MERGED, "--drafter", ALONE, "--lookup"]
    assert bench(*words, *names) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"got drafter {MERGED} twice, expected different ones" in error


def test_clients_are_answered_one_after_another_and_together(
    workshop: "Workshop", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(4)))
    words = ["--bundle", workshop.bundle(ALONE), "--prompts", prompts, "--json", out]
    assert bench(*words, "--clients", 3, "--parallel", 2, "--max-new-tokens", 9) == 0
    figures = json.loads(out.read_text())
    assert (figures["clients"], figures["parallel"]) == (3, 2)
    ways = [(row["drafter"], row["together"]) for row in figures["traffic"]]
    drafter = ways[1][0]
    assert drafter.startswith(ALONE)
    assert ways == [("none", 1), (drafter, 1), ("none", 2), (drafter, 2)]
    assert len({row["tokens"] for row in figures["traffic"]}) == 1
    table = capsys.readouterr().out
    assert "3 clients" in table
    assert f"{figures['traffic'][3]['tokens_per_second']:.1f}" in table
