"""The worked example of spec_export/drafters/README.md, exactly as printed there."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import contract  # noqa: E402
import workshop as workshops  # noqa: E402
from workshop import FluentWorkshop, Workshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export import drafters  # noqa: E402
from spec_runtime import proposers  # noqa: E402

README = Path(drafters.__file__).with_name("README.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example in its place: the file among the drafters, the line in the table."""
    section = tomllib.loads(block("toml"))["drafter"]
    name = section.pop("name")
    (tmp_path / f"{name}.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    for key, factory in eval("{" + block("text") + "}", vars(proposers)).items():
        monkeypatch.setitem(proposers.PROPOSERS, key, factory)
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items())
    monkeypatch.setitem(workshops.OPTIONS, name, fields)
    yield name
    sys.modules.pop(f"spec_export.drafters.{name}", None)


@pytest.mark.slow
def test_the_example_meets_the_contract(
    name: str, fluent: FluentWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in drafters.trainable()
    engine = spec_runtime.load(fluent.bundle(name), name, threads=1, lookup=False)
    for sampling in contract.SAMPLING:
        contract.check_no_token_changes(engine, sampling)
    with monkeypatch.context() as patch:
        contract.check_guesses_are_pytorchs(fluent, engine, name, patch)
    contract.check_int8(fluent.bundle(name, "int8"), name)


def test_the_example_trains(name: str, workshop: Workshop) -> None:
    """Its two steps moved every matrix: each guess has a loss."""
    from spec_export.training import checkpoint

    saved = checkpoint.load_drafter(workshop.drafter(name))
    assert saved.config["num_guesses"] == 3
    assert saved.state["maps"].flatten(1).norm(dim=1).min() > 0
    assert saved.provenance["validation"]["accepted_length"] >= 1


def test_the_example_refuses_what_it_cannot_do(name: str) -> None:
    module = drafters.load(name)
    with pytest.raises(ValueError, match="no taps"):
        module.Config(taps=(1,))


def test_the_readme_names_what_exists() -> None:
    """Files and proposers of its tables and sentences."""
    root = Path(drafters.__file__).parents[2]
    for file in re.findall(r"`((?:tests|spec_runtime)/[\w/]+\.py)`", README):
        assert (root / file).is_file(), file
    named = re.findall(r"`(\w+)\.(\w+Proposer)`", README)
    assert len(named) == 3
    for module, cls in named:
        text = (root / "spec_runtime" / "proposers" / f"{module}.py").read_text()
        assert f"class {cls}" in text
