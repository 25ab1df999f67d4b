"""Tests the traced graph: its names and axes, its operators, and how its weights are stored.

That it computes what eager PyTorch does is tested with the other forms, in test_slots.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from tiny_backbone import (
    HEAD_DIM,
    VOCAB,
    Decoder,
    backbone_of,
    chain,
    longrope,
    random_tokens,
    tiny,
)
from torch import Tensor
from traced_once import _digest

from spec_export.build.options import PRECISIONS
from spec_export.graphs.half import narrow
from spec_export.graphs.quantize import QUANTISED, quantize
from spec_export.graphs.slots import to_slots
from spec_export.graphs.trace import GraphInput, export, export_backbone, save
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import defer

LAYERS = 2
CACHES = [f"kv.{layer}.{part}" for layer in range(LAYERS) for part in "kv"]
OUTPUTS = ["logits", "features", "taps.1", "taps.0"]
FEEDS = ["input_ids", "position_ids", "mask", "logit_rows", "write_index", "src", "perm"]

# Between them tied and untied heads, biases, partial rotation and scaled tables.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "mlp_bias": True},
    "phi3": {
        "rope_parameters": longrope(4, partial_rotary_factor=0.5),
        "original_max_position_embeddings": 16,
    },
}


def small(family: str, **options: Any) -> Any:
    return tiny(family, num_hidden_layers=LAYERS, **options)


Exported = dict[str, tuple[Backbone, ir.Model, Path]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Exports each family's backbone with taps, once; gives its model and its file."""
    cache: Exported = {}
    for family in CASES:
        backbone = backbone_of(small(family, **CASES[family]), taps=(1, 0))
        path = tmp_path_factory.mktemp(family) / "target.onnx"
        model = export_backbone(backbone)
        save(model, path)
        cache[family] = backbone, model, path
    return cache


def test_rows_and_compaction_room_may_be_empty_or_one(exported: Exported) -> None:
    backbone, _, path = exported["llama"]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    decoder = Decoder(backbone, 8)
    decoder.A = 0
    feeds = dict(zip(FEEDS, decoder.feeds(random_tokens(3, seed=5), chain(3)), strict=True))
    feeds |= dict(zip(CACHES, decoder.caches, strict=True))
    given = {name: tensor.numpy() for name, tensor in feeds.items()}
    (every,) = session.run(["logits"], given)
    (one,) = session.run(["logits"], given | {"logit_rows": np.array([1])})
    assert np.allclose(one, every[1:2], atol=1e-5)


@pytest.mark.parametrize("family", CASES)
def test_names_types_and_axes_follow_the_contract(family: str, exported: Exported) -> None:
    backbone, _, path = exported[family]
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path, load_external_data=False).graph
    int64, boolean, float32 = onnx.TensorProto.INT64, onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT
    cache = (float32, [1, backbone.config.num_kv_heads, "S", HEAD_DIM])

    def described(values: Any) -> dict[str, tuple[int, list[int | str]]]:
        return {
            v.name: (
                v.type.tensor_type.elem_type,
                [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
            )
            for v in values
        }

    inputs, outputs = described(graph.input), described(graph.output)
    assert inputs == {
        "input_ids": (int64, [1, "N"]),
        "position_ids": (int64, [1, "N"]),
        "mask": (boolean, [1, 1, "N", "S"]),
        "logit_rows": (int64, ["M"]),
        "write_index": (int64, [1]),
        "src": (int64, ["A"]),
        "perm": (int64, ["A+N"]),
        **dict.fromkeys(CACHES, cache),
    }
    hidden = (float32, ["N", 4 * HEAD_DIM])
    assert outputs == {
        "logits": (float32, ["M", VOCAB]),
        "features": hidden,
        "taps.1": hidden,
        "taps.0": hidden,
        **{f"{name}.out": cache for name in CACHES},
    }
    assert list(inputs) == [*FEEDS, *CACHES]
    assert list(outputs) == [*OUTPUTS, *(f"{name}.out" for name in CACHES)]


# What the rewrites match on: the operators of one layer, in order.
ATTENTION = [
    *["Reshape", "Transpose", "Split"],  # [N,(H+2G)Dh] -> [1,H+2G,N,Dh] -> qk, v
    *["RotaryEmbedding", "Split"],  # -> q, k
    *["Gather", "Concat", "Gather", "TensorScatter"],  # key cache
    *["Gather", "Concat", "Gather", "TensorScatter"],  # value cache
    *["Attention", "Transpose", "Reshape", "MatMul", "Add"],
]
MLP = ["RMSNormalization", "MatMul", "Split", "Sigmoid", "Mul", "Mul", "MatMul", "Add"]


def test_every_layer_has_the_same_plain_operators(exported: Exported) -> None:
    layer = ["RMSNormalization", "MatMul", *ATTENTION, *MLP]
    expected = ["Reshape", "Gather", *layer * LAYERS, "RMSNormalization", "Gather", "Gemm"]
    assert [node.op_type for node in exported["phi3"][1].graph] == expected
    kinds = {node.domain for _, model, _ in exported.values() for node in model.graph}
    assert kinds == {""}
    assert exported["llama"][1].opset_imports == {"": 24}


def test_weights_keep_their_names_and_lie_in_out(exported: Exported) -> None:
    backbone, model, _ = exported["phi3"]
    initializers = model.graph.initializers
    for name, parameter in backbone.named_parameters():
        stored = initializers[name].const_value
        assert stored is not None
        assert np.array_equal(stored.numpy(), parameter.numpy())
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 4 * LAYERS
    assert all(node.inputs[1].name in initializers for node in products if node.inputs[1])


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("phi3", False)])
def test_each_tensor_is_stored_once(family: str, tied: bool, exported: Exported) -> None:
    backbone, model, path = exported[family]
    assert (backbone.head is backbone.embedding) is tied
    assert ("head.weight" in model.graph.initializers) is not tied
    distinct = (
        sum(p.nbytes for p in backbone.parameters()) + backbone.cos.nbytes + backbone.sin.nbytes
    )
    stored = path.with_suffix(".bin").stat().st_size
    assert stored <= distinct
    assert stored >= distinct - 256 * (2 + 3 * LAYERS)  # norms this small lie in the graph file


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_graphs_give_float32(dtype: torch.dtype) -> None:
    backbone = backbone_of(small("llama", tie_word_embeddings=True).to(dtype), taps=(1,))
    graph = export_backbone(backbone).graph
    expected = ir.DataType.FLOAT16 if dtype == torch.float16 else ir.DataType.BFLOAT16
    outputs = {value.name: value.dtype for value in graph.outputs}
    assert {outputs.pop(f"{name}.out") for name in CACHES} == {expected}
    assert set(outputs.values()) == {ir.DataType.FLOAT}
    assert {v.dtype for v in graph.initializers.values()} == {expected, ir.DataType.INT64}
    assert [node.op_type for node in graph].count("Cast") == len(outputs)


@pytest.mark.parametrize(
    ("x", "y", "y_axis", "message"),
    [
        (3, 4, "N", "got size 4 for axis N of input y, expected 3"),
        (1, 1, "N", "got size 1 for axis N of input x, expected at least 2"),
        (3, 3, "M", "axes of equal size"),
    ],
)
def test_examples_must_tell_axes_apart(x: int, y: int, y_axis: str, message: str) -> None:
    inputs = [
        GraphInput("x", torch.zeros(x), {0: "N"}),
        GraphInput("y", torch.zeros(y), {0: y_axis}),
    ]
    with pytest.raises(ValueError, match=message):
        export(torch.nn.Identity(), inputs, ["z"], "none")
    with pytest.raises(ValueError, match=r"got axes \[1\] for input x, expected axes of a 1-D te"):
        GraphInput("x", torch.zeros(3), {1: "N"})


def test_any_module_exports_with_given_names() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (x + y,)

    example = torch.zeros(3, 2)
    inputs = [GraphInput("x", example, {0: "N"}), GraphInput("y", example, {0: "N"})]
    model = export(Sum(), inputs, ["z"], "sum")
    assert [v.name for v in (*model.graph.inputs, *model.graph.outputs)] == ["x", "y", "z"]
    assert model.graph.outputs[0].shape == ["N", 2]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_deferred_weights_are_read_when_written_and_give_the_same_files(
    precision: str, tmp_path: Path
) -> None:
    reads: list[str] = []

    def noted(name: str, tensor: Tensor) -> Tensor:
        reads.append(name)
        return tensor

    def write(defers: bool) -> list[bytes]:
        backbone = backbone_of(small("llama", vocab_size=96, tie_word_embeddings=True))
        if defers:
            for name, parameter in list(backbone.named_parameters()):
                if parameter.dim() > 1:
                    owner, _, own_name = name.rpartition(".")
                    read = partial(noted, name, parameter.detach())
                    deferred = defer(parameter.shape, parameter.dtype, read)
                    setattr(backbone.get_submodule(owner), own_name, deferred)
        model = to_slots(narrow(export_backbone(backbone), precision), "bias")
        quantize(model, precision)
        assert precision == "int4" or not reads  # whose first rows tell a matrix's form
        save(model, tmp_path / "target.onnx")
        return [(tmp_path / f"target.{end}").read_bytes() for end in ("onnx", "bin")]

    assert write(defers=False) == write(defers=True)
    # a tied table is stored, and read, once for the embedding and once for the head if quantised
    times = 2 if precision in QUANTISED else 1
    assert reads.count("embedding.weight") == times
    often = 2 if precision == "int4" else 1
    assert all(reads.count(name) == often for name in set(reads) - {"embedding.weight"})


class Word:
    """Has the place in a set that its hash gives it, as texts do, which differs by process."""

    def __init__(self, text: str, place: int) -> None:
        self.text, self.place = text, place

    def __hash__(self) -> int:
        return self.place

    def __repr__(self) -> str:
        return self.text


def test_processes_share_traces_though_their_sets_have_other_orders() -> None:
    """Weights that are borrowed, and so are buffers, do not tell traces apart by their numbers,
    nor does it matter whether equal tuples are one."""
    digests: set[str | None] = set()
    for places in ((1, 2), (2, 1)):
        module: Any = torch.nn.Linear(3, 3)
        pair = tuple(sorted(places))
        module.taps = (pair, tuple(sorted(places)) if digests else pair)
        module.words = {Word(text, place) for text, place in zip("ab", places, strict=True)}
        module.register_buffer("borrowed", torch.rand(3))
        digests.add(_digest(module, (), {}))
    assert len(digests) == 1
    assert None not in digests
