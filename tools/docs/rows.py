"""Makes the rows of the documentation's tables that no single list in the results holds.

Each function takes the argument that tables.toml gives it, and returns rows for its templates.
"""

import json
from collections.abc import Iterable

from tools.docs.results import ROOT, Row, load, pivot, rows_of, value

SUBSETS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
UNTUNED = {  # by results file
    "fp32": "demo fp32",
    "int8": "demo int8",
    "int4": "demo int4",
    "zen3-int8": "demo int8, Zen 3",
    "zen3-int4": "demo int4, Zen 3",
    "qwen-fp32": "0.5B fp32",
    "qwen-fp32-lookup": "0.5B fp32 again",
    "qwen-int8": "0.5B int8",
    "qwen-int4": "0.5B int4",
}
SHIPPED = ROOT / "spec_export/assets/drafters/smollm2-135m-instruct"


def subsets(file: str, path: str = "") -> list[Row]:
    return of_subsets(value(load(file), path, file))


def of_subsets(found: Row) -> list[Row]:
    """Returns the rows of all prompts and of each subset, from a bench's figures."""
    rows = [{"key": f"`{name}`", **each} for name, each in found["categories"].items()]
    return [{"key": "all prompts", **found["overall"]}, *rows]


def drafter(name: str) -> list[Row]:
    return subsets("drafters-fp32", f"drafters.{name}")


def readme(_: str) -> list[Row]:
    """Returns a row for each subset, with its figures at both precisions."""
    found = {name: load(f"bench-{name}")["categories"] for name in ("fp32", "int8")}
    return [{"key": key, "across": {at: found[at][key] for at in found}} for key in SUBSETS]


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


def temperatures(_: str) -> list[Row]:
    return pivot(rows_of("drafters-temperatures", "rows"), "drafter", "temperature")


def joint(study: str) -> list[Row]:
    rows = rows_of(f"joint-{study}", "stages")
    return [{**row, "state": "merged" if row["target_modified"] else "frozen"} for row in rows]


def sweep(precision: str) -> list[Row]:
    """Returns the budgets of a sweep, each with its slowest subset."""
    names = {"plain": "plain decoding", "bundle": "the bundle's trees", "tuned": "chosen by `tune`"}
    rows = []
    for row in rows_of(f"sweep-{precision}", "contenders"):
        medians = {each: row["speedup"][each]["median"] for each in SUBSETS}
        slowest = min(SUBSETS, key=medians.__getitem__)
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


def rivals(which: str) -> list[Row]:
    """Returns a row for each engine and mode, with its figures by context.

    `which` is a precision, for the demo, or another model's name in front of it: "qwen int8".
    """
    model, _, precision = which.rpartition(" ")
    file = f"rivals-{model}" if model else "rivals"
    return by_contender(load(file)["precisions"][precision])


def by_contender(contexts: Row) -> list[Row]:
    """Returns a row for each engine and mode of one precision."""
    rows: dict[str, Row] = {}
    for context, contenders in contexts.items():
        for name, each in contenders.items():
            row = rows.setdefault(name, {"key": name, "weights": each["weights"], "across": {}})
            row["across"][context] = each
    return list(rows.values())


def rivals_missing(_: str) -> list[Row]:
    return [*load("rivals").get("left_out", ()), *load("rivals")["failed"]]


def untuned(_: str) -> list[Row]:
    names = ((bundle, rows_of(f"untuned-{name}", "rows")) for name, bundle in UNTUNED.items())
    return untuned_rows((bundle, row) for bundle, rows in names for row in rows)


def untuned_rows(found: Iterable[tuple[str, Row]]) -> list[Row]:
    """Returns a row for each bundle and drafter, with its speed-ups by kind of prompt."""
    rows = [
        {**row, "what": f"{bundle}, {row['drafter'].replace('parallelspec+', 'drafter and ')}"}
        for bundle, row in found
    ]
    return pivot(rows, "what", "prompts")


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
        shares = {part: seconds / total for part, seconds in parts.items()}
        speed = row["tokens"] / row["wall_seconds"]
        cost = 1000 * row["cpu_seconds"] / row["tokens"]
        rows.append({**row, "shares": shares, "speed": speed, "cost": cost})
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
    names = {"fp32": "fp32", "fp32-strict": "fp32, `--strict`", "int8": "int8", "int4": "int4"}
    rows = [{"key": shown, **load(f"audit-{name}")} for name, shown in names.items()]
    return [{**row, "unjustified": len(row["unjustified"])} for row in rows]


def plans(_: str) -> list[Row]:
    data = load("tensorrt-plans")
    sizes = data["compute_capabilities"]
    return [
        {**row, "across": dict(zip(sizes, row["plan_mb"], strict=True))} for row in data["plans"]
    ]


def disturbances(_: str) -> list[Row]:
    """Returns a row for each command, with what became of it by kind of disturbance."""
    found: dict[str, Row] = {}
    for kind, scenarios in load("faults")["counts"].items():
        for name, each in scenarios.items():
            row = found.setdefault(name, {"key": name, "across": {}})
            row["across"][kind] = f"{each['recovered']} of {each['tried']}"
    return list(found.values())
