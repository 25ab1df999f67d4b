"""The eager backbone beside what test_families.py compares: rows, dtypes, rotation, refusals.

Tolerance: 2e-5 of the largest logit. Both sides are float32 but sum in different orders (fused
products, attention over a longer buffer), which measures 2e-6 at most here; a wrong frequency,
norm, slot or mask moves logits by percents, because the random weights are large enough for
attention to be peaked.
"""

import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_backbone import (
    CONTEXT,
    HEAD_DIM,
    LAYERS,
    ORIGINAL,
    YARN_FACTOR,
    Decoder,
    backbone_of,
    chain,
    longrope,
    random_tokens,
    reference,
    tiny,
)
from torch import Tensor

from spec_export.model.config import read_config
from spec_export.model.decoder import Backbone
from spec_export.model.modules.attention import window_mask
from spec_runtime.errors import UserError

RELATIVE_TOLERANCE = 2e-5


def close(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    assert (actual - expected).abs().max().item() <= RELATIVE_TOLERANCE * scale


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


def test_a_rotation_that_no_float_holds_is_one_line() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1e308}
    raw = transformers.AutoConfig.for_model("hunyuan_v1_dense", rope_parameters=rope)
    with pytest.raises(UserError, match="got rotary parameters"):
        read_config(raw, (), 64)


def test_yarn_attention_factor_scales_the_tables() -> None:
    model = tiny("llama", rope_parameters=YARN_FACTOR | {"attn_factor": 0.5})
    with pytest.warns(UserWarning, match=r"got attn_factor 0\.5 .* transformers does not read"):
        cos = Backbone.from_transformers(model).cos
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
