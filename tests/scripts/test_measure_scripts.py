"""Runs each script of tools/measure once on tiny bundles."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import tiny_bundle
from small import toy_engine, write_small_bundle
from workshop import Workshop

import spec_runtime
from spec_runtime.errors import UserError
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import bench
from spec_runtime.measure.prompts import BenchPrompt
from spec_runtime.trees.budget import Budget
from tools.measure import (
    compare_acceptance,
    compare_drafters,
    compare_quantised,
    measure_all,
    measure_memory,
    spec_bench,
    step_costs,
    sweep_budgets,
)

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


def test_a_killed_run_of_spec_bench_goes_on_after_its_last_question(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_bench, decoded = bench.run, list[str | int]()

    def killed(engines: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        decoded.append(prompts[0].id)
        if len(decoded) == 3:
            raise KeyboardInterrupt
        return run_bench(engines, prompts, *rest, **options)

    monkeypatch.setattr(bench, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        spec_bench.main([*words, "--no-profile"])
    spec_bench.main([*words, "--no-profile"])
    assert decoded == [81, 91, 321, 321, 322]
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["overall"]["prompts"], found["overall"]["turns"]) == (4, 6)
    assert list(found["categories"]) == ["mt_bench", "qa"]
    assert (found["overall"]["identical"], found["divergences"]) == (1.0, [])
    for key in ("speedup", "speedup_end_to_end", "speedup_of_means"):
        assert found["overall"][key] > 0
    assert "not identical: 0 (0 near ties, 0 wider)" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds figures of other settings"):
        spec_bench.main([*words, "--no-profile", "--max-new-tokens", "7"])


def test_speedups_of_spec_bench_by_hand() -> None:
    """Each question has 11 tokens, the first of which its prompt's pass gives in one second."""
    by_key = {}
    for key, plain_seconds, seconds in (("1", 4.0, 1.0), ("2", 10.0, 10.0)):
        counts: Counter[str] = Counter(prompts=1, turns=1, identical=1)
        for prefix, decode in (("", seconds), ("plain_", plain_seconds)):
            counts |= Counter({f"{prefix}tokens": 10, f"{prefix}steps": 5})
            counts[f"{prefix}prefill_seconds"] = 1
            counts[f"{prefix}decode_seconds"] = decode  # type: ignore[assignment]
        by_key[key] = counts
    questions = [BenchPrompt(n, "qa", "text") for n in (1, 2)]
    found = spec_bench.summarise(questions, by_key, {})["categories"]["qa"]
    assert found["speedup"] == pytest.approx((20 / 11) / (20 / 14))
    assert found["speedup_end_to_end"] == pytest.approx((22 / 13) / (22 / 16))
    # means over questions: 11 / 2 and 1, against 11 / 5 and 1
    assert found["speedup_of_means"] == pytest.approx((11 / 2 + 1) / (11 / 5 + 1))
    assert found["accepted_length"] == 2.0


def test_each_drafter_decodes_once_at_each_temperature_and_size(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words += ["--temperature", "0", "0.7", "--nodes", "0", "4", "--lookup"]
    compare_drafters.main([*words, "--drafter", "parallelspec", "prompt_lookup"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["drafter"], row["temperature"], row["size"]) for row in rows] == [
        (name, temperature, size)
        for temperature in (0.0, 0.7)
        for name in ("parallelspec", "prompt_lookup", "parallelspec+prompt_lookup")
        for size in (0, 4)
    ]
    for row in rows:
        assert row["identical"] == 1.0, "seeded sampling draws plain decoding's text"
        assert 1 <= row["accepted_length"] <= row["nodes"] <= (row["size"] or 16)
    monkeypatch.setattr(bench, "run", None)  # nothing is decoded again
    compare_drafters.main([*words, "--drafter", "parallelspec"])
    with pytest.raises(UserError, match="got 1000 nodes, expected at most the bundle's"):
        compare_drafters.main([*words, "--drafter", "parallelspec", "--nodes", "1000"])


def test_every_acceptance_rule_has_a_row(words: list[str], tmp_path: Path) -> None:
    words += ["--limit", "2", "--temperature", "0.7", "--epsilon", "0.1", "--rejection"]
    compare_acceptance.main(words)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    rules = ["plain", "target_sampling", "rejection", "typical 0.1"]
    assert [row["rule"] for row in rows] == rules
    plain, sampled, *_ = rows
    assert plain["log p a token"] == pytest.approx(sampled["log p a token"]), "the same text"
    assert all(row["log p a token"] < 0 for row in rows)


def test_memory_is_that_of_a_fresh_process(words: list[str], tmp_path: Path) -> None:
    flags = ["--json", str(tmp_path / "out.json"), "--drafter", "none", "--max-new-tokens", "3"]
    measure_memory.main([*words[:2], *flags])  # --bundle comes first
    (row,) = json.loads((tmp_path / "out.json").read_text())["drafters"]
    assert row["peak_bytes"] > row["import_bytes"] > 1e6
    assert 0 < row["read_bytes"] <= row["file_bytes"]
    assert row["cache_bytes"] > 0


# ---- trees


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
    figures = sweep_budgets.summarise(runs, ["qa", "rag"])
    own = figures["2 nodes"]
    assert own["speedup"]["rag"] == {"median": 0.75, "least": 0.5, "greatest": 1.0}
    assert own["speedup"]["all"]["greatest"] == pytest.approx(2.0 / 1.5)
    assert (own["nodes"], own["accepted_length"]) == (3.0, 2.0)
    spread = figures["plain"]["speedup"]["all"]
    assert spread == pytest.approx({"median": 1.0, "least": 2 / 3, "greatest": 4 / 3})


def test_everybody_decodes_every_prompt_in_each_repeat(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path, profile: bool = True, **_: Any) -> spec_runtime.Engine:
        engine = toy_engine("prompt_lookup")
        return engine.with_budget(Budget(3)) if profile else engine

    monkeypatch.setattr(spec_runtime, "load", load)
    out, bundle = tmp_path / "out.json", write_small_bundle(tmp_path / "small")
    words = ["--bundle", bundle, "--prompts", questions, "--repeats", 2, "--nodes", 1, 4]
    words += ["--threshold", 0.5, "--max-new-tokens", 20, "--json", out]
    sweep_budgets.main([str(word) for word in words])
    figures = json.loads(out.read_text())
    rows = figures["contenders"]
    assert list(rows) == ["plain", "bundle", "tuned", "1 nodes", "4 nodes", "p >= 0.5"]
    assert rows["1 nodes"]["nodes"] == rows["plain"]["nodes"] == 1
    assert 1 < rows["tuned"]["nodes"] <= 3 < rows["4 nodes"]["nodes"] <= 4
    assert figures["best"] in ("1 nodes", "4 nodes", "p >= 0.5")


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


def test_quantised_bundles_are_compared_with_fp32(
    workshop: Workshop, words: list[str], questions: Path, tmp_path: Path
) -> None:
    """fp32 is no distance from itself."""
    exact, coarse = (workshop.bundle("parallelspec", each) for each in ("fp32", "int8"))
    given = ["--reference", str(exact), *words, "--bundle", str(exact), str(coarse)]
    compare_quantised.main([*given, "--rounds", "1", "--limit", "2"])
    same, other = json.loads((tmp_path / "out.json").read_text())["rows"]
    fidelity = same["divergence"], same["same_choice"], same["perplexity_over_fp32"]
    assert fidelity == (0, 1, pytest.approx(1))
    assert 0 < other["divergence"] < 1
    assert other["perplexity"] != same["perplexity"]
    assert other["bytes"] < same["bytes"]
    for name in ("plain", "drafted", "prompt"):
        assert same[name]["over_first"] == {"median": 1, "least": 1, "greatest": 1}
        assert other[name]["median"] > 0
    with pytest.raises(UserError, match="got a reference of int8, expected an fp32 one"):
        compare_quantised.main(["--reference", str(coarse), *given[2:]])


# ---- all of it


def test_every_stage_is_a_command_that_its_program_understands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None runs here. What tunes comes before what uses its profile."""
    monkeypatch.setenv("COLUMNS", "200")
    stages = measure_all.stages(tmp_path / "p", measure_all.Sizes())
    for stage in stages:
        first = stage.command[0]
        package = importlib.import_module(first if stage.is_tool else f"{stage.package}.cli")
        with pytest.raises(SystemExit):
            package.main(["--help"] if stage.is_tool else [first, "--help"])
        helped = capsys.readouterr().out
        for word in measure_all.command_of(stage, tmp_path, tmp_path, "model.gguf"):
            if word.startswith("--"):
                assert word in helped, (stage.name, word)
    names = [stage.name for stage in stages]
    assert len(set(names)) == len(names) > 20
    told = [
        stage.name
        for stage in stages
        if "--model" in measure_all.command_of(stage, tmp_path, tmp_path, "model.gguf")
    ]
    assert told == [
        *("transformers-fp32", "check"),
        *("many-clients-fp32", "many-clients-int8"),
        "rivals",
    ]
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
