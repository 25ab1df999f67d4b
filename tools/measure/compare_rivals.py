"""Measures specsplit beside other engines: same weights, prompts, tokens and threads, in one run.

    python -m tools.measure.compare_rivals alone --prompts spec_bench.jsonl --bundles DIR --json OUT
    python -m tools.measure.compare_rivals many --prompts spec_bench.jsonl --bundle DIR --json OUT

The rivals' versions stand in rivals/environments.py; environments and models are made once, under
--work. Every engine and mode is one worker process, without HTTP; all of a precision are open
together (at fp32 some 12 GB for the demo target), one decodes while the others wait, and whose turn
comes first rotates. Decoding is greedy. A rival that cannot be installed, built or run is named
with its reason, and the others go on. --model names what a bundle of another model was built from.

alone: one prompt after the other. DIR has a bundle of each precision (fp32, int8, int4: built if it
is not there). Tokens a second are of decoding only, without the first token, which the prompt's own
pass gives; that pass is timed apart. Memory is the process's peak resident size, loading included.
Texts are compared with the same engine's plain ones, between engines where the weights are equal,
and with what DIR/fp32, if it is there, would choose at each place.

many: 1 to 16 clients at a time, each of which sends its next prompt when its last answer is
finished; every answer has --max-new-tokens, past the end of a text. specsplit's AsyncEngine answers
one call at a time, --parallel calls at a time, and as many without drafting; OpenVINO GenAI by its
continuous batching, plainly and with prompt lookup, at its default precisions and at fp32 in
float32, too; llama.cpp by as many sequences of one context, which is what node-llama-cpp batches.
Tokens a second are those of all clients together, the prompts' passes included. The first token
counts from when its prompt is sent. Gaps are those between parts of one answer, of one token or
several. A column says how many answers equal ours of one at a time; the file says where the others
part.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_export.model import target
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads
from spec_runtime.measure.prompts import read_prompts
from spec_runtime.text.prompt import encode_prompt
from spec_runtime.text.tokenizer import Codec, Tokenizer
from tools.docs.render import shown
from tools.docs.rows import by_contender
from tools.figures import FLAGS, command_line, manifest_of, parse, run, write
from tools.measure import measure_all
from tools.measure.rivals import contexts, fidelity, field, report
from tools.measure.rivals.environments import RivalError
from tools.measure.rivals.field import PRECISIONS, RIVALS, Contender, Options, Rival
from tools.measure.rivals.models import TargetFiles
from tools.measure.rivals.race import Context, Race, Row, by_many, one_by_one
from tools.measure.rivals.worker import Worker

SHORT_TOKENS = 512  # of a short prompt, at most
ALONE = {"limit": 8, "long_limit": 4, "long_tokens": 1500, "rounds": 3}
MANY = {"limit": 32, "long_limit": 16, "long_tokens": 1000, "rounds": 2, "max_new_tokens": 64}


def main(words: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and prints the tables."""
    args = parse(parser(), words)
    figures = args.measure(args)
    for precision, found in figures.get("precisions", {}).items():
        print(f"### {precision}\n\n{shown('rivals', by_contender(found))}\n")
    if "rows" in figures:
        print(shown("many_clients", figures["rows"]) + "\n")
    for each in figures["failed"]:
        print(f"not measured: {each['engine']}, {each['what']}: {each['reason']}")
    print(shown("many_clients_best" if "rows" in figures else "rivals_best", figures["best"]))


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all precisions, and what was not measured with the reason."""
    for precision in args.precision:
        measure_all.build(precision, args.bundles, args.model)
    manifests = {precision: manifest_of(args.bundles / precision) for precision in args.precision}
    tokenizer = Tokenizer(bundles.read(args.bundles / args.precision[0], verify=False))
    asked = contexts_of(args, tokenizer)
    room = min(manifest.target.max_length for manifest in manifests.values())
    options = options_of(args, asked, tokenizer, room, may_end=True)
    figures: dict[str, Any] = {
        **about(args, asked),
        "threads": options.threads,
        "lookup_tokens": options.lookup_tokens,
        "versions": {},
        "precisions": {},
        "best": [],
        "failed": [],
    }
    for precision in args.precision:
        race = Race(precision, one_by_one(asked, args.rounds), args.max_new_tokens, may_end=True)
        own = field.ours(
            args.bundles / precision,
            precision,
            options,
            field.OUR_MODES,
            not args.no_profile,
            args.model is None,
        )
        rivals = [rival for rival in RIVALS if rival.name in args.rival]
        rows, finished, failed = let_all_run(args, race, own, rivals, options)
        figures["failed"] += [{**each, "precision": precision} for each in failed]
        engines = {each.name: each.engine for each in finished}
        figures["versions"] |= {engines[row["contender"]]: row["version"] for row in rows}
        choices = None
        if (exact := args.bundles / "fp32").is_dir():
            choices = fidelity.choices(exact, options.threads, asked, rows)
        found = report.summarise(rows, finished, choices)
        figures["precisions"][precision] = found
        figures["best"] += report.aims(precision, found)
        keep(args, figures, asked, options, next(iter(manifests.values())))
    return figures


def many(args: argparse.Namespace) -> dict[str, Any]:
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


# ---- what both do alike ----


def contexts_of(args: argparse.Namespace, tokenizer: Codec) -> list[Context]:
    """Returns the short prompts and, if there are to be any, the long ones."""
    encode = functools.partial(encode_prompt, tokenizer, raw=False, system=None)
    prompts = read_prompts(args.prompts)
    found = [contexts.short(prompts, encode, args.limit, SHORT_TOKENS)]
    if args.long_limit:
        found.append(contexts.long(prompts, encode, args.long_limit, args.long_tokens))
    return found


def options_of(
    args: argparse.Namespace,
    asked: Sequence[Context],
    tokenizer: Tokenizer,
    room: int,
    may_end: bool,
) -> Options:
    """Returns what all contenders are given alike; raises UserError if a prompt and its answer take
    more than `room` tokens."""
    longest = max(len(ids) for each in asked for ids in each.prompts.values())
    if longest + args.max_new_tokens > room:
        raise UserError(
            f"got a prompt of {longest} tokens and {args.max_new_tokens} new ones, expected at "
            f"most {room}, the bundles' context: take a smaller --long-tokens"
        )
    return Options(
        threads=args.threads or default_threads(),
        end_ids=tokenizer.eos,
        max_length=-(-(longest + args.max_new_tokens) // 256) * 256,
        lookup_tokens=args.lookup_tokens,
        lookup_ngram=args.lookup_ngram,
        may_end=may_end,
    )


def about(args: argparse.Namespace, asked: Sequence[Context]) -> dict[str, Any]:
    """Returns what both files of figures say of a run."""
    return {
        "load_average": os.getloadavg()[0],
        "rounds": args.rounds,
        "max_new_tokens": args.max_new_tokens,
        "contexts": {
            each.name: {
                "prompts": len(each.prompts),
                "tokens": sum(map(len, each.prompts.values())) / len(each.prompts),
            }
            for each in asked
        },
    }


def let_all_run(
    args: argparse.Namespace,
    race: Race,
    own: Sequence[Contender],
    rivals: Sequence[Rival],
    options: Options,
) -> tuple[list[Row], list[Contender], list[dict[str, str]]]:
    """Makes the rivals ready and runs the race with all workers open; returns its rows, who
    finished, and who did not with the reason."""
    contenders, failed, reasons = [*own], [], dict[str, str]()
    files = TargetFiles(target.resolve(args.model), args.work)
    for rival in rivals:
        try:
            contenders += field.of_rival(rival, race.precision, files, options)
        except RivalError as error:
            failed.append(_failure(rival.title, rival.title, race.precision, error))
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for each in contenders:
            say(f"{race.precision}: opening {each.name}")
            log = args.work / "logs" / args.json.stem / f"{race.precision} {each.name}.log"
            try:
                workers[each.name] = Worker(each.command, each.settings, log)
            except RivalError as error:
                reasons[each.name] = str(error)
                say(f"{each.name} is left out: {error}")
                continue
            stack.callback(workers[each.name].close)
        rows, others = race.run(workers, say)
    reasons |= others
    for each in contenders:
        if each.name in reasons:
            failed.append(_failure(each.name, each.engine, each.mode, reasons[each.name]))
    return rows, [each for each in contenders if each.name not in reasons], failed


def _failure(name: str, engine: str, what: str, reason: object) -> dict[str, str]:
    return {"name": name, "engine": engine, "what": what, "reason": str(reason)}


def keep(
    args: argparse.Namespace,
    figures: Mapping[str, Any],
    asked: Sequence[Context],
    options: Options,
    manifest: bundles.Manifest,
) -> dict[str, Any]:
    """Writes --json, with the prompts that were asked in its provenance."""
    used = {prompt for each in asked for prompt in each.prompts}
    return write(
        args.json,
        {**figures},
        threads=options.threads,
        prompts_file=args.prompts,
        prompts=[each for each in read_prompts(args.prompts) if str(each.id) in used],
        manifest=manifest,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = command_line(__doc__)
    kinds = found.add_subparsers(required=True)
    flags = ("--prompts", "--max-new-tokens", "--no-profile", "--threads", "--json")
    for measure, rivals, more, defaults in (
        (alone, RIVALS, (), ALONE),
        (many, field.for_many("fp32"), ("--bundle",), MANY),
    ):
        kind = kinds.add_parser(measure.__name__)
        for flag in (*flags, *more):
            needed = {"required": True} if flag in ("--json", "--bundle") else {}
            kind.add_argument(flag, **FLAGS[flag] | needed)
        add, names = kind.add_argument, [rival.name for rival in rivals]
        add("--rival", nargs="*", choices=names, default=names)
        add("--limit", type=int, help="short prompts, over all categories")
        add("--long-limit", type=int, help="long prompts; 0 for none")
        add("--long-tokens", type=int)
        add("--rounds", type=int)
        add("--lookup-tokens", type=int, default=5, help="the rivals' lookups draft")
        add("--lookup-ngram", type=int, default=3, help="and match at most")
        add("--model", help="what the bundle was built from; default: the demo")
        add("--work", type=Path, default=Path("runs/rivals"))
        if measure is alone:
            add("--bundles", type=Path, required=True, help="with fp32, int8 and int4")
            add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
        else:
            add("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
            add("--long-clients", type=int, nargs="+", default=[1, 4, 8], help="with long prompts")
            add("--answers", type=int, default=2, help="a client, to short prompts")
            add("--long-answers", type=int, default=1)
            add("--least", type=int, default=2, help="answers of few clients, all together")
            add("--parallel", type=int, default=8, help="calls that our engine answers at a time")
        kind.set_defaults(measure=measure, **defaults)
    return found


if __name__ == "__main__":
    run(main)
