"""Fills in the site while MkDocs builds it: charts, diagrams, formulas, and pages from the code.

Nothing that is drawn or generated here is committed. In a page's Markdown

    ```diagram … ```            becomes a drawing (diagrams.py)
    ```math … ```               becomes formulas (charts.formula)
    <!-- cli: spec_runtime -->  the command's verbs and options (reference.py)
    <!-- options: MODULE.CLASS --> the options that a class declares
    <!-- manifest -->           the manifest's schema
    <!-- figures: TABLE -->     a table of measured figures (render.py)
    <!-- include: FILE -->      a Markdown file of the repository instead of the whole page

and README.md is the site's first page.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import ages
import charts
import diagrams
import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `mkdocs` begins without the working folder there
from tools.docs import render  # noqa: E402

FENCE = re.compile(r"^```(diagram|math)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(
    r"^Measured: `\S*?(?P<name>[\w-]+)\.json`.*?commit `(?P<commit>\w+)`", re.MULTILINE
)
FIGURES = re.compile(r"<!-- /?figures[^>]*-->")
INCLUDE = re.compile(r"<!-- include: (\S+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Adds the first page and the charts, which exist in no folder."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("(docs/", "(")
    files.append(File.generated(config, "index.md", content=readme))
    for name in charts.CHARTS:
        files.append(File.generated(config, f"images/{name}", content=charts.draw(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces fences and markers by what they stand for."""
    try:
        if page.file.src_uri != "index.md":  # README.md has its tables
            markdown = render.filled(markdown)
        markdown = FIGURES.sub("", markdown)
        markdown = MEASURED.sub(_with_age, _included(markdown))
        markdown = FENCE.sub(_drawn, markdown)
        markdown = re.sub(r"<!-- cli: (\w+) -->", lambda m: reference.commands(m[1]), markdown)
        markdown = re.sub(r"<!-- options: ([\w.]+)\.(\w+) -->", _options, markdown)
        if "<!-- manifest -->" in markdown:
            markdown = markdown.replace("<!-- manifest -->", reference.manifest())
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return markdown


def _options(marker: re.Match[str]) -> str:
    return reference.options(getattr(importlib.import_module(marker[1]), marker[2]))


def _with_age(measured: re.Match[str]) -> str:
    """Says how much the code has changed since figures were measured."""
    commits = ages.commits_since(measured["commit"], measured["name"])
    ago = f", {commits} commits of the packages ago" if commits else ""
    return measured[0] + ago


def _drawn(fence: re.Match[str]) -> str:
    if fence[1] == "diagram":
        return f'<div class="drawing">{diagrams.svg(fence[2])}</div>'
    lines = [line.strip() for line in fence[2].splitlines() if line.strip()]
    return f'<div class="drawing">{charts.formula(lines)}</div>'


def _included(markdown: str) -> str:
    """Returns the text of the file that a page includes, or the page as it is.

    Links of such a file have to be whole addresses, since the site has no folders of code.
    """
    marker = INCLUDE.search(markdown)
    if marker is None:
        return markdown
    file = ROOT / marker[1]
    if not file.is_file():
        raise ValueError(f"got include {marker[1]}, expected a file of the repository")
    return file.read_text(encoding="utf-8")
