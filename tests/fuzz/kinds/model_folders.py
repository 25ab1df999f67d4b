"""Models to build from: changed configurations, damaged weights and tokenizers, GGUF headers."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
FILES = (*JSON_FILES, "model.safetensors", "tokenizer.json")


def cases() -> SearchStrategy[Any]:
    return st.one_of(
        st.fixed_dictionaries({"file": st.sampled_from(JSON_FILES), "edits": mutations.edits(2)}),
        st.fixed_dictionaries({"file": st.just("config.json"), "edits": mutations.edits(2)}),
        st.fixed_dictionaries(
            {"file": st.just("model.safetensors"), "tensors": mutations.edits(2)}
        ),
        st.fixed_dictionaries({"file": st.sampled_from(FILES), "damage": mutations.damages()}),
        st.fixed_dictionaries({"gguf": _headers()}),
        st.fixed_dictionaries({"gguf": _headers(), "damage": mutations.damages()}),
    )


def _headers() -> SearchStrategy[Any]:
    """Draws the numbers that a GGUF file begins with, and what follows as hex."""
    count = st.sampled_from((0, 1, 2, 5, 2**31, 2**63, 2**64 - 1))
    keys = st.sampled_from((b"general.architecture", b"", b"\xff", b"a" * 70000))
    kinds = st.integers(0, 13)
    entry = st.builds(
        lambda key, kind, rest: (
            len(key).to_bytes(8, "little") + key + kind.to_bytes(4, "little") + rest
        ),
        keys,
        kinds,
        st.binary(max_size=24) | st.just((5).to_bytes(8, "little") + b"llama"),
    )
    body = st.lists(entry, max_size=3).map(b"".join) | st.binary(max_size=40)
    return st.builds(
        lambda version, tensors, keys, body: (
            b"GGUF"
            + version.to_bytes(4, "little")
            + tensors.to_bytes(8, "little")
            + keys.to_bytes(8, "little")
            + body
        ).hex(),
        st.sampled_from((0, 1, 2, 3, 4, 2**24 * 3)),
        count,
        count,
        body,
    )


def open_kind(folder: Path) -> Run:
    import logging

    import torch
    import transformers
    from tiny_target import save_llama

    from kinds.checkpoints import _with_header
    from spec_export.model import target

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    whole = save_llama(folder / "whole")
    right = _weights(target.load(target.resolve(str(whole)))[0])
    ran = folder / "ran"
    place = folder / "changed"

    def change(case: dict[str, Any]) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        if "gguf" in case:
            place.mkdir()
            content = mutations.damaged(bytes.fromhex(case["gguf"]), case.get("damage", []))
            (place / "model.gguf").write_bytes(content)
            return place / "model.gguf"
        shutil.copytree(whole, place)
        file = place / case["file"]
        if "edits" in case:
            document = json.loads(file.read_text())
            file.write_text(mutations.dump(mutations.edited(document, case["edits"])))
        elif "tensors" in case:
            file.write_bytes(_with_header(file.read_bytes(), case["tensors"]))
        else:
            file.write_bytes(mutations.damaged(file.read_bytes(), case["damage"]))
        (place / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
        return place

    def run(case: dict[str, Any]) -> None:
        path = change(case)
        try:
            with refusing():
                model, _ = target.load(target.resolve(str(path)))
            found = _weights(model)
            with refusing():
                again = _weights(target.load(target.resolve(str(path)))[0])
        except Refused:
            _require_bounded_output()
            raise
        finally:
            if ran.exists():
                ran.unlink()
                raise Wrong("code from the model's folder has run")
        if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in again.items()}:
            raise Wrong("two loads differ")
        if not all(torch.isfinite(tensor).all() for tensor in found.values()):
            raise Wrong("weights that are not finite are taken")
        if not all(torch.equal(tensor, again[name]) for name, tensor in found.items()):
            raise Wrong("missing weights have become random ones")
        if case.get("file") != "model.safetensors" and any(
            name in right and not torch.equal(tensor, right[name]) for name, tensor in found.items()
        ):
            raise Wrong("weights are not the file's")

    return run


def _weights(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _require_bounded_output() -> None:
    sys.stdout.flush()


KIND = Kind("model folder", cases, open_kind, weight=4, seconds=30, megabytes=2048)
