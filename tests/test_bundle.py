"""Tests bundles on disk: the round trip, and every way a bundle can be wrong, told in one line."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from small import small_manifest, write_small_bundle

from spec_runtime import bundle
from spec_runtime.bundle import Bundle, BundleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_bundle(tmp_path / "bundles" / "small")


def edit(folder: Path, *keys: str, value: Any = None, drop: bool = False) -> None:
    """Sets or drops the value of the manifest that `keys` lead to."""
    file = folder / bundle.MANIFEST
    data = json.loads(file.read_text())
    place = data
    for key in keys[:-1]:
        place = place[key]
    if drop:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    file.write_text(json.dumps(data))


def test_what_is_written_is_read_back(folder: Path) -> None:
    read = bundle.read(folder)
    assert isinstance(read, Bundle)
    assert set(read.manifest.files) == {
        "target/target.onnx",
        "drafters/parallelspec/drafter.onnx",
        "tokenizer.json",
    }
    assert read.manifest.tokenizer.sha256 == bundle.sha256(folder / "tokenizer.json")
    unhashed = dataclasses.replace(
        read.manifest, files={}, tokenizer=dataclasses.replace(read.manifest.tokenizer, sha256="")
    )
    assert unhashed == small_manifest()
    assert read.manifest.drafter("parallelspec").config == {"num_masks": 4}
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_unknown_drafter_lists_those_there_are(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"'medusa'.*parallelspec"):
        bundle.read(folder).manifest.drafter("medusa")


def test_no_bundle_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="spec-export build"):
        bundle.read(tmp_path)
    with pytest.raises(BundleError, match="spec-export build"):
        bundle.find(tmp_path / "bundles")


def test_truncated_manifest(folder: Path) -> None:
    file = folder / bundle.MANIFEST
    file.write_text(file.read_text()[:-40])
    with pytest.raises(BundleError, match=r"manifest\.json: not readable"):
        bundle.read(folder)


def test_newer_schema_comes_before_its_unknown_keys(folder: Path) -> None:
    edit(folder, "schema_version", value=bundle.SCHEMA_VERSION + 1)
    edit(folder, "invented_later", value=1)
    with pytest.raises(BundleError, match=r"got schema_version 2, expected at most 1.*upgrade"):
        bundle.read(folder)


@pytest.mark.parametrize("version", [0, "1", None, True])
def test_schema_version_that_is_none(folder: Path, version: object) -> None:
    edit(folder, "schema_version", value=version)
    with pytest.raises(BundleError, match="schema_version"):
        bundle.read(folder)


@pytest.mark.parametrize(
    ("keys", "drop", "message"),
    [
        (("colour",), False, r"unknown key 'colour'; expected keys schema_version, name"),
        (("target", "window"), False, r"manifest\.target: got unknown key 'window'.*precision"),
        (("target", "dims", "head_dim"), True, r"manifest\.target\.dims: got missing key 'head_d"),
        (("drafters",), True, r"missing key 'drafters'"),
    ],
)
def test_unknown_and_missing_keys_are_named(
    folder: Path, keys: tuple[str, ...], drop: bool, message: str
) -> None:
    edit(folder, *keys, value=1, drop=drop)
    with pytest.raises(BundleError, match=message):
        bundle.read(folder)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("target", "dims", "num_layers"), "one", r"dims\.num_layers: got str 'one', expected int"),
        (("target", "dims", "num_layers"), 0, "expected a positive number"),
        (("target", "dims", "num_kv_heads"), 3, "expected a multiple"),
        (("target", "target_modified"), 1, "expected bool"),
        (("target", "position_convention"), "relative", "expected one of absolute"),
        (("graphs", "target", "form"), "paged", "expected one of slots, contiguous"),
        (("graphs",), {}, "expected one named target"),
        (("tokenizer", "special_ids"), {"eos": 2}, "expected bos, eos"),
        (("tokenizer", "sha256"), "0" * 64, "not the target's tokenizer"),
        (("tokenizer", "file"), "other.json", "other.json is named in the manifest"),
        (("drafters",), [], None),
    ],
)
def test_wrong_values(
    folder: Path, keys: tuple[str, ...], value: object, message: str | None
) -> None:
    edit(folder, *keys, value=value)
    if message is None:
        assert bundle.read(folder).manifest.drafters == ()
        return
    with pytest.raises(BundleError, match=message) as raised:
        bundle.read(folder)
    assert "\n" not in str(raised.value)


def test_altered_truncated_and_missing_files(folder: Path) -> None:
    file = folder / "target" / "target.onnx"
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"X" + whole[1:]):
        file.write_bytes(damaged)
        with pytest.raises(BundleError, match=r"target\.onnx: got sha256 .* truncated or altered"):
            bundle.read(folder)
        assert bundle.read(folder, verify=False).manifest.name == "small"
    file.unlink()
    with pytest.raises(BundleError, match=r"target\.onnx: missing"):
        bundle.read(folder, verify=False)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_paths_stay_inside_the_bundle(folder: Path, name: str) -> None:
    edit(folder, "files", name, value="0" * 64)
    with pytest.raises(BundleError, match="inside the bundle"):
        bundle.read(folder)


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
