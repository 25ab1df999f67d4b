"""Checks that soaks notice what they look for; `tools/ci/endure.py` soaks a tiny bundle."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spec_runtime import Engine, GenerationResult
from spec_runtime.queue.async_engine import AsyncEngine
from tools.ci import soak, soak_batch

if TYPE_CHECKING:
    from workshop import FluentWorkshop


@pytest.mark.slow
def test_the_soak_notices_a_wrong_answer(
    fluent: FluentWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def spoilt(self: Engine, *arguments: Any, **options: Any) -> GenerationResult:
        result = generate(self, *arguments, **options)
        if self.drafter == "none":
            return result
        return dataclasses.replace(result, token_ids=[3, *result.token_ids])

    monkeypatch.setattr(Engine, "generate", spoilt)
    waited, fail = 0.0, soak.Findings.fail

    def noticed(self: soak.Findings, what: str) -> None:
        nonlocal waited
        fail(self, what)
        if "parts at token 0" in what:
            waited = 60.0  # there is no more to find

    monkeypatch.setattr(soak.Findings, "fail", noticed)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited, sleep=time.sleep)
    monkeypatch.setattr(soak, "time", clock)
    findings, _ = soak.soak(fluent.bundle("medusa"), seconds=60, seed=0, workers=1)
    assert any("parts at token 0" in failure for failure in findings.failures)


@pytest.mark.slow
def test_the_soak_of_a_batch_notices_another_answer(
    fluent: FluentWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = AsyncEngine.generate

    async def spoilt(self: AsyncEngine, *arguments: Any, **options: Any) -> GenerationResult:
        result = await generate(self, *arguments, **options)
        return dataclasses.replace(result, token_ids=[3, *result.token_ids])

    monkeypatch.setattr(AsyncEngine, "generate", spoilt)
    monkeypatch.setattr(soak_batch, "REQUESTS", 12)
    found, _, ties = soak_batch.soak(fluent.bundle("medusa"), 2, seconds=0, answers=40)
    assert len(found.parted) > len(ties)
    assert "whole" in {kind for kind, *_ in found.parted}
    assert any("parts at token 0" in failure for failure in found.findings.failures)


@pytest.mark.parametrize(
    ("memory_mb", "files", "expected"),
    [
        ([100, 150, 151, 151], [5, 5, 5, 5], []),
        ([100, 150, 160, 190], [5, 5, 5, 5], ["memory"]),
        ([100, 150, 151, 151], [5, 5, 5, 6], ["files"]),
        ([100, 150, 151, 151, 151, 151, 151], [5, 5, 5, 5, 5, 6, 5], []),  # for a moment
    ],
)
def test_what_grows_is_noticed(
    memory_mb: list[float], files: list[int], expected: list[str]
) -> None:
    # a sample a minute; the last half counts
    samples = [
        soak.Sample(60.0 * i, 2.0 * mb, mb, threads=4, files=count)
        for i, (mb, count) in enumerate(zip(memory_mb, files, strict=True))
    ]
    failures = soak.sizes(samples)["failures"]
    assert [failure.split()[0] for failure in failures] == expected
