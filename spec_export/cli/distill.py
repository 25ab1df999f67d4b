"""Defines `spec-export distill`, which lets the target write the answers drafters train on."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Base, Model
from spec_runtime.cli import next_command

BatchSize = Annotated[
    int,
    typer.Option("--batch-size", help="Prompts answered at once; an interruption loses one batch"),
]

Temperature = Annotated[
    str, typer.Option("--temperature", help="Temperature of the answers, 0 is greedy; or several")
]
Engine = Annotated[
    str, typer.Option("--engine", help="What runs the target: auto, transformers or openvino")
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="Ask the OpenAI-compatible server at this address, which runs the target",
        show_default="load it here",
    ),
]
Merge = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="File of a shard to join; once for each", show_default=False),
]


def command(
    out: Annotated[Path, typer.Option("--out", help="JSON Lines file to write")],
    model: Model = None,
    base: Base = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="JSON Lines of prompts", show_default="the target samples some"
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts", help="Number of answers to write", show_default="the file's, or 1000"
        ),
    ] = None,
    turns: Annotated[
        int, typer.Option("--turns", help="User messages of a conversation, given or sampled")
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer, in tokens")
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longest sampled prompt, in tokens")
    ] = 128,
    temperature: Temperature = "0",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the sampled prompts and answers")
    ] = 0,
    batch_size: BatchSize = 64,
    engine: Engine = "auto",
    precision: Annotated[
        str,
        typer.Option("--precision", help="Precision of the engine's weights: fp32, bf16 or fp16"),
    ] = "fp32",
    server: Server = None,
    shard: Annotated[
        str, typer.Option("--shard", help="Write only part I/N of the rows, on one of N machines")
    ] = "1/1",
    merge: Merge = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue a file that is there")
    ] = True,
) -> None:
    """Let the target answer prompts and keep the answers as training data."""
    from spec_export.distill.config import DistillConfig

    config = DistillConfig(
        model=model,
        base=base,
        out=out,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        turns=turns,
        temperature=_temperatures(temperature),
        seed=seed,
        batch_size=batch_size,
        engine=engine,
        precision=precision,
        resume=resume,
        server=server,
        shard=shard,
    )
    config.require_files()  # before torch is imported

    from spec_export.cli.report import TerminalReport
    from spec_export.distill import answers as distill

    result = distill.merge(merge, out) if merge else distill.run(config, TerminalReport())
    rate = f", {result.new_tokens / result.seconds:.0f} tokens/s" if result.seconds else ""
    skipped = f", {result.skipped} prompts skipped" if result.skipped else ""
    print(
        f"{result.out}: {result.rows} rows, {result.answer_tokens} answer tokens, "
        f"by {result.engine}{rate}{skipped}"
    )
    next_command.say("distill", result.out, model, base)


def _temperatures(text: str) -> float | tuple[float, ...]:
    """Returns the number, or the numbers between commas."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"got {text!r}, expected a number, or several like 0,0.7,1", param_hint="--temperature"
        ) from None
    return values[0] if len(values) == 1 else values
