"""Checks what every drafter must do, of engines on a bundle of a `FluentWorkshop`.

tests/test_contract.py runs the checks for the drafters of the registration table, and
tests/export/test_drafters_readme.py for the README's example.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from workshop import Workshop, drafter_name

import spec_runtime
from spec_export.build.drafters import load_module
from spec_export.drafters.layers import Batch
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps
from spec_export.training import checkpoint
from spec_runtime.engine import Engine, GenerationResult
from spec_runtime.loop.step import Step

PROMPTS = ["say abc, 3", "one two. one two. one", "x", "The quick brown fox; 0123 0123"]
# Cut distributions see tests/test_batch.py.
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
SEVERAL = 5  # steps


def check_acceptance(steps: list[Step]) -> None:
    """Several steps accepted two tokens or more, and several accepted none.

    Without the former, no test of what follows an accepted path tests anything.
    """
    num_long = sum(step.num_accepted >= 2 for step in steps)
    num_refused = sum(step.num_accepted == 0 and bool(step.path) for step in steps)
    assert num_long >= SEVERAL, f"{num_long} steps of {len(steps)} accepted two tokens or more"
    assert num_refused >= SEVERAL, f"{num_refused} steps of {len(steps)} accepted no token"


def check_no_token_changes(
    engine: Engine,
    sampling: dict[str, Any],
    answers: dict[tuple[str, str], GenerationResult] | None = None,
) -> None:
    """The engine's text is plain decoding's, over steps that accept much, little and nothing.

    `answers` keeps plain decoding's, by the sampling and the prompt, for other drafters.
    """
    plain = engine.with_drafter("none")
    answers = {} if answers is None else answers
    steps: list[Step] = []
    for prompt in PROMPTS:
        key = str(sampling), prompt
        if key not in answers:
            answers[key] = plain.generate(prompt, max_new_tokens=60, ignore_eos=True, **sampling)
        expected = answers[key]
        steps += engine.steps(prompt, max_new_tokens=60, ignore_eos=True, **sampling)
        result = engine.last_result
        assert result is not None
        assert result.token_ids == expected.token_ids, prompt
        assert result.text == expected.text
        assert len(result.token_ids) == 60
    check_acceptance(steps)


def check_guesses_are_pytorchs(
    workshop: Workshop, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of the drafter's graph in a generation guesses as the module does on features by
    transformers, after accepted paths too.

    Tolerance 1e-3 on log-probabilities: float32 through two networks (measures 1e-5).
    """
    prompt_ids = engine.encode(PROMPTS[0])
    guesses, answer, num_long = _recorded_guesses(engine, prompt_ids, monkeypatch)
    assert len(guesses) >= 10
    assert num_long >= SEVERAL, f"{num_long} steps accepted two tokens or more"

    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    saved = checkpoint.load_drafter(workshop.drafter(name))
    backbone = Backbone.from_transformers(hf_model)
    module = load_module(saved, backbone.config, target.ends(backbone))
    token_T = torch.tensor(prompt_ids + answer)
    with torch.no_grad():
        states = features_and_taps(hf_model.model, token_T[None], module.config.taps)
    features = torch.cat(states, -1)
    is_answer = torch.ones_like(token_T, dtype=torch.bool)
    batch = Batch(token_T[None], is_answer[None], features, torch.tensor([len(token_T)]))
    ids, log_probs = (x[0].numpy() for x in module.guesses(batch, len(module.draft_token_ids)))
    for row, got in guesses.items():
        num_guesses, top = got["guess_log_probs"].shape
        best = log_probs[row][:num_guesses, :top]
        assert np.abs(got["guess_log_probs"] - best).max() <= 1e-3
        for k, guess_ids in enumerate(got["guess_ids"]):
            log_prob_of = dict(zip(ids[row, k].tolist(), log_probs[row, k].tolist(), strict=True))
            mine = [log_prob_of[i] for i in guess_ids.tolist()]
            assert np.abs(mine - got["guess_log_probs"][k]).max() <= 1e-3
    if module.bigrams is not None:
        _check_pairs(module, batch, guesses)


def _check_pairs(module: Any, batch: Batch, guesses: dict[int, dict[str, np.ndarray]]) -> None:
    """The guesses are conditioned in pairs as the module's are. Where rounding makes another
    token the last candidate, the sums over the candidates differ: such guesses are left out."""
    C = next(iter(guesses.values()))["guess_ids"].shape[1]
    ids_RKC, _, pair_RKCC = (x[0].numpy() for x in module.guesses_with_pairs(batch, C))
    num_compared = num_pairs = 0
    for row, got in guesses.items():
        for k, pair_CC in enumerate(got["pair_log_probs"]):
            before, behind = got["guess_ids"][k : k + 2]
            p_C, p_mine = before.argsort(), ids_RKC[row, k].argsort()
            c_C, c_mine = behind.argsort(), ids_RKC[row, k + 1].argsort()
            num_pairs += 1
            if set(before) == set(ids_RKC[row, k]) and set(behind) == set(ids_RKC[row, k + 1]):
                num_compared += 1
                mine_CC = pair_RKCC[row, k][np.ix_(p_mine, c_mine)]
                assert np.abs(mine_CC - pair_CC[np.ix_(p_C, c_C)]).max() <= 1e-3
    assert num_compared > 0.9 * num_pairs > 0


def _recorded_guesses(
    engine: Engine, prompt_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, dict[str, np.ndarray]], list[int], int]:
    """Returns what the drafter's graph gave at each committed position, the answer, and how many
    steps accepted at least two tokens.

    A drafter that goes on from its own guesses runs several times at a position: the first run,
    which has guess 0, counts.
    """
    proposer: Any = engine.proposer
    reader = proposer if hasattr(proposer, "_backend") else proposer._rows
    backend = reader._backend
    run = backend.run
    guesses: dict[int, dict[str, np.ndarray]] = {}

    def recorded(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        result = run(feeds, outputs)
        if "guess_log_probs" in result:
            row = engine.target.length - 1  # the last pair: (its feature, the root behind it)
            guesses.setdefault(row, {key: array.copy() for key, array in result.items()})
        return result

    monkeypatch.setattr(backend, "run", recorded)
    steps = list(engine.steps(prompt_ids, max_new_tokens=80, ignore_eos=True))
    answer = [token for step in steps for token in step.tokens]
    return guesses, answer, sum(step.num_accepted >= 2 for step in steps)


def check_int8(bundle: Path, name: str) -> None:
    """In 8 bits every emitted token is the argmax of the row that verified it.

    Rows may round apart from plain decoding's; acceptance may not add an error of its own.
    """
    engine = spec_runtime.load(bundle, drafter_name(name), threads=1)
    assert engine.drafter == f"{drafter_name(name)}+prompt_lookup"  # what bundles ask for
    steps: list[Step] = []
    num_checked = 0
    for prompt in PROMPTS:
        for step in engine.steps(prompt, max_new_tokens=60, ignore_eos=True):
            if step.verified is None:  # the prompt's own step
                continue
            assert step.tokens == step.verified.argmax_N[step.path].tolist()
            num_checked += len(step.tokens)
            steps.append(step)
    assert num_checked == 59 * len(PROMPTS)
    check_acceptance(steps)
