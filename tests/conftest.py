"""Holds the fixtures of more than one file, and shows what tests have to show."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spec_runtime.loop.target import Target
from spec_runtime.pace import first_use
from spec_runtime.pace.costs import Costs, PassCosts

if TYPE_CHECKING:
    from cuda_standin import StandIn
    from host_cuda import HostCuda
    from small import Measure, Run
    from toy_backend import ToyTarget
    from workshop import FluentWorkshop, Workshop

    from spec_runtime import Engine

pytest.register_assert_rewrite("apis", "served")
gc.disable()  # until all test files are imported, see pytest_collection_finish
# Tests import onnxruntime themselves, too; see spec_runtime/backends/session.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


MOST_SECONDS = 2.0  # of the processors' time, for a test that is not marked slow


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail tests not marked slow that take more seconds of the processors' time"
    parser.addoption("--max-seconds", type=float, default=None, help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Counts the processors' time of a test, and that of the processes that it waits for.

    Other programs on a busy machine do not add to it, as they do to `--durations`.
    """
    begun = sum(os.times()[:4])
    result = yield
    seconds = sum(os.times()[:4]) - begun
    if "slow" in item.keywords:
        return result
    if seconds > MOST_SECONDS:
        item.user_properties.append(("seconds", seconds))
    most = item.config.getoption("--max-seconds")
    if most is not None and seconds > most:
        pytest.fail(f"it took {seconds:.1f} s of the processors' time, expected {most} or less")
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the runtime's files last: they are quick, so that parallel processes end together."""
    items.sort(key=lambda item: item.path.parent.name == "runtime")


def pytest_collection_finish() -> None:
    """Spares tests the search for garbage among imported modules, and tables at each export.

    At each export PyTorch reads its table of ONNX functions, collects its operators, and writes
    down for each node of the graph where in Python it was called; and onnxscript asks at each node
    whether a pattern fits, in vain for all that end in other operators, one after a look at the
    whole graph. That takes a third of the time of exporting a tiny model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    if "torch" in sys.modules:
        import traceback

        from onnxscript.rewriter import RewriteRule
        from torch.export import decomp_utils, exported_program
        from torch.onnx._internal.exporter._registration import ONNXRegistry
        from torch.utils._traceback import CapturedTraceback

        once = functools.cache(ONNXRegistry.from_torchlib)
        ONNXRegistry.from_torchlib = staticmethod(once)  # type: ignore[method-assign]
        operators = functools.cache(exported_program._collect_all_valid_cia_ops)
        exported_program._collect_all_valid_cia_ops = operators
        decomp_utils._collect_all_valid_cia_ops = operators
        CapturedTraceback.summary = lambda _: traceback.StackSummary()  # type: ignore[method-assign]
        rewritten = RewriteRule.try_rewrite

        def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **given: Any) -> Any:
            wanted = rule._target_pattern.output_nodes[0].op_identifier()
            if wanted is None or wanted[:2] == (node.domain, node.op_type):
                return rewritten(rule, model, graph, node, **given)

        RewriteRule.try_rewrite = try_rewrite  # type: ignore[assignment, method-assign]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests recorded by `record_property("shown", …)`, where none failed.

    Printing it in the test would not do: the output of a parallel run's workers is lost.
    Beside failures it would hide them. Tests that take long are listed in any case.
    """
    done = [each for kind in ("passed", "failed") for each in terminalreporter.getreports(kind)]
    long = {
        report.nodeid: seconds
        for report in done
        for name, seconds in report.user_properties
        if name == "seconds"
    }
    if long:
        terminalreporter.section(f"not marked slow, and over {MOST_SECONDS} s of processors' time")
        for nodeid, seconds in sorted(long.items(), key=lambda each: -float(str(each[1]))):
            terminalreporter.write_line(f"{seconds:6.1f} s {nodeid}")
    if terminalreporter.getreports("failed") or terminalreporter.getreports("error"):
        return
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "shown":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(text))


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that all processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    common = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "common"
    common.mkdir(exist_ok=True)
    return common


@pytest.fixture(autouse=True, scope="session")
def _traced_once(common: Path) -> Iterator[None]:
    """Lets tests trace equal modules once, where they use PyTorch at all."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            import torch
            from traced_once import TracedOnce

            patch.setattr(torch.onnx, "export", TracedOnce(common))
        yield


@pytest.fixture(autouse=True)
def _first_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves engines with their bundle's trees, but in tests marked `first_use`: what is measured
    when a bundle is first opened would give them others on each machine. In tests marked
    `profiled` a first use finds the costs of a formula: trees are cut, and drafting pauses."""
    if "profiled" in request.keywords:
        _fix_costs(monkeypatch)
    elif "first_use" not in request.keywords:
        monkeypatch.setattr(first_use, "profile_for", lambda engine, key, entry: None)


def _fix_costs(patch: pytest.MonkeyPatch) -> None:
    """A plain step takes 10 ms, and one with a tree of 16 nodes 15 ms: one and a half tokens."""

    def passes(
        target: Target, tokens: object, sizes: Sequence[int], *_: object, **__: object
    ) -> Any:
        verify = tuple((float(n), 9 + n / 4) for n in sorted(sizes))
        return [PassCosts(0, verify, plain=10.0)]

    def costs_of(passes: Sequence[PassCosts], *_: object) -> Costs:
        return Costs(passes[0].verify, draft=9.0, level=1.0, host=1.0, plain=10.0, prefill=1.0)

    patch.setattr(first_use, "measure_passes", passes)
    patch.setattr(first_use, "draft_ms", lambda *_: (9.0, 1.0))
    patch.setattr(first_use, "costs_of", costs_of)
    patch.setattr(first_use, "profile_for", first_use._measured)  # found nowhere, kept nowhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a small bundle, which only commands that load a stand-in can run."""
    from small import write_small_bundle

    return write_small_bundle(tmp_path / "bundles" / "small")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Gives a client of a server of a toy engine, in this process."""
    from served import in_process  # imported here because few tests need it

    with in_process() as made:
        yield made


@pytest.fixture(scope="module")
def calling() -> Iterator[Any]:
    """Gives a client of an engine whose answers can be kept inside a grammar, and so be calls."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from served import in_process, tool_engine

    with in_process(tool_engine()) as made:
        yield made


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Lets commands load toy engines, whatever the bundle, and returns those that they loaded."""
    from small import toy_engine

    import spec_runtime

    loaded: list[Engine] = []

    def load(path: Path, drafter: str | None = None, **options: object) -> Engine:
        loaded.append(toy_engine(drafter))
        loaded[-1].target.strict_gap = 0.01 if options.get("strict") else None
        return loaded[-1]

    monkeypatch.setattr(spec_runtime, "load", load)
    return loaded


@pytest.fixture
def toy_graphs(monkeypatch: pytest.MonkeyPatch) -> list[ToyTarget]:
    """Returns the targets opened so far; every graph opened is a toy."""
    from toy_bundle import patch_graphs

    return patch_graphs(monkeypatch)


@pytest.fixture
def profile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of profiles in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsplit" / "profiles"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a command: (exit code, stdout, stderr)."""
    from spec_runtime import cli

    def run(*argv: object, stdin: str = "", main: Any = cli.main) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def measure(run: Run, folder: Path, engines: list[Engine], tmp_path: Path) -> Measure:
    """Returns a function that runs bench or audit on prompts: (exit code, stdout, stderr, figures).

    The figures are {} where none were written.
    """
    from small import PROMPTS, write_prompts

    def measure(
        verb: str, *words: object, prompts: Sequence[Any] = PROMPTS
    ) -> tuple[int, str, str, dict[str, Any]]:
        file, out = write_prompts(tmp_path / "prompts.jsonl", *prompts), tmp_path / "new/out.json"
        ended = run(verb, "--bundle", folder, "--prompts", file, "--json", out, *words)
        return *ended, json.loads(out.read_text()) if out.exists() else {}

    return measure


@pytest.fixture(scope="session")
def workshop(common: Path) -> Iterator[Workshop]:
    """Returns the maker of tiny random targets, drafters and bundles.

    These drafters have hardly learnt, so that no node is likely: fp32 bundles keep unlikely ones.
    """
    pytest.importorskip("torch")
    from workshop import Workshop  # imported here because tests of the runtime need no torch

    from spec_export.build import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(options.TREES, "fp32", options.DEFAULT_TREE)
        yield Workshop(common / "workshop")


@pytest.fixture(scope="session")
def fluent(common: Path) -> FluentWorkshop:
    """Returns the maker of tiny targets and drafters whose drafts are often accepted."""
    pytest.importorskip("torch")
    from workshop import FluentWorkshop

    return FluentWorkshop(common / "fluent")


@pytest.fixture(scope="session")
def hybrid(common: Path) -> FluentWorkshop:
    """Returns the maker of a fluent target that has convolutions in place of some attention."""
    pytest.importorskip("torch")
    from workshop import HybridWorkshop

    return HybridWorkshop(common / "hybrid")


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the recipe of a training run of seven steps, beside its target and data."""
    pytest.importorskip("torch")
    from tiny_training import write_recipe

    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def finished(recipe: Path) -> Path:
    """Returns the folder of a run of `recipe` that nothing interrupted. Do not change it."""
    from spec_export.training import run as train

    train.run(recipe, out=recipe.parent / "run")
    return recipe.parent / "run"


@pytest.fixture(scope="session")
def averaged(recipe: Path, finished: Path) -> Path:
    """Returns the folder of the run `finished` with averaged weights. Do not change it."""
    from spec_export.training import run as train

    out = recipe.parent / "averaged"
    train.run(recipe, ["train.ema=0.9"], out, cache=finished / "features")
    return out


@pytest.fixture
def copied(recipe: Path, tmp_path: Path) -> Path:
    """Returns a copy of `recipe` with its target and data, which a test may change."""
    shutil.copytree(recipe.parent / "llama", tmp_path / "own" / "llama")
    for name in ("data.jsonl", "recipe.toml"):
        shutil.copy(recipe.parent / name, tmp_path / "own" / name)
    return tmp_path / "own" / "recipe.toml"


@pytest.fixture(scope="session")
def standin() -> StandIn:
    """Returns the stand-in for CUDA, built on first use; skips the test where it cannot be."""
    from cuda_standin import StandIn, UnavailableError  # imported here because few tests need it

    try:
        return StandIn.build()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCuda]:
    """Has sessions on CUDA compute on the CPU; no memory is left behind."""
    import host_cuda

    device = host_cuda.install(monkeypatch)
    yield device
    gc.collect()
    assert not device.memory, "memory is left"
    assert not device.is_busy


@pytest.fixture
def fake_rival(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns the script of a worker that opens engines by the test file's OPEN_ENGINE."""
    from tools.measure.rivals import field

    file = tmp_path / "fake_worker.py"
    file.write_text(
        f"import os, sys\nsys.path.insert(0, {str(field.WORKERS)!r})\nimport protocol\n"
        f"{request.module.OPEN_ENGINE}\nprotocol.serve(open_engine)\n"
    )
    return file


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of the rivals' environments made, each this Python; "nowhere" fails."""
    from tools.measure.rivals.environments import Environment, RivalError

    made: list[str] = []

    def make(environment: Environment, work: Path) -> None:
        if environment.name == "nowhere":
            raise RivalError("no such package")
        made.append(environment.name)

    monkeypatch.setattr(Environment, "make", make)
    monkeypatch.setattr(Environment, "program", lambda environment, work: Path(sys.executable))
    return made
