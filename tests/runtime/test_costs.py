"""What the loop says a generation cost, on a clock that moves only where the test says."""

from __future__ import annotations

from typing import Any

import pytest
from fake_clock import FakeClock
from toy_engine import make_engine, random_prompt

from spec_runtime.loop import generate
from spec_runtime.trees.budget import Budget

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
