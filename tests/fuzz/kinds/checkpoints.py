"""Drafters and training checkpoints: changed headers and damaged tensors whose hashes are right."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


def cases() -> SearchStrategy[Any]:
    what = st.sampled_from(("drafter", "training"))
    return st.one_of(
        st.fixed_dictionaries({"what": what, "edits": mutations.edits()}),
        st.fixed_dictionaries(
            {
                "what": what,
                "damage": mutations.damages(),
                "file": st.integers(0, 2),
                "rehash": st.booleans(),
            }
        ),
        st.fixed_dictionaries(
            {"what": what, "tensors": mutations.edits(), "rehash": st.just(True)}
        ),
        st.fixed_dictionaries({"what": what, "text": mutations.damages()}),
    )


def open_kind(folder: Path) -> Run:
    import torch

    from spec_export.training import checkpoint

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    average = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    wholes = {
        "drafter": checkpoint.save_drafter(
            folder / "drafter", module.state_dict(), "medusa", {"x": 1}, {"date": "today"}, None
        ),
        "training": checkpoint.save(
            folder / "run",
            3,
            module,
            optimizer,
            progress={"curve": []},
            provenance={},
            keep=1,
            average=average,
        ),
    }
    right = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def run(case: dict[str, Any]) -> None:
        whole = wholes[case["what"]]
        place = folder / "changed" / whole.name
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(whole, place)
        is_altered = _change(place, case)
        with refusing():
            if case["what"] == "drafter":
                checkpoint.load_drafter(place).load_into(module)
            else:
                found = checkpoint.latest(place.parent)
                if found != place:
                    raise ValueError(f"got {found}, expected a checkpoint")
                checkpoint.load(place, module, optimizer, average)
        if is_altered:
            raise Wrong("an altered file has passed though its hash differs")

    def run_and_restore(case: dict[str, Any]) -> None:
        try:
            run(case)
        finally:
            module.load_state_dict(right)
            optimizer.state.clear()

    return run_and_restore


def _change(place: Path, case: dict[str, Any]) -> bool:
    """Changes the folder; returns whether a file no longer has the hash that the header says."""
    header_file = next(place.glob("*.json"))
    header = json.loads(header_file.read_text())
    names = sorted(header["files"])
    if "text" in case:
        header_file.write_bytes(mutations.damaged(header_file.read_bytes(), case["text"]))
        return False
    if "edits" in case:
        header_file.write_text(mutations.dump(mutations.edited(header, case["edits"])))
        return False
    file = place / (names[case.get("file", 0) % len(names)])
    content = old = file.read_bytes()
    if "tensors" in case:
        content = _with_header(old, case["tensors"])
    else:
        content = mutations.damaged(old, case["damage"])
    file.write_bytes(content)
    if case["rehash"]:
        header["files"][file.name] = hashlib.sha256(content).hexdigest()
        header_file.write_text(json.dumps(header))
        return False
    return content != old


def _with_header(content: bytes, edits: list[dict[str, Any]]) -> bytes:
    """Returns a safetensors file with its JSON header changed and its length set right."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    changed = mutations.dump(mutations.edited(header, edits)).encode()
    return len(changed).to_bytes(8, "little") + changed + content[8 + size :]


KIND = Kind("checkpoint", cases, open_kind, weight=8)
