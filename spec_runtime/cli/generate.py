"""spec-runtime generate: one prompt in, its continuation out, streamed or as JSON."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from spec_runtime.cli import options

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions


def command(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt", show_default="standard input")
    ] = None,
    bundle: options.Bundle = None,
    drafter: options.Drafter = None,
    also: options.Also = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeatable")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt")] = False,
    system: options.System = None,
    threads: options.Threads = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the tokens the drafter guessed")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Text, token ids and figures as one JSON object")
    ] = False,
) -> None:
    """Generate text from a prompt."""
    if prompt is None:
        prompt = _standard_input()
    engine = options.open_engine(bundle, drafter, threads, also)
    prompt_ids = engine.encode(prompt, raw, system)
    settings = options.sampling(max_new_tokens, temperature, top_k, top_p, seed, stop)
    if as_json:
        print(json.dumps(report(engine.generate(prompt_ids, **settings))))
        return
    if show_accepted:
        _print_coloured(engine, prompt_ids, settings)
    else:
        for piece in engine.stream(prompt_ids, **settings):
            print(piece, end="", flush=True)
    print(flush=True)
    assert engine.last_result is not None
    print(options.summary_line(engine.last_result), file=sys.stderr)


def _print_coloured(engine: "Engine", prompt: list[int], settings: "SamplingOptions") -> None:
    """Drafted tokens in green, the target's own as they are."""
    from spec_runtime.text import TextStream

    console = Console(highlight=False, markup=False, soft_wrap=True)
    text = TextStream(engine.tokenizer.decode, settings["stop"])
    style = ""
    for step in engine.steps(prompt, **settings):
        for index, token in enumerate(step.tokens):
            text.push(token)
            style = "green" if index < step.num_accepted else ""
            # Text held back for a stop string or an unfinished character takes the later colour.
            console.print(text.take(), end="", style=style)
    text.finish()
    console.print(text.take(), end="", style=style)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ValueError("got no prompt; give it as an argument or on standard input")
    # The line end a shell adds is not part of the prompt.
    return sys.stdin.read().removesuffix("\n")


def report(result: "GenerationResult") -> dict[str, Any]:
    """What ``--json`` prints; seconds throughout."""
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "tokens_per_second": stats.tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "accepted_length": stats.accepted_length,
        "steps": stats.steps,
        "timings": stats.timings,
    }
