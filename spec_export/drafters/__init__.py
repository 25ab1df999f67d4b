"""Drafters: one file each, holding Config, module, loss and export signature. See README.md on
adding one."""

from __future__ import annotations

import importlib
from types import ModuleType

from spec_runtime.proposers import BUILT_IN, PROPOSERS


def trainable() -> list[str]:
    """Names of the drafters that can be trained, in the registration table's order."""
    return [name for name in PROPOSERS if name not in BUILT_IN]


def load(name: str) -> ModuleType:
    """The module of one drafter: `Config`, `Drafter`. ValueError if the name is unknown."""
    if name not in trainable():
        raise ValueError(f"got drafter {name!r}, expected one of {', '.join(trainable())}")
    return importlib.import_module(f"spec_export.drafters.{name}")
