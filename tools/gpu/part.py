"""Runs one part of tools/gpu/check.py, which starts this file as a process of its own.

    python -m tools.gpu.part ASKED.json RESULT.json

The result is written anew after every row, so that a part that is killed leaves what it had found.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.libraries import load_libraries
from spec_runtime.backends.session import ort
from spec_runtime.bundle import manifest as bundles
from spec_runtime.files.machine import cpu_model, default_threads, versions
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts
from tools.gpu import kernels, others, same, speed
from tools.gpu.job import REAL, SMALL, TOY, Check, label, needed
from tools.gpu.report import Findings, LeftOut, TableRow, as_json, one_line, write_whole

GRACE = 30  # seconds after which a part that nobody has killed ends itself


def environment(check: Check, found: Findings) -> None:
    """Reports what the rest is measured on."""
    packages = ("torch", "cuda-bindings", "tensorrt-rtx-cu13-libs")
    about = {"device asked for": check.device, "CPU": f"{cpu_model()}, {default_threads()} threads"}
    about |= versions((*provenance.PACKAGES, *packages))
    about["providers"] = ", ".join(ort.get_available_providers())
    about["CUDA's libraries"] = f"missing: {', '.join(load_libraries()) or 'none'}"
    about["GPU"] = found.attempt("GPU", _gpu) or "no GPU that nvidia-smi names"
    for what, value in about.items():
        found.add({"what": what, "value": value})
    used = f"no GPU was used ({about['CPU']})" if check.device == "cpu" else about["GPU"]
    found.figure = f"{used}; onnxruntime {about.get('onnxruntime', 'unknown')}"


def _gpu() -> str:
    fields = "name,driver_version,memory.total,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LeftOut(one_line(error)) from error
    return "; ".join(done.stdout.splitlines())


def bundle(check: Check, found: Findings) -> None:
    """Reads the bundles that were given and checks their hashes, or builds one."""
    given = check.given
    if not given:
        made = found.attempt("inflating a target", _inflate, check)
        given = [] if made is None else [made]
    for path in given:
        opened = found.attempt(path.name, bundles.read, path)
        if opened is not None:
            check.opened.append(opened)
            drafters = [drafter.name for drafter in opened.manifest.drafters]
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.add({"bundle": label(opened), "MB": size / 1e6, "drafters": ", ".join(drafters)})
    found.figure = ", ".join(label(opened) for opened in check.opened)


def _inflate(check: Check) -> Path:
    for package in ("torch", "transformers", "onnxscript"):
        needed(package)
    from tools.gpu import inflate

    return inflate.bundle(check)


PARTS: dict[str, Callable[[Check, Findings], None]] = {
    "environment": environment,
    "bundle": bundle,
    "kernels": kernels.kernels,
    "losslessness": same.losslessness,
    "verify": speed.verify,
    "bench": speed.bench_all,
    "lanes": same.lanes,
    "torch": others.with_torch,
    "genai": others.with_genai,
}


def read_job(asked: TableRow) -> Check:
    """Makes what a part is given; raises ValueError for prompts that cannot be read."""
    carried, sizes = asked["carried"], TOY if asked["toy"] else REAL
    if asked["small"]:
        sizes = dataclasses.replace(sizes, bundle=SMALL)
    prompts = read_prompts(Path(asked["prompts"]), sizes.num_prompts)
    check = Check([], prompts, asked["device"], sizes, Path(asked["work"]))
    check.limits, check.kept = carried.get("limits", {}), carried.get("kept", {})
    check.model, check.drafter = asked["model"], asked["drafter"]
    check.given = [Path(path) for path in asked["bundles"]]
    check.opened = [bundles.read(Path(path), False) for path in carried.get("bundles", [])]
    return check


def with_memory(check: Check, found: Findings, part: Callable[[Check, Findings], None]) -> None:
    """Runs a part, and adds how much of the device's memory it has in the end."""
    device = Cuda.open() if check.device == "cuda" and part is not environment else None
    before = 0 if device is None else device.free_bytes
    part(check, found)
    if device is not None and any(found.tables.values()):
        used = (before - device.free_bytes) / 1e9
        found.add({"GB": used}, "device memory")
        found.figure += f"; {used:.2f} GB of the device"


def run_part(asked: TableRow, result: Path) -> None:
    """Runs the part that is asked for and writes its findings to `result`."""
    begin = time.monotonic()
    carried: TableRow = {}

    def save(found: Findings) -> None:
        entry = found.as_dict(time.monotonic() - begin)
        answer = {"entry": entry, "doing": found.doing, "carried": carried}
        write_whole(result, as_json(answer))

    found = Findings(begin + asked["seconds"] * 2 / 3, asked["dry_run"], save)
    name = asked["part"]
    check = found.attempt(name, read_job, asked)
    if check is not None:
        found.attempt(name, with_memory, check, found, PARTS[name])
        carried |= {"limits": check.limits, "kept": check.kept}
        if name == "bundle":
            carried["bundles"] = [str(opened.path) for opened in check.opened]
            carried["labels"] = [label(opened) for opened in check.opened]
        if name == "environment":
            carried["measured_on"] = found.figure
            carried["provenance"] = _provenance(asked)
    save(found)


def _provenance(asked: TableRow) -> TableRow:
    sys.argv = asked["command"]  # of the command, in place of this process's own
    return provenance.collect(prompts_file=Path(asked["prompts"]))


def main() -> None:
    """Runs the part that the first file asks for, and writes the second."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.alarm(round(asked["seconds"]) + GRACE)  # if whoever should kill it was killed
    run_part(asked, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
