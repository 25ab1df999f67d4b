"""Checks the fused step: plain decoding's tokens, one run a step, trees as the host grows them.

Drafters and target are those of `workshop.FluentWorkshop`, so that paths of several tokens are
accepted, and texts that the drafters do not foresee come too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from contract import PROMPTS, check_acceptance  # noqa: E402
from fake_clock import FakeClock  # noqa: E402
from workshop import FluentWorkshop, drafter_name  # noqa: E402

import spec_runtime  # noqa: E402
from spec_runtime.backends import shapes  # noqa: E402
from spec_runtime.bundle.onnx_file import read_outline  # noqa: E402
from spec_runtime.engine import Engine  # noqa: E402
from spec_runtime.loop.fused_steps import FusedSteps  # noqa: E402
from spec_runtime.loop.step import Step  # noqa: E402
from spec_runtime.trees.budget import Budget  # noqa: E402
from spec_runtime.trees.tree import TokenTree  # noqa: E402

FUSABLE = ("parallelspec", "peagle", "pard", "amphista", "medusa")
fusable = pytest.mark.parametrize("name", FUSABLE)
CONDITIONED = "parallelspec+token"
# Built for "cuda", the bundle is in fp16 and has banks (spec_export/graphs/banks.py); at fp32 it
# reads whole buffers (attention "full_buffer"). All run on the CPU.
FORMS = (("cpu", None), ("cuda", None), ("cuda", "fp32"))


@pytest.fixture(scope="session")
def bundles(fluent: FluentWorkshop) -> Any:
    """Returns a function that builds a bundle with a fused step, each once."""

    @cache
    def build(name: str, precision: str | None, device: str) -> Path:
        return fluent.build(
            fluent.folder / "fused" / f"{name}-{precision}-{device}",
            name,
            precision=precision,
            device=device,
            fuse=True,
        )

    # Not cached itself: `bundle("medusa")` and `bundle("medusa", device="cpu")` are one bundle.
    def bundle(name: str, precision: str | None = None, device: str = "cpu") -> Path:
        return build(name, precision, device)

    return bundle


def load(path: Path, name: str, **options: Any) -> Engine:
    return spec_runtime.load(path, drafter_name(name), threads=1, fused=True, **options)


@pytest.fixture(autouse=True)
def small_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes masks grow several times within these short contexts."""
    monkeypatch.setattr(shapes, "MIN_MASK", 32)


in_every_form_and_conditioned = pytest.mark.parametrize(
    ("name", "device", "precision"),
    [
        (name, *form)
        for name in (*FUSABLE, CONDITIONED)
        for form in FORMS
        # in whole buffers Amphista has ParallelSpec's rows, but no masks
        if (name, form) != ("amphista", FORMS[2])
    ],
)


@in_every_form_and_conditioned
def test_the_fused_step_changes_no_token(
    bundles: Any, name: str, device: str, precision: str | None
) -> None:
    engine = load(bundles(name, precision, device), name)
    plain = engine.with_drafter("none")
    assert isinstance(engine.fused, FusedSteps)
    assert plain.fused is None
    steps: list[Step] = []
    for prompt in PROMPTS:
        expected = plain.generate(prompt, max_new_tokens=60, ignore_eos=True)
        before = engine.fused.num_steps
        steps += engine.steps(prompt, max_new_tokens=60, ignore_eos=True)
        result = engine.last_result
        assert result is not None
        assert result.token_ids == expected.token_ids, prompt
        assert engine.fused.num_steps - before == result.stats.steps, "a step was not fused"
    check_acceptance(steps)


@in_every_form_and_conditioned
def test_the_trees_are_those_the_host_grows(
    bundles: Any, name: str, device: str, precision: str | None
) -> None:
    """With equal budgets the trees agree node for node; the first fused tree is only its root.

    In fp16 two paths of nearly equal probability may change places.
    """
    engine = load(bundles(name, precision, device), name)
    assert isinstance(engine.fused, FusedSteps)
    host = spec_runtime.load(
        bundles(name, precision, device), drafter_name(name), threads=1, lookup=False, fused=False
    )
    host = host.with_budget(Budget(max_nodes=engine.fused.num_nodes))
    trees: list[TokenTree] = []
    differing: list[int] = []
    stepper = engine.fused._stepper
    step = stepper.step

    def recorded() -> np.ndarray:
        state = stepper.state()
        token, parent = state["token"], state["parent"]
        trees.append(TokenTree(token[token >= 0], parent[token >= 0]))
        return step()

    stepper.step = recorded  # type: ignore[method-assign]
    for prompt in PROMPTS:
        trees.clear()
        steps = [s.tokens for s in engine.steps(prompt, max_new_tokens=40, ignore_eos=True)]
        assert steps[1] == [engine.last_result.token_ids[1]]  # type: ignore[union-attr]
        known = engine.encode(prompt) + steps[0]
        # It asks for more tokens because the host's trees are less deep near the end.
        expected = list(host.steps(known, max_new_tokens=50, ignore_eos=True))
        assert [s.tokens for s in expected][: len(steps) - 2] == steps[1:-1]
        assert paths(trees[0]) == set()
        for got, s in zip(trees[1:], expected[1:], strict=False):
            assert s.verified is not None
            differing.append(len(paths(got) ^ paths(s.verified.tree)))
    is_half = device == "cuda" and precision is None
    assert max(differing) <= (4 if is_half else 0), differing
    assert differing.count(0) > 0.8 * len(differing), differing


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Returns the tokens of every path from the root, without the root's."""
    return {tuple(tree.token_N[tree.path(n)[1:]].tolist()) for n in range(1, tree.num_nodes)}


@pytest.mark.parametrize(
    ("name", "device"), [*((name, "cpu") for name in FUSABLE), ("parallelspec", "cuda")]
)
def test_a_chat_goes_on_where_the_fused_steps_left_it(bundles: Any, name: str, device: str) -> None:
    """The KV of target and drafter are those of a fresh start."""
    engine = load(bundles(name, device=device), name)
    ids = engine.encode(PROMPTS[1])
    first = engine.generate(ids, max_new_tokens=20, ignore_eos=True)
    longer = ids + first.token_ids[:-3] + engine.encode("0123 ", raw=True)
    went_on = engine.generate(longer, max_new_tokens=30, ignore_eos=True)
    assert went_on.stats.reused_tokens == len(ids) + 16
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 3}  # takes the ordinary loop
    longer += went_on.token_ids
    mixed = engine.generate(longer, max_new_tokens=12, ignore_eos=True, **sampled)
    again = load(bundles(name, device=device), name)
    fresh = again.generate(longer[: -len(went_on.token_ids)], max_new_tokens=30, ignore_eos=True)
    assert went_on.token_ids == fresh.token_ids
    assert went_on.stats.steps == fresh.stats.steps, "the drafts differ: its state was not the same"
    assert (
        mixed.token_ids
        == again.generate(longer, max_new_tokens=12, ignore_eos=True, **sampled).token_ids
    )


@pytest.mark.parametrize("name", [name for name in FUSABLE if name != "pard"])
def test_the_feature_left_to_the_loop_is_the_last_row_s(
    bundles: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with a prefill of the same tokens, after steps of every length. PARD reads no
    features.

    Tolerance 1e-3: float32 through the same weights in other shapes (measures 1e-5).
    """
    engine = load(bundles(name), name)
    assert isinstance(engine.fused, FusedSteps)
    follower = engine.fused._follower
    leave = follower.leave
    left: dict[int, np.ndarray] = {}  # by the row's position

    def recorded(feature_1F: np.ndarray) -> None:
        left[engine.target.length - 1] = feature_1F.copy()
        leave(feature_1F)

    monkeypatch.setattr(follower, "leave", recorded)
    ids = engine.encode(PROMPTS[0])
    lengths = set()
    for num_tokens in range(2, 30):
        steps = engine.steps(ids, max_new_tokens=num_tokens, ignore_eos=True, reuse=False)
        *_, last = steps
        lengths.add(len(last.path))
    assert {1, 2, 3} <= lengths, "the last step never had two drafted rows"
    assert engine.last_result is not None
    engine.target.forget()
    tokens = ids + engine.last_result.token_ids
    _, feature_TF = engine.target.prefill(tokens, engine.wants)
    assert feature_TF is not None
    assert len(left) >= 20
    for position, feature_1F in left.items():
        assert feature_1F.shape == (1, feature_TF.shape[1])
        assert np.abs(feature_1F[0] - feature_TF[position]).max() <= 1e-3, position


def test_every_second_of_fused_steps_is_counted_once(
    bundles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only graph runs and commits move: the drafter's own run takes 16 s, a step 64 s,
    a commit 1 s."""
    clock = FakeClock()
    engine = load(bundles("parallelspec"), "parallelspec")
    fused = engine.fused
    assert isinstance(fused, FusedSteps)
    monkeypatch.setattr("time.perf_counter", clock.read)
    enter, step = clock.taking(16.0, fused._follower.enter), fused._stepper.step
    monkeypatch.setattr(fused._follower, "enter", enter)
    monkeypatch.setattr(fused._stepper, "step", clock.taking(64.0, step))
    monkeypatch.setattr(fused._cache, "commit", clock.taking(1.0, fused._cache.commit))
    steps = 0
    for each in engine.steps(PROMPTS[0], max_new_tokens=40, ignore_eos=True):
        steps += bool(each.path)
        clock.now += 1024.0  # what the caller does is not counted
    assert engine.last_result is not None
    stats = engine.last_result.stats
    assert stats.steps == fused.num_steps == steps > 5
    assert stats.engine_seconds == 16.0 + 64.0 * steps
    assert stats.timings["draft"] == 16.0
    assert stats.timings["verify"] == 64.0 * steps
    assert stats.timings["commit"] == 1.0 * steps
    assert stats.decode_seconds == 16.0 + 65.0 * steps


def test_the_end_of_the_context_and_stops_inside_a_path(bundles: Any) -> None:
    engine = load(bundles("parallelspec"), "parallelspec")
    plain = engine.with_drafter("none")
    prompt = PROMPTS[0]
    full = engine.generate(prompt, max_new_tokens=500, ignore_eos=True)
    assert full.token_ids == plain.generate(prompt, max_new_tokens=500, ignore_eos=True).token_ids
    assert len(full.token_ids) + full.stats.prompt_tokens == engine.target.max_length
    for count in range(1, 25):  # each cut leaves a state to go on from
        cut = engine.generate(prompt, max_new_tokens=count, ignore_eos=True)
        assert cut.token_ids == full.token_ids[:count]
    stop: dict[str, Any] = {"stop_token_ids": [full.token_ids[17]], "ignore_eos": True}
    stopped = engine.generate(prompt, max_new_tokens=60, **stop)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == full.token_ids[: full.token_ids.index(full.token_ids[17]) + 1]


def test_closing_the_stream_inside_leaves_a_state_to_go_on_from(bundles: Any) -> None:
    engine = load(bundles("amphista"), "amphista")
    expected = engine.generate(PROMPTS[3], max_new_tokens=40, ignore_eos=True).token_ids
    steps = engine.steps(PROMPTS[3], max_new_tokens=40, ignore_eos=True, reuse=False)
    seen = [next(steps), next(steps), next(steps)]
    steps.close()
    tokens = [token for step in seen for token in step.tokens]
    rest = engine.generate(
        engine.encode(PROMPTS[3]) + tokens, max_new_tokens=40 - len(tokens), ignore_eos=True
    )
    assert rest.stats.reused_tokens > 0
    assert tokens + rest.token_ids == expected


def test_int8_runs_through_it(bundles: Any) -> None:
    engine = load(bundles("parallelspec", "int8"), "parallelspec")
    result = engine.generate(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
    assert len(result.token_ids) == 40
    assert result.stats.steps < 39


def test_what_is_not_plainly_greedy_takes_the_ordinary_loop(bundles: Any) -> None:
    engine = load(bundles("parallelspec"), "parallelspec")
    plain = engine.with_drafter("none")
    assert isinstance(engine.fused, FusedSteps)
    requests: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 1},
        {"repetition_penalty": 1.3},
        {"logit_bias": {40: 2.0}},
        {"logprobs": 2},
    ]
    for options in requests:
        before = engine.fused.num_steps
        result = engine.generate(PROMPTS[2], max_new_tokens=20, ignore_eos=True, **options)
        expected = plain.generate(PROMPTS[2], max_new_tokens=20, ignore_eos=True, **options)
        assert result.token_ids == expected.token_ids
        assert engine.fused.num_steps == before


def test_the_fused_step_has_no_weights_of_its_own(bundles: Any) -> None:
    path, weights = bundles("parallelspec") / "target", {}
    for name in ("target", "parallelspec-drafter", "parallelspec-fused"):
        outline = read_outline(path / f"{name}.onnx")
        weights[name] = {weight[3:] for weight in outline.weights}
    shared = weights["target"] | weights["parallelspec-drafter"]
    own = weights["parallelspec-fused"] - shared
    assert weights["target"] <= weights["parallelspec-fused"]
    assert weights["parallelspec-drafter"] <= weights["parallelspec-fused"]
    # Its own are tables of paths and ranks, which grow only with the tree.
    assert sum(length for _, _, length in own) < 40_000 < sum(length for _, _, length in shared)


def test_refusals(bundles: Any, fluent: FluentWorkshop, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got fused with a bundle without one .* --fuse"):
        load(fluent.bundle("parallelspec"), "parallelspec")
    with pytest.raises(ValueError, match="got lookup with fused"):
        load(bundles("parallelspec"), "parallelspec", lookup=True)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"got fuse with the contiguous form, expected slots"):
        fluent.build(out, "medusa", form="contiguous", fuse=True)
    with pytest.raises(ValueError, match=r"got fuse with drafter eagle, expected one of .*medusa"):
        fluent.build(out, "eagle", fuse=True)
    assert not out.exists()
