"""Checks that every drafter trains, is exported, guesses as in PyTorch and changes no output.

The tests walk the registration table with real ONNX graphs of a tiny target (see
`workshop.FluentWorkshop`). Behind one prompt its drafters are nearly always right, so that whole
paths are accepted; behind the others its text is noise, so that most drafts are refused somewhere.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from contract import (
    PROMPTS,
    SAMPLING,
    check_guesses_are_pytorchs,
    check_int8,
    check_no_token_changes,
)
from workshop import HYBRID, FluentWorkshop, drafter_name

import spec_runtime
from spec_export import drafters
from spec_runtime.engine import Engine, GenerationResult
from spec_runtime.pace.pacer import Pacer

# Of a target with convolutions: drafters that run its layers, read its features, or neither.
OF_HYBRIDS = [f"{HYBRID}{name}" for name in ("skip_layer", "parallelspec", "medusa")]
trained = pytest.mark.parametrize("name", [*drafters.trainable(), *OF_HYBRIDS])
UNTRAINED = ["prompt_lookup", "lookahead", f"{HYBRID}lookahead"]
every_drafter = pytest.mark.parametrize("name", [*drafters.trainable(), *OF_HYBRIDS, *UNTRAINED])


@pytest.fixture
def workshop(request: pytest.FixtureRequest, name: str) -> FluentWorkshop:
    found: FluentWorkshop = request.getfixturevalue(
        "hybrid" if name.startswith(HYBRID) else "fluent"
    )
    return found


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    """Returns the engines opened so far, by the names of their drafters."""
    return {}


@pytest.fixture
def engine(workshop: FluentWorkshop, name: str, engines: dict[str, Engine]) -> Engine:
    """Returns an engine that knows of no earlier text, whose drafter is by itself."""
    if name not in engines:
        if name.startswith(HYBRID):
            trained = OF_HYBRIDS[0] if drafter_name(name) in UNTRAINED else name
            bundle = workshop.bundle(trained.removeprefix(HYBRID))
        else:
            bundle = workshop.every()
        lookup = None if drafter_name(name) in UNTRAINED else False
        engines[name] = spec_runtime.load(bundle, drafter_name(name), threads=1, lookup=lookup)
    engines[name].target.forget()
    return engines[name]


@pytest.fixture
def default_engine(fluent: FluentWorkshop, name: str) -> Engine:
    """Returns what users load: a drafter with prompt lookup, at this machine's costs."""
    return spec_runtime.load(fluent.every(), name, threads=1)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], GenerationResult]:
    """Returns what plain decoding has answered so far, see `check_no_token_changes`."""
    return {}


@pytest.mark.parametrize("name", [*drafters.trainable(), *UNTRAINED[:2]])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_drafter_changes_no_token(
    engine: Engine,
    name: str,
    sampling: dict[str, Any],
    answers: dict[tuple[str, str], GenerationResult],
) -> None:
    check_no_token_changes(engine, sampling, answers)


@pytest.mark.profiled
@pytest.mark.parametrize("name", [*drafters.trainable(), *UNTRAINED[:2]])
def test_pauses_and_trees_cut_by_cost_change_no_token(default_engine: Engine, name: str) -> None:
    """Prompt lookup goes on during a drafter's pause."""
    is_trained, engine = name in drafters.trainable(), default_engine
    assert isinstance(engine.proposer, Pacer)
    sizes: dict[bool, list[int]] = {False: [], True: []}  # of trees, in a pause or not
    for sampling in SAMPLING:
        options = {"max_new_tokens": 110, "ignore_eos": True, **sampling}
        expected = engine.with_drafter("none").generate(PROMPTS[1], **options)
        is_pause = False
        for step in engine.steps(PROMPTS[1], **options):
            if step.verified is not None:
                sizes[is_pause].append(step.verified.tree.num_nodes)
            is_pause = engine.proposer.is_paused  # from the next step on
        assert engine.last_result is not None
        assert engine.last_result.token_ids == expected.token_ids
    assert len(sizes[True]) > 8
    assert max(sizes[False]) > 4
    assert (max(sizes[True]) > 1) == is_trained, "lookup goes on beside a drafter only"


@pytest.mark.parametrize("name", [*OF_HYBRIDS, UNTRAINED[-1]])
def test_the_drafter_changes_no_token_of_a_hybrid(engine: Engine, name: str) -> None:
    """Greedy texts of this target are all foreseen."""
    check_no_token_changes(engine, SAMPLING[1])


@trained
def test_the_runtime_guesses_as_pytorch_does(
    workshop: FluentWorkshop, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_guesses_are_pytorchs(workshop, engine, name.removeprefix(HYBRID), monkeypatch)


@pytest.mark.parametrize("name", drafters.trainable())
def test_int8_emits_the_argmax_of_the_row_that_verified_it(
    fluent: FluentWorkshop, name: str
) -> None:
    check_int8(fluent.every("int8", lanes=1), name)


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
    """Searches for a seed whose noise draws </s> early."""
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
        # The plain engine took the target: ours runs again, to have its KV for the next turn.
        engine.generate(messages[:-1], max_new_tokens=12, ignore_eos=True)
        reused.append(result.stats.reused_tokens)
    assert reused[0] == 0
    assert all(later > earlier for earlier, later in pairwise(reused)), reused


@pytest.mark.parametrize("name", OF_HYBRIDS)
def test_a_hybrids_rows_are_kept_and_near_ties_decided_by_one_row(
    workshop: FluentWorkshop, engine: Engine, name: str
) -> None:
    """The convolutions' rows and the slots' positions come back with the keys and values."""
    folder = workshop.bundle(name.removeprefix(HYBRID))
    options: dict[str, Any] = {"threads": 1, "lookup": False}
    other = spec_runtime.load(folder, drafter_name(name), strict=True, kept_mb=8, **options)
    other.target.strict_gap = 2.0  # every row of a tree
    messages = [{"role": "user", "content": PROMPTS[1]}]
    sampling: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    first = other.generate(messages, **sampling)
    assert first.token_ids == engine.generate(messages, **sampling).token_ids
    assert other.target.num_redone > 20
    other.generate([{"role": "user", "content": PROMPTS[0]}], **sampling)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "ab"}]
    result = other.generate(messages, **sampling)
    assert result.usage.reused_tokens > 60
    assert result.token_ids == engine.generate(messages, **sampling, reuse=False).token_ids


@trained
def test_by_rejection_its_children_are_drawn(engine: Engine, name: str) -> None:
    """The trees have the widths asked for, and are the same ones for the same seed."""
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
