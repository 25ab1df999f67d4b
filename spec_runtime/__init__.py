"""specsplit's runtime: draft, verify, accept. Needs neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_runtime.bundle import BundleError
from spec_runtime.calls.options import CallOptions
from spec_runtime.calls.result import Chunk, GenerationResult, Piece, Usage
from spec_runtime.engine import Engine
from spec_runtime.load import load
from spec_runtime.sampling import SamplingParams, TokenLogprob
from spec_runtime.stats import Stats
from spec_runtime.step import Step

if TYPE_CHECKING:
    from spec_runtime.calls.async_engine import AsyncEngine, QueueFull

__all__ = [
    "AsyncEngine",
    "BundleError",
    "CallOptions",
    "Chunk",
    "Engine",
    "GenerationResult",
    "Piece",
    "QueueFull",
    "SamplingParams",
    "Stats",
    "Step",
    "TokenLogprob",
    "Usage",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports what needs asyncio when it is first asked for: that costs 40 ms."""
    if name in ("AsyncEngine", "QueueFull"):
        from spec_runtime.calls import async_engine

        return {"AsyncEngine": async_engine.AsyncEngine, "QueueFull": async_engine.QueueFull}[name]
    raise AttributeError(name)
