"""Counting bigrams: the numbers by brute force, and their way through training into a bundle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
import count_bigrams as tool

import spec_runtime
from spec_export import make_bundle
from spec_export.bundling.options import BuildOptions
from spec_export.training import bigrams, checkpoint
from spec_export.training.data import Example
from spec_runtime.bundle import manifest as bundles

if TYPE_CHECKING:
    from workshop import Workshop

NAME, VOCAB = "parallelspec", 12
DRAFTED = np.array([9, 1, 2, 3, 4, 5])


def examples(number: int = 40) -> list[Example]:
    """Returns sequences of a few tokens, half of which are prompts."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(number):
        token_T = rng.integers(0, 7, 20).astype(np.int32)
        loss_T = np.arange(20) >= rng.integers(1, 15)
        found.append(Example(token_T, loss_T))
    return found


def test_the_table_is_that_of_its_formula() -> None:
    data = examples()
    pairs = [
        (int(p), int(c))
        for each in data
        for p, c, is_answer in zip(each.token_T, each.token_T[1:], each.loss_T[1:], strict=False)
        if is_answer
    ]
    followed, following = Counter(p for p, _ in pairs), Counter(c for _, c in pairs)
    table = bigrams.table(data, DRAFTED, VOCAB)
    assert table is not None
    seen = Counter(pairs)
    kept = [pair for pair in sorted(seen) if seen[pair] >= 2 and {*pair} <= {*DRAFTED.tolist()}]
    assert list(zip(table["previous"].tolist(), table["next"].tolist(), strict=True)) == kept
    for (p, c), bias in zip(kept, table["bias"].tolist(), strict=True):
        share = following[c] / len(pairs)
        behind = (seen[p, c] + 16 * share) / (followed[p] + 16)
        assert bias == pytest.approx(0.8 * np.log(behind / share), rel=1e-5)
    assert table["token"].tolist() == [1, 2, 3, 4, 5], "9 is in no answer"
    expected = [0.8 * np.log(16 / (followed[p] + 16)) for p in table["token"].tolist()]
    assert table["unseen"].tolist() == pytest.approx(expected, rel=1e-5)


def test_answers_without_a_pair_that_comes_twice_have_no_table() -> None:
    token_T = np.arange(5, dtype=np.int32)
    assert bigrams.table([Example(token_T, token_T > 0)], DRAFTED, VOCAB) is None


@pytest.fixture(scope="module")
def answers(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of answers in which some words follow each other often."""
    path = tmp_path_factory.mktemp("bigrams") / "answers.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "ab " * 9},
            ]
        }
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_counted_table_goes_into_the_bundle(
    workshop: Workshop, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, drafter = workshop.llama(), workshop.drafter(NAME)
    words = [drafter, "--data", answers, "--out", tmp_path / "drafter", "--model", model]
    tool.main([str(word) for word in words])
    assert "pairs, of " in capsys.readouterr().out
    before, after = (checkpoint.load_drafter(each) for each in (drafter, tmp_path / "drafter"))
    assert all(before.state[name].equal(after.state[name]) for name in before.state)
    assert after.bigrams is not None
    assert after.provenance["bigrams"]["pairs"] == len(after.bigrams["bias"]) > 0

    out = tmp_path / "bundle"
    options = BuildOptions(str(model), [], drafter_checkpoints=[tmp_path / "drafter"], out=out)
    make_bundle.build(options)
    built = bundles.read(out)
    names = {spec.name for spec in built.manifest.drafters[0].graphs["drafter"].outputs}
    assert "pair_log_probs" in names
    with spec_runtime.load(out, profile=False) as engine:
        plain = engine.with_drafter("none").generate("ab ab", max_new_tokens=20, ignore_eos=True)
        drafted = engine.generate("ab ab", max_new_tokens=20, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids


def test_a_drafter_that_knows_its_guesses_is_refused(
    workshop: Workshop, answers: Path, tmp_path: Path
) -> None:
    words = [workshop.drafter("eagle"), "--data", answers, "--out", tmp_path / "drafter"]
    with pytest.raises(ValueError, match="got drafter eagle, expected one that guesses in "):
        tool.main([str(word) for word in words])
