"""A draft model: against transformers' Llama with the same weights, its loss, the exported graph.

Tolerance between implementations: 1e-4 absolute on log-probabilities, all float32 with other orders
of summation (measures about 5e-6; a wrong row or position moves them by tenths).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from graphs import Runner
from tiny_backbone import HEAD_DIM, VOCAB, backbone_of, chain, tiny
from tiny_target import save_llama
from torch import Tensor
from workshop import Workshop

import spec_runtime
from spec_export import make_bundle, target
from spec_export.decoder import Backbone
from spec_export.drafters.draft_model import (
    Config,
    Drafter,
    Pretrained,
    require_same_tokens,
)
from spec_export.drafters.layers import Batch
from spec_export.graphs.slots import to_slots
from spec_export.make_bundle import BuildOptions

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "layers": 2,
    "num_heads": 3,
    "num_kv_heads": 1,
    "top_k": 5,
}
TRIMMED = torch.arange(1, VOCAB, 2)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return backbone_of(tiny("llama"))


def make_drafter(backbone: Backbone, vocabulary: Tensor | None = None, **config: Any) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(Config(**SIZES | config), target.ends(backbone), vocabulary)
    with torch.no_grad():  # so that every gain matters, and logits differ
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        drafter.project_out.mul_(4)
    return drafter


def make_batch(lengths: tuple[int, ...] = (8,), seed: int = 2) -> Batch:
    """Random tokens, every one an answer's; features of the target's width."""
    torch.manual_seed(seed)
    B, T = len(lengths), max(lengths)
    length_B = torch.tensor(lengths)
    is_token_BT = torch.arange(T) < length_B[:, None]
    token_BT = torch.where(is_token_BT, torch.randint(VOCAB, (B, T)), 0)
    return Batch(token_BT, is_token_BT, torch.randn(B, T, 64), length_B)


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
    """By transformers: log q of the token behind each of `token_T`, over the draft vocabulary
    `ids`, [T, V], -inf elsewhere."""
    with torch.no_grad():
        logits = model(token_T[None]).logits[0]
    result = torch.full_like(logits, -torch.inf)
    result[:, ids] = torch.log_softmax(logits[:, ids], -1)
    return result


@pytest.mark.parametrize("trimmed", [True, False])
def test_guesses_are_the_models_next_tokens(backbone: Backbone, trimmed: bool) -> None:
    """Guess k of row t is what the model says of token t + 2 + k, having read all before it."""
    drafter = make_drafter(backbone, TRIMMED if trimmed else None, num_guesses=3)
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


def reference_loss(drafter: Drafter, batch: Batch) -> tuple[Tensor, int, int]:
    config, soft = drafter.config, drafter.config.soft_weight
    losses: dict[bool, list[Tensor]] = {True: [], False: []}
    correct = 0
    for b, length in enumerate(batch.length_B.tolist()):
        hidden = drafter.hidden_rows(batch.token_BT[b : b + 1, :length])[0]
        for i in range(2, length):
            wanted = int(drafter.draft_index_V[batch.token_BT[b, i]])
            if wanted < 0:
                continue
            is_answer = bool(batch.loss_BT[b, i])
            log_q = torch.log_softmax(drafter.head_VD @ drafter.output_rows(hidden[i - 1]), -1)
            loss = -log_q[wanted]
            if soft:
                assert batch.feature_BTF is not None
                p = torch.softmax(drafter.head_VD @ batch.feature_BTF[b, i - 1], -1)
                loss = (1 - soft) * loss - soft * (p * log_q).sum()
            losses[is_answer].append(loss)
            correct += is_answer and int(log_q.argmax() == wanted)
    total = torch.stack(losses[True]).mean()
    if config.prompt_weight:
        total = total + config.prompt_weight * torch.stack(losses[False]).mean()
    return total, correct, len(losses[True])


@pytest.mark.parametrize(
    "options", [{}, {"prompt_weight": 0.3}, {"soft_weight": 0.5}, {"layers": 1, "num_kv_heads": 3}]
)
def test_the_loss_and_its_gradient_are_the_formulas(
    backbone: Backbone, options: dict[str, Any]
) -> None:
    drafter = make_drafter(backbone, torch.tensor([i for i in range(VOCAB) if i % 5]), **options)
    batch = make_batch((12, 7))
    batch.loss_BT[:, :4] = False
    with torch.no_grad():  # make some guess right
        batch.token_BT[0, 11] = drafter.guesses(batch, 1)[0][0, 9, 0, 0]
    loss, counts = drafter.loss(batch)
    loss.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    expected, correct, count = reference_loss(drafter, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert (counts["correct_K"].tolist(), counts["count_K"].tolist()) == ([correct], [count])
    assert correct >= 1
    for name, parameter in drafter.named_parameters():
        got = gradients[name]
        assert got is not None, name
        assert got.any(), name
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-5)


def test_it_needs_no_features_and_no_labels(backbone: Backbone) -> None:
    drafter, batch = make_drafter(backbone), make_batch((9, 5))
    blind = dataclasses.replace(batch, feature_BTF=None)
    assert drafter.loss(blind)[0].item() == drafter.loss(batch)[0].item()
    batch.loss_BT[:] = False
    loss, counts = drafter.loss(batch)
    assert (loss.item(), counts["count_K"].tolist()) == (0.0, [0])
    with pytest.raises(ValueError, match="soft labels need them"):
        make_drafter(backbone, soft_weight=0.5).loss(blind)


def test_a_new_model_knows_nothing_and_learns(backbone: Backbone) -> None:
    """At first the loss is about that of guessing blindly; under bf16 as in training."""
    torch.manual_seed(0)
    drafter, batch = Drafter(Config(**SIZES), target.ends(backbone)), make_batch((24, 16))
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


def test_its_own_weights_are_small(backbone: Backbone) -> None:
    drafter = make_drafter(backbone)
    layer = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    names = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(drafter.state_dict()) == names | {"project_in", "project_out", "final_norm"}
    # for SmolLM2's width of 576 and heads of 64: under 20 MB in bf16
    c, D, head = Config(), 576, 64
    per_layer = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * head
    per_layer += c.hidden_size * (3 * c.intermediate_size + 2)
    assert 2 * (c.layers * per_layer + c.hidden_size * (2 * D + 1)) <= 20e6


# ---- the exported graph ----


@pytest.mark.parametrize("form", ["slots", "contiguous"])
@pytest.mark.parametrize("trimmed", [True, False])
def test_the_graph_guesses_as_the_model_does_along_a_tree(
    backbone: Backbone, trimmed: bool, form: str, tmp_path: Path
) -> None:
    drafter = make_drafter(backbone, TRIMMED if trimmed else None)
    graph, model = drafter.export(backbone.config)["drafter"], as_transformers(drafter)
    ids = drafter.draft_token_ids
    check_graph(graph, form, tmp_path, lambda token_T: log_q(model, token_T, ids))


def check_graph(graph: Any, form: str, folder: Path, expected_of: Any, vocab: int = VOCAB) -> None:
    """Committed tokens in chunks, behind each a random forest, level by level, of which nothing
    stays. Each node against `expected_of` the text of its own path: log q [T, V]."""
    runner = Runner(to_slots(graph) if form == "slots" else graph, folder, form, 64)
    rng = np.random.default_rng(0)
    text = rng.integers(0, vocab, 24)
    outputs, length = ["guess_ids", "guess_log_probs"], 0

    def check(path: list[int], got: dict[str, np.ndarray], row: int) -> None:
        token_T = torch.from_numpy(np.concatenate([text[:length], np.array(path, np.int64)]))
        expected = expected_of(token_T)[-1]
        log_probs, ids = got["guess_log_probs"][row], got["guess_ids"][row]
        assert log_probs.shape == (5,)
        assert np.abs(log_probs - expected.topk(5).values.numpy()).max() <= TOLERANCE
        assert np.abs(expected[torch.from_numpy(ids)].numpy() - log_probs).max() <= TOLERANCE
        assert len(set(ids.tolist())) == 5

    for c in (5, 1, 3, 6):
        got = runner.step(text[length : length + c], chain(c), outputs, [c - 1])
        runner.cache.commit(range(c))
        length += c
        check([], got, 0)
        paths: list[list[int]] = []
        parents: list[int] = []
        level = [-1]
        for width in (2, 3, 3):
            first = len(paths)
            for parent in rng.choice(level, width).tolist():
                parents.append(len(parents) if parent < 0 else parent)
                above = [] if parent < 0 else paths[parent]
                paths.append([*above, int(rng.integers(vocab))])
            feeds = runner.cache.place(np.array(parents), first)
            feeds["input_ids"] = np.array([[path[-1] for path in paths[first:]]])
            feeds["logit_rows"] = np.arange(width)
            result = runner.backend.run(feeds, outputs)
            level = list(range(first, len(paths)))
            for i in level:
                check(paths[i], result, i - first)


# ---- a model that is there already ----


@pytest.mark.parametrize(
    ("family", "form"), [("llama", "slots"), ("qwen3", "slots"), ("phi3", "contiguous")]
)
def test_a_pretrained_models_graph(family: str, form: str, tmp_path: Path) -> None:
    """Its table has more rows than the target has tokens: the rest is never guessed."""
    model = tiny(family, tie_word_embeddings=family == "qwen3")
    ids = torch.arange(VOCAB - 7)
    drafter = Pretrained(backbone_of(model), VOCAB - 7, Config(top_k=5))
    graph = drafter.export(backbone_of(model).config)["drafter"]
    check_graph(graph, form, tmp_path, lambda token_T: log_q(model, token_T, ids), VOCAB - 7)


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


def test_a_given_model_is_built_into_a_bundle(workshop: Workshop, tmp_path: Path) -> None:
    """The target as its own draft model: as right as the trees are deep."""
    llama = str(workshop.llama())
    path = make_bundle.build(
        BuildOptions(llama, ["draft_model"], out=tmp_path / "bundle", draft_model=llama)
    )
    engine = spec_runtime.load(path, "draft_model", threads=1, lookup=False)
    plain = engine.with_drafter("none")
    for prompt in ("say abc", "x"):
        result = engine.generate(prompt, max_new_tokens=31, ignore_eos=True)
        expected = plain.generate(prompt, max_new_tokens=31, ignore_eos=True)
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_length > 3.0  # 1.1 with a model trained for two steps


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
    config = json.loads((workshop.llama() / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    narrow = shutil.copytree(llama, tmp_path / "narrow")
    (narrow / "config.json").write_text(json.dumps(config | {"sliding_window": 24}))
    with pytest.raises(ValueError, match="a context of 24 tokens, expected the bundle's 256"):
        build(llama, out=out, draft_model=str(narrow))
    other = save_llama(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 68', '"ä": 68'))
    with pytest.raises(ValueError, match="token 68 is 'ä', expected the target's 'a'"):
        build(llama, out=out, draft_model=str(other))
    assert not out.exists()


def test_what_the_proposer_is_told(backbone: Backbone) -> None:
    drafter = make_drafter(backbone, num_guesses=6, max_width=1, top_k=7)
    told = {"num_guesses": 6, "max_width": 1, "taps": [], "top_k": 7}
    assert drafter.runtime_config() == told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taps": (1,)}, "leave taps empty"),
        ({"layers": 0}, "got layers 0, expected at least 1"),
        ({"hidden_size": 0}, "got hidden_size 0"),
        ({"num_guesses": 0}, "got num_guesses 0"),
        ({"max_width": 0}, "got max_width 0"),
        ({"num_heads": 5}, "got num_heads 5, expected a multiple of num_kv_heads, 2"),
        ({"soft_weight": 1.5}, "got soft_weight 1.5"),
        ({"prompt_weight": -1.0}, "prompt_weight -1.0, expected"),
    ],
)
def test_config_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
