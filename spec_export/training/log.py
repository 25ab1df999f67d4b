"""Keeps what a training run says of itself: its curve, its lines and what trackers get of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from spec_export.report import Report, expected_end
from spec_export.training import curves, disk, recipe
from spec_export.training.pace import Pace, validations_left
from spec_export.training.validate import VALIDATION_BUDGET, Validation

PROJECT = "specsplit"  # what trackers call the project, and TensorBoard's folder in a run's


@dataclass
class Log:
    """The curve of a run in the folder `out`, and the sums since its last line.

    `report` is silent in all processes but the first. `rates` are the learning rate and the
    gradient norm of the last step.
    """

    settings: recipe.TrainSection
    total_steps: int
    has_held_out: bool
    accelerator: Accelerator
    out: Path
    report: Report
    curve: curves.Curve = field(default_factory=list)
    sums: curves.TrainingSums = field(default_factory=curves.TrainingSums)
    pace: Pace = field(default_factory=Pace)
    rates: dict[str, float] = field(default_factory=dict)
    _tokens: int = 0  # answers' tokens, of all processes, learnt from since this one began
    _seconds: float = 0.0  # spent in them
    _time_share: float = 0.0  # of max_minutes, at the last step
    _num_written: int = 0  # lines of the curve

    def start_trackers(self, step: int, facts: Mapping[str, Any]) -> None:
        """Starts the accelerator's trackers, which are told the run's settings `facts`; `step` is
        the last one made, after which TensorBoard drops what an earlier process wrote."""
        if self.accelerator.log_with:
            told = {k: v if isinstance(v, int | float) else str(v) for k, v in facts.items()}
            options = {"tensorboard": {"purge_step": step + 1}}
            self.accelerator.init_trackers(PROJECT, told, options)

    def _track(self, group: str, row: Mapping[str, float]) -> None:
        """Sends a row of the curve to the trackers, as `group`/…"""
        values = {f"{group}/{k.removeprefix('train_')}": v for k, v in row.items() if k != "step"}
        self.accelerator.log(values, step=int(row["step"]))

    def close(self) -> None:
        """Ends the trackers' run."""
        self.accelerator.end_training()

    def add_time(self, tokens: int, seconds: float, time_share: float) -> None:
        """Notes that the last step has learnt from `tokens` and taken `seconds`."""
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self.pace.step_seconds.append(seconds)
        self._time_share = time_share

    def training(self, step: int, is_last: bool) -> None:
        """Adds a line to the curve from the sums since the last one, and reports it."""
        tokens_per_second = self._tokens / max(self._seconds, 1e-9)
        loss, pairs = self.sums.loss / self.sums.steps, (self.sums.correct_K, self.sums.count_K)
        accuracy = [hit / max(count, 1) for hit, count in zip(*pairs, strict=True)]
        row: dict[str, float] = {"step": step, "loss": loss}
        row |= {f"train_top1_{k}": a for k, a in enumerate(accuracy)}
        self.curve.append(row)
        speed = {"tokens_per_second": tokens_per_second} if self._seconds else {}
        self._track("train", row | self.rates | speed)
        shown = " ".join(f"{a:.3f}" for a in accuracy)
        of_all = "" if self.settings.ends_by_time_alone else f"/{self.total_steps}"
        self.report.line(
            f"step {step}{of_all} loss {loss:.3f} top-1 {shown} {tokens_per_second:.0f} tok/s"
            f"{'' if is_last else self._expected_end(step)}"
        )
        self.sums = curves.TrainingSums()

    def _expected_end(self, step: int) -> str:
        """Returns ", 41 min left, ends 14:32", or nothing before this process's first step."""
        validations = 0
        if self.has_held_out:
            every = self.settings.validate_every
            # this step's own is still to come
            validations = validations_left(step - 1, self.total_steps, every)
        time_left = None
        if self.settings.max_minutes is not None:
            time_left = (1 - self._time_share) * 60 * self.settings.max_minutes
        seconds = self.pace.seconds_left(self.total_steps - step, validations, time_left)
        return "" if seconds is None else f", {expected_end(seconds)}"

    def validation(self, step: int, result: Validation) -> None:
        """Adds a line to the curve, reports it, and writes the curve."""
        row: dict[str, float] = {"step": step, "accepted_length": result.accepted_length}
        row |= {f"top1_{k}": accuracy for k, accuracy in enumerate(result.top1_K)}
        row |= {f"top5_{k}": accuracy for k, accuracy in enumerate(result.top5_K)}
        row |= {f"ece_{k}": error for k, error in enumerate(result.ece_K)}
        self.curve.append(row)
        top1, top5 = (" ".join(f"{a:.3f}" for a in x) for x in (result.top1_K, result.top5_K))
        self.report.line(
            f"validation: top-1 {top1} | top-5 {top5} | accepted length "
            f"{result.accepted_length:.3f} ({VALIDATION_BUDGET.max_nodes} nodes)"
        )
        self._track("validation", row)
        self.write_curve()

    def write_curve(self) -> None:
        """Writes the curve so far, in the first process, unless it has no new line."""
        if self.accelerator.is_main_process and len(self.curve) != self._num_written:
            with disk.writing("the curves", self.out):
                curves.write(self.curve, self.out)
            self._num_written = len(self.curve)

    def best(self) -> dict[str, float] | None:
        """Returns the validation of the greatest accepted length, None without one.

        Among equals it is the last, whose drafter has learnt longest.
        """
        validated = [row for row in self.curve if "accepted_length" in row]
        return max(reversed(validated), key=lambda row: row["accepted_length"], default=None)

    def newest_validation(self, step: int) -> dict[str, float] | None:
        """Returns the row of the newest validation up to `step`, None without one."""
        rows = [r for r in self.curve if "accepted_length" in r and r["step"] <= step]
        return rows[-1] if rows else None
