"""Fixtures of more than one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Tiny targets, drafters and bundles."""
    pytest.importorskip("torch")
    from workshop import Workshop  # here: tests of the runtime alone need no torch

    return Workshop(tmp_path_factory.mktemp("workshop"))
