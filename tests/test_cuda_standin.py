"""Tests the stand-in for CUDA itself: what it refuses, notices and counts."""

from pathlib import Path

import pytest
from cuda_standin import StandIn
from cuda_standin.calls import Calls, read_calls

pytestmark = pytest.mark.standin

BEGIN = """
import ctypes, sys, threading
from cuda.bindings import runtime as cuda

cudart = ctypes.CDLL("libcudart.so.13")
_, stream = cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking)
modes, kinds = cuda.cudaStreamCaptureMode, cuda.cudaMemcpyKind
"""
ALLOCATE_MEANWHILE = """
def allocate():
    print(cuda.cudaMallocHost(64)[0].name)

cuda.cudaStreamBeginCapture(stream, modes[f"cudaStreamCaptureMode{sys.argv[1]}"])
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(cuda.cudaStreamEndCapture(stream)[0].name)
"""
WAIT_FOR_CAPTURED = """
cuda.cudaStreamBeginCapture(stream, modes.cudaStreamCaptureModeThreadLocal)
print(cuda.cudaStreamSynchronize(stream)[0].name)
print(cuda.cudaStreamEndCapture(stream)[0].name)
"""
COPY_BY_GRAPH = """
source, sink = (ctypes.c_byte * 4)(1, 2, 3, 4), (ctypes.c_byte * 4)()
_, device = cuda.cudaMalloc(4)
cuda.cudaStreamBeginCapture(stream, modes.cudaStreamCaptureModeThreadLocal)
cuda.cudaMemcpyAsync(device, ctypes.addressof(source), 4, kinds.cudaMemcpyHostToDevice, stream)
_, graph = cuda.cudaStreamEndCapture(stream)
_, executable = cuda.cudaGraphInstantiate(graph, 0)

def read():
    cuda.cudaMemcpy(ctypes.addressof(sink), device, 4, kinds.cudaMemcpyDeviceToHost)
    print(*sink)

read()
for text in (b"as captured", b"changed"):
    cudart.standin_mark(text)
    cuda.cudaGraphLaunch(executable, stream)
    read()
    source[0] = 9
"""
ALLOCATE = """
current, peak = ctypes.c_size_t(), ctypes.c_size_t()
_, first = cuda.cudaMalloc(1000)
_, second = cuda.cudaMalloc(200)
cuda.cudaMallocHost(30)
cuda.cudaFree(first)
cudart.standin_device_bytes(ctypes.byref(current), ctypes.byref(peak))
print(current.value, peak.value)
"""


def run(
    standin: StandIn, log: Path, program: str, *arguments: str
) -> tuple[list[str], dict[str, Calls]]:
    """Runs a program over the stand-in; returns the lines it prints, and the calls by mark."""
    done = standin.run("-c", BEGIN + program, *arguments, log=log)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), read_calls(log)


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
    printed, sections = run(standin, tmp_path / "log", ALLOCATE_MEANWHILE, mode)
    assert printed == [allocation, capture]
    expected = ["cudaMallocHost while another thread captures stream 1"] * (mode == "Global")
    assert sections[""].violations == expected


def test_waiting_for_a_stream_that_is_captured_spoils_the_capture(
    standin: StandIn, tmp_path: Path
) -> None:
    printed, sections = run(standin, tmp_path / "log", WAIT_FOR_CAPTURED)
    assert printed == ["cudaErrorStreamCaptureUnsupported", "cudaErrorStreamCaptureInvalidated"]
    (violation,) = sections[""].violations
    assert violation == "cudaStreamSynchronize on stream 1, which is being captured"


def test_a_captured_copy_happens_at_every_launch_and_its_source_is_watched(
    standin: StandIn, tmp_path: Path
) -> None:
    printed, sections = run(standin, tmp_path / "log", COPY_BY_GRAPH)
    assert printed == ["0 0 0 0", "1 2 3 4", "9 2 3 4"]
    assert sections[""].captured_copies == [("H2D", 4)]
    assert sections["as captured"].violations == []
    (violation,) = sections["changed"].violations
    assert violation == "a captured copy reads 4 bytes of the host that changed since the capture"


def test_counts_the_devices_memory(standin: StandIn, tmp_path: Path) -> None:
    printed, sections = run(standin, tmp_path / "log", ALLOCATE)
    assert printed == ["200 1200"]
    assert sections[""].device_bytes == 1200
