"""Keeps a run's training curve: sums between two lines of it, `curves.csv` and `curves.png`."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from spec_export.training.validate import VALIDATION_BUDGET

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

    def add(self, loss: float, counts: dict[str, Tensor]) -> None:
        """Adds a batch's loss, and its top-1 hits `correct_K` and labelled guesses `count_K`."""
        self.loss += loss
        self.correct_K = _added(self.correct_K, counts["correct_K"].tolist())
        self.count_K = _added(self.count_K, counts["count_K"].tolist())


def _added(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else more


def write(curve: Curve, folder: Path) -> None:
    """Writes `curves.csv` and `curves.png` into `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted({key for row in curve for key in row}, key=lambda key: (key != "step", key))
    with (folder / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(curve)
    _plot(curve, folder / "curves.png")


def _plot(curve: Curve, path: Path) -> None:
    """Draws loss, accuracy per guess and simulated accepted length over steps as one PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 4))
    axes = figure.subplots(1, 4)
    trained = [row for row in curve if "loss" in row]
    validated = [row for row in curve if "accepted_length" in row]
    steps = [row["step"] for row in validated]
    axes[0].plot([row["step"] for row in trained], [row["loss"] for row in trained])
    axes[0].set(title="training loss", xlabel="step")
    for axis, rank in zip(axes[1:3], ("top1", "top5"), strict=True):
        for key in sorted({key for row in validated for key in row if key.startswith(f"{rank}_")}):
            axis.plot(steps, [row[key] for row in validated], label=f"guess {key[5:]}")
        axis.set(title=f"validation {rank.replace('p', 'p-')} accuracy", xlabel="step")
    if validated:
        axes[1].legend()
    axes[3].plot(steps, [row["accepted_length"] for row in validated])
    axes[3].set(
        title=f"simulated accepted length, {VALIDATION_BUDGET.max_nodes} nodes", xlabel="step"
    )
    # fixed margins: to compute them would take as long as to draw the figure
    figure.subplots_adjust(left=0.03, right=0.99, bottom=0.14, top=0.92)
    figure.savefig(path, dpi=100)
