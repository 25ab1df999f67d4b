"""PARD: a language model and masks against transformers' own forward pass; its import, from folder
to bundle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import backbone, make_batch, make_drafter
from graphs import Runner
from guessing import TOLERANCE, check_guesses, check_pairs, random_table
from importing import Lines
from lossless import require_lossless
from tiny_backbone import TRIMMED, VOCAB, chain
from tiny_target import save_llama
from torch import Tensor

from spec_export.build import make_bundle
from spec_export.build.drafters import load_module
from spec_export.build.make_bundle import BuildOptions
from spec_export.drafters.pard import Drafter
from spec_export.graphs.slots import to_slots
from spec_export.imports.drafters import importer
from spec_export.imports.drafters.importer import Overrides, run
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training.checkpoint import load_drafter
from spec_runtime.errors import UserError

SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
}

OF_TARGET: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 98},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


def published_logits(model: Any, token_T: Tensor, mask: int, num_masks: int) -> Tensor:
    """Returns by transformers the logits [K+1, rows] of the tokens after these, as PARD's authors
    draft: the text, then masks, and what the last rows say."""
    ids = torch.cat((token_T, token_T.new_full((num_masks,), mask)))
    logits: Tensor = model(input_ids=ids[None]).logits[0, len(token_T) - 1 :]
    return logits.detach()


def check_against(
    model: Any, mask: int, vocabulary: Tensor, drafter: Drafter, folder: Path | None
) -> None:
    """Compares the guesses of the module with `published_logits` over a `vocabulary`, and given a
    folder those of the graph in both forms, which reads a text in chunks of uneven size."""
    batch, K = make_batch((24,)), drafter.config.num_masks
    token_T, V = batch.token_BT[0], len(drafter.embed_VD)
    log_q: dict[int, Tensor] = {}
    for t in range(23):
        logits = published_logits(model, token_T[: t + 2], mask, K)
        log_q[t] = torch.full((K + 1, V), -torch.inf)
        log_q[t][:, vocabulary] = torch.log_softmax(logits[:, vocabulary], -1)
    ids, log_probs = (x[0].numpy() for x in drafter.guesses(batch, 5))
    for t in range(23):
        assert check_guesses(ids[t], log_probs[t], log_q[t]).max() <= TOLERANCE, t
    if folder is None:
        return
    graph = drafter.export(backbone().config)["drafter"]
    for form, exported in (("contiguous", graph), ("slots", to_slots(graph.clone()))):
        runner, begin = Runner(exported, folder / form, form, 64), 0
        for c in (8, 1, 3, 1, 6, 5):
            tokens = np.concatenate([token_T[begin : begin + c], V + np.arange(K)])
            rows = range(c - 1, c + K)
            got = runner.step(tokens, chain(c + K), drafter.output_names(), rows)
            runner.cache.commit(range(c))
            begin += c
            apart = check_guesses(got["guess_ids"], got["guess_log_probs"], log_q[begin - 2])
            assert got["guess_ids"].shape == (K + 1, drafter.config.top_k)
            assert apart.max() <= TOLERANCE, (form, begin)
            check_pairs(drafter, got)


def test_module_and_graph_are_the_published_model(tmp_path: Path) -> None:
    """With a table of bigrams its pairs are the module's."""
    drafter = make_drafter("pard", TRIMMED, num_masks=3, top_k=5)
    drafter.add_bigrams(random_table(drafter.draft_token_ids.numpy()))
    check_against(drafter.model, VOCAB, drafter.draft_token_ids, drafter, tmp_path)


def test_many_groups_are_guessed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, batch = make_drafter("pard", num_masks=2), make_batch((24, 17))
    whole = drafter.guesses(batch, 5)[1]
    monkeypatch.setattr("spec_export.drafters.pard.CHUNK_GROUPS", 7)
    torch.testing.assert_close(drafter.guesses(batch, 5)[1], whole, rtol=0, atol=1e-4)


def test_a_part_of_the_groups_trains() -> None:
    drafter, batch = make_drafter("pard", num_masks=2, anchor_fraction=0.3), make_batch((12, 9))
    _, counts = drafter.loss(batch, torch.Generator().manual_seed(0))
    assert counts["count_K"][0] <= 4 + 3 < 10 + 7
    assert counts["count_K"].min() >= 1


# ---- import ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target") / "llama")


def save_pard(folder: Path, mask: Any = 99, **options: Any) -> Path:
    """Writes a drafter's folder: a language model with `pard_token` in its config."""
    save_llama(folder, **SIZES | {"vocab_size": 104} | options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True, "dtype": "bfloat16"},
        {"family": "qwen2", "vocab_size": 98},
        {"family": "qwen3", "head_dim": 8},
    ],
)
def test_what_is_imported_is_the_published_model(
    options: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    """Its table may have more rows than the target's, of which a mask may be one."""
    mask = options.get("vocab_size", 104) - 1
    source = save_pard(tmp_path / "pard", mask, **options)
    saved = load_drafter(run(str(source), str(llama), tmp_path / "out", is_measured=False))
    header = json.loads((tmp_path / "out/config.json").read_text())
    stored = {kind for kind, *_ in header["tensors"].values()}
    assert stored == {options.get("dtype", "float32")}
    model = target.load(target.resolve(str(source)))[0]
    of_target = Backbone.from_transformers(target.load(target.resolve(str(llama)))[0])
    drafter = load_module(saved, of_target.config, target.ends(of_target))
    assert drafter.config.num_guesses == 8
    folder = tmp_path if "dtype" in options else None  # of one family
    check_against(model, mask, torch.arange(98), drafter, folder)


def test_a_target_may_have_more_rows_than_the_model(llama: Path, tmp_path: Path) -> None:
    """Its tokenizer names none of them, but its head may."""
    padded = save_llama(tmp_path / "padded", vocab_size=120)
    source = save_pard(tmp_path / "pard")
    saved = load_drafter(run(str(source), str(padded), tmp_path / "out", is_measured=False))
    of_target = Backbone.from_transformers(target.load(target.resolve(str(padded)))[0])
    drafter = load_module(saved, of_target.config, target.ends(of_target))
    assert drafter.draft_token_ids.tolist() == list(range(104))
    runner = Runner(drafter.export(backbone().config)["drafter"], tmp_path, "contiguous", 64)
    tokens = [5, 110, *range(120, 127)]
    got = runner.step(tokens, chain(9), ["guess_ids", "guess_log_probs"], range(1, 9))
    assert np.isfinite(got["guess_log_probs"]).all()
    assert got["guess_ids"].max() < 104


def test_it_is_measured(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target as its own drafter is right about the next token, and nearly never about others:
    a token accepted and the target's own make a step's length two."""
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1", "say one two"))
    source = tmp_path / "pard"
    save_pard(source, 97, **OF_TARGET)
    report = Lines()
    out = run(str(source), str(llama), tmp_path / "out", report=report)
    assert "PARD's pard; a llama of " in report.lines[0]
    length = load_drafter(out).provenance["imported"]["chain_length"]
    assert report.lines[-1] == f"accepted length of its chains on 2 answers: {length:.2f}"
    assert 1.9 <= length < 3


@pytest.mark.slow
def test_an_imported_drafter_changes_no_token(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build imports it; it has the target's precision, as every whole model. In fp32 see
    test_contract.py."""
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    source = save_pard(tmp_path / "pard")
    known: Any = {"drafter_checkpoints": [source], "precision": "int8", "lanes": 1}
    bundle = make_bundle.build(BuildOptions(str(llama), out=tmp_path / "bundle", **known))
    require_lossless(bundle, ["pard"])


def other_tokens(folder: Path) -> Path:
    save_pard(folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"a": 68', '"ä": 68'))
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "other tokens": (other_tokens, "token 68 is 'ä', expected the target's 'a'"),
    "fewer rows": (lambda path: save_pard(path, 5, vocab_size=90), "with 90 embeddings, expected"),
    "no such mask": (lambda path: save_pard(path, 104), "got pard_token 104 in the config, expect"),
    "no mask": (lambda path: save_pard(path, True), "pard_token: got bool True, expected int"),
    "another family": (
        lambda path: save_pard(path, family="gemma"), "got a model of model_type 'gemma', expected",
    ),
    "windows": (
        lambda path: save_pard(
            path, family="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0
        ),
        "got a model with sliding windows, expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, llama: Path, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    source = make(tmp_path / "pard")
    with pytest.raises(UserError, match=message) as raised:
        run(str(source), str(llama), tmp_path / "out", is_measured=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_settings_of_others_and_short_contexts_are_refused(llama: Path, tmp_path: Path) -> None:
    source = save_pard(tmp_path / "pard", max_position_embeddings=64)
    with pytest.raises(UserError, match=r"got --taps for .*, expected none: it has no such"):
        run(str(source), str(llama), tmp_path / "out", Overrides(taps=(1,)))
    out = run(str(source), str(llama), tmp_path / "out", is_measured=False)
    options = BuildOptions(str(llama), drafter_checkpoints=[out], out=tmp_path / "bundle")
    with pytest.raises(UserError, match="pard with a context of 64 tokens, expected the bundle's "):
        make_bundle.build(options)
