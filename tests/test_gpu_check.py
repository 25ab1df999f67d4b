"""Checks the script for a GPU host on the CPU: what it reports and survives, what makes it fail."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_tensorrt
import numpy as np
import pytest
from small import toy_engine
from toy_backend import ToyTarget

import spec_runtime
from spec_runtime import backends, generate
from spec_runtime import bundle as bundles
from spec_runtime.backends import cuda
from spec_runtime.backends.copies import Copies, StreamCopies
from spec_runtime.backends.stepper import OrtStepper
from spec_runtime.measure.prompts import BenchPrompt

pytest.importorskip("torch")
import gpu_check
import gpu_graphs
import gpu_report

NAMES = [*gpu_graphs.TOY_DRAFTERS, "prompt_lookup", "fused parallelspec", "fused medusa"]
GRAPHS = ["target", "parallelspec drafter", "medusa drafter", "eagle drafter"]
GRAPHS += ["hydra start", "hydra step"]


@dataclass
class Outcome:
    code: int
    figures: dict[str, Any]
    markdown: str

    def rows(self, section: str, table: str = "measured") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.figures["sections"][section]["tables"][table]
        return rows

    def status(self) -> dict[str, str]:
        return {name: each["status"] for name, each in self.figures["sections"].items()}

    def missing(self, section: str) -> dict[str, str]:
        entries = self.figures["sections"][section]["missing"]
        return {each["what"]: each["why"] for each in entries}


Run = Callable[..., Outcome]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def play(folder: Path, *words: object) -> Outcome:
    """Runs the script as its command line does, and reads what it wrote."""
    files = folder / "out.json", folder / "out.md"
    out = ("--device", "cpu", "--json", files[0], "--markdown", files[1])
    code = gpu_check.main([str(word) for word in ("--toy", *out, *words)])
    assert sorted(path.name for path in folder.glob("*out*")) == ["out.json", "out.md"]
    figures = json.loads(files[0].read_text(), parse_constant=no_constant)
    assert figures["exit_code"] == code
    return Outcome(code, figures, files[1].read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """Runs every section; returns the outcome and the bundle made for it."""
    folder, make = tmp_path_factory.mktemp("gpu_check"), gpu_graphs.toy_bundle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_graphs, "toy_bundle", lambda _, *rest: make(folder, *rest))
        return play(folder), folder / "bundle"


@pytest.fixture
def run(whole: tuple[Outcome, Path], tmp_path: Path) -> Run:
    """Runs some sections over the same bundle."""
    return lambda *sections: play(tmp_path, "--bundle", whole[1], "--sections", *sections)


# ---- all of it ----


def test_a_dry_run_has_every_section(whole: tuple[Outcome, Path]) -> None:
    outcome = whole[0]
    assert outcome.code == 0
    sections = list(gpu_check.SECTIONS)
    assert outcome.status() == dict.fromkeys(sections, "passed") | {"capture": "could not run"}
    assert outcome.missing("capture") == {
        "capture": "got --device cpu, expected cuda: CUDA graphs need a GPU"
    }
    headings = re.findall(r"^## (\w+): (.*)$", outcome.markdown, re.MULTILINE)
    assert dict(headings) == outcome.status()
    assert outcome.markdown.count("CPU dry run: no GPU was used") == len(sections)
    about = {row["what"]: row["value"] for row in outcome.rows("environment")}
    assert {"CPU", "python", "onnxruntime", "torch", "device asked for"} <= set(about)


def test_all_graphs_and_drafters_are_there(whole: tuple[Outcome, Path]) -> None:
    outcome = whole[0]
    rows = {row["graph"]: row for row in outcome.rows("parity")}
    assert list(rows) == GRAPHS
    assert rows["target"]["rows"] == 24 + 8 + 1 + 16 + 1 + 12 + 5
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert {row["equal best"] for name, row in rows.items() if name != "hydra start"} == {1.0}
    assert len(outcome.missing("parity")) == 2  # the fused steps, judged by their texts
    assert [row["drafter"] for row in outcome.rows("losslessness")] == NAMES
    for row in outcome.rows("losslessness"):
        assert (row["prompts"], row["identical"], row["real"]) == (2, 1.0, 0)
    bench_rows = outcome.rows("bench")
    assert [row["drafter"].partition("+")[0] for row in bench_rows] == ["none", *NAMES]
    assert bench_rows[0]["accepted length"] == 1.0
    for row in bench_rows:
        assert row["identical"] == 1.0
        assert row["tokens/s"] > 0
        assert row["bytes to host"] is None


def test_all_forms_of_attention_agree(whole: tuple[Outcome, Path]) -> None:
    rows = whole[0].rows("attention")
    slots = [80, 96]
    names = bundles.ATTENTIONS
    assert [(row["attention"], row["S"]) for row in rows] == [(n, s) for n in names for s in slots]
    for row in rows:
        assert min(row[f"n = {n}"] for n in (1, 4, 8)) > 0
        assert 0 <= row["Δ"] < 1e-5
    assert sum(row["Δ"] > 0 for row in rows) > 0, "rows of other graphs, not the same ones"


def test_the_prediction_is_the_formulas(whole: tuple[Outcome, Path]) -> None:
    measured = {row["n"]: row for row in whole[0].rows("shapes")}
    assert list(measured) == [1, 4, 8]
    assert measured[1]["overhead"] == 1.0
    lengths = {row["drafter"]: row["accepted length"] for row in whole[0].rows("bench")}
    predicted = whole[0].rows("shapes", "predicted")
    assert [row["of"] for row in predicted] == [
        "measured here: parallelspec, toy fp32",
        "measured here: fused parallelspec, toy fp32",
    ]
    assert predicted[0]["accepted length"] == lengths["parallelspec+prompt_lookup"]
    for row in predicted:
        assert row["n"] == 8  # of 1, 4 and 8 the nearest to some 13 nodes
        at_8 = measured[8]
        step = (at_8["verify ms"] + at_8["draft ms"]) / measured[1]["verify ms"]
        assert row["predicted speed-up"] == pytest.approx(row["accepted length"] / step)
    assert "Toy dimensions" in whole[0].markdown
    assert "Predicted, not measured" in whole[0].markdown


# ---- what it survives ----


def test_a_broken_piece_is_reported_and_the_rest_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backends.open_graph

    def open_graph(bundle: bundles.Bundle, graph: bundles.Graph, *rest: Any) -> backends.Backend:
        if "medusa" in graph.file:
            raise ValueError("got a\ntruncated file")
        return real(bundle, graph, *rest)

    monkeypatch.setattr(backends, "open_graph", open_graph)
    outcome = run("parity", "losslessness", "bench")
    assert outcome.code == 0
    assert outcome.missing("parity")["toy fp32, medusa drafter"] == "got a truncated file"
    left = [name for name in GRAPHS if "medusa" not in name]
    assert [row["graph"] for row in outcome.rows("parity")] == left
    left = [name for name in NAMES if "medusa" not in name]
    for section in ("losslessness", "bench"):
        assert outcome.missing(section)["toy fp32, medusa"] == "got a truncated file"
    assert [row["drafter"] for row in outcome.rows("losslessness")] == left
    assert len(outcome.rows("bench")) == 1 + len(left)
    assert "- not run: toy fp32, medusa: got a truncated file" in outcome.markdown


def test_a_missing_package_costs_its_sections_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spec_export.graphs.slots", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = run("environment", "attention", "shapes", "parity")
    assert outcome.code == 0
    assert [outcome.status()[name] for name in ("attention", "shapes")] == ["could not run"] * 2
    assert "ModuleNotFoundError" in outcome.missing("environment")["torch"]
    assert "toy" in outcome.missing("shapes")
    assert len(outcome.rows("parity")) == len(GRAPHS)


def test_time_that_is_over_and_sections_not_asked_for_are_reported(
    whole: tuple[Outcome, Path], tmp_path: Path
) -> None:
    outcome = play(tmp_path, "--bundle", whole[1], "--minutes", 0, "--sections", "parity", "bench")
    assert (outcome.code, set(outcome.status().values())) == (0, {"left out"})
    reasons = {name: outcome.missing(name)["the section"] for name in gpu_check.SECTIONS}
    late = {"parity": "0 minutes were over", "bench": "0 minutes were over"}
    assert reasons == dict.fromkeys(gpu_check.SECTIONS, "not asked for") | late
    found = gpu_report.Findings(deadline=0.0)
    assert found.attempt("it", lambda: 1) is None
    assert found.missing == [{"what": "it", "why": "left out: the time was over"}]


def test_what_was_found_outlives_a_crash(
    whole: tuple[Outcome, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(check: Any, found: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_check.SECTIONS, "losslessness", crash)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, "--bundle", whole[1])
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["sections"]["parity"]["status"] == "passed"
    (reason,) = figures["sections"]["losslessness"]["missing"]
    assert reason["why"] == "the run ended before it"


# ---- what makes it fail ----


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("n"), 1),
        (AssertionError("3 rows"), 1),
        (RuntimeError("no such buffer"), 1),
        (ValueError("got a toy, expected a model"), 0),
        (ModuleNotFoundError("No module named 'onnx'"), 0),
    ],
)
def test_a_section_that_crashes_is_exit_code_1(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    """A refusal with a reason is none: the section could not run. The others are run anyway."""

    def crash(check: Any, found: Any) -> None:
        found.add({"what": "found before"})
        raise error

    def go_on(check: Any, found: Any) -> None:
        found.add({"what": "found behind it"})

    monkeypatch.setitem(gpu_check.SECTIONS, "parity", crash)
    monkeypatch.setitem(gpu_check.SECTIONS, "losslessness", go_on)
    outcome = run("environment", "parity", "losslessness")
    assert outcome.code == code
    statuses = [outcome.status()[name] for name in ("environment", "parity", "losslessness")]
    assert statuses == ["passed", "failed" if code else "passed", "passed"]
    assert outcome.rows("parity") == [{"what": "found before"}]
    failures = outcome.figures["sections"]["parity"]["failures"]
    name = type(error).__name__
    assert failures == ([f"parity crashed: {name}: {error}"] if code else [])
    assert (f"- FAILED: parity crashed: {name}" in outcome.markdown) == bool(code)
    assert ("Traceback" in capsys.readouterr().err) == bool(code)
    assert list(outcome.missing("parity")) == ([] if code else ["parity"])


def test_a_fault_of_the_code_in_a_piece_is_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that the machine does not allow is none: the rest goes on and the code is 0."""
    errors: list[Exception] = [MemoryError("3 GB"), TypeError("got 3 arguments")]

    def raising(*arguments: Any) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(gpu_graphs, "random_backbone", raising)
    outcome = run("shapes", "environment")
    assert (outcome.code, outcome.status()["shapes"]) == (0, "could not run")
    assert outcome.missing("shapes") == {"toy": "MemoryError: 3 GB"}
    outcome = run("shapes", "environment")
    assert (outcome.code, outcome.status()["shapes"]) == (1, "failed")
    failures = outcome.figures["sections"]["shapes"]["failures"]
    assert failures == ["toy crashed: TypeError: got 3 arguments"]


class Distorted:
    """A backend whose logits are off."""

    def __init__(self, inner: Any, offset: float) -> None:
        self.form, self.capacity, self.buffers = inner.form, inner.capacity, inner.buffers
        self._inner, self._offset = inner, offset

    def run(self, feeds: dict[str, np.ndarray], outputs: Any) -> dict[str, np.ndarray]:
        results = dict(self._inner.run(feeds, outputs))
        if "logits" in results:
            results["logits"] = results["logits"].copy()
            results["logits"][0, 0] += self._offset
        return results


def distort_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: type[Distorted], offset: float
) -> None:
    """Wraps the first of each pair of backends that parity opens, which is the device's."""
    real, opened = backends.open_graph, []

    def open_graph(bundle: bundles.Bundle, graph: bundles.Graph, *rest: Any) -> Any:
        opened.append(graph)
        backend = real(bundle, graph, *rest)
        return kind(backend, offset) if len(opened) % 2 else backend

    monkeypatch.setattr(backends, "open_graph", open_graph)


@pytest.mark.parametrize(("offset", "code"), [(1e-5, 0), (0.1, 1), (float("nan"), 1)])
def test_parity_that_fails_is_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, offset: float, code: int
) -> None:
    distort_the_device(monkeypatch, Distorted, offset)
    outcome = run("environment", "parity")
    assert outcome.code == code
    assert outcome.status()["parity"] == ("failed" if code else "passed")
    failures = outcome.figures["sections"]["parity"]["failures"]
    assert len(failures) == code
    target, *others = outcome.rows("parity")
    assert [row["verdict"] for row in others] == ["ok"] * 5
    if code:
        assert failures[0].startswith("toy fp32, target: scores differ by ")
        assert f"- FAILED: {failures[0]}" in outcome.markdown
    if np.isnan(offset):
        assert target["scores, worst"] is None


class Shuffled(Distorted):
    """Its largest logits come in another order behind the first, as where they are near ties."""

    def run(self, feeds: dict[str, np.ndarray], outputs: Any) -> dict[str, np.ndarray]:
        results = dict(self._inner.run(feeds, outputs))
        if "top_ids" in results:
            results["top_ids"] = np.roll(results["top_ids"], 1, axis=1)
            results["top_ids"][:, 0] = results["top_ids"][:, 1]
            results["top_logits"] = results["top_logits"] + np.float32(self._offset)
        return results


@pytest.fixture(scope="module")
def cuda_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the toy's bundle for CUDA, which the CPU can run too."""
    return gpu_graphs.toy_bundle(tmp_path_factory.mktemp("cuda"), gpu_check.TINY, "cuda")


@pytest.mark.parametrize(("offset", "code"), [(0.0, 0), (1.0, 1)])
def test_largest_logits_are_compared_by_value(
    tmp_path: Path,
    cuda_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    offset: float,
    code: int,
) -> None:
    distort_the_device(monkeypatch, Shuffled, offset)
    outcome = play(tmp_path, "--bundle", cuda_bundle, "--sections", "parity")
    assert outcome.code == code
    rows = {row["graph"]: row for row in outcome.rows("parity")}
    sampling = rows.pop("sampling")
    assert (sampling["verdict"] == "ok") == (code == 0)
    assert [row["verdict"] for row in rows.values()] == ["ok"] * 6
    assert all(row["rows"] > 0 for row in rows.values())
    assert sampling["equal best"] == 1.0


def test_a_wrong_acceptance_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_the_first_child(tree: Any, draw: Callable[[int], int]) -> tuple[list[int], int]:
        path = [0, *tree.children(0)[:1]]
        return path, draw(path[-1])

    monkeypatch.setattr(generate, "by_target_sampling", take_the_first_child)
    outcome = run("losslessness", "environment")
    assert outcome.code == 1
    real = {row["drafter"]: row["real"] for row in outcome.rows("losslessness")}
    assert real["parallelspec"] > 0
    assert "toy fp32, parallelspec: " in outcome.figures["sections"]["losslessness"]["failures"][0]


def test_a_wrong_fused_step_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step = OrtStepper.step

    def off_by_one(self: OrtStepper) -> np.ndarray:
        result = step(self)
        result[0] = (result[0] + 1) % 90
        return result

    monkeypatch.setattr(OrtStepper, "step", off_by_one)
    outcome = run("losslessness")
    assert outcome.code == 1
    rows = {row["drafter"]: row for row in outcome.rows("losslessness")}
    assert [name for name, row in rows.items() if row["real"]] == NAMES[-2:]
    assert re.match(r"prompt 1, token 1: gap .*, real$", rows["fused medusa"]["first divergence"])


# ---- what only a GPU does, on the toy target ----


@pytest.fixture
def check(whole: tuple[Outcome, Path], tmp_path: Path) -> Any:
    opened = [bundles.read(whole[1])]
    prompts = [BenchPrompt(i, "all", text) for i, text in enumerate(("abcabc", "bcbcbc"))]
    return gpu_check.Check(opened, prompts, "cuda", gpu_check.TOY, tmp_path)


@pytest.mark.parametrize("other", [None, gpu_check.EAGER, gpu_check.OWN_STREAMS])
def test_captured_tokens_are_the_eager_ones(
    check: Any, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    kinds = ("cuda", gpu_check.EAGER, gpu_check.OWN_STREAMS)
    engines = {kind: toy_engine("none") for kind in kinds}
    if other is not None:
        backend: Any = engines[other].target.lend()[0]
        backend.table_VV = np.roll(backend.table_VV, 1, axis=0)

    def engine(self: Any, opened: Any, name: str, backend: str = "cuda") -> spec_runtime.Engine:
        if name == "medusa":
            raise ValueError(f"got backend {backend!r}, expected one of onnxruntime, cuda")
        return engines[backend]

    monkeypatch.setattr(gpu_check.Check, "engine", engine)
    found = gpu_report.Findings(float("inf"))
    gpu_check.capture(check, found)
    rows = found.tables["measured"]
    assert [row["drafter"] for row in rows] == ["none", *(n for n in NAMES if n != "medusa")]
    assert [each["what"] for each in found.missing] == ["toy fp32, medusa"]
    assert {row["identical"] for row in rows} == {1.0 if other is None else 0.5}
    assert found.status == ("passed" if other is None else "failed")


def test_engines_on_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, whole: tuple[Outcome, Path], tmp_path: Path
) -> None:
    opened = [bundles.read(whole[1])]
    check = gpu_check.Check(opened, [], "cpu", gpu_check.TOY, tmp_path)
    kinds = []

    def loaded(*rest: Any, backend: str, cuda_graphs: bool, **named: Any) -> spec_runtime.Engine:
        assert backend == "cuda"
        kinds.append((cuda_graphs, type(cuda.open_copies())))
        return toy_engine("none")

    monkeypatch.setattr(spec_runtime, "load", loaded)
    monkeypatch.setattr(cuda, "open_copies", lambda: StreamCopies(fake_tensorrt.cuda()[0]))
    for backend in ("cuda", gpu_check.OWN_STREAMS, gpu_check.EAGER):
        check.engine(opened[0], "none", backend)
    assert kinds == [(True, StreamCopies), (True, Copies), (False, StreamCopies)]


def test_bytes_to_the_host_are_those_of_a_step(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = toy_engine("none"), ToyTarget.run
    backend: Any = engine.target.lend()[0]
    backend.part = toy_engine("none").target.lend()[0]  # counts what the backend counts too

    def counted(self: Any, feeds: dict[str, np.ndarray], outputs: Any) -> dict[str, np.ndarray]:
        num_bytes = 1000 if feeds["input_ids"].shape[1] > 1 else 7
        self.bytes_to_host += num_bytes
        self.part.bytes_to_host += num_bytes
        return run(self, feeds, outputs)

    monkeypatch.setattr(ToyTarget, "run", counted)
    monkeypatch.setattr(ToyTarget, "bytes_to_host", 0, raising=False)
    assert gpu_check.bytes_to_host(check, engine) == 7.0


# ---- small things ----


def test_errors_of_rows_are_shares_of_their_range() -> None:
    expected = np.array([[0.0, 10.0], [0.0, 0.5]])
    got = np.array([[1.0, 10.0], [0.0, 0.25]])
    assert gpu_graphs.row_errors(got, expected) == [0.1, 0.25]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no --bundle or no --prompts, expected both, or --toy"),
        (["--toy", "--bundle", "nowhere"], "nowhere: no manifest.json here, expected a bundle"),
        (["--toy", "--prompts", "nowhere"], "No such file or directory: 'nowhere'"),
    ],
)
def test_bad_command_lines_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    files = ["--json", str(tmp_path / "a"), "--markdown", str(tmp_path / "b")]
    with pytest.raises(SystemExit) as error:
        gpu_check.main([*words, *files])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
