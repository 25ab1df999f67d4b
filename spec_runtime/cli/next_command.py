"""Says where a long command left its result, and which command comes next on the way from a
checkpoint to a served drafter."""

import shlex
from pathlib import Path

from spec_runtime.cli.terminal import Console, visible
from spec_runtime.files.installed import program

NEXT = {  # RESULT stands for what the command left, MODEL for the flags that name its target
    "recipe": "spec-export train RESULT",
    "prompts": "spec-export distill MODEL --prompts prompts.jsonl --out RESULT",  # no answers yet
    "distill": "spec-export recipe MODEL --data RESULT --out recipe.toml",
    "train": "spec-export build MODEL --drafter-checkpoint RESULT",
    "build": "spec-export calibrate --bundle RESULT",
    "calibrate": "spec-runtime tune --bundle RESULT",
    "tune": "spec-runtime serve --bundle RESULT",
}


def after(verb: str, result: Path, model: str | None = None, base: str | None = None) -> str:
    """Returns the command that comes after `verb`, as the shell here takes it.

    model and base: the target as `--model` and `--base` take it, None for the demo.
    """
    named = {"--model": model, "--base": base}
    flags = [word for flag, value in named.items() if value for word in (flag, value)]
    first, *words = NEXT[verb].split()
    there = {"RESULT": [str(result)], "MODEL": flags}
    said = [each for word in words for each in there.get(word, [word])]
    return " ".join([program(first), shlex.join(said)])


def say(
    verb: str,
    result: Path,
    model: str | None = None,
    base: str | None = None,
    made: Path | None = None,
) -> None:
    """Prints on the standard error where the result of `verb` lies, at `made` if the next command
    does not read it, and what comes next."""
    line = f"{made or result} is ready. Next: {after(verb, result, model, base)}"
    Console(stderr=True).print(visible(line), soft_wrap=True)
