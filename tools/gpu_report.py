"""Collects what the sections of tools/gpu_check.py find and writes it as JSON and Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spec_runtime.cli.options import write_figures
from spec_runtime.files import write_atomically
from spec_runtime.measure import provenance

T = TypeVar("T")
TableRow = dict[str, Any]  # by column
# Says that the machine, a package or a file does not allow something. Whatever else ends a section
# is a fault of the code, and so is a FAULT that ends a piece of one.
REFUSALS = (ValueError, ImportError, OSError)
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


@dataclass
class Findings:
    """What a section brought: tables by name, pieces that could not run, and failures.

    `failures` are checks that failed and crashes. No further piece is begun after `deadline`, a
    value of time.monotonic().
    """

    deadline: float
    tables: dict[str, list[TableRow]] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    note: str = ""

    def add(self, row: TableRow, table: str = "measured") -> None:
        self.tables.setdefault(table, []).append(row)

    def miss(self, what: str, why: str) -> None:
        self.missing.append({"what": what, "why": why})

    def crash(self, what: str, error: Exception) -> None:
        """Notes a fault of the code as a failure; the traceback goes to stderr."""
        traceback.print_exception(error, file=sys.stderr)
        self.failures.append(f"{what} crashed: {one_line(error)}")

    def run_section(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        """Calls `work`. A refusal is noted as the reason why the section could not run, anything
        else that it raises as a crash."""
        try:
            work(*arguments)
        except REFUSALS as error:
            self.miss(name, one_line(error))
        except Exception as error:
            self.crash(name, error)

    def attempt(self, what: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what one piece of a section returns, or None if it raises or the time is over.

        The reason is noted and the section goes on. A piece may fail for reasons of the machine
        (no memory, no kernel), so that only FAULTS count as crashes.
        """
        if time.monotonic() > self.deadline:
            self.miss(what, "left out: the time was over")
            return None
        try:
            return work(*arguments)
        except FAULTS as error:
            self.crash(what, error)
        except Exception as error:
            self.miss(what, one_line(error))
        return None

    @property
    def status(self) -> str:
        if self.failures:
            return "failed"
        return "passed" if any(self.tables.values()) else "could not run"

    def as_dict(self, seconds: float) -> TableRow:
        return {
            "status": self.status,
            "seconds": round(seconds, 2),
            "note": self.note,
            "tables": self.tables,
            "missing": self.missing,
            "failures": self.failures,
        }


def left_out(why: str) -> TableRow:
    """Returns the entry of a section that was not begun."""
    found = Findings(0.0)
    found.miss("the section", why)
    return found.as_dict(0.0) | {"status": "left out"}


def one_line(error: BaseException) -> str:
    """Returns the error's text, after its type unless it is a ValueError, which says all."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def finite(value: Any) -> float | None:
    """Returns the number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None


def _gpu() -> str:
    fields = "name,driver_version,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return "; ".join(done.stdout.splitlines())


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _onnxruntime() -> str:
    from spec_runtime.backends.session import ort

    return f"{ort.__version__}: {', '.join(ort.get_available_providers())}"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, CUDA {'usable' if torch.cuda.is_available() else 'not usable'}"


MACHINE: dict[str, Callable[[], str]] = {
    "GPU": _gpu,
    "CPU": _cpu,
    "python": platform.python_version,
    "onnxruntime": _onnxruntime,
    "torch": _torch,
}


def measured_on(device: str, environment: TableRow) -> str:
    """Returns the line under every heading, which says what the figures were measured on."""
    rows = environment["tables"].get("measured", [])
    about = {row["what"]: row["value"] for row in rows}
    engine = f"onnxruntime {about.get('onnxruntime', 'unknown').partition(':')[0]}"
    if device == "cpu":
        return f"CPU dry run: no GPU was used ({about.get('CPU', 'unknown CPU')}; {engine})"
    return f"{about.get('GPU', 'a GPU of unknown name')}; {engine}"


def write(figures: TableRow, json_file: Path, markdown_file: Path) -> None:
    write_figures(json_file, {"provenance": provenance.collect(), **figures})
    write_atomically(markdown_file, as_markdown(figures))


def as_markdown(figures: TableRow) -> str:
    """Returns the report: a part for each section, with the line of `measured_on`."""
    verdict = "A check FAILED" if figures["exit_code"] else "No check failed"
    lines = [
        "# GPU check" + (", toy sizes" if figures["toy"] else ""),
        "",
        f"Bundles: {', '.join(figures['bundles'])}. {verdict}; {figures['seconds']:.0f} s in all.",
    ]
    for name, section in figures["sections"].items():
        lines += ["", f"## {name}: {section['status']}", ""]
        lines.append(f"{figures['measured_on']}. {section['seconds']:.1f} s.")
        if section["note"]:
            lines += ["", section["note"]]
        for title, rows in section["tables"].items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", f"*{title}*", "", f"| {' | '.join(columns)} |"]
            lines.append("|---" * len(columns) + "|")
            for row in rows:
                lines.append(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |")
        if section["failures"] or section["missing"]:
            lines.append("")
        lines += [f"- FAILED: {failure}" for failure in section["failures"]]
        lines += [f"- not run: {each['what']}: {each['why']}" for each in section["missing"]]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
