"""Checks promises of the whole project: what importing loads, what is declared and shipped."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "onnx", "onnxruntime"}


def loaded_by(code: str) -> set[str]:
    """Returns the heavy modules that a fresh interpreter has loaded after running `code`."""
    tail = f"\nimport sys; print(*({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code + tail], check=True, capture_output=True, text=True
    )
    return set(result.stdout.splitlines()[-1].split())


def test_the_detector_sees_a_heavy_import() -> None:
    assert loaded_by("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == {
        "torch"
    }


@pytest.mark.parametrize("code", ["import spec_runtime", "import spec_runtime.cli.bench"])
def test_importing_spec_runtime_stays_light(code: str) -> None:
    assert loaded_by(code) == set()


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_help_of_every_verb_loads_no_heavy_module(package: str) -> None:
    code = (
        f"import sys, {package}.cli as cli\n"
        "for words in ([], *([verb] for verb in cli.VERBS)):\n"
        "    try: cli.main([*words, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, end.code\n"
        f"    assert not {HEAVY!r} & set(sys.modules), words"
    )
    assert loaded_by(code) == set()


def project() -> dict[str, object]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split(r"[\[>=]", requirement)[0].lower() for requirement in requirements}


def test_base_dependencies_are_what_the_runtime_needs() -> None:
    assert names(project()["dependencies"]) == {
        *("numpy", "tokenizers", "jinja2", "typer", "rich"),
        *("pydantic", "annotated-types"),  # check options, manifests and recipes
        "filelock",
    }


def test_every_tested_extra_is_pinned_by_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    for extra in ("cpu", "tensorrt-rtx", "export", "distill", "hub", "serve", "docs", "dev"):
        missing = names(extras[extra]) - pinned - {"specsplit"}  # another extra of ours
        assert not missing, (extra, missing)
    assert not names(project()["dependencies"]) - pinned


@pytest.mark.parametrize("package", structure.PACKAGES)
def test_the_architecture_page_lists_the_rooms_from_the_lowest_up(package: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split(f"### `{package}/`")[1].split("\n### ")[0]
    listed = re.findall(r"^\| `(\w+)` \| .*\w.* \|$", section, re.MULTILINE)
    rooms = {
        room.removeprefix(f"{package}."): {name.removeprefix(f"{package}.") for name in imported}
        for room, imported in structure.read(packages=(package,)).rooms.items()
        if room not in (package, f"{package}.__main__")
    }
    assert sorted(listed) == sorted(rooms), "docs/architecture.md and the package differ"
    for i, room in enumerate(listed):
        assert not rooms[room] & set(listed[i:]), f"{room} imports a room that stands below it"


def test_the_page_of_the_tests_names_every_helper() -> None:
    tests = ROOT / "tests"
    page = (tests / "README.md").read_text(encoding="utf-8")
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", page)}
    files = {path for path in tests.rglob("*.py") if not path.name.startswith(("test_", "__"))}
    helpers = {path.name for path in files if path.parent.name != "kinds"}
    tested = {path.name for path in tests.rglob("test_*.py")}
    assert (sorted(helpers - named), sorted(named - helpers - tested)) == ([], [])
    assert len(page.splitlines()) <= 60


@pytest.mark.parametrize("package", ["spec_runtime", "spec_export"])
def test_both_packages_ship_their_types(package: str) -> None:
    """Type checkers read a package's annotations only if `py.typed` lies in it."""
    assert (ROOT / package / "py.typed").is_file()
    with open(ROOT / "pyproject.toml", "rb") as file:
        shipped = tomllib.load(file)["tool"]["setuptools"]["package-data"][package]
    assert "py.typed" in shipped


REFUSALS = """
import json, sys
from spec_export.cli import main

for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2, arguments
    assert "torch" not in sys.modules, arguments
"""


def test_faults_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch takes seconds, which nobody should wait to read that a path is wrong."""
    recipe = '[target]\nmodel = "{}"\n[drafter]\nname = "{}"\n[data]\npath = "{}"\n[train]\n{}'
    for name, text in {
        "rows.jsonl": '{"text": "a"}',
        "unknown/config.json": '{"model_type": "mamba"}',
        "bare/config.json": '{"model_type": "llama"}',
        "bare/model.safetensors": "",
        "broken/config.json": '{"model_type": ',
        "weightless/config.json": '{"model_type": "llama"}',
        "graphs/model.onnx": "",
        "lost/config.json": '{"model_type": "llama"}',
        "lost/model-1.safetensors": "",
        "lost/model.safetensors.index.json": '{"weight_map": {"a": "model-2.safetensors"}}',
        "pissa/adapter_config.json": '{"peft_type": "LORA", "init_lora_weights": "pissa"}',
        "a.gguf": "no GGUF",
        "b.gguf": "GGUF, and no more of it",
        "target.toml": recipe.format("./nowhere", "eagle", "rows.jsonl", "max_steps = 1"),
        "drafter.toml": recipe.format("bare", "eagel", "rows.jsonl", "max_steps = 1"),
        "data.toml": recipe.format("bare", "eagle", "nowhere.jsonl", "max_steps = 1"),
        "key.toml": recipe.format("bare", "eagle", "rows.jsonl", "max_step = 1"),
        "good.toml": '[drafter]\nname = "eagle"\n[data]\npath = "rows.jsonl"\n[train]\nepochs = 1',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    distill = ["distill", "--out", str(tmp_path / "new.jsonl")]
    rows, runs = str(tmp_path / "rows.jsonl"), str(tmp_path / "runs")
    good = ["train", str(tmp_path / "good.toml"), "--out", runs]
    faults = [
        *(
            [*verb, "--model", str(tmp_path / model)]
            for verb in (["build"], ["check"], distill)
            for model in ("nowhere", "unknown", "a.gguf", "b.gguf")
        ),
        *(
            ["build", "--model", str(tmp_path / model)]
            for model in ("broken", "weightless", "graphs", "lost", "pissa")
        ),
        *(
            [*verb, "--target", str(tmp_path / model), "--out", str(tmp_path / "new")]
            for verb in (["import", "org/drafter"], ["export", "medusa", "--format", "native"])
            for model in ("nowhere", "unknown", "a.gguf")
        ),
        ["build", "--drafter", "eagel"],
        ["build", "--drafter-checkpoint", runs],
        ["build", "--draft-model", str(tmp_path / "nowhere")],
        ["build", "--out", str(tmp_path)],
        ["check", "--bundle", runs],
        [*distill, "--prompts", rows],
        [*distill, "--prompts", runs],
        [*distill, "--engine", "llama"],
        ["distill", "--out", rows, "--no-resume"],
        *(["train", str(tmp_path / f"{name}.toml")] for name in ("target", "drafter", "data")),
        ["train", str(tmp_path / "key.toml")],
        [*good, "--resume"],
        [*good, "--init", runs],
        [*good, "--set", "train.max_step=1"],
        ["calibrate", "--bundle", runs],
    ]
    command = [sys.executable, "-c", REFUSALS, json.dumps(faults)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == len(faults), lines
    assert all(line.startswith("error: ") for line in lines), lines
