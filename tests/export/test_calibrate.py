"""Tests calibrate with scripted drafters on the toy target, whose figures can be counted by hand.

On real bundles the accepted length that it predicts must be the one that decoding then has.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import Run, toy_engine, write_small_bundle
from workshop import FluentWorkshop, Workshop

from spec_export import cli
from spec_export.check import calibrate
from spec_runtime import load
from spec_runtime.bundle import manifest as bundles
from spec_runtime.engine import Engine
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder, grow, grow_by_levels
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

NUM_LEVELS, NUM_CANDIDATES = 3, 4
PROMPTS = [list(b"abcab"), list(b"x"), list(b"hello, world")]
NUM_TOKENS = 40


class Scripted(PlainProposer):
    """Knows the answers, and guesses the token k + 1 behind position i at a rank drawn by (i, k),
    often not at all. `is_sequential`: so it does behind the answer's own tokens, other paths get
    decoys; else each depth has its guesses whatever came before."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], is_sequential: bool) -> None:
        self.answers, self.is_sequential = answers, is_sequential

    @staticmethod
    def rank(position: int, k: int) -> int | None:
        rank = int(np.random.default_rng([position, k]).integers(0, NUM_CANDIDATES + 2))
        return max(0, rank - 1) if rank <= NUM_CANDIDATES else None

    def start(self, prompt: Sequence[int], features_TF: Any, reused: int) -> None:
        self.answer, self.position = self.answers[tuple(prompt)], 0

    def commit(self, step: Step) -> None:
        self.position += len(step.tokens)

    def guess(self, k: int, seed: Sequence[int], is_right: bool) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.position, k, *seed])
        probability = np.sort(rng.dirichlet(np.ones(NUM_CANDIDATES + 1))[1:])[::-1]
        at = self.position + 1 + k
        true = self.answer[at] if at < len(self.answer) else 0
        ids = (true + 1 + rng.permutation(100)[:NUM_CANDIDATES]) % 256
        rank = self.rank(self.position, k)
        if is_right and rank is not None:
            ids[rank] = true
        return ids, np.log(probability)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        assert token == self.answer[self.position], "out of step"
        if not self.is_sequential:
            ids, log_probs = zip(*(self.guess(k, (), True) for k in range(NUM_LEVELS)), strict=True)
            return grow(token, Guesses(np.stack(ids), np.stack(log_probs)), budget)

        def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
            tree, guesses = nodes.build(), []
            for node in range(first, len(nodes)):
                path = tree.token_N[tree.path(node)[1:]].tolist()
                begin = self.position + 1
                is_right = path == self.answer[begin : begin + len(path)]
                guesses.append(self.guess(len(path), path, is_right))
            return np.stack([ids for ids, _ in guesses]), np.stack([logs for _, logs in guesses])

        return grow_by_levels(token, expand, budget, NUM_LEVELS, max_width=5)


def scripted(is_sequential: bool) -> Engine:
    plain = toy_engine("none")
    answers = {
        tuple(prompt): plain.generate(prompt, max_new_tokens=NUM_TOKENS).token_ids
        for prompt in PROMPTS
    }
    return plain.observed(lambda proposer: Scripted(answers, is_sequential))


@pytest.fixture(params=[False, True], ids=["one-pass", "sequential"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return scripted(request.param)


def measure(engine: Engine, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return calibrate.summarise([calibrate.watch(engine, ids, num_tokens) for ids in PROMPTS])


def test_accuracies_are_those_of_the_script(engine: Engine) -> None:
    found = measure(engine)
    num_positions = NUM_TOKENS - 1
    assert (found["prompts"], found["positions"]) == (3, 3 * num_positions)
    hits, trials = np.zeros((NUM_LEVELS, NUM_CANDIDATES)), np.zeros(NUM_LEVELS)
    for position in range(num_positions):
        for k in range(min(NUM_LEVELS, num_positions - position)):
            trials[k] += 1
            rank = Scripted.rank(position, k)
            if rank is None:
                break
            hits[k, rank] += 1
    np.testing.assert_allclose(found["accuracy"], hits / trials[:, None], atol=1e-5)
    assert (hits > 0).all(), "every rank at every depth is tested"
    assert (hits.sum(axis=1) < trials).all(), "so are misses"


@pytest.mark.parametrize("num_tokens", [20, 40])  # the trees before an answer's end are flatter
def test_accepted_length_is_what_decoding_has(engine: Engine, num_tokens: int) -> None:
    found = measure(engine, num_tokens)["accepted_length"]
    for nodes in (2, 8, 32):  # the toy's scratch is 32
        decoding = engine.with_budget(Budget(nodes))
        stats = Stats.total(
            decoding.generate(ids, max_new_tokens=num_tokens, reuse=False).stats for ids in PROMPTS
        )
        assert stats.accepted_length == pytest.approx(found[str(nodes)], abs=1e-4), nodes
    assert found["2"] < found["8"] < found["32"]


def test_reliability_counts_every_node_once(engine: Engine) -> None:
    answers = [calibrate.watch(engine, ids, NUM_TOKENS) for ids in PROMPTS]
    rows = calibrate.summarise(answers)["reliability"]
    proposer = engine.proposer
    num_nodes, num_hits, total = 0, 0, 0.0
    for ids in PROMPTS:
        proposer.start(ids, None, 0)
        answer = engine.generate(ids, max_new_tokens=NUM_TOKENS, reuse=False).token_ids
        proposer.start(ids, None, 0)
        for position, token in enumerate(answer[:-1]):
            left = len(answer) - 1 - position  # the last may come as bonus, no sooner
            tree = proposer.propose(token, Budget(64, max_depth=left - 1))
            for node in range(1, tree.num_nodes):
                assert tree.log_prob_N is not None
                path = tree.token_N[tree.path(node)[1:]].tolist()
                if position + len(path) < len(answer):
                    num_nodes += 1
                    num_hits += answer[position + 1 :][: len(path)] == path
                    total += float(np.exp(tree.log_prob_N[node]))
            proposer.commit(Step([answer[position + 1]], 0))
    assert sum(count for _, _, count in rows) == num_nodes
    assert sum(seen * count for _, seen, count in rows) == pytest.approx(num_hits, rel=1e-3)
    assert sum(expected * count for expected, _, count in rows) == pytest.approx(total, rel=1e-3)
    for (x, y, _), (next_x, next_y, _) in itertools.pairwise([(0.0, 0.0, 0), *rows]):
        assert x < next_x <= 1
        assert y <= next_y <= 1


def test_reliability_by_hand() -> None:
    predicted = np.array([0.9, 0.6, 0.3, 0.3, 0.2, 0.0, 1e-9])
    observed = np.array([1, 1, 1, 0, 0, 0, 0], np.bool_)
    assert calibrate.reliability(predicted, observed) == [
        [5e-10, 0.0, 2],
        [0.2, 0.0, 1],
        [0.3, 0.5, 2],
        [0.75, 1.0, 2],
    ]
    # 0.3 was accepted more often than 0.6: one row
    observed[:4] = [1, 0, 1, 1]
    assert calibrate.reliability(predicted, observed)[1:] == [[0.2, 0.0, 1], [0.525, 0.75, 4]]


def test_accepted_length_by_hand() -> None:
    """Trees at five positions; the answer goes through nodes 1 and 3, none, 2, 1, none of them."""
    nodes = [[1, 3], [], [2], [1], []]
    assert calibrate.accepted_length([nodes], 64) == 5 / 2  # 3 tokens, then node 1 and the bonus
    assert calibrate.accepted_length([nodes], 3) == 5 / 3  # 2, 2, 1
    assert calibrate.accepted_length([nodes], 1) == 1
    assert calibrate.accepted_length([nodes, [[1]]], 3) == 6 / 4


def test_a_second_answer_that_differs_counts_as_far_as_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, generate, calls = scripted(False), Engine.generate, []

    def generate_otherwise(self: Engine, *args: Any, **kwargs: Any) -> Any:
        result = generate(self, *args, **kwargs)
        calls.append(result.token_ids)
        if len(calls) == 2:
            result.token_ids[10] += 1
        return result

    monkeypatch.setattr(Engine, "generate", generate_otherwise)
    answer = calibrate.watch(engine, PROMPTS[0], NUM_TOKENS)
    assert len(answer.ranks) == len(answer.nodes) == 9


def test_no_usable_answer_is_said() -> None:
    engine = scripted(False)
    with pytest.raises(ValueError, match="got no answer of two tokens or more"):
        calibrate.summarise([calibrate.watch(engine, PROMPTS[0], max_new_tokens=1)])


# ------------------------------------------------------------------------------------ real bundles


@pytest.mark.slow
def test_a_bundle_is_calibrated_and_decodes_as_foretold(
    fluent: FluentWorkshop, tmp_path: Path, run: Run
) -> None:
    """Every drafter in one run."""
    folder = Path(shutil.copytree(fluent.every(), tmp_path / "bundle"))
    prompts = tmp_path / "prompts.jsonl"
    texts = ["say abc, 3", "one two. one two. one", "x" * 5000]  # the last does not fit
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    before = bundles.read(folder).manifest
    options = ["--prompts", prompts, "--max-new-tokens", 24, "--threads", 1]
    code, *shown = run("calibrate", "--bundle", folder, *options, main=cli.main)
    assert code == 0
    out, err = (" ".join(text.split()) for text in shown)
    assert "prompt 3 skipped: got a prompt of" in err
    after = bundles.read(folder).manifest  # with all its hashes
    plain = load(folder, "none", threads=1, profile=False)
    for old, drafter in zip(before.drafters, after.drafters, strict=True):
        name, found = drafter.name, drafter.calibration
        assert drafter == dataclasses.replace(old, calibration=found)
        assert found is not None
        engine = plain.with_drafter(name, lookup=False).with_budget(Budget(16))
        runs = [engine.generate(text, max_new_tokens=24, reuse=False) for text in texts[:2]]
        stats = Stats.total(run.stats for run in runs)
        positions = f"{stats.committed_tokens} positions of 2 answers"
        assert f"{name}: target's token among the guesses, {positions}" in out
        assert (found["prompts"], found["positions"]) == (2, stats.committed_tokens)
        foretold = found["accepted_length"]["16"]
        assert stats.accepted_length == pytest.approx(foretold, abs=1e-4), name
        num_levels, num_candidates = np.array(found["accuracy"]).shape
        assert 1 <= num_levels <= drafter.config.get("num_guesses", 5)
        assert num_candidates > 1


def test_what_cannot_be_calibrated_is_one_line(tmp_path: Path, run: Run) -> None:
    folder = write_small_bundle(tmp_path / "small")
    manifest = bundles.read(folder).manifest
    code, _, err = run("calibrate", "--bundle", folder, "--drafter", "medusa", main=cli.main)
    assert (code, err.count("\n")) == (2, 1)
    assert "got drafter 'medusa', expected one this bundle holds" in err
    bundles.write_manifest(folder, dataclasses.replace(manifest, drafters=()))
    code, _, err = run("calibrate", "--bundle", folder, main=cli.main)
    assert (code, err.count("\n")) == (2, 1)
    assert "has no trained drafter to calibrate" in err


def test_a_manifest_that_cannot_be_written_is_found_before_the_work(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(workshop.bundle("parallelspec"), tmp_path / "bundle"))

    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(calibrate, "require_writable", refuse)
    monkeypatch.setattr(calibrate, "load", None)  # nothing is opened
    with pytest.raises(OSError, match="Read-only"):
        calibrate.run(folder)


def test_a_calibration_is_printed_before_it_is_stored_and_keeps_what_others_stored(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder = Path(shutil.copytree(workshop.bundle("parallelspec"), tmp_path / "bundle"))
    real, stored = bundles.write_manifest, dict[str, dict[str, Any]]()

    def meanwhile(name: str, calibration: dict[str, Any]) -> None:
        manifest = bundles.read(folder).manifest
        (info,) = manifest.drafters
        changed = dataclasses.replace(info, expected_accepted_length=4.25)
        real(folder, dataclasses.replace(manifest, drafters=(changed,)))
        stored[name] = calibration

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "say abc, 3"}) + "\n")
    calibrate.run(folder, prompts, max_new_tokens=4, threads=1, on_found=meanwhile)
    (info,) = bundles.read(folder).manifest.drafters
    assert (info.expected_accepted_length, info.calibration) == (4.25, stored["parallelspec"])

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, "write_manifest", full)
    arguments = ["--bundle", folder, "--prompts", prompts, "--max-new-tokens", 4]
    code, out, err = run("calibrate", *arguments, main=cli.main)
    assert code == 2
    assert "target's token among the guesses" in " ".join(out.split())
    assert "No space left on device" in err
