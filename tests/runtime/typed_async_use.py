"""Uses an engine from asyncio as a server does; `mypy --strict` and a test read it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from spec_runtime import AsyncEngine, Engine, GenerationResult, QueueFull


async def answer_all(engine: Engine, questions: list[str]) -> list[GenerationResult]:
    async with AsyncEngine(engine, max_waiting=16) as shared:
        calls = [shared.generate(text, max_new_tokens=8, timeout=60.0) for text in questions]
        return await asyncio.gather(*calls)


async def first_words(shared: AsyncEngine, question: str, num_words: int) -> str:
    text = ""
    try:
        async with aclosing(shared.stream(question, max_new_tokens=64)) as chunks:
            async for chunk in chunks:
                text += chunk.text
                if len(text.split()) > num_words:
                    break  # leaving the block ends the generation
    except QueueFull:
        return "try again later"
    return " ".join(text.split()[:num_words])
