"""The tool that decodes with a drafter's first masks: that they guess as they did, and its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import mask_speed
import torch
from workshop import FluentWorkshop

from spec_export import target
from spec_export.bundling.drafters import load_module
from spec_export.decoder import Backbone
from spec_export.training.batches import Batch
from spec_export.training.checkpoint import load_drafter
from spec_runtime.measure import bench


def test_the_first_masks_read_nothing_of_those_behind_them(fluent: FluentWorkshop) -> None:
    saved = load_drafter(fluent.drafter("parallelspec"))
    model, _ = target.load(target.resolve(str(fluent.llama())))
    backbone = Backbone.from_transformers(model, (), 64)
    count = mask_speed.num_masks(saved)
    assert count > 1
    torch.manual_seed(0)
    token_BT = torch.randint(0, 90, (2, 9))
    anchor_BA = torch.tensor([[0, 3, 5], [2, 4, 7]])
    rows = {}
    for masks in (1, count):
        drafter = load_module(mask_speed.first_masks(saved, masks), backbone)
        torch.manual_seed(1)
        features = torch.randn(2, 9, drafter.num_features * 64)
        batch = Batch(
            token_BT, torch.ones_like(token_BT, dtype=torch.bool), features, torch.tensor([9, 9])
        )
        with torch.no_grad():
            x_ND, attended_ND = drafter.attended_rows(batch, anchor_BA)
        own = torch.cat((x_ND, attended_ND), -1)[-6 * masks :]
        rows[masks] = own.unflatten(0, (6, masks))
    assert torch.allclose(rows[1], rows[count][:, :1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rows[count][:, :1], rows[count][:, 1:2], rtol=0.01, atol=0.01)


def test_every_number_of_masks_has_a_row_for_each_size(
    fluent: FluentWorkshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"say {text}", "category": text} for text in ("abc, 3", "xyz")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drafter = fluent.drafter("parallelspec")
    paths = {"drafter": drafter, "model": fluent.llama(), "prompts": prompts}
    paths |= {"bundles": tmp_path / "bundles", "json": tmp_path / "masks.json"}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    words += ["--nodes", "2", "6", "--max-new-tokens", "12", "--threads", "1"]
    mask_speed.main(words)
    found = json.loads((tmp_path / "masks.json").read_text())
    most = mask_speed.num_masks(load_drafter(drafter))
    keys = [(row["masks"], row["size"]) for row in found["rows"]]
    assert keys == [(masks, size) for masks in range(1, most + 1) for size in (2, 6)]
    lengths = {key: row["accepted_length"] for key, row in zip(keys, found["rows"], strict=True)}
    assert lengths[1, 6] <= 3, "a step has at most two guesses and the target's own token"
    assert lengths[most, 6] > lengths[1, 6]
    for row in found["rows"]:
        assert (row["prompts"], row["identical"]) == (2, 1.0), "not what plain decoding writes"
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(keys)

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(bench, "run", never)
    mask_speed.main(words)
    assert json.loads((tmp_path / "masks.json").read_text())["rows"] == found["rows"]


@pytest.mark.parametrize(
    ("drafter", "file", "message"),
    [
        ("medusa", "prompts.jsonl", "a medusa drafter without masks, expected ParallelSpec's"),
        ("parallelspec", "other.jsonl", "No such file or directory"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    drafter: str,
    file: str,
    message: str,
    fluent: FluentWorkshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say abc"}\n')
    words = ["--drafter", str(fluent.drafter(drafter)), "--model", str(fluent.llama())]
    words += ["--prompts", str(tmp_path / file), "--bundles", str(tmp_path / "bundles")]
    with pytest.raises(SystemExit) as stop:
        mask_speed.main([*words, "--json", str(tmp_path / "masks.json")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bundles").exists()
