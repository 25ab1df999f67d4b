"""Tests what the target module says of, and reads from, the files of foreign models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from workshop import Workshop

from spec_export import target


@pytest.fixture
def folder(workshop: Workshop, tmp_path: Path) -> Path:
    """Returns a copy of a tiny target's folder, which a test may spoil."""
    return shutil.copytree(workshop.llama(), tmp_path / "model")


def test_a_fingerprint_is_of_contents_not_of_names(folder: Path) -> None:
    first = target.fingerprint(target.resolve(str(folder)))
    copy = shutil.copytree(folder, folder.parent / "another-name")
    assert target.fingerprint(target.resolve(str(copy))) == first
    (copy / "tokenizer_config.json").write_text("{}")
    assert target.fingerprint(target.resolve(str(copy))) == first

    weights = load_file(copy / "model.safetensors")
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name].view(-1)[-1] += 1e-3
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    changed = target.fingerprint(target.resolve(str(copy)))
    assert changed != first
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("}", " }", 1))
    assert target.fingerprint(target.resolve(str(folder))) not in (first, changed)


def test_a_gguf_file_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(2_000_000))
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + bytes(1_999_999) + b"\1")
    one, two = (target.fingerprint(target.resolve(str(tmp_path / f"{name}.gguf"))) for name in "ab")
    assert one != two
    (tmp_path / "a.gguf").rename(tmp_path / "c.gguf")
    assert target.fingerprint(target.resolve(str(tmp_path / "c.gguf"))) == one


def test_a_folder_without_weights_has_no_fingerprint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\*.safetensors or pytorch"):
        target.fingerprint(target.resolve(str(folder)))
