"""Implements spec-runtime chat: a conversation whose turns reuse the KV of those before."""

import sys
from typing import TYPE_CHECKING

from spec_runtime.cli import options
from spec_runtime.cli.boundary import is_raised_by_us
from spec_runtime.cli.terminal import streamed, visible

if TYPE_CHECKING:
    from spec_runtime import Engine
    from spec_runtime.sampling import SamplingOptions


@options.with_sampling
def command(
    settings: "SamplingOptions",
    bundle: options.Bundle = None,
    drafter: options.Drafter = None,
    lookup: options.Lookup = None,
    max_new_tokens: options.MaxNewTokens = 512,
    system: options.System = None,
    threads: options.Threads = None,
    profile: options.Profile = True,
    backend: options.Backend = "onnxruntime",
    fused: options.Fused = None,
    cuda_graphs: options.CudaGraphs = True,
    memory: options.Memory = 0,
) -> None:
    """Chat with the target; /reset starts anew, end of input leaves."""
    interactive = options.standard_input().isatty()
    engine = options.open_engine(
        bundle, drafter, threads, lookup, profile, backend, fused, cuda_graphs, memory
    )
    settings |= {"max_new_tokens": max_new_tokens}
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if interactive:
        print("/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages = _turn(engine, [*messages, {"role": "user", "content": line}], settings)


def _turn(
    engine: "Engine", messages: list[dict[str, str]], settings: "SamplingOptions"
) -> list[dict[str, str]]:
    """Prints the answer to ``messages`` and returns the conversation with it, or without the last
    message if that failed."""
    pieces = []
    try:
        options.whole(messages[-1]["content"], "a message")
        for piece in engine.stream(messages, **settings):
            pieces.append(piece)
            print(streamed(piece), end="", flush=True)
        print(flush=True)
        assert engine.last_result is not None
        print(options.summary_line(engine.last_result), file=sys.stderr)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" …", flush=True)
    except ValueError as error:
        if not is_raised_by_us(error):
            raise
        # above all a conversation longer than the context
        print(f"error: {visible(error)} (/reset starts anew)", file=sys.stderr)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]
