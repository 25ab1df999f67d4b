"""Keeps a run's training curve: sums between two lines of it, `curves.csv`."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

# One row has "step" and either "loss" and train_top1_k, or "accepted_length", top1_k, top5_k and
# ece_k, the expected calibration error.
Curve = list[dict[str, float]]


@dataclass
class TrainingSums:
    """Loss and guess counts since the last line of the curve; a checkpoint keeps them too."""

    loss: float = 0.0
    steps: int = 0
    correct_K: list[int] = field(default_factory=list)
    count_K: list[int] = field(default_factory=list)

    def add(self, loss: float, correct_K: list[int], count_K: list[int]) -> None:
        """Adds a step's loss, and its top-1 hits and labelled guesses."""
        self.loss += loss
        self.steps += 1
        self.correct_K = _added(self.correct_K, correct_K)
        self.count_K = _added(self.count_K, count_K)


def _added(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


def write(curve: Curve, folder: Path) -> None:
    """Writes `curves.csv` into `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for row in curve for key in row}, key=lambda key: (key != "step", key))
    with (folder / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(curve)
