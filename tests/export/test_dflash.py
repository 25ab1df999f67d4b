"""DFlash and DSpark: graph against module, pairs, alignment, and what a config refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formulas import backbone, features_of, make_batch, make_drafter, width_of
from graphs import Runner
from guessing import TOLERANCE, check_guesses, every_log_q
from tiny_backbone import TRIMMED, VOCAB, chain

from spec_export.drafters.dflash import Config
from spec_export.graphs.slots import to_slots

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "num_kv_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DSpark": {"sample_from_anchor": True, "markov_rank": 8},
    "a Markov head and fill-in": {"markov_rank": 8, "qk_norms": False},
    "DFlash 2": {"markov_rank": 8, "selector": True, "conv_size": 3, "conv_group": 8},
    "windows": {"sliding_layers": (0, 2), "window": 5, "causal_layers": (0, 1), "layers": 3},
    "sizes of its own": {
        **SIZES,
        **{"head_dim": 24, "norm_eps": 1e-3, "own_embedding": True, "own_head": True},
        "rope": {"rope_type": "default", "rope_theta": 100.0},
    },
}


@pytest.mark.parametrize("form", ["contiguous", "slots"])
@pytest.mark.parametrize("options", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_the_graph_guesses_as_the_module_does(
    options: dict[str, Any], form: str, tmp_path: Path
) -> None:
    """Context comes in chunks; the block after each one is scratch, and sees all of it."""
    drafter = make_drafter("dflash", TRIMMED, **options)
    if drafter.config.markov_rank:  # which starts as zeros
        torch.nn.init.normal_(drafter.markov_write)
        torch.nn.init.normal_(drafter.markov_read)
    model = drafter.export(backbone().config)["drafter"]
    if form == "slots":
        to_slots(model)
    runner = Runner(model, tmp_path, form, 64)
    batch = make_batch((24,), width_of(drafter))
    with torch.no_grad():
        _, *taps = features_of(batch)[0].split(drafter.target_width, -1)
        fused_TD = drafter.fusion(taps).numpy()
    log_q_RKV = every_log_q(drafter, batch)
    C, t = drafter.config.top_k, -1
    ids_RKC, log_prob_RKC, pair_RKCC = drafter.guesses_with_pairs(batch, C)
    first, size, outputs = (
        drafter.config.first_row,
        drafter.config.block_size,
        drafter.output_names(),
    )
    for c in (7, 1, 3, 1, 6):
        context_CD, t = fused_TD[t + 1 : t + 1 + c], t + c
        root = int(batch.token_BT[0, t + 1])
        tokens = np.array([0] * c + [VOCAB + root] + [2 * VOCAB] * (size - 1))
        features = np.concatenate([context_CD, np.zeros((size, len(fused_TD[0])), np.float32)])
        rows = range(c + first, c + size)
        runner.block = c
        got = runner.step(tokens, chain(c + size), outputs, rows, features=features[None])
        if drafter.config.selector:  # its probabilities are among the candidates
            apart = np.abs(got["guess_log_probs"] - log_prob_RKC[0, t].numpy())
        else:
            apart = check_guesses(got["guess_ids"], got["guess_log_probs"], log_q_RKV[t])
        assert apart.max() <= TOLERANCE
        if pair_RKCC is not None:
            assert got["guess_ids"].tolist() == ids_RKC[0, t].tolist()
            assert np.abs(got["pair_log_probs"] - pair_RKCC[0, t].numpy()).max() <= TOLERANCE
        runner.cache.commit(range(c))


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taps": ()}, "got no taps, expected the target layers"),
        ({"block_size": 1}, "got block_size 1, expected 2 or more"),
        ({"markov_rank": -1}, "got markov_rank -1, expected 0 or more"),
        ({"layers": 0}, "got layers 0"),
        ({"anchor_fraction": 1.5}, "got anchor_fraction 1.5, expected at most 1"),
    ],
)
def test_what_a_config_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{"taps": (1,)} | fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": VOCAB}, f"got mask_token_id {VOCAB}, expected one below {VOCAB}"),
        ({"hidden_size": 48}, "got hidden_size 48 with the target's embedding and head"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter("dflash", **options)
