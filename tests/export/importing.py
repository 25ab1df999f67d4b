"""Writes drafters as other libraries do, and keeps what their import says or refuses."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_target import save_llama
from transformers import AutoModelForCausalLM

from spec_export.imports.drafters.importer import run
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.report import Report
from spec_runtime.errors import UserError


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Any], name: str = "model.safetensors"
) -> Path:
    """Returns the folder with this config, and with the tensors in a file of this name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    save = safetensors.torch.save_file if name.endswith("safetensors") else torch.save
    save(whole, folder / name)
    return folder


@cache
def backbone_of(model: Path) -> tuple[Any, Backbone]:
    hf_model, _ = target.load(target.resolve(str(model)))
    return hf_model, Backbone.from_transformers(hf_model)


def require_refused(source: Path, model: Path, out: Path, message: str) -> None:
    """Requires a refusal of one line that matches, before the target's layers are loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "load", None)
        with pytest.raises(UserError, match=message) as raised:
            run(str(source), str(model), out)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def borrowed_target(folder: Path) -> Path:
    """Writes a target of 8 layers with the embedding and the head that the drafters in
    written_by_speculators/ borrowed, and returns its folder."""
    save_llama(folder, num_hidden_layers=8)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    golden = np.load(Path(__file__).parent / "written_by_speculators/z-lab/golden.npz")
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(golden["embedding"]))
        model.get_output_embeddings().weight.copy_(torch.from_numpy(golden["head"]))
    model.save_pretrained(folder)
    return folder


class Lines(Report):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)
