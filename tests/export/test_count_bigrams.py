"""Counting bigrams: the numbers by brute force, and their way through training into a bundle."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("torch")
import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.options import BuildOptions
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


@pytest.mark.slow
def test_a_counted_table_goes_into_the_bundle(workshop: "Workshop", tmp_path: Path) -> None:
    drafter = checkpoint.load_drafter(workshop.drafter(NAME))
    ids = drafter.draft_token_ids
    assert ids is not None
    pair = np.tile(ids[:2], 9).astype(np.int32)
    table = bigrams.table([Example(pair, np.ones(18, bool))], ids, int(ids.max()) + 1)
    assert table is not None
    folder, out = tmp_path / "drafter", tmp_path / "bundle"
    about = drafter.config, drafter.provenance, ids
    checkpoint.save_drafter(folder, drafter.state, drafter.name, *about, table)

    make_bundle.build(BuildOptions(str(workshop.llama()), [], [folder], out=out, lanes=1))
    built = bundles.read(out)
    names = {spec.name for spec in built.manifest.drafters[0].graphs["drafter"].outputs}
    assert "pair_log_probs" in names
    with spec_runtime.load(out, profile=False) as engine:
        plain = engine.with_drafter("none").generate("ab ab", max_new_tokens=20, ignore_eos=True)
        drafted = engine.generate("ab ab", max_new_tokens=20, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
