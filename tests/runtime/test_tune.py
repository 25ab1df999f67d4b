"""Tuning: what the race finds, and the command.

Time is simulated: each run of a toy graph moves a clock by what a table says.
"""

import errno
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import known, raising
from toy_backend import ToyTarget
from toy_bundle import write_bundle
from toy_engine import make_engine, random_prompt
from tuning import KEY, convex, opened_anew, stepped

from spec_runtime import cli
from spec_runtime.bundle import manifest as bundle
from spec_runtime.engine import Engine
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import tune
from spec_runtime.pace import profile
from spec_runtime.pace.pacer import LARGEST_TRUST, Pacer
from spec_runtime.pace.profile import PLAIN, Candidate, Trees
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.trees.budget import Budget, Grown

pytestmark = pytest.mark.usefixtures("toy_graphs")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@dataclass
class Clock:
    """Seconds that pass in graph runs alone."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, backend: Any, ms: Callable[[int], float]) -> None:
        run = backend.run

        def timed(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
            self.now += ms(feeds["input_ids"].shape[1]) / 1000
            return run(feeds, outputs)

        backend.run = timed


def timed_engine(
    clock: Clock, verify: Callable[[int], float], drafter: str = "parallelspec", **toy: Any
) -> Engine:
    engine = make_engine(drafter, scratch=40, **{"peak": 4.0, **toy})
    clock.charge(engine.target._backend, verify)
    if drafter == "parallelspec":
        clock.charge(engine.proposer._rows._backend, lambda n: 1.5)  # type: ignore[attr-defined]
    return engine


PROMPTS = [random_prompt(seed) for seed in range(2)]


@pytest.mark.parametrize("drafter", ["parallelspec", "parallelspec+prompt_lookup", "prompt_lookup"])
@pytest.mark.parametrize("verify", [convex, stepped])
def test_the_choice_is_near_the_best_of_an_exhaustive_sweep(
    clock: Clock, verify: Callable[[int], float], drafter: str
) -> None:
    name, _, lookup = drafter.partition("+")
    # few successors make loops, for lookup to find
    engine = timed_engine(clock, verify, name, num_successors=4, noise=1.0)
    if lookup:
        engine = engine.observed(lambda proposer: MergedProposer(proposer, 4), Budget(8))
    prompts = [random_prompt(seed) for seed in range(4)]  # with two, one step more is 11 per cent
    forecast: list[float] = []
    report = tune.tune(
        engine,
        prompts,
        KEY,
        max_new_tokens=40,
        on_forecast=lambda seconds: forecast.extend((clock.now, seconds)),
    )
    begun, foretold = forecast
    assert foretold / 3 < clock.now - begun < 2 * foretold
    costs, choice = report.costs, report.choice
    assert costs.verify == tuple((n, pytest.approx(verify(n))) for n in tune.SIZES if n <= 40)
    assert costs.plain == pytest.approx(verify(1))
    assert costs.draft == pytest.approx(0 if drafter == "prompt_lookup" else 1.5, abs=0.1)
    sizes = (2, 3, 4, 5, 6, 8, 9, 12, 16, 24)
    budgets = {f"grown {n}": Budget(n) for n in sizes}
    if name == "parallelspec":
        for least in (0.02, 0.05, 0.1, 0.2, 0.4):
            budgets[f"least {least}"] = Budget(40, growth=Grown(least))
    engines = {name: engine.observed(lambda it: it, budget) for name, budget in budgets.items()}
    engines[PLAIN] = tune.decoding(engine, Candidate(PLAIN, None), costs)
    stats = tune.race(engines, prompts, 40, num_rounds=1)
    speed = {name: each.tokens_per_second for name, each in stats.items()}
    assert 1 <= known(choice.sampled_gain).accepted_length < choice.gain.accepted_length
    profile.write(report)
    assert profile.find(KEY) == report
    # ten steps of an answer are too few for a rate and a trust
    assert known(choice.tokens_per_second) >= 0.85 * max(speed.values()), speed
    assert max(speed.values()) > 1.1 * speed[PLAIN], "otherwise there is nothing to choose"


def test_draws_that_all_end_at_once_have_no_gain(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = tune.race

    def without_steps(*given: Any, **options: Any) -> dict[str, Stats]:
        stats = race(*given, **options)
        return dict.fromkeys(stats, Stats()) if options.get("temperature") else stats

    monkeypatch.setattr(tune, "race", without_steps)
    choice = tune.tune(timed_engine(clock, convex), PROMPTS, KEY, max_new_tokens=20).choice
    assert choice.speedup is not None
    assert choice.sampled_gain is None


def test_trees_are_predicted_with_what_lookup_adds(clock: Clock) -> None:
    """The prediction is within 25 % of what decoding gives, whose last step is cut short, and above
    that of the drafter alone; lookup's nodes take places of the tree, and get none besides."""
    toy: dict[str, Any] = {"num_successors": 4, "noise": 1.0}
    alone = timed_engine(clock, convex, **toy)
    merged = timed_engine(clock, convex, **toy)
    merged = merged.observed(lambda proposer: MergedProposer(proposer, 4), Budget(8))
    found = {}
    for name, engine in (("alone", alone), ("merged", merged)):
        tuned = tune.tune(engine, PROMPTS, KEY, max_new_tokens=40, quick=True)
        found[name] = next(c for c in tuned.candidates if c.name == "paying")
        limit = min(engine.target.max_nodes, tune.SIZES[-1])
        assert known(found[name].trees).max_nodes == limit  # type: ignore[union-attr]
    predicted = known(found["merged"].accepted_length)
    engines = {"run": tune.decoding(merged, found["merged"], tuned.costs)}
    stats = tune.race(engines, PROMPTS, 40, num_rounds=1)
    assert predicted == pytest.approx(stats["run"].accepted_length, rel=0.25)
    assert predicted > 1.05 * (found["alone"].accepted_length or 0)


def test_the_trust_of_sampled_texts_is_measured_and_kept(clock: Clock, profile_cache: Path) -> None:
    """Draws at temperature 1 leave the drafter's first guess more often than greedy decoding."""
    engine = timed_engine(clock, convex)
    found = tune.tune(engine, PROMPTS, KEY, max_new_tokens=32, quick=True)
    paying = next(c for c in found.candidates if c.name == "paying")
    assert 1 / LARGEST_TRUST <= paying.sampled_trust < 0.9
    profile.write(found)
    assert profile.find(KEY) == found


def test_plain_decoding_is_kept_unless_another_is_clearly_faster() -> None:
    plain = Candidate(PLAIN, None, 1.0, 1.0, 50.0, 1.0, 1.0)
    close, clear = Candidate("a", Trees(2), speedup=1.01), Candidate("b", Trees(3), speedup=1.05)
    predicted = Candidate("c", Trees(4), expected_speedup=1.2)
    assert tune.choose([plain, close]) == PLAIN
    assert tune.choose([plain, clear, close]) == "b"
    assert tune.choose([plain, predicted]) == "c"
    # what was measured counts, not what was expected
    assert tune.choose([plain, replace(predicted, speedup=0.9)]) == PLAIN


def test_plain_decoding_wins_where_rows_are_dear(clock: Clock) -> None:
    engine = timed_engine(clock, lambda n: 10.0 * n)
    assert tune.tune(engine, PROMPTS, KEY, quick=True).plain_wins
    report = tune.tune(engine, PROMPTS, KEY, max_new_tokens=32)
    assert report.plain_wins
    assert report.choice == Candidate(PLAIN, None, 1.0, 1.0, 100.0, 1.0, 1.0)


def test_the_bundles_calibration_comes_first(clock: Clock) -> None:
    engine = timed_engine(clock, stepped)
    calibration = {"reliability": [[0.1, 0.05, 200], [0.4, 0.3, 100], [0.9, 0.8, 50]]}
    quick = tune.tune(engine, PROMPTS[:1], KEY, calibration, quick=True)
    assert quick.curve == "calibration"
    paying = next(c for c in quick.candidates if c.name == "paying")
    assert known(paying.trees).reliability == ((0.1, 0.05), (0.4, 0.3), (0.9, 0.8))
    assert tune.tune(engine, PROMPTS[:1], KEY, None, quick=True).curve == "run"


def test_without_trees_there_is_nothing_to_tune() -> None:
    with pytest.raises(ValueError, match="got drafter none"):
        tune.tune(make_engine(), PROMPTS, KEY)


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", *map(str, arguments)])
    return int(end.value.code or 0)


def test_the_command_end_to_end(
    profile_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    toy_graphs: list[ToyTarget],
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",), trees={"lookup_nodes": 3})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abab"}\n{"prompt": "hello"}\n{"prompt": "' + "x" * 99 + '"}\n')
    out = tmp_path / "new" / "out.json"
    arguments = ("--bundle", folder, "--prompts", prompts, "--max-new-tokens", 20, "--threads", 1)
    assert command(*arguments, "--json", out) == 0
    captured = capsys.readouterr()
    assert "prompt skipped: got a prompt of" in " ".join(captured.err.split())
    assert "tuning takes about 1 min" in captured.err
    tables = captured.out.partition("Chosen: ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables, "nothing is cut off"
    (path,) = profile_cache.iterdir()
    assert str(path) in captured.out
    written = json.loads(out.read_text())["profile"]
    assert written == json.loads(path.read_text())
    names = [candidate["name"] for candidate in written["candidates"]]
    assert names == [PLAIN, "paying", "bundle"]
    for candidate in written["candidates"]:
        assert candidate["tokens_per_second"] > 0
        assert candidate["name"] in captured.out
    chosen = written["chosen"] if written["chosen"] != PLAIN else "plain decoding"
    assert f"Chosen: {chosen}" in captured.out
    assert written["key"]["drafter"] == "parallelspec+prompt_lookup"
    tuned = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(tuned.proposer, PlainProposer if written["chosen"] == PLAIN else Pacer)
    toy_graphs.clear()
    assert command(*arguments, "--quick", "--json", out) == 0
    predicted = json.loads(out.read_text())["profile"]["candidates"]
    assert all(candidate["tokens_per_second"] is None for candidate in predicted)
    assert [file.name for file in out.parent.iterdir()] == ["out.json"]


def test_what_cannot_be_tuned_is_one_line(
    profile_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "' + "x" * 99 + '"}\n')
    for arguments, message in (
        (("--prompts", prompts), "got no prompt that fits the context"),
        (("--drafter", "none", "--prompts", prompts), "got no prompt that fits"),
    ):
        assert command("--bundle", folder, *arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    prompts.write_text('{"prompt": "a"}\n')
    assert command("--bundle", folder, "--drafter", "none", "--prompts", prompts) == 2
    assert "got drafter none, expected one" in capsys.readouterr().err
    assert not profile_cache.exists()


def test_a_full_cache_loses_no_result(
    profile_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(profile, "write", raising(full))
    out = tmp_path / "out.json"
    arguments = ("--bundle", folder, "--max-new-tokens", 4, "--threads", 1, "--json", out)
    assert command(*arguments, "--quick") == 2
    assert "chosen" in json.loads(out.read_text())["profile"]
    captured = capsys.readouterr()
    assert "Chosen: " in captured.out
    assert "Kept in" not in captured.out
    assert captured.err.splitlines()[-1] == "error: [Errno 28] No space left on device"


def test_what_cannot_be_kept_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    monkeypatch.setattr(tune, "tune", lambda *arguments, **options: 1 / 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert command("--bundle", folder) == 2
    assert "Not a directory" in capsys.readouterr().err
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert command("--bundle", folder) == 2
    assert "set XDG_CACHE_HOME to a folder" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    key = profile.key_of(bundle.read(folder, verify=False), "parallelspec", None)
    with profile.reserved(key):
        assert command("--bundle", folder) == 2
    assert "is being written by process" in capsys.readouterr().err.splitlines()[-1]
