"""What single drafters do besides what all of them must: what is read, sizes, beginnings, noise."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import SMALL, D, features_of, make_batch, make_drafter, new_drafter, width_of
from guessing import every_log_q
from tiny_backbone import TRIMMED, VOCAB
from workshop import Workshop

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.add import add
from spec_export.build.make_bundle import BuildOptions
from spec_export.drafters.amphista import Config, Drafter
from spec_export.drafters.layers import noisy_features
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import checkpoint
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.proposers.heads import OnePassProposer
from spec_runtime.proposers.rows import LastFeature

# ---- Amphista ----


@pytest.mark.parametrize(
    ("options", "token_moves", "table_moves"),
    [
        ({}, True, True),
        ({"sampled_token": False}, False, True),
        ({"staged": "none"}, False, True),
        ({"auto_embedding": False}, True, False),
    ],
)
def test_what_moves_the_first_guess(
    options: dict[str, Any], token_moves: bool, table_moves: bool
) -> None:
    """The sampled token t + 1 of the row itself; the position of another head, by attention."""
    drafter, batch = make_drafter("amphista", **options), make_batch()

    def first_guess() -> torch.Tensor:
        return drafter.guesses(batch, VOCAB)[1][0, 3, 0]

    before = first_guess()
    batch.token_BT[0, 4] = (batch.token_BT[0, 4] + 1) % VOCAB
    after = first_guess()
    assert (not torch.equal(before, after)) == token_moves
    if drafter.position_table is not None:
        with torch.no_grad():
            drafter.position_table[3] += 1
    assert (not torch.equal(first_guess(), after)) == table_moves


def test_a_stateless_one_runs_from_the_last_feature(workshop: Workshop, tmp_path: Path) -> None:
    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    drafter = Drafter(Config(staged="none"), target.ends(Backbone.from_transformers(hf_model)))
    saved = checkpoint.save_drafter(
        tmp_path / "drafter", drafter.state_dict(), "amphista", drafter.config, {}
    )
    bundle = make_bundle.build(
        BuildOptions(str(workshop.llama()), (), [saved], out=tmp_path / "bundle", lanes=1)
    )
    engine = spec_runtime.load(bundle, threads=1, lookup=False)
    assert isinstance(engine.proposer, OnePassProposer)
    assert isinstance(engine.proposer._rows, LastFeature)
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    result = engine.generate("say abc, 3", **options)
    plain = engine.with_drafter("none").generate("say abc, 3", **options)
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted_tokens > 39


# ---- DFlash ----


def test_a_markov_head_adds_its_bias_to_pairs_and_to_guess_0() -> None:
    drafter = make_drafter("dflash", None, sample_from_anchor=True, markov_rank=4)
    torch.nn.init.normal_(drafter.markov_write)
    batch = make_batch((9,), width_of(drafter))
    with torch.no_grad():
        V, t = len(drafter.head_VD), 5
        plain_KV = drafter.output_rows(drafter.blocks(batch, torch.tensor([[t]])))[0, 0]
        plain_KV = plain_KV @ drafter.head_VD.T
        bias_VV = drafter.markov_read @ drafter.markov_write.T
        log_q_KV = every_log_q(drafter, batch)[t]
        expected_V = torch.log_softmax(plain_KV[0] + bias_VV[batch.token_BT[0, t + 1]], -1)
        torch.testing.assert_close(log_q_KV[0], expected_V, rtol=0, atol=1e-5)
        torch.testing.assert_close(log_q_KV[1:], torch.log_softmax(plain_KV[1:], -1))
        # with every token a candidate nothing is left for the tail
        ids, _, pair = drafter.guesses_with_pairs(batch, V)
        expected_VV = torch.log_softmax(plain_KV[1] + bias_VV, -1)
        before, behind = ids[0, t, 0], ids[0, t, 1]
        assert pair is not None
        torch.testing.assert_close(pair[0, t, 0], expected_VV[before][:, behind], rtol=0, atol=1e-4)


# ---- EAGLE ----


def test_noise_is_seeded_and_as_large_as_eagles() -> None:
    """Uniform in ± 0.1 · 512 / length, on what is read; what is regressed stays clean."""
    drafter, batch = make_drafter("eagle", feature_noise=0.2), make_batch((40, 20))
    assert batch.feature_BTF is not None
    before = batch.feature_BTF.clone()
    losses = [drafter.loss(batch, torch.Generator().manual_seed(s))[0].item() for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(batch.feature_BTF, before)
    noisy = noisy_features(batch, drafter.config.feature_noise, torch.Generator().manual_seed(0))
    assert noisy is not None
    noise = noisy - before
    for b, length in ((0, 40), (1, 20)):
        half = 0.1 * 512 / length
        assert 0.98 * half < float(noise[b].abs().max()) <= half * 1.001
        assert abs(float(noise[b].mean())) < 0.05 * half
    clean = make_drafter("eagle")
    assert clean.loss(batch)[0].item() == clean.loss(batch, torch.Generator())[0].item()


# ---- Hydra ----


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_guess_reads(prefix: bool) -> None:
    """Guess k of row 4: tokens 5 … 5 + k; feature 4, or with a prefix layer features up to 4."""
    drafter = make_drafter("hydra", prefix_layer=prefix, num_guesses=3)
    batch = make_batch((12,))
    feature_TD = features_of(batch)[0]

    def rows() -> torch.Tensor:
        with torch.no_grad():
            context, paths = drafter.context(batch), drafter.paths(batch)
            return drafter.path_rows(context[:, 4], paths[:, 4])[0]

    def changed() -> list[bool]:
        return ((rows() - before).abs().amax(-1) > 1e-4).tolist()

    before = rows()
    for position in range(12):
        kept = feature_TD[position].clone()
        feature_TD[position] = torch.randn(D)
        assert changed() == [position in (range(5) if prefix else [4])] * 3
        feature_TD[position] = kept
        token = batch.token_BT[0, position].item()
        batch.token_BT[0, position] = (token + 1) % VOCAB
        assert changed() == [5 <= position <= 5 + k for k in range(3)]
        batch.token_BT[0, position] = token


# ---- Medusa ----


def test_many_rows_go_through_a_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter("medusa", heads="own", soft_weight=0.3)
    batch = make_batch((40,))
    results = []
    for rows in (1000, 1):  # chunks of four times as many
        monkeypatch.setattr("spec_export.drafters.losses.CHUNK_ROWS", rows)
        drafter.zero_grad()
        loss, counts = drafter.loss(batch)
        loss.backward()
        results.append((loss.detach(), counts["correct_K"], drafter.output_heads[0].grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-6)


def test_a_bundle_feeds_each_drafter_its_own_taps(workshop: Workshop, tmp_path: Path) -> None:
    """EAGLE, which is added later, reads only the final feature, the other drafter of the bundle a
    tap too, which its entry names as older bundles did."""
    old, both, llama = workshop.bundle("parallelspec"), tmp_path / "both", str(workshop.llama())
    add(old, workshop.drafter("eagle"), llama, out=both)
    for name in bundles.read(old).manifest.files:
        assert (both / name).read_bytes() == (old / name).read_bytes()
    for name, message in (
        ("eagle", "has a drafter eagle already"),
        ("eagle3", r"reads fused.eagle3, which this bundle's target does not give: build the b"),
        ("skip_layer", "reads the target's own layers"),
    ):
        with pytest.raises(UserError, match=message):
            add(both, workshop.drafter(name), llama)
    shutil.copytree(llama, tmp_path / "other")
    with pytest.raises(UserError, match="got the model other for a bundle of llama"):
        add(old, workshop.drafter("eagle"), str(tmp_path / "other"))
    manifest = bundles.read(both).manifest
    assert sorted(manifest.provenance["drafters"]) == ["eagle", "parallelspec"]
    older, added = manifest.drafters
    config = {key: value for key, value in older.config.items() if key != "features"}
    older = dataclasses.replace(older, config=config | {"taps": [1]})
    bundles.write_manifest(both, dataclasses.replace(manifest, drafters=(older, added)))

    engine = spec_runtime.load(both, "parallelspec", threads=1, lookup=False)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    for name in ("eagle", "parallelspec", "eagle"):
        got = engine.with_drafter(name, lookup=False).generate("say abc, 3", **options)
        alone = spec_runtime.load(workshop.bundle(name), name, threads=1, lookup=False)
        expected = alone.generate("say abc, 3", **options)
        assert got.token_ids == expected.token_ids
        assert got.stats.drafted_tokens == expected.stats.drafted_tokens > 0


# ---- ReDrafter ----


def test_sizes_are_the_authors() -> None:
    """After [h ; s] of width 2d come the blocks and the output matrix, with nothing between."""
    drafter = make_drafter("redrafter", TRIMMED, width="both", head="own", num_layers=2)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert shapes == {
        "w": (D, D),
        "u": (D, D),
        "b": (D,),
        "layers.0": (2 * D, 2 * D),
        "layers.1": (2 * D, 2 * D),
        "biases.0": (2 * D,),
        "biases.1": (2 * D,),
        "own_head": (len(TRIMMED), 2 * D),
    }


# ---- semi-autoregressive ----


def test_alpha_ascends_and_learns_at_a_rate_of_its_own() -> None:
    """Before training the newest of four tokens weighs four times as much as the first."""
    drafter = new_drafter("semi_autoregressive", num_guesses=4, alpha_rate=30.0)
    alpha_K = torch.sigmoid(drafter.h_q.alpha)
    torch.testing.assert_close(alpha_K, torch.tensor([0.2, 0.4, 0.6, 0.8]))
    (one, others), (factor, (alpha,)) = drafter.trained_groups()
    assert (one, factor) == (1.0, 30.0)
    assert alpha is drafter.h_q.alpha
    assert {id(p) for p in [*others, alpha]} == {id(p) for p in drafter.parameters()}
    assert len(others) + 1 == len(list(drafter.parameters()))
    other_kind = new_drafter("semi_autoregressive", kind="rnn")
    assert [factor for factor, _ in other_kind.trained_groups()] == [1.0]


def test_sizes_are_the_papers() -> None:
    drafter = make_drafter("semi_autoregressive", head_width=1024)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    V, width = len(drafter.draft_token_ids), SMALL["semi_autoregressive"]["head_width"]
    assert shapes["w_p"] == (D, 1024)
    assert shapes["w_q"] == (D // 2, 1024)
    assert shapes["w3"] == (V, 2048)
    assert shapes["b3"] == (V,)
    assert shapes["h_q.first"] == (D, D // 2)
    assert shapes["h_q.second"] == (D // 2, D // 2)
    assert make_drafter("semi_autoregressive", kind="transformer", layers=0).w_q.shape == (D, width)
    assert make_drafter("semi_autoregressive", kind="lstm").w_q.shape == (D // 2, width)


def test_an_untrained_layer_passes_its_input_on() -> None:
    """At every level, whatever the keys and values of the path before it."""
    torch.manual_seed(3)
    h_q = new_drafter("semi_autoregressive", kind="transformer", layers=2, num_guesses=3).h_q
    x, state = torch.randn(4, D), torch.randn(4, h_q.state_width)
    for level in range(3):
        y, state = h_q(x, state, torch.tensor([level]))
        assert torch.equal(y, x)
