"""Every graph that a build writes uses operators that the runtime takes, and weights it knows."""

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import pytest
from workshop import FluentWorkshop, Workshop

import spec_runtime
from spec_export import drafters
from spec_export.graphs.edit import fixed_size, input_at, producer
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.onnx_file import read_outline
from spec_runtime.bundle.operators import OPERATORS, require_known_graph
from spec_runtime.trees.budget import Budget

# CUDA has no Pad for integers, no provider has one for bfloat16, and ReduceMax needs cuDNN.
NOT_ON_CUDA = {"Pad", "ReduceMax"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp32", "int8", "int4", "contiguous", "fp16 on CUDA"])
def test_every_graph_of_a_build_is_taken(
    fluent: FluentWorkshop, workshop: Workshop, tmp_path: Path, case: str
) -> None:
    names = ["parallelspec", "hydra"] if case == "contiguous" else drafters.trainable()
    if case == "int4":
        out = fluent.build(tmp_path / "bundle", *names, precision=case, lanes=2)
    elif case == "contiguous":
        out = fluent.build(tmp_path / "bundle", *names, form=case)
    elif case == "fp16 on CUDA":
        out = workshop.lanes("fp16")
    else:
        out = fluent.every(case, lanes=3 if case == "fp32" else 1)
    if "CUDA" not in case:
        require_running(out, names)
    bundle = bundles.read(out)
    graphs = [*bundle.manifest.graphs.values()]
    for drafter in bundle.manifest.drafters:
        graphs += drafter.graphs.values()
    assert len(graphs) > len(names)
    banned = NOT_ON_CUDA if "CUDA" in case else set()
    for graph in graphs:
        require_known_graph(bundle, graph)
        model, outline = ir.load(bundle.file(graph.file)), read_outline(bundle.file(graph.file))
        assert outline.operators == {_name(node) for node in model.graph.all_nodes()} <= OPERATORS
        assert not outline.operators & banned, graph.file
        if "CUDA" in case:  # whose ScatterND copies what an index stands for value after value
            for node in [each for each in model.graph if each.op_type == "ScatterND"]:
                counted = input_at(producer(node.inputs[1], "Where"), 2)
                cache = input_at(node, 0)
                assert cache.shape is not None, graph.file
                assert fixed_size(counted, -1) == cache.shape.rank(), graph.file
        assert outline.weight_files == {
            value.const_value.location
            for value in model.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }


def require_running(folder: Path, names: Sequence[str]) -> None:
    """Drafts a few steps with each drafter of a bundle."""
    plain = spec_runtime.load(folder, "none", threads=1)
    for name in names:
        engine = plain.with_drafter(name, lookup=False).with_budget(Budget(8))
        result = engine.generate([1, 2, 3], max_new_tokens=6, ignore_eos=True)
        assert result.stats.drafted_tokens > 0, name


def _name(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
