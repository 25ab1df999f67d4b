"""Compares the eager backbone with transformers, family by family, on tiny random models.

Tolerance: 2e-5 of the largest logit. Both sides are float32 but sum in different orders (fused
products, attention over a longer buffer), which measures 2e-6 at most here; a wrong frequency,
norm, slot or mask moves logits by percents, because the random weights are large enough for
attention to be peaked.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_backbone import (
    CONTEXT,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LINEAR,
    LLAMA3,
    ORIGINAL,
    YARN,
    YARN_FACTOR,
    Decoder,
    backbone_of,
    chain,
    longrope,
    path_to,
    random_tokens,
    reference,
    tiny,
)
from torch import Tensor

from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps
from spec_export.model.modules.attention import window_mask
from spec_runtime.errors import UnsupportedModelError

RELATIVE_TOLERANCE = 2e-5
# family, what is special, config options
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "grouped heads", {}),
    ("llama", "one key/value head", {"num_key_value_heads": 1}),
    ("llama", "as many key/value heads", {"num_key_value_heads": HEADS}),
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "wide heads", {"head_dim": 32}),
    ("llama", "linear", {"rope_parameters": LINEAR}),
    ("llama", "llama3", {"rope_parameters": LLAMA3}),
    ("llama", "yarn", {"rope_parameters": YARN}),
    ("llama", "yarn, given attention factor", {"rope_parameters": YARN_FACTOR}),
    ("llama", "longrope", {"rope_parameters": longrope(8)}),
    ("mistral", "grouped heads", {}),
    ("mistral", "tied", {"tie_word_embeddings": True}),
    ("mistral", "wide window", {"sliding_window": CONTEXT}),
    ("mistral", "yarn", {"rope_parameters": YARN}),
    ("qwen2", "attention bias", {}),
    ("qwen2", "tied", {"tie_word_embeddings": True}),
    ("qwen2", "yarn", {"rope_parameters": YARN}),
    ("qwen3", "q/k norm", {}),
    ("qwen3", "tied", {"tie_word_embeddings": True}),
    ("qwen3", "attention bias", {"attention_bias": True}),
    ("qwen3", "wide heads, yarn", {"head_dim": 32, "rope_parameters": YARN}),
    ("phi3", "fused", {}),
    ("phi3", "tied", {"tie_word_embeddings": True}),
    ("phi3", "partial", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    (
        "phi3",
        "longrope",
        {"rope_parameters": longrope(8), "original_max_position_embeddings": ORIGINAL},
    ),
    (
        "phi3",
        "partial longrope",
        {
            "rope_parameters": longrope(4, partial_rotary_factor=0.5),
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
]
every_case = pytest.mark.parametrize(
    ("family", "options"), [pytest.param(f, o, id=f"{f}: {name}") for f, name, o in CASES]
)


def close(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    assert (actual - expected).abs().max().item() <= RELATIVE_TOLERANCE * scale


@every_case
def test_chunks_and_random_trees_match_transformers(family: str, options: dict[str, Any]) -> None:
    """A node's logits equal those of its path without the other nodes; kept paths leave out rows.

    Above ORIGINAL tokens transformers, like us, takes longrope's long factors.
    """
    model = tiny(family, **options)
    decoder = Decoder(backbone_of(model))
    text = random_tokens(40, seed=1)
    expected = reference(model, text)
    for part, rows in ((text[:23], expected[:23]), (text[23:], expected[23:])):
        close(decoder.step(part, chain(len(part)))[0], rows)
        decoder.keep(list(range(len(part))))
    for tokens, parents, kept in (
        (random_tokens(7, seed=3), [0, 0, 0, 1, 2, 4, 4], [0, 2, 4, 6]),
        (random_tokens(6, seed=4), [0, 0, 0, 2, 2, 3], [0, 2]),
        (random_tokens(5, seed=5), [0, 0, 1, 0, 3], [0]),
        (random_tokens(1, seed=6), [0], [0]),
    ):
        logits = decoder.step(tokens, parents)[0]
        for node in range(len(tokens)):
            path = [tokens[i] for i in path_to(node, parents)]
            close(logits[node], reference(model, text + path)[-1])
        decoder.keep(kept)
        text += [tokens[i] for i in kept]


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_and_features_are_transformers_hidden_states(family: str) -> None:
    model = tiny(family)
    tokens = random_tokens(9, seed=7)
    with torch.no_grad():
        taps = (2, 0, 1, LAYERS)
        states = features_and_taps(model.model, torch.tensor([tokens]), taps)
    _, *found = Decoder(backbone_of(model, taps=taps)).step(tokens, chain(9))
    for actual, expected in zip(found, states, strict=True):
        close(actual, expected[0])


def test_only_the_rows_asked_for_get_logits() -> None:
    decoder = Decoder(backbone_of(tiny("llama")))
    feeds = decoder.feeds(random_tokens(6, seed=8), chain(6))
    every = decoder.run(feeds)[0]
    feeds[3] = torch.tensor([4, 1])
    assert torch.allclose(Decoder(decoder.backbone).run(feeds)[0], every[[4, 1]], atol=1e-5)


def test_weights_are_shared_and_the_model_keeps_working() -> None:
    model = tiny("qwen2", tie_word_embeddings=True)
    tokens = random_tokens(8, seed=9)
    before = reference(model, tokens)
    backbone = backbone_of(model)
    assert backbone.head is backbone.embedding
    assert backbone.head.weight.data_ptr() == model.lm_head.weight.data_ptr()

    def storages(module: torch.nn.Module) -> set[int]:
        return {p.untyped_storage().data_ptr() for p in module.parameters() if p.dim() > 1}

    assert storages(backbone) == storages(model)
    assert torch.equal(reference(model, tokens), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_are_float32_and_near_transformers(dtype: torch.dtype) -> None:
    """The bound is 5 % of the largest logit: the sides round to 8 or 11 bits in other places."""
    model = tiny("llama").to(dtype)
    tokens = random_tokens(12, seed=10)
    backbone = backbone_of(model, taps=(1,))
    assert backbone.cos.dtype == backbone.dtype == dtype
    outputs = Decoder(backbone).step(tokens, chain(12))
    assert {output.dtype for output in outputs} == {torch.float32}
    expected = reference(model, tokens).float()
    assert (outputs[0] - expected).abs().max() <= 0.05 * expected.abs().max()


# ---------------------------------------------------------------------------------- rotary, windows


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_takes_short_factors_up_to_the_original_context(family: str) -> None:
    options: dict[str, Any] = {"rope_parameters": longrope(8)}
    if family == "phi3":
        options["original_max_position_embeddings"] = ORIGINAL
    model = tiny(family, **options)
    tokens = random_tokens(ORIGINAL, seed=11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = Backbone.from_transformers(model, max_length=ORIGINAL)
    assert short.config.rope["factors"] == "short"
    close(Decoder(short).step(tokens, chain(ORIGINAL))[0], reference(model, tokens))
    with pytest.warns(UserWarning, match=f"max length {ORIGINAL + 1} exceeds the original context"):
        long = Backbone.from_transformers(model, max_length=ORIGINAL + 1)
    assert long.config.rope["factors"] == "long"
    assert not torch.allclose(long.cos[1:ORIGINAL], short.cos[1:ORIGINAL], atol=1e-3)


def test_yarn_attention_factor_scales_the_tables() -> None:
    cos = backbone_of(tiny("llama", rope_parameters=YARN_FACTOR)).cos
    assert torch.equal(cos[0], torch.full_like(cos[0], 0.7))


def test_tables_cover_context_and_scratch() -> None:
    backbone = backbone_of(
        tiny("phi3", rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    )
    assert backbone.cos.shape == backbone.sin.shape == (CONTEXT + 32, HEAD_DIM // 4)


def test_a_window_keeps_the_last_keys_that_a_row_sees() -> None:
    x, o = True, False
    mask = torch.tensor([[x, x, x, o, o], [x, x, o, x, o], [x, x, o, x, x], [x, o, o, o, o]])
    seen = [[o, x, x, o, o], [o, x, o, x, o], [o, o, o, x, x], [x, o, o, o, o]]
    assert window_mask(mask[None, None], 2)[0, 0].tolist() == seen


@pytest.mark.parametrize(
    ("family", "options", "max_length", "windows"),
    [
        ("mistral", {"sliding_window": 24}, CONTEXT, (24,)),
        ("mistral", {"sliding_window": 24}, 25, (24,)),
        ("mistral", {"sliding_window": 24}, 24, ()),
        ("phi3", {"sliding_window": 24}, CONTEXT, (24,)),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": False}, CONTEXT, ()),
    ],
)
def test_windows_narrower_than_the_context_count(
    family: str, options: dict[str, Any], max_length: int, windows: tuple[int, ...]
) -> None:
    config = backbone_of(tiny(family, **options), max_length=max_length).config
    assert (config.max_length, config.windows) == (max_length, windows)


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {}, "type 'gpt2'"),
        ("jamba", {}, "type 'jamba'"),
        ("llama", {"layer_types": ["mamba"] * 32}, "kind 'linear_attention' in a 'llama' model"),
        ("llama", {"hidden_act": "gelu_fast"}, "activation 'gelu_fast'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 in a 'llama' model",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    model = SimpleNamespace(config=transformers.AutoConfig.for_model(family, **options))
    with pytest.raises(UnsupportedModelError, match=message) as error:
        Backbone.from_transformers(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": CONTEXT + 1}, "max length of 65, expected at most the model's 64"),
        ({"max_length": 0}, "max_length 0"),
        ({"scratch": -1}, "scratch -1"),
        ({"taps": (LAYERS + 1,)}, r"taps \[4\], expected distinct layer ids from 0 to 3"),
        ({"taps": (1, 1)}, r"taps \[1, 1\]"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backbone.from_transformers(tiny("llama"), **options)
