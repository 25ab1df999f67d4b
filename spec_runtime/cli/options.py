"""Options that several verbs take, and the engine they name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spec_runtime import Engine, GenerationResult
    from spec_runtime.sampling import SamplingOptions

Bundle = Annotated[
    Path | None,
    typer.Option("--bundle", help="Bundle folder", show_default="the newest under ./bundles"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A drafter of the bundle, prompt_lookup, lookahead, or none",
        show_default="the bundle's first",
    ),
]
Also = Annotated[
    str | None,
    typer.Option(
        "--also",
        help="prompt_lookup: merge its candidates into the drafter's trees; none: do not",
        show_default="as the bundle says",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="CPU threads", show_default="the cores this process may use"
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens at most")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Keep the k likeliest tokens")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep this much probability")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens")]
System = Annotated[str | None, typer.Option("--system", help="System prompt")]


def open_engine(
    bundle: Path | None, drafter: str | None, threads: int | None, also: str | None = None
) -> "Engine":
    """The engine over ``bundle``, or over the newest one under ./bundles."""
    import spec_runtime
    from spec_runtime.bundle import find

    return spec_runtime.load(bundle or find(), drafter=drafter, threads=threads, also=also)


def sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: list[str] | None = None,
) -> "SamplingOptions":
    """The sampling options of a command line, as the engine takes them."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or (),
    }


def summary_line(result: "GenerationResult") -> str:
    """One line for stderr: how much was generated, how fast, why it ended."""
    stats = result.stats
    return (
        f"{len(result.token_ids)} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"accepted length {stats.accepted_length:.2f}, prefill {stats.prefill_seconds:.2f} s, "
        f"finished by {result.finish_reason}"
    )
