"""Answers for the page on `/`: pieces of text with the depths at which they were drafted, and the
tree of the last step."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from spec_runtime import AsyncEngine, GenerationResult, SamplingParams, Step
from spec_runtime.proposers.base import Proposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.serving.answering import Answering, Job, event_of
from spec_runtime.serving.service import Service
from spec_runtime.text import Codec
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.drawing import accepted_tree_svg
from spec_runtime.trees.tree import TokenTree

# Nothing is loaded from elsewhere, and no other page may show this one in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class PageRequest(BaseModel):
    """Holds what the page asks for; `drafter` false is plain decoding."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(min_length=1)]
    drafter: bool = True
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: int = 0


@functools.cache
def page_html() -> str:
    """Returns the page."""
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


class TreeRecorder(ProposerWrapper):
    """Keeps the last step whose tree had drafted nodes."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.last: tuple[TokenTree, Step] | None = None
        self._tree = TokenTree.root(0)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._tree = super().propose(token, budget)
        return self._tree

    def commit(self, step: Step) -> None:
        if self._tree.num_nodes > 1:
            self.last = self._tree, step
        super().commit(step)


class Page:
    """Answers the page's requests: one at a time, since their trees are recorded."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._recorder: TreeRecorder | None = None
        self._turn = asyncio.Lock()
        engine = service.engine
        most = service.settings.max_waiting
        self._drafting = AsyncEngine(engine.observed(self._record), max_waiting=most)
        self._plain = AsyncEngine(engine.plain(), max_waiting=most)

    def _record(self, proposer: Proposer) -> Proposer:
        self._recorder = TreeRecorder(proposer)
        return self._recorder
