"""Several people chat at the same time, each in a conversation of their own, on one engine.

python examples/multi_user_chat.py bundles/smollm2-135m-instruct
"""

import argparse
import asyncio

import spec_runtime

QUESTIONS = {
    "ann": ("Name a fruit.", "Name another one."),
    "bob": ("Name a river.", "Where is it?"),
    "eve": ("Say hello.", "Say it in French."),
}


SYSTEM = (
    "{user} is the person you talk to. Answer in one short sentence of plain words, without lists "
    "and without repeating the question. If you do not know an answer, say so."
)


async def talk(
    engine: spec_runtime.AsyncEngine, user: str, questions: tuple[str, ...]
) -> spec_runtime.AsyncSession:
    """One user's side: the next question comes when the last one is answered.

    If an answer fails, or its task is cancelled, the session stays as it was.
    """
    session = spec_runtime.AsyncSession(engine, system=SYSTEM.format(user=user))
    for question in questions:
        while True:
            try:
                result = await session.generate(question, max_new_tokens=32, timeout=60.0)
                break
            except spec_runtime.QueueFull:  # too many wait: try again a little later
                await asyncio.sleep(0.1)
        usage = result.usage
        print(
            f"{user}: {question} -> {result.text.strip()}\n"
            f"    {usage.reused_tokens} of {usage.prompt_tokens} prompt tokens were there already"
        )
    return session


async def run(bundle: str) -> list[spec_runtime.AsyncSession]:
    # So many megabytes keep conversations, so that switching between them reads none anew.
    engine = await asyncio.to_thread(spec_runtime.load, bundle, kept_mb=256)
    async with spec_runtime.AsyncEngine(engine, max_waiting=1) as shared:
        talks = (talk(shared, user, questions) for user, questions in QUESTIONS.items())
        return await asyncio.gather(*talks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    asyncio.run(run(parser.parse_args().bundle))


if __name__ == "__main__":
    main()
