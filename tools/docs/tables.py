"""Says what each table of the documentation holds: its rows, and the template of each column."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.docs.results import ROOT, Row, load, pivot, rows_of, value

SUBSETS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SHIPPED = ROOT / "spec_export/assets/drafters/smollm2-135m-instruct"
LINK = ("drafter", "[`{key}`](../drafters/{key}.md)")

Columns = Sequence[tuple[str, str]]  # heads and templates, see results.py


@dataclass(frozen=True)
class Table:
    """A table of the documentation: `columns` may follow from the rows; `left` are texts.

    `rows` is a file and a path in it, or what returns them. "{}" in the file is the argument that
    the block gives, as a function takes it.
    """

    rows: tuple[str, str] | Callable[[str], list[Row]]
    columns: Columns | Callable[[list[Row]], Columns]
    left: int = 1

    def rows_for(self, argument: str) -> list[Row]:
        if callable(self.rows):
            return self.rows(argument)
        file, path = self.rows
        return rows_of(file.format(argument), path.format(argument))

    def columns_for(self, rows: list[Row]) -> Columns:
        return self.columns(rows) if callable(self.columns) else self.columns


def guesses(rows: list[Row], template: str) -> Columns:
    """Returns a column for each guess; "{k}" in the template is its number from 0."""
    count = max(len(row.get("top1_K", row.get("share_K"))) for row in rows)
    return [(f"guess {k + 1}", template.replace("{k}", str(k))) for k in range(count)]


def across(rows: list[Row], *columns: tuple[str, str]) -> Columns:
    """Returns the columns anew for each value that `pivot` found; "{}" in a head is the value, and
    templates begin at its row."""
    values = dict.fromkeys(each for row in rows for each in row["across"])
    return [
        (head.format(f"{float(each):g}") if "{}" in head else head, _below(each, template))
        for each in values
        for head, template in columns
    ]


def _below(each: str, template: str) -> str:
    return "{" + f'across."{each}".{template.removeprefix("{")}'


# ---- rows that are put together


def subsets(file: str, path: str = "", everything: str = "all prompts") -> list[Row]:
    """Returns the rows of all prompts and of each subset, from a bench's figures."""
    found = value(load(file), path, file)
    rows = [{"key": everything, **found["overall"]}]
    return rows + [{"key": f"`{name}`", **each} for name, each in found["categories"].items()]


def readme(_: str) -> list[Row]:
    """Returns a row for each subset, with its figures at both precisions."""
    found = {name: load(f"bench-{name}")["categories"] for name in ("fp32", "int8")}
    return [{"key": each} | {name: found[name][each] for name in found} for each in SUBSETS]


def drafters(_: str) -> list[Row]:
    """Returns the drafters as decoded, each with what its training says."""
    trained = load("drafters-training")
    rows = rows_of("drafters-fp32", "drafters")
    return [{**row, "trained": trained.get(row["key"], {})} for row in rows]


def accuracy(name: str) -> list[Row]:
    """Returns how often a drafter's best guess, and one of its best five, is right."""
    found = value(load("drafters-training"), name, "drafters-training")
    count = sum(key.startswith("top1_") for key in found)
    return [
        {"key": label, "share_K": [found[f"{key}_{k}"] for k in range(count)]}
        for label, key in (("best guess", "top1"), ("among five", "top5"))
    ]


def acceptance(_: str) -> list[Row]:
    rows = pivot(rows_of("acceptance-int8", "rows"), "rule", "temperature")
    for row in rows:
        name = row["key"].replace("plain", "plain decoding").replace("_", " ")
        row["key"] = name.replace("typical ", "typical, ε ")
    return rows


def sweep(precision: str) -> list[Row]:
    """Returns the budgets of a sweep, each with its slowest subset."""
    names = {
        "plain": "plain decoding",
        "bundle": "the bundle's trees",
        "tuned": "chosen by `tune`",
    }
    rows = []
    for row in rows_of(f"sweep-{precision}", "contenders"):
        slowest = min(SUBSETS, key=lambda each, row=row: row["speedup"][each]["median"])
        name = names.get(row["key"], row["key"].replace(">=", "≥"))
        rows.append({**row, "key": name, "slowest": slowest, "least": row["speedup"][slowest]})
    return rows


def by_nodes(_: str) -> list[Row]:
    """Returns the accepted lengths by drafter and size, and last what verifying a tree takes.

    That is the mean over the drafters whose trees have nearly the size allowed: lookups draft what
    they find.
    """
    measured = [
        {**row, "shown": f"{row['accepted_length']:.2f}"}
        for row in rows_of("drafters-nodes", "rows")
    ]
    rows = pivot(measured, "drafter", "size")
    for row in rows:
        row["key"] = f"[`{row['key']}`](../drafters/{row['key']}.md)"
    verify: dict[str, Row] = {}
    for size in dict.fromkeys(row["size"] for row in measured):
        ms = [row["verify_ms"] for row in measured if size == row["size"] < row["nodes"] / 0.8]
        verify[str(size)] = {"shown": f"{sum(ms) / len(ms):.1f}" if ms else ""}
    return [*rows, {"key": "*verify, ms*", "across": verify}]


def rivals(precision: str) -> list[Row]:
    """Returns a row for each engine and mode, with its figures by context."""
    rows: dict[str, Row] = {}
    for context, contenders in load("rivals")["precisions"][precision].items():
        for name, each in contenders.items():
            row = rows.setdefault(name, {"key": name, "weights": each["weights"], "across": {}})
            row["across"][context] = each
    return list(rows.values())


def rivals_columns(rows: list[Row]) -> Columns:
    columns = [("engine, mode", "{key}"), ("weights", "{weights}")]
    for context in dict.fromkeys(each for row in rows for each in row["across"]):
        at = f"across.{context}"
        columns += [
            (f"{context}: tokens/s", f"{{{at}.tokens_per_second?:range.1f}}"),
            ("prefill ms", f"{{{at}.prefill_ms.median?:.0f}}"),
            ("peak MB", f"{{{at}.peak_rss?:MB}}"),
            ("as its plain", f"{{{at}.same_engine?:same}}"),
            ("as same weights", f"{{{at}.same_weights?:same}}"),
            ("fp32's choice", f"{{{at}.fp32_choices?:.1%}}"),
        ]
    return columns


def rivals_missing(_: str) -> list[Row]:
    return [*load("rivals")["left_out"], *load("rivals")["failed"]]


def quality(_: str) -> list[Row]:
    rows = pivot(load("check")["rows"], "precision", "name")
    for row in rows:
        passed = all(each["passed"] for each in row["across"].values())
        row["verdict"] = "ok" if passed else "FAILED"
    return rows


def training_data(kind: str) -> list[Row]:
    """Returns the sums by kind of prompt, or by licence, the most answer tokens first."""
    found: dict[str, Row] = {}
    for name, each in load("training-data")["source" if kind == "prompts" else "licence"].items():
        sums = found.setdefault(name.partition("/")[0] if kind == "prompts" else name, {})
        for key, count in each.items():
            sums[key] = sums.get(key, 0) + count
    rows = [{"key": name, **each} for name, each in found.items()]
    return sorted(rows, key=lambda row: -row["answer_tokens"])


def training_overlap(_: str) -> list[Row]:
    files = load("training-overlap")["files"]
    return [
        {"key": name}
        | {
            key: sum(each[key] for each in sources.values())
            for key in ("rows", "prompts", "answers")
        }
        for name, sources in files.items()
    ]


def training_steps(_: str) -> list[Row]:
    rows = []
    for row in load("training-steps")["rows"]:
        parts, total = row["part_seconds"], sum(row["part_seconds"].values())
        shares = {f"{part} share": seconds / total for part, seconds in parts.items()}
        speed = row["tokens"] / row["wall_seconds"]
        cost = 1000 * row["cpu_seconds"] / row["tokens"]
        rows.append({**row, **shares, "speed": speed, "cost": cost})
    return rows


def shipped_drafters(_: str) -> list[Row]:
    """Returns what each drafter of the package says of its training."""
    rows = []
    for folder in sorted(SHIPPED.iterdir()):
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))["provenance"]
        hours = about.get("cpu_hours")
        shown = "not recorded" if hours is None else f"{hours['features']} + {hours['steps']}"
        rows.append({"key": folder.name, **about, "hours": shown, "day": about["date"][:10]})
    return rows


def audit(_: str) -> list[Row]:
    names = {
        "fp32": "fp32",
        "fp32-strict": "fp32, `--strict`",
        "int8": "int8",
        "int4": "int4",
    }
    rows = [{"key": shown, **load(f"audit-{name}")} for name, shown in names.items()]
    return [{**row, "unjustified": len(row["unjustified"])} for row in rows]


def plans(_: str) -> list[Row]:
    return load("tensorrt-plans")["plans"]


def plans_columns(_: list[Row]) -> Columns:
    capabilities = load("tensorrt-plans")["compute_capabilities"]
    sizes = [(f"plan MB, {each}", f"{{plan_mb.{i}:.1f}}") for i, each in enumerate(capabilities)]
    return [("graph", "`{graph}`"), *sizes, ("seconds to build", "{seconds:.1f}")]


def large_plans(_: str) -> list[Row]:
    """Returns plans of a few layers of large targets, and all layers as extrapolated."""
    rows = []
    for name, figures in load("tensorrt-large")["models"].items():
        whole = figures["all_layers"] | {"layers": "32, *extrapolated*"}
        rows += [{"key": name, **each} for each in (*figures["built"], whole)]
    return rows


def disturbances(_: str) -> list[Row]:
    """Returns a row for each command, with what became of it by kind of disturbance."""
    found: dict[str, Row] = {}
    for kind, scenarios in load("faults")["counts"].items():
        for name, each in scenarios.items():
            shown = f"{each['recovered']} of {each['tried']}"
            found.setdefault(name, {"key": name})[kind] = shown
    return list(found.values())


def tests_by_kind(_: str) -> list[Row]:
    counted = load("tests")
    return [*rows_of("tests", "kinds"), {"key": "all", "value": counted["tests"]}]


# What was aimed for: words, bound, file, and path of the figure; a path with "*" stands for the
# smallest figure of all that have one there. Figures are to be at least the bound, those of steps
# at most.
ALONE = "drafters.parallelspec.overall.accepted_length"
SAMPLED = 'rows."temperature=1.0,rule=target_sampling".'
BEST = 'best."precision={},context={},kind=best mode".ratio'
PASS = 'passes.{}."context={},nodes={}".{}'
AIMS: tuple[tuple[str, float, str, str], ...] = (
    ("accepted length at fp32", 3.0, "bench-fp32", "overall.accepted_length"),
    ("accepted length at int8", 3.0, "bench-int8", "overall.accepted_length"),
    ("the drafter by itself: accepted length at fp32", 2.6, "lookup-fp32", ALONE),
    ("the drafter by itself: accepted length at int8", 2.6, "lookup-int8", ALONE),
    ("speed-up at fp32", 1.9, "bench-fp32", "overall.speedup"),
    ("speed-up at int8", 1.75, "bench-int8", "overall.speedup"),
    ("speed-up of the slowest subset at fp32", 1.3, "bench-fp32", "categories.*.speedup"),
    ("speed-up of the slowest subset at int8", 1.3, "bench-int8", "categories.*.speedup"),
    (
        "accepted length at temperature 1, int8",
        1.6,
        "acceptance-int8",
        f"{SAMPLED}accepted length",
    ),
    ("speed-up at temperature 1, int8", 1.0, "acceptance-int8", f"{SAMPLED}speedup"),
    *(
        (
            f"our best mode over the best other engine's: {precision}, {shape} prompts",
            bound,
            "rivals",
            BEST.format(precision, shape),
        )
        for precision, bound in (("fp32", 1.6), ("int8", 2.0), ("int4", 1.1))
        for shape in ("short", "long")
    ),
    *(
        (
            f"a pass over {nodes} nodes by one over a node: {precision}, {context} tokens before",
            bound,
            "steps",
            PASS.format(precision, context, nodes, "over_one_node"),
        )
        for precision, context, nodes, bound in (
            ("fp32", 200, 8, 1.25),
            ("int8", 200, 8, 1.25),
            ("int8", 200, 16, 1.5),
            ("int8", 1500, 8, 1.35),
        )
    ),
    (
        "a pass over a node, 1500 tokens before by 200: int8",
        1.35,
        "steps",
        PASS.format("int8", 1500, 1, "over_first"),
    ),
)


def aims(_: str) -> list[Row]:
    """Returns what was aimed for beside what was measured."""
    rows = []
    for words, bound, file, path in AIMS:
        above, star, below = path.partition(".*.")
        if star:
            got = min(value(each, below, file) for each in rows_of(file, above))
        else:
            got = value(load(file), path, file)
        is_most = file == "steps"
        is_met = got <= bound if is_most else got >= bound
        aim = f"at {'most' if is_most else 'least'} {bound:g}"
        rows.append({"key": words, "aim": aim, "got": got, "met": "yes" if is_met else "no"})
    return rows


# ---- the tables

LENGTH, SPEEDUP = ("accepted length", "{accepted_length:.2f}"), ("speed-up", "{speedup:.2f}")
DRAFT = ("draft ms", "{draft_ms:.1f}")
VERIFY = ("verify ms", "{verify_ms:.1f}")
NODES = ("drafted nodes", "{nodes_per_step:.1f}")
SPEEDS = (
    ("plain tokens/s", "{plain_tokens_per_second:.1f}"),
    ("tokens/s", "{tokens_per_second:.1f}"),
)
PARAMETERS = ("parameters", "{parameters?:M}")
IDENTICAL = ("identical", "{identical:.0%}")
COUNTS = (
    ("rows", "{rows:,}"),
    ("prompt tokens", "{prompt_tokens:,}"),
    ("answer tokens", "{answer_tokens:,}"),
)

TABLES: dict[str, Table] = {
    "readme": Table(
        readme,
        [
            ("Spec-Bench subset", "`{key}`"),
            *(
                (head.format(at), template.replace("{", f"{{{at}."))
                for at in ("fp32", "int8")
                for head, template in (
                    ("{}: tokens/s", "{plain_tokens_per_second:.0f} → {tokens_per_second:.0f}"),
                    SPEEDUP,
                    LENGTH,
                )
            ),
        ],
    ),
    "bench": Table(
        lambda precision: subsets(f"bench-{precision}"),
        [
            ("prompts", "{key}"),
            *SPEEDS,
            ("speed-up, decoding", "{speedup:.2f}"),
            ("speed-up, end to end", "{speedup_end_to_end:.2f}"),
            LENGTH,
            NODES,
            ("plain pass ms", "{plain_verify_ms:.1f}"),
            VERIFY,
            DRAFT,
            IDENTICAL,
        ],
    ),
    "compare": Table(
        ("{}", "drafters"),
        [
            ("drafter", "`{key}`"),
            ("drafted nodes", "{overall.nodes_per_step:.1f}"),
            ("accepted length", "{overall.accepted_length:.2f}"),
            ("tokens/s", "{overall.tokens_per_second:.1f}"),
            ("speed-up, decoding", "{overall.speedup:.2f}"),
            ("end to end", "{overall.speedup_end_to_end:.2f}"),
            ("draft ms", "{overall.draft_ms:.1f}"),
            ("verify ms", "{overall.verify_ms:.1f}"),
        ],
    ),
    "spec_bench": Table(
        lambda precision: subsets(f"spec-bench-{precision}", everything="all questions"),
        [
            ("subset", "{key}"),
            ("questions", "{prompts}"),
            *SPEEDS,
            SPEEDUP,
            ("end to end", "{speedup_end_to_end:.2f}"),
            ("Spec-Bench's", "{speedup_of_means:.2f}"),
            LENGTH,
            ("identical", "{identical:.1%}"),
        ],
    ),
    "aims": Table(
        aims, [("", "{key}"), ("aim", "{aim}"), ("measured", "{got:.2f}"), ("met", "{met}")]
    ),
    "drafters": Table(
        drafters,
        [
            LINK,
            PARAMETERS,
            ("held out", "{trained.accepted_length?:.2f}"),
            ("accepted length", "{overall.accepted_length:.2f}"),
            ("drafted nodes", "{overall.nodes_per_step:.1f}"),
            ("draft ms", "{overall.draft_ms:.1f}"),
            ("verify ms", "{overall.verify_ms:.1f}"),
            ("speed-up", "{overall.speedup:.2f}"),
            ("identical", "{overall.identical:.0%}"),
        ],
    ),
    "drafter": Table(
        lambda name: subsets("drafters-fp32", f"drafters.{name}"),
        [("prompts", "{key}"), LENGTH, NODES, DRAFT, VERIFY, SPEEDUP],
    ),
    "accuracy": Table(
        accuracy,
        lambda rows: [("on held-out answers", "{key}"), *guesses(rows, "{share_K.{k}:.2f}")],
    ),
    "alike": Table(
        ("drafters-alike", ""),
        lambda rows: [
            LINK,
            PARAMETERS,
            ("steps", "{steps:,}"),
            ("token rows", "{token_rows:M}"),
            LENGTH,
            *guesses(rows, "{top1_K.{k}?:.2f}"),
        ],
    ),
    "temperatures": Table(
        lambda _: pivot(rows_of("drafters-temperatures", "rows"), "drafter", "temperature"),
        lambda rows: [
            LINK,
            *across(
                rows,
                ("T = {}: accepted length", "{accepted_length?:.2f}"),
                ("speed-up", "{speedup?:.2f}"),
            ),
        ],
    ),
    "nodes": Table(
        by_nodes, lambda rows: [("drafter", "{key}"), *across(rows, ("{} nodes", "{shown?}"))]
    ),
    "shipped_drafters": Table(
        shipped_drafters,
        [
            LINK,
            ("steps", "{steps:,}"),
            ("answer tokens", "{data.answer_tokens:M}"),
            ("simulated accepted length", "{validation.accepted_length:.2f}"),
            ("CPU hours: features + steps", "{hours}"),
            ("date", "{day}"),
        ],
    ),
    "acceptance": Table(
        acceptance,
        lambda rows: [
            ("acceptance", "{key}"),
            *across(
                rows,
                ("T = {}: accepted length", "{accepted length?:.2f}"),
                ("speed-up", "{speedup?:.2f}"),
                ("log p", "{log p a token?:.2f}"),
            ),
        ],
    ),
    "audit": Table(
        audit,
        [
            ("bundle", "{key}"),
            ("tokens", "{tokens:,}"),
            ("divergences in 1,000", "{divergences_per_1000_tokens:.0f}"),
            ("near ties", "{counts.near tie}"),
            ("rounding", "{counts.rounding}"),
            ("real", "{counts.real}"),
            ("not their row's", "{unjustified}"),
            ("largest deviation of a logit", "{delta_logit.tree_rows.maximum:.2g}"),
            ("limit of a gap", "{rounding_limit:.2g}"),
            ("limit of a row", "{row_limit:.2g}"),
        ],
    ),
    "sweep": Table(
        sweep,
        [
            ("trees", "{key}"),
            ("nodes", "{nodes:.1f}"),
            LENGTH,
            ("speed-up: median (range)", "{speedup.all:range}"),
            ("slowest subset", "{least:range}, `{slowest}`"),
        ],
    ),
    "threads": Table(
        ("threads-{}", "rows"),
        [
            ("threads", "{threads}"),
            ("busy processes beside", "{neighbours}"),
            ("setting", "{setting}"),
            ("plain tokens/s", "{plain:range.0f}"),
            ("with the drafter", "{drafter:range.0f}"),
        ],
    ),
    "ablation": Table(
        ("ablation-{}", "variants"),
        lambda rows: [
            ("variant", "{variant}"),
            *guesses(rows, "{top1_K.{k}?:.3f}"),
            ("accepted length", "{accepted_length:.3f}"),
            PARAMETERS,
        ],
    ),
    "ablation_lengths": Table(
        ("ablation-{}", "variants"),
        lambda rows: [
            ("variant", "{variant}"),
            *(
                (name, f'{{lengths."{name}"?:.3f}}')
                for name in dict.fromkeys(name for row in rows for name in row["lengths"])
            ),
        ],
    ),
    "options": Table(
        ("ablation-parallelspec-options", "variants"),
        lambda rows: [
            ("variant", "{variant}"),
            *guesses(rows, "{top1_K.{k}:.2f} / {top5_K.{k}:.2f}"),
            ("calibration error by guess", "{ece_K?:each%}"),
            ("simulated, 16 nodes", "{accepted_length:.2f}"),
            ("decoding, 8 nodes", "{decoding.8 nodes.accepted_length?:.2f}"),
            ("decoding, 16 nodes", "{decoding.16 nodes.accepted_length?:.2f}"),
            PARAMETERS,
            ("training tokens/s", "{tokens_per_second?:,.0f}"),
            ("hours", "{hours?:.1f}"),
        ],
    ),
    "masks": Table(
        ("mask-speed", "rows"),
        [
            ("masks", "{masks}"),
            ("trees of", "{size}"),
            LENGTH,
            ("nodes", "{nodes:.2f}"),
            ("draft ms", "{draft_ms:.2f}"),
            ("verify ms", "{verify_ms:.2f}"),
            SPEEDUP,
        ],
    ),
    "rivals_best": Table(
        ("rivals", "best"),
        [
            ("", "{precision}, {context} prompts"),
            ("compared", "{kind}"),
            ("ours", "{ours}"),
            ("the best rival", "{rival}"),
            ("ratio", "{ratio:.2f} ({least:.2f} to {greatest:.2f})"),
        ],
        left=4,
    ),
    "rivals": Table(rivals, rivals_columns, left=2),
    "rivals_versions": Table(
        ("rivals", "versions"), [("engine", "{key}"), ("version", "{value}")], left=2
    ),
    "rivals_missing": Table(
        rivals_missing,
        [("not measured", "{engine}"), ("what of it", "{what}"), ("why", "{reason}")],
        left=3,
    ),
    "quality": Table(
        quality,
        [
            ("precision", "`{key}`"),
            ("perplexity ratio", "{across.perplexity ratio.value:.4f}"),
            ("bound", "{across.perplexity ratio.bound:g}"),
            ("other best token", "{across.other argmax.value:.1%}"),
            ("divergence", "{across.divergence.value:.2g}"),
            ("verdict", "{verdict}"),
        ],
    ),
    "steps": Table(
        ("steps", "passes.{}"),
        [
            ("context", "{context}"),
            ("nodes", "{nodes}"),
            ("ms: median (range)", "{ms:range}"),
            ("of one node", "{over_one_node:.2f}"),
            ("of the first row", "{over_first:.2f}"),
        ],
    ),
    "operators": Table(
        ("steps", "operators.{}"),
        [
            ("context", "{context}"),
            ("nodes", "{nodes}"),
            ("ms by operator, under the profiler", "{ms:each}"),
        ],
        left=3,
    ),
    "memory": Table(
        ("memory-fp32", "drafters"),
        [
            ("drafter", "`{drafter}`"),
            ("after import MB", "{import_bytes:MB}"),
            ("peak MB", "{peak_bytes:MB}"),
            ("files MB", "{file_bytes:MB}"),
            ("of them read MB", "{read_bytes:MB}"),
            ("key/value rows MB", "{cache_bytes:MB}"),
            ("peak over read", "{peak_over_read:.2f}"),
        ],
    ),
    "training_data": Table(training_data, [("prompts", "{key}"), *COUNTS]),
    "training_overlap": Table(
        training_overlap,
        [
            ("answers", "`{key}`"),
            ("rows", "{rows:,}"),
            ("overlap in the prompt", "{prompts:,}"),
            ("in the answer", "{answers:,}"),
        ],
    ),
    "training_steps": Table(
        training_steps,
        lambda rows: [
            ("step", "{variant}"),
            ("answer tokens/s", "{speed:,.0f}"),
            ("CPU seconds a 1,000", "{cost:.2f}"),
            *((part, f"{{{part} share:.0%}}") for part in rows[0]["part_seconds"]),
        ],
    ),
    "joint": Table(
        lambda study: [
            {**row, "state": "merged" if row["target_modified"] else "frozen"}
            for row in rows_of(f"joint-{study}", "stages")
        ],
        [
            ("stage", "{key}"),
            ("target", "{state}"),
            ("steps", "{steps:,}"),
            ("perplexity: prose", "{prose.perplexity:.2f}"),
            ("held-out answers", "{held_out.perplexity:.2f}"),
            ("accepted length", "{drafting.overall.accepted_length:.2f}"),
            ("speed-up", "{drafting.overall.speedup:.2f}"),
        ],
        left=2,
    ),
    "plans": Table(plans, plans_columns),
    "large_plans": Table(
        large_plans,
        [
            ("target", "{key}"),
            ("layers", "{layers}"),
            ("weights GB", "{weights_mb:GB}"),
            ("plan GB", "{plan_mb:GB}"),
            ("peak memory GB", "{peak_mb:GB}"),
            ("CPU seconds", "{cpu_seconds:.0f}"),
        ],
    ),
    "fuzz_kinds": Table(
        ("fuzz", "kinds"),
        [
            ("kind", "{key}"),
            ("cases", "{cases:,}"),
            ("accepted", "{accepted:,}"),
            ("refused", "{refused:,}"),
            ("failures", "{failed:,}"),
        ],
    ),
    "disturbances": Table(
        disturbances,
        [
            ("command", "`{key}`"),
            *((kind, f"{{{kind}?}}") for kind in ("kill", "full disk", "read-only", "two at once")),
        ],
    ),
    "soak_requests": Table(("soak", "by_kind"), [("request", "{key}"), ("times", "{value:,}")]),
    "tests_by_kind": Table(tests_by_kind, [("kind", "{key}"), ("tests", "{value:,}")]),
}
