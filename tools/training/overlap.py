"""Says which rows of data files share text with evaluation files, and can leave these rows out.

    python -m tools.training.overlap DATA.jsonl … --eval EVAL.jsonl … [--target MODEL] [--words 13]
        [--without FOLDER] [--json OUT]

Two texts overlap if they share 13 words in a row (`--words`): as text, in lower case, without
punctuation. A short text of an evaluation file, of 5 to 12 words, counts as a whole. Data rows may
be any that `data.read` or `distill` takes. Of each data file and source are printed the rows, and
those whose prompts and whose answers overlap. `--without` writes the rows that do not, under the
same name. Of evaluation files every text in a row counts, reference answers too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec_export.model import target
from spec_export.training import data
from spec_runtime.files.writing import require_writable, write_atomically
from tools.figures import command_line, markdown, run, write

WORDS = 13
# Shorter questions than these are in many texts that never saw the evaluation file.
SHORTEST = 5


@dataclass
class Counts:
    """Rows of one source; a row may overlap in its prompt and in its answer."""

    rows: int = 0
    prompts: int = 0
    answers: int = 0
    either: int = 0


class Index:
    """The word n-grams of evaluation texts."""

    def __init__(self, texts: Iterable[str], size: int = WORDS) -> None:
        self.size = size
        self.grams: set[int] = set()
        self.short: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            found = words(text)
            self.grams.update(hash(gram) for gram in ngrams(found, size))
            if SHORTEST <= len(found) < size:
                self.short.setdefault(len(found), set()).add(tuple(found))

    def overlaps(self, text: str) -> bool:
        """Returns whether the text shares an n-gram, or holds a whole short text."""
        found = words(text)
        if any(hash(gram) in self.grams for gram in ngrams(found, self.size)):
            return True
        return any(
            gram in texts for length, texts in self.short.items() for gram in ngrams(found, length)
        )


def words(text: str) -> list[str]:
    """Returns the words in lower case without punctuation; "don't" is one word, "dont"."""
    return re.findall(r"\w+", text.lower().replace("'", "").replace("\u2019", ""))


def ngrams(found: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(found[start:] for start in range(size)), strict=False)


def strings(value: Any) -> Iterator[str]:
    """Yields every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from strings(part)


def evaluation_texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for _, row in data.read_rows(path):
            yield from strings(row)


def sides(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """Returns the texts of a row's prompts and of its answers; turns are kept apart by a line."""
    if "messages" in row:
        said: tuple[list[str], list[str]] = ([], [])
        for message in row["messages"]:
            said[message["role"] == "assistant"].append(message["content"])
        return "\n".join(said[0]), "\n".join(said[1])
    if "tokens" in row:
        pieces: tuple[list[int], list[int]] = ([], [])
        for token, loss in zip(row["tokens"], row["loss_mask"], strict=True):
            pieces[bool(loss)].append(token)
        return tokenizer.decode(pieces[0]), tokenizer.decode(pieces[1])
    turns = row.get("turns", [row])
    asked = [turn["prompt"] if isinstance(turn, dict) else turn for turn in turns]
    said_back = [turn.get("response", "") for turn in turns if isinstance(turn, dict)]

    def text(part: Any) -> str:
        return tokenizer.decode(part) if isinstance(part, list) else str(part)

    return "\n".join(map(text, asked)), "\n".join(map(text, said_back))


def compare(
    path: Path, index: Index, tokenizer: Any
) -> tuple[dict[str, Counts], list[dict[str, Any]]]:
    """Returns the counts by source ("" for none), and the rows that do not overlap."""
    counts: dict[str, Counts] = {}
    clean = []
    for _, row in data.read_rows(path):
        prompt, answer = (index.overlaps(text) for text in sides(row, tokenizer))
        entry = counts.setdefault(row.get("source") or "", Counts())
        entry.rows += 1
        entry.prompts += prompt
        entry.answers += answer
        entry.either += prompt or answer
        if not prompt and not answer:
            clean.append(row)
    return counts, clean


def main(arguments_given: list[str] | None = None) -> None:
    parser = command_line(__doc__, "--json")
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--eval", type=Path, nargs="+", required=True)
    parser.add_argument("--target", help="whose tokenizer the rows have; default: the demo")
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--without", type=Path, metavar="FOLDER")
    arguments = parser.parse_args(arguments_given)
    if arguments.json:
        require_writable(arguments.json)
    tokenizer = target.load_tokenizer(target.resolve(arguments.target))
    index = Index(evaluation_texts(arguments.eval), arguments.words)
    files = {}
    for path in arguments.data:
        counts, clean = compare(path, index, tokenizer)
        files[path.name] = {source: asdict(entry) for source, entry in sorted(counts.items())}
        cells = [[s or "(none)", *map(str, each.values())] for s, each in files[path.name].items()]
        print(markdown([path.name, "rows", "prompts", "answers", "either"], cells))
        if arguments.without:
            arguments.without.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in clean)
            write_atomically(arguments.without / path.name.removesuffix(".xz"), lines)
    figures = {
        "words": arguments.words,
        "evaluation": [path.name for path in arguments.eval],
        "files": files,
    }
    about = {"packages": ("transformers",), "note": "nothing is decoded; not recorded: prompts"}
    write(arguments.json, figures, **about)


if __name__ == "__main__":
    run(main)
