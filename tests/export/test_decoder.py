"""Compares the eager backbone with transformers, family by family, on tiny random models.

Tolerance: 2e-5 of the largest logit. Both sides are float32 but sum in different orders (fused
products, attention over a longer buffer), which measures 2e-6 at most here; a wrong frequency,
norm, slot or mask moves logits by percents, because the random weights are large enough for
attention to be peaked.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from spec_export.decoder import FAMILIES, Backbone

RELATIVE_TOLERANCE = 2e-5
VOCAB, LAYERS, HEADS, HEAD_DIM = 61, 3, 4, 16
ORIGINAL = 16  # original context of the rotary kinds that stretch one
CONTEXT = 64

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN_FACTOR = YARN | {"attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0}


def longrope(half_width: int, **extra: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half_width)],
        "long_factor": [1.5 + 0.7 * i for i in range(half_width)],
        "original_max_position_embeddings": ORIGINAL,
        **extra,
    }


def tiny(family: str, seed: int = 0, **options: Any) -> Any:
    """Returns a random transformers model whose norms, biases, positions and heads all matter."""
    known: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.15,
    }
    if family in ("llama", "mistral", "qwen3"):
        known["head_dim"] = HEAD_DIM
    if family == "mistral":
        known["sliding_window"] = None
    config = transformers.AutoConfig.for_model(family, **known | options)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def backbone_of(model: Any, **options: Any) -> Backbone:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Backbone.from_transformers(model, scratch=32, **options)


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


class Decoder:
    """Runs a backbone in its contiguous form, with room to move `A` rows."""

    A = 4

    def __init__(self, backbone: Backbone, slots: int | None = None) -> None:
        self.backbone = backbone
        self.caches = backbone.empty_cache(slots)
        self.length = 0  # rows that are final
        self.accepted: list[int] = []  # slots of the last step's rows to keep

    def feeds(self, tokens: list[int], parents: list[int]) -> list[Tensor]:
        """Returns the inputs of one step; the parent of node 0 is 0, for the last kept row."""
        a, n = len(self.accepted), len(tokens)
        base = self.length + a
        mask = torch.zeros(n, self.caches[0].shape[2], dtype=torch.bool)
        mask[:, :base] = True
        depth = [0] * n
        for i, parent in enumerate(parents):
            if i > 0:
                depth[i] = depth[parent] + 1
                mask[i, base:] = mask[parent, base:]
            mask[i, base + i] = True
        src = self.accepted + [0] * (self.A - a)
        perm = [*range(a), *range(self.A, self.A + n), *range(a, self.A)]
        return [
            torch.tensor([tokens]),
            torch.tensor([[base + d for d in depth]]),
            mask[None, None],
            torch.arange(n),
            torch.tensor([self.length]),
            torch.tensor(src, dtype=torch.int64),
            torch.tensor(perm),
        ]

    def run(self, feeds: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            outputs = self.backbone(*feeds, *self.caches)
        self.caches = list(outputs[-len(self.caches) :])
        return list(outputs[: -len(self.caches)])

    def step(self, tokens: list[int], parents: list[int]) -> list[Tensor]:
        """Returns logits, features and taps of the nodes. Call `keep` before the next step."""
        outputs = self.run(self.feeds(tokens, parents))
        self.length += len(self.accepted)
        self.accepted = []
        return outputs

    def keep(self, nodes: list[int]) -> None:
        if len(nodes) <= self.A:
            self.accepted = [self.length + node for node in nodes]
        else:
            assert nodes == list(range(len(nodes))), nodes
            self.length += len(nodes)


def chain(n: int) -> list[int]:
    return [max(0, i - 1) for i in range(n)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path[::-1]


def reference(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def random_tokens(n: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@every_case
def test_prefill_in_two_chunks_matches_transformers(family: str, options: dict[str, Any]) -> None:
    model = tiny(family, **options)
    # Above ORIGINAL tokens transformers, like us, takes longrope's long factors; the second chunk
    # attends to the first.
    tokens = random_tokens(40, seed=1)
    expected = reference(model, tokens)
    decoder = Decoder(backbone_of(model))
    first = decoder.step(tokens[:23], chain(23))[0]
    decoder.keep(list(range(23)))
    second = decoder.step(tokens[23:], chain(17))[0]
    close(torch.cat((first, second)), expected)


@every_case
def test_random_trees_with_compaction_match_transformers(
    family: str, options: dict[str, Any]
) -> None:
    """A node's logits equal those of its path run alone; kept paths leave out rows."""
    model = tiny(family, **options)
    decoder = Decoder(backbone_of(model))
    text = random_tokens(ORIGINAL + 3, seed=2)
    decoder.step(text, chain(len(text)))
    decoder.keep(list(range(len(text))))
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
        states = model(
            torch.tensor([tokens]), output_hidden_states=True, use_cache=False
        ).hidden_states
    taps = (2, 0, 1)
    _, features, *tapped = Decoder(backbone_of(model, taps=taps)).step(tokens, chain(9))
    close(features, states[-1][0])
    assert len(tapped) == len(taps)
    for tap, actual in zip(taps, tapped, strict=True):
        close(actual, states[tap][0])


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
    assert backbone.cos.dtype == backbone.empty_cache()[0].dtype == dtype
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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 24}),
        ("phi3", {"sliding_window": 24}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
    ],
)
def test_a_narrow_window_caps_the_context(family: str, options: dict[str, Any]) -> None:
    model = tiny(family, **options)
    with pytest.warns(UserWarning, match="max length lowered from 64 to 24"):
        backbone = Backbone.from_transformers(model)
    assert backbone.config.max_length == 24
    tokens = random_tokens(24, seed=12)
    close(Decoder(backbone).step(tokens, chain(24))[0], reference(model, tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Backbone.from_transformers(model, max_length=24).config.max_length == 24


def test_an_unused_window_is_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone = Backbone.from_transformers(tiny("qwen2", sliding_window=8))
    assert backbone.config.max_length == CONTEXT


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 8}, "type 'gpt2'"),
        (
            "mixtral",
            {
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "num_local_experts": 2,
                "vocab_size": 8,
            },
            "type 'mixtral'",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "got layers of kinds full_attention, sliding_attention in a 'qwen2' model",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "got layers of kinds full_attention, sliding_attention in a 'qwen3' model",
        ),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
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
    if family in FAMILIES:
        model = tiny(family, **options)
    else:
        config = transformers.AutoConfig.for_model(family, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message) as error:
        Backbone.from_transformers(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": CONTEXT + 1}, "max length of 65, expected at most the model's 64"),
        ({"max_length": 0}, "max_length 0"),
        ({"scratch": -1}, "scratch -1"),
        ({"taps": (LAYERS,)}, r"taps \[3\], expected distinct layer ids from 0 to 2"),
        ({"taps": (1, 1)}, r"taps \[1, 1\]"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Backbone.from_transformers(tiny("llama"), **options)
