"""What the engine says about a drafter whose live acceptance is not what was measured."""

from typing import Any

import pytest
from toy_engine import make_engine, random_prompt

from spec_runtime.engine import Engine
from spec_runtime.loop.answering import JUDGED_STEPS
from spec_runtime.loop.proposer import OpenedDrafter

LONG: dict[str, Any] = {"max_length": 800, "num_successors": 97}


def engine_expecting(expected: float | None, drafter: str = "parallelspec", **model: Any) -> Engine:
    made = make_engine(drafter, **LONG | model)
    opened = OpenedDrafter(drafter, made.proposer, made.budget, expected_accepted_length=expected)
    return Engine(made.target, made.tokenizer, opened)


def live(expected: float | None, num_tokens: int = 300, **options: Any) -> float:
    engine = engine_expecting(expected, **options.pop("model", {}))
    options = {"max_new_tokens": num_tokens, "ignore_eos": True} | options
    stats = engine.generate(random_prompt(0), **options).stats
    assert (stats.steps >= JUDGED_STEPS) == (num_tokens >= 300)
    return stats.accepted_length


def test_under_a_sixth_of_the_expected_drafted_tokens_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = live(None)
    assert got > 1.5
    assert caplog.messages == []
    most = 1 + 6 * (got - 1)  # of whose drafted tokens `got` has exactly a sixth
    live(got)
    live(most - 0.01)
    assert caplog.messages == []
    engine = engine_expecting(most + 0.01)
    for _ in range(2):
        engine.generate(random_prompt(0), max_new_tokens=300, ignore_eos=True)
    (message,) = caplog.messages
    assert f"drafter parallelspec: accepted length {got:.2f} in" in message
    assert f"expected about {most + 0.01:.2f}" in message
    assert caplog.records[0].name == "spec_runtime"


def test_a_short_generation_or_a_sampled_one_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    live(50.0, num_tokens=JUDGED_STEPS)
    live(50.0, temperature=0.9, seed=1)
    assert caplog.messages == []
    live(50.0)
    assert len(caplog.messages) == 1


def test_total_acceptance_warns_sampled_or_not(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that is never wrong has seen the answer."""
    peaked = {"peak": 60.0}
    got = live(None, num_tokens=500, model=peaked)
    assert caplog.messages == []
    for temperature in (0.0, 0.05):  # at higher ones the noise is a reason to guess otherwise
        live(got, num_tokens=500, model=peaked, temperature=temperature, seed=0)
    typical = {"temperature": 0.5, "acceptance": "typical"}  # there it is the threshold's doing
    live(got, num_tokens=500, model=peaked, **typical)
    assert len(caplog.messages) == 2
    assert all("all drafted tokens were accepted in" in message for message in caplog.messages)


def test_plain_decoding_drafts_nothing_and_is_not_total(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_expecting(1.0, "none")
    engine.generate(random_prompt(0), max_new_tokens=300, ignore_eos=True)
    assert caplog.messages == []
