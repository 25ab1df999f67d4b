"""Uses an engine as a program does; `mypy --strict` and a test read it."""

import threading

from spec_runtime import (
    BundleError,
    Engine,
    GenerationResult,
    SamplingParams,
    Stats,
    Step,
    TokenLogprob,
    load,
)


def answer(folder: str, question: str) -> str:
    try:
        with load(folder, threads=1) as engine:
            params = SamplingParams(max_new_tokens=8, temperature=0.7, seed=1)
            result = engine.generate(question, params=params, timeout=60.0)
            return result.text
    except BundleError as error:
        return f"not a bundle: {error}"


def show(engine: Engine, question: str, stop: threading.Event) -> GenerationResult:
    chunks = engine.chunks(question, max_new_tokens=8, logprobs=1, cancel=stop)
    for chunk in chunks:
        logprobs: tuple[TokenLogprob, ...] = chunk.logprobs or ()
        depths = [piece.depth for piece in chunk.pieces]
        print(chunk.text, chunk.token_ids, chunk.num_drafted, depths, len(logprobs))
        if chunk.result is not None:
            return chunk.result
    raise AssertionError("the last chunk has the result")


def measure(engine: Engine, question: str) -> tuple[list[Step], Stats]:
    messages = [{"role": "user", "content": question}]
    steps = list(engine.steps(messages, max_new_tokens=8))
    for text in engine.stream(question, max_new_tokens=8, stop=["\n"]):
        print(text, end="")
    result = engine.last_result
    assert result is not None
    used: int = result.usage.completion_tokens
    stop: str | int | None = result.stop
    print(used, stop, result.finish_reason)
    return steps, result.stats
