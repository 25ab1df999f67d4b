"""Tests writing files and folders: nobody sees half of one, nothing foreign goes, kills included.

Processes that are killed are children of the test, which kill themselves at a chosen moment.
"""

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small import known, raising

from spec_runtime.errors import UserError
from spec_runtime.files import writing as files

OURS = ("a.bin", "deep/b.bin")
# Replaces the folder or file given by "new"; `die` kills the process as no handler can notice.
CHILD = """
import os, shutil, signal, sys
from pathlib import Path
from spec_runtime.files import writing as files

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(owner, name, call, after=False):
    real, calls = getattr(owner, name), []
    def counted(*args, **kwargs):
        calls.append(0)
        if len(calls) == call and not after:
            die()
        result = real(*args, **kwargs)
        if len(calls) == call:
            die()
        return result
    setattr(owner, name, counted)

def own(folder):
    return ("a.bin", "deep/b.bin")
def write(folder):
    (folder / "deep").mkdir()
    (folder / "a.bin").write_text("new")
    (folder / "deep" / "b.bin").write_text("new")
"""
REPLACE = "with files.replacing_folder(out, own, 'a box') as folder: write(folder)"
# Each moment at which a process that replaces a folder can be killed, and what is at `out` then.
# The first call of `rename` only asks whether the folder can be renamed.
MOMENTS = {
    "before it writes": ("die_at(files.Path, 'mkdir', 2)", "old"),
    "while it writes": (
        "with files.replacing_folder(out, own, 'a box') as folder:\n"
        "    (folder / 'a.bin').write_text('ne'); die()",
        "old",
    ),
    "after it has asked": ("die_at(files.Path, 'unlink', 1)", "old"),
    "before the first rename": ("die_at(files.Path, 'rename', 2)", "old"),
    "between the renames": ("die_at(files.Path, 'rename', 2, after=True)", None),
    "before the second rename": ("die_at(files.Path, 'rename', 3)", None),
    "after the second rename": ("die_at(files.Path, 'rename', 3, after=True)", "new"),
    "before it removes the old": ("die_at(shutil, 'rmtree', 2)", "new"),
    "while it removes the old": ("die_at(os, 'unlink', 2, after=True)", "new"),
    "at the end": ("die_at(files.Path, 'unlink', 2)", "new"),
}


def child(program: str, out: Path) -> int:
    """Returns what ended a child of this process that ran the program: minus its signal."""
    process = os.fork()
    if process == 0:
        try:
            exec(CHILD + program, {"out": out})
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def own(folder: Path) -> tuple[str, ...]:
    return OURS


def fill(folder: Path, text: str) -> Path:
    for name in OURS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def replace(out: Path, text: str = "newest") -> None:
    with files.replacing_folder(out, own, "a box") as folder:
        fill(folder, text)


@contextmanager
def failing(error: type[BaseException], match: str | None = None) -> Iterator[None]:
    """Checks that the block raises `error`; it may have several statements."""
    with pytest.raises(error, match=match):
        yield


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- killed ----


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_loses_neither_folder_and_the_next_call_tidies_up(
    tmp_path: Path, moment: str
) -> None:
    out = fill(tmp_path / "a [box]*", "old")
    program, stands = MOMENTS[moment]
    assert child(program + "\n" + REPLACE, out) == -signal.SIGKILL
    if stands is None:
        assert not out.exists()
        files.restore_folder(out)
        stands = "old"
    assert texts(out) == dict.fromkeys(OURS, stands)
    replace(out)
    assert texts(out) == dict.fromkeys(OURS, "newest")
    assert names(tmp_path) == [out.name]


@pytest.mark.parametrize("calls", [[2], [2, 3]])
def test_the_next_call_puts_the_old_folder_back_before_it_writes(
    tmp_path: Path, calls: list[int]
) -> None:
    """Killed between the renames, also twice: the second process first renames the old one back."""
    out = fill(tmp_path / "box", "old")
    for call in calls:
        child(f"die_at(files.Path, 'rename', {call}, after=True)\n" + REPLACE, out)
        assert not out.exists()
    with failing(OSError), files.replacing_folder(out, own, "a box"):
        assert texts(out) == dict.fromkeys(OURS, "old")
        raise OSError
    assert texts(out) == dict.fromkeys(OURS, "old")
    assert names(tmp_path) == ["box"]


@pytest.mark.parametrize(
    "moment", ["files.Path.write_bytes = die", "files.os.replace = die", "files._flush=die"]
)
def test_a_file_is_the_old_or_the_new_one_and_litter_goes(tmp_path: Path, moment: str) -> None:
    file = tmp_path / "figures[1].json"
    file.write_text("old")
    assert child(f"{moment}\nfiles.write_atomically(out, 'new')", file) == -signal.SIGKILL
    assert file.read_text() == "old"
    assert len(names(tmp_path)) == 2, "no litter to remove"
    files.write_atomically(file, "newest")
    assert file.read_text() == "newest"
    assert names(tmp_path) == [file.name]


# ---- two at once ----


@contextmanager
def paused(program: str, out: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs a child up to its `pause()`, then the block, and lets it go on afterwards."""
    pause = "def pause():\n    print('paused', flush=True); sys.stdin.readline()\n"
    code = f"{CHILD}\nout = Path(sys.argv[1])\n{pause}{program}"
    command = [sys.executable, "-c", code, str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert known(process.stdout).readline() == "paused\n"
        try:
            yield process
        finally:
            process.communicate("\n")
    assert process.returncode == 0


WRITE_AND_PAUSE = (
    "with files.replacing_folder(out, own, 'a box') as folder:\n    write(folder); pause()"
)


def test_of_two_that_write_to_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "box"
    with paused(WRITE_AND_PAUSE, out) as process:
        before = names(tmp_path)
        message = rf"box is being written by process {process.pid} on .*, expected nobody; wait"
        with pytest.raises(files.LockedError, match=message):
            replace(out)
        files.restore_folder(out)  # must not remove what the child writes
        assert names(tmp_path) == before
    assert texts(out) == dict.fromkeys(OURS, "new")
    replace(out)
    assert names(tmp_path) == ["box"]


def test_one_folder_by_two_names_has_one_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with (
        files.locked(tmp_path / "real"),
        pytest.raises(files.LockedError),
        files.locked(tmp_path / "link"),
    ):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    child("with files.locked(out): die()", tmp_path / "run")
    assert names(tmp_path) == [".run.lock"]
    with files.locked(tmp_path / "run") as is_alone:
        assert is_alone
    assert names(tmp_path) == []


def test_the_owner_of_a_lock_is_named_though_it_has_just_taken_it(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    with files.locked(tmp_path / "run"):
        said = lock.read_text()
        lock.write_text("")
        later = threading.Timer(0.1, lock.write_text, (said,))
        later.start()
        with pytest.raises(files.LockedError, match=said.strip()), files.locked(tmp_path / "run"):
            pass
        later.join()


def test_a_block_inside_another_of_the_same_place_is_refused(tmp_path: Path) -> None:
    own_id = rf"run is being written by process {os.getpid()} on"
    with files.locked(tmp_path / "run"):
        with pytest.raises(files.LockedError, match=own_id), files.locked(tmp_path / "run"):
            pass
        with files.locked(tmp_path / "other"), files.replacing(tmp_path / "run") as file:
            file.write_text("a file of that name has nothing to do with the lock")
        with pytest.raises(files.LockedError), files.locked(tmp_path / "run"):
            pass


def test_a_lock_is_handed_on_among_threads(tmp_path: Path) -> None:
    """Its file is removed and made again all the time; never do two hold it."""
    holders, most, taken = list[int](), list[int](), list[int]()

    def work(number: int) -> None:
        while len(taken) < 200:
            with suppress(files.LockedError), files.locked(tmp_path / "run"):
                holders.append(0)
                most.append(len(holders))
                taken.append(0)
                holders.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert max(most) == 1
    assert names(tmp_path) == []


def test_many_threads_write_one_file(tmp_path: Path) -> None:
    """None takes another's temporary for one that was left behind, not even before it is locked."""
    file = tmp_path / "file"

    def work(text: str) -> None:
        for _ in range(50):
            files.write_atomically(file, text * 1000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))
    assert len(file.read_text()) == 1000
    assert names(tmp_path) == ["file"]


def test_a_fork_that_outlives_the_block_stops_nobody(tmp_path: Path) -> None:
    with files.locked(tmp_path / "run"):
        process = os.fork()
        if process == 0:
            signal.pause()
            os._exit(0)
    try:
        with files.locked(tmp_path / "run"):
            pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_without_locks_it_writes_and_removes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(OSError(number, "no locks")))
    out, file = fill(tmp_path / "box", "old"), tmp_path / "file.json"
    (tmp_path / ".box.0123abcd.tmp").mkdir()
    (tmp_path / ".file.0123abcd.tmp.json").touch()
    replace(out)
    files.write_atomically(file, "{}")
    with files.locked(out) as is_alone:
        assert not is_alone
    assert names(tmp_path) == [".box.0123abcd.tmp", ".file.0123abcd.tmp.json", "box", "file.json"]


# ---- what is refused ----


def refused(out: Path, message: str) -> None:
    """Checks that nothing is made, by either function."""
    with pytest.raises(UserError, match=message):
        files.require_replaceable(out, own, "a box")
    with pytest.raises(ValueError, match=message), files.replacing_folder(out, own, "a box"):
        raise AssertionError("the block ran")


def test_folders_with_other_files_are_not_replaced(tmp_path: Path) -> None:
    out = fill(tmp_path / "box", "old")
    with pytest.raises(ValueError, match=r"holds other files \(a.bin and 1 more\)"):
        files.require_replaceable(out, lambda folder: None, "a box")
    (out / "deep" / "notes.txt").write_text("mine")
    refused(out, r"box holds other files \(deep/notes.txt\), expected a box or a new folder; name")
    (out / "deep" / "link").symlink_to("/")
    os.mkfifo(out / "pipe")
    refused(out, r"box holds other files \(deep/link and 2 more\), expected a box")
    shutil.rmtree(tmp_path / "box")
    fill(tmp_path / "elsewhere" / "box", "old")
    out.mkdir()
    (out / "deep").symlink_to(tmp_path / "elsewhere" / "box" / "deep")
    refused(out, r"box holds other files \(deep\)")
    assert texts(tmp_path / "elsewhere" / "box") == dict.fromkeys(OURS, "old")
    assert names(tmp_path) == ["box", "elsewhere"]
    (out / "deep").unlink()
    (out / "a.bin").touch()  # the other file may be missing
    files.require_replaceable(out, own, "a box")


def test_places_that_no_folder_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = fill(tmp_path / "box", "old")
    (tmp_path / "link").symlink_to("box")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    before = names(tmp_path)
    for name, message in (
        ("link", "link is a symbolic link, expected a box or a new folder; name the folder that"),
        ("link/", "is a symbolic link"),
        ("dangling", "is a symbolic link"),
        ("file", "file is a file, expected a box or a new folder; name another"),
    ):
        refused(tmp_path / name, message)
    monkeypatch.chdir(out / "deep")
    for there in (".", "..", "../", "../deep", "../../box", str(out), "../../link/.."):
        refused(Path(there), "is the working folder or above it, which cannot be replaced; name a")
    refused(Path("/proc"), "/proc is a mount point, which cannot be replaced; name a folder inside")
    assert texts(out) == dict.fromkeys(OURS, "old")
    assert names(tmp_path) == before


def test_what_comes_meanwhile_is_not_removed(tmp_path: Path) -> None:
    out = fill(tmp_path / "box", "old")
    message = r"holds other files \(notes.txt\)"
    with failing(ValueError, message), files.replacing_folder(out, own, "a box") as folder:
        fill(folder, "new")
        (out / "notes.txt").write_text("mine")
    assert texts(out) == dict.fromkeys(OURS, "old") | {"notes.txt": "mine"}
    assert names(tmp_path) == ["box"]


def test_others_files_that_look_like_temporaries_stay(tmp_path: Path) -> None:
    out, file = tmp_path / "box", tmp_path / "figures.json"
    foreign = {".box.backup.old", ".box.my.tmp", ".box.0123abcd.x.tmp", ".boxes.0123abcd.tmp"}
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / ".figures.backup.tmp.json").touch()
    replace(out)
    replace(out)
    files.write_atomically(file, "{}")
    assert set(names(tmp_path)) == foreign | {".figures.backup.tmp.json", "box", "figures.json"}


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for name, message in (
        ("link", "link is a symbolic link, expected a file or a new name; name the file that it"),
        ("folder", "folder is a folder, expected a file or a new name; name another"),
        ("pipe", "pipe is a device or a pipe, expected a file"),
    ):
        with pytest.raises(ValueError, match=message), files.replacing(tmp_path / name):
            raise AssertionError("the block ran")
    with pytest.raises(ValueError, match="/dev/null is a device or a pipe"):
        files.write_atomically("/dev/null", "{}")
    assert names(tmp_path) == before
    assert (tmp_path / "file").read_text() == "old"


def test_a_trial_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new" / "out.json"
    kept.write_text("old")
    files.require_writable(kept)
    files.require_writable(new)
    assert {each.name for each in tmp_path.rglob("*")} == {"kept.json", "new"}
    assert kept.read_text() == "old"


# ---- failures ----


def test_a_folder_of_a_containers_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay file system renames no folder of its lower layer; that shows before the work."""
    out = fill(tmp_path / "box", "old")
    crossing = raising(OSError(errno.EXDEV, "Invalid cross-device link"))
    monkeypatch.setattr(Path, "rename", crossing)
    message = "box cannot be renamed on this file system, as a part of a"
    with pytest.raises(ValueError, match=message), files.replacing_folder(out, own, "a box"):
        raise AssertionError("the block ran")
    assert texts(out) == dict.fromkeys(OURS, "old")
    assert names(tmp_path) == ["box"]


@pytest.mark.parametrize("broken", [2, 3])
def test_a_rename_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    out, rename, calls = fill(tmp_path / "box", "old"), Path.rename, []

    def fail(path: Path, to: Path) -> Path:
        calls.append(path)
        if len(calls) == broken:
            raise OSError(errno.EIO, "broken disk")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken disk"):
        replace(out)
    assert texts(out) == dict.fromkeys(OURS, "old")
    assert names(tmp_path) == ["box"]


def test_a_block_that_raises_leaves_no_folder_above_either(tmp_path: Path) -> None:
    out = tmp_path / "new" / "er" / "box"
    with failing(KeyboardInterrupt), files.replacing_folder(out, own, "a box") as folder:
        fill(folder, "new")
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with failing(KeyboardInterrupt), files.replacing(tmp_path / "file") as file:
        file.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_full_disk_is_told_with_the_name(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    message = rf"^\[Errno 28\] No space left on device: '{tmp_path}/box'$"
    with (
        pytest.raises(OSError, match=message),
        files.replacing_folder(tmp_path / "box", own, "a box"),
    ):
        raise full
    full = OSError(errno.ENOSPC, "No space left on device", "/dev/full")
    with pytest.raises(OSError, match="device: '/dev/full'"), files.replacing(tmp_path / "file"):
        raise full


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    out = fill(tmp_path / "box", "old")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            replace(out)
        with pytest.raises(PermissionError):
            files.write_atomically(tmp_path / "file", "")
    finally:
        tmp_path.chmod(0o700)
    assert texts(out) == dict.fromkeys(OURS, "old")


# ---- where and how ----


def test_names_are_followed_as_the_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ ".." after a link leads to the folder above the one that it leads to."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "link").symlink_to("../far/away")
    monkeypatch.chdir(tmp_path / "work")
    with files.replacing_folder("link/../box/", own, "a box") as folder:
        fill(folder, "new")
        monkeypatch.chdir(tmp_path)  # a relative path means the folder that was the working one
    assert texts(tmp_path / "far" / "box") == dict.fromkeys(OURS, "new")
    assert names(tmp_path / "work") == ["link"]


def test_permissions_are_kept(tmp_path: Path) -> None:
    out, file = fill(tmp_path / "box", "old"), tmp_path / "file"
    file.touch()
    file.chmod(0o640)
    out.chmod(0o750)
    with files.replacing(file) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600, "nobody reads more than before"
        temporary.write_text("new")
    replace(out)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_what_is_renamed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash of the machine would leave empty files under their final names."""
    synced: list[str] = []
    renamed: list[list[str]] = []
    rename, sync = Path.rename, os.fsync

    def note_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def note_rename(path: Path, to: Path) -> Path:
        renamed.append(list(synced))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    replace(tmp_path / "box")
    assert {"a.bin", "b.bin", "deep"} <= set(renamed[0])
    synced.clear()
    files.write_atomically(tmp_path / "file", "new")
    assert [name.split(".")[1] for name in synced] == ["file"]


def test_a_removed_folder_is_never_half_there(tmp_path: Path) -> None:
    out = fill(tmp_path / "box", "old")
    child("die_at(os, 'unlink', 1, after=True)\nfiles.remove_folder(out)", out)
    assert not out.exists()
    (tmp_path / ".other.0123abcd.old").mkdir()
    (tmp_path / ".other.0123abcd.tmp").mkdir()
    (tmp_path / ".others.backup.tmp").mkdir()
    (tmp_path / ".box.lock").write_text("process 1 on a machine\n")
    (tmp_path / ".cart.lock").touch()
    (tmp_path / ".cart.json.lock").write_text("{}")
    files.restore_folders(tmp_path)
    assert names(tmp_path) == [".cart.json.lock", ".others.backup.tmp", "other"]
