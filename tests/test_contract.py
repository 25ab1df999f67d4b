"""What every drafter must do: train, be exported, guess as in PyTorch, and change no output.

Walks the registration table on a tiny random target with real ONNX graphs. A random target is the
hard case: its answers are noise, so most drafts are rejected somewhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from workshop import Workshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export import drafters, target  # noqa: E402
from spec_export.bundling.drafters import load_module  # noqa: E402
from spec_export.decoder import Backbone  # noqa: E402
from spec_export.drafters.layers import Batch  # noqa: E402
from spec_export.training import checkpoint  # noqa: E402
from spec_runtime.engine import Engine  # noqa: E402

PROMPTS = ["say abc, 3", "one two. one two. one", "x", "The quick brown fox; 0123 0123"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9},
]
trained = pytest.mark.parametrize("name", drafters.trainable())
every_drafter = pytest.mark.parametrize(
    "name", [*drafters.trainable(), "prompt_lookup", "lookahead"]
)


@pytest.fixture
def engine(workshop: Workshop, name: str) -> Engine:
    bundle = workshop.bundle(name if name in drafters.trainable() else drafters.trainable()[0])
    lookup = False if name in drafters.trainable() else None  # the drafter by itself
    return spec_runtime.load(bundle, name, threads=1, lookup=lookup)


@every_drafter
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_drafter_changes_no_token(engine: Engine, name: str, sampling: dict[str, Any]) -> None:
    plain, accepted, rejected = engine.with_drafter("none"), 0, 0
    for prompt in PROMPTS:
        expected = plain.generate(prompt, max_new_tokens=60, ignore_eos=True, **sampling)
        result = engine.generate(prompt, max_new_tokens=60, ignore_eos=True, **sampling)
        assert result.token_ids == expected.token_ids, prompt
        assert result.text == expected.text
        assert len(result.token_ids) == 60
        accepted += 59 - result.stats.steps
        rejected += result.stats.steps
    assert accepted > 0, "no draft was ever right: nothing is tested"
    assert rejected > 0


@trained
def test_the_runtime_guesses_as_pytorch_does(
    workshop: Workshop, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of the drafter's graph in a generation, its features by transformers.

    Tolerance 1e-3 on log-probabilities: float32 through two networks (measures 1e-5).
    """
    proposer: Any = engine.proposer
    reader = getattr(proposer, "_rows", None) or getattr(proposer, "_last", proposer)
    backend = reader._backend
    run = backend.run
    guesses: dict[int, dict[str, np.ndarray]] = {}

    def recorded(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
        result = run(feeds, outputs)
        if "guess_log_probs" in result:
            row = engine.target.length - 1  # the last pair: (its feature, the root behind it)
            # of a drafter that goes on from its own guesses, the first run: guess 0
            guesses.setdefault(row, {key: array.copy() for key, array in result.items()})
        return result

    monkeypatch.setattr(backend, "run", recorded)
    prompt_ids = engine.encode(PROMPTS[0])
    answer = engine.generate(prompt_ids, max_new_tokens=40, ignore_eos=True).token_ids
    assert len(guesses) >= 10

    hf_model, _ = target.load(target.resolve(str(workshop.llama())))
    saved = checkpoint.load_drafter(workshop.drafter(name))
    module = load_module(saved, Backbone.from_transformers(hf_model))
    token_T = torch.tensor(prompt_ids + answer)
    with torch.no_grad():
        out = hf_model.model(token_T[None], output_hidden_states=True)
    taps = [out.hidden_states[tap] for tap in module.config.taps]
    features = torch.cat([out.last_hidden_state, *taps], -1)
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


@trained
def test_int8_emits_the_argmax_of_the_row_that_verified_it(workshop: Workshop, name: str) -> None:
    """Rows may round apart from plain decoding's; acceptance may not add an error of its own."""
    engine = spec_runtime.load(workshop.bundle(name, "int8"), threads=1)
    assert engine.drafter == f"{name}+prompt_lookup"  # what bundles ask for
    num_accepted = num_checked = 0
    for prompt in PROMPTS:
        for step in engine.steps(prompt, max_new_tokens=60, ignore_eos=True):
            if step.verified is None:  # the prompt's own step
                continue
            assert step.tokens == step.verified.argmax_N[step.path].tolist()
            num_accepted += step.num_accepted
            num_checked += len(step.tokens)
    assert num_checked == 59 * len(PROMPTS)
    assert num_accepted > 0


@every_drafter
def test_stops_end_the_text_where_plain_decoding_ends_it(engine: Engine, name: str) -> None:
    plain = engine.with_drafter("none")
    whole = plain.generate(PROMPTS[1], max_new_tokens=50, ignore_eos=True)
    for length in (3, 17, 30):
        token = whole.token_ids[length]
        by_token: dict[str, Any] = {"stop_token_ids": (token,), "max_new_tokens": 50}
        result = engine.generate(PROMPTS[1], ignore_eos=True, **by_token)
        first = whole.token_ids.index(token)
        assert result.token_ids == whole.token_ids[: first + 1]
        assert result.finish_reason == "stop"
    stop = whole.text[20:23]
    result = engine.generate(PROMPTS[1], max_new_tokens=50, ignore_eos=True, stop=stop)
    assert result.text == whole.text[: whole.text.index(stop)]
    limited = engine.generate(PROMPTS[1], max_new_tokens=7, ignore_eos=True)
    assert (limited.token_ids, limited.finish_reason) == (whole.token_ids[:7], "length")


@every_drafter
def test_the_tokenizers_eos_ends_the_answer(engine: Engine, name: str) -> None:
    """Some seed's noise draws </s> early."""
    for seed in range(40):
        options: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_new_tokens": 40}
        expected = engine.with_drafter("none").generate("x", **options)
        if expected.finish_reason == "stop":
            break
    assert expected.token_ids[-1] == 1
    result = engine.generate("x", **options)
    assert (result.token_ids, result.finish_reason) == (expected.token_ids, "stop")
    longer = engine.generate("x", ignore_eos=True, **options)
    assert len(longer.token_ids) == 40
    assert longer.token_ids[: len(result.token_ids)] == result.token_ids


@every_drafter
def test_streaming_gives_the_same_text(engine: Engine, name: str) -> None:
    expected = engine.generate(PROMPTS[0], max_new_tokens=40)
    pieces = list(engine.stream(PROMPTS[0], max_new_tokens=40))
    assert "".join(pieces) == expected.text
    assert len(pieces) > 1
    assert engine.last_result is not None
    assert engine.last_result.token_ids == expected.token_ids
    stream = engine.stream(PROMPTS[0], max_new_tokens=40)
    next(stream)
    stream.close()
    assert engine.last_result.finish_reason == "cancelled"
    assert engine.generate(PROMPTS[0], max_new_tokens=40).token_ids == expected.token_ids


@every_drafter
def test_a_conversation_reuses_its_past_and_answers_the_same(engine: Engine, name: str) -> None:
    messages: list[dict[str, str]] = []
    answers, reused = [], []
    for question in ("ab", "cd ef", "gh"):
        messages.append({"role": "user", "content": question})
        result = engine.generate(messages, max_new_tokens=12, ignore_eos=True)
        fresh = engine.with_drafter("none").generate(
            messages, max_new_tokens=12, ignore_eos=True, reuse=False
        )
        assert result.token_ids == fresh.token_ids
        answers.append(result.text)
        messages.append({"role": "assistant", "content": result.text})
        # the plain engine took the target: run ours again, to have its KV for the next turn
        engine.generate(messages[:-1], max_new_tokens=12, ignore_eos=True)
        reused.append(result.stats.reused_tokens)
    assert reused[0] == 0
    assert all(later > earlier for earlier, later in pairwise(reused)), reused


@trained
def test_by_rejection_its_children_are_drawn(engine: Engine, name: str) -> None:
    """In trees of the widths asked for, the same ones for the same seed."""
    options: dict[str, Any] = {"temperature": 1.0, "acceptance": "rejection", "draw_widths": (2, 1)}
    options |= {"seed": 5, "max_new_tokens": 40, "ignore_eos": True, "reuse": False}
    outputs = []
    for _ in range(2):
        tokens: list[int] = []
        for step in engine.steps(PROMPTS[0], **options):
            tokens += step.tokens
            if step.verified is not None and len(tokens) < 37:  # later ones are cut short
                tree = step.verified.tree
                assert np.bincount(tree.depth_N).tolist() == [1, 2, 2]
                assert sorted(tree.draws) == [0, 1, 2]
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert engine.last_result is not None
    assert engine.last_result.stats.drafted_tokens > 40


@trained
def test_prompts_up_to_the_context_and_beyond(engine: Engine, name: str) -> None:
    """The last tokens before the context's end are drafted in ever smaller trees."""
    limit = engine.target.max_length
    prompt_ids = (engine.encode("ab cd ", raw=True) * limit)[: limit - 9]
    plain = engine.with_drafter("none").generate(prompt_ids, ignore_eos=True)
    result = engine.generate(prompt_ids, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    assert (len(result.token_ids), result.finish_reason) == (9, "length")
    with pytest.raises(ValueError, match=f"got a prompt of {limit + 1} tokens"):
        engine.generate(prompt_ids + prompt_ids[:10])
