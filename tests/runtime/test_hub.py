"""Bundles to and from a hub, which a thread of these tests serves: what arrives, and what fails."""

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from fake_hub import TOKEN, FakeHub, serving
from huggingface_hub import constants, file_download
from small import Run, raising, write_small_bundle

import spec_runtime
from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import BundleError
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install
from spec_runtime.hub.client import Repository
from spec_runtime.hub.pull import Progress, open_cached, pull
from spec_runtime.hub.push import push

NAME = "org/small"
Files = dict[str, bytes]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that the client takes for its own, with the token of one who may do all; the caches
    are the test's."""
    served = FakeHub()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with serving(served) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield served


def contents(folder: Path) -> Files:
    """Returns all files of a folder by name, hidden ones too."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return contents(write_small_bundle(tmp_path / "made"))


def damaged(held: Files, **changes: Any) -> Files:
    """Returns the files with other values in their manifest."""
    manifest = json.loads(held["manifest.json"]) | changes
    return held | {"manifest.json": json.dumps(manifest).encode()}


# ---- names ----


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("hf://org/na.me-2_x", "org/na.me-2_x", None),
        ("org/name@v1.0", "org/name", "v1.0"),
    ],
)
def test_names_of_repositories(text: str, name: str, revision: str | None) -> None:
    found = Repository.parse(text)
    assert (found.name, found.revision) == (name, revision)
    assert Repository.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "revision", "message"),
    [
        *(
            (text, None, r"got repository .*, expected ORG/NAME")
            for text in ("name", "a/b/c", "../b", "a/..", "a/b..c", "a /b", "a/b\n", "", "/b", "a/")
        ),
        ("x" * 97 + "/b", None, r"got repository .*, expected ORG/NAME"),
        *(("a/b", revision, "got revision") for revision in ("", "a b", "v\n", "x" * 201)),
        ("a/b@c", "d", "got two revisions"),
    ],
)
def test_other_names_are_refused(text: str, revision: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Repository.parse(text, revision)


# ---- there and back ----


def test_a_bundle_travels_whole(hub: FakeHub, files: Files) -> None:
    address = push(Path("made"), NAME)
    assert address.rpartition("/")[2] == hub.repositories[NAME].revisions["main"]
    seen: list[Progress] = []
    folder = pull(NAME, on_progress=seen.append)
    assert folder == Path("bundles/small") == bundles.find()
    assert contents(folder) == files
    commit = hub.repositories[NAME].revisions["main"]
    assert b"spec-runtime pull org/small" in hub.repositories[NAME].commits[commit]["README.md"]
    assert [path.name for path in Path("bundles").iterdir()] == ["small"], "nothing is left over"
    assert not hub.repositories[NAME].private
    counts = [state.done for state in seen]
    assert counts == sorted(counts), "every byte counts once"
    assert counts[-1] == seen[-1].total == sum(map(len, files.values()))


def test_push_sends_what_the_manifest_names_and_keeps_a_card(hub: FakeHub, files: Files) -> None:
    hub.add(NAME, {"README.md": b"ours", "other.txt": b"other"})
    Path("made/notes.txt").write_text("private notes")
    push(Path("made"), NAME)
    commit = hub.repositories[NAME].revisions["main"]
    assert hub.repositories[NAME].commits[commit] == {
        "README.md": b"ours",
        "other.txt": b"other",
        **files,
    }
    assert contents(pull(NAME)) == files


def test_a_damaged_bundle_is_not_sent(hub: FakeHub, files: Files) -> None:
    Path("made/tokenizer.json").write_text("altered")
    with pytest.raises(BundleError, match=r"tokenizer\.json: got sha256"):
        push(Path("made"), NAME)
    assert hub.requests == []


def test_private_repositories(hub: FakeHub, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    push(Path("made"), NAME, private=True)
    assert hub.repositories[NAME].private
    pull(NAME, "mine")
    hub.repositories[NAME].private = False
    with pytest.raises(UserError, match="got --private, and everybody can read it"):
        push(Path("made"), NAME, private=True)
    hub.repositories[NAME].private = True
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(UserError, match="knows no such repository, or shows it to others only"):
        pull(NAME, "theirs")
    assert not Path("theirs").exists()


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, files: Files) -> None:
    first = hub.add(NAME, files)
    hub.add(NAME, damaged(files, name="second"))
    hub.repositories[NAME].revisions["v1"] = first
    names = [
        bundles.read(pull(NAME, "here", revision)).manifest.name
        for revision in ("v1", None, first, "main")
    ]
    assert names == ["small", "second", "small", "second"]
    with pytest.raises(UserError, match="got a revision that is not there"):
        pull(NAME, revision="v2")


def test_an_older_bundle_is_replaced_and_other_files_are_not(hub: FakeHub, files: Files) -> None:
    hub.add(NAME, files)
    folder = pull(NAME)
    hub.add(NAME, damaged(files, name="new"))
    assert bundles.read(pull(NAME)).manifest.name == "new"
    (folder / "thesis.txt").write_text("the only copy")
    asked = len(hub.requests)
    with pytest.raises(ValueError, match=r"holds other files \(.*thesis\.txt"):
        pull(NAME)
    assert len(hub.requests) == asked, "it is refused before the network is asked"


def test_load_fetches_once(hub: FakeHub, files: Files) -> None:
    """Each revision has a folder of its own in the cache."""
    commit = hub.add(NAME, files)
    counts = [0]
    for path in ("hf://org/small", "hf://org/small", f"hf://org/small@{commit}"):
        with pytest.raises(BundleError, match=r"tokenizer\.json.* is not a tokenizer"):
            spec_runtime.load(path)  # the small bundle's files are not what they are called
        counts.append(len(hub.requests))
    assert 0 < counts[1] == counts[2] < counts[3]
    there = Path("home/specsplit/hub")
    names = sorted(path.name for path in there.iterdir())
    assert names == ["org--small", f"org--small@{commit}"]
    with pytest.raises(UserError, match="got repository"):
        spec_runtime.load("hf://small")


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "a file more"])
def test_a_damaged_bundle_in_the_cache_is_fetched_anew(
    hub: FakeHub, files: Files, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    hub.add(NAME, files)
    folder = open_cached("hf://org/small").path
    for content in (b"", b"[" * 100_000, b"\xff", None):
        caplog.clear()
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).unlink(missing_ok=True)
        if content is None:
            (folder / name / "x").mkdir(parents=True)
        else:
            (folder / name).write_bytes(content)
        assert open_cached("hf://org/small").path == folder
        notes = [message for message in caplog.messages if "is fetched anew" in message]
        assert len(notes) == (name in files)
        asked = len(hub.requests)
        assert open_cached("hf://org/small").path == folder
        assert len(hub.requests) == asked


def test_a_damaged_bundle_stays_where_the_hub_cannot_be_reached(hub: FakeHub, files: Files) -> None:
    hub.add(NAME, files)
    folder = open_cached("hf://org/small").path
    (folder / "tokenizer.json").write_bytes(b"")
    hub.repositories.clear()
    with pytest.raises(UserError):
        open_cached("hf://org/small")
    assert open_cached("hf://org/small", verify=False).path == folder


# ---- what fails ----


def test_a_broken_download_goes_on_where_it_stopped(
    hub: FakeHub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub goes on inside a file by itself; what is whole is not fetched again."""
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 5)
    hub.add(NAME, files)
    name = "tokenizer.json"
    hub.cut[name] = 10
    pull(NAME)  # in many pieces
    assert hub.sent[name] == len(files[name])
    hub.cut[name] = 0
    hub.sent.clear()
    with pytest.raises(UserError, match=r"could not be reached .*run the command again"):
        pull(NAME, "again")
    assert not Path("again").exists()
    assert Path(".again.pull").is_dir()
    others = [each for each in files if each != name and each in hub.sent]
    assert others
    hub.cut.clear()
    hub.sent.clear()
    assert contents(pull(NAME, "again")) == files
    assert not set(others) & set(hub.sent), "they were there already"
    assert not Path(".again.pull").exists()


def test_an_interrupted_pull_leaves_no_bundle_and_goes_on(hub: FakeHub, files: Files) -> None:
    hub.add(NAME, files)

    def interrupt(progress: Progress) -> None:
        if progress.file == "target/target.onnx":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, on_progress=interrupt)
    assert [path.name for path in Path("bundles").iterdir()] == [".small.pull"]
    hub.sent.clear()
    assert contents(pull(NAME)) == files
    assert "manifest.json" not in hub.sent, "it was there already"


def test_two_pulls_into_one_folder(hub: FakeHub, files: Files) -> None:
    hub.add(NAME, files)
    refused: list[str] = []

    def pull_too(progress: Progress) -> None:
        if not refused:
            with pytest.raises(ValueError, match="is being written by process") as caught:
                pull(NAME)
            refused.append(str(caught.value))

    assert contents(pull(NAME, on_progress=pull_too)) == files
    assert len(refused) == 1


@pytest.mark.parametrize("name", ["target/target.onnx", "tokenizer.json"])
def test_a_wrong_hash_leaves_nothing(hub: FakeHub, files: Files, name: str) -> None:
    hub.add(NAME, files | {name: files[name][:-1] + b"?"})
    with pytest.raises(BundleError, match=rf"hf://org/small/{name}: got sha256 .*, expected"):
        pull(NAME)
    assert list(Path("bundles").iterdir() if Path("bundles").exists() else ()) == []


def test_what_is_not_a_bundle_is_refused(hub: FakeHub, files: Files) -> None:
    manifest = json.loads(files["manifest.json"])
    digest = manifest["files"]["tokenizer.json"]
    without = {key: data for key, data in files.items() if key != "tokenizer.json"}
    cases = {
        "a/weights": ({"model.safetensors": b"x"}, "a repository without manifest.json"),
        "a/text": ({"manifest.json": b"no JSON"}, "hf://a/text/manifest.json: not readable"),
        "a/newer": (damaged(files, schema_version=99), "expected at most 1; upgrade specsplit"),
        "a/short": (without, r"tokenizer\.json is named in its manifest and missing there"),
        "a/out": (
            damaged(files, files=manifest["files"] | {"../out": digest}),
            r"files: got str '\.\./out', expected a path inside the bundle",
        ),
    }
    for number, path in enumerate(["manifest.json", "manifest.json/x", "tokenizer.json/x"]):
        listed = {path: b"x"} | damaged(files, files=manifest["files"] | {path: digest})
        cases[f"a/clash{number}"] = (listed, rf"got {path} beside \w+\.json among its files")
    for number, path in enumerate(["a//b", "./a", ".", "a/"]):
        listed = damaged(files, files=manifest["files"] | {path: digest})
        cases[f"a/form{number}"] = (listed, "expected a path inside the bundle")
    for name, (held, message) in cases.items():
        hub.add(name, held)
        with pytest.raises(ValueError, match=message) as caught:
            pull(name)
        assert ".pull" not in str(caught.value)
    asked = {path for _, path in hub.requests if "out" in path.rpartition("/")[2]}
    assert not any(path.endswith("../out") for path in asked)
    assert not Path("bundles").exists() or not list(Path("bundles").iterdir())


@pytest.mark.parametrize(
    ("verb", "part", "refusal", "message"),
    [
        *(
            ("pull", part, refusal, message)
            for part in ("/api/models", "/resolve/")
            for refusal, message in (
                ((401, ""), "wants to know who you are|knows no such repository"),
                ((401, "GatedRepo"), "its owner lends access one by one"),
                ((403, "GatedRepo"), "its owner lends access one by one"),
                ((403, ""), r"does not let you read it \(403\)"),
                ((404, "RepoNotFound"), r"no such repository, or shows it to others only \(404\)"),
                ((418, ""), "answered with HTTP status 418"),
            )
        ),
        ("push", "/api/repos", (401, ""), "wants to know who you are"),
        ("push", "/api/repos", (403, ""), r"does not let you write it \(403\)"),
        ("push", "/commit/", (403, ""), r"does not let you write it \(403\)"),
        ("push", "/upload/", (403, ""), r"does not let you write it \(403\)"),
        ("push", "/objects/batch", (418, ""), "answered with HTTP status 418"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: FakeHub, files: Files, verb: str, part: str, refusal: Any, message: str
) -> None:
    if verb == "pull":
        hub.add(NAME, files)
    hub.refusals = {part: refusal}
    with pytest.raises(UserError, match=message) as caught:
        pull(NAME) if verb == "pull" else push(Path("made"), NAME)
    assert str(caught.value).startswith("hf://org/small: ")
    assert not Path("bundles/small").exists()


def test_no_network(hub: FakeHub, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for work in (lambda: pull(NAME), lambda: push(Path("made"), NAME)):
            with pytest.raises(UserError, match=r"could not be reached \(ConnectError: .*check"):
                work()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids the network; unset it"):
        pull(NAME)


def test_a_full_disk(hub: FakeHub, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, files)

    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(file_download, "http_get", raising(full))
        with pytest.raises(UserError, match="no space is left on the disk; make room"):
            pull(NAME)
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 1000})
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(UserError, match=r"its files need .* MB more, and 0 MB are free"):
            pull(NAME)
    assert not Path("bundles/small").exists()
    assert contents(pull(NAME)) == files


# ---- the commands ----


def test_the_commands_print_where_the_bundle_is(hub: FakeHub, files: Files, run: Run) -> None:
    code, out, err = run("push", "made", NAME, "--private")
    assert (code, err) == (0, "")
    commit = hub.repositories[NAME].revisions["main"]
    assert out == f"{os.environ['HF_ENDPOINT']}/{NAME}/commit/{commit}\n"
    code, out, _ = run("pull", NAME, "--to", "here", "--revision", commit)
    assert (code, out) == (0, "here\n")
    assert contents(Path("here")) == files


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pull", "org/none"], "error: hf://org/none: http://"),
        (["pull", "none"], "error: got repository 'none', expected ORG/NAME"),
        (["push", "nowhere", NAME], "error: nowhere: no manifest.json here"),
        (["push", "made", f"{NAME}@v1"], "error: got hf://org/small@v1, expected ORG/NAME without"),
    ],
)
def test_their_errors_are_one_line(
    hub: FakeHub, files: Files, run: Run, argv: list[str], message: str
) -> None:
    code, out, err = run(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_without_the_library_the_extra_is_named(
    hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = run("pull", NAME)
    assert code == 2
    what = "huggingface_hub is not installed, which this command needs"
    assert err == f"error: {what}; run {install('hub')}\n"
