"""Fixtures of more than one file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from workshop import Workshop

# Tests import onnxruntime themselves, too; see spec_runtime/backends/session.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to show, by `record_property("shown", …)`: a worker's own output is lost."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "shown":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(text))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Tiny targets, drafters and bundles."""
    pytest.importorskip("torch")
    from workshop import Workshop  # here: tests of the runtime alone need no torch

    return Workshop(tmp_path_factory.mktemp("workshop"))
