"""Says what each command does in the fault suite, what it must not lose, and what it must bring.

A scenario works in a *place*: a folder with whatever was there before, in which the command runs.
The models, recipes and prompts that it reads lie in the *shop* and are shared.
"""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_processes import Running, call

from spec_runtime.bundle import manifest as bundles
from spec_runtime.files import mapping
from spec_runtime.files.writing import sha256
from spec_runtime.pace import profile

PROMPTS = 12
SEQUENCES = 600  # more than two of the feature cache's blocks
MANY_RECIPE = """
[target]
model = "./llama"
[drafter]
name = "medusa"
[data]
path = "many.jsonl"
[train]
batch_tokens = 512
max_steps = 1
precision = "fp32"
[export]
draft_vocab = 80
"""


@dataclass(frozen=True)
class Shop:
    """The folder of what all scenarios read."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, workshop: Path | None = None) -> "Shop":
        """Makes a tiny target, a drafter, a bundle, prompts and rows in `folder`.

        Copies the models from the folder of a workshop that has made the bundle, if one is given.
        """
        folder.mkdir(parents=True, exist_ok=True)
        shop = cls(folder)
        if workshop is None:
            call(_make_models, folder, sys.path)
        else:
            for name in ("data.jsonl", "medusa.toml"):
                shutil.copy(workshop / name, folder / name)
            for each in (shop.llama, shop.drafter, shop.bundle):
                shutil.copytree(workshop / each.relative_to(folder), each)
        prompts = [json.dumps({"prompt": f"say {word}{i}"}) for i in range(6) for word in "ab"]
        assert len(prompts) == PROMPTS
        shop.prompts.write_text("".join(line + "\n" for line in prompts))
        (folder / "many.toml").write_text(MANY_RECIPE)
        with open(folder / "many.jsonl", "w") as file:
            for i in range(SEQUENCES):
                user = {"role": "user", "content": f"say {i}"}
                answer = {"role": "assistant", "content": "ab" * (1 + i % 4)}
                file.write(json.dumps({"messages": [user, answer]}) + "\n")
        return shop

    @property
    def llama(self) -> Path:
        return self.folder / "llama"

    @property
    def drafter(self) -> Path:
        return self.folder / "runs/medusa/drafter"

    @property
    def bundle(self) -> Path:
        return self.folder / "bundles/medusa-fp32"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    def old(self, name: str, arguments: list[str]) -> Path:
        """Returns the place of an earlier run of a command, which is run when first asked for."""
        place = self.folder / name / "place"
        if not place.exists():
            place.mkdir(parents=True)
            ended = Running(arguments, place, self.folder / name / "logs").wait()
            if ended.exit_code != 0:
                raise RuntimeError(f"{name}: exit code {ended.exit_code}: {ended.err}")
        return place


def _make_models(folder: Path, path: list[str]) -> None:
    sys.path[:] = path
    from workshop import Workshop

    Workshop(folder).bundle("medusa")


class Damaged(Exception):
    """Says which of the files that a command left is not whole."""


class Scenario:
    """One command in the suite; see the subclasses."""

    name = ""
    # A part of what a second process of the same command may say when the first one has finished.
    taken = ""
    # Says that the command has to notice a folder that it cannot write to before it measures.
    measures = False

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def prepare(self, place: Path) -> None:
        """Puts into the new folder `place` what was there before; nothing by default."""

    def arguments(self) -> list[str]:
        """Returns the command line; its paths are relative to the place."""
        raise NotImplementedError

    def next_arguments(self, place: Path) -> list[str]:
        """Returns the command line that goes on after a disturbance."""
        return self.arguments()

    def check_kept(self, place: Path) -> None:
        """Raises Damaged unless what was there before is whole, or has been replaced by a whole
        new one."""

    def result(self, place: Path) -> Any:
        """Returns what the command has made, to compare; raises Damaged if it is not whole."""
        raise NotImplementedError

    def files(self, place: Path) -> set[str]:
        """Returns the names of all files in `place`, to find litter by."""
        return {p.relative_to(place).as_posix() for p in place.rglob("*") if not p.is_dir()}


def bundle_files(folder: Path) -> dict[str, str]:
    """Returns the hashes of a bundle's files; raises Damaged unless it is whole."""
    try:
        return dict(bundles.read(folder).manifest.files)
    except ValueError as error:
        raise Damaged(str(error)) from error


class Build(Scenario):
    """Builds a bundle where there was none."""

    name = "build"

    def arguments(self) -> list[str]:
        inputs = ["--model", str(self.shop.llama), "--drafter-checkpoint", str(self.shop.drafter)]
        return ["spec-export", "build", *inputs, "--out", "bundle"]

    def check_kept(self, place: Path) -> None:
        if (place / "bundle").exists():
            bundle_files(place / "bundle")

    def result(self, place: Path) -> Any:
        return bundle_files(place / "bundle")


class BuildOver(Build):
    """Builds a bundle in place of another one, which has no graphs for lanes."""

    name = "build over"

    def prepare(self, place: Path) -> None:
        shutil.copytree(self.shop.bundle, place / "bundle")

    def check_kept(self, place: Path) -> None:
        # Between two renames the old bundle stands beside its place; the next build puts it back.
        asides = [*place.glob(".bundle.*.old")]
        folders = [place / "bundle"] if (place / "bundle").exists() else asides
        if not folders:
            raise Damaged("the old bundle is gone")
        for folder in folders:
            bundle_files(folder)


class Distill(Scenario):
    """Distils answers into a new file."""

    name = "distill"

    def arguments(self) -> list[str]:
        options = "--engine transformers --temperature 1 --batch-size 2 --max-new-tokens 8"
        inputs = ["--model", str(self.shop.llama), "--prompts", str(self.shop.prompts)]
        return ["spec-export", "distill", *inputs, "--out", "answers.jsonl", *options.split()]

    def check_kept(self, place: Path) -> None:
        self._check_prefix(place)

    def _check_prefix(self, place: Path) -> bytes:
        """Returns the file's rows; raises Damaged if a whole row of it is damaged."""
        file = place / "answers.jsonl"
        content = file.read_bytes() if file.exists() else b""
        for line in content.splitlines()[: content.count(b"\n")]:
            try:
                json.loads(line)
            except ValueError as error:
                raise Damaged(f"{file.name}: {error}") from error
        return content

    def result(self, place: Path) -> Any:
        if not (place / "answers.jsonl").exists():
            raise Damaged("there are no answers")
        return self._check_prefix(place)


class DistillMore(Distill):
    """Distils further answers into a file that has five already."""

    name = "distill more"

    def prepare(self, place: Path) -> None:
        shutil.copytree(self._old(), place, dirs_exist_ok=True)

    def _old(self) -> Path:
        return self.shop.old("old-answers", [*self.arguments(), "--num-prompts", "5"])

    def check_kept(self, place: Path) -> None:
        # The fifth row is half of a batch, which the engine makes again: four rows must stay.
        old = (self._old() / "answers.jsonl").read_bytes()
        kept = b"".join(old.splitlines(keepends=True)[:4])
        if not self._check_prefix(place).startswith(kept):
            raise Damaged("old answers are gone")


class Train(Scenario):
    """Trains a drafter in a new folder and goes on with --resume."""

    name = "train"
    taken = "already holds a training run"

    def arguments(self) -> list[str]:
        settings = "max_steps=12 checkpoint_every=3 keep_checkpoints=9 validate_every=6 log_every=3"
        settings += " ema=0.9"
        overrides = [word for each in settings.split() for word in ("--set", f"train.{each}")]
        recipe = str(self.shop.folder / "medusa.toml")
        return ["spec-export", "train", recipe, "--out", "run", *overrides]

    def next_arguments(self, place: Path) -> list[str]:
        has_checkpoint = any((place / "run/checkpoints").glob("step-*"))
        return [*self.arguments(), *(["--resume"] if has_checkpoint else [])]

    def check_kept(self, place: Path) -> None:
        for folder in (place / "run/checkpoints").glob("step-*"):
            self._check_folder(folder, "checkpoint.json")
        if (place / "run/drafter").exists():
            self._check_folder(place / "run/drafter", "config.json")

    @staticmethod
    def _check_folder(folder: Path, header: str) -> None:
        """Raises Damaged unless all files of a checkpoint are there, with the hashes it names."""
        try:
            files = json.loads((folder / header).read_text())["files"]
            changed = [name for name, digest in files.items() if sha256(folder / name) != digest]
        except (OSError, ValueError) as error:
            raise Damaged(f"{folder.name}: {error}") from error
        if changed:
            raise Damaged(f"{folder.name}: {', '.join(changed)} changed")

    def result(self, place: Path) -> Any:
        self.check_kept(place)
        try:
            weights = sha256(place / "run/drafter/drafter.safetensors")
            curve = (place / "run/curves.csv").read_text()
        except OSError as error:
            raise Damaged(str(error)) from error
        return weights, curve

    def files(self, place: Path) -> set[str]:
        # A stop by SIGTERM saves a checkpoint of its own, whose step is any.
        return {re.sub(r"/step-\d{8}/", "/step/", name) for name in super().files(place)}


class TrainResume(Train):
    """Goes on with a training that was cut off at step 6 of 12."""

    name = "train --resume"

    def prepare(self, place: Path) -> None:
        old = self.shop.old("old-training", Train(self.shop).arguments())
        shutil.copytree(old, place, dirs_exist_ok=True)
        shutil.rmtree(place / "run/drafter")
        for later in (9, 12):
            shutil.rmtree(place / f"run/checkpoints/step-{later:08d}")

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--resume"]

    def next_arguments(self, place: Path) -> list[str]:
        return self.arguments()

    def check_kept(self, place: Path) -> None:
        super().check_kept(place)
        if not (place / "run/checkpoints/step-00000006").exists():
            raise Damaged("the old checkpoint is gone")


class Features(Train):
    """Extracts the features of more sequences than one block and trains one step on them."""

    name = "features"

    def arguments(self) -> list[str]:
        recipe = str(self.shop.folder / "many.toml")
        return ["spec-export", "train", recipe, "--out", "run", "--cache", "features"]

    def result(self, place: Path) -> Any:
        try:
            arrays = {file.name: sha256(file) for file in (place / "features").glob("*.npy")}
        except OSError as error:
            raise Damaged(str(error)) from error
        return arrays, super().result(place)


class Measuring(Scenario):
    """Measures something and writes the figures in place of older ones."""

    measures = True

    def prepare(self, place: Path) -> None:
        old = self.shop.old(f"old-{self.name}", self.arguments())
        shutil.copytree(old, place, dirs_exist_ok=True)

    def check_kept(self, place: Path) -> None:
        self.result(place)


class Tune(Measuring):
    """Measures a machine's profile."""

    name = "tune"

    def arguments(self) -> list[str]:
        options = "--threads 1 --quick --max-new-tokens 4 --json tune.json"
        return ["spec-runtime", "tune", "--bundle", str(self.shop.bundle), *options.split()]

    def result(self, place: Path) -> Any:
        """Returns what the profile and the figures are about: their times differ by run."""
        found = list((place / "cache/specsplit/profiles").glob("[!.]*.json"))
        if len(found) != 1:
            raise Damaged(f"there are {len(found)} profiles")
        try:
            kept = mapping.from_mapping(profile.Profile, json.loads(found[0].read_text()), "kept")
            figures = json.loads((place / "tune.json").read_text())
            written = mapping.from_mapping(profile.Profile, figures["profile"], "written")
        except (OSError, ValueError, KeyError) as error:
            raise Damaged(str(error)) from error
        return found[0].name, kept.key, written.key


class Bench(Measuring):
    """Measures speeds."""

    name = "bench"

    def arguments(self) -> list[str]:
        options = "--threads 1 --limit 3 --max-new-tokens 8 --json bench.json"
        inputs = ["--bundle", str(self.shop.bundle), "--prompts", str(self.shop.prompts)]
        return ["spec-runtime", "bench", *inputs, *options.split()]

    def result(self, place: Path) -> Any:
        """Returns the counts of the figures: their times differ by run."""
        try:
            overall = json.loads((place / "bench.json").read_text())["overall"]
        except (OSError, ValueError, KeyError) as error:
            raise Damaged(str(error)) from error
        return overall["prompts"], overall["tokens"], overall["identical"]


COMMANDS = (Build, BuildOver, Distill, DistillMore, Train, TrainResume, Features, Tune, Bench)
SCENARIOS: dict[str, type[Scenario]] = {scenario.name: scenario for scenario in COMMANDS}
