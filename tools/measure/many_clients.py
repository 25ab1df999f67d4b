"""Measures specsplit beside other engines with 1 to 16 clients at a time, on the same weights.

    python -m tools.measure.many_clients --prompts spec_bench.jsonl --bundle DIR --json OUT

Each client sends its next prompt when its last answer is finished; every answer has
--max-new-tokens, past the end of a text, at temperature 0. Engines answer in worker processes,
without HTTP: specsplit's AsyncEngine one call at a time, --parallel calls at a time, and as many
without drafting; OpenVINO GenAI's continuous batching, plainly and with prompt lookup, at its
default precisions and at fp32 in float32, too; llama.cpp by as many sequences of one context, which
is what node-llama-cpp batches. Environments and models are those of compare_rivals.py. All workers
are open together, one answers while the others wait, and whose turn comes first rotates.

Tokens a second are those of all clients together, the prompts' passes included. The first token
counts from when its prompt is sent. Gaps are those between parts of one answer, of one token or
several. A column says how many answers equal ours of one at a time; the file says where the others
part. A rival that cannot be installed, built or run is named with its reason.

--model names what a bundle of another model was built from, a GGUF file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from spec_runtime.bundle import manifest as bundles
from spec_runtime.text.tokenizer import Tokenizer
from tools.docs.render import shown
from tools.figures import command_line, parse, run
from tools.measure.compare_rivals import (
    about,
    add_flags,
    contexts_of,
    keep,
    let_all_run,
    options_of,
)
from tools.measure.rivals import field, report
from tools.measure.rivals.race import Race, by_many


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all loads, and who was not measured with the reason."""
    bundle = bundles.read(args.bundle, verify=False)
    manifest, tokenizer = bundle.manifest, Tokenizer(bundle)
    precision = manifest.target.precision
    asked = contexts_of(args, tokenizer)
    options = options_of(args, asked, tokenizer, manifest.target.max_length, may_end=False)
    clients = {"short": args.clients, "long": args.long_clients}
    answers = {"short": args.answers, "long": args.long_answers}
    loads = [*by_many(asked, clients, answers, args.least, args.rounds)]
    race = Race(precision, loads, args.max_new_tokens, may_end=False)
    modes = field.our_modes_for_many(args.parallel)
    own = field.ours(args.bundle, precision, options, modes, not args.no_profile)
    rivals = [each for each in field.for_many(precision) if each.name in args.rival]
    rows, finished, failed = let_all_run(args, race, own, rivals, options)
    found = report.summarise_many(rows, finished)
    figures = {
        **about(args, asked),
        "parallel": args.parallel,
        "versions": {row["contender"]: row["version"] for row in rows},
        "rows": found,
        "best": report.best_of_many(found),
        "failed": failed,
    }
    return keep(args, figures, asked, options, manifest)


def main(words: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and prints the table."""
    figures = measure(parse(parser(), words))
    print(shown("many_clients", figures["rows"]) + "\n")
    for each in figures["failed"]:
        print(f"not measured: {each['engine']}, {each['what']}: {each['reason']}")
    print(shown("many_clients_best", figures["best"]))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    flags = ("--bundle", "--prompts", "--max-new-tokens", "--no-profile", "--threads", "--json")
    found = command_line(__doc__, *flags, required=("--bundle", "--json"), max_new_tokens=64)
    add_flags(found, field.for_many("fp32"), long_limit=16, long_tokens=1000, rounds=2)
    add = found.add_argument
    add("--limit", type=int, default=32, help="short prompts, over all categories")
    add("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--long-clients", type=int, nargs="+", default=[1, 4, 8], help="with long prompts")
    add("--answers", type=int, default=2, help="a client, to short prompts")
    add("--long-answers", type=int, default=1)
    add("--least", type=int, default=2, help="answers of few clients, all together")
    add("--parallel", type=int, default=8, help="calls that our engine answers at a time")
    return found


if __name__ == "__main__":
    run(main)
