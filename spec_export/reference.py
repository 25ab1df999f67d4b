"""Texts of our own in the package: the reference prompts, and prose to take perplexity on.

Knows where they lie; knows nothing of what they are used for.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

ASSETS = Path(str(resources.files("spec_export"))) / "assets"


def prompts() -> list[str]:
    """Sixteen prompts: accepted length is measured on them, and int8 scales are calibrated."""
    lines = (ASSETS / "reference_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def prose() -> str:
    """About a thousand words; perplexity is taken on it and nothing is ever fitted to it."""
    return (ASSETS / "perplexity.txt").read_text(encoding="utf-8")


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's ids by transformers' tokenizer, through its chat template if it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )
