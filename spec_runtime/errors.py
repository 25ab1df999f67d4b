"""Defines the errors that whoever calls specsplit can mend; any other exception is a bug."""

from __future__ import annotations


class UserError(ValueError):
    """Says in one line what was got, what was expected and what to do.

    The CLI prints it and exits with code 2; the server answers it with status 400. `param` names
    the option or field that is wrong, `code` is a stable name for the kind of error, such as
    "context_length_exceeded", and `hint` is what to do, where the message does not say it.
    """

    def __init__(
        self,
        message: object = "",
        *,
        param: str | None = None,
        code: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.hint = param, code, hint
