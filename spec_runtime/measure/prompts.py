"""Reads prompt files: one prompt a line, each counted under a subset."""

import logging
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json

# Spec-Bench reports these eight categories of MT-Bench as one subset.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
NO_CATEGORY = "all"

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: a text or chat messages, and the subset it is counted under.

    ``content`` is the first turn. ``later_turns`` are what the user says next; only ``bench`` asks
    them, and each follows the answer that the same way of decoding gave before.
    """

    id: str | int
    category: str
    content: str | list[dict[str, str]]
    later_turns: tuple[str, ...] = ()


def read_prompts(
    path: Path, limit: int | None = None, per_category: int | None = None
) -> list[BenchPrompt]:
    """Returns the prompts of a JSON Lines file, one object a line.

    Lines are {question_id, category, turns[]} (Spec-Bench), {prompt} or {messages}, the last two
    with an optional id and category. MT-Bench's eight categories make up one subset, mt_bench.

    ``per_category`` keeps that many of each subset. They are the first by id, but mt_bench's are
    taken in turn from its eight categories: of ids 81-90 (writing), 91-100 (roleplay), …, ten are
    81, 82, 91, 92, 101, 111, 121, 131, 141 and 151. ``limit`` then keeps that many in all, taken
    evenly: with subsets a (3 prompts) and b (1), limit 3 keeps a a b.

    A line whose text no tokenizer can take (bytes that are not UTF-8, half a surrogate pair) is
    left out with a warning that names it: the other prompts of a large file are worth measuring.
    Raises UserError for a line that is none of the above, and when no prompt is left.
    """
    rows = []
    # Only "\n" ends a line: str.splitlines would also split at U+2028, which JSON leaves as it is.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_prompt(line, number, path))
        except UnicodeError as error:
            log.warning("%s, line %d is skipped: %s", path, number, error)
    if all(isinstance(prompt.id, int) for prompt, _ in rows):
        rows.sort(key=lambda row: row[0].id)  # ids of one kind can be compared
    order = {id(prompt): place for place, (prompt, _) in enumerate(rows)}
    subsets: dict[str, dict[str, list[BenchPrompt]]] = {}
    for prompt, kind in rows:
        subsets.setdefault(prompt.category, {}).setdefault(kind, []).append(prompt)
    kept = [_in_turn(list(kinds.values()))[:per_category] for kinds in subsets.values()]
    if limit is not None:
        chosen = {id(prompt) for prompt in _in_turn(kept)[:limit]}
        kept = [[prompt for prompt in members if id(prompt) in chosen] for members in kept]
    result = [
        prompt for members in kept for prompt in sorted(members, key=lambda each: order[id(each)])
    ]
    if not result:
        raise UserError(f"{path}: got no prompt, expected at least one line of JSON")
    return result


def _in_turn(groups: list[list[BenchPrompt]]) -> list[BenchPrompt]:
    """Takes one of each group, then the next of each: [[a, b], [c]] gives [a, c, b]."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


def _prompt(line: bytes, number: int, path: Path) -> tuple[BenchPrompt, str]:
    """Returns the prompt of a line and the category that the file gives it. Raises UnicodeError for
    text that is no text, and another UserError for anything else that is wrong."""
    where = f"{path}, line {number}"
    try:
        row = parse_json(line)
    except UnicodeError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: got {type(row).__name__}, expected an object")
    content: Any = row["prompt"] if row.get("prompt") is not None else row.get("messages")
    later: list[Any] = []
    if content is None and isinstance(row.get("turns"), list) and row["turns"]:
        content, *later = row["turns"]
    if not _is_content(content) or not all(isinstance(turn, str) for turn in later):
        raise UserError(
            f"{where}: got keys {brief(', '.join(row) or 'none')}, expected turns (a list of "
            "texts), prompt (a text) or messages (role and content each, both texts)"
        )
    identity: Any = row.get("question_id", row.get("id", number))
    if type(identity) not in (int, str):
        raise UserError(f"{where}: got id {identity!r:.40}, expected a number or a text")
    kind = str(row.get("category", NO_CATEGORY))
    category = "mt_bench" if kind in MT_BENCH else kind
    return BenchPrompt(identity, category, content, tuple(later)), kind


def _is_content(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(message, dict)
        and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in content
    )
