"""Tests check: it passes what build makes, in both forms, and fails a graph with one fault."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from said import Said
from tiny_target import make_tokenizer, save_llama
from workshop import Workshop

import spec_runtime
from spec_export import reference
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.check import check, replay
from spec_export.check.replay import make_scripts
from spec_export.cli import main
from spec_export.graphs import slots, trace
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.measure import provenance
from spec_runtime.text.tokenizer import Tokenizer

SCRIPTS = {"chunks of 1", "chunks of 7", "chunks of 64", "chain decode", "random trees"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    return make_bundle.build(BuildOptions(str(folder), out=out, lanes=1))


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def by_name(rows: list[check.CheckRow]) -> dict[str, check.CheckRow]:
    return {row.name: row for row in rows}


def failed(rows: list[check.CheckRow]) -> set[str]:
    return {row.name for row in rows if not row.passed}


@pytest.mark.slow
def test_a_fresh_export_passes_in_both_forms(folder: Path) -> None:
    result = check.run(str(folder), None, ["fp32"])
    rows = result.rows
    slots, contiguous = (
        by_name([row for row in rows if row.precision == name])
        for name in ("fp32", "fp32 contiguous")
    )
    assert failed(rows) == set()
    assert not any(row.skipped for row in rows)
    assert slots.keys() - contiguous.keys() == {"permuted slots"}
    assert SCRIPTS | {"context of 256", "features", "perplexity ratio"} <= contiguous.keys()
    assert slots["perplexity ratio"].value == pytest.approx(1, abs=1e-5)
    written = json.loads(json.dumps(result.as_json()))
    assert [row.pop("passed") for row in written["rows"]] == [True] * len(rows)
    assert [check.CheckRow(**row) for row in written["rows"]] == rows
    assert set(provenance.KEYS) == set(written["provenance"])


@pytest.mark.parametrize("are_swapped", [False, True])
def test_taps_are_compared_too(copy: Path, folder: Path, are_swapped: bool) -> None:
    model, _ = target.load(target.resolve(str(folder)))
    graph = slots.to_slots(trace.export_backbone(Backbone.from_transformers(model, (0, 1))))
    taps = [value for value in graph.graph.outputs if str(value.name).startswith("taps.")]
    if are_swapped:
        taps[0].name = "taps"
        taps[1].name, taps[0].name = "taps.0", "taps.1"
    trace.save(graph, copy / "target" / "target.onnx")
    manifest = bundles.read(copy, verify=False).manifest
    described = manifest.graphs["target"]
    specs = [bundles.TensorSpec(f"taps.{tap}", "float32", ("N", 32)) for tap in (0, 1)]
    described = dataclasses.replace(described, outputs=(*described.outputs, *specs))
    info = dataclasses.replace(manifest.target, taps=(0, 1))
    manifest = dataclasses.replace(manifest, target=info, graphs={"target": described})
    bundles.write_manifest(copy, manifest)
    assert failed(check.run(str(folder), copy, []).rows) == (
        {"features, taps 0, 1"} if are_swapped else set()
    )


def spoil_target(bundle: Path, spoil: Callable[[onnx.ModelProto], None]) -> None:
    path = bundle / "target" / "target.onnx"
    model = onnx.load(path)
    spoil(model)
    path.with_suffix(".bin").unlink()
    ir.save(ir.from_proto(model), path, external_data="target.bin")
    bundles.write_manifest(bundle, bundles.read(bundle, verify=False).manifest)


def perturb_weight(model: onnx.ModelProto, part: str = "down") -> None:
    weights = [tensor for tensor in model.graph.initializer if part in tensor.name]
    weight = max(weights, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight).copy()
    values[3, 5] += 0.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))


def ignore_mask(model: onnx.ModelProto) -> None:
    """Attends all slots that the mask has, those that hold nothing yet among them."""
    nodes = model.graph.node
    (where,) = (node for node in nodes if node.op_type == "Where" and node.input[0] == "mask")
    where.input[2] = where.input[1]


def ignore_slots(model: onnx.ModelProto) -> None:
    """Writes to slot 0 whatever `slots` says."""
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "slots":
                node.input[i] = "first_slot"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero_slot"))
    nullify = onnx.helper.make_node("Mul", ["slots", "zero_slot"], ["first_slot"])
    model.graph.node.insert(0, nullify)


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (perturb_weight, SCRIPTS | {"permuted slots", "context of 256", "features"}),
        (ignore_mask, {"random trees", "permuted slots", "chunks of 7"}),
        (ignore_slots, {"permuted slots"}),
    ],
)
def test_a_graph_with_a_fault_fails(
    copy: Path, folder: Path, spoil: Callable[[onnx.ModelProto], None], wrong: set[str]
) -> None:
    spoil_target(copy, spoil)
    assert wrong <= failed(check.run(str(folder), copy, []).rows)


@pytest.mark.slow
def test_what_the_target_runs_of_a_drafter_is_compared(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drafter whose folder is given; else the row says that it is not."""
    monkeypatch.setattr(check, "REFERENCE_TOKENS", 2)
    monkeypatch.setattr(check.reference, "prompts", lambda: ("say abc",))
    monkeypatch.setattr(check, "make_scripts", lambda *given: make_scripts(*given)[:1])
    out = Path(shutil.copytree(workshop.bundle("eagle3"), tmp_path / "x"))
    given: Any = (str(workshop.llama()), out, [])
    row = by_name(check.run(*given).rows)["fused.eagle3"]
    assert row.skipped
    assert "--drafter-checkpoint" in row.note
    folders = [workshop.drafter("eagle3")]
    rows = check.run(*given, checkpoints=folders).rows
    assert failed(rows) == set()
    assert not by_name(rows)["fused.eagle3"].skipped
    spoil_target(out, lambda model: perturb_weight(model, "eagle3.fc"))
    assert failed(check.run(*given, checkpoints=folders).rows) == {"fused.eagle3"}
    with pytest.raises(UserError, match="got a folder of drafter medusa, expected one of the bund"):
        check._require_drafters(bundles.read(out), {"fused.medusa": None})


def test_another_tokenizer_fails(copy: Path, folder: Path) -> None:
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    theirs = target.load_tokenizer(target.resolve(str(folder)))
    row = check._tokenizer_row("x", Tokenizer(bundles.read(copy, verify=False)), theirs)
    assert (row.name, row.value, row.passed) == ("encoded otherwise", 16, False)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("other", 2, "got a bundle of tiny to compare with other"),
        ("tiny", 3, "got a model with num_layers 3, expected 2 as in the bu"),
    ],
)
def test_a_bundle_of_another_model_is_refused(
    copy: Path, folder: Path, tmp_path: Path, name: str, layers: int, message: str
) -> None:
    other = save_llama(tmp_path / name, num_hidden_layers=layers)
    with pytest.raises(ValueError, match=message):
        check.run(str(other), copy, [])
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(bundles.BundleError, match="truncated or altered"):
        check.run(str(folder), copy, [])


@pytest.mark.slow
def test_accepted_length_goes_into_the_manifest(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "REFERENCE_TOKENS", 8)
    out = Path(shutil.copytree(workshop.bundle("parallelspec"), tmp_path / "bundle"))
    result = check.run(str(workshop.llama()), out, [])
    result.store_accepted_lengths()
    row = by_name(result.rows)["accepted, parallelspec"]
    assert row.value is not None
    assert 1 <= row.value <= 8
    (trained,) = bundles.read(workshop.bundle("parallelspec")).manifest.drafters
    assert row.note.endswith(f"; the manifest had {trained.expected_accepted_length:.2f}")
    (drafter,) = bundles.read(out).manifest.drafters
    assert drafter.expected_accepted_length == row.value


def test_a_bundle_in_fp8_is_compared_but_does_not_run_on_a_cpu(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Its weights are compared as float16; to be run it needs CUDA."""
    out = workshop.build(tmp_path / "bundle", precision="fp8", device="cuda")
    result = check.run(str(workshop.llama()), out, [])
    rows = by_name(result.rows)
    assert set(rows) >= SCRIPTS
    fault, bound = check.BOUNDS["fp16"].logits, 1.5 * check.BOUNDS["fp8"].logits  # random weights
    assert fault < rows["random trees"].value < bound  # type: ignore[operator]
    with pytest.raises(UserError, match="got an fp8 bundle with backend onnxruntime, expected "):
        spec_runtime.load(out, threads=1)


def test_what_cannot_run_here_is_skipped_with_its_reason(folder: Path) -> None:
    """ONNX Runtime has no bfloat16 attention on a CPU."""
    rows = by_name(check.run(str(folder), None, ["bf16"]).rows)
    assert rows["logits"].skipped
    assert rows["logits"].passed
    assert "cannot load" in rows["logits"].note


@pytest.mark.parametrize(
    ("value", "bound", "passed"),
    [
        (1.0, 1.0, True),
        (1.1, 1.0, False),
        (np.nan, 1.0, False),
        (np.nan, None, False),
        (9, None, True),
    ],
)
def test_a_row_passes_within_its_bound(value: float, bound: float | None, passed: bool) -> None:
    assert check.CheckRow("x", "fp32", value, bound).passed is passed


def test_reference_prompts_are_sixteen_and_the_prose_is_long_enough() -> None:
    assert len(set(reference.prompts())) == 16
    assert len(make_tokenizer()(reference.prose())["input_ids"]) > 5000


@pytest.mark.slow
@pytest.mark.model
def test_int8_of_the_demo_keeps_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_export.model import demo

    monkeypatch.setattr(check, "REFERENCE_TOKENS", 2)  # accepted length has no bound
    monkeypatch.setattr(replay, "LONGEST", 400)  # the demo's context is five times as long
    monkeypatch.setattr(replay, "NUM_TREES", 2)
    try:
        demo.fetch()
    except UserError as error:
        pytest.skip(str(error))
    rows = check.run(None, None, ["int8"]).rows
    assert failed(rows) == set()
    assert not any(row.skipped for row in rows)


def test_a_bundle_that_cannot_be_written_is_checked_and_the_table_comes_first(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "REFERENCE_TOKENS", 8)
    model, json_file = str(workshop.llama()), tmp_path / "check.json"
    out = Path(shutil.copytree(workshop.bundle("parallelspec"), tmp_path / "bundle"))
    before = (out / bundles.MANIFEST).read_text()
    said = Said()

    def refuse(*given: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(check, "require_writable", refuse)
        result = check.run(model, out, [], said)
    assert result.passed
    assert (
        said.text == "accepted lengths will not be stored in the bundle: [Errno 30] Read-only "
        "file system"
    )
    result.store_accepted_lengths()
    assert (out / bundles.MANIFEST).read_text() == before
    monkeypatch.setattr(bundles, "write_manifest", refuse)
    with pytest.raises(SystemExit):
        main(["check", "--model", model, "--bundle", str(out), "--json", str(json_file)])
    shown = capsys.readouterr()
    assert "random trees" in shown.out
    assert "FAILED" not in shown.out
    assert "Read-only" in shown.err
    assert len(json.loads(json_file.read_text())["rows"]) == len(result.rows)


def test_what_quantising_added_to_the_weights_is_a_row() -> None:
    facts = {"matrices": 8, "exact": 7, "added_error": 0.0125}
    kept: dict[str, Any] = {}
    opened: Any = SimpleNamespace(manifest=SimpleNamespace(provenance=kept))
    source = target.Source("gguf", Path(), "model.gguf", "model")
    assert check._rounding_rows("int4", opened, source) == []
    kept["rounding"] = facts
    (row,) = check._rounding_rows("int4", opened, source)
    assert (row.name, row.value, row.passed) == ("added to weights", 0.0125, True)
    assert row.note == "7 of 8 matrices as they are"
