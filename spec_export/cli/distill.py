"""spec-export distill: answers by the target itself, to train drafters on."""

from pathlib import Path
from typing import Annotated

import typer

from spec_export.cli.options import Model


def command(
    out: Annotated[Path, typer.Option("--out", help="JSON Lines file to write")],
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="JSON Lines of prompts", show_default="the target samples some"
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option("--num-prompts", help="Answers to write", show_default="the file's, or 1000"),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Longest answer, in tokens")
    ] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longest sampled prompt, in tokens")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of the answers; 0 is greedy")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same prompts")] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts at once; also what an interruption loses")
    ] = 64,
    engine: Annotated[
        str, typer.Option("--engine", help="auto, transformers, openvino or vllm")
    ] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, bf16 or fp16: of the engine's weights")
    ] = "fp32",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with a file that is there")
    ] = True,
) -> None:
    """Let the target answer prompts and keep the answers as training data."""
    from spec_export.distill import answers as distill

    result = distill.run(
        distill.DistillConfig(
            model=model,
            out=out,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
            engine=engine,
            precision=precision,
            resume=resume,
        )
    )
    rate = f", {result.new_tokens / result.seconds:.0f} tokens/s" if result.seconds else ""
    print(
        f"{result.out}: {result.rows} rows, {result.answer_tokens} answer tokens, "
        f"by {result.engine}{rate}"
    )
