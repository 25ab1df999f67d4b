"""The tool that trains on a lent GPU: its stages, what stops them, what comes back."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spec_runtime.errors import UserError
from tools.gpu import training as gpu
from tools.training import ablations, train_drafters

RESULTS = [("a", 1.5), ("b", 2.5), ("c", 2.0)]


def write_results(folder: Path) -> None:
    rows = [{"variant": label, "accepted_length": length} for label, length in RESULTS]
    rows.append({"variant": "failed", "error": "ValueError"})
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"variants": rows}))


def test_every_stage_is_a_command_that_its_tool_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools get past their command lines, and stop at the missing data."""
    write_results(tmp_path / "options")
    monkeypatch.setitem(
        ablations.STUDIES,
        "parallelspec_options",
        ablations.Study(gpu.RECIPES / "parallelspec.toml", {label: () for label, _ in RESULTS}),
    )
    options, best, drafters = gpu.stages(tmp_path / "x.jsonl", tmp_path, 3e6, 1e7)
    assert best.command()[-3:] == ["--only", "b", "c"]
    for stage in (options, best):
        _, program, *words = stage.command()
        assert program == "tools.training.ablations"
        assert words[words.index("--out") + 1] == str(stage.folder)
        with pytest.raises(UserError, match=r"x\.jsonl, expected a file of chat rows"):
            ablations.main(words)
    _, program, *words = drafters.command()
    assert program == "tools.training.train_drafters"
    assert all(Path(word).is_file() for word in words[: len(gpu.OTHERS)])
    with pytest.raises(UserError, match=r"x\.jsonl, expected a file of chat rows"):
        train_drafters.main(words)


def test_a_call_stops_in_time_sends_what_has_finished_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stage trains a run of three shards, the second one never ends by itself."""
    work, weights = tmp_path / "work", os.urandom(2500)
    run = work / "options" / "one"
    script = tmp_path / "endless.py"
    script.write_text("import time\ntime.sleep(600)\n")

    def trained() -> list[str]:
        (run / "drafter").mkdir(parents=True, exist_ok=True)
        (run / "drafter" / "drafter.safetensors").write_bytes(weights)
        (run.parent / "results.json").write_text("{}")
        return [str(tmp_path / "nothing.py")]

    (tmp_path / "nothing.py").write_text("")
    found = [
        gpu.Stage("options", work / "options", trained),
        gpu.Stage("drafters", work / "drafters", lambda: [str(script)]),
    ]
    monkeypatch.setattr(gpu, "stages", lambda *_: found)
    monkeypatch.setattr(gpu, "SHARD_BYTES", 4096)
    monkeypatch.setattr(gpu, "MAX_SHARDS", 2)
    monkeypatch.setattr(gpu, "STOP_SECONDS", 1)
    data = tmp_path / "a.jsonl.xz"
    data.write_bytes(lzma.compress(b"1\n2\n3\n"))
    some = gpu.rows_of([data], 2)
    assert some == gpu.rows_of([data], 2) == sorted(some)
    assert len(some) == 2
    words = ["--data", str(data), "--work", str(work), "--minutes", "0.05"]
    shards: dict[str, bytes] = {}
    for call in ("first", "second"):
        assert gpu.main([*words, "--send", str(tmp_path / call)]) == 0
        shards |= {x.name: x.read_bytes() for x in (tmp_path / call).glob("options.one.tar.*")}
    assert (work / "answers.jsonl").read_text() == "1\n2\n3\n"
    said = [line for line in capsys.readouterr().out.splitlines() if "to train" in line]
    assert said == [
        "== to train: drafters; files to send: 1",
        "== to train: drafters; files to send: none",
    ]
    assert sorted(shards) == [f"options.one.tar.0{i}" for i in range(3)]
    whole = b"".join(content for _, content in sorted(shards.items()))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        (member,) = archive.getmembers()
        assert member.name == "options/one/drafter/drafter.safetensors"
        file = archive.extractfile(member)
        assert file is not None
        assert file.read() == weights
