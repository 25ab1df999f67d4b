"""Promises about README and docs: figures are those of the JSON files, links and lists are true."""

import ast
import json
import pkgutil
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest

import spec_runtime
from spec_runtime.measure import bench
from spec_runtime.proposers import PROPOSERS
from tools.docs import diagrams, reference, render, results

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LAB_NOTES = ROOT / "docs/results/tried.md"  # written by hand
# where a number in a table is a measured one
RESULT_PAGES = {
    README,
    *(ROOT / "docs/results").glob("*.md"),
    *(ROOT / "docs/drafters").glob("*.md"),
} - {LAB_NOTES}
MEASURED = re.compile(r"\d+\.\d+|\d+ ?%|\d,\d{3}")


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


# ---- figures


def typed_numbers(text: str) -> list[str]:
    """Returns the rows of tables that hold a measured number outside of all figures blocks."""
    rest = render.BLOCK.sub("", text)
    return [line for line in rest.splitlines() if line.startswith("|") and MEASURED.search(line)]


def test_the_readmes_figures_are_what_their_json_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert render.rendered(text) == text, "run python -m tools.docs.render"
    on_own_line = re.findall(r"^<!-- /?figures.*-->$", text, re.MULTILINE)
    assert text.count("<!-- figures: ") == text.count("<!-- /figures -->") == len(on_own_line) / 2
    assert typed_numbers(text) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_site_fills_in_every_table_of_a_page(page: Path) -> None:
    """Markers stand on lines of their own, and results hold no number typed by hand."""
    text = page.read_text(encoding="utf-8")
    markers = len(render.MARKER.findall(text))
    assert markers == text.count("figures: ")
    assert "<!-- /figures -->" not in text
    filled = render.filled(text)
    assert filled.count("\n| --- |") >= len(re.findall(r"figures: (?!source)", text))
    assert filled.count("\nMeasured: `") >= text.count("figures: source ")
    if page in RESULT_PAGES:
        assert typed_numbers(text) == []


def test_stale_and_typed_figures_are_found() -> None:
    block = "<!-- figures: readme -->\n\n| `qa` | 1.57 |\n\n<!-- /figures -->"
    assert typed_numbers(f"{block}\n| `qa` | 1.57 |") == ["| `qa` | 1.57 |"]
    assert render.rendered(block) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bench fp64", "got results file 'bench-fp64', expected one of .*bench-fp32"),
        ("headlines", "got figures block 'headlines', expected .* readme"),
    ],
)
def test_a_block_that_cannot_be_rendered_says_why(name: str, message: str) -> None:
    with pytest.raises(results.FigureError, match=message):
        render.render(name)


def test_a_quoted_key_may_hold_a_blank() -> None:
    data = {"contenders": {"4 nodes": {"rows": [{"nodes": 3.9}]}}}
    assert results.value(data, 'contenders."4 nodes".rows.0.nodes', "sweep") == 3.9
    rows = [{"t": t, "rule": rule, "n": f"{rule} {t}"} for t in (0.7, 1.0) for rule in ("a", "b")]
    assert results.value({"rows": rows}, 'rows."t=0.7,rule=b".n', "sweep") == "b 0.7"
    with pytest.raises(results.FigureError, match="there is list"):
        results.value({"rows": rows}, 'rows."rule=b".n', "sweep")


def test_a_cell_is_filled_in_from_its_row() -> None:
    spread = {"median": 1.5, "least": 1.25, "greatest": 2.0}
    row = {"n": 0.125, "size": 4.9e6, "ms": {"4 nodes": spread}, "names": ["a", "b"], "no": None}
    for template, expected in (
        ("`{names.1}` {n:.1%}", "`b` 12.5%"),
        ("{size:M}, {size:MB}", "4.9 M, 5"),
        ('{ms."4 nodes":range}', "1.50 (1.25 to 2.00)"),
        ("{names.2?:.2f}{no:.2f}", ""),
    ):
        assert results.cell(template, row) == expected
    with pytest.raises(results.FigureError, match="there is n, size, ms, names, no"):
        results.cell("{nothing:.2f}", row)


def test_rows_are_turned_into_columns() -> None:
    rows = [{"d": d, "t": t, "n": d + str(t)} for d in "ab" for t in (0.0, 0.7)]
    found = results.pivot(rows, "d", "t")
    assert [row["key"] for row in found] == ["a", "b"]
    assert results.cell('{across."0.7".n}', found[1]) == "b0.7"
    columns = render.columns_for('d := {key} | t = {each} := {across."{each}".n}', found)
    assert [head for head, _ in columns] == ["d", "t = 0.0", "t = 0.7"]
    assert results.cell(columns[2][1], found[0]) == "a0.7"
    guesses = [{"top1_K": [0.5]}, {"top1_K": [0.5, 0.25]}]
    columns = render.columns_for("guess {k} := {top1_K.{k}?:.2f}", guesses)
    assert columns == [("guess 1", "{top1_K.0?:.2f}"), ("guess 2", "{top1_K.1?:.2f}")]


def test_what_bench_writes_today_can_be_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = bench.summary([])
    one = {"precision": "int8", "overall": summary, "categories": {"qa": summary}}
    several = {"precision": "fp32", "drafters": {"medusa+prompt_lookup": {"overall": summary}}}
    for name, data in (("bench-int8", one), ("lookup-fp32", several)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.load.cache_clear()
    try:
        assert "speed-up, end to end" in render.render("bench int8")
        assert "| `qa` | 0.0 | 0.0 | 0.00 | 0.00 |" in render.render("bench int8")
        assert "| `medusa+prompt_lookup` |" in render.render("compare lookup-fp32")
    finally:
        results.load.cache_clear()


def test_every_chart_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    from tools.docs import charts

    for name in charts.CHARTS:
        assert ElementTree.fromstring(charts.draw(name)).tag.endswith("svg"), name


# ---- claims in sentences

MERGED = 'drafters."parallelspec+prompt_lookup".overall.speedup'
DRAWN = 'rows."temperature={},rule=target_sampling".speedup'
SWEPT = 'contenders."{}".speedup.all.median'
SUMMARIES = "categories.summarization.speedup"
# by page and results file: (words that stand there, path of their figure, least, greatest)
CLAIMS: dict[str, dict[str, list[tuple[str, str, float, float]]]] = {
    "README.md": {
        "bench-fp32": [
            ("every answer equals plain decoding's", "overall.identical", 1, 1),
            ("Over all prompts decoding is 2.1 times as fast", "overall.speedup", 2.05, 2.15),
            ("1.8 times with the prompt's own pass", "overall.speedup_end_to_end", 1.75, 1.85),
            ("summaries, with the longest prompts, are written 1.6 times", SUMMARIES, 1.6, 1.7),
            ("translations are written more than twice", "categories.translation.speedup", 2, 3),
        ],
        "lookup-fp32": [
            ("decoded about 1.6 times", "drafters.parallelspec.overall.speedup", 1.55, 1.65),
            ("lookup by itself 1.5 times", "drafters.prompt_lookup.overall.speedup", 1.45, 1.55),
            ("both merged about twice as fast", MERGED, 1.9, 2.1),
        ],
        "spec-bench-fp32": [("is about twice as fast at fp32", "overall.speedup", 1.9, 2.1)],
        "spec-bench-int8": [("1.6 times at int8", "overall.speedup", 1.55, 1.65)],
        "spec-bench-int4": [("and 1.4 times at int4", "overall.speedup", 1.35, 1.45)],
        "acceptance-int8": [
            ("at temperature 1 decoding is about 5 % faster", DRAWN.format("1.0"), 1.03, 1.07),
            ("at 0.7 about 20 %", DRAWN.format("0.7"), 1.17, 1.23),
        ],
        "sweep-int4": [
            ("Trees of 8 nodes gain a tenth", SWEPT.format("8 nodes"), 1.06, 1.14),
            ("trees of 16 nodes are a seventh slower", SWEPT.format("16 nodes"), 0.83, 0.88),
            ("of 3 nodes, are a fifth faster", SWEPT.format("tuned"), 1.17, 1.23),
            ("chose, of 3 nodes", "contenders.tuned.nodes", 2.5, 3.5),
        ],
    },
    "docs/reliability.md": {
        "fuzz": [
            ("100,000 cases, one failure", "cases", 99_990, 100_010),
            ("one failure in 99,998 cases", "failures", 1, 1),
            ("of seed 1, which took 42 minutes", "seconds", 2490, 2550),
        ],
        "faults": [
            ("no failure in more than 200 trials", "trials", 201, 250),
            ("120 kills, no failure", "failed", 0, 0),
        ],
        "soak": [
            ("Four threads share one bundle", "workers", 4, 4),
            ("no failure in ten minutes", "minutes", 10, 10),
            ("more than 3,000 requests", "requests", 3001, 3200),
            ("every answer that was compared was equal", "failed", 0, 0),
            ("the memory in use did not grow", "in_use_mb.mb_per_minute", -0.5, 0),
            ("from 886 MB when warm", "in_use_mb.warm", 885.5, 886.5),
            ("grew by about 2 MB a minute", "memory_mb.mb_per_minute", 1.5, 2.5),
        ],
    },
    "docs/results/acceptance.md": {
        "audit-fp32-strict": [
            ("ran two of", "strict.redone", 2, 2),
            ("of about 1,800 rows again", "strict.rows", 1750, 1850),
            ("less than half a per cent of the decoding", "strict.share_of_decoding", 0, 0.005),
        ]
    },
    "docs/results/index.md": {
        "bench-fp32": [
            ("over 60 Spec-Bench prompts", "overall.prompts", 60, 60),
            ("with 70 turns", "overall.turns", 70, 70),
            ("Every answer equals plain decoding's", "overall.identical", 1, 1),
            ("Less than 4 % of the time of decoding", "overall.host_share", 0, 0.04),
        ],
        "rivals": [
            ("6 short prompts of 69 tokens on average", "contexts.short.tokens", 68.5, 69.5),
            ("2 long prompts of 1500 tokens on average", "contexts.long.tokens", 1495, 1505),
            ("take turns in 1 round", "rounds", 1, 1),
        ],
        "transformers-fp32": [("on all 20 prompts", "drafters.parallelspec.identical", 20, 20)],
        "spec-bench-fp32": [
            ("decoding is about twice as fast at fp32", "overall.speedup", 1.9, 2.1),
            ("are 1.7, 1.3 and 1.2 times as fast", SUMMARIES, 1.65, 1.75),
        ],
        "spec-bench-int8": [
            ("1.6 times at int8", "overall.speedup", 1.55, 1.65),
            ("are 1.7, 1.3 and 1.2 times as fast", SUMMARIES, 1.25, 1.35),
            ("every one of the 480 questions is answered as", "overall.identical", 1, 1),
        ],
        "spec-bench-int4": [
            ("and 1.4 times at int4", "overall.speedup", 1.35, 1.45),
            ("are 1.7, 1.3 and 1.2 times as fast", SUMMARIES, 1.15, 1.25),
            ("every one of the 480 questions is answered as", "overall.identical", 1, 1),
        ],
    },
    "docs/results/trees.md": {
        "sweep-fp32": [("about 4 % slower", "tuned_over_best", 0.955, 0.97)],
        "sweep-int8": [("about 4 % slower", "tuned_over_best", 0.955, 0.965)],
        "sweep-int4": [("about 5 % slower", "tuned_over_best", 0.94, 0.955)],
    },
}


@pytest.mark.parametrize("page", CLAIMS)
def test_what_sentences_claim_is_what_the_json_says(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for file, claims in CLAIMS[page].items():
        for words, path, least, greatest in claims:
            assert words in text
            assert least <= results.value(results.load(file), path, file) <= greatest, words


# ---- README and pages


def test_the_readme_is_short_and_its_links_and_python_are_right() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 8
    for link in links:
        assert link.startswith("https://") or (ROOT / link).is_file(), link
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ast.parse(code)
    assert len(code.splitlines()) <= 10


def test_every_proposer_has_a_page_with_an_equation_and_a_figure() -> None:
    for name in PROPOSERS.keys() - {"none"}:
        page = (ROOT / f"docs/drafters/{name}.md").read_text(encoding="utf-8")
        assert "```diagram" in page, name
        assert "```math" in page or name == "prompt_lookup", name  # which has a rule instead
        is_measured = "It has not been trained at length for the demo yet." not in page
        assert (f"<!-- figures: drafter {name} -->" in page) == is_measured, name


def test_every_diagram_is_drawn() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for diagram in re.findall(r"^```diagram\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert ElementTree.fromstring(diagrams.svg(diagram)).tag.endswith("svg"), page
    with pytest.raises(ValueError, match="got diagram line 'box: a', expected one of target"):
        diagrams.svg("box: a")
    with pytest.raises(ValueError, match="got arrow to 'b', expected a box: a"):
        diagrams.svg("target: a\na -> b")


# ---- the reference, made from the code


def test_every_public_error_is_on_the_page_of_errors() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    for name in spec_runtime.__all__:
        kind = getattr(spec_runtime, name)
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        assert not is_error or f"`{name}`" in page


def test_the_python_on_the_page_of_errors_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for error, said in (
        (spec_runtime.ContextLengthError(9, 7), "Please leave out 2 tokens."),
        (spec_runtime.ContextLengthError(9, 7, "characters"), "Please leave out 2 characters."),
        (spec_runtime.UserError("got x", param="seed"), "seed: got x"),
    ):
        engine = mock.Mock(generate=mock.Mock(side_effect=error))
        exec(code, {"engine": engine, "prompt": "x", "temperature": 0})
        assert capsys.readouterr().out == f"{said}\n"


def test_commands_and_manifest_are_written_from_the_code() -> None:
    text = reference.commands("spec_runtime")
    assert "## spec-runtime audit" in text
    assert "| `--temperature TEMPERATURE` | 0 is greedy" in text
    assert "`--lookup/--no-lookup`" in text
    manifest = reference.manifest()
    assert "| `taps` | list of integer |" in manifest
    assert "| `drafters` | list of [DrafterInfo](#drafterinfo) |" in manifest


# ---- names that texts give


def said_in(file: Path) -> str:
    """Returns a page, or the docstrings and comments of a Python file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    return "\n".join(re.findall(r'^ *r?"""(?s:.*?)"""|#.*', text, re.MULTILINE))


def test_every_file_and_every_name_in_a_package_that_texts_give_exists() -> None:
    """Results name the scripts of their own commits."""
    folders = [
        ROOT / name for name in ("spec_runtime", "spec_export", "tools", "tests", "examples")
    ]
    sources = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    paths = [f"/{named(file)}" for file in sources]
    packages = {
        file.parent.name: ".".join(file.relative_to(ROOT).parent.parts)
        for file in sources
        if file.name == "__init__.py" and file.parents[1] == ROOT / "spec_runtime"
    }
    pages = [page for page in PAGES if page.parent.name != "results"]
    for file in [README, *pages, *sources]:
        if ROOT / "tests" in file.parents:
            continue
        text = said_in(file)
        for name in re.findall(r"(?<![\w./*-])((?:\w+/)*\w+\.py)\b", text):
            assert any(path.endswith(f"/{name}") for path in paths), (named(file), name)
        if ROOT / "spec_export" in file.parents:  # which has modules of the same names
            continue
        for name in re.findall(r"(?<![\w./])([a-z_]+(?:\.[A-Za-z_]\w+)+)\b", text):
            package, *rest = name.split(".")
            is_other = name in ("text.format", "text.verbosity")  # fields
            if package in packages and rest[-1] not in ("py", "md", "html") and not is_other:
                pkgutil.resolve_name(f"{packages[package]}.{'.'.join(rest)}")
