"""The metrics, as ARCHITECTURE-level definitions: worked by hand."""

from __future__ import annotations

import pytest

from spec_runtime.loop.stats import PHASES, Clock, Stats


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
