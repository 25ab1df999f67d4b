"""Figures say where they come from: those that tools write, and those in the repository."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from small import Measure, small_manifest

from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts
from tools.docs import ages, results

MAX_AGE = 200  # commits that changed a package
# What a training run gave is not about the code of today.
RUNS = ("ablation", "drafters", "joint", "training")


@pytest.mark.parametrize("file", sorted(results.RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_results_have_all_keys(file: Path) -> None:
    about = json.loads(file.read_text())["provenance"]
    assert tuple(about) == provenance.KEYS
    assert len(about["commit"]) == 40, "a commit without local changes"
    assert about["date"].startswith("20")
    missing = [key for key in provenance.KEYS[:-2] if about[key] is None]
    if missing and not (missing == ["prompts"] and file.stem.startswith("memory")):
        noted = about["note"].partition("not recorded: ")[2].split(", ")
        assert set(missing) <= set(noted), "say in the note what was not recorded"
    assert "/work" not in file.read_text()
    assert "/home" not in file.read_text()


@pytest.mark.parametrize(
    "name",
    [
        file.stem
        for file in sorted([*results.RESULTS.glob("*.json"), *results.BUILDS.glob("*.json")])
        if not file.stem.startswith(RUNS)
    ],
)
def test_results_are_not_much_older_than_what_they_are_about(name: str) -> None:
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=ages.ROOT, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("this checkout has no history")
    age = ages.commits_since(results.load(name)["provenance"]["commit"], name)
    assert age is not None, "its commit is not in the history: measure it anew"
    assert age <= MAX_AGE, f"measured {age} commits of the packages ago: measure it anew"


def test_figures_of_engines_do_not_age_with_the_server() -> None:
    command = ["git", "log", "--format=%H", "--", *ages.SERVER]
    done = subprocess.run(command, cwd=ages.ROOT, capture_output=True, text=True, check=False)
    if len(commits := done.stdout.split()) < 2:
        pytest.skip("this checkout has no history")
    of_servers, of_engines = (ages.commits_since(commits[-1], name) for name in ("soak", "sweep"))
    assert of_servers is not None
    assert of_engines is not None
    assert of_engines < of_servers


def test_a_commit_that_was_amended_is_not_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    amended = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "--amend", "-m", "second")
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    assert ages.commits_since(amended, "tests") is None
    assert ages.commits_since(git("rev-parse", "HEAD"), "tests") == 0


def test_what_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abc"))
    argv = ["/opt/bin/spec-runtime", "bench", "--prompts", str(prompts), "--bundle=bundles/int8"]
    monkeypatch.setattr(sys, "argv", argv)
    manifest = small_manifest()
    manifest = dataclasses.replace(manifest, provenance={"source": "demo", "model": "smollm2"})
    about = provenance.collect(
        threads=3, prompts_file=prompts, prompts=read_prompts(prompts, 2), manifest=manifest
    )
    assert tuple(about) == provenance.KEYS
    assert json.loads(json.dumps(about)) == about
    assert about["threads"] == 3
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert about["prompts"] == {"file": "prompts.jsonl", "sha256": digest, "ids": [1, 2]}
    assert about["command"] == [
        *("spec-runtime", "bench", "--prompts", "prompts.jsonl", "--bundle=bundles/int8")
    ]
    assert about["bundle"]["source"] == "demo"
    assert "Q4_1 GGUF" in about["bundle"]["weights"]
    assert {"python", "numpy", "native operators"} <= set(about["versions"])
    assert provenance.collect(prompts_file=prompts)["prompts"]["ids"] == [1, 2, 3]
    assert provenance.collect()["prompts"] is None


def test_the_commit_says_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", *identity, *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert provenance.git_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert provenance.git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert provenance.git_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize("verb", ["bench", "audit"])
def test_verbs_write_it(measure: Measure, verb: str) -> None:
    prompts = [{"prompt": "abcabc", "id": "p"}]
    code, _, _, figures = measure(verb, "--max-new-tokens", 8, prompts=prompts)
    about = figures["provenance"]
    assert (code, tuple(about)) == (0, provenance.KEYS)
    assert (about["prompts"]["ids"], about["bundle"]["name"]) == (["p"], "small")
