"""Asks one question and prints the answer while it is written.

python examples/script.py bundles/smollm2-135m-instruct "Explain tides to a child."
"""

import argparse
import sys

import spec_runtime


def answer(engine: spec_runtime.Engine, question: str, max_new_tokens: int) -> None:
    """Prints the answer, and one line of figures on standard error."""
    # The call ends after a minute, with what it has by then.
    for chunk in engine.chunks(question, max_new_tokens=max_new_tokens, timeout=60.0):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:  # the last chunk
            stats, usage = chunk.result.stats, chunk.result.usage
            print()
            print(
                f"{usage.completion_tokens} tokens, {stats.tokens_per_second:.0f} tokens/s, "
                f"accepted length {stats.accepted_length:.2f}, {chunk.result.finish_reason}",
                file=sys.stderr,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("question")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    try:
        with spec_runtime.load(arguments.bundle) as engine:
            answer(engine, arguments.question, arguments.max_new_tokens)
    except spec_runtime.UserError as error:  # every bad input is one line
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
