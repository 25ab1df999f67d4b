"""The worked example of spec_runtime/backends/README.md, exactly as printed there."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

import spec_runtime
from spec_runtime import backends
from spec_runtime.backends import base
from spec_runtime.errors import UserError
from spec_runtime.trees.tree import TokenTree

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

README = Path(backends.__file__).with_name("README.md").read_text(encoding="utf-8")
PROMPTS = ("say abc, 3", "one two. one two. one")
OPTIONS: Any = {"max_new_tokens": 24, "ignore_eos": True}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example in its place: the file among the backends, the line in the table."""
    (line,) = blocks("text")
    ((name, kind),) = eval("{" + line + "}", vars(base)).items()
    monkeypatch.setitem(backends.BACKENDS, name, kind)
    file = Path(f"{kind.module.rpartition('.')[2]}.py")
    assert f"`{file}`" in README
    (tmp_path / file).write_text(blocks("python")[0], encoding="utf-8")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    yield name
    sys.modules.pop(kind.module, None)


@pytest.fixture(scope="module")
def folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from spec_export.build import make_bundle

    options = make_bundle.BuildOptions(
        str(workshop.llama()),
        drafter_checkpoints=[workshop.drafter("parallelspec")],
        form="contiguous",
        out=tmp_path_factory.mktemp("reference") / "bundle",
    )
    return make_bundle.build(options)


def load(bundle: Path, drafter: str, backend: str) -> spec_runtime.Engine:
    return spec_runtime.load(bundle, drafter, threads=1, backend=backend)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_it_generates_what_onnx_runtime_generates(
    name: str, folder: Path, sampling: dict[str, Any]
) -> None:
    """Without a drafter and with one, whose trees are the same on both."""
    plain = load(folder, "none", "onnxruntime")
    for drafter in ("none", "prompt_lookup", "parallelspec"):
        expected, engine = (load(folder, drafter, each) for each in ("onnxruntime", name))
        for prompt in PROMPTS:
            right = expected.generate(prompt, **OPTIONS, **sampling)
            result = engine.generate(prompt, **OPTIONS, **sampling)
            assert result.token_ids == right.token_ids
            assert result.stats.steps == right.stats.steps
            assert result.token_ids == plain.generate(prompt, **OPTIONS, **sampling).token_ids


def test_the_last_line_opens_it(name: str, folder: Path) -> None:
    """And a row that it computes is ONNX Runtime's, up to the order of summation."""
    known: dict[str, Any] = {"spec_runtime": spec_runtime, "bundle": folder}
    exec(blocks("python")[1], known)
    rows = []
    for engine in (known["engine"], load(folder, "none", "onnxruntime")):
        engine.target.prefill([5, 6, 7])
        rows.append(engine.target.verify(TokenTree.root(8)).row(0).copy())
    assert type(known["engine"].target.lend()[0]).__name__ == "ReferenceBackend"
    assert rows[0] == pytest.approx(rows[1], abs=1e-4)


def test_it_refuses_what_it_cannot_run(name: str, workshop: Workshop) -> None:
    with pytest.raises(UserError, match="in the slots form, expected standard operators"):
        load(workshop.bundle("parallelspec"), "none", name)


def test_the_readme_names_what_exists() -> None:
    root = Path(spec_runtime.__file__).parents[1]
    for file in re.findall(r"`((?:tests|tools)/[\w/]+\.py)`", README):
        assert (root / file).is_file(), file
    places = re.findall(r"`(\w+)` \(`(\w+)\.py`\)", README)
    assert len(places) >= 4
    for named, module in places:
        text = (root / "spec_runtime" / "backends" / f"{module}.py").read_text()
        assert re.search(rf"^(class |def )?{named}\b", text, re.MULTILINE), (named, module)
