"""Runs one part of tools/gpu_check.py, which starts this file as a process of its own.

    python gpu_part.py ASKED.json RESULT.json

The result is written anew after every row, so that a part that is killed leaves what it had found.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_graphs
import gpu_report
import gpu_same
import gpu_speed
from gpu_graphs import BACKEND_FOR
from gpu_job import RANDOM_PROMPTS, REAL, TOY, Check, fused_names, graphs_of, label
from gpu_report import Findings, LeftOut, TableRow

from spec_runtime import backends
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts

GRACE = 30  # seconds after which a part that nobody has killed ends itself

# ---------------------------------------------------------------------------------- environment


def environment(check: Check, found: Findings) -> None:
    """Reports what the rest is measured on."""
    for what, ask in MACHINE.items():
        value = found.attempt(what, ask)
        if value is not None:
            found.add({"what": what, "value": value})
    found.add({"what": "device asked for", "value": check.device})
    about = {row["what"]: row["value"] for row in found.tables["measured"]}
    found.figure = f"{about.get('GPU', 'no GPU named')}, {about.get('onnxruntime', '')}"


def _gpu() -> str:
    fields = "name,driver_version,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LeftOut(gpu_report.one_line(error)) from error
    return "; ".join(done.stdout.splitlines())


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _onnxruntime() -> str:
    from spec_runtime.backends.session import ort

    return f"onnxruntime {ort.__version__}: {', '.join(ort.get_available_providers())}"


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        raise LeftOut(gpu_report.one_line(error)) from error
    return f"{torch.__version__}, CUDA {'usable' if torch.cuda.is_available() else 'not usable'}"


def _bindings() -> str:
    for name in ("cuda-bindings", "cuda-python"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise LeftOut("cuda-bindings is not installed: every run and copy is waited for")


def _libraries() -> str:
    folders = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    names = {file.name for folder in folders if folder.name for file in folder.glob("libcu*.so.*")}
    return ", ".join(sorted(names)) or "none on LD_LIBRARY_PATH: the system's, if there are any"


MACHINE: dict[str, Callable[[], str]] = {
    "GPU": _gpu,
    "CPU": _cpu,
    "python": platform.python_version,
    "onnxruntime": _onnxruntime,
    "CUDA's Python bindings": _bindings,
    "CUDA's libraries": _libraries,
    "torch": _torch,
}


def measured_on(device: str, found: Findings) -> str:
    """Returns the line that says what the figures were measured on."""
    about = {row["what"]: row["value"] for row in found.tables.get("measured", [])}
    engine = about.get("onnxruntime", "onnxruntime unknown").partition(":")[0]
    if device == "cpu":
        return f"No GPU was used ({about.get('CPU', 'unknown CPU')}; {engine})"
    return f"{about.get('GPU', 'No GPU that nvidia-smi names')}; {engine}"


# --------------------------------------------------------------------------------------- bundle


def bundle(check: Check, found: Findings) -> None:
    """Reads the bundles that were given and checks their hashes, or builds one."""
    given = check.given
    if not given:
        made = found.attempt("building a random target's bundle", _build, check)
        given = [] if made is None else [made]
    for path in given:
        opened = found.attempt(path.name, bundles.read, path)
        if opened is not None:
            check.opened.append(opened)
            drafters = [drafter.name for drafter in opened.manifest.drafters]
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            row = {"bundle": label(opened), "MB": size / 1e6, "drafters": ", ".join(drafters)}
            found.add(row | {"fused steps": ", ".join(fused_names(opened)) or None})
    found.figure = ", ".join(label(opened) for opened in check.opened)


def _build(check: Check) -> Path:
    gpu_speed.require_export()
    return gpu_graphs.random_bundle(check.work, check.sizes.bundle, check.device)


# ---------------------------------------------------------------------------------------- opens


def opens(check: Check, found: Findings) -> None:
    """Opens every graph on the device, one after the other."""
    for opened in check.opened:
        for name, (graph, _) in graphs_of(opened).items():
            _open_one(check, found, opened, name, graph)
        for name in fused_names(opened):
            _open_one(check, found, opened, f"fused {name}", None)
    rows = found.tables.get("measured", [])
    taken = sum(row["CUDA graphs"] == "yes" for row in rows)
    found.figure = f"{len(rows)} sessions"
    if check.device == "cuda":
        found.figure += f", {taken} with CUDA graphs"
    found.note = (
        "Seconds include making the buffers. A session without CUDA graphs runs all the same; "
        "the reason is ONNX Runtime's."
    )


def _open_one(
    check: Check,
    found: Findings,
    opened: bundles.Bundle,
    name: str,
    graph: bundles.Graph | None,
) -> None:
    """Opens a graph, or the fused step `name` where `graph` is None."""
    with warnings_of("spec_runtime") as warnings:
        what = f"{label(opened)}, {name}"
        if graph is None:
            seconds = found.attempt(what, _open_fused, check, opened, name)
        else:
            seconds = found.attempt(what, _open, check, opened, graph)
    if seconds is not None:
        has_graphs = "-" if check.device == "cpu" else "no" if warnings else "yes"
        row = {"bundle": label(opened), "graph": name, "seconds": seconds}
        found.add(row | {"CUDA graphs": has_graphs, "reason": "; ".join(warnings) or None})


def _open(check: Check, opened: bundles.Bundle, graph: bundles.Graph) -> float:
    """Opens a graph and returns the seconds it took."""
    target = opened.manifest.target
    runtime = backends.Runtime(BACKEND_FOR[check.device])
    begin = time.monotonic()
    backends.open_graph(opened, graph, target.max_length + target.scratch, runtime)
    return time.monotonic() - begin


def _open_fused(check: Check, opened: bundles.Bundle, name: str) -> float:
    """Opens a fused step with all that it needs and returns the seconds it took."""
    begin = time.monotonic()
    engine = check.engine(opened, name)
    check.close()
    if engine.fused is None:
        raise ValueError(f"got an engine without a fused step, expected {name}")
    return time.monotonic() - begin


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Collects what is logged meanwhile as a warning or worse."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(logger).removeHandler(handler)


# ----------------------------------------------------------------------------------------- main

PARTS: dict[str, Callable[[Check, Findings], None]] = {
    "environment": environment,
    "bundle": bundle,
    "opens": opens,
    "parity": gpu_same.parity,
    "losslessness": gpu_same.losslessness,
    "capture": gpu_same.capture,
    "bench": gpu_speed.bench_shipped,
    "drafters": gpu_speed.bench_others,
    "attention": gpu_speed.attention,
    "tensorrt": gpu_same.tensorrt,
    "shapes": gpu_speed.shapes,
}


def read_job(asked: TableRow) -> Check:
    """Makes what a part is given; raises ValueError for prompts that cannot be read."""
    carried, sizes = asked["carried"], TOY if asked["toy"] else REAL
    prompts = RANDOM_PROMPTS[: sizes.num_prompts]
    if asked["prompts"] is not None:
        prompts = read_prompts(Path(asked["prompts"]), sizes.num_prompts)
    check = Check([], prompts, asked["device"], sizes, Path(asked["work"]))
    check.limits |= carried.get("limits", {})
    check.lengths |= {name: tuple(pair) for name, pair in carried.get("lengths", {}).items()}
    check.attention = carried.get("attention", check.attention)
    check.given = [Path(path) for path in asked["bundles"]]
    check.opened = [bundles.read(Path(path), False) for path in carried.get("bundles", [])]
    return check


def run_part(asked: TableRow, result: Path) -> None:
    """Runs the part that is asked for and writes its findings to `result`."""
    begin = time.monotonic()
    carried: TableRow = {}

    def save(found: Findings) -> None:
        entry = found.as_dict(time.monotonic() - begin)
        answer = {"entry": entry, "doing": found.doing, "carried": carried}
        gpu_report.write_whole(result, gpu_report.as_json(answer))

    found = Findings(begin + asked["seconds"] * 2 / 3, asked["dry_run"], save)
    name = asked["part"]
    check = found.attempt(name, read_job, asked)
    if check is not None:
        found.attempt(name, PARTS[name], check, found)
        carried["limits"], carried["lengths"] = check.limits, check.lengths
        carried["attention"] = check.attention
        if name == "bundle":
            carried["bundles"] = [str(opened.path) for opened in check.opened]
            carried["labels"] = [label(opened) for opened in check.opened]
        if name == "environment":
            carried["measured_on"] = measured_on(asked["device"], found)
            carried["provenance"] = _provenance(asked)
    save(found)


def _provenance(asked: TableRow) -> TableRow:
    sys.argv = asked["command"]  # of the command, in place of this process's own
    prompts: Any = None if asked["prompts"] is None else Path(asked["prompts"])
    about = provenance.collect(prompts_file=prompts)
    return {**about, "wheels": asked["wheels"]}


def main() -> None:
    """Runs the part that the first file asks for, and writes the second."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.alarm(round(asked["seconds"]) + GRACE)  # if whoever should kill it was killed
    run_part(asked, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
