"""Defines the errors that a caller of specsplit can mend; any other exception is a bug."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class UserError(ValueError):
    """Says in one line what was got, what was expected and what to do.

    The CLI prints it and exits with code 2; the server answers it with status 400. `param` names
    the option or field that is wrong, `code` is a stable name for the kind of error, such as
    "context_length_exceeded", and `hint` is what to do on this machine, where the message does not
    say it: clients of the server are not told. Line breaks, of what a library or a file says,
    become spaces.
    """

    def __init__(
        self,
        message: object = "",
        *,
        param: str | None = None,
        code: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(" ".join(str(message).splitlines()))
        self.param, self.code, self.hint = param, code, hint

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[Any, ...]]:
        """Pickles the error with its fields, whatever its constructor takes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[UserError], args: tuple[Any, ...], fields: dict[str, Any]) -> UserError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ContextLengthError(UserError):
    """Says that a prompt is longer than the bundle's context; code "context_length_exceeded"."""

    def __init__(self, size: int, most: int, unit: str = "tokens") -> None:
        context = "the bundle's context"
        if unit != "tokens":
            context = f"as many as {context} can hold"
        super().__init__(
            f"got a prompt of {size} {unit}, expected at most {most}, {context}; shorten it or "
            "build with a larger --max-length",
            param="prompt",
            code="context_length_exceeded",
        )
        self.size, self.most, self.unit = size, most, unit


class UnknownDrafterError(UserError):
    """Says that a bundle has no drafter of this name; `known` lists those that it has."""

    def __init__(self, name: object, known: Sequence[str]) -> None:
        super().__init__(
            f"got drafter {name!r:.80}, expected one of {', '.join(known)}",
            param="drafter",
            code="unknown_drafter",
        )
        self.known = tuple(known)


class OutOfMemoryError(UserError):
    """Says that memory ended, on the device or the host; code "out_of_memory"."""

    def __init__(self, what: str, reason: object) -> None:
        super().__init__(
            f"got no memory {what} ({reason}): end other programs there, decode fewer answers "
            "together (--parallel), take a shorter --context, or a bundle of smaller precision",
            code="out_of_memory",
        )


class DeviceLostError(RuntimeError):
    """Says that a GPU's context is broken: every further call of this process there fails."""


class UnsupportedModelError(UserError):
    """Says why a checkpoint's model cannot be exported; code "unsupported_model"."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unsupported_model")
