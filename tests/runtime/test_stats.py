"""The metrics, as ARCHITECTURE-level definitions: worked by hand."""

from typing import Any

import pytest
from fake_clock import FakeClock
from toy_engine import make_engine, random_prompt

from spec_runtime.loop import generate
from spec_runtime.loop.stats import PHASES, Clock, Stats
from spec_runtime.trees.budget import Budget


def test_counts_by_hand() -> None:
    stats = Stats()
    stats.count(num_tokens=3, num_accepted=2, num_drafted=5, missed=True)  # 2 hits, depth 3 missed
    stats.count(num_tokens=1, num_accepted=0, num_drafted=5, missed=True)  # depth 1 missed
    stats.count(num_tokens=2, num_accepted=1, num_drafted=1, missed=False)  # a leaf reached
    stats.count(num_tokens=1, num_accepted=0, num_drafted=0, missed=False)  # nothing drafted
    stats.count(num_tokens=1, num_accepted=1, num_drafted=4, missed=False)  # EOS was drafted
    assert stats.steps == 5
    assert stats.committed_tokens == 8
    assert stats.accepted_length == 8 / 5
    assert stats.drafted_tokens == 15
    # depth 1: hit, miss, hit, no child, hit; depth 2: hit; depth 3: miss
    assert stats.depth_trials == [4, 1, 1]
    assert stats.acceptance_by_depth == [3 / 4, 1.0, 0.0]


def test_rates_use_decode_seconds_only() -> None:
    stats = Stats()
    stats.count(4, 3, 3, False)
    stats.timings.update(prefill=5.0, draft=0.5, verify=1.0, accept=0.25, commit=0.125, other=0.125)
    assert stats.prefill_seconds == 5.0
    assert stats.decode_seconds == 2.0
    assert stats.tokens_per_second == 2.0


def test_nothing_decoded_is_zero_not_an_error() -> None:
    stats = Stats()
    assert stats.accepted_length == stats.tokens_per_second == 0.0
    assert stats.acceptance_by_depth == []
    assert tuple(stats.timings) == PHASES


def test_total_weighs_steps_not_prompts() -> None:
    a, b = Stats(prompt_tokens=3, reused_tokens=1), Stats(prompt_tokens=4)
    a.count(3, 2, 4, False)
    for _ in range(3):
        b.count(1, 0, 4, True)
    a.timings["verify"], b.timings["verify"] = 1.0, 2.0
    a.engine_seconds, b.engine_seconds = 0.5, 1.5
    total = Stats.total([a, b])
    assert total.accepted_length == 6 / 4
    assert total.acceptance_by_depth == [1 / 4, 1.0]
    assert total.tokens_per_second == pytest.approx(2.0)
    assert (total.prompt_tokens, total.reused_tokens) == (7, 1)
    assert (total.drafted_tokens, total.engine_seconds) == (16, 2.0)
    assert a.depth_trials == [1, 1]  # the parts are left alone


def test_clock_splits_time_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 11.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    timings = {"draft": 0.0, "verify": 0.0}
    clock = Clock(timings)
    clock.start()
    clock.lap("draft")
    clock.lap("verify")
    clock.start()  # the caller's time is nobody's
    clock.lap("draft")
    assert timings == {"draft": 2.0, "verify": 2.0}


# ---- what the loop says a generation cost, on a clock that moves only where the test says ----


# seconds that one call of each takes; sums of these are exact
TARGET, DRAFTER, PROPOSE, ACCEPT, COMMIT = 64.0, 16.0, 4.0, 2.0, 1.0
CALLER = 1024.0  # what the caller does between two steps is nobody's


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr("time.perf_counter", fake.read)
    return fake


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "parallelspec"])
def test_every_second_is_counted_once(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    engine = make_engine(drafter, budget=Budget(6), num_successors=4, peak=7.0, noise=4.0)
    proposer, target = engine.proposer, engine.target
    backend, _ = target.lend()
    monkeypatch.setattr(backend, "run", clock.taking(TARGET, backend.run))
    monkeypatch.setattr(proposer, "drafting", clock.taking(PROPOSE, proposer.drafting))
    rule = clock.taking(ACCEPT, generate.by_target_sampling)
    monkeypatch.setattr(generate, "by_target_sampling", rule)
    monkeypatch.setattr(target, "commit", clock.taking(COMMIT, target.commit))
    network_runs = 0
    if drafter == "parallelspec":
        network: Any = proposer._rows._backend  # type: ignore[attr-defined]
        run = network.run

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal network_runs
            network_runs += 1
            clock.now += DRAFTER
            return run(*arguments, **options)

        monkeypatch.setattr(network, "run", counted)

    runs_of_prompt, steps = 0, 0
    for step in engine.steps(random_prompt(1), max_new_tokens=40, ignore_eos=True):
        if step.verified is None:
            runs_of_prompt = network_runs
        steps += step.verified is not None
        clock.now += CALLER
    assert engine.last_result is not None
    stats = engine.last_result.stats
    assert stats.steps == steps > 5
    drafting = DRAFTER * (network_runs - runs_of_prompt)
    assert (drafting > 0) == (drafter == "parallelspec")
    # the prompt: one pass, its commit, the first token's draw, the drafter's start
    assert stats.timings["prefill"] == TARGET + COMMIT + ACCEPT + DRAFTER * runs_of_prompt
    assert stats.timings["draft"] == PROPOSE * steps + drafting
    assert stats.timings["verify"] == TARGET * steps
    assert stats.timings["accept"] == ACCEPT * steps
    assert stats.timings["commit"] == COMMIT * steps
    assert stats.timings["other"] == 0
    assert stats.engine_seconds == TARGET * steps + drafting
    each = PROPOSE + TARGET + ACCEPT + COMMIT
    assert stats.decode_seconds == each * steps + drafting
    assert stats.tokens_per_second == 39 / stats.decode_seconds
