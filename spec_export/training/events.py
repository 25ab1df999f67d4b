"""Writes a run's figures as TensorBoard events, for `spec-export train --tensorboard`.

The tags are `train/…` (loss, lr, gradient_norm, tokens_per_second, top1_0, …) and `validation/…`
(accepted_length, top1_0, top5_0, ece_0, …).
"""

from collections.abc import Mapping
from pathlib import Path


class EventWriter:
    """Writes rows of the training curve to a folder of event files.

    A resumed run writes to the same folder: its first event tells readers to drop whatever an
    earlier process wrote of the steps after `step`, which are made again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the extra

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, group: str, row: Mapping[str, float]) -> None:
        """Writes the figures of one row of the curve, by its "step", as `group`/…"""
        for name, value in row.items():
            if name != "step":
                tag = f"{group}/{name.removeprefix('train_')}"
                self._writer.add_scalar(tag, value, int(row["step"]))
        self._writer.flush()  # rows are rare, and people look at a run while it goes on

    def close(self) -> None:
        self._writer.close()
