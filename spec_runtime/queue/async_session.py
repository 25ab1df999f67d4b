"""Keeps conversations with an engine that asyncio tasks share."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Unpack

from spec_runtime.dialogue.messages import Message
from spec_runtime.loop.options import CallOptions
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.queue.async_engine import AsyncEngine
from spec_runtime.queue.session import Transcript


class AsyncSession(Transcript):
    """One of the conversations with an AsyncEngine; see Session."""

    def __init__(
        self, engine: AsyncEngine, system: str | None = None, messages: Sequence[Message] = ()
    ) -> None:
        super().__init__(system, messages)
        self.engine = engine

    async def generate(
        self, text: str | None = None, **options: Unpack[CallOptions]
    ) -> GenerationResult:
        """Returns the answer, see Session.generate; raises what AsyncEngine.generate raises."""
        with self.exchange(text, options) as exchange:
            result = await self.engine.generate(exchange.messages, **exchange.options)
            exchange.answer, exchange.result = result.text, result
        return result

    async def stream(
        self, text: str | None = None, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the answer's chunks, the last with the result; see AsyncEngine.stream."""
        with self.exchange(text, options) as exchange:
            async with aclosing(
                self.engine.stream(exchange.messages, **exchange.options)
            ) as chunks:
                async for chunk in chunks:
                    exchange.answer += chunk.text
                    exchange.result = chunk.result
                    yield chunk
