"""specsplit's runtime: draft, verify, accept. Needs neither torch nor transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spec_runtime.bundle.manifest import BundleError
from spec_runtime.dialogue.reader import Part
from spec_runtime.engine import Engine
from spec_runtime.errors import (
    ContextLengthError,
    UnknownDrafterError,
    UnsupportedModelError,
    UserError,
)
from spec_runtime.load import load
from spec_runtime.loop.options import CallOptions
from spec_runtime.loop.result import Chunk, GenerationResult, Piece, Usage
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Step
from spec_runtime.queue.admission import QueueFull
from spec_runtime.queue.session import Session
from spec_runtime.sampling import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from spec_runtime.queue.async_engine import AsyncEngine
    from spec_runtime.queue.async_session import AsyncSession

__all__ = [
    "AsyncEngine",
    "AsyncSession",
    "BundleError",
    "CallOptions",
    "Chunk",
    "ContextLengthError",
    "Engine",
    "GenerationResult",
    "Part",
    "Piece",
    "QueueFull",
    "SamplingParams",
    "Session",
    "Stats",
    "Step",
    "TokenLogprob",
    "UnknownDrafterError",
    "UnsupportedModelError",
    "Usage",
    "UserError",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports what needs asyncio when it is first asked for: that costs 40 ms."""
    homes = {"AsyncEngine": "async_engine", "AsyncSession": "async_session"}
    if name not in homes:
        raise AttributeError(name)
    return getattr(import_module(f"spec_runtime.queue.{homes[name]}"), name)
