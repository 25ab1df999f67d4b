"""Writes files and folders so that nobody ever sees half of one; locks and hashes them.

Everything is written under a temporary name beside its place and renamed at the end. A process
that is killed leaves such a temporary behind; the next one that writes to the same place removes
it. Whether its writer still lives is asked of the kernel: a writer holds a lock (`flock`) on its
temporary, which ends with the process however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY, REPLACED = ".tmp", ".old"  # mark what is being written, and what is being replaced


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path` to write to; renames it to `path` at the end.

    The temporary name keeps the suffix, by which some writers choose a format. If the block raises,
    the temporary file is removed and whatever was at `path` stays. Temporaries of `path` that dead
    processes left are removed first.
    """
    final = Path(path)
    for left in final.parent.glob(f".{_escaped(final.stem)}.*{TEMPORARY}{_escaped(final.suffix)}"):
        _remove_if_left(left)
    temporary = final.with_name(f".{final.stem}.{uuid.uuid4().hex[:8]}{TEMPORARY}{final.suffix}")
    with _held(temporary, os.O_CREAT | os.O_RDWR):
        try:
            yield temporary
            os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (a string as UTF-8) to `path` by way of a temporary file and a rename.

    Raises OSError if the folder is missing or cannot be written to.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


OwnFiles = Callable[[Path], Collection[str] | None]


def require_replaceable(out: Path, own_files: OwnFiles, what: str) -> None:
    """Raises ValueError unless `replacing_folder` may put a new folder at `out`.

    It may if there is nothing, an empty folder, or a folder that holds nothing but files of ours:
    `own_files(out)` returns their paths relative to it, None if the folder is not ours. `what` says
    in the message what was expected: "a bundle". A symbolic link is refused, and so is the working
    folder or one above it.
    """
    if out.is_symlink():
        raise ValueError(
            f"{out} is a symbolic link, expected {what} or a new folder; name the "
            "folder that it leads to"
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file, expected {what} or a new folder; name another")
    if Path.cwd().is_relative_to(out.resolve()):
        raise ValueError(
            f"{out} is the working folder or above it, which cannot be replaced; name "
            "a folder inside it"
        )
    found = {
        p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_symlink() or not p.is_dir()
    }
    if not found:
        return
    own = own_files(out)
    if foreign := sorted(found.difference(own or ())):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(
            f"{out} holds other files ({foreign[0]}{more}), expected {what} or a new "
            "folder; name another folder, or remove it yourself"
        )


@contextmanager
def replacing_folder(out: str | Path, own_files: OwnFiles, what: str) -> Iterator[Path]:
    """Gives an empty folder beside `out` that is renamed to `out`, replacing it, at the end.

    The old folder is renamed aside, the new one takes its place, and only then is the old one
    removed: whenever the process is killed, one of them is whole. If it was killed between the two
    renames, the next call puts the old one back first. If the block raises, the new folder is
    removed and `out` stays as it was. Other processes that write to `out` are kept out.

    Raises ValueError before the block unless `out` may be replaced (see `require_replaceable`) and
    nobody else is writing to it. `out` is looked at again after the block.
    """
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _restore(out)
        require_replaceable(out, own_files, what)
        token = uuid.uuid4().hex[:8]
        temporary = out.with_name(f".{out.name}.{token}{TEMPORARY}")
        old = out.with_name(f".{out.name}.{token}{REPLACED}")
        temporary.mkdir()
        try:
            yield temporary
            require_replaceable(out, own_files, what)
            if out.exists():
                out.rename(old)
            temporary.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if out.exists():
                shutil.rmtree(old, ignore_errors=True)


def _restore(out: Path) -> None:
    """Cleans up after processes that were killed while they replaced `out`, whose lock is held."""
    for old in out.parent.glob(f".{_escaped(out.name)}.*{REPLACED}"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
    for temporary in out.parent.glob(f".{_escaped(out.name)}.*{TEMPORARY}"):
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds the lock file `.<name>.lock` beside `path`, so that no other process writes there.

    The file names the process that holds it. The kernel ends the lock with the process, so that a
    lock file left behind stops nobody. Raises ValueError if another process, or another block of
    this one, holds it.
    """
    path = Path(os.path.abspath(path))
    file = path.with_name(f".{path.name}.lock")
    while True:
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):  # otherwise its last owner has just removed it
                break
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(
                f"{path} is being written by {owner or 'another process'}, expected nobody; wait "
                "until it ends, or choose another name"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)


@contextmanager
def _held(path: Path, flags: int) -> Iterator[None]:
    """Opens `path` and holds a lock on it, which says that its writer lives."""
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_if_left(temporary: Path) -> None:
    """Removes a temporary file unless the process that writes it still lives."""
    # an error says that it is gone meanwhile, held, or not ours to remove
    with suppress(OSError), _held(temporary, os.O_RDONLY):
        temporary.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _escaped(name: str) -> str:
    """Returns a glob pattern that matches `name` itself."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Discarded(Exception):
    """Ends a trial of writing, so that nothing is kept."""


def require_writable(path: str | Path) -> None:
    """Raises ValueError or OSError if `write_atomically` could not write `path` now.

    Makes its folders, and writes a few kilobytes beside it that are removed again. Anything but a
    plain file at `path` is refused: the rename would put a file in its place, even of /dev/null.
    Call it before long work whose result goes to `path`.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} is not a plain file, expected a file to write; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(_Discarded), replacing(path) as temporary:
        temporary.write_bytes(bytes(16384))
        raise _Discarded
