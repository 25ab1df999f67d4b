"""A draft model: against transformers' Llama with the same weights, its loss, its graph."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from formulas import backbone, make_batch, make_drafter, new_drafter
from guessing import TOLERANCE, check_along_trees
from tiny_backbone import HEAD_DIM, TRIMMED, VOCAB
from tiny_target import save_llama
from torch import Tensor
from workshop import Workshop

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.drafters.draft_model import Config, Drafter, require_same_tokens
from spec_export.graphs.slots import to_slots

NAME = "draft_model"


def as_transformers(drafter: Drafter) -> Any:
    """The same model by transformers, both tables written out."""
    c = drafter.config
    raw = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=HEAD_DIM,
        rms_norm_eps=drafter.dims.norm_eps,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(raw).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(drafter.embed_VD @ drafter.project_in)
        model.model.norm.weight.copy_(drafter.final_norm)
        model.lm_head.weight.zero_()
        head = drafter.head_VD @ drafter.project_out.T
        model.lm_head.weight[drafter.draft_token_ids] = head
        q, kv, m = c.num_heads * HEAD_DIM, c.num_kv_heads * HEAD_DIM, c.intermediate_size
        for mine, theirs in zip(drafter.layers, model.model.layers, strict=True):
            attention, mlp = theirs.self_attn, theirs.mlp
            theirs.input_layernorm.weight.copy_(mine.attention_norm)
            theirs.post_attention_layernorm.weight.copy_(mine.mlp_norm)
            attention.q_proj.weight.copy_(mine.qkv[:, :q].T)
            attention.k_proj.weight.copy_(mine.qkv[:, q : q + kv].T)
            attention.v_proj.weight.copy_(mine.qkv[:, q + kv :].T)
            attention.o_proj.weight.copy_(mine.out.T)
            mlp.gate_proj.weight.copy_(mine.gate_up[:, :m].T)
            mlp.up_proj.weight.copy_(mine.gate_up[:, m:].T)
            mlp.down_proj.weight.copy_(mine.down.T)
    return model


def log_q(model: Any, token_T: Tensor, ids: Tensor) -> Tensor:
    """By transformers: log q of the token after each of `token_T`, over the draft vocabulary
    `ids`, [T, V], -inf elsewhere."""
    with torch.no_grad():
        logits = model(token_T[None]).logits[0]
    result = torch.full_like(logits, -torch.inf)
    result[:, ids] = torch.log_softmax(logits[:, ids], -1)
    return result


@pytest.mark.parametrize("trimmed", [True, False])
def test_guesses_are_the_models_next_tokens(trimmed: bool) -> None:
    """Guess k of row t is what the model says of token t + 2 + k, having read all before it."""
    drafter = make_drafter(NAME, TRIMMED if trimmed else None, num_guesses=3)
    batch = make_batch((9, 6))
    ids, log_probs = drafter.guesses(batch, 5)
    assert ids.shape == log_probs.shape == (2, 8, 3, 5)
    model = as_transformers(drafter)
    for b, length in ((0, 9), (1, 6)):
        expected = log_q(model, batch.token_BT[b, :length], drafter.draft_token_ids)
        for t in range(length - 1):
            for k in range(min(3, length - 1 - t)):
                best = expected[t + 1 + k].topk(5)
                assert (log_probs[b, t, k] - best.values).abs().max() <= TOLERANCE
                assert (expected[t + 1 + k][ids[b, t, k]] - best.values).abs().max() <= TOLERANCE


def test_it_needs_no_features() -> None:
    drafter, batch = make_drafter(NAME), make_batch((9, 5))
    blind = dataclasses.replace(batch, feature_BTF=None)
    assert drafter.loss(blind)[0].item() == drafter.loss(batch)[0].item()
    with pytest.raises(ValueError, match="without the target's features"):
        make_drafter(NAME, soft_weight=0.5).loss(blind)


def test_a_new_model_knows_nothing_and_learns() -> None:
    """At first the loss is about that of guessing blindly; under bf16 as in training."""
    torch.manual_seed(0)
    drafter, batch = new_drafter(NAME), make_batch((24, 16))
    assert 0.8 < float((drafter.embed_VD @ drafter.project_in).std().detach()) < 1.25
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = drafter.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 0.8 * np.log(VOCAB) < losses[0] < 1.3 * np.log(VOCAB)
    assert losses[-1] < 0.7 * losses[0]


def test_its_own_weights_are_small() -> None:
    """For SmolLM2's width of 576 and heads of 64: under 20 MB in bf16."""
    c, D, head = Config(), 576, 64
    per_layer = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * head
    per_layer += c.hidden_size * (3 * c.intermediate_size + 2)
    assert 2 * (c.layers * per_layer + c.hidden_size * (2 * D + 1)) <= 20e6


# ---- the exported graph ----


def test_the_graph_guesses_as_the_model_does_along_a_tree(tmp_path: Path) -> None:
    """The graph of a model that is there already has the whole vocabulary, see
    test_drafter_graphs.py."""
    drafter = make_drafter(NAME, TRIMMED, top_k=5)
    graph, model = drafter.export(backbone().config)["drafter"], as_transformers(drafter)

    def expected_of(token_T: Tensor, length: int) -> tuple[Tensor, None]:
        return log_q(model, token_T, drafter.draft_token_ids)[-1], None

    check_along_trees(graph, tmp_path / "contiguous", "contiguous", expected_of)
    check_along_trees(to_slots(graph), tmp_path / "slots", "slots", expected_of)


# ---- a model that is there already ----


def test_vocabularies_must_agree_token_by_token() -> None:
    mine = {"a": 0, "b": 1, "c": 2}
    require_same_tokens(mine, dict(mine), 3)
    for other, why in (
        ({"a": 0, "c": 1, "b": 2}, "token 1 is 'c', expected the target's 'b'"),
        ({"a": 0, "b": 1}, "token 2 is None, expected the target's 'c'"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "token 3 is 'd', expected the target's None"),
    ):
        with pytest.raises(ValueError, match=why):
            require_same_tokens(mine, other, 4)
    with pytest.raises(ValueError, match=r"got a draft model with 2 embeddings, expected .* 3"):
        require_same_tokens(mine, mine, 2)


@pytest.mark.slow
def test_a_given_model_is_built_into_a_bundle(workshop: Workshop, tmp_path: Path) -> None:
    """The target as its own draft model: as right as the trees are deep."""
    llama = str(workshop.llama())
    path = make_bundle.build(
        BuildOptions(llama, ["draft_model"], out=tmp_path / "bundle", draft_model=llama, lanes=1)
    )
    engine = spec_runtime.load(path, "draft_model", threads=1, lookup=False)
    plain = engine.with_drafter("none")
    for prompt in ("say abc", "x"):
        result = engine.generate(prompt, max_new_tokens=31, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=31, ignore_eos=True)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length > 3.0  # 1.1 with a model trained for two steps


@pytest.mark.slow
def test_a_given_model_may_lack_the_rows_of_the_targets_padding(tmp_path: Path) -> None:
    """No token has these ids, but prompts of ids and biases may name them."""
    llama = str(save_llama(tmp_path / "target", vocab_size=128))
    small = str(save_llama(tmp_path / "small"))
    options = BuildOptions(llama, out=tmp_path / "bundle", draft_model=small)
    engine = spec_runtime.load(make_bundle.build(options), "draft_model", threads=1, lookup=False)
    asked: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "logit_bias": {120: 100.0}}
    plain = engine.with_drafter("none")
    for prompt in ([5, 110, 6], [98], [5, 127]):
        result = engine.generate(prompt, **asked)
        assert result.token_ids == plain.generate(prompt, **asked).token_ids
        assert 120 in result.token_ids


def test_what_a_given_model_does_not_fit(workshop: Workshop, tmp_path: Path) -> None:
    llama = str(workshop.llama())
    out = tmp_path / "bundle"

    def build(*arguments: Any, **options: Any) -> Path:
        return make_bundle.build(BuildOptions(*arguments, **options))

    for drafters, saved in ((["medusa"], ()), ([], (tmp_path,))):
        with pytest.raises(ValueError, match="got --draft-model with another drafter"):
            build(llama, drafters, saved, out=out, draft_model=llama)
    short = str(save_llama(tmp_path / "short", max_position_embeddings=32))
    with pytest.raises(ValueError, match="a context of 32 tokens, expected the bundle's 256"):
        build(llama, out=out, draft_model=short)
    other = save_llama(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 68', '"ä": 68'))
    with pytest.raises(ValueError, match="token 68 is 'ä', expected the target's 'a'"):
        build(llama, out=out, draft_model=str(other))
    assert not out.exists()
