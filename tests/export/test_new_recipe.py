"""Tests `spec-export recipe`: its recipes train, and what it foretells adds up."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from small import Run
from tiny_target import make_tokenizer, save_llama

import spec_runtime
from spec_export import drafters
from spec_export.cli import main
from spec_export.training import estimates, inputs, new_recipe, recipe
from spec_runtime import cli
from spec_runtime.errors import UserError

ROOT = Path(__file__).parents[2]
MAINS = {"spec-export": main, "spec-runtime": cli.main}
QUICK = {  # what the commands of the page get in addition
    "distill": ["--max-new-tokens", "12"],
    "build": ["--lanes", "1"],
    "calibrate": ["--prompts", "prompts.jsonl", "--max-new-tokens", "8"],
    "tune": ["--quick", "--prompts", "prompts.jsonl", "--max-new-tokens", "8"],
}

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
FORMS = [name for name in drafters.trainable() if f"{inputs.DEMO}/{name}" in recipe.shipped()]


def save_outline(folder: Path, **options: int) -> Path:
    """Writes a folder with the config of Llama-3.1-8B, a tokenizer, and no weights."""
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | options))
    return folder


@pytest.mark.parametrize("drafter", FORMS)
def test_a_recipe_for_every_drafter_is_read_back(drafter: str, tmp_path: Path) -> None:
    outline, out = save_outline(tmp_path / "model", num_hidden_layers=3), tmp_path / "new.toml"
    written, _, found = new_recipe.write(out, drafter, str(outline), gpus=8)
    plan = recipe.load(out)
    assert plan == written
    definition = drafters.load(plan.drafter_name)
    config = recipe.build_config(definition.Config, plan.drafter_fields, str(out))
    assert set(config.taps) <= {0, 1, 2, 3}
    assert plan.model == str(tmp_path / Path(str(plan.target.model)))
    assert Path(str(plan.model)).resolve() == outline.resolve()
    assert plan.data_paths == (tmp_path / "answers.jsonl",)
    assert ("computing features" in {what for what, _, _ in found}) == plan.data.store_features


def test_the_predictions_for_8b_are_their_arithmetic(tmp_path: Path) -> None:
    """EAGLE-3's three taps and the final state of 140 M tokens: 4.6 TB; a rank holds the target."""
    outline, said = save_outline(tmp_path / "model"), {}
    for gpus in (1, 8):
        out = tmp_path / f"{gpus}.toml"
        plan, _, found = new_recipe.write(out, "eagle3", str(outline), gpus=gpus)
        said[gpus] = {what: value for what, value, _ in found}
        train = plan.train
        assert (train.lr, train.grad_clip, train.betas) == (5e-5, 0.5, (0.9, 0.95))
        assert plan.drafter["taps"] == [2, 16, 29]
        assert train.batch_tokens * train.grad_accumulation * gpus == 32768
        assert plan.export.draft_vocab == 32768
    assert said[8]["features, were they stored: disk"] == "4.6 TB"
    (memory,) = (value for what, value in said[8].items() if what.startswith("memory of each"))
    held, of = (float(part.split()[0]) for part in memory.split(" of "))
    assert 2 * 8.03 < held < of == 80
    hours = [float(said[gpus]["training"].removesuffix(" h")) for gpus in (1, 8)]
    assert hours[0] == pytest.approx(8 * hours[1], rel=0.01)


def test_operations_are_those_of_a_product() -> None:
    """Five heads of one block and the target's head: 6 a trained weight, 4 a weight of the head."""
    drafter = drafters.load("medusa")
    config = drafter.Config(num_heads=5)
    with torch.device("meta"):
        from spec_export.model.ends import LayerDims, TargetEnds

        table = torch.empty(50, 8)
        dims = LayerDims(8, 16, 2, 1, 4, 1e-5)
        ends = TargetEnds(dims, table, table, torch.ones(8, device="cpu"), table, table, {})
        module = drafter.Drafter(config, ends)
    sizes = estimates.Sizes(None, 1000, config, module)  # type: ignore[arg-type]
    assert sizes.trained == 5 * 8 * 8
    assert sizes.flops(0) == 6 * 5 * 8 * 8 + 4 * 5 * 50 * 8
    assert sizes.flops(10) == 6 * 5 * 8 * 8 + 4 * 5 * 10 * 8


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(30, [2, 15, 27]), (32, [2, 16, 29]), (80, [2, 40, 77]), (2, [0, 1, 2])],
)
def test_taps_keep_their_depth(num_layers: int, taps: list[int]) -> None:
    section = {"name": "eagle3", "taps": [2, 15, 27]}
    assert new_recipe.fitted(section, num_layers)["taps"] == taps


@pytest.mark.parametrize(
    ("vocab_size", "shares", "size"),
    [
        (128256, (0.98, 1, 1), 8192),
        (128256, (0.9, 0.971, 1), 16384),
        (128256, (0, 0, 0.5), 32768),
        (128256, (), 32768),
        (49152, (), 16384),
        (98, (), None),
    ],
)
def test_the_draft_vocabulary_is_as_large_as_the_data_need(
    vocab_size: int, shares: tuple[float, ...], size: int | None
) -> None:
    coverage = dict(zip(new_recipe.VOCABULARIES, shares, strict=False))
    assert new_recipe.vocabulary(vocab_size, coverage) == size


def test_the_commands_of_the_page_lead_to_a_drafter(
    run: Run, profile_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny Qwen3, each command names the next. The last one serves; an engine does here."""
    monkeypatch.chdir(tmp_path)
    save_llama(Path("path/to/model"), family="qwen3", hidden_size=64, head_dim=16)
    prompts = [json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)]
    Path("prompts.jsonl").write_text("".join(prompts))
    page = (ROOT / "docs/your-own-model.md").read_text(encoding="utf-8")
    lines = re.findall(r"```\n(spec-export recipe .*?)```", page, re.DOTALL)[0].splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    for (program, verb, *words), (_, following, *_) in itertools.pairwise(commands):
        words += QUICK.get(verb, [])
        code, out, said = run(verb, *words, main=MAINS[program])
        assert code == 0, said
        assert f" {following} " in said.splitlines()[-1]
        assert Path(said.splitlines()[-1].partition(" is ready. Next: ")[0]).exists()
        if "--data" in words:
            assert re.search(r"features: disk .* tokens × \(2 × 64 wide × 2 \+ 5\)", out)
            assert recipe.load("mine.toml").export.draft_vocab is None, "98 tokens are few"
    assert commands[-1][1:] == ["serve", "--bundle", "bundles/mine"]
    with spec_runtime.load("bundles/mine", "parallelspec", lookup=False, profile=False) as engine:
        assert engine.generate("say 3", max_new_tokens=8).stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafter", "peagle"], "got drafter 'peagle', expected one with a recipe: parallelspec"),
        (["--out", "there.toml"], "there.toml exists"),
        (["--data", "none.jsonl"], "got data none.jsonl, expected a file of JSON Lines"),
    ],
)
def test_what_no_recipe_is_written_for(
    words: list[str], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").touch()
    code, _, said = run("recipe", *words, main=main)
    assert (code, message in said) == (2, True), said


def test_shipped_recipes_are_read_by_name(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("recipe", "--list", main=main)
    assert (code, len(out.splitlines())) == (0, len(recipe.shipped()))
    assert "vicuna-7b/eagle  " in out
    plan = recipe.load("vicuna-7b/eagle", ["train.epochs=1"])
    assert plan.data_paths == (Path("sharegpt.jsonl"),)
    assert plan.train.epochs == 1
    with pytest.raises(UserError, match=r"cannot read recipe vicuna-7b/eagel.* recipe --list"):
        recipe.load("vicuna-7b/eagel")
