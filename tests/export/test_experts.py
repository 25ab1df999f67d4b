"""Tests layers of experts: their weights in 8 and 4 bits, models that are refused, and bundles.

test_families.py compares these families with transformers, in every form of the graph.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from contract import PROMPTS
from safetensors.torch import load_file, save_file
from tiny_target import save_llama

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.graphs.edit import input_at
from spec_export.graphs.quantize import quantize
from spec_export.graphs.trace import GraphInput, export
from spec_export.model import target
from spec_export.model.modules.basic import Projection
from spec_export.model.modules.experts import Experts
from spec_runtime.errors import UserError

N, D, WIDTH, E = 7, 64, 96, 5
BLOCK = 32
# The values of MXFP4's sixteen codes.
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# The largest error of a layer's output, in parts of its largest value: rounded weights (those of 4
# bits by up to a thirtieth of their range) and activations, which ONNX Runtime rounds to 8 bits.
LARGEST_ERROR = {"fp32": 1e-5, "int8": 0.03, "int4": 0.2}
GPT_OSS: dict[str, Any] = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 256},
    **{"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
}


def as_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds a matrix [E, out, in] to MXFP4: returns the blocks u8[E, out, in/32, 16], two codes a
    byte, the scales u8[E, out, in/32], which are exponents, and what they stand for."""
    cut = weight.reshape(*weight.shape[:2], -1, BLOCK)
    exponent = torch.floor(torch.log2(cut.abs().amax(-1))) - 2
    scale = torch.exp2(exponent)[..., None]
    code = ((cut / scale)[..., None] - VALUES).abs().argmin(-1).to(torch.uint8)
    blocks = code[..., ::2] | (code[..., 1::2] << 4)
    return blocks, (exponent + 127).to(torch.uint8), (VALUES[code.long()] * scale).view_as(weight)


@cache
def layer(is_mxfp4: bool = False) -> Experts:
    """Returns a random layer with everything that a family may have."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    gate_up, down = normal(E, 2 * WIDTH, D), normal(E, D, WIDTH)
    if is_mxfp4:
        gate_up, down = as_mxfp4(gate_up)[2], as_mxfp4(down)[2]
    router = Projection(normal(E, D) * 4, normal(E))
    biases = normal(E, 2 * WIDTH), normal(E, D)
    return Experts(
        router, gate_up, down, *biases, num_chosen=2, limit=0.5, shift=1.0, sharpness=1.7
    ).eval()


def graph_of(experts: Experts, precision: str) -> ir.Model:
    inputs = [GraphInput("x", torch.zeros(3, D), {0: "N"})]
    return quantize(export(experts, inputs, ["y"], "experts"), precision)


def constant(node: ir.Node, index: int) -> np.ndarray:
    tensor = input_at(node, index).const_value
    assert tensor is not None
    return tensor.numpy()


@pytest.mark.parametrize("precision", LARGEST_ERROR)
def test_rows_are_near_the_layers_whatever_their_siblings(precision: str) -> None:
    x_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = layer()(x_ND).numpy()
    model = graph_of(layer(), precision)
    kinds = [node.op_type for node in model.graph]
    assert ("MoE" if precision == "fp32" else "QMoE") in kinds
    assert "MatMul" in kinds, "the router stays in float"
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )

    def run(rows: list[int]) -> np.ndarray:
        return session.run(["y"], {"x": x_ND.numpy()[rows]})[0]

    together, largest = run(list(range(N))), np.abs(expected).max()
    assert np.abs(together - expected).max() <= LARGEST_ERROR[precision] * largest
    for rows in ([0], [3, 0], [0, 0, 0], [6, 5, 0, 4]):
        difference = run(rows)[rows.index(0)] - together[0]
        assert np.abs(difference).max() <= 1e-5 * largest  # sums in another order


def test_int8_holds_mxfp4_exactly() -> None:
    experts = layer(is_mxfp4=True)
    (node,) = [node for node in graph_of(experts, "int8").graph if node.op_type == "QMoE"]
    for first, weight in ((2, experts.gate_up), (5, experts.down)):
        q, scale = (constant(node, i) for i in (first, first + 1))
        centred = q.reshape(*scale.shape, BLOCK).astype(np.float32) - 128
        assert np.array_equal((centred * scale[..., None]).reshape(weight.shape), weight.numpy())


# ---- models ----


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny gpt-oss folder with its experts in float."""
    return save_llama(tmp_path_factory.mktemp("models") / "gpt-oss", family="gpt_oss", **GPT_OSS)


def test_a_checkpoint_in_mxfp4_is_read_exactly(gpt_oss: Path, tmp_path: Path) -> None:
    """As openai writes it: two tensors for each of the experts' matrices."""
    config = json.loads((gpt_oss / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*kept, "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((gpt_oss / name).read_bytes())
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(gpt_oss / "model.safetensors").items():
        if name.endswith("_proj"):
            blocks, scales, values = as_mxfp4(tensor.transpose(1, 2).contiguous())
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = values.transpose(1, 2)
        else:
            stored[name] = expected[name] = tensor.bfloat16()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = target.load(target.resolve(str(tmp_path)))
    read = model.state_dict()
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor.float()), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 5}, "got num_experts_per_tok 5 in the config, expected 1 to 4"),
        ({"num_local_experts": 0}, "got num_experts 0 in the config, expected 1 to"),
        ({"hidden_act": "gelu"}, "got experts with activation 'gelu' in a 'gpt_oss' model"),
    ],
)
def test_experts_that_are_not_supported(
    gpt_oss: Path, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for file in gpt_oss.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((gpt_oss / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(UserError) as error:
        target.load(target.resolve(str(tmp_path)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tensorrt_has_no_operator_for_experts(gpt_oss: Path) -> None:
    with pytest.raises(UserError, match="got a 'gpt_oss' model, whose layers have experts, for"):
        target.require_standard_operators(target.resolve(str(gpt_oss)))


MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS,
    "qwen3_moe": {  # a layer of experts, whose weights do not sum to 1, and a dense one
        **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "mlp_only_layers": [1]},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "norm_topk_prob": False,
    },
}


@pytest.mark.parametrize(
    ("family", "precision"),
    [("gpt_oss", "fp32"), ("gpt_oss", "int8"), ("qwen3_moe", "fp32"), ("qwen3_moe", "int4")],
)
def test_drafts_change_no_token(family: str, precision: str, tmp_path: Path) -> None:
    """Every token is the argmax of the row that verified it, and in fp32 the text is plain
    decoding's."""
    model = save_llama(tmp_path / family, family=family, **MODELS[family])
    options = BuildOptions(str(model), precision=precision, out=tmp_path / "bundle", lanes=1)
    engine = spec_runtime.load(make_bundle.build(options), "prompt_lookup", threads=1)
    num_accepted = 0
    for prompt in PROMPTS:
        tokens = []
        for step in engine.steps(prompt, max_new_tokens=30, ignore_eos=True):
            if step.verified is not None:
                assert step.tokens == step.verified.argmax_N[step.path].tolist()
            num_accepted += step.num_accepted
            tokens += step.tokens
        if precision == "fp32":
            plain = engine.with_drafter("none")
            expected = plain.generate(prompt, max_new_tokens=30, ignore_eos=True)
            assert tokens == expected.token_ids
    assert num_accepted > 0
