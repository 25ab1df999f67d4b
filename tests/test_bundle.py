"""Tests bundles on disk: the round trip, and every way a bundle can be wrong, told in one line."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import CALIBRATION, small_manifest

from spec_runtime.bundle import manifest as bundle
from spec_runtime.bundle.manifest import Bundle, BundleError


def edit(folder: Path, *keys: Any, value: Any = None, drop: bool = False) -> None:
    """Sets or drops the value of the manifest that `keys` lead to."""
    file = folder / bundle.MANIFEST
    data = place = json.loads(file.read_text())
    for key in keys[:-1]:
        place = place[key]
    if drop:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    file.write_text(json.dumps(data))


def refusal(folder: Path, message: str, **options: bool) -> str:
    """Returns the one short line in which the bundle is refused."""
    with pytest.raises(BundleError, match=message) as raised:
        bundle.read(folder, **options)
    text = str(raised.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


def test_what_is_written_is_read_back(folder: Path) -> None:
    read = bundle.read(folder)
    assert isinstance(read, Bundle)
    tokenizer = "tokenizer.json"
    graphs = {"target/target.onnx", "drafters/parallelspec/drafter.onnx"}
    assert set(read.manifest.files) == {*graphs, tokenizer}
    assert read.manifest.tokenizer.sha256 == bundle.sha256(folder / tokenizer)
    unhashed = dataclasses.replace(read.manifest.tokenizer, sha256="")
    assert dataclasses.replace(read.manifest, files={}, tokenizer=unhashed) == small_manifest()
    assert read.manifest.drafter("parallelspec").config == {"num_masks": 4}
    with pytest.raises(BundleError, match=r"'medusa'.*parallelspec"):
        read.manifest.drafter("medusa")
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("look", [bundle.read, bundle.find])
def test_no_bundle_says_how_to_make_one(tmp_path: Path, look: Callable[[Path], object]) -> None:
    with pytest.raises(BundleError, match="spec-export build"):
        look(tmp_path)


def test_newer_schema_comes_before_its_unknown_keys(folder: Path) -> None:
    edit(folder, "schema_version", value=bundle.SCHEMA_VERSION + 1)
    edit(folder, "invented_later", value=1)
    refusal(folder, r"got schema_version 2, expected at most 1.*upgrade")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("target", "dims", "head_dim"), r"manifest\.target\.dims: got missing key 'head_d"),
        (("drafters",), r"missing key 'drafters'"),
    ],
)
def test_missing_keys_are_named(folder: Path, keys: tuple[str, ...], message: str) -> None:
    edit(folder, *keys, drop=True)
    refusal(folder, message)


def test_few_drafters_and_no_outputs_are_read(folder: Path) -> None:
    edit(folder, "drafters", value=[])
    edit(folder, "graphs", "target", "outputs", value=[])
    assert bundle.read(folder).manifest.drafters == ()


def test_altered_truncated_and_missing_files(folder: Path) -> None:
    file = folder / "target" / "target.onnx"
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"X" + whole[1:]):
        file.write_bytes(damaged)
        refusal(folder, r"target\.onnx: got sha256 .* truncated or altered")
        assert bundle.read(folder, verify=False).manifest.name == "small"
    file.unlink()
    refusal(folder, r"target\.onnx: missing", verify=False)


def test_write_manifest_refuses_to_name_what_is_not_there(folder: Path) -> None:
    before = (folder / bundle.MANIFEST).read_bytes()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json: missing"):
        bundle.write_manifest(folder, small_manifest())
    assert (folder / bundle.MANIFEST).read_bytes() == before


def test_find_takes_the_newest_and_no_half_built_one(folder: Path) -> None:
    root = folder.parent
    for age, name in enumerate(("newer", "older", ".half-built")):
        other = root / name
        other.mkdir()
        (other / bundle.MANIFEST).write_text("{}")
        moment = {"newer": 2e9, "older": 1e9, ".half-built": 3e9}[name]
        os.utime(other / bundle.MANIFEST, (moment, moment + age))
    assert bundle.find(root) == root / "newer"


# ---- what a stranger may write


SPEC = {"name": "x", "dtype": "int64", "shape": []}


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("schema_version",), 0, "schema_version"),
        (("schema_version",), "1", "schema_version"),
        (("schema_version",), None, "schema_version"),
        (("schema_version",), True, "schema_version"),
        (("colour",), 1, "unknown key 'colour'; expected keys schema_version, name"),
        (("target", "window"), 1, r"manifest\.target: got unknown key 'window'.*precision"),
        (("name",), "\x1b[31mred", "manifest.name: got str '.x1b"),
        (("name",), "x" * 9999, "expected 1 to 200 printable"),
        (("target", "family"), "\x1b[31m", "target.family: got str"),
        (("target", "max_length"), 2**70, "target.max_length: got int 1180"),
        (("target", "scratch"), 0, "target.scratch: got int 0, expected 1 or more"),
        (("target", "taps"), [-1], r"target.taps\[0\]: got int -1"),
        (("target", "target_modified"), 1, "expected bool"),
        (("target", "position_convention"), "relative", "expected one of absolute"),
        (("target", "dims", "num_layers"), "one", r"dims\.num_layers: got str 'one', expected int"),
        (("target", "dims", "num_layers"), 0, "num_layers: got int 0, expected 1 or more"),
        (("target", "dims", "num_kv_heads"), 3, "expected a multiple"),
        (("target", "dims", "vocab_size"), 2**40, "got int 1099511627776, expected at most 214748"),
        (("graphs",), {}, "expected one named target"),
        (("graphs", "target", "file"), "\x1b[31m", "graphs.target.file: got str"),
        (("graphs", "target", "form"), "\x1b" * 500, "form: got str '.x1b.*, expected one of"),
        (("graphs", "target", "form"), "paged", "expected one of slots, contiguous"),
        (("graphs", "target", "form"), "stateless", "got a target of the stateless form, expected"),
        (("graphs", "target", "inputs"), [SPEC, SPEC], "got inputs of equal names"),
        (("graphs", "target", "inputs", 0, "name"), "\x1b[31m", r"inputs\[0\].name: got str"),
        (("graphs", "target", "inputs", 0, "shape"), [1] * 9, "got list .*, expected at most 8"),
        (("graphs", "target", "inputs", 0, "shape"), [-1], "got int -1, expected 0 or more"),
        (("graphs", "target", "inputs", 0, "shape"), ["\n"], "expected int or 1 to 200 printable"),
        (("drafters", 0, "name"), "../x", "expected a name without / and"),
        (("drafters", 0, "name"), "a\\b", "expected a name without / and"),
        (("drafters", 0, "expected_accepted_length"), 10**400, "got int of 1329 bits, expected"),
        (("tokenizer", "special_ids"), {"eos": 2}, "expected bos, eos"),
        (("tokenizer", "special_ids"), {"bos": "1", "eos": [], "pad": None}, "expected bos, eos"),
        (("tokenizer", "special_ids"), {"bos": 1, "eos": ["2"], "pad": 0}, "expected bos, eos"),
        (("tokenizer", "special_ids"), {"bos": 1, "eos": [-2], "pad": 0}, "expected bos, eos"),
        (("tokenizer", "special_ids"), {"bos": 1, "eos": [[]], "pad": 0}, "expected bos, eos"),
        (("tokenizer", "sha256"), "0" * 64, "not the target's tokenizer"),
        (("tokenizer", "sha256"), "\x1b[31m", "does not match"),
        (("tokenizer", "file"), "other.json", "other.json is named in the manifest"),
        (("files", "tokenizer.json"), "\x1b[31m", "got str '.*', expected 64 hexadecimal digits"),
        (("files", "a\x00b"), "0" * 64, "files: got str 'a.x00b', expected 1 to 200 printable"),
        (("files", "../outside"), "0" * 64, "inside the bundle"),
        (("files", "/etc/hostname"), "0" * 64, "inside the bundle"),
        (("drafters", 0, "calibration"), CALIBRATION | {"other": 1}, "unknown key 'other'"),
    ],
)  # fmt: skip
def test_every_field_is_checked_before_it_is_used(
    folder: Path, keys: tuple[Any, ...], value: object, message: str
) -> None:
    edit(folder, *keys, value=value)
    refusal(folder, message)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("config", "num_masks", "3", "got str '3', expected int"),
        ("config", "num_masks", True, "got bool True, expected int"),
        ("config", "num_masks", 10**12, "got int 1000000000000, expected at most 1024"),
        ("config", "num_guesses", 0, "got int 0, expected 1 or more"),
        ("config", "num_guesses", None, "got null, expected int"),
        ("config", "max_width", 1.5, "got float 1.5, expected int"),
        ("config", "mask_token_base", -1, "got int -1, expected 0"),
        ("config", "features", "fused.eagle3", "got str 'fused.eagle3', expected a list"),
        ("config", "features", ["\x1b"], r"\[0\]: got str '.x1b', expected a printable text"),
        ("config", "taps", 3, "got int 3, expected a list"),
        ("config", "taps", ["1"], r"\[0\]: got str '1', expected int"),
        ("config", "top_k", "x", "got str 'x', expected int"),
        ("config", "inputs", [], r"got list \[\], expected str or null"),
        ("config", "parameters", "1", "got str '1', expected int"),
        ("trees", "max_nodes", "8", "got str '8', expected int"),
        ("trees", "max_nodes", 0, "got int 0, expected 1 or more"),
        ("trees", "min_probability", "x", "got str 'x', expected float"),
        ("trees", "min_probability", 2, "got int 2, expected at most 1"),
    ],
)
def test_what_is_read_of_a_drafter_is_checked(
    folder: Path, section: str, key: str, value: object, message: str
) -> None:
    edit(folder, "drafters", 0, section, value={key: value})
    refusal(folder, rf"drafter 'parallelspec': {section}\.{key}.*{message}")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"features": ["fused.eagle3"]}, ("fused.eagle3",)),
        ({"taps": [2, 1]}, ("features", "taps.2", "taps.1")),
        ({"taps": []}, ("features",)),
        ({}, ("features", "taps.1")),
        ({"features": ["logits"]}, None),
        ({"taps": [3]}, None),
    ],
)
def test_which_outputs_a_drafter_reads(config: dict[str, Any], names: tuple[str, ...]) -> None:
    """Older entries name taps, or none at all: those of the target. Others must be there."""
    manifest = small_manifest()
    outputs = ("logits", "features", "taps.1", "taps.2", "fused.eagle3")
    specs = tuple(bundle.TensorSpec(name, "float32", ("N", 8)) for name in outputs)
    graph = dataclasses.replace(manifest.graphs["target"], outputs=specs)
    manifest = dataclasses.replace(manifest, graphs={"target": graph})
    drafter = dataclasses.replace(manifest.drafters[0], config=config)
    if names is not None:
        assert manifest.feature_outputs(drafter) == names
        return
    with pytest.raises(BundleError, match=r"got features (logits|taps\.3), expected some of feat"):
        manifest.feature_outputs(drafter)


def test_what_older_versions_stored_of_a_calibration_is_ignored(folder: Path) -> None:
    old = CALIBRATION | {"depth_scales": [[0.9, -0.1]], "ece": "anything"}
    edit(folder, "drafters", 0, "calibration", value=old)
    assert bundle.read(folder).manifest.drafters[0].calibration == old


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        ('{"schema_version": NaN}', "it holds NaN"),
        ('{"name": "\\ud800"}', "half a surrogate pair"),
        ('{"schema_version": 1', r"manifest\.json: not readable"),
    ],
)
def test_a_manifest_that_is_no_sensible_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (folder / bundle.MANIFEST).write_text(text, encoding="utf-8")
    refusal(folder, why)
    monkeypatch.setattr(bundle, "MAX_MANIFEST_BYTES", 1)
    refusal(folder, "bytes, expected at most 1")


def test_links_that_lead_out_of_the_bundle_are_refused(folder: Path) -> None:
    """Even where their content has the right hash: it may change after it was checked."""
    file, outside = folder / "tokenizer.json", folder.parent / "outside.json"
    file.rename(outside)
    file.symlink_to(outside)
    for verify in (True, False):
        refusal(folder, "a symbolic link that leads out of the bundle", verify=verify)
    file.unlink()
    outside.rename(folder / "inside.json")
    file.symlink_to("inside.json")
    assert bundle.read(folder).manifest.name == "small"
