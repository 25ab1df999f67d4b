"""The same seed and arguments give the same tokens, whatever the target has answered before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from tiny_target import save_llama

import spec_runtime
from spec_export.build import make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_runtime.engine import Engine

NUM_SEEDS = 8


@pytest.fixture(scope="module")
def deep_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a target with so many layers that rounding in its first ones changes tokens."""
    folder = tmp_path_factory.mktemp("deep") / "llama"
    return save_llama(folder, hidden_size=64, intermediate_size=96, num_hidden_layers=8)


@pytest.fixture(scope="module", params=["int8", "int4"])
def engine(request: pytest.FixtureRequest, deep_llama: Path) -> Engine:
    out = deep_llama.parent / f"{request.param}-bundle"
    make_bundle.build(BuildOptions(str(deep_llama), precision=request.param, out=out, lanes=1))
    return spec_runtime.load(out, "none", threads=1)


PROFILED = pytest.param("prompt_lookup", marks=pytest.mark.profiled, id="prompt_lookup-profiled")


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", PROFILED])
def test_a_seed_gives_its_tokens_again(engine: Engine, drafter: str) -> None:
    """Behind the conversation that the prompt goes on from, behind itself, and on its own; every
    other seed is greedy."""
    each = engine.with_drafter(drafter)
    different = []
    for seed in range(NUM_SEEDS):
        options: dict[str, Any] = {"temperature": seed % 2, "seed": seed, "ignore_eos": True}
        prompt = each.encode(f"tell me {seed} things")
        prompt += each.generate(prompt, max_new_tokens=50, **options).token_ids
        answers = [each.generate(prompt, max_new_tokens=50, **options) for _ in range(2)]
        each.target.forget()
        answers.append(each.generate(prompt, max_new_tokens=50, **options))
        if len({tuple(answer.token_ids) for answer in answers}) > 1:
            different.append(seed)
    assert different == []


def test_without_a_seed_rows_are_reused_all_the_same(engine: Engine) -> None:
    prompt = engine.encode("tell me a thing")
    for temperature in (0.0, 1.0):
        engine.generate(prompt, max_new_tokens=5, temperature=temperature)
        again = engine.generate(prompt, max_new_tokens=5, temperature=temperature)
        assert again.stats.reused_tokens == len(prompt) - 1
