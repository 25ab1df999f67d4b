"""Compares the slots form with the eager backbone and transformers, one family at a time.

Tolerance: 2e-5 of the largest value (float32, other summation orders and fused operators; measures
about 2e-6). A wrong slot, position or mask moves logits by percents.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graphs import Runner
from tiny_backbone import (
    HEAD_DIM,
    VOCAB,
    Decoder,
    backbone_of,
    chain,
    path_to,
    random_tokens,
    reference,
    tiny,
)

from spec_export.graphs.edit import MS, GraphEditor, input_at, producer
from spec_export.graphs.slots import to_slots
from spec_export.graphs.trace import export_backbone, save
from spec_export.model.decoder import Backbone
from spec_runtime.bundle.manifest import ATTENTIONS
from spec_runtime.kernels.rewrite import with_operators

TOLERANCE = 2e-5
LAYERS, CAPACITY = 2, 90
OUTPUTS = ("logits", "features", "taps.1")
# Other families' layers are compared in all forms by test_families.py.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}


class Case(NamedTuple):
    hf_model: Any
    backbone: Backbone
    slots: dict[str, ir.Model]  # by attention
    folders: dict[str, Path]  # form or attention -> where its graph lies

    def runner(self, attention: str = "bias", capacity: int = 96) -> Runner:
        """Opens the slots form."""
        folder = self.folders[attention]
        return Runner(self.slots[attention], folder, "slots", capacity, attention)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Gives one family's models: transformers', the backbone, and its graph in all forms."""
    family = request.param
    hf_model = tiny(family, num_hidden_layers=LAYERS, **CASES[family])
    backbone = backbone_of(hf_model, taps=(1,))
    folders = {form: tmp_path_factory.mktemp(family) for form in ("contiguous", *ATTENTIONS)}
    save(export_backbone(backbone), folders["contiguous"] / "graph.onnx")
    slots = {attention: to_slots(contiguous(folders), attention) for attention in ATTENTIONS}
    return Case(hf_model, backbone, slots, folders)


def contiguous(folders: dict[str, Path]) -> ir.Model:
    """Returns a fresh copy each time, because `to_slots` rewrites in place."""
    return ir.load(folders["contiguous"] / "graph.onnx")


every_family = pytest.mark.parametrize("case", CASES, indirect=True)
llama = pytest.mark.parametrize("case", ["llama"], indirect=True)


def close(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


def random_tree(n: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Returns tokens and parents; siblings may have equal tokens."""
    parents = [0] + [int(rng.integers(i)) for i in range(1, n)]
    return rng.integers(VOCAB, size=n).tolist(), parents


@every_family
@pytest.mark.parametrize("form", [*ATTENTIONS, "contiguous"])
def test_prefill_chains_and_trees(case: Case, form: str) -> None:
    """After a chunked prefill and single rows come trees; each keeps a path and loses the rest."""
    if form == "contiguous":
        runner = Runner(contiguous(case.folders), case.folders[form], form, CAPACITY)
    else:
        runner = case.runner(form, CAPACITY)
    eager = Decoder(case.backbone, CAPACITY)
    rng, committed = np.random.default_rng(0), [int(t) for t in random_tokens(12, seed=1)]
    for part in (committed[:7], committed[7:]):
        got = runner.step(part, chain(len(part)), OUTPUTS)
        for name, expected in zip(OUTPUTS, eager.step(part, chain(len(part))), strict=True):
            close(got[name], expected)
        runner.cache.commit(range(len(part)))
        eager.keep(list(range(len(part))))
    for size in (1, 5, 8, 1, 6, 8, 2, 7):
        tokens, parents = random_tree(size, rng)
        got = runner.step(tokens, parents, OUTPUTS)
        for name, expected in zip(OUTPUTS, eager.step(tokens, parents), strict=True):
            close(got[name], expected)
        if form != "contiguous":
            compare_with_transformers(case.hf_model, committed, tokens, parents, got["logits"])
        kept = path_to(int(rng.integers(size)), parents)[: Decoder.A]
        runner.cache.commit(kept)
        eager.keep(kept)
        committed += [tokens[i] for i in kept]
    # roll back into the trees' rows, whose slots are permuted, and go on in the holes
    runner.cache.truncate(15)
    tokens, parents = random_tree(8, rng)
    got = runner.step(tokens, parents)
    compare_with_transformers(case.hf_model, committed[:15], tokens, parents, got["logits"])


def compare_with_transformers(
    hf_model: Any,
    committed: list[int],
    tokens: list[int],
    parents: list[int],
    logits_NV: np.ndarray,
) -> None:
    """Asserts that each node's logits are those of the sequence that ends in it."""
    for leaf in set(range(len(tokens))) - set(parents[1:]):
        path = path_to(leaf, parents)
        expected = reference(hf_model, committed + [tokens[i] for i in path])
        close(logits_NV[path], expected[len(committed) :])


@every_family
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_rows_are_written_to_their_slots_and_nowhere_else(case: Case, attention: str) -> None:
    runner = case.runner(attention)
    names = [f"kv.{layer}.{part}" for layer in range(LAYERS) for part in "kv"]
    rng, slots_used = np.random.default_rng(3), []
    for size, kept in ((5, [0, 1, 2, 3, 4]), (6, [0, 3]), (4, [0]), (7, [])):
        tokens, parents = random_tree(size, rng)
        before = {name: runner.kv(name) for name in names}
        feeds = runner.cache.place(np.array(parents))
        slots_used.append(feeds["slots"].tolist())
        feeds["input_ids"], feeds["logit_rows"] = np.array([tokens]), np.arange(size)
        runner.backend.run(feeds, ["logits"])
        for name in names:
            changed_S = (runner.kv(name) != before[name]).any(axis=(0, 1, 3))
            assert np.flatnonzero(changed_S).tolist() == slots_used[-1], name
        runner.cache.commit(kept)
    in_holes = [6, 7, 9, 10], [7, 9, 10, 11, 12, 13, 14]
    behind = [9, 10, 11, 12], [10, 11, 12, 13, 14, 15, 16]
    expected = (
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10],
        *(behind if attention == "append" else in_holes),
    )
    assert slots_used == list(expected)


@llama
@pytest.mark.parametrize("attention", ["bias", "append"])
def test_slots_above_the_high_water_mark_are_not_read(case: Case, attention: str) -> None:
    """A NaN there would reach the output as 0 · NaN."""
    clean, poisoned = case.runner(attention), case.runner(attention)
    tokens = random_tokens(9, seed=4)
    for cache in poisoned.backend.buffers.values():
        values = cache.numpy().copy()
        values[:, :, 9:] = np.nan
        cache.update_inplace(values)
    expected = clean.step(tokens, chain(9))["logits"]
    assert np.array_equal(poisoned.step(tokens, chain(9))["logits"], expected)


@llama
@pytest.mark.parametrize("attention", ["bias", "full_buffer"])
def test_masked_rows_leave_no_trace(case: Case, attention: str) -> None:
    """A rejected row stays in its slot, however large its values."""
    runner = case.runner(attention)
    runner.step(random_tokens(6, seed=5), chain(6))
    runner.cache.commit(range(6))
    tokens, parents = [3, 4, 5], [0, 0, 0]
    expected = runner.step(tokens, parents)["logits"]
    for cache in runner.backend.buffers.values():
        values = cache.numpy().copy()
        values[:, :, 7] = 1e4  # node 1's slot
        cache.update_inplace(values)
    # the same nodes but node 1, whose slot is now one below the mark that nobody may attend
    feeds = runner.cache.place(np.array(parents))
    keep = np.array([0, 2])
    feeds = {
        "position_ids": feeds["position_ids"][:, keep],
        "mask": feeds["mask"][:, :, keep],
        "slots": feeds["slots"][keep],
        "seqlens_k": feeds["seqlens_k"],
        "input_ids": np.array([tokens])[:, keep],
        "logit_rows": np.arange(2),
    }
    close(runner.backend.run(feeds, ["logits"])["logits"], expected[keep])


@every_family
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_inputs_and_operators_of_the_slots_form(case: Case, attention: str) -> None:
    graph = case.slots[attention].graph
    inputs = {value.name: (value.dtype, value.shape) for value in graph.inputs}
    caches = {f"kv.{i}.{part}" for i in range(LAYERS) for part in "kv"}
    has_windows = bool(case.backbone.config.windows)
    assert inputs.pop("kv.positions", None) == (
        (ir.DataType.INT64, [1, 1, "S", 1]) if has_windows else None
    )
    appends = attention == "append"
    step = {"input_ids", "position_ids", "mask", "logit_rows"}
    step |= {"seqlens_k"} if attention != "full_buffer" else set()
    step |= {"slots"} if not appends or has_windows else set()
    assert set(inputs) == step | caches
    assert inputs.get("slots") in (None, (ir.DataType.INT64, ["N"]))
    assert inputs.get("seqlens_k") in (None, (ir.DataType.INT32, [1]))
    assert inputs["input_ids"] == (ir.DataType.INT64, [1, "N"])
    assert inputs["kv.0.k"][1] == [1, case.backbone.config.num_kv_heads, "S", HEAD_DIM]
    outputs = {value.name: value.shape for value in graph.outputs}
    assert {f"{name}.out" for name in caches} < set(outputs)
    assert outputs["logits"] == ["M", VOCAB]
    assert outputs["features"] == outputs["taps.1"] == ["N", 4 * HEAD_DIM]
    kinds = Counter((node.domain, node.op_type) for node in graph)
    standard, own = ("", "Attention"), (MS, "GroupQueryAttention")
    expected = {"full_buffer": (LAYERS, 0)}.get(attention, (0, LAYERS))
    assert (kinds[standard], kinds[own]) == expected
    assert kinds["", "ScatterND"] == (0 if appends else 2 * LAYERS) + has_windows
    assert (kinds["", "RotaryEmbedding"] > 0) is (kinds["", "Split"] > LAYERS) is not appends
    # of each kind of cache its places, of each mask a bias
    num_places, num_biases = (not appends) + has_windows, 1 + has_windows
    assert kinds["", "Where"] == num_places + num_biases * (attention != "full_buffer")
    assert kinds[MS, "SkipSimplifiedLayerNormalization"] == 2 * LAYERS  # all but the first norm
    # nothing that moves rows; with a bias no layout change between layers
    assert kinds["", "TensorScatter"] == 0
    assert kinds["", "Transpose"] == (2 * LAYERS if attention == "full_buffer" else 0)
    assert kinds["", "Squeeze"] == 3  # logits' rows, features, tap
    used = {value for node in graph for value in node.inputs} | set(graph.outputs)
    assert set(graph.initializers.values()) <= used
    assert set(graph.inputs) <= used


@llama
@pytest.mark.parametrize("made", ["by row", "by value", "by adding"])
def test_native_attention_takes_the_writes_in(case: Case, tmp_path: Path, made: str) -> None:
    """Also those of bundles that were built when places were added up."""
    model = to_slots(contiguous(case.folders), by_value=made == "by value")
    edit = GraphEditor(model, "old")
    if made == "by adding":
        write = next(node for node in model.graph if node.op_type == "ScatterND")
        place = producer(write.inputs[1], "Where")
        is_row, column, counted = (input_at(place, i) for i in range(3))
        assert is_row.const_value is not None
        factor = edit.constant(is_row.const_value.numpy().astype(np.int64))
        (spread,) = edit.add(place, "Mul", [column, factor])
        edit.replace(place.outputs[0], edit.add(place, "Add", [spread, counted])[0])
    save(model, tmp_path / "graph.onnx")
    native = with_operators(tmp_path / "graph.onnx")
    assert native is not None
    kinds = Counter(node.op_type for node in onnx.load_from_string(native.data).graph.node)
    assert kinds["TreeAttention"] == LAYERS
    assert not kinds.keys() & {"GroupQueryAttention", "ScatterND"}
