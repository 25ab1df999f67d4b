"""The tool that trains drafter and target from end to end: its stages, its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import joint_runs
import torch
import training_runs
from joint_runs import Text
from workshop import Workshop

import spec_runtime
from spec_export import target
from spec_export.training import checkpoint, recipe
from spec_export.training import run as train
from spec_runtime.bundle import manifest as bundles

# What the tiny target cannot take of the demo's recipes.
TINY = (
    "drafter.top_k=5",
    "export.draft_vocab=80",
    "data.validation_fraction=0.2",
    "train.precision=fp32",
    "train.warmup=1",
)


@pytest.mark.parametrize(
    "study", ["medusa2", pytest.param("semi_autoregressive", marks=pytest.mark.slow)]
)
def test_a_study_from_end_to_end(
    study: str,
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The recipes themselves, two steps a stage, on the tiny target."""
    workshop.drafter("medusa")  # writes the rows
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "say abc"}\n{"prompt": "say xyz"}\n')
    out, results = tmp_path / "out", tmp_path / "results" / "joint.json"
    words = [study, "--data", workshop.folder / "data.jsonl", "--prompts", prompts]
    words += ["--out", out, "--json", results, "--steps", 2, "--max-new-tokens", 6]
    words += ["--rows", 14, "--threads", 1]
    for override in (f"target.model={workshop.llama()}", *TINY):
        words += ["--set", override]
    joint_runs.main([str(word) for word in words])

    first, joint = joint_runs.STUDIES[study]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[-2:]] == [first, joint]
    assert len((out / "rows.jsonl").read_text().splitlines()) == 14
    found = json.loads(results.read_text())
    assert len(found["provenance"]["prompts"]["ids"]) == 2
    for label in (first, joint):
        row, manifest = found["stages"][label], bundles.read(out / f"{label}-bundle").manifest
        assert row["steps"] == 2
        assert row["train_seconds"] > 0
        assert row["target_modified"] == manifest.target.target_modified == (label == joint)
        assert row["drafting"]["overall"]["prompts"] == 2
        assert 1 <= row["drafting"]["overall"]["accepted_length"] < 6
        assert row["prose"]["perplexity"] > 20  # a random target knows nothing
        assert 0 < row["held_out"]["tokens"] < row["prose"]["tokens"]
    prose = [found["stages"][label]["prose"]["perplexity"] for label in (first, joint)]
    assert prose[0] != prose[1]
    saved = checkpoint.load_drafter(out / joint)
    if study == "medusa2":
        heads = checkpoint.load_drafter(out / first)
        assert saved.provenance["init"] == checkpoint.origin(heads)

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(train, "run", never)
    stage = joint_runs.STUDIES[study][joint]
    settings = [f"data.path={out}/rows.jsonl", f"target.model={workshop.llama()}", *TINY]
    settings.append("train.max_steps=2")
    place = out / joint, out / "features"
    init = None if stage.init is None else out / stage.init
    again = training_runs.trained(stage.recipe, settings, *place, init)
    assert again == out / joint / "drafter"
    with pytest.raises(ValueError, match="holds a run with other settings: name another --out"):
        training_runs.trained(stage.recipe, [*settings, "train.max_steps=3"], *place, init)
    with pytest.raises(ValueError, match="holds a run from other weights: name another --out"):
        training_runs.trained(stage.recipe, settings, *place, None if init else out / first)


def test_the_two_recipes_for_vicuna_follow_each_other(workshop: Workshop, tmp_path: Path) -> None:
    """Two steps each on the tiny target, the second from the heads of the first."""
    workshop.drafter("medusa")  # writes the rows
    settings = [f"data.path={workshop.folder}/data.jsonl", f"target.model={workshop.llama()}"]
    settings += ["drafter.top_k=5", "data.validation_fraction=0.2", "train.max_steps=2"]
    vicuna = joint_runs.RECIPES.parent / "vicuna-7b"
    heads = train.run(vicuna / "medusa2_heads.toml", settings, tmp_path / "heads")
    joint = train.run(vicuna / "medusa2.toml", settings, tmp_path / "joint", init=heads)
    first, second = (recipe.load(vicuna / f"{name}.toml") for name in ("medusa2_heads", "medusa2"))
    assert first.drafter == second.drafter
    assert second.joint is not None
    assert second.train.lr == 4 * second.joint.backbone_lr  # the paper's ratio
    assert checkpoint.load_drafter(joint).provenance["init"]["earlier"]["steps"] == 2
    assert (tmp_path / "joint" / "target" / "config.json").is_file()


def test_perplexity_is_that_of_the_targets_own_model(workshop: Workshop) -> None:
    engine = spec_runtime.load(workshop.bundle("medusa"), threads=1, lookup=False)
    model, _ = target.load(target.resolve(str(workshop.llama())))
    texts = [Text([3, 5, 7], list(range(10, 60))), Text([1], [4, 9])]  # longer than one chunk
    nats, num_tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text.prompt + text.output])
        with torch.no_grad():
            log_p = model(ids).logits[0].double().log_softmax(-1)
        first = len(text.prompt)
        nats -= float(log_p[first - 1 : -1].gather(1, ids[0, first:, None]).sum())
        num_tokens += len(text.output)
    found = joint_runs.perplexity(engine, texts)
    assert found["tokens"] == num_tokens == 52
    assert found["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-4)


def test_every_stage_is_a_recipe_that_loads() -> None:
    """A joint stage is compared with a drafter of the same form on the frozen target."""
    for study in joint_runs.STUDIES.values():
        plans = [recipe.load(stage.recipe, list(stage.overrides)) for stage in study.values()]
        frozen, joint = plans
        assert frozen.joint is None
        assert joint.joint is not None
        assert frozen.drafter == joint.drafter
        assert frozen.export == joint.export
        assert all(stage.init in (None, *study) for stage in study.values())
