"""Hands out the metadata that stands under a GGUF file's architecture, each key once."""

import math
from typing import Any

from spec_export.imports.gguf.header import GGUFHeader
from spec_runtime.errors import UnsupportedModelError, UserError

HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")


class Keys:
    """Hands out the keys under the architecture's name, each once; `left` are those not read."""

    def __init__(self, header: GGUFHeader) -> None:
        self.prefix = f"{header.architecture}."
        self.left = {
            key.removeprefix(self.prefix): value
            for key, value in header.values.items()
            if key.startswith(self.prefix)
        }

    def number(self, name: str, default: float | None = None) -> Any:
        """Returns a finite number; a list with one for each layer has to repeat one number."""
        value = self.left.pop(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) not in (int, float) or not math.isfinite(value):
            expected = "one number for all layers" if isinstance(value, list) else "a number"
            raise self.refusal(name, "no such key" if value is None else value, expected)
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns an integer of 1 or more."""
        value = self.number(name, default)
        if type(value) is not int or value < 1:
            raise self.refusal(name, value, "1 or more")
        return value

    def require(self, name: str, allowed: tuple[float, ...]) -> None:
        """Raises UserError if the key is there with a value that is not one of `allowed`."""
        value = self.left.pop(name, allowed[0])
        if isinstance(value, list) or value not in allowed:
            raise self.refusal(name, value, " or ".join(map(str, allowed)))

    def require_none_left(self) -> None:
        """Raises UserError if a key has not been asked for that may change something."""
        unknown = sorted(set(self.left) - set(HARMLESS))
        if unknown:
            raise self.refusal(unknown[0], self.left[unknown[0]], "only keys that are known")

    def refusal(self, name: str, got: object, expected: str) -> UserError:
        return UnsupportedModelError(
            f"got {self.prefix}{name} {got!r:.40} in the GGUF file, expected {expected}: "
            "this model is not supported"
        )
