#!/usr/bin/env python3
"""Gives a trained one-pass drafter a table of bigrams, counted in answers of its target.

usage: count_bigrams.py DRAFTER --data answers.jsonl [MORE.jsonl …] --out FOLDER [--model NAME]

spec-export train counts the table itself; this is for drafters that were trained before, and for
more answers than these learnt from. DRAFTER is the folder of a drafter or of its training run, and
FOLDER gets the drafter with the table, whose provenance says which answers were counted.
`--model` names the target, as spec-export takes it; without it it is the demo's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spec_export import drafters, target
from spec_export.training import bigrams, checkpoint, data
from spec_runtime.files.writing import sha256


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a conversation")
    arguments = parser.parse_args(argv)
    checkpoint.require_drafter_folder(arguments.out)
    saved = checkpoint.load_drafter(arguments.drafter)
    if not drafters.load(saved.name).Drafter.is_one_pass:
        raise ValueError(
            f"got drafter {saved.name}, expected one that guesses in one pass: others know what "
            "they guessed before"
        )
    source = target.resolve(arguments.model)
    data.require_target(arguments.data, source.name, target.fingerprint(source))
    model, tokenizer = target.load(source)
    vocab_size = model.config.vocab_size
    examples = data.read(arguments.data, tokenizer, arguments.max_length)
    data.require_vocabulary(examples, vocab_size)
    ids = np.arange(vocab_size) if saved.draft_token_ids is None else saved.draft_token_ids
    table = bigrams.table(examples, ids, vocab_size)
    if table is None:
        raise ValueError(
            f"got {len(examples)} answers in which no pair of tokens comes {bigrams.FEWEST} times, "
            "expected more"
        )
    num_tokens = sum(int(example.loss_T.sum()) for example in examples)
    counted = {
        "answer_tokens": num_tokens,
        "pairs": len(table["bias"]),
        "data": {path.name: sha256(path) for path in arguments.data},
    }
    checkpoint.save_drafter(
        arguments.out,
        saved.state,
        saved.name,
        saved.config,
        saved.provenance | {"bigrams": counted},
        saved.draft_token_ids,
        table,
    )
    print(f"{arguments.out}: {counted['pairs']:,} pairs, of {num_tokens:,} answer tokens")


if __name__ == "__main__":
    main()
