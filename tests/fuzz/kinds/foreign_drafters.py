"""Drafters of other libraries: changed configs, headers of weights and files, read for a target."""

import json
import shutil
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

FOLDERS = ("EAGLE", "z-lab")


def cases() -> SearchStrategy[Any]:
    folder, every = st.sampled_from(FOLDERS), st.sampled_from((*FOLDERS, "GGUF"))
    changes = (mutations.edits(2), mutations.edits(2), mutations.damages())
    return st.one_of(
        st.fixed_dictionaries({"source": folder, "config": changes[0]}),
        st.fixed_dictionaries({"source": folder, "tensors": changes[1]}),
        st.fixed_dictionaries({"source": every, "damage": changes[2]}),
    )


def open_kind(folder: Path) -> Run:
    import logging

    import torch
    from test_import import write_format
    from test_import_dflash import write_format as write_blocks
    from tiny_target import save_llama

    from kinds.checkpoints import _with_header
    from spec_export.imports.drafters import importer
    from spec_export.training.checkpoint import load_drafter

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    llama = save_llama(folder / "llama", num_hidden_layers=8)
    (folder / "gguf").mkdir()
    sources = {"GGUF": write_format(folder / "gguf", "GGUF", llama)[0]}
    sources["EAGLE"] = write_format(folder, "EAGLE", llama)[0]
    sources["z-lab"] = write_blocks(folder / "z-lab", "z-lab", llama)[0]
    place, out = folder / "changed", folder / "out"

    def run(case: dict[str, Any]) -> None:
        for left in (place, out):
            shutil.rmtree(left, ignore_errors=True)
        source = sources[case["source"]]
        shutil.copytree(source if source.is_dir() else source.parent, place)
        weights = place / (source.name if source.is_file() else "model.safetensors")
        if "config" in case:
            file = place / "config.json"
            file.write_text(
                mutations.dump(mutations.edited(json.loads(file.read_text()), case["config"]))
            )
        elif "tensors" in case:
            weights.write_bytes(_with_header(weights.read_bytes(), case["tensors"]))
        else:
            weights.write_bytes(mutations.damaged(weights.read_bytes(), case["damage"]))
        with refusing():
            given = weights if source.is_file() else place
            importer.run(str(given), str(llama), out, is_measured=False)
        load_drafter(out)  # what was written can be read

    return run


KIND = Kind("foreign drafter", cases, open_kind, weight=2, seconds=30, megabytes=2048)
