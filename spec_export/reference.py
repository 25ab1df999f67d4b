"""Reads the package's own texts: the reference prompts, and prose to take perplexity on."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

ASSETS = Path(str(resources.files("spec_export"))) / "assets"


def prompts() -> list[str]:
    """Returns sixteen prompts, on which accepted length is measured and int8 is smoothed."""
    lines = (ASSETS / "reference_prompts.jsonl").read_bytes().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def prose() -> str:
    """Returns about a thousand words; perplexity is taken on them and nothing is fitted to them."""
    return (ASSETS / "perplexity.txt").read_text(encoding="utf-8")


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Returns a prompt's ids by transformers' tokenizer, in its chat template if it has one.

    Raises UserError if the template fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(prompt, add_special_tokens=True))
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of a stranger, and may raise anything
        reason = brief(error, 200)
        raise UserError(
            f"the target's chat template fails: {type(error).__name__}: {reason}; mend it"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))
