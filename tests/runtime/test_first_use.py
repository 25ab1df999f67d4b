"""Tests what is measured when a bundle is first opened on a machine, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import toy_engine
from toy_backend import ToyTarget
from toy_bundle import write_bundle
from tuning import COSTS, opened_anew

from spec_runtime.bundle import manifest as bundles
from spec_runtime.loop.proposer import PlainProposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import LOGITS
from spec_runtime.pace import first_use, profile
from spec_runtime.pace.adaptive import CONTEXT_ROWS, FIRST_REST, DraftPauser
from spec_runtime.pace.measured import measure_passes
from spec_runtime.pace.profile import Gain, PassCosts
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
    folder = write_bundle(tmp_path, ("parallelspec",))
    own = opened_anew(toy_graphs, folder, drafter=drafter, threads=1, profile=False)
    expected = own.generate("hello", max_new_tokens=30).token_ids
    assert not [*profile_cache.glob("*.json")]
    first = opened_anew(toy_graphs, folder, drafter=drafter, threads=1)
    (message,) = caplog.messages
    assert f"what drafts with {drafter} cost on this machine" in message
    (file,) = profile_cache.glob("*.json")
    key = profile.key_of(bundles.read(folder, verify=False), drafter, 1)
    found = profile.find(key)
    assert found is not None
    assert (found.curve, found.is_tuned, profile.path_of(key)) == (profile.FIRST_USE, False, file)
    assert [n for n, _ in found.costs.verify] == [1, 2, 4, 8, 16]
    assert isinstance(first.proposer, DraftPauser)
    assert first.budget == found.choice.budget
    assert not first.is_tuned
    growth = first.budget.growth
    assert isinstance(growth, Grown)
    assert bool(growth.step_ms) == (drafter != "lookahead")  # whose nodes have no probabilities
    assert first.generate("hello", max_new_tokens=30).token_ids == expected
    before = file.read_bytes()
    opened_anew(toy_graphs, folder, drafter=drafter, threads=1)
    assert (caplog.messages, file.read_bytes()) == ([message], before)


def test_sizes_are_left_out_where_passes_are_slow() -> None:
    target, sizes = toy_engine().target, (1, 8, 4, 2)
    (hurried,) = measure_passes(target, [1, 2, 3], sizes, LOGITS, seconds=0.0, least=0)
    assert [n for n, _ in hurried.verify] == [1, 8]
    for seconds, least in ((0.0, 1), (60.0, 0)):
        (patient,) = measure_passes(target, [1, 2, 3], sizes, LOGITS, seconds, least)
        assert [n for n, _ in patient.verify] == [1, 2, 4, 8]
    assert target.length == 0


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    tmp_path: Path, toy_graphs: list[ToyTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = write_bundle(tmp_path, ("parallelspec",))
    for _ in range(2):
        assert isinstance(opened_anew(toy_graphs, folder, threads=1).proposer, DraftPauser)


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

    def __init__(self) -> None:
        super().__init__(PlainProposer())
        self.budgets: list[Budget] = []

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self.budgets.append(budget)
        return TokenTree.chain([token] if budget.is_root_only else [token, 1, 2])


def priced(costs: Any = FAR) -> Budget:
    return Budget(4, growth=Grown(step_ms=costs.step_ms(4)))


def test_trees_have_the_step_times_of_their_context() -> None:
    noting = Noting()
    pauser = DraftPauser(noting, FAR, Gain(2.0, 1.5))
    pauser.start([1] * (8 * CONTEXT_ROWS - 1), None, 0)
    for _ in range(2):
        pauser.propose(1, priced())
        pauser.commit(Step([1, 1], 1))
    first, second = (budget.growth for budget in noting.budgets)
    assert isinstance(first, Grown)
    assert isinstance(second, Grown)
    assert first.step_ms == FAR.at(7 * CONTEXT_ROWS).step_ms(4)
    assert second.step_ms == FAR.at(8 * CONTEXT_ROWS).step_ms(4)


def test_a_rest_is_longer_where_steps_lost_more() -> None:
    noting = Noting()
    dear = replace(COSTS, verify=((1, 9.0), (4, 33.0)))  # a draft of two loses 1.7 plain steps
    pauser = DraftPauser(noting, dear)
    pauser.start([1], None, 0)
    for _ in range(200):
        pauser.propose(1, Budget(4))
        pauser.commit(Step([1], 0))
    drafted = [not budget.is_root_only for budget in noting.budgets]
    rest = round(1.4 * FIRST_REST)  # 2 - 1.7 - 1.7
    assert [i for i, each in enumerate(drafted) if each] == [0, 1, 2 + rest]


def test_lookup_that_costs_nothing_never_rests() -> None:
    noting = Noting()
    free = replace(COSTS, draft=0.1)
    pauser = DraftPauser(noting, free)
    pauser.start([1], None, 0)
    for _ in range(100):
        pauser.propose(1, priced(free))
        pauser.commit(Step([1], 0))
    assert not any(budget.is_root_only for budget in noting.budgets)
