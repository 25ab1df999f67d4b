"""Tests building: what is refused and how, what a bundle holds, and that none is half-made.

The bundles are those of a tiny random target; tests/test_contract.py tests how they generate.
"""

import dataclasses
import json
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from huggingface_hub import constants
from said import Said
from small import Run, write_small_bundle
from tiny_target import make_tokenizer, save_llama
from tiny_training import largest_file
from workshop import Workshop

import spec_runtime
from spec_export.build import options as build_options
from spec_export.build.drafters import warn_of_doubts
from spec_export.build.make_bundle import BuildOptions
from spec_export.build.manifest import write_tokenizer
from spec_export.cli import main
from spec_export.cli.report import TerminalReport
from spec_export.drafters import draft_model, parallelspec, skip_layer
from spec_export.graphs import trace
from spec_export.graphs.quantize import REDUCED
from spec_export.model import demo, target
from spec_export.model.decoder import Backbone
from spec_export.model.pretrained import read_tokenizer
from spec_export.training import checkpoint
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import BundleError
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.errors import UserError

NAME = "parallelspec"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---- what a bundle holds ----


def test_a_template_gets_the_tokenizers_own_eos(tmp_path: Path) -> None:
    """Qwen's and Llama 3's tokens that end an answer have smaller ids than that of the template."""
    tokenizer = make_tokenizer("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk }}")
    config = SimpleNamespace(eos_token_id=[1, 0])
    info = write_tokenizer(tokenizer, SimpleNamespace(generation_config=config), tmp_path)
    assert info.special_ids["eos"] == [0, 1]
    source = (tmp_path / "chat_template.jinja").read_text()
    chat = [{"role": "user", "content": "hi"}]
    rendered = ChatTemplate(source, info.special_tokens).render(chat)
    assert rendered == tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hi</s>"


def test_a_bundle_keeps_the_response_template_that_is_read(tmp_path: Path) -> None:
    """One that says what is not read here is left out, with a warning in one line."""
    template = {"fields": {"thinking": {"open": "<ponder>", "close": "</ponder>"}}}
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    model = SimpleNamespace(generation_config=None)
    assert write_tokenizer(tokenizer, model, tmp_path).response_template is None
    tokenizer.response_template = template
    assert write_tokenizer(tokenizer, model, tmp_path).response_template == template
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "adapter_config.json").write_text("{}")  # it needs no weights
    assert read_tokenizer(tmp_path / "saved", None).response_template == template
    tokenizer.response_template = {"fields": {"thinking": {"open_pattern": "(?!a)b"}}}
    with pytest.warns(UserWarning, match=r"got the expression .* it is left out of the bundle"):
        assert write_tokenizer(tokenizer, model, tmp_path).response_template is None


def test_the_manifest_says_what_is_there(workshop: Workshop) -> None:
    folder = workshop.bundle(NAME)
    manifest = bundles.read(folder).manifest
    assert set(manifest.files) == set(contents(folder)) - {"manifest.json"}
    info = manifest.target
    assert (info.family, info.precision, info.max_length, info.taps) == ("llama", "fp32", 256, (1,))
    assert info.dims == bundles.Dims(98, 64, 2, 4, 2, 64)
    assert info.rope["type"] == "default"
    assert manifest.name == "llama"
    assert manifest.tokenizer.special_ids == {"bos": 0, "eos": [1], "pad": None}
    assert manifest.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert manifest.tokenizer.vocab_size == 98
    assert manifest.tokenizer.chat_template == "chat_template.jinja"
    graph = manifest.graphs["target"]
    assert list(manifest.graphs) == ["target"]
    outputs = {spec.name: (spec.dtype, spec.shape) for spec in graph.outputs}
    assert outputs["logits"] == ("float32", ("M", 98))
    assert outputs["taps.1"] == ("float32", ("N", 64))
    (drafter,) = manifest.drafters
    saved = checkpoint.load_drafter(workshop.drafter(NAME))
    assert (drafter.name, set(drafter.graphs)) == (NAME, {"drafter"})
    assert drafter.config["features"] == ["features", "taps.1"]
    assert 0.05 < drafter.config["extra_memory"] < 1  # a layer of two, masks, fc
    assert drafter.expected_accepted_length == saved.provenance["validation"]["accepted_length"]
    assert drafter.draft_token_ids is not None
    assert saved.draft_token_ids is not None
    assert np.array_equal(np.load(folder / drafter.draft_token_ids), saved.draft_token_ids)
    assert manifest.provenance["source"] == "folder"
    assert manifest.provenance["drafters"][NAME]["steps"] == 2
    assert stat.S_IMODE(folder.stat().st_mode) & 0o444 == 0o444, "others may read it"


@pytest.mark.slow
def test_int8_brings_its_probe_and_is_smaller(workshop: Workshop) -> None:
    small, large = workshop.bundle(NAME, "int8"), workshop.bundle(NAME)
    manifest = bundles.read(small).manifest
    assert manifest.target.precision == "int8"
    for folder, precision in ((small, "int8"), (large, "fp32")):
        trees = bundles.read(folder).manifest.drafters[0].trees
        assert trees == build_options.TREES[precision]
    sizes = [(folder / "target" / "target.bin").stat().st_size for folder in (small, large)]
    assert sizes[0] < sizes[1] / 2


def test_a_cpu_has_trees_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"max_nodes": 5, "min_probability": 0.5, "lookup_nodes": 0}
    monkeypatch.setitem(build_options.TREES, "fp32", tree)
    assert BuildOptions(precision="fp32").tree == tree
    for gpu in (BuildOptions(device="cuda", precision="fp32"), BuildOptions(backend="tensorrt")):
        assert gpu.tree == build_options.DEFAULT_TREE
    assert BuildOptions(device="cuda", precision="fp8").tree["max_nodes"] == 8


def test_a_drafter_beside_a_float_target_is_in_int8(workshop: Workshop, tmp_path: Path) -> None:
    small, large = workshop.build(tmp_path / "small", NAME), workshop.bundle(NAME)
    opened = bundles.read(small)
    (drafter,) = opened.manifest.drafters
    assert (opened.manifest.target.precision, drafter.config["precision"]) == ("fp32", "int8")
    assert bundles.read(large).manifest.drafters[0].config["precision"] == "fp32"
    target_graph, drafter_graph = "target/target.onnx", drafter.graphs["drafter"].file
    assert products(small / target_graph) == products(large / drafter_graph) == []
    for folder in (small, large):  # the embedding is read from the target's file
        values = ir.load(folder / drafter_graph).graph.initializers.values()
        (table,) = [each.const_value for each in values if each.shape == ir.Shape((98, 64))]
        assert isinstance(table, ir.ExternalTensor)
        assert table.location == "target.bin"
    weights = [node.inputs[1].const_value.numpy() for node in products(small / drafter_graph)]
    assert {np.abs(weight).max() for weight in weights} == {REDUCED}
    plain, drafted = (spec_runtime.load(small, name, threads=1) for name in ("none", NAME))
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
    for sampling in samplings:
        expected = plain.generate("say abc", max_new_tokens=24, **sampling)
        result = drafted.generate("say abc", max_new_tokens=24, **sampling)
        assert result.token_ids == expected.token_ids
        assert result.stats.drafted_tokens > 0 or sampling


def products(graph: Path) -> list[Any]:
    """Returns a graph's products of int8."""
    return [node for node in ir.load(graph).graph if node.op_type == "MatMulIntegerToFloat"]


@pytest.mark.parametrize(
    ("options", "precision", "module"),
    [
        ({}, "int8", parallelspec.Drafter),
        ({"drafter_precision": "fp32"}, "fp32", parallelspec.Drafter),
        ({"drafter_precision": "int4"}, "int4", parallelspec.Drafter),
        ({"precision": "int8"}, "int8", parallelspec.Drafter),
        ({"precision": "int4"}, "int4", parallelspec.Drafter),
        ({"precision": "int8", "drafter_precision": "fp32"}, "fp32", parallelspec.Drafter),
        ({"precision": "fp16"}, "fp16", parallelspec.Drafter),
        ({"form": "contiguous"}, "fp32", parallelspec.Drafter),
        ({"backend": "tensorrt"}, "fp32", parallelspec.Drafter),
        ({"device": "cuda"}, "fp16", parallelspec.Drafter),
        ({"device": "cuda", "precision": "fp32"}, "fp32", parallelspec.Drafter),
        ({"device": "cuda", "precision": "fp8"}, "fp8", parallelspec.Drafter),
        # whole models and the target's own layers
        ({}, "fp32", draft_model.Pretrained),
        ({"drafter_precision": "int8"}, "int8", draft_model.Pretrained),
        ({}, "fp32", skip_layer.Drafter),
        ({"drafter_precision": "int8"}, "fp32", skip_layer.Drafter),
    ],
)
def test_the_precision_of_a_drafter(options: dict[str, Any], precision: str, module: Any) -> None:
    assert BuildOptions(**options).precision_of(module) == precision


def test_without_a_drafter_it_drafts_by_prompt_lookup(workshop: Workshop, tmp_path: Path) -> None:
    out, said = tmp_path / "bundle", Said()
    assert workshop.build(out, max_length=100, report=said) == out
    assert "no drafter is trained for llama: the bundle drafts by prompt lookup" in said.text
    manifest = bundles.read(out).manifest
    assert (manifest.drafters, manifest.target.taps) == ((), ())
    assert manifest.target.max_length == 100
    engine = spec_runtime.load(out, threads=1)
    assert engine.drafter == "prompt_lookup"
    assert len(engine.generate("ab ab ab", max_new_tokens=5, ignore_eos=True).token_ids) == 5


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": ["nosuch"]}, "got drafter 'nosuch', expected one of parallelspec"),
        ({"drafters": [NAME]}, "got drafter 'parallelspec' for llama without weights: train it"),
        ({"precision": "int8", "form": "contiguous"}, "got precision int8 with the contiguous"),
        ({"precision": "int4", "form": "contiguous"}, "got precision int4 with the contiguous"),
        ({"precision": "fp8"}, "got precision fp8 with device cpu, expected device cuda: no other"),
        (
            {"drafter_precision": "int8", "device": "cuda"},
            "int8 with device cuda and the slots form",
        ),
        ({"drafter_precision": "int8", "form": "contiguous"}, "device cpu and the contiguous form"),
        (
            {"device": "cuda", "form": "contiguous"},
            "got form contiguous with device cuda, expected ",
        ),
        ({"max_length": 257}, "got a max length of 257, expected at most the model's 256"),
        ({"model": "./nowhere"}, "got model './nowhere', expected an existing folder"),
        ({"drafter_checkpoints": [Path("nowhere")]}, r"got nowhere \(there is nothing\), expected"),
        ({"model": "some/model"}, "load target some/model .no hub access here. pass a local fold"),
    ],
)
def test_what_cannot_be_built(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(workshop, tmp_path / "new" / "bundle", message, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["precision", "drafter_precision", "backend", "device", "form"])
def test_names_that_are_none_are_refused_by_option(option: str) -> None:
    with pytest.raises(UserError, match="expected one of ") as caught:
        BuildOptions(**{option: "int3"})  # type: ignore[arg-type]
    assert caught.value.param == option


def refused(workshop: Workshop, out: Path, message: str, **options: Any) -> None:
    """Asserts that a build is refused in one line."""
    with pytest.raises(ValueError, match=message) as error:
        workshop.build(out, **options)
    assert "\n" not in str(error.value)


def saved_drafter(workshop: Workshop, folder: Path, **changes: Any) -> Path:
    """Saves the session's drafter again, with these fields changed."""
    saved = checkpoint.load_drafter(workshop.drafter(NAME))
    fields = {"name": NAME, "config": saved.config, "draft_token_ids": saved.draft_token_ids}
    fields |= {"state": saved.state, "provenance": saved.provenance}
    return checkpoint.save_drafter(folder, **fields | changes)


@pytest.mark.parametrize(
    ("changes", "drafters", "message"),
    [
        ({"name": "nosuch"}, [NAME], "got drafter 'parallelspec' for llama without weights"),
        ({"name": "nosuch"}, [], "got drafter 'nosuch', expected one of parallelspec"),
        ({"state": {"fc": torch.zeros(2, 2)}}, [], "tensors do not fit: missing"),
        ({"config": {"num_mask": 3}}, [], "num_mask"),
        ({"draft_token_ids": np.arange(50, 130)}, [], "token ids up to 129, the target has 98"),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], drafters: list[str], message: str
) -> None:
    folder = saved_drafter(workshop, tmp_path / "drafter", **changes)
    out = tmp_path / "bundle"
    refused(workshop, out, message, drafters=drafters, drafter_checkpoints=[folder])
    assert not out.exists()


def test_several_checkpoints_make_one_bundle(workshop: Workshop, tmp_path: Path) -> None:
    """One of them is doubtful, which is said."""
    about = checkpoint.load_drafter(workshop.drafter(NAME)).provenance | {"steps": 0}
    doubtful = saved_drafter(workshop, tmp_path / "drafter", provenance=about)
    folders, said = [doubtful, workshop.drafter("medusa")], Said()
    options: dict[str, Any] = {"drafters": ["medusa"], "drafter_checkpoints": folders}
    out = workshop.build(tmp_path / "bundle", report=said, **options)
    infos = bundles.read(out).manifest.drafters
    assert [info.name for info in infos] == [NAME, "medusa"]
    for info, folder in zip(infos, folders, strict=True):
        own = checkpoint.load_drafter(folder).state
        assert info.config["parameters"] == sum(tensor.numel() for tensor in own.values())
    assert "WARNING: drafter parallelspec is untrained" in said.text
    message = "got two checkpoints of 'medusa', expected one of each"
    refused(workshop, tmp_path / "other", message, drafter_checkpoints=[folders[1]] * 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "drafter"]


def test_a_training_run_stands_for_its_drafter(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build shows its stages in a log."""
    run, out = workshop.drafter(NAME).parent, tmp_path / "one"
    assert not (run / "config.json").exists()
    capsys.readouterr()
    workshop.build(out, drafter_checkpoints=[run], report=TerminalReport())
    assert [each.name for each in bundles.read(out).manifest.drafters] == [NAME]
    found = re.findall(r"^ *(\d+\.\d) s  (.*)$", capsys.readouterr().err, re.MULTILINE)
    stages = ["loading the target", "exporting the target", f"exporting {NAME}"]
    assert [what for _, what in found] == [*stages, "hashing the files"]
    seconds = [float(each) for each, _ in found]
    assert seconds == sorted(seconds)
    unfinished = tmp_path / "run"
    shutil.copytree(run / "checkpoints", unfinished / "checkpoints")
    message = "holds a training run that has not ended"
    refused(workshop, out, message, drafter_checkpoints=[unfinished])


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, ""),
        ({"steps": None}, "WARNING: drafter parallelspec is untrained (its provenance names no "),
        ({"steps": 0}, "WARNING: drafter parallelspec is untrained (its provenance names no "),
        ({"validation": None}, "parallelspec was never validated: expect"),
        ({"target": "smollm"}, "parallelspec was trained for smollm, not for llama: expect"),
        (
            {"steps": None, "validation": None, "target": None},
            "was never validated, was trained for an unknown target",
        ),
    ],
)
def test_a_doubtful_drafter_is_warned_of(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], warning: str
) -> None:
    about = checkpoint.load_drafter(workshop.drafter(NAME)).provenance | changes
    about = {key: value for key, value in about.items() if value is not None}
    folder, said = saved_drafter(workshop, tmp_path / "drafter", provenance=about), Said()
    source = target.resolve(str(workshop.llama()))
    warn_of_doubts(checkpoint.load_drafter(folder), source, said)
    assert warning in said.text
    assert len(said.lines) == bool(warning)


def test_a_drafter_of_a_target_of_another_size(workshop: Workshop, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other")  # half as wide
    message, out = r"tensors do not fit: .* expected", tmp_path / "bundle"
    checkpoints = [workshop.drafter(NAME)]
    refused(workshop, out, message, model=str(other), drafter_checkpoints=checkpoints)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_a_model_is(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "half.gguf").write_bytes(b"GGUF" + bytes(8))
    for model, expected in (
        ("Org/Model-1", ("hub", "model-1", None)),
        (str(workshop.llama()), ("folder", "llama", None)),
        (str(tmp_path / "half.gguf"), ("gguf", "half", "half.gguf")),
    ):
        source = target.resolve(model)
        assert (source.kind, source.name, source.gguf_file) == expected
    (tmp_path / "file").write_bytes(b"GGML")
    for none, message in (
        (tmp_path, "it has no config.json"),
        (tmp_path / "file", "expected a GGUF file"),
        (tmp_path / "missing", "expected an existing folder or GGUF file"),
        (Path("noslash"), "or a hub id"),
    ):
        with pytest.raises(ValueError, match=message):
            target.resolve(str(none))


# ---- the manifest's files ----


def test_a_manifest_lists_no_stray_files(workshop: Workshop, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(workshop.bundle(NAME), folder)
    manifest = bundles.read(folder).manifest
    (folder / "notes.md").write_text("mine")
    (folder / "target" / "stray.bin").touch()
    (folder / ".manifest.0123abcd.tmp.json").touch()
    bundles.write_manifest(folder, dataclasses.replace(manifest, name="again"))
    again = bundles.read(folder).manifest
    assert (again.name, again.files) == ("again", manifest.files)
    assert "target/target.bin" in again.files, "weights are not named by the manifest's fields"


def test_a_file_that_was_listed_stays_so(tmp_path: Path) -> None:
    folder = write_small_bundle(tmp_path / "bundle")
    manifest = bundles.read(folder).manifest
    (folder / "target" / "weights").touch()
    files = manifest.files | {"target/weights": "", "gone": ""}
    bundles.write_manifest(folder, dataclasses.replace(manifest, files=files))
    assert set(bundles.read(folder).manifest.files) == {*manifest.files, "target/weights"}


@pytest.mark.parametrize("link", ["tokenizer.json", "target"])
def test_no_manifest_is_written_of_files_elsewhere(tmp_path: Path, link: str) -> None:
    folder = write_small_bundle(tmp_path / "bundle")
    manifest = bundles.read(folder).manifest
    shutil.move(folder / link, tmp_path / "elsewhere")
    (folder / link).symlink_to(tmp_path / "elsewhere")
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(
        BundleError, match=f"{link}.*: a symbolic link that leads out of the bundle"
    ):
        bundles.write_manifest(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_link_inside_the_bundle_is_as_good_as_a_file(tmp_path: Path) -> None:
    folder = write_small_bundle(tmp_path / "bundle")
    (folder / "tokenizer.json").rename(folder / "words.json")
    (folder / "tokenizer.json").symlink_to("words.json")
    bundles.write_manifest(folder, bundles.read(folder, verify=False).manifest)
    bundles.read(folder)


# ---- all or nothing ----


@pytest.fixture(scope="module")
def traced(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    path = tmp_path_factory.mktemp("traced") / "target.onnx"
    trace.save(trace.export_backbone(Backbone.from_transformers(hf_model)), path)
    return path


@pytest.fixture
def quick(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the target's graph from a file, for tests of the folder that a build writes."""
    monkeypatch.setattr(trace, "export_backbone", lambda *_, **__: ir.load(traced))


@pytest.mark.usefixtures("quick")
def test_a_failure_leaves_the_old_bundle_and_nothing_else(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the last file; then the same build succeeds and replaces the bundle."""
    out = tmp_path / "bundle"
    shutil.copytree(workshop.bundle(NAME), out)
    before = contents(out)

    def fail(path: Path, manifest: bundles.Manifest) -> None:
        assert (path / "target" / "target.onnx").is_file(), "too early"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write_manifest", fail)
        with pytest.raises(OSError, match="No space left"):
            workshop.build(out)
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]
    workshop.build(out)
    assert bundles.read(out).manifest.drafters == ()
    assert list(tmp_path.iterdir()) == [out]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test fail that comes as far as the demo's download or loading a model."""

    def fail(*_: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(target, "load", fail)
    monkeypatch.setattr(demo, "fetch", fail)


@pytest.mark.usefixtures("no_model")
def test_a_folder_of_other_files_is_not_replaced(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    message = "holds other files .*, expected a bundle or a new folder"
    for model in (None, str(workshop.llama())):  # None is the demo, which would be downloaded
        refused(workshop, tmp_path, message, model=model)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "text",
    [
        '{"manifest_version": 3, "name": "a browser\'s extension"}',
        '{"schema_version": 1, "files": {"thesis.txt": ""}}',
        '{"schema_version": 1, "target": {}, "graphs": {}, "tokenizer": {}, "files": []}',
        "[]",
        "{",
        "[" * 100_000,
        "",
    ],
)
def test_a_folder_with_any_manifest_is_no_bundle(
    workshop: Workshop, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "extension"
    out.mkdir()
    (out / "manifest.json").write_text(text)
    (out / "thesis.txt").write_text("years of work")
    before = contents(out)
    refused(workshop, out, r"holds other files \(manifest.json and 1 more\), expected a bundle")
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("no_model")
def test_own_notes_in_a_bundle_stop_a_build(workshop: Workshop, tmp_path: Path) -> None:
    out = write_small_bundle(tmp_path / "bundle")
    (out / "target" / "notes.md").write_text("mine")
    before = contents(out)
    refused(workshop, out, r"holds other files \(target/notes.md\)")
    assert contents(out) == before


@pytest.mark.usefixtures("no_model")
def test_places_that_are_not_replaced(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.llama()
    out = write_small_bundle(tmp_path / "bundle")
    (tmp_path / "link").symlink_to("bundle")
    refused(workshop, tmp_path / "link", "is a symbolic link, expected a bundle or a new folder")
    refused(workshop, out / "manifest.json", "manifest.json is a file, expected a bundle")
    monkeypatch.chdir(out)
    for there in (".", "target/..", str(out)):
        refused(workshop, Path(there), "is the working folder or above it, which cannot be")
    bundles.read(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "link"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("target/target.onnx", Path.unlink),
        ("tokenizer.json", lambda path: path.write_bytes(b"half")),
        ("manifest.json", lambda path: newer(path)),
        (".manifest.0123abcd.tmp.json", lambda path: path.write_text("a killed calibrate's")),
    ],
)
def test_a_damaged_bundle_is_replaced(
    workshop: Workshop, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    out = write_small_bundle(tmp_path / "bundle")
    damage(out / file)
    workshop.build(out)
    bundles.read(out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_kill_between_the_renames_loses_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """The next build finds the old bundle again, whatever becomes of itself; the litter goes."""
    old = write_small_bundle(tmp_path / ".bundle.0123abcd.old")
    before = contents(old)
    half = tmp_path / ".bundle.0123abcd.tmp" / "target"
    half.mkdir(parents=True)
    (half / "target.bin").touch()
    (tmp_path / ".bundle.lock").write_text("process 1 on this machine")
    out = tmp_path / "bundle"
    refused(workshop, out, "max length", max_length=100_000)
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("quick")
def test_of_two_builds_into_one_folder_the_second_is_refused(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, load = tmp_path / "bundle", target.open_weights

    def load_and_build(source: target.Source) -> Any:
        refused(workshop, out, "bundle is being written by process .*, expected nobody")
        return load(source)

    monkeypatch.setattr(target, "open_weights", load_and_build)
    workshop.build(out)
    bundles.read(out)
    assert list(tmp_path.iterdir()) == [out]


def test_no_room_for_a_file_is_one_line_and_nothing_is_left(
    workshop: Workshop, tmp_path: Path, run: Run
) -> None:
    """A limit for files' sizes stands for a full disk: both raise OSError in the middle of one."""
    words = ["build", "--model", workshop.llama(), "--lanes", 1, "--out"]
    # the trace that tests share is a file, too
    assert run(*words, tmp_path / "whole", main=main)[0] == 0
    shutil.rmtree(tmp_path / "whole")
    out = tmp_path / "new" / "bundle"
    for room in (2_000, 50_000):
        with largest_file(room):
            code, _, err = run(*words, out, main=main)
        assert code == 2
        assert err.endswith(f"error: [Errno 27] File too large: '{out}'\n")
        assert err.count("error: ") == 1
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []


# ---- damage ----


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def newer(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))


def test_damage_is_noticed_by_the_runtime_when_hashes_are_not_checked(
    workshop: Workshop, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(workshop.bundle(NAME), folder)
    cut(folder / "target" / "target.bin")
    with pytest.raises(BundleError, match="truncated or altered"):
        spec_runtime.load(folder, threads=1)
    with pytest.raises(ValueError, match=r"cannot load target\.onnx") as error:
        spec_runtime.load(folder, threads=1, verify=False)
    assert "\n" not in str(error.value)


def test_a_real_bundle_generates_through_the_command_line(workshop: Workshop, run: Run) -> None:
    options = ["--bundle", workshop.bundle(NAME), "--max-new-tokens", 20, "--json"]
    reports = []
    for drafter in ([], ["--drafter", "prompt_lookup"], ["--drafter", "none"]):
        code, out, _ = run("generate", "say abc", *options, *drafter)
        assert code == 0
        reports.append(json.loads(out))
    assert reports[0]["token_ids"] == reports[1]["token_ids"] == reports[2]["token_ids"]
    assert reports[2]["accepted_length"] == 1.0
