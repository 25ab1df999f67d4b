"""Amphista: its equations and loss row by row, and what the ablations leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from formulas import (
    D,
    attend,
    backbone,
    check_loss,
    cross_entropy,
    make_batch,
    make_drafter,
    variants,
    width_of,
)
from tiny_backbone import TRIMMED, VOCAB
from torch import Tensor, nn
from torch.nn import functional as F
from workshop import Workshop

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.drafters.amphista import Config, Drafter
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.training import checkpoint
from spec_runtime.proposers.heads import OnePassProposer
from spec_runtime.proposers.rows import LastFeature

# ---- the equations, one row at a time ----


def norm(x_D: Tensor, gain_D: Tensor, drafter: Drafter) -> Tensor:
    return x_D * torch.rsqrt((x_D * x_D).mean(-1, keepdim=True) + drafter.dims.norm_eps) * gain_D


def reference_layer(layer: Any, x_RD: Tensor, drafter: Drafter) -> Tensor:
    """A causal decoder layer with grouped-query attention."""
    x_RD = x_RD + attend(drafter, layer, x_RD, range(len(x_RD))) @ layer.out
    gate, up = (norm(x_RD, layer.mlp_norm, drafter) @ layer.gate_up).chunk(2, -1)
    return x_RD + (F.silu(gate) * up) @ layer.down


def reference_attention(layer: Any, x_KD: Tensor, drafter: Drafter) -> Tensor:
    """Every one of the K rows attends all K."""
    H, Dh = drafter.dims.num_heads, drafter.dims.head_dim
    q, k, v = (norm(x_KD, layer.norm, drafter) @ layer.qkv).split(H * Dh, -1)
    mixed = []
    for head in range(H):
        part = slice(head * Dh, (head + 1) * Dh)
        mixed.append(torch.softmax(q[:, part] @ k[:, part].T * Dh**-0.5, -1) @ v[:, part])
    x_KD = x_KD + torch.cat(mixed, -1) @ layer.out
    if drafter.config.feed_forward:
        gate, up = (norm(x_KD, layer.mlp_norm, drafter) @ layer.gate_up).chunk(2, -1)
        x_KD = x_KD + (F.silu(gate) * up) @ layer.down
    return x_KD


def reference_rows(drafter: Drafter, token_T: Tensor, feature_TF: Tensor) -> Tensor:
    """What the output heads read, [T-1, K, D], for one sequence."""
    config, K = drafter.config, drafter.config.num_heads
    R = len(token_T) - 1
    stages, chunks = [feature_TF[:R, :D]], list(feature_TF[:R, : width_of(drafter)].split(D, -1))
    for mixer, layer, gain in zip(drafter.mixers, drafter.layers, drafter.final_norms, strict=True):
        if config.sampled_token:
            chunks.append(drafter.embed_VD[token_T[1:]])
        pairs = zip(chunks, mixer.norms, strict=True)
        mixed = torch.cat([norm(chunk, own, drafter) for chunk, own in pairs], -1) @ mixer.fc
        chunks = [reference_layer(layer, mixed, drafter)]
        stages.append(norm(chunks[0], gain, drafter))
    rows = []
    for t in range(R):
        group = []
        for k in range(1, K + 1):
            of_two = 1 if k <= K // 2 else 2
            h = stages[{"none": 0, "one": 1, "two": of_two}[config.staged]][t]
            group.append(F.silu(h @ drafter.blocks[k - 1][0].weight) + h)  # type: ignore[index]
        x_KD = torch.stack(group)
        if config.auto_embedding:
            if config.position_table:
                assert drafter.position_table is not None
                x_KD = x_KD + drafter.position_table
            for attention in drafter.attention:
                x_KD = reference_attention(attention, x_KD, drafter)
        rows.append(x_KD)
    return torch.stack(rows)


@variants("amphista")
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 2.0)])
def test_the_loss_and_its_gradient_are_the_formulas(
    options: dict[str, Any], weights: tuple[float, float]
) -> None:
    soft, hard = weights
    drafter = make_drafter("amphista", TRIMMED, **options, lambda_soft=soft, lambda_hard=hard)
    config = drafter.config

    def logits_of(token_T: Tensor, feature_TF: Tensor) -> list[list[Tensor]]:
        heads = drafter.output_heads or [drafter.head_VD] * config.num_heads
        return [
            [head @ row for head, row in zip(heads, rows_KD, strict=True)]
            for rows_KD in reference_rows(drafter, token_T, feature_TF)
        ]

    shares = [(hard, soft)] * config.num_heads
    # taps that others read follow the final feature
    check_loss(
        drafter,
        lambda batch: cross_entropy(drafter, batch, logits_of, shares),
        (12,),
        width=3 * D,
        atol=1e-4,
    )


# ---- the ablations ----


def names_of(module: nn.Module) -> set[str]:
    """Names of the parameters, indices left out."""
    return {".".join(p for p in n.split(".") if not p.isdigit()) for n in module.state_dict()}


def inputs_of(model: ir.Model) -> set[str]:
    return {str(value.name) for value in model.graph.inputs}


def caches_of(model: ir.Model) -> int:
    return sum(name.startswith("kv.") for name in inputs_of(model))


def test_what_each_switch_leaves_out() -> None:
    def built(**options: Any) -> tuple[Drafter, set[str], ir.Model]:
        drafter = make_drafter("amphista", **options)
        return drafter, names_of(drafter), drafter.export(backbone().config)["drafter"]

    def kinds(model: ir.Model) -> int:
        return sum(node.op_type == "Softmax" for node in model.graph)

    full, names, graph = built()
    layer = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    stage = {"mixers.norms", "mixers.fc", "final_norms", *(f"layers.{name}" for name in layer)}
    mutual = {"attention.norm", "attention.qkv", "attention.out"}
    assert names == {"blocks.weight", "position_table"} | stage | mutual
    assert (len(full.layers), caches_of(graph), kinds(graph)) == (2, 4, 1)
    assert full.mixers[0].fc.shape == full.mixers[1].fc.shape == (2 * D, D)

    _, less, graph = built(auto_embedding=False)
    assert names - less == mutual | {"position_table"}
    assert kinds(graph) == 0
    less = names_of(
        make_drafter("amphista", position_table=False)
    )  # no graph: exporting takes long
    assert names - less == {"position_table"}
    one, less, graph = built(staged="one")
    assert (less, len(one.layers), caches_of(graph)) == (names, 1, 2)
    assert len(one.state_dict()) == len(full.state_dict()) - 10
    _, less, graph = built(staged="none")
    assert names - less == stage
    assert inputs_of(graph) == {"features"}
    untold, less, graph = built(sampled_token=False)
    assert less == names
    assert untold.mixers[0].fc.shape == untold.mixers[1].fc.shape == (D, D)
    assert [v.name for v in graph.graph.inputs if not v.uses()] == ["input_ids"]

    alpha, _, graph = built(attention_layers=2)
    assert (len(alpha.attention), kinds(graph)) == (2, 2)
    more = names_of(make_drafter("amphista", feed_forward=True))
    assert more - names == {"attention.mlp_norm", "attention.gate_up", "attention.down"}
    own = make_drafter("amphista", heads="own")
    assert names_of(own) - names == {"output_heads"}
    assert len(own.output_heads) == 4


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

    def first_guess() -> Tensor:
        return drafter.guesses(batch, VOCAB)[1][0, 3, 0]

    before = first_guess()
    batch.token_BT[0, 4] = (batch.token_BT[0, 4] + 1) % VOCAB
    after = first_guess()
    assert (not torch.equal(before, after)) == token_moves
    if drafter.position_table is not None:
        with torch.no_grad():
            drafter.position_table[3] += 1
    assert (not torch.equal(first_guess(), after)) == table_moves


# ---- without stages ----


def test_a_stateless_one_runs_from_the_last_feature(workshop: Workshop, tmp_path: Path) -> None:
    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    drafter = Drafter(Config(staged="none"), target.ends(Backbone.from_transformers(hf_model)))
    saved = checkpoint.save_drafter(
        tmp_path / "drafter", drafter.state_dict(), "amphista", drafter.config, {}
    )
    bundle = make_bundle.build(
        BuildOptions(str(workshop.llama()), ["amphista"], [saved], "fp32", out=tmp_path / "bundle")
    )
    engine = spec_runtime.load(bundle, threads=1, lookup=False)
    assert isinstance(engine.proposer, OnePassProposer)
    assert isinstance(engine.proposer._rows, LastFeature)
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    result = engine.generate("say abc, 3", **options)
    assert (
        result.token_ids == engine.with_drafter("none").generate("say abc, 3", **options).token_ids
    )
    assert result.stats.drafted_tokens > 39
