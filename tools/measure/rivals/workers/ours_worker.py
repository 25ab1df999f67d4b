"""Answers with specsplit in this process, without HTTP: one prompt after the other by the engine,
or several at a time by its AsyncEngine."""

import asyncio
import sys
from pathlib import Path

import protocol

sys.path.insert(0, str(Path(__file__).parents[4]))  # the checkout that this file is of

import spec_runtime
from spec_runtime.measure import provenance
from spec_runtime.queue.async_engine import AsyncEngine


def open_engine(settings):
    """Opens a bundle; `drafter` None is the bundle's default, `lookup` None the bundle's choice.
    `parallel` calls are answered at a time; None is the engine itself."""
    engine = spec_runtime.load(
        settings["model"],
        settings["drafter"],
        settings["threads"],
        lookup=settings["lookup"],
        profile=settings["profile"],
    )
    shared = None
    if settings["parallel"] is not None:
        shared = AsyncEngine(engine, parallel=settings["parallel"])
        shared._batch.open_passes()  # as a server does before it is asked

    def answer(prompts, clients, max_new_tokens):
        # Nobody keeps rows from one round to the next: a prompt's second round had no prefill.
        options = {"max_new_tokens": max_new_tokens, "ignore_eos": not settings["may_end"]}
        options["reuse"] = False
        load = protocol.Load(prompts)
        if shared is None:
            while found := load.take():
                one, ids = found
                for chunk in engine.chunks(ids, **options):
                    load.add(one, chunk.token_ids)
            return load.reply()

        async def client():
            while found := load.take():
                one, ids = found
                async for chunk in shared.stream(ids, **options):
                    load.add(one, chunk.token_ids)

        async def run():
            await asyncio.gather(*(client() for _ in range(clients)))
            return load.reply()

        return asyncio.run(run())

    return provenance.git_commit() or spec_runtime.__name__, answer


if __name__ == "__main__":
    protocol.serve(open_engine)
