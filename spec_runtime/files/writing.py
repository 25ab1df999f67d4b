"""Writes files and folders so that a reader never sees half of one; locks and hashes them.

Everything is written under a temporary name in the same folder, flushed to the disk, and renamed at
the end. A process that is killed leaves such a temporary; the next one that writes to the same
place removes it. A writer holds a lock (`filelock`), which the kernel ends with the process, so
that a temporary whose lock is free has no writer. Where a file system has no locks, everything is
written all the same, and nothing that may be another's is removed.
"""

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError

# Mark what is being written or removed, and a whole folder that was renamed aside to be replaced.
TEMPORARY, REPLACED = ".tmp", ".old"
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OWNER = "process "  # begins what a lock file says
_OWNER_SECONDS = 1.0  # for the owner of a lock to write its name
_RETRY_SECONDS = 10.0  # for a temporary that a cleaning process holds for a moment
_HAS_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# ---- files ----


def require_regular_file(path: str | Path) -> None:
    """Raises UserError if there is something at `path` that is not a regular file.

    Folders, devices, pipes and symbolic links are refused: a rename over one would remove it.
    """
    path = Path(path)
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise UserError(
                f"{path} is a symbolic link, expected a file or a new name; name the file that it "
                "leads to"
            )
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            raise UserError(f"{path} is {what}, expected a file or a new name; name another")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path in the folder of `path`, and renames it to `path` at the end.

    The temporary name keeps the suffix, by which some writers choose a format, and a file that is
    replaced leaves its permissions to the new one. If the block raises, the temporary file is
    removed and whatever was at `path` stays. Temporaries of `path` that dead processes left are
    removed first.

    Raises UserError, before the block, if something is at `path` that is not a regular file, and
    OSError if the folder is missing or cannot be written to.
    """
    final = Path(path)
    require_regular_file(final)
    permissions = stat.S_IMODE(final.stat().st_mode) if final.exists() else None
    for left in temporaries(final):
        _remove_if_left(left)
    temporary = final.with_name(f".{final.stem}.{_token()}{TEMPORARY}{final.suffix}")
    try:
        with holding(temporary, _RETRY_SECONDS, is_private=permissions is not None):
            with _naming(final):
                yield temporary
                _flush(temporary)
            if permissions is not None:
                temporary.chmod(permissions)
            os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (a string as UTF-8) to `path` by way of a temporary file and a rename.

    Raises as `replacing` does.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


class _Discarded(Exception):
    """Ends a trial of writing, so that nothing is kept."""


def require_writable(path: str | Path) -> None:
    """Raises UserError or OSError if `write_atomically` could not write `path` now.

    Makes its folders, and writes a few kilobytes there that are removed again. Call
    it before long work whose result goes to `path`.
    """
    path = Path(path)
    require_regular_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(_Discarded), replacing(path) as temporary:
        temporary.write_bytes(bytes(16384))
        raise _Discarded


def temporaries(path: Path) -> list[Path]:
    """Returns the temporaries of the file `path` in use or left by killed writers."""
    return _beside(path, path.stem, TEMPORARY + path.suffix)


def _remove_if_left(temporary: Path) -> None:
    """Removes a temporary file unless the process that writes it still lives."""
    # An error says that it is gone meanwhile, held, or not ours to remove.
    with suppress(OSError), holding(temporary) as has_lock:
        if has_lock:
            temporary.unlink()


# ---- folders ----

OwnFiles = Callable[[Path], Collection[str] | None]


def require_replaceable(out: Path, own_files: OwnFiles, what: str) -> None:
    """Raises UserError unless `replacing_folder` may put a new folder at `out`.

    It may if there is nothing, an empty folder, or a folder that holds nothing but files of ours:
    `own_files(out)` returns their paths relative to it, None if the folder is not ours. `what` says
    in the message what was expected: "a bundle". A symbolic link is refused, and so are a mount
    point and the working folder or one above it.

    Raises OSError if a folder in `out` cannot be read.
    """
    if out.is_symlink():
        raise UserError(
            f"{out} is a symbolic link, expected {what} or a new folder; name the "
            "folder that it leads to"
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file, expected {what} or a new folder; name another")
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        raise UserError(
            f"{out} is the working folder or above it, which cannot be replaced; name "
            "a folder inside it"
        )
    if os.path.ismount(out):
        raise UserError(
            f"{out} is a mount point, which cannot be replaced; name a folder inside it"
        )
    found = files_in(out)
    if not found:
        return
    own = own_files(out)
    if foreign := sorted(found.difference(own or ())):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UserError(
            f"{out} holds other files ({foreign[0]}{more}), expected {what} or a new "
            "folder; name another folder, or remove it yourself"
        )


def files_in(folder: Path) -> set[str]:
    """Returns the paths, relative to `folder`, of all that it holds, real folders left out."""

    def fail(error: OSError) -> None:
        raise error

    found = set()
    for root, folders, files in os.walk(folder, onerror=fail):
        at = Path(root)
        links = [name for name in folders if (at / name).is_symlink()]
        found |= {(at / name).relative_to(folder).as_posix() for name in (*files, *links)}
    return found


@contextmanager
def replacing_folder(out: str | Path, own_files: OwnFiles, what: str) -> Iterator[Path]:
    """Gives an empty folder next to `out`, and renames it to `out` at the end, replacing it.

    The old folder is renamed aside, the new one takes its place, and only then is the old one
    removed: whenever the process is killed, one of them is whole. If it was killed between the two
    renames, the next call puts the old one back first (and so does `restore_folder`). If the block
    raises, the new folder is removed and `out` stays as it was. Other processes that write to `out`
    are kept out.

    Raises UserError before the block unless `out` may be replaced (see `require_replaceable`) and
    nobody else is writing to it. `out` is looked at again after the block.
    """
    out = _with_real_parent(out)
    require_replaceable(out, own_files, what)  # before a lock is put beside it
    with _parents_of(out), locked(out) as is_alone:
        _restore(out, is_alone)
        require_replaceable(out, own_files, what)
        token = _token()
        temporary = out.with_name(f".{out.name}.{token}{TEMPORARY}")
        old = out.with_name(f".{out.name}.{token}{REPLACED}")
        temporary.mkdir()
        try:
            if out.exists():
                _require_movable(out, temporary)
            with _naming(out):
                yield temporary
                _flush_tree(temporary)
            require_replaceable(out, own_files, what)
            if out.exists():
                temporary.chmod(stat.S_IMODE(out.stat().st_mode))
                out.rename(old)
            temporary.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # the new folder stands; some parents cannot be opened
            _flush(out.parent)
        if old.exists():
            _remove_as(old, temporary)


def _require_movable(out: Path, temporary: Path) -> None:
    """Raises UserError if the folder `out` cannot be renamed, as one of a container's image.

    A rename onto a folder that is not empty says so without ever taking place.
    """
    obstacle = temporary / "obstacle"
    obstacle.touch()
    try:
        out.rename(temporary)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UserError(
                f"{out} cannot be renamed on this file system, as a part of a container's image, "
                "which replacing it needs; name another folder, or remove it yourself"
            ) from None
        obstacle.unlink()
    else:  # a file system that does what none should
        temporary.rename(out)
        temporary.mkdir()


def restore_folder(out: str | Path) -> None:
    """Cleans up after processes that were killed while they replaced or removed the folder `out`.

    Puts the old folder back if the new one did not take its place, and removes temporaries. Does
    nothing while another process is writing to `out`.
    """
    out = _with_real_parent(out)
    with suppress(LockedError), locked(out) as is_alone:
        _restore(out, is_alone)


def restore_folders(parent: Path) -> None:
    """Does what `restore_folder` does for every folder of `parent` that left something behind, if
    only its lock file."""
    folders = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}({re.escape(TEMPORARY)}|{re.escape(REPLACED)})")
    locks = re.compile(r"\.(.+)\.lock")
    left = [folders.fullmatch(path.name) for path in parent.iterdir() if path.is_dir()]
    left += [locks.fullmatch(path.name) for path in parent.iterdir() if _is_lock_file(path)]
    for name in {found[1] for found in left if found}:
        restore_folder(parent / name)


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that it holds, so that a reader never sees half of it.

    What cannot be removed stays under a temporary name.
    """
    _remove_as(folder, folder.with_name(f".{folder.name}.{_token()}{TEMPORARY}"))


def _remove_as(folder: Path, temporary: Path) -> None:
    """Removes a folder by way of a temporary name, so that no `REPLACED` one is ever half there."""
    folder.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _restore(out: Path, is_alone: bool) -> None:
    """Does what `restore_folder` says. Removes nothing unless `is_alone`: others may be writing."""
    for old in _beside(out, out.name, REPLACED):
        if not out.exists():
            old.rename(out)
        elif is_alone:
            _remove_as(old, old.with_suffix(TEMPORARY))
    for temporary in _beside(out, out.name, TEMPORARY) if is_alone else ():
        shutil.rmtree(temporary, ignore_errors=True)


def _with_real_parent(path: str | Path) -> Path:
    """Returns the absolute path without links and "..", but for a link at `path` itself."""
    path = Path(path)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


@contextmanager
def _parents_of(folder: Path) -> Iterator[None]:
    """Makes the folders above `folder`; removes those it made if the block raises."""
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # others may have put something there
            for parent in made:
                parent.rmdir()
        raise


# ---- locks ----


class LockedError(UserError):
    """Says that another process is writing to a place, and which."""


@contextmanager
def locked(path: str | Path) -> Iterator[bool]:
    """Holds the lock file `.<name>.lock` beside `path`, so that no other process writes there.

    The file names the process that holds it. The kernel ends the lock with the process, so that a
    lock file of a dead process locks nothing. Gives False where the file system has no locks:
    others may be writing there too.

    Raises LockedError if another process, or another block of this one, holds it, and OSError if
    the folder is missing or cannot be written to.
    """
    path = Path(os.path.realpath(path))
    file = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        try:
            has_lock = stack.enter_context(holding(file))
        except TimeoutError:
            raise LockedError(
                f"{path} is being written by {_owner(file)}, "
                "expected nobody; wait until it ends, or choose another name"
            ) from None
        try:
            file.write_text(f"{_OWNER}{os.getpid()} on {socket.gethostname()}\n")
            yield has_lock
        finally:
            with suppress(OSError):
                file.unlink()


@contextmanager
def holding(file: Path, seconds: float = 0.0, is_private: bool = False) -> Iterator[bool]:
    """Makes `file` if it is missing, and locks it; gives False where the file system has no locks.

    A private file is for its owner only. Raises TimeoutError if another process, or another block
    of this one, holds the lock for longer than `seconds`.
    """
    from filelock import FileLock  # here: most commands lock nothing

    options: dict[str, Any] = {"mode": 0o600} if is_private else {}
    lock = FileLock(file, timeout=seconds, poll_interval=0.01, fallback_to_soft=False, **options)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _is_lock_file(path: Path) -> bool:
    """Returns whether a file is one that `locked` wrote, or began to, as its first word says."""
    if path.suffix != ".lock" or not path.is_file():
        return False
    said = _said_by(path)
    return not said or said.startswith(_OWNER)


def _owner(lock_file: Path) -> str:
    """Returns whom a lock file that is held names; its owner may be about to write that."""
    end = time.monotonic() + _OWNER_SECONDS
    while not (owner := _said_by(lock_file).strip()) and lock_file.exists():
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return owner or "another process"


def _said_by(lock_file: Path) -> str:
    """Returns the beginning of a file, "" if it cannot be read."""
    with suppress(OSError), open(lock_file, errors="replace") as file:
        return file.read(200)
    return ""


# ---- names, disk and hashes ----


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names `path` in an error that says only that there is no room for what is written."""
    try:
        yield
    except OSError as error:
        if error.errno in _HAS_NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def _token() -> str:
    """Returns eight random hex digits, by which `_beside` knows names that were made here."""
    return uuid.uuid4().hex[:8]


def _beside(final: Path, name: str, mark: str) -> list[Path]:
    """Returns the paths `.<name>.<token><mark>` beside `final`."""
    return list(final.parent.glob(f".{glob.escape(name)}.{'[0-9a-f]' * 8}{glob.escape(mark)}"))


def _flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk.

    Without that, a machine that crashes may keep the rename and lose what was renamed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some have it not for folders
            raise
    finally:
        os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    """Waits until a folder and all that it holds is on the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root, name))
        _flush(Path(root))


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_state(path: Path) -> tuple[int, int, int, int]:
    """Returns what tells a file from all others on this machine, and from what it was before it was
    last written to: device, inode, time of change, and size.

    Programs set the time of modification as they like, and copies keep it; the time of change is
    the system's own. Raises OSError if the file is missing.
    """
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size
