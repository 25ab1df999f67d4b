"""Runs every Python block of README and the pages, in order, as a reader would.

Blocks of a page share their names. Bundles are a tiny one, addresses are those of a toy server. A
block that is cut from an example is the example's, line for line, and the example runs in
test_examples.py. A block that cannot run here says why in CANNOT_RUN.
"""

import ast
import asyncio
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import tiny_bundle
from test_examples import module, write_roomy_bundle

import spec_runtime

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<tool_call></tool_call></>\n{% endif %}"
) + tiny_bundle.TEMPLATE

# Pages whose blocks other tests run, with more around them.
RUN_BY = {
    "docs/reference/errors.md": "tests/test_docs.py",
    "spec_runtime/backends/README.md": "tests/runtime/test_backends_readme.py",
    "spec_export/drafters/README.md": "tests/export/test_drafters_readme.py",
}
# Pages whose blocks are cut from an example.
CUT_FROM_EXAMPLES = ("docs/architecture.md",)
CANNOT_RUN = {"docs/models.md": "llmcompressor quantises a real model, and is not installed here"}
# What a page's blocks need besides `engine`.
LIBRARIES = {
    "docs/serve.md": ("openai", "anthropic", "uvicorn", "fastapi"),
    "docs/embed.md": ("langchain_openai", "llguidance", "uvicorn", "fastapi"),
    "docs/guide/structured.md": ("llguidance",),
}


def blocks() -> dict[str, list[str]]:
    """Returns the Python blocks by page."""
    pages = [ROOT / "README.md"]
    for folder in ("docs", "spec_runtime", "spec_export", "recipes"):
        pages += sorted((ROOT / folder).rglob("*.md"))
    found = {}
    for page in pages:
        texts = BLOCK.findall(page.read_text(encoding="utf-8"))
        if texts:
            found[page.relative_to(ROOT).as_posix()] = [textwrap.dedent(text) for _, text in texts]
    return found


BLOCKS = blocks()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles that pages name; the target writes letters and calls tools."""
    root = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_bundle, "TEMPLATE", TEMPLATE)
        write_roomy_bundle(root / "bundles" / "demo", max_length=1000)
    (root / "bundles" / MODEL).symlink_to("demo")
    return root


@pytest.fixture
def names(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that a page's first block finds, in the folder where `bundles` is."""
    monkeypatch.chdir(bundle)
    with spec_runtime.load("bundles/demo") as engine:
        yield {**vars(spec_runtime), "engine": engine, "spec_runtime": spec_runtime}


def run(code: str, names: dict[str, Any]) -> None:
    """Executes a block, which may await."""
    compiled = compile(code, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    coroutine = eval(compiled, names)
    if inspect.iscoroutine(coroutine):
        asyncio.run(coroutine)


def settled(page: str) -> bool:
    return page in {*RUN_BY, *CUT_FROM_EXAMPLES, *CANNOT_RUN}


@pytest.mark.parametrize("page", [page for page in BLOCKS if not settled(page)])
def test_blocks_run_in_their_order(
    page: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in LIBRARIES.get(page, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    with ExitStack() as stack:
        url = ADDRESS
        if any(ADDRESS in code for code in BLOCKS[page]):
            served = importlib.import_module("served")
            app = served.app_of(names["engine"], served.Settings("toy"), (MODEL,))
            url = stack.enter_context(served.running(app)).url
        for code in BLOCKS[page]:
            if page == "docs/embed.md":  # each stands in a program of its own
                own = {"engine": stack.enter_context(spec_runtime.load("bundles/demo"))}
                names = {**names_of_examples(), **names, **own}
            run(code.replace(ADDRESS, url), names)


def names_of_examples() -> dict[str, Any]:
    """The names that the programs give to what the page of embedding shows of them."""
    programs = ("json_extraction.py", "multi_user_chat.py", "langchain_chat.py")
    found = {name: each for file in programs for name, each in vars(module(file)).items()}
    return {**found, "text": "Ann is 42.", "user": "Ann", "question": "Name a fruit."}


@pytest.mark.parametrize("page", CUT_FROM_EXAMPLES)
def test_blocks_cut_from_examples_are_theirs(page: str) -> None:
    """Each line stands in one example, in the same order, comments and indentation aside."""
    examples = [file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.py")]
    for block in BLOCKS[page]:
        assert any(is_cut_from(block, example) for example in examples), block


def is_cut_from(block: str, example: str) -> bool:
    """Says whether the block's lines are some of the example's, in their order."""
    rest = iter([line.strip() for line in example.splitlines()])
    wanted = [line.partition("  # ")[0].strip() for line in block.splitlines() if line.strip()]
    return all(line in rest for line in wanted)


@pytest.mark.parametrize("page", CANNOT_RUN)
def test_blocks_that_cannot_run_are_python(page: str) -> None:
    for block in BLOCKS[page]:
        ast.parse(block)
        assert "spec_" not in block, "what is ours can run"


def test_the_lists_name_pages_that_have_blocks() -> None:
    assert {*RUN_BY, *CUT_FROM_EXAMPLES, *CANNOT_RUN, *LIBRARIES} <= BLOCKS.keys()
    for page, test in RUN_BY.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text(encoding="utf-8"), page
