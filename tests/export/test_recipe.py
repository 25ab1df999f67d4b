"""Recipes: what is read, what is refused and in which words."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from spec_export.training import recipe, run
from spec_runtime.errors import UserError

EPOCHS, PATHS = "epochs = 2", 'path = ["a.jsonl", "b.jsonl.xz"]'
TEXT = f"""
[target]
model = "./model"
[drafter]
name = "parallelspec"
num_masks = 4
inputs = "features+tokens"
taps = [10, 20]
[data]
{PATHS}
sources = ["", "gsm8k"]
[train]
{EPOCHS}
lr = 1e-5
betas = [0.9, 0.99]
"""


def test_reads_sections_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(TEXT)
    got = recipe.load(path)
    assert got.drafter_name == "parallelspec"
    fields = {"num_masks": 4, "inputs": "features+tokens", "taps": [10, 20]}
    assert got.drafter_fields == fields
    assert got.data_paths == (tmp_path / "a.jsonl", tmp_path / "b.jsonl.xz")
    assert got.data.sources == ("", "gsm8k")
    assert got.model == str(tmp_path / "model")
    assert (got.train.betas, got.train.epochs) == ((0.9, 0.99), 2.0)
    assert got.train.max_steps is None
    assert got.export.draft_vocab is None
    with pytest.raises(UserError, match=r"cannot read recipe .*none.toml"):
        recipe.load(tmp_path / "none.toml")


def test_as_dict_is_json_and_reads_back_equal() -> None:
    got = recipe.parse(
        TEXT.replace("taps = [10, 20]", 'taps = [10, 20]\ntable = {"a b" = [1, 2.5]}')
    )
    sections = json.loads(json.dumps(got.as_dict()))
    for name, section in sections.items():
        cls = recipe.SECTIONS[name]
        built = section if cls is None else recipe.build_config(cls, section, name)
        assert built == getattr(got, name)
    assert "draft_vocab" not in sections["export"]
    assert sections["data"]["path"] == ["a.jsonl", "b.jsonl.xz"]


def test_model_may_be_absent_or_a_hub_id() -> None:
    text = TEXT.replace('[target]\nmodel = "./model"\n', "")
    assert recipe.parse(text).model is None
    assert recipe.parse(text, ["target.model=org/name"]).model == "org/name"


def test_overrides() -> None:
    got = recipe.parse(
        TEXT,
        [
            *("train.lr=3e-4", "train.schedule=constant", "train.max_steps=2"),
            *("drafter.num_masks=2", "drafter.inputs='tokens'", "train.betas=[0.5, 0.6]"),
            "export.draft_vocab=64",
        ],
    )
    assert (got.train.lr, got.train.schedule, got.train.max_steps) == (3e-4, "constant", 2)
    assert got.train.betas == (0.5, 0.6)
    assert (got.drafter_fields["num_masks"], got.drafter_fields["inputs"]) == (2, "tokens")
    assert got.export.draft_vocab == 64


def test_data_path_on_the_command_line_starts_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    (path,) = recipe.load("recipes/x.toml", ["data.path=mine.jsonl"]).data_paths
    assert path.resolve() == tmp_path / "mine.jsonl"
    with pytest.raises(UserError, match=r"data.path .*a.jsonl, .*: paths in .* start from its fo"):
        run.run(Path("recipes/x.toml"), [], None)
    for name in ("a.jsonl", "b.jsonl.xz"):
        (tmp_path / "recipes" / name).touch()
    (tmp_path / "mine").mkdir()
    text = (tmp_path / "recipes" / "x.toml").read_text().replace("./model", "mine")
    (tmp_path / "recipes" / "x.toml").write_text(text)
    with pytest.raises(
        UserError, match=r"working folder: paths in .* from its folder, write \.\./mi"
    ):
        run.run(Path("recipes/x.toml"), [], None)
    assert recipe.load("recipes/x.toml", ["target.model=mine"]).model == "recipes/../mine"


@pytest.mark.parametrize("value", ['""', "[]", '["a", ""]', ""])
def test_data_without_a_path_is_refused_on_the_command_line_too(value: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TEXT)
    with pytest.raises(UserError, match=r"\[data\].path: got .* one file or a list of files"):
        recipe.load(tmp_path / "x.toml", [f"data.path={value}"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr = 1e-5", "learning_rate = 1", "unknown key 'learning_rate'; expected keys batch_tok"),
        ("[train]", "[trian]", r"unknown key 'trian' \(meant: train\); expected keys target"),
        (EPOCHS, "", "neither epochs nor max_steps"),
        (EPOCHS, "max_minutes = 0.0", "max_minutes: got float 0.0, expected more than 0 or absent"),
        (EPOCHS, "max_minutes = 5\nwarmup = 0.1", "0.1 of an unknown number of steps"),
        (EPOCHS, 'epochs = "2"', "epochs: got str '2', expected float or absent"),
        (EPOCHS, "max_steps = true", "max_steps: got bool True, expected int or absent"),
        (EPOCHS, "epochs = 2\nschedule = 'step'", "expected 'constant', 'linear' or 'cosine'"),
        (EPOCHS, "epochs = 2\nwarmup = 1.5", "warmup: got float 1.5, expected an integer"),
        ("betas = [0.9, 0.99]", "betas = [0.9]", "expected more items"),
        ('name = "parallelspec"', "", r"\[drafter\].name: got None, expected the name"),
        (PATHS, "", "missing key 'path'"),
        (PATHS, "path = []", "path: got list .., expected one file or a list"),
        ("[data]", "[data", "not valid TOML"),
        ("lr = 1e-5", "lr = inf", "is not valid TOML: it holds inf, expected finite numbers"),
        ("lr = 1e-5", "lr = nan", "is not valid TOML: it holds nan, expected finite numbers"),
        (EPOCHS, "epochs = 2\nmax_minutes = inf", "it holds inf, expected finite"),
        (EPOCHS, "epochs = 2\ngrad_clip = nan", "it holds nan, expected finite"),
        ("[0.9, 0.99]", "[0.9, nan]", "it holds nan, expected finite"),
        (EPOCHS, "epochs = 1e308", "epochs: got float 1e.308, expected at most 1e.06"),
        ("lr = 1e-5", "seed = -1", "seed: got int -1, expected 0 or more"),
        ("lr = 1e-5", f"lr = 1{'0' * 400}", "lr: got int of 1329 bits, expected float"),
        ("lr = 1e-5", f"lr = 1{'0' * 5000}", "is not valid TOML"),
        ("taps = [10, 20]", f"taps = {'[' * 5000}", "is not valid TOML: it is nested too deeply"),
    ],
)
def test_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(UserError, match=message) as caught:
        recipe.parse(TEXT.replace(old, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "expected section.key=value"),
        ("lr=3", "expected section.key=value"),
        ("trian.lr=3", "unknown section 'trian'"),
        ("train.betas=[1,", "not a TOML value"),
        ("train.lr=fast", "lr: got str 'fast', expected float"),
        ("train.lr=inf", "lr: got str 'inf', expected float"),
        ("joint.lora_dropout=1.5", "lora_dropout: got float 1.5, expected less than 1"),
        ("joint.layer_dropout=-0.1", "layer_dropout: got float -0.1, expected 0 or more"),
        (f"drafter.taps={'[' * 5000}", "not a TOML value: it is nested too deeply"),
        ("target.model=a\udcffb", "is not UTF-8, expected a text"),
    ],
)
def test_override_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.parse(TEXT, [override])


@dataclass(frozen=True)
class _Config:
    num_masks: int
    scale: float = 1.0
    style: Literal["a", "b"] = "a"
    taps: tuple[int, ...] = ()
    rope: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.num_masks < 1:
            raise ValueError(f"num_masks is {self.num_masks}, expected at least 1")


def test_build_config() -> None:
    given = {"num_masks": 3, "scale": 2, "taps": [1, 2], "rope": {"theta": 5}}
    got = recipe.build_config(_Config, given, "here")
    assert got == _Config(num_masks=3, scale=2.0, taps=(1, 2), rope={"theta": 5.0})
    assert isinstance(got.scale, float)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "here: got missing key 'num_masks'; expected keys num_masks, scale"),
        ({"num_masks": 2.0}, r"here\.num_masks: got float 2.0, expected int"),
        ({"num_masks": 1, "taps": "12"}, r"here\.taps: got str '12', expected a list"),
        ({"num_masks": 1, "taps": [1, "2"]}, r"here\.taps\[1\]: got str '2', expected int"),
        ({"num_masks": 1, "style": "c"}, "expected 'a' or 'b'"),
        ({"num_masks": 0}, "here: num_masks is 0, expected at least 1"),
        ({"num_masks": 1, "depth": 2}, "unknown key 'depth'; expected keys num_masks, scale, s"),
        (
            {"num_masks": 1, "scale": float("inf")},
            r"here\.scale: got float inf, expected a finite float",
        ),
    ],
)
def test_build_config_refuses(mapping: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.build_config(_Config, mapping, "here")


def test_learning_rate_warms_up_and_comes_down() -> None:
    train = recipe.TrainSection(epochs=1, warmup=2, schedule="linear")
    assert [train.lr_factor(step, 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = recipe.TrainSection(epochs=1, warmup=0.5, schedule="cosine")
    assert cosine.lr_factor(0, 4) == 0.5
    assert train.lr_factor(3, 6, time_share=0.5) == train.lr_factor(4, 6)
    assert train.lr_factor(3, 6, time_share=0.1) == train.lr_factor(3, 6)
    assert cosine.lr_factor(3, 4) == pytest.approx(0.5)
    assert recipe.TrainSection(epochs=1, warmup=0, schedule="constant").lr_factor(9, 4) == 1.0


def test_total_steps_takes_whichever_ends_first() -> None:
    assert recipe.TrainSection(epochs=1.5).total_steps(3) == 5
    assert recipe.TrainSection(epochs=1.5, max_steps=2).total_steps(3) == 2
    assert recipe.TrainSection(max_steps=7).total_steps(3) == 7


def test_a_key_that_came_later_changes_no_older_recipe() -> None:
    assert "allow_other_target" not in recipe.parse(TEXT).as_dict()["data"]
    got = recipe.parse(TEXT, ["data.allow_other_target=true"])
    assert got.as_dict()["data"]["allow_other_target"] is True
