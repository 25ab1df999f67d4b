"""`spec-runtime show` as a reader sees it: nested values as indented lines, never Python's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console
from small import small_manifest, write_small_bundle

from spec_runtime import cli
from spec_runtime.bundle import manifest as bundles
from spec_runtime.cli.show import readable

PROVENANCE = {
    "command": ["spec-export", "build", "--model", "my model"],
    "git_commit": None,
    "drafters": {
        "parallelspec": {
            "recipe": {"train": {"lr": 0.0006, "betas": [0.9, 0.95], "steps": 2310000}, "data": {}},
            "is_joint": False,
            "validation": {"accepted_length": 2.542440726675562},
            "sources": {"": 16},
            "earlier": [{"steps": 10}, {"steps": 20}],
        }
    },
}
LINES = """\
command: spec-export build --model 'my model'
git_commit: none
drafters:
  parallelspec:
    recipe:
      train:
        lr: 0.0006
        betas: 0.9, 0.95
        steps: 2310000
      data: none
    is_joint: no
    validation:
      accepted_length: 2.542
    sources:
      (no name): 16
    earlier:
      1:
        steps: 10
      2:
        steps: 20
"""


def test_nested_values_are_indented_under_their_keys() -> None:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(readable(PROVENANCE))
    assert [line.rstrip() for line in captured.get().splitlines()] == LINES.splitlines()


def test_a_line_too_long_goes_on_at_its_own_indent() -> None:
    console = Console(width=20, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(readable({"data": {"prompts": "greedy, by the target itself"}}))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines == ["data:", "  prompts: greedy,", "  by the target", "  itself"]


def test_show_prints_no_python_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_small_bundle(tmp_path / "small")
    manifest = small_manifest()
    drafter = dataclasses.replace(
        manifest.drafters[0],
        config={"taps": [1, 2], "style": None},
        trees={"paths": [[0], [0, 1]], "lookup_nodes": 8},
    )
    manifest = dataclasses.replace(manifest, provenance=PROVENANCE, drafters=(drafter,))
    bundles.write_manifest(folder, manifest)

    def show(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["show", "--bundle", str(folder), *arguments])
        assert not end.value.code
        return capsys.readouterr().out

    shown = show()
    for word in ("llama", "fp32", "parallelspec", "prompt_lookup", "lookahead", "target.onnx"):
        assert word in shown, word
    cells = [line.split("│")[2].rstrip() for line in shown.splitlines() if line.startswith("│")]
    for line in (
        *LINES.splitlines(),
        "taps: 1, 2",
        "style: none",
        "trees:",
        "  paths: (0), (0, 1)",
        "  lookup_nodes: 8",
    ):
        assert f" {line}" in cells, line
    assert not any(mark in cell for cell in cells for mark in ("{", "[", "None", "False"))
    found = json.loads(show("--json"))
    assert found["provenance"] == PROVENANCE, "the whole, as it is"
    assert found["target"]["family"] == "llama"
    assert found["sizes"]["tokenizer.json"] == len("tokenizer.json") * 10
