"""Implements spec-runtime generate: continues one prompt, as streamed text or as JSON."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spec_runtime.cli import answer_format, options
from spec_runtime.cli.terminal import Console, streamed

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


@options.with_sampling
def command(
    settings: "SamplingOptions",
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt", show_default="standard input")
    ] = None,
    bundle: options.Bundle = None,
    drafter: options.Drafter = None,
    lookup: options.Lookup = None,
    max_new_tokens: options.MaxNewTokens = 256,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt")] = False,
    system: options.System = None,
    threads: options.Threads = None,
    profile: options.Profile = True,
    backend: options.Backend = "onnxruntime",
    fused: options.Fused = None,
    cuda_graphs: options.CudaGraphs = True,
    json_schema: answer_format.JsonSchema = None,
    regex: answer_format.Regex = None,
    grammar: answer_format.GrammarFile = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the tokens the drafter guessed")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Text, token ids and figures as one JSON object")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            help="With --json: each token's log-probability under the target, and so many of the "
            "likeliest tokens'",
        ),
    ] = None,
) -> None:
    """Generate text from a prompt."""
    if logprobs is not None and not as_json:
        raise ValueError("got --logprobs without --json, where they are printed; add --json")
    wanted = answer_format.response_format(json_schema, regex, grammar)
    prompt = options.whole(_standard_input() if prompt is None else prompt, "a prompt")
    engine = options.open_engine(
        bundle, drafter, threads, lookup, profile, backend, fused, cuda_graphs
    )
    prompt_ids = engine.encode(prompt, raw, system)
    settings |= {"max_new_tokens": max_new_tokens, "logprobs": logprobs}
    settings |= {"response_format": wanted}
    if as_json:
        print(json.dumps(report(engine.generate(prompt_ids, **settings))))
        return
    if show_accepted:
        _print_coloured(engine, prompt_ids, settings)
    else:
        for piece in engine.stream(prompt_ids, **settings):
            print(streamed(piece), end="", flush=True)
    print(flush=True)
    assert engine.last_result is not None
    print(options.summary_line(engine.last_result), file=sys.stderr)


def _print_coloured(engine: "Engine", prompt: list[int], settings: "SamplingOptions") -> None:
    """Prints drafted tokens in green and the target's own as they are."""
    from spec_runtime.text import TextStream

    console = Console()
    text = TextStream(engine.tokenizer.decode, settings["stop"])
    style = ""
    for step in engine.steps(prompt, **settings):
        for index, token in enumerate(step.tokens):
            text.push(token)
            style = "green" if index < step.num_accepted else ""
            # Text that was held back (a stop string, half a character) takes the later colour.
            console.print(streamed(text.take()), end="", style=style, soft_wrap=True)
    text.finish()
    console.print(streamed(text.take()), end="", style=style, soft_wrap=True)


def _standard_input() -> str:
    """Reads the prompt from standard input. Raises ValueError if that is a terminal."""
    stdin = options.standard_input()
    if stdin.isatty():
        raise ValueError("got no prompt; give it as an argument or on standard input")
    # The line end a shell adds is not part of the prompt.
    return stdin.read().removesuffix("\n")


def report(result: "GenerationResult") -> dict[str, Any]:
    """Returns what ``--json`` prints; times are seconds, logarithms natural."""
    stats = result.stats
    figures = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "tokens_per_second": stats.tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "accepted_length": stats.accepted_length,
        "steps": stats.steps,
        "timings": stats.timings,
        "acceptance": result.acceptance,
        "preserves_distribution": result.preserves_distribution,
    }
    if result.logprobs is not None:
        figures["logprobs"] = [each._asdict() for each in result.logprobs]
    return figures
