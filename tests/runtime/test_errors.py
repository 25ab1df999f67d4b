"""Checks the errors that callers tell apart."""

from __future__ import annotations

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
