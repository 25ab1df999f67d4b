"""Says in one line what long work will take, and what did not fit where a disk is full."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_export.report import Report
from spec_runtime.bundle.memory import available_bytes
from spec_runtime.errors import UserError


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Raises UserError where the block cannot write `what` to `folder`: "a checkpoint of 3 MB".

    The operating system's own message names neither the folder nor what it has left.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {what} to {folder} ({error.strerror or error}), "
            f"{free_space(folder)} are free there: make room and run it again, with --resume where "
            "a checkpoint was written"
        ) from error


def foretell(
    what: str, memory: float, disk: float, folder: Path, report: Report, of: str = ""
) -> None:
    """Reports the bytes of memory and of the disk at `folder` that `what` takes, and what is free,
    as a warning where that is less.

    of: what the room on the disk is for.
    """
    parts = [(memory, available_bytes(), "of memory"), (disk, free_bytes(folder), "on the disk")]
    said = " and ".join(
        f"{shown(int(need))} {where} ({shown(free)} are free)" for need, free, where in parts
    )
    said += of and f": {of}"
    if all(need <= free for need, free, _ in parts):
        report.line(f"{what} takes up to {said}")
    else:
        report.warning(f"WARNING: {what} takes up to {said}: it may fail, or take very long")


def free_space(folder: Path) -> str:
    """Returns the free space where `folder` is or will be, such as "1.5 GB"."""
    return shown(free_bytes(folder))


def free_bytes(folder: Path) -> int:
    """Returns the free space where `folder` is or will be."""
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shown(num_bytes: int) -> str:
    """Returns a number of bytes as people read it: "1.5 GB", "20.0 MB", "3.1 kB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1e3:.1f} kB"
