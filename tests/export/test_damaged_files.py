"""Tests that strangers' files with wrong values are refused in one line, quickly, and with code 2.

Each row is one change of a sound folder, imported by the command as a user does. A row that hangs
or takes memory by a number in a config is stopped by limits of its own.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import foreign_sources
import pytest
import torch
from foreign_sources import DRAFTERS, QUANTISED, TARGETS, change, change_tensors, copy

from spec_export.cli import main
from spec_export.imports.drafters import importer
from spec_export.model.config import own_rotary_table
from spec_runtime.errors import UserError

SECONDS, MEGABYTES = 5.0, 1500
BIG = 10_000_000
DEEP: dict[str, Any] = {"a": {"a": {"a": []}}}
ADAPTER, INDEX = "adapter_config.json", "model.safetensors.index.json"
SLOW = r"(.|..)+x"
WEIGHTS0 = "quantization_config.config_groups.0.weights"

# Each source with changes of its JSON files: fields by name, in config.json unless a file is named.
FIELDS: dict[str, list[dict[str, Any]]] = {
    "EAGLE-3": [
        {"num_attention_heads": "4"}, {"num_attention_heads": BIG}, {"num_attention_heads": None},
        {"num_attention_heads": -4}, {"rms_norm_eps": "small"}, {"rms_norm_eps": [1]},
        {"rms_norm_eps": -1.0}, {"rope_theta": "10000"}, {"rope_theta": -1}, {"rope_theta": [1]},
        {"rope_theta": 1e-300}, {"rope_scaling": "yarn"}, {"rope_scaling": ["yarn", 2]},
        {"rope_scaling": 3}, {"rope_parameters": "none"}, {"rope_parameters": [["a", 1]]},
        {"rope_scaling": {"type": "yarn", "factor": "4"}},
        {"rope_scaling": {"type": "yarn", "factor": 0}},
        {"rope_scaling": {"type": "linear", "factor": None}},
        {"rope_scaling": {"type": "linear", "factor": 1e-320}},
        {"rope_scaling": {"type": ["yarn"], "factor": 4}},
        {"rope_scaling": {"rope_type": {}, "factor": 4}},
        {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": "32"}},
        {"rope_scaling": {"type": "llama3", "factor": 8}},
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": []}},
        {"rope_scaling": {"type": "longrope", "short_factor": ["1"] * 4, "long_factor": [1.0] * 4,
                          "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "longrope", "short_factor": 1, "long_factor": 1}},
        {"max_position_embeddings": "256", "rope_scaling": {"type": "yarn", "factor": 4}},
        {"layer_types": "sliding_attention"}, {"layer_types": 3}, {"layer_types": [[]]},
        {"layer_types": [{}]}, {"sliding_window": "4"}, {"sliding_window": -4},
        {"eagle_config": []}, {"eagle_config": "x"}, {"eagle_config": {"fc_norm": {}}},
        {"eagle_config.fc_norm": "yes"}, {"eagle_config.norm_output": "no"},
        {"eagle_aux_hidden_state_layer_ids": "2,4,5"}, {"eagle_aux_hidden_state_layer_ids": 2},
        {"eagle_aux_hidden_state_layer_ids": [2, "4", 5]},
        {"eagle_aux_hidden_state_layer_ids": [[2], 4, 5]},
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 1 << 70]},
        {"hidden_act": ["silu"]}, {"hidden_act": {}}, {"architectures": "x", "hidden_act": 1},
        {"model_type": ["llama"]}, {"model_type": {}}, {"attention_bias": "false"},
        {"a\nb": 1}, {"eagle_config.a\x1eb": 1}, {"norm_before_residual": "yes"},
        {"norm_before_residual": DEEP},
    ],
    "speculators": [
        {"transformer_layer_config": []}, {"transformer_layer_config": "llama"},
        {"transformer_layer_config": 1}, {"transformer_layer_config.model_type": ["qwen3"]},
        {"transformer_layer_config.rope_parameters": "default"},
        {"transformer_layer_config.rope_parameters": {"rope_theta": "300"}},
        {"transformer_layer_config.num_attention_heads": "4"},
        {"transformer_layer_config.num_hidden_layers": BIG * 100},
        {"transformer_layer_config.num_attention_heads": 0},
        {"transformer_layer_config.layer_types": [1]},
        {"transformer_layer_config.sliding_window": {}}, {"speculators_model_type": ["eagle3"]},
        {"transformer_layer_config.rms_norm_eps": "1e-5"},
    ],
    "P-EAGLE": [
        {"mask_token_id": "9"}, {"mask_token_id": BIG}, {"mask_token_id": -1},
        {"speculators_config": []}, {"speculators_config": {"proposal_methods": {}}},
        {"speculators_config": {"proposal_methods": [[]]}},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": "4"}]}},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": BIG}]}},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": True}]}},
    ],
    "DFlash 2": [
        {"dflash_config": []}, {"dflash_config": "x"}, {"dflash_config.block_size": "4"},
        {"dflash_config.block_size": BIG}, {"dflash_config.block_size": -4},
        {"dflash_config.mask_token_id": [9]}, {"dflash_config.target_layer_ids": 3},
        {"dflash_config.target_layer_ids": ["0", 2, 5]}, {"dflash_config.selector_rank": "6"},
        {"dflash_config.selector_top_k": BIG}, {"dflash_config.conv_group_size": [8]},
        {"dflash_config.conv_kernel_size": 0}, {"num_hidden_layers": BIG},
        {"num_hidden_layers": [2]}, {"num_attention_heads": {}}, {"rope_theta": "300"},
        {"rope_scaling": 2}, {"rms_norm_eps": {}}, {"sliding_window": [5]}, {"layer_types": {}},
        {"is_causal": "no"}, {"dflash_config.projector_type": ["dflash"]},
        {"speculators_model_type": {}}, {"model_type": []},
    ],
    "DSpark": [
        {"block_size": 4.5}, {"markov_rank": "5"}, {"markov_rank": BIG}, {"markov_head_type": []},
        {"aux_hidden_state_layer_ids": "1"}, {"aux_hidden_state_layer_ids": [True, 3, 6]},
        {"sample_from_anchor": "yes"}, {"transformer_layer_config": 7},
        {"transformer_layer_config.model_type": {}},
        {"transformer_layer_config.rope_parameters": {"rope_type": 3, "rope_theta": 300.0}},
    ],
    "Medusa 1": [
        {"medusa_num_layers": BIG}, {"medusa_num_layers": "1"}, {"medusa_num_layers": -1},
        {"medusa_num_layers": 3}, {"hidden_act": ["silu"]}, {"logit_scale": "1"},
    ],
    "Medusa 2": [
        {"medusa_num_layers": BIG}, {"medusa_num_layers": 2.5}, {"medusa_num_layers": True},
        {"medusa_num_layers": 0}, {"medusa_num_heads": "2"}, {"medusa_fc_bias": "no"},
        {"hidden_act": {}},
    ],
    "EAGLE-1": [
        {"num_attention_heads": "2"}, {"rms_norm_eps": "1e-5"}, {"rms_norm_eps": {}},
        {"rope_theta": "300"}, {"rope_theta": 10**400}, {"rope_scaling": "linear"},
        {"rope_scaling": [1]}, {"bias": "yes"}, {"bias": []}, {"hidden_act": ["silu"]},
        {"attention_bias": {}},
    ],
    "PARD": [
        {"pard_token": "5"}, {"pard_token": BIG}, {"pard_token": -1}, {"pard_token": [5]},
        {"vocab_size": "98"}, {"hidden_size": None},
    ],
    "llama": [
        {"model_type": ["llama"]}, {"model_type": {}}, {"model_type": None},
        {"model_type": "a\x1eb\n"},
        {"num_hidden_layers": BIG}, {"num_hidden_layers": "8"}, {"num_hidden_layers": -8},
        {"num_hidden_layers": 8.0}, {"num_hidden_layers": 1 << 62}, {"vocab_size": 1 << 40},
        {"vocab_size": [98]}, {"hidden_size": "32"}, {"hidden_size": 0}, {"hidden_size": -32},
        {"intermediate_size": None}, {"intermediate_size": {}}, {"num_attention_heads": 1 << 40},
        {"num_attention_heads": 0}, {"num_attention_heads": 64}, {"num_key_value_heads": "2"},
        {"num_key_value_heads": 0}, {"num_key_value_heads": 3}, {"head_dim": "8"},
        {"head_dim": -8}, {"head_dim": 1 << 23}, {"max_position_embeddings": 0},
        {"max_position_embeddings": "256"},
        {"rms_norm_eps": "1e-6"}, {"rms_norm_eps": None}, {"rms_norm_eps": -1.0},
        {"rope_parameters": "default"}, {"rope_parameters": ["rope_theta"]},
        {"rope_parameters": {"rope_theta": "10000", "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": ["default"]}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": "2"}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default",
                             "partial_rotary_factor": "half"}},
        {"rope_scaling": "yarn"}, {"rope_scaling": 4}, {"tie_word_embeddings": "no"},
        {"hidden_act": 3}, {"hidden_act": ["silu"]}, {"attention_bias": "x"}, {"mlp_bias": [1]},
        {"layer_types": 3}, {"layer_types": "full"}, {"layer_types": [["full_attention"]] * 8},
        {"quantization_config": "gptq"}, {"quantization_config": ["gptq"]},
        {"text_config": "x", "model_type": "gemma3"}, {"model_type": "gemma3", "text_config": []},
        {"auto_map": 1, "model_type": []}, {"architectures": "Llama", "model_type": 5},
        {"generation_config.json": {"eos_token_id": "1"}},
        {"generation_config.json": {"eos_token_id": [[1]]}},
        {"generation_config.json": {"eos_token_id": 1.5}},
        {"tokenizer_config.json": {"chat_template": 5}},
        {"tokenizer_config.json": {"chat_template": [1]}},

        {"tokenizer_config.json": {"tokenizer_class": ["x"]}},
        {"tokenizer_config.json": {"eos_token": 7}},
        {INDEX: {"weight_map": []}}, {INDEX: {"weight_map": None}},
        {INDEX: {"weight_map": "x"}}, {INDEX: {"weight_map": {"a": 1}}},
        {INDEX: {"weight_map": {"a": ["model.safetensors"]}}},
        {INDEX: {"weight_map": {"a": "../six/model.safetensors"}}},
        {INDEX: {"weight_map": {"a": "/etc/passwd"}}}, {INDEX: {"weight_map": {"a": "x\0"}}},
        {INDEX: {"weight_map": {"a": "y" * 5000}}},
    ],
    "experts": [
        {"num_local_experts": "4"}, {"num_local_experts": -1}, {"num_local_experts": BIG},
        {"num_experts_per_tok": 0}, {"num_experts_per_tok": 9}, {"num_experts_per_tok": "2"},
        {"decoder_sparse_step": 0}, {"decoder_sparse_step": "1"}, {"mlp_only_layers": 3},
        {"mlp_only_layers": "0"}, {"mlp_only_layers": [[0]]}, {"moe_intermediate_size": "16"},
        {"moe_intermediate_size": -1}, {"norm_topk_prob": "yes"}, {"norm_topk_prob": [1]},
    ],
    "adapter": [
        {ADAPTER: {"alpha_pattern": {SLOW: 5}}}, {ADAPTER: {"alpha_pattern": {"(": 5}}},
        {ADAPTER: {"alpha_pattern": {"q_proj": "5"}}}, {ADAPTER: {"alpha_pattern": ["q_proj"]}},
        {ADAPTER: {"alpha_pattern": "q_proj"}}, {ADAPTER: {"alpha_pattern": {"q_proj": [5]}}},
        {ADAPTER: {"alpha_pattern": {"(.*)*" * 30 + "z": 5}}},
        {ADAPTER: {"rank_pattern": [1]}}, {ADAPTER: {"rank_pattern": {"q_proj": "4"}}},
        {ADAPTER: {"lora_alpha": "8"}}, {ADAPTER: {"lora_alpha": None}},
        {ADAPTER: {"lora_alpha": True}}, {ADAPTER: {"lora_alpha": [8]}},
        {ADAPTER: {"lora_alpha": 10**400}}, {ADAPTER: {"r": 0}}, {ADAPTER: {"r": "4"}},
        {ADAPTER: {"r": -4}}, {ADAPTER: {"peft_type": ["LORA"]}}, {ADAPTER: {"peft_type": None}},
        {ADAPTER: {"use_rslora": "yes"}}, {ADAPTER: {"use_rslora": []}},
        {ADAPTER: {"init_lora_weights": ["x"]}}, {ADAPTER: {"init_lora_weights": {}}},
        {ADAPTER: {"base_model_name_or_path": 5}}, {ADAPTER: {"base_model_name_or_path": [1]}},
        {ADAPTER: {"base_model_name_or_path": "."}}, {ADAPTER: {"base_model_name_or_path": ""}},
        {ADAPTER: {"base_model_name_or_path": "x\0y"}},
        {ADAPTER: {"base_model_name_or_path": "a" * 5000}},
        {ADAPTER: {"base_model_name_or_path": "~nobody-here/x"}},
    ],
    "GPTQ": [
        {"quantization_config.bits": "4"}, {"quantization_config.bits": [4]},
        {"quantization_config.bits": 4.5}, {"quantization_config.bits": BIG},
        {"quantization_config.quant_method": ["gptq"]}, {"quantization_config.quant_method": {}},
        {"quantization_config.checkpoint_format": []},
        {"quantization_config.checkpoint_format": {}},
        {"quantization_config.sparsity_config": "dense"},
        {"quantization_config.sparsity_config": []}, {"quantization_config.group_size": "32"},
        {"quantization_config.group_size": 1 << 70}, {"quantization_config.bits": True},
    ],
    "AWQ": [
        {"quantization_config.version": ["gemm"]}, {"quantization_config.bits": "4"},
        {"quantization_config.bits": {}}, {"quantization_config.version": 1},
    ],
    "packed": [
        {"quantization_config.config_groups": []}, {"quantization_config.config_groups": [1]},
        {"quantization_config.config_groups": "x"}, {"quantization_config.config_groups": {"0": 1}},
        {"quantization_config.config_groups": {"0": []}}, {WEIGHTS0: []}, {WEIGHTS0: "int"},
        {f"{WEIGHTS0}.block_structure": 5}, {f"{WEIGHTS0}.block_structure": "1x"},
        {f"{WEIGHTS0}.group_size": "x"}, {f"{WEIGHTS0}.num_bits": "4"},
        {"quantization_config.format": ["pack-quantized"]}, {"quantization_config.format": None},
        {"quantization_config.transform_config": [1]},
    ],
    "int8": [
        {"quantization_config.config_groups.0.input_activations": []},
        {"quantization_config.config_groups.0.input_activations": "int"},
        {"quantization_config.config_groups.0.input_activations": {"type": [], "num_bits": 8}},
        {f"{WEIGHTS0}.block_structure": [0, 0]}, {f"{WEIGHTS0}.block_structure": ["a", "b"]},
    ],
    "FP8": [
        {"quantization_config.weight_block_size": 24},
        {"quantization_config.weight_block_size": "2"},
        {"quantization_config.weight_block_size": [24]},
        {"quantization_config.weight_block_size": [0, 24]},
        {"quantization_config.weight_block_size": [-24, 24]},
        {"quantization_config.weight_block_size": ["24", 24]},
        {"quantization_config.weight_block_size": [BIG, BIG]},
        {"quantization_config.weight_block_size": {"a": 1}},
    ],
    "MLX": [
        {"quantization.bits": "4"}, {"quantization.bits": 0}, {"quantization.bits": 99},
        {"quantization.bits": None}, {"quantization.bits": []}, {"quantization.mode": ["affine"]},
        {"quantization.group_size": "x"},
        {"quantization": {"bits": 4, "group_size": 32,
                          "model.layers.0.self_attn.q_proj": {"bits": "4"}}},
    ],
    "bitsandbytes": [
        {"quantization_config.load_in_4bit": "yes"}, {"quantization_config.load_in_4bit": []},
        {"quantization_config.load_in_4bit": {}},
    ],
}  # fmt: skip


def state(**fields: Any) -> torch.Tensor:
    """Returns what bitsandbytes keeps of a matrix [64, 64], with fields changed."""
    known = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64]}
    known |= {"nested_blocksize": 256, "nested_offset": 0.25}
    return torch.tensor(list(json.dumps(known | fields).encode()), dtype=torch.uint8)


Q, BNB = "layers.0.self_attn.q_proj", "q_proj.weight.quant_state"
# Changes of tensors: of those whose names hold these texts.
TENSORS: dict[str, list[dict[str, torch.Tensor | str | None]]] = {
    "EAGLE-3": [
        {"fc.weight": torch.tensor(1.0)}, {"norm.weight": torch.tensor(1.0)},
        {"q_proj": torch.tensor(1.0)}, {"d2t": torch.tensor(1)}, {"d2t": torch.ones(49)},
        {"t2d": torch.tensor(True)}, {"lm_head": torch.tensor(2.0)},
        {"fc.weight": torch.ones(0, 0)},
        {"fc_norm.1": torch.ones(3)}, {"fc_norm.1": None},
        {"fc.weight": torch.full((32, 96), torch.nan)},
        {"mlp.gate": torch.ones(48, 32, dtype=torch.int64)}, {"q_proj": torch.ones(0, 64)},
        {"k_proj": torch.ones(0, 64)}, {"t2d": torch.ones(98)},
    ],
    "P-EAGLE": [{"mask_hidden": torch.tensor(1.0)}, {"mask_hidden": torch.ones(96)}],
    "DFlash 2": [
        {"base_kernel": torch.tensor(1.0)}, {"kernel_projection": torch.tensor(1.0)},
        {"kernel_projection": torch.ones(0, 32)}, {"predecessor_codebook": torch.tensor(1.0)},
        {"hidden_projection": torch.tensor(1.0)}, {"hidden_projection": torch.ones(3, 3)},
        {"successor_codebook": torch.ones(98, 0)}, {"fc.weight": torch.ones(0, 96)},
        {"hidden_norm": torch.tensor(1.0)},
    ],
    "DSpark": [{"markov_w1": torch.tensor(1.0)}, {"markov_w2": None}, {"embed": torch.tensor(1.0)}],
    "Medusa 1": [
        {"0.1.weight": torch.tensor(1.0)}, {"0.1.weight": torch.ones(98)},
        {"0.1.weight": "0.10000000.weight"}, {"0.0.linear.weight": torch.tensor(1.0)},
        {"0.0.linear.bias": torch.tensor(1.0)}, {"1.0.linear.weight": "10000000.0.linear.weight"},
        {"1.0.linear.weight": "1.10000000.linear.weight"}, {"1.1.weight": None},
    ],
    "Medusa 2": [{"0.0.linear.bias": None}, {"0.0.linear.weight": "0.10000000.linear.weight"}],
    "EAGLE-1": [{"fc.weight": torch.tensor(1.0)}, {"fc.bias": torch.tensor(1.0)}],
    "llama": [
        {"embed_tokens": torch.tensor(1.0)}, {f"{Q}.weight": torch.tensor(1.0)},
        {"norm.weight": torch.ones(0)}, {f"{Q}.weight": torch.full((32, 32), torch.nan)},
        {f"{Q}.weight": torch.ones(32, 32, dtype=torch.bool)},
        {f"{Q}.weight": torch.ones(32, 32, dtype=torch.complex64)},
    ],
    "adapter": [
        {"lora_A": torch.tensor(1.0)}, {"lora_B": torch.tensor(1.0)},
        {"0.self_attn.q_proj.lora_A": torch.ones(0, 32),
         "0.self_attn.q_proj.lora_B": torch.ones(32, 0)},
        {f"base_model.model.model.{Q}.lora_magnitude_vector": torch.ones(3)},
        {f"base_model.model.model.{Q}.lora_magnitude_vector": torch.tensor(1.0)},
        {"base_model.model.model.embed_tokens.weight": torch.tensor(1.0)},
        {"base_model.model.a\nb": torch.ones(1)}, {"lora_A": torch.ones(32)},
        {"lora_B": torch.ones(4, 4, 4)},
        {"0.self_attn.q_proj.lora_A.weight": "0.self_attn.q_proj.lora_magnitude_vector"},
        {"lora_A": torch.full((4, 32), torch.inf)},
        {"model.layers.0.self_attn.q_proj.lora_A.weight": "model.embed_tokens.weight"},
    ],
    "GPTQ": [
        {".qweight": torch.tensor(1)}, {".scales": torch.tensor(1.0)}, {".qzeros": torch.tensor(1)},
        {".qweight": torch.ones(8)}, {f"{Q}.qweight": torch.ones(8, 64)},
        {".qweight": torch.ones(4, 4, dtype=torch.int64)},
        {".qzeros": torch.ones(1, 1)},
    ],
    "packed": [
        {".weight_packed": torch.tensor(1)}, {".weight_shape": torch.tensor(1)},
        {".weight_shape": torch.tensor([1 << 40, 1 << 40])},
        {".weight_shape": torch.tensor([-1, 0])},
        {".weight_shape": torch.tensor([1, 2, 3])}, {".weight_scale": torch.ones(0)},
    ],
    "FP8": [
        {".weight_scale_inv": torch.ones(0, 0)}, {".weight_scale_inv": torch.ones(1, 1, 2)},
        {f"{Q}.weight": torch.tensor(1.0).to(torch.float8_e4m3fn)},
    ],
    "int8": [{"q_proj.weight": torch.tensor(1, dtype=torch.int8)}],
    "MLX": [{".scales": torch.tensor(1.0)}, {".biases": torch.tensor(1.0)},
    {"q_proj.weight": torch.tensor(1)}],
    "bitsandbytes": [
        {BNB: torch.tensor(1.0)}, {BNB: torch.tensor([300, 4])}, {BNB: torch.tensor([123])},
        {BNB: torch.tensor(list(b"[1]"))}, {BNB: torch.tensor(list(b"[" * 5000))},
        {BNB: state(blocksize=0)}, {BNB: state(blocksize=-1)}, {BNB: state(blocksize=1 << 40)},
        {BNB: state(blocksize="64")}, {BNB: state(shape=5)}, {BNB: state(shape=[-1, -1])},
        {BNB: state(shape=["64", 64])}, {BNB: state(nested_blocksize=1 << 40)},
        {BNB: state(nested_offset="x")}, {"quant_map": torch.ones(3)},
        {"quant_map": torch.tensor(1.0)},
        {"weight.absmax": torch.tensor(1.0)},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return foreign_sources.write_sources(tmp_path_factory.mktemp("foreign"))


class _Late(BaseException):
    """Says that a case took too long; nothing catches it."""


@contextmanager
def limits() -> Iterator[None]:
    """Stops what runs longer than SECONDS, and lets it take MEGABYTES more than there are."""

    def stop(*_: Any) -> None:
        raise _Late(f"took more than {SECONDS:g} s")

    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    taken, infinity = int(line.split()[1]) * 1024, resource.RLIM_INFINITY
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + MEGABYTES * 2**20, infinity))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (infinity, infinity))


def command(source: str, folder: Path, sources: dict[str, Path]) -> list[str]:
    """Returns the words that import a drafter for a sound target, or a sound drafter for a target,
    whose weights are then read."""
    sound = sources["six" if source in ("DFlash 2", "DSpark") else "llama"]
    heads = sources["heads" if source in QUANTISED else "Medusa 2"]
    drafter, target = (folder, sound) if source in DRAFTERS else (heads, folder)
    return ["import", str(drafter), "--target", str(target), "--out", str(folder / "out")]


def require_one_line(
    source: str, folder: Path, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Requires exit code 2 and one line of error."""
    capsys.readouterr()
    with limits(), pytest.raises(SystemExit) as end:
        main(command(source, folder, sources))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert end.value.code == 2, said
    assert len(said) == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize("source", [*DRAFTERS, *TARGETS])
def test_a_sound_source_is_imported(
    source: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    with pytest.raises(SystemExit) as end:
        main(command(source, copy(sources[source], tmp_path / "x"), sources))
    assert not end.value.code


def rows(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(source, each, id=f"{source}: {each!r:.90}")
        for source, changes in table.items()
        for each in changes
    ]


@pytest.mark.parametrize(("source", "fields"), rows(FIELDS))
def test_a_wrong_value_is_one_line(
    source: str,
    fields: dict[str, Any],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy(sources[source], tmp_path / "x")
    name = next(iter(fields))
    if name.endswith(".json"):
        change(folder, name, fields[name])
    else:
        change(folder, "config.json", fields)
    require_one_line(source, folder, sources, capsys)


@pytest.mark.parametrize(("source", "tensors"), rows(TENSORS))
def test_a_wrong_tensor_is_one_line(
    source: str,
    tensors: dict[str, torch.Tensor | str | None],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy(sources[source], tmp_path / "x")
    change_tensors(folder, tensors)
    require_one_line(source, folder, sources, capsys)


@pytest.mark.parametrize("is_pair", [False, True])
def test_adapters_that_are_their_own_base_are_one_line(
    is_pair: bool, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("x", "y") if is_pair else ("x", "x")
    for name, base in zip(names, reversed(names), strict=True):
        folder = copy(sources["adapter"], tmp_path / name)
        change(folder, ADAPTER, {"base_model_name_or_path": str(tmp_path / base)})
    require_one_line("adapter", tmp_path / "x", sources, capsys)


def test_a_table_is_not_made_by_a_number_in_a_config_alone() -> None:
    with limits(), pytest.raises(UserError, match="give a shorter --max-length"):
        own_rotary_table({"rope_theta": 1e4, "rope_type": "default"}, 128, 1 << 24)
