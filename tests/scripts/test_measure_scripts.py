"""Runs each script of tools/measure once on tiny bundles."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import tiny_bundle
from workshop import Workshop

from spec_runtime.errors import UserError
from spec_runtime.loop.stats import Stats
from tools.measure import compare, measure_all, step_costs, turns

QUESTIONS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["say abc, abc", "say it again"]},
    {"question_id": 91, "category": "roleplay", "turns": ["say xyz", "and once more"]},
    {"question_id": 321, "category": "qa", "turns": ["say 0123 0123"]},
    {"question_id": 322, "category": "qa", "turns": ["say one two"]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "spec_bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


@pytest.fixture
def words(workshop: Workshop, questions: Path, tmp_path: Path) -> list[str]:
    """Flags that scripts share; --json is out.json."""
    given: dict[str, Any] = {"bundle": workshop.bundle("parallelspec"), "prompts": questions}
    given |= {"json": tmp_path / "out.json", "max-new-tokens": 6, "threads": 1}
    return [word for name, each in given.items() for word in (f"--{name}", str(each))]


# ---- cases in turns


def decoded(num_tokens: int, seconds: float) -> Any:
    stats = Stats(steps=num_tokens // 2, committed_tokens=num_tokens, drafted_tokens=num_tokens)
    stats.timings["verify"] = seconds
    return SimpleNamespace(stats=stats, token_ids=[num_tokens])


def test_speedups_are_ratios_of_one_round() -> None:
    """Two rounds of a prompt each of two categories; the machine is half as fast in the second,
    so that only ratios within a round tell what the budget does."""
    runs = {
        "plain": [[decoded(10, 1.0), decoded(10, 1.0)], [decoded(10, 2.0), decoded(10, 2.0)]],
        "2 nodes": [[decoded(10, 0.5), decoded(10, 1.0)], [decoded(10, 1.0), decoded(10, 4.0)]],
    }
    found = compare.by_category(runs, ["qa", "rag"])
    own = found["2 nodes"]
    assert own["speedup"]["rag"] == {"median": 0.75, "least": 0.5, "greatest": 1.0}
    assert own["speedup"]["all"]["greatest"] == pytest.approx(2.0 / 1.5)
    assert (own["nodes"], own["accepted_length"]) == (3.0, 2.0)
    spread = found["plain"]["speedup"]["all"]
    assert spread == pytest.approx({"median": 1.0, "least": 2 / 3, "greatest": 4 / 3})


def test_whose_turn_is_first_rotates_and_seeds_are_the_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int, Any]] = []

    def engine(name: str) -> Any:
        def generate(ids: list[int], max_new_tokens: int, **options: Any) -> Any:
            asked.append((name, ids[0], options.get("seed")))
            return decoded(2, 1.0)

        return SimpleNamespace(generate=generate)

    cases = {name: turns.Case(engine(name)) for name in "ab"}
    runs = turns.run(cases, [[7], [8], [9]], 4, rounds=2)
    assert asked[:2] == [("a", 7, None), ("b", 7, None)], "to page in weights"
    order = "abbaab" + "baabba"
    prompts = [7, 7, 8, 8, 9, 9] * 2
    assert asked[2:] == [(n, p, p - 7) for n, p in zip(order, prompts, strict=True)]
    assert [len(each) for each in runs["a"]] == [3, 3]


# Of each study: flags, and how many rows there are.
STUDIES = {
    "drafters": ("--temperature 0 0.7 --nodes 0 4 --lookup --drafter parallelspec lookahead", 12),
    "acceptance": ("--temperature 0.7 --epsilon 0.1 --rejection", 4),
    "budgets": ("--rounds 2 --nodes 1 4 --threshold 0.5", 6),
    "quantised": ("--rounds 1", 2),
    "untuned": ("--drafter prompt_lookup --long-limit 0 --rounds 1", 2),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_a_row_for_each_case(
    study: str, workshop: Workshop, words: list[str], tmp_path: Path
) -> None:
    flags, count = STUDIES[study]
    words += [*flags.split(), "--limit", "2"]
    if study == "quantised":
        exact, coarse = (workshop.bundle("parallelspec", each) for each in ("fp32", "int8"))
        words += ["--reference", str(exact), "--bundle", str(exact), str(coarse)]
    assert compare.main([study, *words]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rows = found["contenders"] if study == "budgets" else found["rows"]
    assert len(rows) == count
    CHECKS[study](rows)


def check_drafters(rows: list[dict[str, Any]]) -> None:
    names = ("parallelspec", "lookahead", "parallelspec+prompt_lookup")
    expected = [(name, t, size) for t in (0.0, 0.7) for name in names for size in (0, 4)]
    assert [(row["drafter"], row["temperature"], row["size"]) for row in rows] == expected
    for row in rows:
        assert row["identical"] == 1.0, "seeded sampling draws plain decoding's text"
        assert 1 <= row["accepted_length"] <= row["nodes"] <= (row["size"] or 16)


def check_acceptance(rows: list[dict[str, Any]]) -> None:
    rules = ["plain", "target_sampling", "rejection", "typical 0.1"]
    assert [row["rule"] for row in rows] == rules
    plain, sampled, *_ = rows
    assert plain["log p a token"] == pytest.approx(sampled["log p a token"]), "the same text"
    assert all(row["log p a token"] < 0 for row in rows)


def check_budgets(rows: dict[str, Any]) -> None:
    assert list(rows) == ["plain", "bundle", "tuned", "1 nodes", "4 nodes", "p >= 0.5"]
    assert rows["1 nodes"]["nodes"] == rows["plain"]["nodes"] == 1
    assert 1 < rows["4 nodes"]["nodes"] <= 4
    assert list(rows["bundle"]["speedup"]) == ["all", "mt_bench", "qa"]


def check_quantised(rows: list[dict[str, Any]]) -> None:
    """fp32 is no distance from itself."""
    same, other = rows
    fidelity = same["divergence"], same["same_choice"], same["perplexity_over_fp32"]
    assert fidelity == (0, 1, pytest.approx(1))
    assert 0 < other["divergence"] < 1
    assert other["bytes"] < same["bytes"]
    for name in ("plain", "drafted", "prompt"):
        assert same[name]["over_first"] == {"median": 1, "least": 1, "greatest": 1}
        assert other[name]["median"] > 0


def check_untuned(rows: list[dict[str, Any]]) -> None:
    assert [row["prompts"] for row in rows] == ["short", "short at temperature 1"]
    for row in rows:
        assert list(row["engines"]) == ["bundle's trees", "first use"]
        assert row["engines"]["first use"]["accepted_length"] >= 1
        assert row["engines"]["first use"]["speedup"]["median"] > 0


CHECKS: dict[str, Callable[[Any], None]] = {
    "drafters": check_drafters,
    "acceptance": check_acceptance,
    "budgets": check_budgets,
    "quantised": check_quantised,
    "untuned": check_untuned,
}


def test_tokens_are_compared_with_transformers(
    workshop: Workshop, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["transformers", *words, "--limit", "2", "--model", str(workshop.llama())]
    words += ["--drafter", "prompt_lookup"]
    assert compare.main(words) == 0
    monkeypatch.setattr(compare, "generated", lambda *_: [5, 6])
    assert compare.main(words) == 1
    found = json.loads((tmp_path / "out.json").read_text())["drafters"]["prompt_lookup"]
    assert found["identical"] == 2 - len(found["differences"]) < 2
    assert found["differences"][0]["position"] in (0, 1, 2)


def test_what_cannot_be_compared_is_said(workshop: Workshop, words: list[str]) -> None:
    with pytest.raises(UserError, match="got 1000 nodes, expected at most the bundle's"):
        compare.main(["drafters", *words, "--drafter", "parallelspec", "--nodes", "1000"])
    coarse = str(workshop.bundle("parallelspec", "int8"))
    with pytest.raises(UserError, match="got a reference of int8, expected an fp32 one"):
        compare.main(["quantised", *words, "--reference", coarse, "--limit", "1"])


def test_every_context_and_size_of_a_pass_is_measured(tmp_path: Path) -> None:
    tiny_bundle.write(tmp_path / "bundles" / "fp32")
    out = tmp_path / "out.json"
    words = ["--bundles", tmp_path / "bundles", "--precisions", "fp32", "--nodes", 1, 3]
    words += ["--contexts", 8, 20, "--repeats", 2, "--runs", 2, "--operators", "--json", out]
    step_costs.main([str(word) for word in words])
    figures = json.loads(out.read_text())
    rows = figures["passes"]["fp32"]
    assert [(row["context"], row["nodes"]) for row in rows] == [(8, 1), (8, 3), (20, 1), (20, 3)]
    first, _, longer, last = rows
    assert (first["over_one_node"], first["over_first"], longer["over_one_node"]) == (1, 1, 1)
    assert last["over_one_node"] == pytest.approx(last["ms"]["median"] / longer["ms"]["median"])
    for each in figures["operators"]["fp32"]:
        assert each["ms"].pop("others") > -1e-9
        assert len(each["ms"]) > 0, "which ones take a share worth naming is up to the clock"
        assert min(each["ms"].values()) > 0
    with pytest.raises(UserError, match="got contexts 100000, expected 1 to "):
        step_costs.main([*map(str, words), "--contexts", "100000"])


# ---- all of it


@pytest.mark.parametrize("model", [None, "model.gguf"])
def test_every_stage_is_a_command_that_its_program_understands(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
) -> None:
    """None runs here. What tunes comes before what uses its profile."""
    monkeypatch.setenv("COLUMNS", "200")
    every = [*measure_all.stages(tmp_path / "p", tmp_path, tmp_path, model=model)]
    helped: dict[str, str] = {}
    for stage in every:
        _, how, first, verb, *_ = stage.words
        if how == "-c":
            first = first.split("; from ")[1].split()[0]
        if not verb.startswith("-"):
            first = f"{first} {verb}"
        if first not in helped:
            package, *words = first.split()
            with pytest.raises(SystemExit):
                importlib.import_module(package).main([*words, "--help"])
            helped[first] = capsys.readouterr().out
        for word in stage.words[3:]:
            assert "{" not in word
            if word.startswith("--"):
                assert word in helped[first], (stage.name, word)
    names = [stage.name for stage in every]
    assert len(set(names)) == len(names) > 20
    told = [stage.name for stage in every if "--model" in stage.words]
    clients = ["many-clients-fp32", "many-clients-int8", "rivals"]
    assert told == (["transformers-fp32", "check", *clients] if model else [])
    for precision in measure_all.PRECISIONS:
        assert names.index(f"tune-{precision}") < names.index(f"sweep-{precision}")
    assert names.index("tune-int8") < names.index("acceptance-int8")


def test_stages_run_by_name_and_failures_are_reported(
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes = {"audit-int8": 1, "bench-fp32": 2}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = Path(command[command.index("--json") + 1]).stem
        return subprocess.CompletedProcess(command, codes[name])

    monkeypatch.setattr(subprocess, "run", run)
    built: list[str] = []
    monkeypatch.setattr(measure_all, "build", lambda precision, *_: built.append(precision))
    words = ["--prompts", str(questions), "--bundles", str(tmp_path), "--results", str(tmp_path)]
    assert measure_all.main([*words, "--stages", "bench-fp32", "audit-int8"]) == 1
    assert built == ["fp32", "int8"]
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("bench-fp32: 0 s, exit code 2, FAILED")
    assert lines[1] == "audit-int8: 0 s, exit code 1"
