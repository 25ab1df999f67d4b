"""Tests what is measured when a bundle is first opened on a machine, and what becomes of it."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from small import known, toy_engine
from toy_backend import ToyTarget
from toy_bundle import write_bundle
from tuning import COSTS, opened_anew

from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.proposer import PlainProposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import LOGITS, Target
from spec_runtime.pace import first_use, profile
from spec_runtime.pace.costs import Gain, PassCosts
from spec_runtime.pace.measured import measure_passes
from spec_runtime.pace.pacer import CONTEXT_ROWS, FIRST_PAUSE, Known, Pacer
from spec_runtime.pace.profile import Candidate, Profile, Trees
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree

pytestmark = [pytest.mark.first_use, pytest.mark.usefixtures("toy_graphs")]

FAR = replace(COSTS, context=200, far=PassCosts(1400, ((1, 19.0), (4, 33.0)), 20.0))


@pytest.mark.parametrize("drafter", ["parallelspec", "prompt_lookup", "lookahead"])
def test_a_bundle_is_measured_once(
    profile_cache: Path,
    tmp_path: Path,
    toy_graphs: list[ToyTarget],
    drafter: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_use, "PASS_SECONDS", 60.0)  # no size is left out on a busy machine
    monkeypatch.setattr(profile, "BUSY_SPREAD", 1e9)  # and none is measured again
    caplog.set_level(logging.INFO, "spec_runtime")
    folder = write_bundle(tmp_path, ("parallelspec",))
    own = opened_anew(toy_graphs, folder, drafter=drafter, threads=1, profile=False)
    expected = own.generate("hello", max_new_tokens=30).token_ids
    assert not [*profile_cache.glob("*.json")]
    first = opened_anew(toy_graphs, folder, drafter=drafter, threads=1)
    (message,) = caplog.messages
    assert message.endswith(f"drafts with {drafter} cost on this machine, once for this bundle")
    assert caplog.records[0].levelno == logging.INFO, "a note, no warning"
    (file,) = profile_cache.glob("*.json")
    key = profile.key_of(bundles.read(folder, verify=False), drafter, 1)
    found = known(profile.find(key))
    assert (found.curve, found.is_tuned, profile.path_of(key)) == (profile.FIRST_USE, False, file)
    assert [n for n, _ in found.costs.verify] == [1, 2, 4, 8, 16]
    assert isinstance(first.proposer, Pacer)
    assert first.budget == known(found.choice.trees).budget()
    assert not first.is_tuned
    assert first.generate("hello", max_new_tokens=30).token_ids == expected
    before = file.read_bytes()
    opened_anew(toy_graphs, folder, drafter=drafter, threads=1)
    assert (caplog.messages, file.read_bytes()) == ([message], before)


class BusyTarget:
    """Lets the fake clock go on by ten seconds a pass, and by up to forty while the machine
    `is_busy`."""

    def __init__(self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_busy = True
        self._num_passes = 0
        verify = Target.verify

        def timed(target: Target, *arguments: Any, **options: Any) -> Any:
            self._num_passes += 1
            clock.now += 10.0 + self.is_busy * 5.0 * (self._num_passes % 7)
            return verify(target, *arguments, **options)

        monkeypatch.setattr(Target, "verify", timed)


def test_costs_of_a_busy_machine_are_measured_again_at_later_loads(
    profile_cache: Path,
    tmp_path: Path,
    toy_graphs: list[ToyTarget],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock.read)
    monkeypatch.setattr(first_use, "PASS_SECONDS", 1e6)
    caplog.set_level(logging.INFO, "spec_runtime")
    machine = BusyTarget(clock, monkeypatch)
    folder = write_bundle(tmp_path, ("parallelspec",))
    key = profile.key_of(bundles.read(folder, verify=False), "parallelspec", 1)

    def load() -> Profile:
        opened_anew(toy_graphs, folder, threads=1).with_drafter(None)
        found = known(profile.find(key))
        return found

    first = load()
    assert (first.takes, first.is_settled) == (1, False)
    assert first.costs.spread > profile.BUSY_SPREAD
    assert caplog.messages[0].endswith("it was busy: a later load measures it again")
    machine.is_busy = False
    second = load()
    assert (second.takes, second.is_settled, second.costs.spread) == (2, True, 1.0)
    assert {ms for _, ms in second.costs.verify} == {10_000.0}
    assert load() == second
    assert len(caplog.messages) == 2, "once a load, and not once it is settled"
    # on a machine that is always busy it is given up
    profile.path_of(key).unlink()
    machine.is_busy = True
    spreads = {load().costs.spread for _ in range(2)}
    third = load()
    assert (third.takes, third.is_settled) == (3, True)
    assert third.costs.spread <= min(spreads)
    assert load() == third
    profile.write(replace(third, takes=1, curve="run"))
    assert load().is_settled, "what tune found is kept"


def test_sizes_are_left_out_where_passes_are_slow() -> None:
    target, sizes = toy_engine().target, (1, 8, 4, 2)
    (hurried,) = measure_passes(target, [1, 2, 3], sizes, LOGITS, seconds=0.0, least=0)
    assert [n for n, _ in hurried.verify] == [1, 8]
    for seconds, least in ((0.0, 1), (60.0, 0)):
        (patient,) = measure_passes(target, [1, 2, 3], sizes, LOGITS, seconds, least)
        assert [n for n, _ in patient.verify] == [1, 2, 4, 8]
    assert target.length == 0


def test_slow_moments_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight passes of a size three take four times as long as the others."""
    clock, num_passes = FakeClock(), 0
    monkeypatch.setattr("time.perf_counter", clock.read)
    target = toy_engine().target
    verify = target.verify

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        clock.now += 40.0 if num_passes // 3 % 8 > 4 else 10.0
        return verify(*arguments, **options)

    monkeypatch.setattr(target, "verify", timed)
    (found,) = measure_passes(target, [1, 2, 3], (1, 4), LOGITS, seconds=0.0, least=8)
    assert {ms for _, ms in found.verify} == {10_000.0} == {found.plain}


def test_what_a_request_begins_with_is_what_the_manifest_says() -> None:
    """Without a calibration trees are half full; with one, of the size that is fastest here."""
    engine: Any = SimpleNamespace(budget=Budget(8, growth=Grown(0.05)))
    entry: Any = SimpleNamespace(expected_accepted_length=None, calibration=None)
    bundles_own = first_use._candidate(engine, COSTS, 4, entry)
    assert bundles_own == Candidate("bundle", Trees(4, 0.05))
    assert bundles_own.known.gain is None
    entry.expected_accepted_length = 2.1
    found = first_use._candidate(engine, COSTS, 4, entry)
    assert found.expected_speedup == pytest.approx(2.1 * 10 / COSTS.of(2, 2.1), abs=1e-4)
    assert found.known.gain == found.gain
    entry.calibration = {
        "reliability": [[0.5, 0.4, 9], [0.9, 0.8, 5]],
        "accepted_length": {"2": 1.5, "4": 1.9},
    }
    found = first_use._candidate(engine, COSTS, 4, entry)
    assert found.trees == Trees(4, 0.0, ((0.5, 0.4), (0.9, 0.8)))
    assert (found.accepted_length, found.gain.speedup) == (1.9, round(19 / COSTS.of(4, 1.9), 4))


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    tmp_path: Path, toy_graphs: list[ToyTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = write_bundle(tmp_path, ("parallelspec",))
    for _ in range(2):
        assert isinstance(opened_anew(toy_graphs, folder, threads=1).proposer, Pacer)


def test_plain_decoding_needs_no_costs(
    profile_cache: Path, tmp_path: Path, toy_graphs: list[ToyTarget]
) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",))
    assert isinstance(
        opened_anew(toy_graphs, folder, drafter="none", threads=1).proposer, PlainProposer
    )
    assert not profile_cache.exists()


def test_costs_are_those_of_the_context() -> None:
    assert FAR.at(200).plain == 10.0
    assert FAR.at(80).plain == pytest.approx(9.0)
    assert FAR.at(800).plain == pytest.approx(15.0)
    assert FAR.at(800).verify == ((1, pytest.approx(14.0)), (4, pytest.approx(23.0)))
    assert FAR.at(2600).plain == pytest.approx(30.0)
    assert COSTS.at(2600) == COSTS


class Noting(WithoutRuns, ProposerWrapper):
    """Drafts two tokens, and notes the budgets."""

    def __init__(self, log_prob_N: np.ndarray | None = None) -> None:
        super().__init__(PlainProposer())
        self.budgets: list[Budget] = []
        self._log_prob_N = log_prob_N

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self.budgets.append(budget)
        if budget.is_root_only:
            return TokenTree.root(token)
        return replace(TokenTree.chain([token, 1, 2]), log_prob_N=self._log_prob_N)


def test_trees_have_the_step_times_of_their_context() -> None:
    noting = Noting()
    pacer = Pacer(noting, FAR, Known(Gain(2.0, 1.5)))
    pacer.start([1] * (8 * CONTEXT_ROWS - 1), None, 0)
    for _ in range(2):
        pacer.propose(1, Budget(4))
        pacer.commit(Step([1, 1], 1))
    for number, budget in zip((7, 8), noting.budgets, strict=True):
        assert isinstance(budget.growth, Grown)
        costs = FAR.at(number * CONTEXT_ROWS)
        assert [*known(budget.growth.terms).step_ms] == [*costs.step_ms(4)]
        assert known(budget.growth.terms).rate >= 1 / costs.plain


def test_a_pause_is_longer_where_steps_lost_more() -> None:
    noting = Noting()
    dear = replace(COSTS, verify=((1, 9.0), (4, 33.0)))  # a draft of two loses 1.7 plain steps
    pacer = Pacer(noting, dear)
    pacer.start([1], None, 0)
    for _ in range(200):
        pacer.propose(1, Budget(4))
        pacer.commit(Step([1], 0))
    drafted = [not budget.is_root_only for budget in noting.budgets]
    pause = round(1.4 * FIRST_PAUSE)  # 2 - 1.7 - 1.7
    assert [i for i, each in enumerate(drafted) if each] == [0, 1, 2 + pause]


def test_lookup_that_costs_nothing_is_never_paused() -> None:
    noting = Noting(np.log([1.0, 0.5, 0.3]))
    free = replace(COSTS, draft=0.1)
    pacer = Pacer(noting, free)
    pacer.start([1], None, 0)
    for _ in range(100):
        pacer.propose(1, Budget(4))
        pacer.commit(Step([1], 0))
    assert not any(budget.is_root_only for budget in noting.budgets)
