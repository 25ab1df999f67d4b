"""Draws the charts of the site from results/*.json, as SVG, when the site is built."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[2] / "recipes/smollm2-135m/results"
SUBSETS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
COLOURS = {"fp32": "#0072b2", "int8": "#d55e00", "int4": "#009e73"}
STYLE: Any = {  # matplotlib types every key by name
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777",
    "svg.fonttype": "none",
    "svg.hashsalt": "specsplit",
}


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")
    return file.getvalue()


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _errors(spreads: list[dict[str, float]]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Returns medians, and how far the least and the greatest are from them."""
    medians = [each["median"] for each in spreads]
    below = [each["median"] - each["least"] for each in spreads]
    above = [each["greatest"] - each["median"] for each in spreads]
    return medians, (below, above)


def speedup_by_category() -> str:
    """Bars: the tuned trees' speed-up on each subset, with the range over repeats."""
    figure, axes = _axes(8, 3.6)
    for offset, (precision, colour) in zip((-0.27, 0, 0.27), COLOURS.items(), strict=True):
        speedup = _load(f"sweep-{precision}")["contenders"]["tuned"]["speedup"]
        keys = ("all", *SUBSETS)
        places = [index + offset for index in range(len(keys))]
        medians, errors = _errors([speedup[key] for key in keys])
        axes.bar(places, medians, 0.25, color=colour, label=precision)
        axes.errorbar(places, medians, errors, fmt="none", ecolor="#222", capsize=2)
    axes.axhline(1, color="#222", linewidth=0.8)
    axes.set_xticks(range(len(SUBSETS) + 1), ["all", *SUBSETS], rotation=15)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(frameon=False, ncols=3, loc="upper left")
    return _svg(figure)


def speed_by_nodes() -> str:
    """Lines: speed-up against the nodes of a tree; the tuned choice is a star."""
    figure, axes = _axes(8, 3.8)
    for precision, colour in COLOURS.items():
        contenders = _load(f"sweep-{precision}")["contenders"]
        sizes = ["plain", "4 nodes", "8 nodes", "16 nodes"]
        points = [contenders[name] for name in sizes if name in contenders]
        nodes = [each["nodes"] for each in points]
        medians, errors = _errors([each["speedup"]["all"] for each in points])
        axes.errorbar(nodes, medians, errors, color=colour, marker="o", capsize=3, label=precision)
        tuned = contenders["tuned"]
        axes.plot(
            [tuned["nodes"]],
            [tuned["speedup"]["all"]["median"]],
            "*",
            color=colour,
            markersize=17,
            markeredgecolor="#222",
        )
    axes.plot([], [], "*", color="white", markeredgecolor="#222", markersize=13, label="tuned")
    axes.axhline(1, color="#222", linewidth=0.8)
    axes.set_xlabel("nodes of a tree, root included (mean of a step)")
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(frameon=False)
    return _svg(figure)


def typical_sweep() -> str:
    """Two panels: speed-up and the text's log-probability against typical acceptance's epsilon.

    Dashed lines are target sampling's, dotted ones plain decoding's.
    """
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    rows = _load("acceptance-int8")["rows"]
    for temperature, colour in ((0.7, "#0072b2"), (1.0, "#d55e00")):
        mine = [row for row in rows if row["temperature"] == temperature]
        typical = [row for row in mine if row["rule"].startswith("typical")]
        epsilons = [float(row["rule"].split()[1]) for row in typical]
        for axes, key in zip(panels, ("speedup", "log p a token"), strict=True):
            axes.plot(epsilons, [row[key] for row in typical], "o-", color=colour)
            for rule, line in (("target_sampling", "--"), ("plain", ":")):
                (row,) = (each for each in mine if each["rule"] == rule)
                axes.axhline(row[key], color=colour, linestyle=line, linewidth=1.2)
        panels[0].plot([], [], "o-", color=colour, label=f"typical, T = {temperature}")
    for line, label in (("--", "target sampling"), (":", "plain decoding")):
        panels[0].plot([], [], line, color="#444", label=label)
    panels[0].set_ylim(0.8, None)
    panels[0].set_ylabel("speed-up over plain decoding")
    panels[1].set_ylabel("log-probability of a token")
    for axes in panels:
        axes.set_xlabel("ε: higher is stricter")
    figure.legend(loc="outside upper center", frameon=False, ncols=4, fontsize=9)
    return _svg(figure)


def guesses_by_drafter() -> str:
    """Two panels: how often each drafter's k-th guess is right, and among its best five."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    trained = _load("drafters-training")
    names = [name for name in trained if name != "provenance"]
    for axes, (key, title) in zip(
        panels, (("top1", "best guess"), ("top5", "among the best five")), strict=True
    ):
        for index, name in enumerate(names):
            count = sum(each.startswith(f"{key}_") for each in trained[name])
            shares = [trained[name][f"{key}_{k}"] for k in range(count)]
            line = {"color": f"C{index}", "linestyle": "-" if index < 6 else "--"}
            label = name if key == "top1" else None
            axes.plot(range(1, count + 1), shares, "o", markersize=4, label=label, **line)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("position after the root")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("share of held-out answers")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _svg(figure)


def accepted_by_nodes() -> str:
    """Two panels over the nodes of a tree: accepted length by drafter, and the time to verify."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _load("drafters-nodes")["rows"]:
        found.setdefault(row["drafter"], []).append(row)
    for index, (name, rows) in enumerate(found.items()):
        line = {"color": f"C{index % 10}", "linestyle": "-" if index < 6 else "--", "marker": "o"}
        lengths = [row["accepted_length"] for row in rows]
        left.plot([row["size"] for row in rows], lengths, markersize=4, label=name, **line)
        nodes = [row["nodes"] for row in rows]
        right.plot(nodes, [row["verify_ms"] for row in rows], ".", color=f"C{index % 10}")
    left.set_xlabel("nodes allowed, root included")
    left.set_ylabel("accepted length")
    right.set_xlabel("nodes of a tree, mean of a step")
    right.set_ylabel("verify, ms")
    right.set_ylim(0, None)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _svg(figure)


def rivals() -> str:
    """Bars: every engine and mode, in tokens a second, with the range over rounds."""
    return rivals_of(_load("rivals"))


def rivals_of(figures: dict[str, Any]) -> str:
    """Draws what compare_rivals.py measured: a row a precision, a column a context."""
    precisions, contexts = figures["precisions"], list(figures["contexts"])
    heights = [max(map(len, found.values()), default=1) for found in precisions.values()]
    style: Any = {**STYLE, "font.size": 8}
    with rc_context(style):
        size = (4.6 * len(contexts), 0.2 * sum(heights) + 0.7 * len(heights))
        figure = Figure(figsize=size, layout="constrained")
        ratios = {"height_ratios": heights}
        panels = figure.subplots(
            len(precisions), len(contexts), squeeze=False, sharey="row", gridspec_kw=ratios
        )
        for row, (precision, found) in zip(panels, precisions.items(), strict=True):
            for axes, context in zip(row, contexts, strict=True):
                contenders = found.get(context, {})
                places = range(len(contenders), 0, -1)
                medians, errors = _errors(
                    [each["tokens_per_second"] for each in contenders.values()]
                )
                colours = [
                    COLOURS[precision] if each["ours"] else "#bbb" for each in contenders.values()
                ]
                axes.barh(places, medians, 0.7, color=colours)
                if contenders:
                    axes.errorbar(
                        medians, places, xerr=errors, fmt="none", ecolor="#222", capsize=2
                    )
                    axes.set_yticks(places, list(contenders))
                axes.set_title(f"{precision}, {context} prompts", fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("tokens a second of decoding")
        return _svg(figure)


CHARTS = {
    "guesses-by-drafter.svg": guesses_by_drafter,
    "accepted-by-nodes.svg": accepted_by_nodes,
    "speedup-by-category.svg": speedup_by_category,
    "speed-by-nodes.svg": speed_by_nodes,
    "typical-sweep.svg": typical_sweep,
    "rivals.svg": rivals,
}


def draw(name: str) -> str:
    """Returns the SVG of the chart called `name`."""
    with rc_context(STYLE):
        return CHARTS[name]()


def formula(lines: list[str]) -> str:
    """Returns an inline SVG of formulas in matplotlib's subset of TeX, one a line.

    The colour is the page's, so that a dark page shows them too.
    """
    with rc_context({"svg.fonttype": "path", "mathtext.fontset": "stix"}):
        figure = Figure(figsize=(8, 0.5 * len(lines)))
        for index, line in enumerate(lines):
            height = 1 - (index + 0.5) / len(lines)
            figure.text(0.01, height, f"${line}$", fontsize=14, va="center")
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            metadata={"Date": None},
            transparent=True,
            bbox_inches="tight",
            pad_inches=0.05,
        )
    text = file.getvalue()
    body = text[text.index("<svg") :].replace(
        "<svg ", '<svg class="formula" fill="currentColor" ', 1
    )
    return body.replace("\n", " ")
