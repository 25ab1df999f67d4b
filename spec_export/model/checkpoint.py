"""Reads a checkpoint's tensors one at a time, under the names and in the form that transformers'
models have them.

All classes here map names to tensors, read a tensor each time it is asked for, and keep none.
"""

import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spec_export.model import annex
from spec_export.model.families import wrappers
from spec_runtime.errors import UserError

# Old checkpoints hold these buffers, which are computed from the config today. Some files hold
# Medusa's heads, which `spec-export import` reads.
HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias)$|^medusa_head\.")
SHOWN = 3  # names that a message lists


def outline(config: Any) -> Any:
    """Returns the transformers causal LM of a config, whose tensors have no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def first_names(model: Any) -> dict[str, str]:
    """Returns for each name of a model's tensors the first one of the same tensor: a tied head is
    known by its embedding's name."""
    first: dict[int, str] = {}
    parameters = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(each), name) for name, each in parameters.items()}


class SafetensorsFiles(Mapping[str, Tensor]):
    """Maps names to the tensors of safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the names; raises what the library does for damaged files, and UserError for a
        tensor that two of them hold."""
        self._file_of: dict[str, Path] = {}
        for path in files:
            with safe_open(str(path), "pt") as opened:
                _note_names(self._file_of, opened.keys(), path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(str(self._file_of[name]), "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def read_pickled(files: Iterable[Path]) -> dict[str, Tensor]:
    """Returns the tensors of .bin files, whose numbers stay on the disk until they are needed.

    Those of a file in torch's old format are in memory. Raises what torch does for a file that is
    damaged or holds more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    file_of: dict[str, Path] = {}
    for path in files:
        is_mapped = zipfile.is_zipfile(path)
        state = torch.load(path, "cpu", weights_only=True, mmap=is_mapped)
        if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
            raise UserError(f"{path}: got no mapping of names to tensors, expected a state dict")
        _note_names(file_of, state, path)
        tensors |= state
    return tensors


def _note_names(file_of: dict[str, Path], names: Iterable[str], path: Path) -> None:
    """Notes which file holds these tensors; raises UserError for a name that is not fit for
    messages, or that an earlier file holds too."""
    for name in map(str, names):
        if len(name) > annex.gguf_header.MAX_NAME or not name.isprintable():
            raise UserError(
                f"{path} holds a tensor of a name of {len(name)} characters, expected at most "
                f"{annex.gguf_header.MAX_NAME} that can be printed: {name!r:.40}...; download or "
                "convert it again"
            )
        if name in file_of:
            raise UserError(
                f"got tensor {name} in {file_of[name]} and in {path}, expected it in one of them: "
                "they are not of one model; download it again"
            )
        file_of[name] = path


class ModelTensors(Mapping[str, Tensor]):
    """Maps the names of a transformers model to tensors made of a checkpoint's.

    They are made as transformers makes them: renamed, and matrices of experts stacked. unexpected:
    names the tensors that the model does not have.
    """

    def __init__(self, stored: Mapping[str, Tensor], model: Any) -> None:
        """model: only its names and config are read, none of its tensors."""
        from transformers import conversion_mapping, core_model_loading

        self._stored, self._model = stored, model
        known = model.state_dict()
        transforms = conversion_mapping.get_model_conversion_mapping(model, wrappers.OWN_NAMES)
        renaming, converter = core_model_loading.WeightRenaming, core_model_loading.WeightConverter
        renamings = [each for each in transforms if isinstance(each, renaming)]
        wrapper = getattr(model.config, "wrapper", None)
        transforms += conversion_mapping.get_checkpoint_conversion_mapping(wrapper) or []
        converters = [each for each in transforms if isinstance(each, converter)]
        self._converters: dict[str | None, Any] = {
            key: each for each in converters for key in each.source_patterns
        }
        # of each tensor the names of its parts, with the pattern of the converter that takes them
        self._parts: dict[str, list[tuple[str | None, str]]] = {}
        rename = core_model_loading.rename_source_key
        for name in sorted(stored, key=core_model_loading.dot_natural_key):
            made, pattern = rename(name, renamings, converters, model.base_model_prefix, known)
            if made not in known and name in known:
                made, pattern = name, None
            self._parts.setdefault(made, []).append((pattern, name))
        for name, first in first_names(model).items():
            if name in self._parts:  # a tied head may stand for its embedding
                self._parts.setdefault(first, self._parts[name])
        twice = {
            name for parts in self._parts.values() for pattern, name in parts[1:] if pattern is None
        }
        self.unexpected = twice | {
            name
            for name in self._parts.keys() - known.keys()
            if not HARMLESS.search(name) and not wrappers.OTHER_PARTS.search(name)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        (pattern, stored_name), *_ = parts = self._parts[name]
        if pattern is None:
            return self._stored[stored_name]
        converter: Any = deepcopy(self._converters[pattern])
        for pattern, stored_name in parts:
            converter.add_tensor(name, stored_name, pattern, self._stored[stored_name])
        made = converter.convert(name, model=self._model, config=self._model.config)
        tensor: Tensor = made[name]
        return tensor


class Sound(Mapping[str, Tensor]):
    """Maps the names of `shapes` to tensors; raises UserError for one that is not sound, see
    `require_sound`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], where: Path
    ) -> None:
        self._tensors, self.shapes, self._where = tensors, shapes, where

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors[name]
        require_sound(self._where, {name: found}, self.shapes)
        return found

    def whole(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Returns all tensors in this type, with memory of their own; a UserError names the first
        of all that are wrong."""
        tensors = {}
        for name in self.shapes:
            each = self._tensors[name]
            tensors[name] = each.to(dtype if each.is_floating_point() else each.dtype, copy=True)
        require_sound(self._where, tensors, self.shapes)
        return tensors


def require_sound(
    where: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> None:
    """Raises UserError unless all tensors have these shapes and are finite."""
    wrong = {
        f"{name} {list(tensor.shape)} instead of {list(shapes[name])}"
        for name, tensor in tensors.items()
        if tensor.shape != shapes[name]
    }
    require_none(where, "the weights hold", "of another shape than the config's", wrong)
    wrong = {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    require_none(where, "the weights hold", "of whole or complex numbers", wrong)
    wrong = {
        name
        for name, tensor in tensors.items()
        # without a copy of the tensor; both bounds are NaN if any of it is
        if not all(torch.isfinite(bound) for bound in tensor.aminmax())
    }
    require_none(where, "the weights hold", "with NaN or infinity", wrong)


def require_none(where: Path, whose: str, what: str, names: Collection[str]) -> None:
    """Raises UserError that says how many tensors are wrong and names the first of them."""
    if names:
        shown = sorted(names)[:SHOWN]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        raise UserError(
            f"{where}: {whose} {tensors} {what}: {', '.join(shown)}{more}; check that config and "
            "weights are of one model, and whole"
        )
