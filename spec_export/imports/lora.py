"""Merges a LoRA adapter, as the library peft writes it, with its base model's tensors.

A tensor is read and merged in float32 when it is asked for, so that no more than one is held.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from spec_export.model import foreign_json
from spec_export.model.families import wrappers
from spec_runtime.errors import UnsupportedModelError, UserError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
NAME = re.compile(r"[\w.-]+", re.ASCII)  # of modules in each other
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Ends of the names of the tensors that change a module's weight, and what they are.
ROLES = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_embedding_A": "down",
    ".lora_embedding_B": "up",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
# Fields of the config that change what a merged model computes, where they are set, and that are
# not supported. `init_lora_weights` is looked at apart.
REFUSED = (
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# Ways to begin that leave the base as it is; the others, such as "pissa", take a part out of it.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """Says what an adapter was trained on and how its products are scaled."""

    base: str
    alpha: float
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor on the product of a module of this name."""
        ends = (f".{module}".endswith(f".{key}") for key in self.alpha_pattern)
        found = compress(self.alpha_pattern.values(), ends)
        return next(found, self.alpha) / (sqrt(rank) if self.is_rank_stabilised else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Reads an adapter's config; raises UserError if it is damaged or of a kind that is not
    supported."""
    path = folder / CONFIG
    said = foreign_json.read(path, foreign_json.ADAPTER)
    if said.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"{path}: got an adapter of type {said.get('peft_type')!r:.40}, expected LORA"
        )
    refused = next((field for field in REFUSED if said.get(field)), None)
    if refused is None and said.get("init_lora_weights") not in PLAIN_BEGINNINGS:
        refused = f"init_lora_weights = {said['init_lora_weights']!r:.40}"
    if refused:
        raise UnsupportedModelError(
            f"{path}: got an adapter with {refused}, which is not supported: merge it with its "
            "base by peft's merge_and_unload and save that"
        )
    if said.get("lora_alpha") is None:
        raise UserError(f"{path}: got no lora_alpha, expected a number")
    return AdapterConfig(
        base=said.get("base_model_name_or_path") or "",
        alpha=said["lora_alpha"],
        alpha_pattern=_by_name(said.get("alpha_pattern") or {}, path),
        is_rank_stabilised=bool(said.get("use_rslora")),
    )


def _by_name(pattern: Mapping[str, float], path: Path) -> dict[str, float]:
    """Returns the numbers by the ends of modules' names, which peft takes for regular expressions.

    Only plain names, with escaped dots, are read: a stranger's expression may take for ever.
    """
    names = {key: key.removeprefix("^").replace(r"\.", ".") for key in pattern}
    for key, name in names.items():
        if not NAME.fullmatch(name):
            raise UnsupportedModelError(
                f"{path}: got {key!r:.80} in alpha_pattern, expected names of modules: regular "
                "expressions are not run"
            )
    return {names[key]: alpha for key, alpha in pattern.items()}


class Adapter:
    """An adapter's tensors by the names that its base's model has for the tensors they change.

    Raises UserError for tensors that no LoRA adapter has.
    """

    def __init__(self, folder: Path, config: AdapterConfig, stored: Mapping[str, Tensor]) -> None:
        self.folder, self._config, self._stored = folder, config, stored
        self._replaced: dict[str, str] = {}  # tensors that are given whole, by name
        self._parts: dict[str, dict[str, str]] = {}  # changed tensors: their parts by role
        twice = "{}: got {} and {}, which are one tensor of the adapter, expected one of them"
        for stored_name in stored:
            name = wrappers.own_name(stored_name.removeprefix(PREFIX))
            end = next((end for end in ROLES if name.endswith(end)), None)
            if end is not None:
                weight = name.removesuffix(end) + ".weight"
                taken, key = self._parts.setdefault(weight, {}), ROLES[end]
            else:
                taken, key = self._replaced, re.sub(r"\.(base_layer|modules_to_save)\.", ".", name)
            if taken.setdefault(key, stored_name) != stored_name:
                raise UserError(twice.format(folder, taken[key], stored_name))

    @property
    def names(self) -> set[str]:
        """Names of the tensors that the adapter changes or replaces."""
        names = self._replaced.keys() | self._parts.keys()
        return {name for name in names if not wrappers.OTHER_PARTS.search(name)}

    def vocab_size(self) -> int | None:
        """Returns the rows of an embedding that is given whole, None if there is none."""
        name = self._replaced.get(EMBEDDING)
        return None if name is None else (*self._stored[name].shape, None)[0]

    def merged(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Returns the tensor of this name with the adapter's change; `read` reads the base's."""
        given = self._replaced.get(name)
        weight = read() if given is None else self._stored[given]
        parts = {
            role: self._stored[each].float() for role, each in self._parts.get(name, {}).items()
        }
        if not parts:
            return weight
        if not {"down", "up"} <= parts.keys():
            raise UserError(f"{self.folder}: got {name} with only a half of its LoRA matrices")
        down, up = parts["down"], parts["up"]
        is_table = self._parts[name]["down"].endswith("_A")  # an embedding's change is transposed
        shape = [*up.shape[:1], *down.shape[1:]]
        rank = list(up.shape[1:])
        fits = rank == list(down.shape[:1]) and prod(rank) > 0
        if not fits or shape[:: -1 if is_table else 1] != list(weight.shape):
            raise UserError(
                f"{self.folder} changes {name} by {list(up.shape)} x {list(down.shape)}, the base "
                f"model's is {list(weight.shape)}: expected the base it was trained on"
            )
        change = up @ down * self._config.scale(name.removesuffix(".weight"), len(down))
        weight = weight.float() + (change.T if is_table else change)
        if "magnitude" in parts:  # DoRA (Liu et al. 2024, eq. 5)
            along = int(not is_table)
            norms, magnitude = weight.norm(dim=along), parts["magnitude"].flatten()
            if magnitude.shape != norms.shape:
                raise UserError(
                    f"{self.folder}: got {len(magnitude)} magnitudes of {name}, expected "
                    f"{len(norms)}"
                )
            factor = magnitude / norms
            weight = weight * factor.unsqueeze(along)
        return weight

    def said(self) -> str:
        """Returns what is merged, such as "merged 56 matrices of the adapter path"."""
        whole = len(self._replaced.keys() - self._parts.keys())
        more = f" and took {whole} tensors" if whole else ""
        return f"merged {len(self._parts)} matrices{more} of the adapter {self.folder.name}"


class Merged(Mapping[str, "Tensor"]):
    """Maps the names of a base model's tensors to them with an adapter's changes.

    A head that is tied to the embedding stands for itself where the adapter changes either.
    unexpected: tensors of the adapter that the base does not have.
    """

    def __init__(self, base: Mapping[str, Tensor], adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        names = dict.fromkeys(base)
        if adapter.names & {EMBEDDING, HEAD} and EMBEDDING in names:
            names[HEAD] = None
        self._names = list(names)
        self.unexpected = adapter.names - names.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        own = EMBEDDING if name == HEAD and name not in self._base else name
        return self._adapter.merged(name, lambda: self._base[own])
