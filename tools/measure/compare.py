"""Compares ways of decoding the same prompts in one run: drafters, acceptance rules, quantised
bundles, budgets of trees, untuned and tuned, and transformers.

    python -m tools.measure.compare drafters --bundle DIR --prompts spec_bench.jsonl \\
        --temperature 0 0.7 1 --nodes 8 --json drafters-temperatures.json
    … drafters --temperature 0 --nodes 4 8 16 32 64 --json drafters-nodes.json
    … acceptance --bundle DIR --prompts FILE --json OUT
    … budgets --bundle DIR --prompts FILE --json OUT            after `spec-runtime tune`
    … quantised --reference FP32 --bundle DIR DIR --prompts FILE --json OUT
    … untuned --bundle DIR DIR --prompts FILE --json OUT
    … transformers --bundle DIR --prompts FILE --json OUT

All decode in turns (turns.py), beside plain decoding. Of prompts with several turns only the first
is asked. --json is written at the end.

drafters: every drafter of the bundle and the lookups, at each temperature and with trees of each
size (0: the bundle's own trees), without merged prompt lookup; with --lookup, a second time with
it. Above temperature 0 tokens are drawn by target sampling, which keeps the target's distribution.

acceptance: target sampling, typical acceptance at each epsilon with delta = sqrt(epsilon) and, on
demand, rejection. The quality axis of Medusa's figure 5 is here the mean log-probability of a token
under the target itself at temperature 1: typical acceptance writes likelier, duller text.

budgets: the bundle's own trees, the tuned engine, grown trees of each size in --nodes whatever
their probability, and trees of at most the largest size with nodes of at least each --threshold.
The last line compares the tuned engine with the best budget; the best of many is by chance a little
too good.

quantised: the fp32 bundle answers every prompt, and each bundle reads prompts and answers:
"divergence" is KL(fp32 ‖ bundle) in nats a token of the answers, "same choice" the share of their
tokens that both would choose, "perplexity" that of the prompts' own text. Then all decode plainly
and with --drafter as a first load leaves it. Speeds are over those of the first bundle.

untuned: is drafting safe without `tune`? For each bundle and drafter, short prompts, the same at
temperature 1 with a seed each, and long ones are decoded plainly, with the bundle's trees (as
--no-profile), as a first load leaves them, and with --tune as `tune` does. "seconds" is what the
first load measured for.

transformers: every drafter, prompt_lookup and none against `generate` in float32, token by token. A
difference is listed with its position, both tokens, and the gap between their logits in
transformers after the common prefix: a near tie is rounding, a wide gap a fault. Exit code 1 where
there is any difference.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import tune
from spec_runtime.measure.audit import first_difference
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.pace import profile as profiles
from spec_runtime.proposers import BUILT_IN
from spec_runtime.sampling import SamplingOptions
from spec_runtime.trees.budget import Budget, Grown
from tools.docs.render import shown
from tools.docs.results import pivot
from tools.docs.rows import untuned_rows
from tools.figures import asked, command_line, manifest_of, parse, run, spread, write
from tools.measure import quality, turns
from tools.measure.turns import PLAIN, Case

LOOKUPS = ("prompt_lookup", "lookahead")
OWN, TUNED, ALL = "bundle", "tuned", "all"


def _load(args: argparse.Namespace, drafter: str | None, **options: Any) -> Engine:
    return spec_runtime.load(args.bundle, drafter, args.threads, **options)


def _encoded(engine: Engine, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    return [engine.encode(prompt.content) for prompt in prompts]


# ---- drafters


def drafters(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Decodes with each drafter, temperature and size; raises UserError for more nodes than the
    bundle takes."""
    plain = _load(args, "none", profile=False)
    names = args.drafter or [*(each.name for each in manifest_of(args.bundle).drafters), *LOOKUPS]
    opened = [plain.with_drafter(each, lookup=None if each in LOOKUPS else False) for each in names]
    if args.lookup:
        opened += [plain.with_drafter(name, lookup=True) for name in names if name not in LOOKUPS]
    most = plain.target.max_nodes
    if max(args.nodes) > most:
        raise UserError(f"got {max(args.nodes)} nodes, expected at most the bundle's {most}")
    rows = []
    for temperature in args.temperature:
        options: SamplingOptions = {"temperature": temperature}
        cases, known = {PLAIN: Case(plain, options)}, {}
        for engine in opened:
            for n in args.nodes:
                name = f"{engine.drafter}, {n} nodes"
                cases[name] = Case(engine.with_budget(Budget(n)) if n else engine, options)
                known[name] = {"drafter": engine.drafter, "temperature": temperature, "size": n}
        runs = turns.run(cases, _encoded(plain, prompts), args.max_new_tokens)
        theirs = turns.figures(runs, PLAIN)
        for name, about in known.items():
            found = turns.figures(runs, name)
            own = {"speedup": found["speedup"]["median"], "plain_verify_ms": theirs["verify_ms"]}
            own["tokens_per_second"] = found["tokens_per_second"]["median"]
            rows.append({**about, **found, **own, "identical": turns.identical(runs, name)})
    print(shown("decoded", rows))
    return {"rows": rows}


# ---- acceptance


def acceptance(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Decodes by each rule at each temperature."""
    engine = _load(args, args.drafter and args.drafter[0], profile=not args.no_profile)
    rules: dict[str, SamplingOptions] = {"target_sampling": {}}
    if args.rejection:
        rules["rejection"] = {"acceptance": "rejection"}
    for epsilon in args.epsilon:
        rules[f"typical {epsilon:g}"] = {"acceptance": "typical", "typical_epsilon": epsilon}
    rows, ids = [], _encoded(engine, prompts)
    for temperature in args.temperature:
        cases = {PLAIN: Case(engine.with_drafter("none"), {"temperature": temperature})}
        for name, options in rules.items():
            cases[name] = Case(engine, {**options, "temperature": temperature})
        runs = turns.run(cases, ids, args.max_new_tokens)
        for name in cases:
            found = turns.figures(runs, name)
            texts = [result.token_ids for result in runs[name][0]]
            pairs = zip(ids, texts, strict=True)
            nats = sum(quality.log_prob(engine.target, *pair) for pair in pairs)
            rows.append(
                {
                    "temperature": temperature,
                    "rule": name,
                    "accepted length": found["accepted_length"],
                    "tokens/s": found["tokens_per_second"]["median"],
                    "speedup": found["speedup"]["median"],
                    "log p a token": nats / sum(map(len, texts)),
                    "steps": found["steps"],
                    "tokens": found["tokens"],
                }
            )
    print(shown("acceptance", pivot(rows, "rule", "temperature")))
    return {"drafter": engine.drafter, "tuned": engine.is_tuned, "rows": rows}


# ---- budgets


def budgets(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Decodes with each budget. The tuned engine has a target of its own; the others share one."""
    own = _load(args, None, profile=False)
    engines = {PLAIN: own.with_drafter("none"), OWN: own, TUNED: _load(args, None, verify=False)}
    sizes = {f"{n} nodes": Budget(n) for n in args.nodes}
    most = max(args.nodes, default=16)
    sizes |= {f"p >= {p:g}": Budget(most, growth=Grown(p)) for p in args.threshold}
    for name, budget in sizes.items():
        engines[name] = own.observed(lambda proposer: proposer, budget)
    cases = {name: Case(engine) for name, engine in engines.items()}
    runs = turns.run(cases, _encoded(own, prompts), args.max_new_tokens, args.rounds)
    found = by_category(runs, [prompt.category for prompt in prompts])
    medians = {name: each["speedup"][ALL]["median"] for name, each in found.items()}
    best = max(sizes, key=medians.__getitem__)
    print(shown("budgets", [{"key": name, **each} for name, each in found.items()]))
    over = medians[TUNED] / medians[best]
    print(f"tuned / best of the sweep ({best}): {over:.3f}")
    return {"drafter": own.drafter, "contenders": found, "best": best, "tuned_over_best": over}


def by_category(runs: turns.Runs, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns each case's figures; `speedup` is by category, and of all prompts. Plain decoding's
    own rounds over their median show how far the machine is from itself."""
    groups = {ALL: list(range(len(categories)))}
    for i, category in enumerate(categories):
        groups.setdefault(category, []).append(i)
    found = {}
    for name in runs:
        figures = turns.figures(runs, name)
        figures["tokens_per_second"] = figures["tokens_per_second"]["median"]
        figures["speedup"] = {
            group: spread(turns.ratios(runs, name, PLAIN, members=members))
            for group, members in groups.items()
        }
        found[name] = figures
    for group, members in groups.items():
        own = spread(turns.speeds(runs, PLAIN, members=members))
        found[PLAIN]["speedup"][group] = {k: each / own["median"] for k, each in own.items()}
    return found


# ---- quantised


def quantised(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Returns a row of figures for each bundle."""
    reference = spec_runtime.load(args.reference, "none", args.threads)
    ids, rows, cases = _encoded(reference, prompts), [], dict[str, Case]()
    answers = turns.run({PLAIN: Case(reference)}, ids, args.max_new_tokens)[PLAIN][0]
    texts = [(each, answer.token_ids) for each, answer in zip(ids, answers, strict=True)]
    for number, folder in enumerate(args.bundle):
        quality.check_reference(manifest_of(folder), manifest_of(args.reference))
        engine = spec_runtime.load(folder, "none", args.threads)
        weights = sum(file.stat().st_size for file in (folder / "target").glob("*.bin"))
        rows.append({"bundle": folder.name, "bytes": weights} | fidelity(reference, engine, texts))
        cases[f"{number} plain"] = Case(engine)
        drafter = args.drafter[0] if args.drafter else LOOKUPS[0]
        cases[f"{number} drafted"] = Case(spec_runtime.load(folder, drafter, args.threads))
    reference.close()
    runs = turns.run(cases, ids, args.max_new_tokens, args.rounds)
    for number, row in enumerate(rows):
        for column, (kind, speed) in COLUMNS.items():
            own = turns.speeds(runs, f"{number} {kind}", speed)
            over = turns.ratios(runs, f"{number} {kind}", f"0 {kind}", speed)
            row[column] = {"median": spread(own)["median"], "over_first": spread(over)}
    print(shown("quantised", rows))
    return {"rows": rows}


# Of each column of speeds: whose they are, and what a speed is.
COLUMNS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "plain": ("plain", turns.speed),
    "drafted": ("drafted", turns.speed),
    "prompt": ("plain", lambda stats: stats.prompt_tokens / stats.prefill_seconds),
}


def fidelity(
    reference: Engine, engine: Engine, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[str, float]:
    """Returns how far the engine is from the reference along texts: prompts with their answers."""
    nats: dict[Engine, list[float]] = {reference: [], engine: []}
    divergences, num_same = [], 0
    for prompt, answer in texts:
        tokens, num_read = [*prompt[1:], *answer], len(prompt) - 1
        read = (quality.answer_rows(each.target, prompt[:1], tokens) for each in nats)
        for i, rows in enumerate(zip(*read, strict=True)):
            log_p, log_q = map(quality.log_softmax, rows)
            if i < num_read:
                nats[reference].append(-float(log_p[tokens[i]]))
                nats[engine].append(-float(log_q[tokens[i]]))
            else:
                divergences.append(float(np.exp(log_p) @ (log_p - log_q)))
                num_same += int(log_p.argmax() == log_q.argmax())
    perplexity, exact = (math.exp(float(np.mean(nats[each]))) for each in (engine, reference))
    return {
        "divergence": float(np.mean(divergences)),
        "same_choice": num_same / len(divergences),
        "perplexity": perplexity,
        "perplexity_over_fp32": perplexity / exact,
    }


# ---- untuned


def untuned(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Returns a row for each bundle, drafter and kind of prompt."""
    drafters = args.drafter or [LOOKUPS[0], "shipped"]
    pairs = [(folder, drafter) for folder in args.bundle for drafter in drafters]
    rows = [row for pair in pairs for row in _untuned(args, *pair)]
    print(shown("untuned", untuned_rows((f"{r['bundle']} {r['precision']}", r) for r in rows)))
    used = {prompt for row in rows for prompt in row.pop("ids")}
    return {"rows": rows, "asked": [p for p in read_prompts(args.prompts) if str(p.id) in used]}


def _untuned(args: argparse.Namespace, folder: Path, drafter: str) -> Iterator[dict[str, Any]]:
    """Yields what each kind of prompt gives with one drafter of one bundle."""
    from tools.measure.compare_rivals import contexts_of

    name = None if drafter == "shipped" else drafter

    def opened(**options: Any) -> Engine:
        return spec_runtime.load(folder, name, args.threads, **options)

    with _cache():
        plain = spec_runtime.load(folder, "none", args.threads)
        engines = {PLAIN: plain, "bundle's trees": opened(profile=False)}
        times = [time.perf_counter()]
        for _ in range(2):  # the second finds what the first measured
            engines["first use"] = opened()
            times.append(time.perf_counter())
        seconds = (times[1] - times[0]) - (times[2] - times[1])
        if args.tune:
            _tune(args, folder, engines["bundle's trees"])
            engines[TUNED] = opened()
        manifest = manifest_of(folder)
        for context in contexts_of(args, plain.tokenizer):
            prompts = [*context.prompts.values()]
            for temperature in (0.0, 1.0) if context.name == "short" else (0.0,):
                cases = {
                    name: Case(engine, {"temperature": temperature})
                    for name, engine in engines.items()
                }
                runs = turns.run(cases, prompts, args.max_new_tokens, args.rounds)
                found = {name: turns.figures(runs, name) for name in runs}
                kind = f"{context.name} at temperature 1" if temperature else context.name
                yield {
                    "bundle": manifest.name,
                    "precision": manifest.target.precision,
                    "drafter": engines["bundle's trees"].drafter,
                    "prompts": kind,
                    "seconds": seconds,
                    "plain_tokens_per_second": found.pop(PLAIN)["tokens_per_second"]["median"],
                    "engines": found,
                    "ids": [*context.prompts],
                }


def _tune(args: argparse.Namespace, folder: Path, engine: Engine) -> None:
    """Keeps what `tune` finds with its own prompts."""
    opened = bundles.read(folder, verify=False)
    entry = opened.manifest.entry(engine.drafter)
    key = profiles.key_of(opened, engine.drafter, args.threads)
    prompts = [engine.encode(prompt) for prompt in tune.PROMPTS]
    calibration = None if entry is None else entry.calibration
    profiles.write(tune.tune(engine, prompts, key, calibration))


@contextmanager
def _cache() -> Iterator[None]:
    """Gives the block a cache folder of its own, so that each bundle is opened for the first
    time."""
    before = os.environ.copy()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= before


# ---- transformers


def transformers(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Decodes with transformers and with each drafter; returns where they differ."""
    from spec_export.model import target

    engine = _load(args, "none")
    names = args.drafter or [*(each.name for each in manifest_of(args.bundle).drafters), *BUILT_IN]
    model, tokenizer = target.load(target.resolve(args.model))
    ids = _encoded(engine, prompts)
    for prompt, mine in zip(prompts, ids, strict=True):
        content = prompt.content
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
        theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        if mine != theirs:
            raise UserError(f"prompt {prompt.id}: the bundle encodes it otherwise")
    expected = [generated(model, each, args.max_new_tokens) for each in ids]
    cases = {name: Case(engine.with_drafter(name)) for name in names}
    runs, found = turns.run(cases, ids, args.max_new_tokens), {}
    for name in names:
        places = zip(prompts, ids, expected, runs[name][0], strict=True)
        parted = [each for place in places for each in _parted(model, tokenizer, *place)]
        found[name] = {"identical": len(prompts) - len(parted), "differences": parted}
        print(
            f"{name}: {found[name]['identical']} of {len(prompts)} identical", *parted, sep="\n  "
        )
    return {"tokens": sum(map(len, expected)), "drafters": found}


def generated(model: Any, ids: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Returns the new tokens of transformers' greedy `generate`."""
    import torch

    ids_BT = torch.tensor([ids], device=model.device)
    options |= {"attention_mask": torch.ones_like(ids_BT), "max_new_tokens": max_new_tokens}
    with torch.inference_mode():
        return model.generate(ids_BT, do_sample=False, **options)[0, len(ids) :].tolist()


def _parted(
    model: Any, tokenizer: Any, prompt: BenchPrompt, ids: list[int], expected: list[int], got: Any
) -> Iterator[dict[str, Any]]:
    """Yields where an answer parts from what is expected, if it does; `gap` is the logit of the
    expected token less that of the one got, None if either answer had ended."""
    import torch

    at = first_difference(expected, got.token_ids)
    if at is None:
        return
    pair = [each[at] if at < len(each) else None for each in (expected, got.token_ids)]
    gap = None
    if None not in pair:
        with torch.inference_mode():
            read = torch.tensor([[*ids, *expected[:at]]])
            logits_V = model(read, use_cache=False).logits[0, -1]
        gap = float(logits_V[pair[0]] - logits_V[pair[1]])
    texts = [None if id is None else tokenizer.decode([id]) for id in pair]
    tokens = [{"id": id, "text": text} for id, text in zip(pair, texts, strict=True)]
    where = {"prompt": prompt.id, "position": at}
    yield {**where, "expected": tokens[0], "got": tokens[1], "gap": gap}


# ---- the command

OF_BUNDLES, OF_ONE = (quantised, untuned), (drafters, acceptance, budgets, transformers)
STUDIES = {each.__name__: each for each in (*OF_ONE, *OF_BUNDLES)}
# Defaults of flags that differ from study to study.
DEFAULTS: dict[str, dict[str, Any]] = {
    "drafters": {"limit": 60, "max_new_tokens": 64, "nodes": [8], "temperature": [0.0]},
    "acceptance": {"limit": 60, "max_new_tokens": 128, "temperature": [1.0, 0.7]},
    "budgets": {"limit": 12, "max_new_tokens": 48, "nodes": [2, 4, 6, 8, 12, 16], "rounds": 5},
    "quantised": {"limit": 16, "max_new_tokens": 96},
    "untuned": {"limit": 8, "max_new_tokens": 96},
    "transformers": {"limit": 20, "max_new_tokens": 128},
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    flags = ("--prompts", "--limit", "--max-new-tokens", "--no-profile", "--threads", "--json")
    found = command_line(__doc__, *flags, limit=None, max_new_tokens=None)
    add = found.add_argument
    add("study", choices=STUDIES)
    add("--bundle", type=Path, nargs="+", help="default: the newest under ./bundles")
    add("--drafter", nargs="+", help="default: those of the study")
    add("--temperature", type=float, nargs="+")
    add("--nodes", type=int, nargs="+")
    add("--lookup", action="store_true", help="drafters: also with merged prompt lookup")
    add("--epsilon", type=float, nargs="+", default=(0.01, 0.03, 0.05, 0.09, 0.15, 0.25))
    add("--rejection", action="store_true", help="acceptance: by rejection, too")
    add("--threshold", type=float, nargs="*", default=(0.03, 0.1, 0.2, 0.3))
    add("--rounds", type=int, default=2, help="budgets, quantised, untuned: how often all decode")
    add("--long-limit", type=int, default=3, help="untuned: long prompts")
    add("--long-tokens", type=int, default=1500)
    add("--tune", action="store_true", help="untuned: and as `tune` does")
    add("--reference", type=Path, help="quantised: the model's fp32 bundle")
    add("--model", help="transformers: what the bundle was built from; default: the demo")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Runs the study that the command line names; returns 1 if transformers differs."""
    given = parser()
    study = given.parse_args(words).study
    given.set_defaults(**DEFAULTS[study])
    args = parse(given, words)
    if (study == "quantised") != bool(args.reference):
        given.error("got --reference or not, expected it for quantised, and for nothing else")
    prompts = read_prompts(args.prompts, args.limit)
    about: dict[str, Any] = asked(args)
    if STUDIES[study] in OF_ONE:
        args.bundle = args.bundle[0] if args.bundle else bundles.find()
        about["manifest"] = manifest_of(args.bundle)
    figures = {
        "threads": args.threads or default_threads(),
        "prompts": len(prompts),
        "rounds": args.rounds,
        "max_new_tokens": args.max_new_tokens,
        **STUDIES[study](args, prompts),
    }
    about["prompts"] = figures.pop("asked", prompts)
    if study == "transformers":
        about["packages"] = ("torch", "transformers")
        figures["prompts"] = [prompt.id for prompt in prompts]
    write(args.json, figures, **about)
    found = figures.get("drafters", {})
    return int(any(each["differences"] for each in found.values()))


if __name__ == "__main__":
    run(main)
