"""Reads prompt files: one prompt a line, each counted under a subset."""

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

# Spec-Bench reports these eight categories of MT-Bench as one subset.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
NO_CATEGORY = "all"


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: text or chat messages, and the subset it is counted under."""

    id: str | int
    category: str
    content: str | list[dict[str, str]]


def read_prompts(
    path: Path, limit: int | None = None, per_category: int | None = None
) -> list[BenchPrompt]:
    """The prompts of a JSON Lines file, one object a line.

    Lines are {question_id, category, turns[]} (Spec-Bench; first turn), {prompt} or {messages}, the
    last two with an optional id and category. ``per_category`` keeps the first of each category by
    id; ``limit`` then keeps so many in all, taken evenly: with categories a (3 prompts) and b (1),
    limit 3 keeps a a b. Raises ValueError for a line that is none of these, or when none is left.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, number, path))
    if all(isinstance(prompt.id, int) for prompt in prompts):
        prompts.sort(key=lambda prompt: prompt.id)  # one kind of id: they do compare
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    kept = [members[:per_category] for members in by_category.values()]
    if limit is not None:
        rounds = [prompt for row in zip_longest(*kept) for prompt in row if prompt is not None]
        chosen = {id(prompt) for prompt in rounds[:limit]}
        kept = [[prompt for prompt in members if id(prompt) in chosen] for members in kept]
    result = [prompt for members in kept for prompt in members]
    if not result:
        raise ValueError(f"{path}: got no prompt, expected at least one line of JSON")
    return result


def _prompt(line: str, number: int, path: Path) -> BenchPrompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: got {type(row).__name__}, expected an object")
    content: Any = row.get("prompt") or row.get("messages")
    if content is None and isinstance(row.get("turns"), list) and row["turns"]:
        content = row["turns"][0]
    if not _is_content(content):
        raise ValueError(
            f"{where}: got keys {', '.join(row) or 'none'}, expected turns (a list of texts), "
            "prompt (a text) or messages (role and content each)"
        )
    identity: Any = row.get("question_id", row.get("id", number))
    category = str(row.get("category", NO_CATEGORY))
    return BenchPrompt(
        id=identity,
        category="mt_bench" if category in MT_BENCH else category,
        content=content,
    )


def _is_content(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(message, dict) and {"role", "content"} <= set(message) for message in content
    )
