"""Holds the drafters, one file each, with Config, module, loss and export; see README.md."""

import importlib
from types import ModuleType

from spec_runtime.errors import UserError
from spec_runtime.proposers import BUILT_IN, PROPOSERS


def trainable() -> list[str]:
    """Returns the names of the drafters that can be trained, in the registration table's order."""
    return [name for name in PROPOSERS if name not in BUILT_IN]


def require_known(name: str) -> None:
    """Raises UserError, which lists the drafters that can be trained, unless this is one."""
    if name not in trainable():
        raise UserError(f"got drafter {name!r:.80}, expected one of {', '.join(trainable())}")


def load(name: str) -> ModuleType:
    """Returns a drafter's module, which has `Config` and `Drafter`.

    Raises UserError if the name is unknown.
    """
    require_known(name)
    return importlib.import_module(f"spec_export.drafters.{name}")
