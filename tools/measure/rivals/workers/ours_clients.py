"""Answers loads of many clients with specsplit's AsyncEngine, in this process, without HTTP."""

import asyncio

import protocol
from ours_worker import load

from spec_runtime.measure import provenance
from spec_runtime.queue.async_engine import AsyncEngine


def open_engine(settings):
    """Opens a bundle as ours_worker.py does, for `parallel` calls at a time."""
    engine = AsyncEngine(load(settings), parallel=settings["parallel"])
    engine._batch.open_passes()  # as a server does before it is asked

    def answer(prompts, clients, max_new_tokens):
        # Nobody keeps rows from one round to the next: a prompt's second round had no prefill.
        options = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "reuse": False}
        waiting = protocol.Load(prompts)

        async def client():
            while found := waiting.take():
                one, ids = found
                async for chunk in engine.stream(ids, **options):
                    waiting.add(one, chunk.token_ids)

        async def run():
            await asyncio.gather(*(client() for _ in range(clients)))
            return waiting.reply()

        return asyncio.run(run())

    return provenance.git_commit() or "specsplit", answer


if __name__ == "__main__":
    protocol.serve(open_engine)
