"""Says where training rows come from: tokens by source, licence, temperature and turns.

    python -m tools.training.data_summary DATA.jsonl … [--target MODEL] [--json OUT]

Rows are those that `distill` writes. A source is looked up among the licences of
broad_prompts.toml by what stands after its "/"; rows without one are the target's own text
("Magpie"). A row without a temperature has that of its file's sidecar. An answer is cut if it
has no end token. Of each file the SHA-256 is printed, which a result can cite.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.model import target
from spec_export.training import data
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable, sha256
from tools.figures import command_line, markdown, run, write

WORDING = Path(__file__).with_name("broad_prompts.toml")
OWN = "(the target's own)"
UNKNOWN = "unknown"


@dataclass
class Totals:
    """Sums over some rows."""

    rows: int = 0
    prompt_tokens: int = 0
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0

    def add(self, turns: list[dict[str, Any]], ends: set[int]) -> None:
        self.rows += 1
        self.answers += len(turns)
        self.prompt_tokens += sum(len(turn["prompt"]) for turn in turns)
        self.answer_tokens += sum(len(turn["response"]) for turn in turns)
        self.cut += sum(turn["response"][-1] not in ends for turn in turns)

    def figures(self) -> dict[str, float]:
        return {
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "mean_answer": round(self.answer_tokens / max(self.answers, 1), 1),
            "cut": round(self.cut / max(self.answers, 1), 4),
        }


def summarize(paths: Iterable[Path], ends: set[int]) -> dict[str, dict[str, Totals]]:
    """Returns the totals by "source", "licence", "temperature", "turns" and "all".

    Raises UserError on a row that `distill` did not write.
    """
    licences = tomllib.loads(WORDING.read_text(encoding="utf-8"))["licences"]
    tables: dict[str, dict[str, Totals]] = {
        name: {} for name in ("source", "licence", "temperature", "turns", "all")
    }
    for path in paths:
        usual = sidecar_temperature(path)
        for where, row in data.read_rows(path):
            turns = row.get("turns", [row])
            if not all(turn.get("prompt") and turn.get("response") for turn in turns):
                raise UserError(f"{where}: not a row of distill, expected its answers")
            source = row.get("source") or OWN
            origin = "answers" if source == OWN else source.split("/")[-1]
            keys = {
                "source": source,
                "licence": licences[origin][0] if origin in licences else UNKNOWN,
                "temperature": str(row.get("temperature", usual)),
                "turns": str(len(turns)),
                "all": "all",
            }
            for table, key in keys.items():
                tables[table].setdefault(key, Totals()).add(turns, ends)
    return tables


def sidecar_temperature(path: Path) -> str:
    """Returns the temperature of a file's rows that name none."""
    sidecar = path.with_name(path.name + data.SIDECAR)
    if not sidecar.is_file():
        return UNKNOWN
    return str(json.loads(sidecar.read_bytes())["settings"]["temperature"])


def main(words: list[str] | None = None) -> None:
    parser = command_line(__doc__, "--json")
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--target", help="whose tokenizer the rows have; default: the demo")
    arguments = parser.parse_args(words)
    if arguments.json:
        require_writable(arguments.json)
    tokenizer = target.load_tokenizer(target.resolve(arguments.target))
    tables = summarize(arguments.data, set(tokenizer.all_special_ids))
    figures = {
        name: {key: totals.figures() for key, totals in sorted(table.items())}
        for name, table in tables.items()
    }
    for name, rows in figures.items():
        cells = [[key, *(f"{number:,}" for number in row.values())] for key, row in rows.items()]
        print("\n" + markdown([f"by {name}", *next(iter(rows.values()))], cells))
    digests = {path.name: sha256(path) for path in arguments.data}
    for name, digest in digests.items():
        print(f"SHA-256 {digest}  {name}")
    about = {"packages": ("transformers",), "note": "nothing is decoded; not recorded: prompts"}
    write(arguments.json, {"sha256": digests, **figures}, **about)


if __name__ == "__main__":
    run(main)
