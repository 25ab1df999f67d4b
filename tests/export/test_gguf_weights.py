"""Tests that a GGUF file is read as the model it was made of: architectures, types, split files.

The conventions of `as_a_file_has_it` and the keys of CASES are llama.cpp's converter's, whose own
files of these models (but for granitehybrid's) were read with the same result.
"""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_backbone import LLAMA3, llama3_factors
from tiny_gguf import SIZES, write_gguf, write_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.imports.gguf import config as gguf_config
from spec_export.imports.gguf import header as gguf_header
from spec_export.imports.gguf import weights as gguf_weights
from spec_export.imports.gguf.architectures import ARCHITECTURES
from spec_export.imports.gguf.header import GGUFTensor
from spec_export.imports.gguf.weights import GGUFWeights
from spec_export.model import checkpoint, target
from spec_runtime.errors import UserError

gguf = pytest.importorskip("gguf")

RMS, PLAIN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WIDE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
YARN_KEYS = {f"rope.scaling.{key}": value for key, value in YARN_KEYS.items()}
WINDOW = {"attention.sliding_window": 8}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
EXPERTS_HF = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0}
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0}
GRANITE |= {"attention.scale": 0.125}
# By a name: the file's architecture, transformers' config, the keys that no other file has.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {}, {}),
    "mixtral": ("llama", "mixtral", EXPERTS_HF, EXPERTS),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {}, {}),
    "phi3": ("phi3", "phi3", {}, {}),
    "gemma": ("gemma", "gemma", {}, {}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": WIDE,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
        WINDOW
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
        | {"rope.freq_base_swa": 10000.0, "attention.sliding_window_pattern": 2},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {}),
    "granite": ("granite", "granite", SCALES | {"attention_multiplier": 0.125}, GRANITE),
    "granitehybrid": (
        "granitehybrid",
        "granite",
        SCALES | {"attention_multiplier": 0.125},
        GRANITE
        | {"attention.head_count_kv": [2, 2], "ssm.conv_kernel": 4, "expert_count": 0}
        | {"expert_used_count": 2, "expert_shared_feed_forward_length": 48},
    ),
    "granite 4": (
        "granite",
        "granite",
        SCALES | {"attention_multiplier": 0.125},
        GRANITE | {"ssm.conv_kernel": 4, "rope.scaling.finetuned": True, "expert_count": 0},
    ),
    "granitemoe": (
        "granitemoe",
        "granitemoe",
        SCALES | EXPERTS_HF | {"attention_multiplier": 0.125},
        GRANITE | EXPERTS,
    ),
    "olmo": (
        "olmo",
        "olmo",
        {"clip_qkv": 0.5},
        {"attention.clamp_kqv": 0.5, PLAIN: 1e-5, RMS: None},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": WIDE | YARN, "sliding_attention": WIDE},
        },
        WINDOW | YARN_KEYS | {"attention.sliding_window_pattern": [True, False]},
    ),
    "mistral3": ("mistral3", "mistral", {"sliding_window": None}, {}),
    "ministral3": (
        "mistral3",
        "ministral3",
        {
            "rope_parameters": WIDE
            | YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}
        },
        YARN_KEYS | {"attention.temperature_scale": 0.25, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
        EXPERTS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "olmoe": ("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, EXPERTS),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
        EXPERTS | {"expert_feed_forward_length": 24},
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        EXPERTS_HF | {"sliding_window": 8} | {"rope_parameters": WIDE | YARN | {"truncate": False}},
        EXPERTS | WINDOW | YARN_KEYS | {"expert_feed_forward_length": 48},
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "arcee": ("arcee", "arcee", {}, {}),
    "nemotron": ("nemotron", "nemotron", {}, {PLAIN: 1e-5, "rope.dimension_count": 8}),
    "starcoder2": ("starcoder2", "starcoder2", {}, {PLAIN: 1e-5, RMS: None}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {}, {}),
    "exaone4": (
        "exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        {},
    ),
    "command-r": (
        "command-r",
        "cohere",
        {"logit_scale": 0.5},
        {"logit_scale": 0.5, "rope.scaling.type": "none", PLAIN: 1e-5, RMS: None},
    ),
    "cohere2": (
        "cohere2",
        "cohere2",
        {"sliding_window": 8, "logit_scale": 0.5},
        WINDOW | {"logit_scale": 0.5, PLAIN: 1e-5, RMS: None},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {}, {}),
    "glm4": ("glm4", "glm4", {}, {"rope.dimension_count": 8}),
    "chatglm": ("chatglm", "glm", {}, {"rope.dimension_count": 8}),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan_v1_dense", {}, {"rope.scaling.type": "none"}),
    "stablelm": (
        "stablelm",
        "stablelm",
        {"use_qkv_bias": True, "rope_parameters": WIDE | {"partial_rotary_factor": 0.25}},
        {PLAIN: 1e-5, RMS: None, "rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "stablelm 2 12B": (
        "stablelm",
        "stablelm",
        {"use_parallel_residual": True, "rope_parameters": WIDE | {"partial_rotary_factor": 0.5}},
        {PLAIN: 1e-5, RMS: None, "rope.dimension_count": 8, "use_parallel_residual": True},
    ),
}


PAIRED = ("llama", "smollm3", "granite", "granitehybrid", "granitemoe", "mistral3", "arcee", "olmo")


def paired(weight: Tensor, num_heads: int) -> Tensor:
    """Returns rows of heads with those side by side that a rotation takes together."""
    rows = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def as_a_file_has_it(architecture: str, model: Any) -> dict[str, Tensor]:
    """Returns the tensors of a transformers model under the names of a GGUF file."""
    config = model.config
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found = dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        layer = "blk." + name.removeprefix("model.layers.").partition(".")[0]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith(
            "norm.weight"
        ):
            weight = weight + 1
        if architecture in PAIRED:
            if stem.endswith(".q_proj"):
                weight = paired(weight, config.num_attention_heads)
            if stem.endswith(".k_proj"):
                weight = paired(weight, config.num_key_value_heads)
        part, kinds = name.rpartition("experts.")[2], {2: "bias", 3: "weight"}
        if part.startswith("gate_up_proj"):
            if architecture == "gpt-oss":
                halves = [weight[..., ::2], weight[..., 1::2]]
                halves = [half.transpose(1, -1) if half.ndim > 2 else half for half in halves]
            else:
                halves = list(weight.chunk(2, dim=1))
            for which, half in zip(("gate", "up"), halves, strict=True):
                found[f"{layer}.ffn_{which}_exps.{kinds[weight.ndim]}"] = half
        elif part.startswith("down_proj"):
            is_turned = architecture == "gpt-oss" and weight.ndim > 2
            weight = weight.transpose(1, 2) if is_turned else weight
            found[f"{layer}.ffn_down_exps.{kinds[weight.ndim]}"] = weight
        elif name.endswith(".sinks"):
            found[f"{layer}.attn_sinks.weight"] = weight
        elif name.endswith((".mlp.gate.weight", ".block_sparse_moe.router.weight")):
            found[f"{layer}.ffn_gate_inp.weight"] = weight
        else:
            found[f"{names.get_name(stem)}.{suffix}"] = (
                weight.flatten(1) if weight.ndim > 2 else weight
            )
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_it_was_made_of(tmp_path: Path, case: str) -> None:
    """Whether the decoder takes such a model is another question."""
    architecture, family, values, keys = CASES[case]
    # transformers writes into the mappings of its arguments
    config: Any = AutoConfig.for_model(family, **copy.deepcopy(SIZES | values))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 and not (family.startswith("cohere") and name.endswith("bias")):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    path, tensors = tmp_path / "a.gguf", as_a_file_has_it(architecture, model)
    layers = {"block_count": config.num_hidden_layers}
    write_model(path, architecture, {k: v.numpy() for k, v in tensors.items()}, layers | keys)

    header = gguf_header.read(path)
    found: Any = AutoConfig.for_model(**gguf_config.config_fields(header))
    outline = checkpoint.outline(found)
    weights = GGUFWeights(header, ARCHITECTURES[architecture], outline)
    assert not weights.unread
    again = type(model)(found).eval()
    missing, unexpected = again.load_state_dict(dict(weights), strict=False)
    again.tie_weights()
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    for name, weight in model.state_dict().items():
        one = 1.0 if ARCHITECTURES[architecture].adds_one else 0.0  # rounds the norms' last bit
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=one * 2e-7)
    text = torch.randint(3, 32, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(text).logits, model(text).logits, rtol=0, atol=1e-6)


def fused(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    """Returns tensors of a file with some of each layer's as one, by their last name."""
    whole, found = parts[-1], dict[str, Tensor]()
    for name, weight in tensors.items():
        *stem, part, suffix = name.split(".")
        if part not in parts:
            found[name] = weight
        elif part == parts[0]:
            of_layer = [tensors[".".join((*stem, each, suffix))] for each in parts[:-1]]
            found[".".join((*stem, whole, suffix))] = torch.cat(of_layer, dim=int("exps" in part))
    return found


@pytest.mark.parametrize("case", ["llama", "qwen2", "mixtral", "qwen3moe", "gpt-oss"])
def test_fused_products_are_taken_apart(tmp_path: Path, case: str) -> None:
    """llama.cpp takes queries, keys and values as one tensor, and an expert's gate and up."""
    architecture, family, values, keys = CASES[case]
    config: Any = AutoConfig.for_model(family, **copy.deepcopy(SIZES | values))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = as_a_file_has_it(architecture, model)
    one = fused(tensors, "attn_q", "attn_k", "attn_v", "attn_qkv")
    one = fused(one, "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps")
    assert len(one) < len(tensors)
    write_model(tmp_path / "a.gguf", architecture, {k: v.numpy() for k, v in one.items()}, keys)
    header = gguf_header.read(tmp_path / "a.gguf")
    found: Any = AutoConfig.for_model(**gguf_config.config_fields(header))
    weights = GGUFWeights(header, ARCHITECTURES[architecture], checkpoint.outline(found))
    assert not weights.unread
    state = model.state_dict()
    assert state.keys() - weights.keys() <= {"lm_head.weight"}
    for name, weight in weights.items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        (
            "granitehybrid",
            {"attention.head_count_kv": [0, 2]},
            "head_count_kv 0 in the GGUF file, expected attention in every layer",
        ),
        ("granitemoe", {"expert_shared_feed_forward_length": 24}, "expected 0: this model"),
        ("olmoe", {"expert_feed_forward_length": 24}, "expected 48: this model"),
    ],
)
def test_parts_that_the_decoder_lacks_are_refused_by_name(
    tmp_path: Path, case: str, keys: dict[str, Any], message: str
) -> None:
    architecture, *_, own = CASES[case]
    write_model(tmp_path / "a.gguf", architecture, {}, own | keys)
    with pytest.raises(UserError, match=message):
        gguf_config.config_fields(gguf_header.read(tmp_path / "a.gguf"))


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, *_ in CASES.values()} == set(ARCHITECTURES)


# ---- types ----


def dequantizable() -> list[Any]:
    """Returns all types that the package gguf dequantises."""
    return [
        kind
        for kind in gguf.GGMLQuantizationType
        if kind.name in ("F32", "F16") or kind in gguf.quants._type_traits
    ]


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_a_tensor_of_any_type_is_what_the_package_gguf_says(tmp_path: Path, kind: Any) -> None:
    """Down to the bit, for blocks of random bytes; those that are not finite are compared too."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    path = tmp_path / "a.bin"
    path.write_bytes(b"12345" + rows.tobytes())
    tensor = GGUFTensor(path, 5, 5 + rows.nbytes, (3, 2 * block), kind)
    with np.errstate(all="ignore"):
        found, expected = gguf_weights.read(tensor), gguf.dequantize(rows, kind)
    assert (found.shape, found.dtype) == ((3, 2 * block), np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", whole_numbers="blk.1.ffn_up")
    with pytest.raises(
        UserError, match=r"got blk.1.ffn_up.weight of type I32 in .*, which is not supp"
    ):
        target.require_supported(target.resolve(str(tmp_path / "a.gguf")))


# ---- split files ----


def write_split(folder: Path) -> list[Path]:
    """Writes the tiny Llama in parts and returns their paths."""
    write_gguf(folder / "tiny.gguf", tensors_per_part=8)
    paths = sorted(folder.glob("tiny-0*.gguf"))
    assert len(paths) == 3
    return paths


def test_any_part_of_a_split_file_stands_for_all(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole, _ = target.load(target.resolve(str(tmp_path / "whole.gguf")))
    prints = set()
    for part in write_split(tmp_path):
        source = target.resolve(str(part))
        model, tokenizer = target.load(source)
        assert (source.name, len(tokenizer)) == ("tiny", 260)
        for name, weight in whole.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)
        prints.add(target.fingerprint(source))
    assert len(prints) == 1


def test_a_part_that_is_missing_or_misnamed_is_named(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)

    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            target.load(target.resolve(str(path)))

    kept = first.read_bytes()
    before, key, value = kept.partition(b"split.tensors.count")  # then its type, and the number
    first.write_bytes(before + key + value[:4] + bytes([value[4] + 1]) + value[5:])
    refused(first, r"hold \d+ tensors, expected \d+ \(split.tensors.count\): they are not of one")
    first.write_bytes(kept)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    refused(first, r"tiny-00003-of-00003.gguf is part 1 by its header \(split.no.*expected 2 by")
    third.write_bytes(kept.replace(b"blk.1.", b"blk.0."))
    refused(first, r"got tensor blk.0\S+ in .*0000[12]-of-00003.gguf and in .*/tiny-00003-of-00003")
    third.write_bytes(kept[:-100])
    refused(first, r"tiny-00003-of-00003.gguf is no whole GGUF file: tensor .* ends at byte")
    third.unlink()
    refused(first, r"one of 3 parts of a model, without tiny-00003-of-00003.gguf: put all parts")
    refused(second.rename(tmp_path / "b.gguf"), r"b.gguf is one of 3 parts by its header \(split.c")
    refused(first, r"without tiny-00002-of-00003.gguf and 1 more: put")


# ---- headers, builds ----


def test_a_header_is_read_once_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.gguf", list[Path]()
    read_part = gguf_header._read_part

    def counted(part: Path) -> gguf_header.GGUFHeader:
        opened.append(part)
        return read_part(part)

    monkeypatch.setattr(gguf_header, "_read_part", counted)
    write_gguf(path)
    source = target.resolve(str(path))
    target.load(source)
    target.load_generation_config(source)
    assert opened == [path]
    write_gguf(path, keys={"context_length": 128})
    os.utime(path, ns=(1, 1))
    assert target.context(source) == 128
    assert opened == [path] * 2


def test_a_file_of_llama_3_builds_and_answers_as_transformers_does(tmp_path: Path) -> None:
    """It holds factors of frequencies, where transformers has parameters to compute them from."""
    path, factors = tmp_path / "a.gguf", llama3_factors()
    write_gguf(
        path,
        extra={"rope_freqs": (16,)},
        fill={"rope_freqs": factors},
        keys={"rope.freq_base": 500.0},
    )
    model, _ = target.load(target.resolve(str(path)))
    config = model.config.to_dict() | {"rope_parameters": LLAMA3}
    reference = type(model)(type(model.config).from_dict(config)).eval()
    reference.load_state_dict(model.state_dict())
    out = make_bundle.build(BuildOptions(str(path), out=tmp_path / "out", lanes=1))
    prompt = [int(i) for i in np.random.default_rng(0).integers(3, 260, size=100)]
    engine = spec_runtime.load(out, threads=1)
    found = engine.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
    assert found == expected[0, 100:].tolist()
