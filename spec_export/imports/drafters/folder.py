"""Reads config and tensors of another library's drafter, and notes which of them were used."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spec_export.model import foreign_json
from spec_export.model.files import HEADS, weight_files
from spec_export.model.pretrained import read_tensors
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import brief, parse_json, require_keys, require_types
from spec_runtime.files.writing import sha256

# Settings that change what is drafted and no weight, and what our `export` calls them in the
# metadata of a safetensors file, which other readers pass over.
SEARCH, SEARCH_KEY = ("num_guesses", "max_width", "top_k"), "specsplit.search"
SHOWN = 3  # names that a message lists
PARD, PARD_2 = "pard_token", ("pard2_target_layers", "pard2")  # keys of configs
MEDUSA = "medusa_head."  # begins the names of Medusa's heads in the files of a whole model


@dataclass
class ForeignFolder:
    """Holds a drafter's files in memory: `config` as it is, and the tensors in float32.

    Scalars have one axis. path: the folder, or a GGUF file. Of a whole model with Medusa's heads it
    holds the heads; is_whole_model says so.
    """

    path: Path
    files: list[Path]
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    is_whole_model: bool = False

    def __post_init__(self) -> None:
        self.tensors = {name: torch.atleast_1d(each) for name, each in self.tensors.items()}

    def search(self) -> dict[str, int]:
        """Returns how our `export` says that a drafter of ours is searched, by names of SEARCH;
        nothing for files that others wrote."""
        for file in self.files:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    text = (opened.metadata() or {}).get(SEARCH_KEY, "{}")
                try:
                    found: dict[str, int] = parse_json(text.encode())
                    require_types(foreign_json.SEARCH, found, "")
                    require_keys(found, SEARCH, ())
                except ValueError as error:
                    raise UserError(f"{file}: got {SEARCH_KEY} {brief(error)}") from error
                return found
        return {}

    def hashes(self) -> dict[str, str]:
        """Returns the SHA-256 of each file."""
        return {file.name: sha256(file) for file in self.files}

    def take(self, name: str, axes: int | None = None) -> Tensor:
        """Returns a tensor in float32 and marks it as read; raises UserError if it is not there,
        is not finite, or has not so many axes: by default those of a norm, a bias or a matrix."""
        if name not in self.tensors:
            raise UserError(f"{self.path}: got no tensor {name}, expected it in such a drafter")
        tensor = self.tensors.pop(name)
        expected = axes or (1 if "norm" in name or name.endswith(".bias") else 2)
        if tensor.dim() != expected:
            raise UserError(
                f"{self.path}: got {name} of shape {list(tensor.shape)}, expected {expected} axes"
            )
        if not tensor.is_floating_point() or not all(map(torch.isfinite, tensor.float().aminmax())):
            raise UserError(
                f"{self.path}: got {name} of {tensor.dtype} or with NaN or infinity, expected "
                "finite fractions"
            )
        return tensor.float()

    def require_all_read(self, harmless: Collection[str]) -> None:
        """Raises UnsupportedModelError if a tensor is left that changes what the drafter does."""
        left = sorted(name for name in self.tensors if not name.startswith(tuple(harmless)))
        if left:
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            raise UnsupportedModelError(
                f"{self.path}: got {', '.join(left[:SHOWN])}{more}, which no drafter that is "
                "supported has: it cannot be imported"
            )


def open_folder(path: Path) -> ForeignFolder:
    """Returns what a folder holds.

    Of PARD's drafters, which are opened as any language model is, it holds no tensors. Raises
    UserError if a file is missing or damaged, and UnsupportedModelError, before weights are read,
    for those of PARD-2; pickled files may hold tensors only.
    """
    config = foreign_json.read(path / "config.json", foreign_json.CONFIG)
    refused = next((key for key in PARD_2 if key in config), None)
    if refused is not None:
        raise UnsupportedModelError(
            f"{path}: got {refused} in the config, a drafter of PARD-2, expected another kind: a "
            "whole language model that reads the target's layers too is not supported yet"
        )
    if PARD in config:
        return ForeignFolder(path, [path / "config.json", *weight_files(path, None)], config, {})
    heads = [path / name for name in HEADS if (path / name).is_file()]
    files = heads[:1] or weight_files(path, None)
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(files, MEDUSA).items():
        short = name.removeprefix("model.")
        if tensors.setdefault(short, tensor) is not tensor:
            raise UserError(f"{path}: got tensors {short} and model.{short}, expected one of them")
    is_whole_model = not heads and "0.0.linear.weight" in tensors
    return ForeignFolder(path, [path / "config.json", *files], config, tensors, is_whole_model)


@dataclass
class Reading:
    """A drafter as it was read: our drafter's name, its config's fields and its weights.

    source: what messages about its weights name. said: what the reader decided, a line each.
    doubts: what the files do not tell; a wrong guess there costs accepted tokens and raises no
    error. others: other readings of the same weights, in words: the config's fields in which they
    differ. require_tokenizer: raises UserError if the target's tokenizer is not its own.
    """

    format: str
    name: str
    config: dict[str, Any]
    state: Mapping[str, Tensor] = field(default_factory=dict)
    source: str = ""
    draft_token_ids: Tensor | None = None
    said: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    require_tokenizer: Callable[[Any], None] = lambda tokenizer: None
