"""Checks the command for a GPU machine: its processes, what its parts find on the CPU, what makes
it fail, and a whole run over the stand-in for CUDA."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from spec_runtime import backends
from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop import generate
from tools.gpu import check as gpu_check
from tools.gpu import report
from tools.gpu.report import Findings, LeftOut

pytest.importorskip("torch")
from workshop import Workshop

from tools.gpu import carry, job, same
from tools.gpu import part as gpu_part

if TYPE_CHECKING:
    from cuda_standin import StandIn

NAMES = ["parallelspec", "prompt_lookup"]


# ---- processes ----

# Takes the place of part.py: what each part does is said by its name.
FAKE_PART = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
from tools.gpu import report

asked, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
name, carried = asked["part"], {}

def save(found):
    answer = {"entry": found.as_dict(1.0), "doing": found.doing, "carried": carried}
    report.write_whole(result, report.as_json(answer))

def crash():
    faulthandler.disable()  # whose last line names this file
    os.kill(os.getpid(), signal.SIGSEGV)

found = report.Findings(on_change=save)
found.add({"what": "found before"})
if name == "bundle":
    carried = {"bundles": ["there"], "labels": ["toy"], "limits": {"there": 0.5}}
if name == "verify":
    found.attempt("the target", crash)
if name == "lanes":
    print("about to hang", flush=True)
    time.sleep(60)
if name == "losslessness":
    found.fail(f"limits {asked['carried']['limits']}")
if name == "torch":
    sys.exit("no such thing")
found.figure = "all of it"
save(found)
"""


@pytest.fixture
def fake_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake_part.py"
    script.write_text(FAKE_PART)
    monkeypatch.setattr(gpu_check, "PART", [str(script)])
    monkeypatch.setattr(gpu_check, "MIN_SECONDS", 0.1)

    def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
        """Has the time of what hangs pass once it does."""
        log = tmp_path / "out" / "log.txt"
        while (code := process.poll()) is None:
            if log.read_bytes().endswith(b"about to hang\n"):
                raise subprocess.TimeoutExpired(process.args, seconds)
            time.sleep(0.01)
        return code

    monkeypatch.setattr(subprocess.Popen, "wait", wait)


TOY = ("--toy", "--model", "there", "--drafter", "there")


def call(out: Path, *words: object) -> tuple[int, dict[str, Any]]:
    """Runs the command in this process; returns its exit code and what it wrote."""
    code = gpu_check.main([str(word) for word in ("--out", out, *words)])
    figures = json.loads((out / "results.json").read_text())
    assert figures["exit_code"] == code
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.json"]
    return code, figures


def test_a_crash_and_a_hang_lose_their_own_part_alone(
    fake_parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, figures = call(tmp_path / "out", *TOY)
    assert code == 1
    parts = figures["parts"]
    statuses = {name: part["status"] for name, part in parts.items()}
    failed = {name for name, status in statuses.items() if status == "FAILED"}
    assert failed == {"verify", "losslessness", "lanes", "torch"}
    assert {statuses[name] for name in statuses if name not in failed} == {"ok"}
    last = "the last line of log.txt"
    expected = {
        "verify": f"the target: the process was ended by SIGSEGV; {last}: ==== verify ====",
        "lanes": f"was still running after 90 s and was killed; {last}: about to hang",
        "losslessness": "limits {'there': 0.5}",  # handed on by an earlier part
        "torch": f"the process ended with exit code 1; {last}: no such thing",
    }
    assert {name: parts[name]["failures"] for name in failed} == {
        name: [text] for name, text in expected.items()
    }
    for part in parts.values():  # whatever was found before is kept
        assert part["tables"] == {"measured": [{"what": "found before"}]}
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "about to hang" in log
    assert "no such thing" in log
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu_check.SECONDS)
    assert re.fullmatch(r"verify +FAILED +\d+\.\d s  the target: the process was .*", lines[3])
    assert re.fullmatch(r"bench +ok +\d+\.\d s  all of it", lines[4])


def test_parts_are_left_out_when_time_is_over_or_a_bundle_is_missing(
    fake_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, figures = call(tmp_path / "out", *TOY, "--parts", "environment", "bench")
    reasons = {
        n: each["missing"][0]["why"] for n, each in figures["parts"].items() if each["missing"]
    }
    assert code == 0
    ran = {"environment", "bundle", "bench"}  # the bundle, since bench needs it
    assert reasons == dict.fromkeys(set(gpu_check.SECONDS) - ran, "not asked for")
    monkeypatch.setattr(gpu_check, "PART", [str(tmp_path / "missing.py")])
    code, figures = call(tmp_path / "out", *TOY, "--parts", "bundle", "verify")
    assert code == 1
    assert figures["parts"]["verify"]["missing"][0]["why"] == "there is no bundle"
    assert "exit code 2" in figures["parts"]["bundle"]["failures"][0]
    code, figures = call(tmp_path / "out", *TOY, "--minutes", "0.0001")
    whys = {each["missing"][0]["why"] for each in figures["parts"].values()}
    assert (code, whys) == (0, {"the 0.0001 minutes were over"})


def test_what_a_part_started_is_killed_with_it() -> None:
    """Both hold the pipe, which therefore ends with the last of them."""
    reads, writes = os.pipe()
    forked = "import os, time; os.fork(); time.sleep(60); print('alive')"
    ended = gpu_check.run_limited([sys.executable, "-c", forked], {}, 0.5, writes)
    os.close(writes)
    assert "was killed" in str(ended)
    with open(reads) as pipe:
        assert pipe.read() == ""


def test_the_command_itself_needs_the_standard_library_alone() -> None:
    """Its results are then written on a machine whose packages are broken, too."""
    code = f"import sys; sys.path.insert(0, {str(gpu_check.ROOT)!r}); import tools.gpu.check"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bundle", "nowhere"], "nowhere: no manifest.json here, expected a bundle"),
        (["--toy"], "got --toy, expected --bundle too, or --model and --drafter"),
        (["--prompts", "nowhere"], "got --prompts nowhere, expected a file"),
        (["--minutes", "0"], "got --minutes 0, expected more than 0"),
        (["--parts", "nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_command_lines_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    try:
        code: Any = gpu_check.main(["--out", str(tmp_path / "out"), *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


# ---- findings ----


def test_whatever_a_piece_raises_is_a_failure_but_a_reason_to_leave_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raising(error: Exception) -> None:
        raise error

    found = Findings()
    found.attempt("one", raising, LeftOut("there is none"))
    found.add({"n": 1})
    assert (found.status, found.missing) == ("ok", [{"what": "one", "why": "there is none"}])
    found.attempt("two", raising, ValueError("got a\ntoy"))
    found.attempt("three", raising, KeyError("n"))
    assert found.failures == ["two: got a toy", "three: KeyError: 'n'"]
    assert capsys.readouterr().err.count("Traceback") == 2
    assert report.verdict("it", found.as_dict(1.0)) == (
        "it            FAILED      1.0 s  two: got a toy (and 1 more)"
    )


def test_a_dry_run_judges_no_numbers_and_nothing_begins_after_the_deadline() -> None:
    found = Findings(is_dry_run=True)
    found.add({"n": 1})
    found.figure = "1 of 2"
    found.fail_number("it differs")
    line = report.verdict("lanes", found.as_dict(0.0))
    assert line.endswith("ok          0.0 s  1 of 2; 1 numbers off, not judged")
    found.deadline = 0.0
    assert found.attempt("it", lambda: 1) is None
    assert found.missing == [{"what": "it", "why": "the part's time was over"}]
    found.fail("it crashed")
    assert (found.status, found.failures) == ("FAILED", ["it crashed"])


# ---- what the parts find, on the CPU ----


@dataclass
class Toy:
    """The toy's bundle for the CPU, as the part "bundle" left it."""

    folder: Path
    asked: dict[str, Any]
    answers: dict[str, dict[str, Any]]

    def check(self) -> job.Check:
        return gpu_part.read_job({**self.asked, "part": "verify"})


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, workshop: Workshop) -> Toy:
    """Runs the first two parts as their processes do; the second inflates and builds a bundle."""
    folder = tmp_path_factory.mktemp("gpu_check")
    asked: dict[str, Any] = {
        **{
            "command": ["check.py"],
            "bundles": [],
            "prompts": str(gpu_check.PROMPTS),
            "device": "cpu",
        },
        **{"toy": True, "small": False, "dry_run": False, "work": str(folder)},
        **{"model": str(workshop.llama()), "drafter": str(workshop.drafter("parallelspec"))},
        **{"seconds": 600.0, "carried": {}},
    }
    answers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pytest"])
        for name in ("environment", "bundle"):
            gpu_part.run_part({**asked, "part": name}, folder / "result.json")
            answers[name] = json.loads((folder / "result.json").read_text())
            asked["carried"] |= answers[name]["carried"]
    return Toy(folder, asked, answers)


@pytest.fixture(scope="module")
def run(toy: Toy) -> Callable[..., Findings]:
    """Runs parts in this process, one after the other, and returns the findings of the last."""

    def run_parts(*names: str, check: job.Check | None = None) -> Findings:
        check = check or toy.check()
        for name in names:
            found = Findings()
            found.attempt(name, gpu_part.PARTS[name], check, found)
        return found

    return run_parts


Run = Callable[..., Findings]


def test_the_first_parts_say_what_is_there(toy: Toy) -> None:
    entries = {name: answer["entry"] for name, answer in toy.answers.items()}
    assert {entry["status"] for entry in entries.values()} == {"ok"}
    about = {row["what"] for row in entries["environment"]["tables"]["measured"]}
    assert {
        "CPU",
        "python",
        "onnxruntime",
        "providers",
        "CUDA's libraries",
        "device asked for",
    } <= about
    assert toy.asked["carried"]["measured_on"].startswith("no GPU was used (")
    assert toy.asked["carried"]["provenance"]["command"] == ["check.py"]
    (row,) = entries["bundle"]["tables"]["measured"]
    assert (row["bundle"], row["drafters"]) == ("toy fp32", ", ".join(NAMES[:-1]))


def test_all_drafters_are_the_same_on_the_cpu(run: Run) -> None:
    found = run("losslessness")
    assert found.status == "ok"
    rows_of = found.tables["measured"]
    pairs = [(name, way) for way in same.DECODINGS for name in NAMES] + [("none", "small")]
    assert [(row["drafter"], row["decoding"]) for row in rows_of] == pairs
    for row in rows_of:
        assert (row["prompts"], row["identical"], row["real"]) == (2, 1.0, 0)
    assert found.figure.startswith(f"{len(pairs)} of {len(pairs)} ways of drafting lossless over ")


@pytest.mark.slow
def test_prompts_that_share_passes_get_the_same(run: Run) -> None:
    found = run("lanes")
    rows = found.tables["measured"]
    names = ["none", *NAMES]
    assert [(row["drafter"], row["decoding"]) for row in rows] == [
        (name, way) for name in names for way in same.DECODINGS
    ]
    assert {(row["lanes"], row["identical"], row["real"]) for row in rows} == {(2, 1.0, 0)}
    assert found.figure.startswith("together / alone ")


def test_all_ways_of_drafting_are_benched(run: Run) -> None:
    def names(found: Findings) -> list[str]:
        return [row["drafter"].partition("+")[0] for row in found.tables["measured"]]

    found = run("bench")
    assert names(found) == ["none", *NAMES]
    assert found.tables["measured"][0]["accepted length"] == 1.0
    for row in found.tables["measured"]:
        assert row["identical"] == 1.0
        assert row["tokens/s"] > 0
    assert re.match(r"\S+ \d.\d\d times plain decoding", found.figure)


@pytest.mark.slow
def test_passes_kernels_and_torch_are_timed_and_genai_is_left_out(run: Run) -> None:
    (row,) = run("verify").tables["measured"]
    assert min(row[f"n = {n}"] for n in (1, 4, 8)) > 0
    found = run("kernels")
    assert [each["what"][:15] for each in found.missing] == ["copy, GB/s", "a kernel of a c"]
    whats = [row["what"] for row in found.tables["measured"]]
    assert whats[0] == "ScatterND by row, 1 x 2 x 16, µs"
    assert len(whats) == 10
    rows = {row["engine"]: row for row in run("torch").tables["measured"]}
    assert {row["identical"] for row in rows.values()} == {1.0}, "tokens of the small target"
    assert len(rows) == 3
    assert run("genai").missing[0]["why"].startswith("this needs onnxruntime_genai")


def test_without_pytorch_nothing_is_inflated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = run("bundle")
    assert (found.status, found.missing[0]["what"]) == ("left out", "inflating a target")


# ---- what makes a part fail ----


def test_a_graph_that_cannot_be_opened_fails_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backends.open_graph

    def open_graph(bundle: bundles.Bundle, graph: bundles.Graph, *rest: Any) -> backends.Backend:
        if "parallelspec" in graph.file:
            raise ValueError("got a\ntruncated file")
        return real(bundle, graph, *rest)

    monkeypatch.setattr(backends, "open_graph", open_graph)
    found = run("bench")
    assert found.failures[0] == "toy fp32, parallelspec: got a truncated file"
    rows = [row["drafter"].partition("+")[0] for row in found.tables["measured"]]
    assert rows == ["none", "prompt_lookup"]


@pytest.mark.parametrize(("offset", "count"), [(1e-5, 0), (1.0, 1), (float("nan"), 1)])
def test_logits_unlike_the_small_targets_fail(
    toy: Toy, run: Run, tmp_path: Path, offset: float, count: int
) -> None:
    check = toy.check()
    small_PV = np.load(toy.folder / job.SMALL_LOGITS)
    np.save(tmp_path / job.SMALL_LOGITS, small_PV + offset * (np.arange(98) == 5))
    check.work = tmp_path
    found = run("losslessness", check=check)
    assert len(found.failures) == count
    assert all(": logits differ by " in each for each in found.failures)


def test_wrong_tokens_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_the_first_child(tree: Any, draw: Callable[[int], int]) -> tuple[list[int], int]:
        path = [0, *tree.children(0)[:1]]
        return path, draw(path[-1])

    monkeypatch.setattr(generate, "by_target_sampling", take_the_first_child)
    found = run("losslessness")
    real = {(row["drafter"], row["decoding"]): row["real"] for row in found.tables["measured"]}
    assert min(real["parallelspec", way] for way in same.DECODINGS) > 0
    assert found.failures[0].startswith("toy fp32, parallelspec, greedy: ")


# ---- what is carried ----


def test_pieces_give_the_wheel_with_one_capabilitys_code_and_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatbinary(*parts: tuple[int, bytes]) -> bytes:
        entries = b"".join(
            struct.pack("<HHIQ12xI", 2, 1, 32, len(code), capability) + code
            for capability, code in parts
        )
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries

    kept, alone = fatbinary((90, b"kept")), fatbinary((75, b"only"))
    both = fatbinary((75, b"older"), (90, b"kept"), (120, b"newer"))
    library = b"head" + both + both + alone + b"tail"
    cut = kept.ljust(len(both), b"\0")
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as wheel:
        wheel.writestr("capi/cuda.so", library)
        wheel.writestr("other.so", library)
    (tmp_path / "target.gguf").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(carry.demo, "fetch", lambda: tmp_path / "target.gguf")
    words = [str(tmp_path / "it.whl"), "--out", str(tmp_path / "out"), "--mib", "1"]
    monkeypatch.setattr(sys, "argv", ["carry", *words])
    carry.main()
    pieces = sorted((tmp_path / "out").glob("*/piece-*"), key=lambda piece: piece.name)
    assert [piece.parent.name for piece in pieces] == ["1", "2", "3", "4"]
    assert max(piece.stat().st_size for piece in pieces) == 1 << 20
    whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=whole) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert (tmp_path / "there/cache/specsplit/target.gguf").stat().st_size == 3 << 20
    with zipfile.ZipFile(tmp_path / "there/wheels/it.whl") as wheel:
        assert wheel.read("capi/cuda.so") == b"head" + cut + cut + alone + b"tail"
        assert wheel.read("other.so") == library


# ---- small things ----


def test_errors_of_rows_are_shares_of_their_range() -> None:
    expected = np.array([[0.0, 10.0], [0.0, 0.5]])
    got = np.array([[1.0, 10.0], [0.0, 0.25]])
    assert same.row_errors(got, expected) == [0.1, 0.25]


# ---- a whole run over the stand-in for CUDA, whose numbers mean nothing ----


def run_over(standin: "StandIn", out: Path, words: Sequence[object]) -> tuple[int, str]:
    """Runs the command as a user does; returns its exit code and what it printed."""
    command = [sys.executable, "-m", "tools.gpu.check", "--toy", "--dry-run", "--out", out, *words]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=gpu_check.ROOT,
        env=standin.environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.standin
def test_every_part_runs_to_its_end_over_the_stand_in(
    standin: "StandIn",
    workshop: Workshop,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    drafter = workshop.drafter("parallelspec")
    code, printed = run_over(standin, tmp_path, ["--model", workshop.llama(), "--drafter", drafter])
    figures = json.loads((tmp_path / "results.json").read_text())
    record_property("shown", f"{printed}exit code {code}, {figures['seconds']:.0f} s")
    failures = [text for part in figures["parts"].values() for text in part["failures"]]
    assert (code, failures) == (0, [])
    statuses = {name: part["status"] for name, part in figures["parts"].items()}
    assert statuses == dict.fromkeys(gpu_check.SECONDS, "ok") | dict.fromkeys(
        ("torch", "genai"), "left out"
    )
    assert len(figures["parts"]["losslessness"]["tables"]["measured"]) == 2 * 2 + 1
