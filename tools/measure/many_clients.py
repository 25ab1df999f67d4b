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
part. Loads are kept in OUT with .rows.jsonl in place of .json: the same command goes on where it
was stopped. A rival that cannot be installed, built or run is named with its reason.

--model names what a bundle of another model was built from, a GGUF file.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from typing import Any

from spec_export.model import target
from spec_runtime.bundle import manifest as bundles
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.text.tokenizer import Tokenizer
from tools.figures import command_line, parse, run, write
from tools.measure.compare_rivals import (
    add_flags,
    contexts_of,
    enter,
    let_run,
    options_of,
    say,
)
from tools.measure.rivals import crowd
from tools.measure.rivals.models import TargetFiles
from tools.measure.rivals.race import Journal

NAMES = tuple(rival.name for rival in crowd.rivals("fp32"))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all loads, and who was not measured with the reason."""
    bundle = bundles.read(args.bundle, verify=False)
    manifest, tokenizer = bundle.manifest, Tokenizer(bundle)
    precision = manifest.target.precision
    contexts = contexts_of(args, tokenizer)
    options = options_of(args, contexts, tokenizer, manifest.target.max_length)
    loads = crowd.Crowd(
        contexts,
        {"short": args.clients, "long": args.long_clients},
        {"short": args.answers, "long": args.long_answers},
        args.least,
        args.rounds,
        args.max_new_tokens,
    )
    files = TargetFiles(target.resolve(args.model), args.work)
    rivals = [rival for rival in crowd.rivals(precision) if rival.name in args.rival]
    others, failed = enter(rivals, precision, files, options)
    contenders = [*crowd.ours(args.bundle, precision, options, args.parallel), *others]
    settings = {
        "prompts": {each.name: each.digest for each in contexts},
        "answers": [loads.answers, args.least],
        "max_new_tokens": args.max_new_tokens,
        "bundle": manifest.files,
        "commit": provenance.git_commit(),
        "contenders": {each.name: [*each.command, each.settings] for each in contenders},
    }
    journal = Journal(args.json.with_suffix(".rows.jsonl"), settings)
    if not crowd.is_over(loads, [each.name for each in contenders], journal):
        run_loads = functools.partial(crowd.run, loads, journal=journal, announce=say)
        failed += let_run(run_loads, contenders, args.work / "logs" / f"clients {precision}")
    lost = {each["name"] for each in failed}
    finished = [each for each in contenders if each.name not in lost]
    rows = crowd.rows_of(loads, journal, finished)
    figures = {
        "load_average": os.getloadavg()[0],
        "rounds": args.rounds,
        "parallel": args.parallel,
        "max_new_tokens": args.max_new_tokens,
        "contexts": {
            each.name: {
                "prompts": len(each.prompts),
                "tokens": sum(map(len, each.prompts.values())) / len(each.prompts),
            }
            for each in contexts
        },
        "versions": {row["contender"]: row["version"] for row in rows},
        "rows": (found := crowd.summarise(rows, finished)),
        "best": crowd.best(found),
        "failed": failed,
    }
    used = {prompt for each in contexts for prompt in each.prompts}
    return write(
        args.json,
        figures,
        threads=options.threads,
        prompts_file=args.prompts,
        prompts=[each for each in read_prompts(args.prompts) if str(each.id) in used],
        manifest=manifest,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and prints the table."""
    figures = measure(parse(parser(), words))
    print(crowd.table(figures["rows"]) + "\n")
    for each in figures["failed"]:
        print(f"not measured: {each['engine']}, {each['what']}: {each['reason']}")
    for each in figures["best"]:
        print(crowd.best_line(each))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    flags = ("--bundle", "--prompts", "--max-new-tokens", "--no-profile", "--threads", "--json")
    found = command_line(__doc__, *flags, required=("--bundle", "--json"), max_new_tokens=64)
    add_flags(found, NAMES, long_limit=16, long_tokens=1000, rounds=2)
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
