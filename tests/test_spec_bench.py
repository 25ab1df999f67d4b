"""The tool for all of Spec-Bench: two turns, resuming after a kill, and figures by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from workshop import Workshop

from spec_runtime import Engine
from spec_runtime.measure import bench
from spec_runtime.measure.audit import Divergence
from spec_runtime.measure.prompts import BenchPrompt
from tools.measure import spec_bench

ROWS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["say abc, abc", "say it again"]},
    {"question_id": 91, "category": "roleplay", "turns": ["say xyz", "and once more"]},
    {"question_id": 321, "category": "qa", "turns": ["say 0123 0123"]},
    {"question_id": 322, "category": "qa", "turns": ["say one two"]},
]


@pytest.fixture
def words(workshop: Workshop, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "spec_bench.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["--bundle", str(workshop.bundle("parallelspec")), "--prompts", str(prompts)]
    words += ["--max-new-tokens", "6", "--threads", "1", "--no-profile"]
    return [*words, "--json", str(tmp_path / "out.json")]


def test_a_killed_run_goes_on_behind_its_last_question(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats: list[list[dict[str, str]]] = []
    run_bench, encode = bench.run, Engine.encode

    def recorded(engine: Engine, prompt: Any, *rest: Any, **options: Any) -> list[int]:
        if isinstance(prompt, list) and isinstance(prompt[0], dict):  # a chat, no ids
            chats.append([*prompt])
        return encode(engine, prompt, *rest, **options)

    decoded: list[str | int] = []

    def killed(engines: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        if len(decoded) == 2:
            decoded.append("killed")
            raise KeyboardInterrupt
        decoded.append(prompts[0].id)
        return run_bench(engines, prompts, *rest, **options)

    monkeypatch.setattr(bench, "run", killed)
    monkeypatch.setattr(Engine, "encode", recorded)
    with pytest.raises(KeyboardInterrupt):
        spec_bench.main(words)
    assert not (tmp_path / "out.json").exists()
    assert spec_bench.main(words) == 0
    assert decoded == [81, 91, "killed", 321, 322]

    # Each way of decoding gets the second question behind its own answer to the first.
    assert len(chats) == 2 * 2
    for chat, row in zip(chats, (ROWS[0], ROWS[0], ROWS[1], ROWS[1]), strict=True):
        assert [message["role"] for message in chat] == ["user", "assistant", "user"]
        assert [chat[0]["content"], chat[2]["content"]] == row["turns"]
        assert chat[1]["content"]

    found = json.loads((tmp_path / "out.json").read_text())
    assert found["precision"] == "fp32"
    assert (found["overall"]["prompts"], found["overall"]["turns"]) == (4, 6)
    assert list(found["categories"]) == ["mt_bench", "qa"]
    assert found["categories"]["mt_bench"]["turns"] == 4
    assert found["overall"]["identical"] == 1.0
    assert found["divergences"] == []
    for key in ("speedup", "speedup_end_to_end", "speedup_of_means"):
        assert found["overall"][key] > 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "not identical: 0 (0 near ties, 0 wider)"
    assert len(shown) == 2 + 3 + 1

    monkeypatch.setattr(bench, "run", None)  # nothing is decoded again
    assert spec_bench.main(words) == 0
    again = json.loads((tmp_path / "out.json").read_text())
    assert again["categories"] == found["categories"]
    assert spec_bench.main([*words, "--max-new-tokens", "7"]) == 2
    assert "holds figures of other settings" in capsys.readouterr().err


def test_a_divergence_is_listed_with_its_gap(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question parts at a near tie, one at a wider gap, and one has no room in the context."""
    partings = {
        81: Divergence("81", 2, 7, 8, 1e-4, 10.0),
        321: Divergence("321", 3, 7, 8, 0.5, 9.0),
    }
    run_bench = bench.run

    def parting(engines: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        reports = run_bench(engines, prompts, *rest, **options)
        for each in reports:
            (pair,) = each.pairs
            if pair.prompt.id in partings:
                turn = bench.Turn(
                    pair.turns[0].plain, pair.turns[0].speculative, True, partings[pair.prompt.id]
                )
                each.pairs = [bench.Pair(pair.prompt, (turn, *pair.turns[1:]))]
            if pair.prompt.id == 91:
                each.pairs = []
                each.skipped = [{"turn": 1, "prompt": 91, "reason": "it is too long"}]
        return reports

    monkeypatch.setattr(bench, "run", parting)
    assert spec_bench.main([*words, "--limit", "2"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["near_ties"], found["wider"]) == (1, 1)
    near, wide = found["divergences"]
    assert (near["prompt"], near["category"], near["turn"], near["near_tie"]) == (
        81,
        "mt_bench",
        1,
        True,
    )
    assert (wide["prompt"], wide["position"], wide["gap"], wide["near_tie"]) == (321, 3, 0.5, False)
    assert found["skipped"] == [
        {"prompt": 91, "category": "mt_bench", "turn": 1, "reason": "it is too long"}
    ]
    assert found["overall"]["prompts"] == 3
    assert found["overall"]["identical"] == 1 / 3


def counts(plain_seconds: float, seconds: float) -> Counter[str]:
    """One turn of 11 tokens, the first of which its prompt's pass gives in one second."""
    found: Counter[str] = Counter(prompts=1, turns=1, identical=1)
    for prefix, decode in (("", seconds), ("plain_", plain_seconds)):
        found |= Counter({f"{prefix}tokens": 10, f"{prefix}steps": 5})
        found[f"{prefix}prefill_seconds"] = 1  # type: ignore[assignment]
        found[f"{prefix}decode_seconds"] = decode  # type: ignore[assignment]
    return found


def test_speedups_by_hand() -> None:
    questions = [BenchPrompt(n, "qa", "text") for n in (1, 2)]
    by_key = {"1": counts(4.0, 1.0), "2": counts(10.0, 10.0)}
    found = spec_bench.summarise(questions, by_key, {})["categories"]["qa"]
    assert found["speedup"] == pytest.approx((20 / 11) / (20 / 14))
    assert found["speedup_end_to_end"] == pytest.approx((22 / 13) / (22 / 16))
    # means over questions: 11 / 2 and 1, against 11 / 5 and 1
    assert found["speedup_of_means"] == pytest.approx((11 / 2 + 1) / (11 / 5 + 1))
    assert found["accepted_length"] == 2.0
