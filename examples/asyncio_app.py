"""Answers several questions of one event loop, and ends one of them early.

python examples/asyncio_app.py bundles/smollm2-135m-instruct
"""

import argparse
import asyncio
from contextlib import aclosing

import spec_runtime

QUESTIONS = ("Name a colour.", "Name an animal.", "Name a city.")


async def first_words(engine: spec_runtime.AsyncEngine, question: str, num_letters: int) -> str:
    """Returns the beginning of an answer; its generation ends once there is enough of it."""
    text = ""
    async with aclosing(engine.stream(question, max_new_tokens=64)) as chunks:
        async for chunk in chunks:
            text += chunk.text
            if len(text) >= num_letters:
                break  # leaving the block ends the generation
    return text[:num_letters]


async def run(bundle: str) -> None:
    # `load` reads files and checks their hashes: not in the loop.
    engine = await asyncio.to_thread(spec_runtime.load, bundle)
    async with spec_runtime.AsyncEngine(engine, max_waiting=16) as shared:
        # They are answered one after the other, in this order; the loop is free meanwhile.
        results = await asyncio.gather(
            *(shared.generate(question, max_new_tokens=24, timeout=30.0) for question in QUESTIONS)
        )
        for question, result in zip(QUESTIONS, results, strict=True):
            print(f"{question} {result.text.strip()}")
        print("Tell me a story.", await first_words(shared, "Tell me a story.", 20))

        # A task that is cancelled ends its generation within one step.
        task = asyncio.create_task(shared.generate("Count to a million.", max_new_tokens=4096))
        await asyncio.sleep(0.05)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            print("cancelled")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    asyncio.run(run(parser.parse_args().bundle))


if __name__ == "__main__":
    main()
