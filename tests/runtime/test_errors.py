"""Checks the errors that callers tell apart."""

import copy
import pickle

import pytest

from spec_runtime import BundleError, ContextLengthError, UnknownDrafterError, UserError

ERRORS = [
    UserError("got x", param="seed", code="invalid_value", hint="leave it out"),
    BundleError("got no manifest"),
    ContextLengthError(9, 8),
    UnknownDrafterError("medusa", ["eagle", "none"]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_passes_between_processes(error: UserError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\n\n"])
def test_an_error_is_one_line_whatever_it_repeats(end: str) -> None:
    """What a library says, a file's name, a text of a user: of errors of all kinds."""
    said = f"got a{end}b{end}"
    kinds = [UserError]
    for kind in kinds:  # and the kinds of each kind
        kinds += kind.__subclasses__()
    assert len(kinds) >= 5
    made = [kind(said) for kind in kinds if kind.__init__ is UserError.__init__]
    made += [UnknownDrafterError(f"a{end}b", ["c"]), ContextLengthError(9, 8, said)]
    for error in made:
        assert len(str(error).splitlines()) == 1, type(error)
        assert str(error).startswith("got ")
