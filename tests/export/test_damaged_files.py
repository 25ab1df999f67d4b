"""Tests that strangers' files with wrong values are refused in one line, quickly, and with code 2.

Each row is one change of a sound folder, imported by the command as a user does. A row that hangs
or takes memory by a number in a config is stopped by limits of its own.
"""

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
ADAPTER = "adapter_config.json"
SLOW = r"(.|..)+x"
WEIGHTS0 = "config_groups.0.weights"
# Where a source's fields are, if not in config.json, and what begins their names.
FILES = {"adapter": ADAPTER}
PREFIXES = dict.fromkeys(QUANTISED, "quantization_config.") | {"MLX": "quantization."}

# Each source with wrong values of fields of its JSON file, or of another one that is named.
FIELDS: dict[str, dict[str, list[Any]]] = {
    "EAGLE-3": {
        "num_attention_heads": ["4", BIG, None, -4], "rms_norm_eps": ["small", [1], -1.0],
        "rope_theta": ["10000", -1, [1], 1e-300],
        "rope_scaling": ["yarn", ["yarn", 2], 3, {"type": "yarn", "factor": "4"}, {"type": "yarn",
            "factor": 0}, {"type": "linear", "factor": None}, {"type": "linear",
            "factor": 1e-320}, {"type": ["yarn"], "factor": 4}, {"rope_type": {}, "factor": 4},
            {"type": "yarn", "factor": 4, "beta_fast": "32"}, {"type": "llama3", "factor": 8},
            {"type": "llama3", "factor": 8, "low_freq_factor": []}, {"type": "longrope",
            "short_factor": ["1"] * 4, "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 64}, {"type": "longrope", "short_factor": 1,
            "long_factor": 1}], "rope_parameters": ["none", [["a", 1]]],
        "layer_types": ["sliding_attention", 3, [[]], [{}]], "sliding_window": ["4", -4],
        "eagle_config": [[], "x", {"fc_norm": {}}], "eagle_config.fc_norm": ["yes"],
        "eagle_config.norm_output": ["no"],
        "eagle_aux_hidden_state_layer_ids": ["2,4,5", 2, [2, "4", 5], [[2], 4, 5], [2, 4,
            1 << 70]], "hidden_act": [["silu"], {}], "model_type": [["llama"], {}],
        "attention_bias": ["false"], "a\nb": [1], "eagle_config.a\x1eb": [1],
        "norm_before_residual": ["yes", DEEP],
    },
    "speculators": {
        "transformer_layer_config": [[], "llama", 1],
        "transformer_layer_config.model_type": [["qwen3"]],
        "transformer_layer_config.rope_parameters": ["default", {"rope_theta": "300"}],
        "transformer_layer_config.num_attention_heads": ["4", 0],
        "transformer_layer_config.num_hidden_layers": [BIG * 100],
        "transformer_layer_config.layer_types": [[1]],
        "transformer_layer_config.sliding_window": [{}], "speculators_model_type": [["eagle3"]],
        "transformer_layer_config.rms_norm_eps": ["1e-5"],
    },
    "P-EAGLE": {
        "mask_token_id": ["9", BIG, -1],
        "speculators_config": [[], {"proposal_methods": {}}, {"proposal_methods": [[]]},
            {"proposal_methods": [{"speculative_tokens": "4"}]},
            {"proposal_methods": [{"speculative_tokens": BIG}]},
            {"proposal_methods": [{"speculative_tokens": True}]}],
    },
    "DFlash 2": {
        "dflash_config": [[], "x"], "dflash_config.block_size": ["4", BIG, -4],
        "dflash_config.mask_token_id": [[9]], "dflash_config.target_layer_ids": [3, ["0", 2, 5]],
        "dflash_config.selector_rank": ["6"], "dflash_config.selector_top_k": [BIG],
        "dflash_config.conv_group_size": [[8]], "dflash_config.conv_kernel_size": [0],
        "num_hidden_layers": [BIG, [2]], "num_attention_heads": [{}], "rope_theta": ["300"],
        "rope_scaling": [2], "rms_norm_eps": [{}], "sliding_window": [[5]], "layer_types": [{}],
        "is_causal": ["no"], "dflash_config.projector_type": [["dflash"]],
        "speculators_model_type": [{}], "model_type": [[]],
    },
    "DSpark": {
        "block_size": [4.5], "markov_rank": ["5", BIG], "markov_head_type": [[]],
        "aux_hidden_state_layer_ids": ["1", [True, 3, 6]], "sample_from_anchor": ["yes"],
        "transformer_layer_config": [7], "transformer_layer_config.model_type": [{}],
        "transformer_layer_config.rope_parameters": [{"rope_type": 3, "rope_theta": 300.0}],
    },
    "Medusa 1": {
        "medusa_num_layers": [BIG, "1", -1, 3], "hidden_act": [["silu"]], "logit_scale": ["1"],
    },
    "Medusa 2": {
        "medusa_num_layers": [BIG, 2.5, True, 0], "medusa_num_heads": ["2"],
        "medusa_fc_bias": ["no"], "hidden_act": [{}],
    },
    "EAGLE-1": {
        "num_attention_heads": ["2"], "rms_norm_eps": ["1e-5", {}], "rope_theta": ["300", 10**400],
        "rope_scaling": ["linear", [1]], "bias": ["yes", []], "hidden_act": [["silu"]],
        "attention_bias": [{}],
    },
    "PARD": {
        "pard_token": ["5", BIG, -1, [5]], "vocab_size": ["98"], "hidden_size": [None],
    },
    "llama": {
        "model_type": [["llama"], {}, None, "a\x1eb\n", 5], "eos_token_id": ["x"],
        "num_hidden_layers": [BIG, "8", -8, 8.0, 1 << 62, None], "vocab_size": [1 << 40, [98]],
        "hidden_size": ["32", 0, -32], "intermediate_size": [None, {}],
        "num_attention_heads": [1 << 40, 0, 64], "num_key_value_heads": ["2", 0, 3],
        "head_dim": ["8", -8, 1 << 23], "max_position_embeddings": [0, "256", 2**70],
        "rms_norm_eps": ["1e-6", None, -1.0, float("nan")],
        "rope_parameters": ["default", ["rope_theta"], {"rope_theta": "10000",
            "rope_type": "default"}, {"rope_theta": 1e4, "rope_type": ["default"]},
            {"rope_theta": 1e4, "rope_type": "yarn", "factor": "2"}, {"rope_theta": 1e4,
            "rope_type": "linear", "factor": 0}, {"rope_theta": 1e4, "rope_type": "default",
            "partial_rotary_factor": "half"}, 5, {"rope_type": 7}, {"rope_type": "linear",
            "rope_theta": 1e4}, {"rope_type": "longrope", "rope_theta": 1e4}],
        "rope_scaling": ["yarn", 4],
        "tie_word_embeddings": ["no"], "hidden_act": [3, ["silu"], "nope"], "attention_bias": ["x"],
        "mlp_bias": [[1]], "layer_types": [3, "full", [["full_attention"]] * 8, ["full_attention"]],
        "quantization_config": ["gptq", ["gptq"]],
        "generation_config.json/eos_token_id": ["1", [[1]], 1.5, [1, "x"], -1, True],
        "tokenizer_config.json/chat_template": [5, [1]],
        "tokenizer_config.json/tokenizer_class": [["x"]], "tokenizer_config.json/eos_token": [7],
    },
    "experts": {
        "num_local_experts": ["4", -1, BIG], "num_experts_per_tok": [0, 9, "2"],
        "decoder_sparse_step": [0, "1"], "mlp_only_layers": [3, "0", [[0]]],
        "moe_intermediate_size": ["16", -1], "norm_topk_prob": ["yes", [1]],
    },
    "adapter": {
        "alpha_pattern": [{SLOW: 5}, {"(": 5}, {"q_proj": "5"}, ["q_proj"], "q_proj",
            {"q_proj": [5]}, {"(.*)*" * 30 + "z": 5}], "rank_pattern": [[1], {"q_proj": "4"}],
        "lora_alpha": ["8", None, True, [8], 10**400], "r": [0, "4", -4],
        "peft_type": [["LORA"], None], "use_rslora": ["yes", []], "init_lora_weights": [["x"], {}],
        "base_model_name_or_path": [5, [1], ".", "", "x\0y", "a" * 5000, "~nobody-here/x"],
    },
    "GPTQ": {
        "bits": ["4", [4], 4.5, BIG, True], "quant_method": [["gptq"], {}],
        "checkpoint_format": [[], {}], "sparsity_config": ["dense", []],
        "group_size": ["32", 1 << 70],
    },
    "AWQ": {
        "version": [["gemm"], 1], "bits": ["4", {}],
    },
    "packed": {
        "config_groups": [[], [1], "x", {"0": 1}, {"0": []}], WEIGHTS0: [[], "int"],
        f"{WEIGHTS0}.block_structure": [5, "1x"], f"{WEIGHTS0}.group_size": ["x"],
        f"{WEIGHTS0}.num_bits": ["4"], "format": [["pack-quantized"], None],
        "transform_config": [[1]],
    },
    "int8": {
        "config_groups.0.input_activations": [[], "int", {"type": [], "num_bits": 8}],
        f"{WEIGHTS0}.block_structure": [[0, 0], ["a", "b"]],
    },
    "FP8": {
        "weight_block_size": [24, "2", [24], [0, 24], [-24, 24], ["24", 24], [BIG, BIG], {"a": 1}],
    },
    "MLX": {
        "bits": ["4", 0, 99, None, []], "mode": [["affine"]], "group_size": ["x"],
        "quantization": [{"bits": 4, "group_size": 32,
            "model.layers.0.self_attn.q_proj": {"bits": "4"}}],
    },
    "bitsandbytes": {
        "load_in_4bit": ["yes", [], {}],
    },
}  # fmt: skip
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("EAGLE-3", {"max_position_embeddings": "256", "rope_scaling": {"type": "yarn", "factor": 4}}),
    ("EAGLE-3", {"architectures": "x", "hidden_act": 1}),
    ("llama", {"text_config": "x", "model_type": "gemma3"}),
    ("llama", {"model_type": "gemma3", "text_config": []}),
    ("llama", {"auto_map": 1, "model_type": []}),
    ("llama", {"architectures": "Llama", "model_type": 5}),
]


def state(**fields: Any) -> torch.Tensor:
    """Returns what bitsandbytes keeps of a matrix [64, 64], with fields changed."""
    known = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64]}
    known |= {"nested_blocksize": 256, "nested_offset": 0.25}
    return torch.tensor(list(json.dumps(known | fields).encode()), dtype=torch.uint8)


Q, BNB = "layers.0.self_attn.q_proj", "q_proj.weight.quant_state"
# Wrong tensors in place of those whose names hold these texts; None: none, a text: another name.
TENSORS: dict[str, dict[str, list[Any]]] = {
    "EAGLE-3": {
        "fc.weight": [torch.tensor(1.0), torch.ones(0, 0), torch.full((32, 96), torch.nan)],
        "norm.weight": [torch.tensor(1.0)], "q_proj": [torch.tensor(1.0), torch.ones(0, 64)],
        "d2t": [torch.tensor(1), torch.ones(49)], "t2d": [torch.tensor(True), torch.ones(98)],
        "lm_head": [torch.tensor(2.0)], "fc_norm.1": [torch.ones(3), None],
        "mlp.gate": [torch.ones(48, 32, dtype=torch.int64)], "k_proj": [torch.ones(0, 64)],
    },
    "P-EAGLE": {
        "mask_hidden": [torch.tensor(1.0), torch.ones(96)],
    },
    "DFlash 2": {
        "base_kernel": [torch.tensor(1.0)],
        "kernel_projection": [torch.tensor(1.0), torch.ones(0, 32)],
        "predecessor_codebook": [torch.tensor(1.0)],
        "hidden_projection": [torch.tensor(1.0), torch.ones(3, 3)],
        "successor_codebook": [torch.ones(98, 0)], "fc.weight": [torch.ones(0, 96)],
        "hidden_norm": [torch.tensor(1.0)],
    },
    "DSpark": {
        "markov_w1": [torch.tensor(1.0)], "markov_w2": [None], "embed": [torch.tensor(1.0)],
    },
    "Medusa 1": {
        "0.1.weight": [torch.tensor(1.0), torch.ones(98), "0.10000000.weight"],
        "0.0.linear.weight": [torch.tensor(1.0)], "0.0.linear.bias": [torch.tensor(1.0)],
        "1.0.linear.weight": ["10000000.0.linear.weight", "1.10000000.linear.weight"],
        "1.1.weight": [None],
    },
    "Medusa 2": {
        "0.0.linear.bias": [None], "0.0.linear.weight": ["0.10000000.linear.weight"],
    },
    "EAGLE-1": {
        "fc.weight": [torch.tensor(1.0)], "fc.bias": [torch.tensor(1.0)],
    },
    "llama": {
        "embed_tokens": [torch.tensor(1.0)],
        f"{Q}.weight": [torch.tensor(1.0), torch.full((32, 32), torch.nan), torch.ones(32, 32,
            dtype=torch.bool), torch.ones(32, 32, dtype=torch.complex64)],
        "norm.weight": [torch.ones(0)],
    },
    "adapter": {
        "lora_A": [torch.tensor(1.0), torch.ones(32), torch.full((4, 32), torch.inf)],
        "lora_B": [torch.tensor(1.0), torch.ones(4, 4, 4)],
        f"base_model.model.model.{Q}.lora_magnitude_vector": [torch.ones(3), torch.tensor(1.0)],
        "base_model.model.model.embed_tokens.weight": [torch.tensor(1.0)],
        "base_model.model.a\nb": [torch.ones(1)],
        "0.self_attn.q_proj.lora_A.weight": ["0.self_attn.q_proj.lora_magnitude_vector"],
        "model.layers.0.self_attn.q_proj.lora_A.weight": ["model.embed_tokens.weight"],
    },
    "GPTQ": {
        ".qweight": [torch.tensor(1), torch.ones(8), torch.ones(4, 4, dtype=torch.int64)],
        ".scales": [torch.tensor(1.0)], ".qzeros": [torch.tensor(1), torch.ones(1, 1)],
        f"{Q}.qweight": [torch.ones(8, 64)],
    },
    "packed": {
        ".weight_packed": [torch.tensor(1)],
        ".weight_shape": [torch.tensor(1), torch.tensor([1 << 40, 1 << 40]), torch.tensor([-1,
            0]), torch.tensor([1, 2, 3])], ".weight_scale": [torch.ones(0)],
    },
    "FP8": {
        ".weight_scale_inv": [torch.ones(0, 0), torch.ones(1, 1, 2)],
        f"{Q}.weight": [torch.tensor(1.0).to(torch.float8_e4m3fn)],
    },
    "int8": {
        "q_proj.weight": [torch.tensor(1, dtype=torch.int8)],
    },
    "MLX": {
        ".scales": [torch.tensor(1.0)], ".biases": [torch.tensor(1.0)],
        "q_proj.weight": [torch.tensor(1)],
    },
    "bitsandbytes": {
        BNB: [torch.tensor(1.0), torch.tensor([300, 4]), torch.tensor([123]),
            torch.tensor(list(b"[1]")), torch.tensor(list(b"[" * 5000)), state(blocksize=0),
            state(blocksize=-1), state(blocksize=1 << 40), state(blocksize="64"), state(shape=5),
            state(shape=[-1, -1]), state(shape=["64", 64]), state(nested_blocksize=1 << 40),
            state(nested_offset="x")], "quant_map": [torch.ones(3), torch.tensor(1.0)],
        "weight.absmax": [torch.tensor(1.0)],
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return foreign_sources.write_sources(tmp_path_factory.mktemp("foreign"))


class _Late(BaseException):
    """Says that a case took too long; nothing catches it."""


@contextmanager
def limits() -> Iterator[None]:
    """Allows SECONDS of processor time, and MEGABYTES more than are taken already."""

    def stop(*_: Any) -> None:
        raise _Late(f"took more than {SECONDS:g} s")

    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    taken, infinity = int(line.split()[1]) * 1024, resource.RLIM_INFINITY
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + MEGABYTES * 2**20, infinity))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
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


def cases(table: dict[str, dict[str, list[Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns a source and one change of it for each value in a table."""
    return [
        (source, {name: value})
        for source, fields in table.items()
        for name, values in fields.items()
        for value in values
    ]


def change_field(folder: Path, source: str, place: str, value: Any) -> None:
    file, slash, name = place.rpartition("/") if ".json/" in place else ("", "", place)
    prefix = PREFIXES.get(source, "")
    if name == prefix.rstrip(".") or slash:
        prefix = ""
    change(folder, file or FILES.get(source, "config.json"), {prefix + name: value})


@pytest.mark.parametrize(
    ("source", "fields"),
    [pytest.param(*each, id=f"{each[0]}: {each[1]!r:.90}") for each in cases(FIELDS) + TOGETHER],
)
def test_a_wrong_value_is_one_line(
    source: str,
    fields: dict[str, Any],
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy(sources[source], tmp_path / "x")
    for place, value in fields.items():
        change_field(folder, source, place, value)
    require_one_line(source, folder, sources, capsys)


NO_RANK: dict[str, Any] = {
    "0.self_attn.q_proj.lora_A": torch.ones(0, 32),
    "0.self_attn.q_proj.lora_B": torch.ones(32, 0),
}


@pytest.mark.parametrize(
    ("source", "tensors"),
    [
        pytest.param(*each, id=f"{each[0]}: {each[1]!r:.90}")
        for each in [*cases(TENSORS), ("adapter", NO_RANK)]
    ],
)
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
