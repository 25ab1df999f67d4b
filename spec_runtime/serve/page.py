"""Answers for the page on `/`: pieces of text with the depths at which they were drafted, and the
tree of the last step."""

import functools
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from spec_runtime import Engine, SamplingParams, Step
from spec_runtime.batch.lane import undrafted
from spec_runtime.files.machine import cpu_ticks
from spec_runtime.loop.call import Call
from spec_runtime.loop.proposer import Proposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.openai.schemas import ChatMessage, List
from spec_runtime.serve.service import Service
from spec_runtime.serve.streams import event_of
from spec_runtime.text.prompt import Prompt
from spec_runtime.text.tokenizer import Codec
from spec_runtime.trace.record import node_texts, token_text, whole_path
from spec_runtime.trees.drawing import accepted_nodes
from spec_runtime.trees.tree import TokenTree

MOST_OF_OTHERS = 0.2  # of the CPUs, which other programs may use while speeds are compared

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
    """Holds what the page asks for: a conversation to go on with. `drafter` false is plain
    decoding."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    messages: Annotated[List[ChatMessage], Field(min_length=1)]
    drafter: Annotated[bool, Field(strict=True)] = True
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: int = 0

    @property
    def prompt(self) -> Prompt:
        """Returns what the engine encodes: a first message by itself may do without a template."""
        messages = [message.plain() for message in self.messages]
        is_first = len(messages) == 1 and messages[0]["role"] == "user"
        text = messages[0]["content"]
        return text if is_first and isinstance(text, str) else messages


@functools.cache
def page_html() -> str:
    """Returns the page."""
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


class TreeRecorder(ProposerWrapper):
    """Keeps the last step whose tree had drafted nodes."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.last: tuple[TokenTree, Step] | None = None

    def commit(self, step: Step) -> None:
        if step.tree is not None and step.tree.num_nodes > 1:
            self.last = step.tree, step
        super().commit(step)


async def answer(service: Service, body: PageRequest, request: Request) -> Response:
    """Returns a stream of events: pieces of text with their depths, then result and tree.

    Each request has an engine of its own on a lane's target, so that none reuses rows of an
    earlier prompt: with and without the drafter, the prompt is read in full.
    """
    engine = service.engine
    recorders: list[TreeRecorder] = []
    calls: list[Call] = []

    def record(proposer: Proposer) -> Proposer:
        recorders.append(TreeRecorder(proposer))
        return recorders[0]

    def prepare() -> list[Call]:
        params = SamplingParams(
            max_new_tokens=body.max_tokens, temperature=body.temperature, seed=body.seed
        )
        prompt = service.check_prompt(engine.encode(body.prompt), "messages")
        calls.append(engine.make_call(prompt, params=params))
        return calls

    def observe(lane: Engine) -> Engine:
        return lane.observed(record) if body.drafter else undrafted(lane)

    answers = service.begin(prepare, is_stream=True, observe=observe)
    drafter = engine.drafter if body.drafter else "none"
    events = _events(answers, service, drafter, calls, recorders)
    return service.event_stream(request, answers, events)


async def _events(
    answers: Answers,
    service: Service,
    drafter: str,
    calls: list[Call],
    recorders: list[TreeRecorder],
) -> AsyncGenerator[str, None]:
    codec, names, busy = service.engine.tokenizer, {}, ""
    before = cpu_ticks()
    async for _, chunk in answers:
        if service.queue.admission.num_requests > 1:
            busy = "while other requests were answered"
        if chunk.token_ids or chunk.pieces:
            pieces = [[piece.text, piece.depth] for piece in chunk.pieces]
            for token, depth in zip(chunk.token_ids, chunk.depths, strict=True):
                if not codec.decode([token] * 2):  # once, a space may be nothing
                    names[token] = token_text(codec, [], token)
                    pieces.append(["", depth, names[token]])
            yield event_of({"pieces": pieces, "tokens": len(chunk.token_ids)})
    others, whole = (now - then for now, then in zip(cpu_ticks(), before, strict=True))
    if not busy and others > MOST_OF_OTHERS * whole:
        busy = f"while other programs used {others / whole:.0%} of the CPUs"

    def last_event() -> str:
        result, tree = answers.results[0], recorders[0].last if recorders else None
        shown = None if tree is None else shown_tree(codec, drafter, *tree)
        stats = result.stats
        figures = {
            "drafter": drafter,
            "precision": service.engine.target.precision,
            "finish_reason": result.finish_reason,
            "prompt_ids": calls[0].prompt,
            "token_ids": result.token_ids,
            "names": names,
            "busy": busy,
            "steps": stats.steps,
            "tokens_per_second": stats.tokens_per_second,
            "accepted_length": stats.accepted_length,
            "acceptance_by_depth": stats.acceptance_by_depth,
            "prefill_seconds": stats.prefill_seconds,
        }
        return event_of({"result": figures, "tree": shown})

    yield await service.writing.run(last_event)


def shown_tree(codec: Codec, drafter: str, tree: TokenTree, step: Step) -> dict[str, Any]:
    """Returns one step's tree for the page to draw: a title, and [parent, kind, text] of nodes."""
    path = whole_path(tree, step)
    texts, bonus = node_texts(codec, tree, path, step)
    title = (
        f"The last step of {drafter}: {tree.num_nodes - 1} drafted, "
        f"{step.num_accepted} accepted, {len(step.tokens)} committed"
    )
    return {"title": title, "nodes": accepted_nodes(tree, path, texts, bonus)}
