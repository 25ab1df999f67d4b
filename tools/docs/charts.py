"""Draws the charts of the site from results/*.json, as SVG, when the site is built."""

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


CHARTS = {"speedup-by-category.svg": speedup_by_category}


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
