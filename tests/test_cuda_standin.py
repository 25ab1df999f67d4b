"""Tests every graph over the stand-in for CUDA: does it open, is it captured, what does it cost?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cuda_standin import StandIn

pytestmark = pytest.mark.standin

CAPTURE = """
import sys, threading
from cuda.bindings import runtime as cuda

def check(result):
    assert result[0] == cuda.cudaError_t.cudaSuccess, result[0]
    return result[1] if len(result) > 1 else None

def allocate():
    print(cuda.cudaMallocHost(64)[0].name)

_, stream = cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking)
mode = cuda.cudaStreamCaptureMode[f"cudaStreamCaptureMode{sys.argv[1]}"]
check(cuda.cudaStreamBeginCapture(stream, mode))
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(cuda.cudaStreamEndCapture(stream)[0].name)
"""


@pytest.mark.parametrize(
    ("mode", "allocation", "capture"),
    [
        ("Global", "cudaErrorStreamCaptureUnsupported", "cudaErrorStreamCaptureInvalidated"),
        ("ThreadLocal", "cudaSuccess", "cudaSuccess"),
    ],
)
def test_another_threads_allocation_spoils_a_capture_of_global_mode_alone(
    standin: StandIn, tmp_path: Path, mode: str, allocation: str, capture: str
) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE, mode],
        env=standin.environment(log),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [allocation, capture]
    violations = [line for line in log.read_text().splitlines() if line.startswith("violation")]
    assert bool(violations) == (mode == "Global")
    assert all("cudaMallocHost while another thread captures" in line for line in violations)
