"""Checks that soaks notice what they look for; `tools/ci/endure.py` soaks a tiny bundle."""

import dataclasses
import time
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spec_runtime import Engine, GenerationResult
from spec_runtime.queue.async_engine import AsyncEngine
from tools.ci import soak

if TYPE_CHECKING:
    from workshop import FluentWorkshop


@pytest.mark.slow
@pytest.mark.parametrize(("spoilt", "workers"), [(Engine, 1), (AsyncEngine, 0)])
def test_the_soak_notices_a_wrong_answer(
    fluent: "FluentWorkshop", spoilt: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that threads share, and of one that answers several at a time."""

    def changed(result: GenerationResult) -> GenerationResult:
        return dataclasses.replace(result, token_ids=[3, *result.token_ids])

    generate = spoilt.generate

    def by_engine(self: Engine, *arguments: Any, **options: Any) -> Any:
        result = generate(self, *arguments, **options)
        return result if self.drafter == "none" else changed(result)

    async def by_several(self: AsyncEngine, *arguments: Any, **options: Any) -> Any:
        return changed(await generate(self, *arguments, **options))

    monkeypatch.setattr(spoilt, "generate", by_engine if spoilt is Engine else by_several)
    waited, fail = 0.0, soak.Findings.fail

    def noticed(self: soak.Findings, what: str) -> None:
        nonlocal waited
        fail(self, what)
        if what.startswith(("generate: ", "shared: whole: ")) and "parts at token 0" in what:
            waited = 60.0  # there is no more to find

    monkeypatch.setattr(soak.Findings, "fail", noticed)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited, sleep=time.sleep)
    monkeypatch.setattr(soak, "time", clock)
    soak.soak(fluent.bundle("medusa"), 60, seed=0, workers=workers, parallel=2)
    assert waited, "nobody noticed"


@pytest.mark.parametrize(
    ("in_use_mb", "files", "expected"),
    [
        ([100, 150, 151, 151], [5, 5, 5, 5], []),
        ([100, 150, 160, 190], [5, 5, 5, 5], ["memory"]),
        ([100, 150, 151, 151], [5, 5, 5, 6], ["files"]),
        ([100, 150, 151, 151, 151, 151, 151], [5, 5, 5, 5, 5, 6, 5], []),  # for a moment
    ],
)
def test_what_grows_is_noticed(
    in_use_mb: list[float], files: list[int], expected: list[str]
) -> None:
    # a sample a minute; the last half counts, and resident memory, which grows, does not
    samples = [
        soak.Sample(60.0 * i, 900.0, 200.0 + 9 * i, mb, threads=4, files=count)
        for i, (mb, count) in enumerate(zip(in_use_mb, files, strict=True))
    ]
    failures = soak.sizes(samples)["failures"]
    assert [failure.split()[0] for failure in failures] == expected


def test_memory_in_use_is_what_is_not_freed() -> None:
    """Of the C library's large and small blocks, and of Python's own."""
    large, small = partial(bytes, 60_000_000), lambda: [*map(bytes, repeat(900, 60_000))]
    for make in (large, small, lambda: [*map(float, range(600_000))]):
        before = soak.in_use()
        kept = [make()]
        assert 40 < soak.in_use() - before < 80
        kept.clear()
        assert soak.in_use() - before < 5
