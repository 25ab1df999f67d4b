"""Folders to build into: other people's files survive, whatever stands there and however it ends.

The model is never loaded: a build that gets so far is interrupted there.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NAMES = ("manifest.json", "notes.txt", "target/target.onnx", "a/b", ".hidden", "tokenizer.json")
FOREIGN = "somebody's own text"


def contents() -> SearchStrategy[dict[str, Any]]:
    """Draws what stands in a folder: nothing, a bundle, other files, links; or no folder at all."""
    files = st.dictionaries(
        st.sampled_from(NAMES), st.sampled_from((FOREIGN, "", "{}", '{"name": "app"}')), max_size=3
    )
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(
                ("none", "folder", "folder", "bundle", "bundle", "link", "file")
            ),
            "files": files,
        }
    )


def fill(out: Path, what: dict[str, Any]) -> None:
    """Makes `out` what the case says."""
    for old in (out, out.with_name("elsewhere")):
        if old.is_symlink() or old.is_file():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)
    if what["kind"] == "file":
        out.write_text(FOREIGN)
        return
    folder = out
    if what["kind"] == "link":
        folder = out.with_name("elsewhere")
        folder.mkdir()
        out.symlink_to(folder)
    if what["kind"] == "none":
        return
    folder.mkdir(exist_ok=True)
    if what["kind"] == "bundle":
        from small import write_small_bundle

        write_small_bundle(folder)
    for name, text in what["files"].items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def snapshot(out: Path) -> dict[str, str]:
    """Returns every path at and below `out` and beside it, with its content."""
    found = {}
    for root in (out, out.with_name("elsewhere")):
        if root.is_symlink():
            found[root.name] = f"link to {os.readlink(root)}"
        elif root.is_file():
            found[root.name] = root.read_text()
        for file in sorted(root.rglob("*")):
            is_file = file.is_file() and not file.is_symlink()
            found[f"{root.name}/{file.relative_to(root)}"] = file.read_text() if is_file else "-"
    return found


def cases() -> SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "out": contents(),
            "ends": st.sampled_from(("well", "well", "by an error", "by Ctrl-C")),
            "place": st.sampled_from(
                ("out", "out", "out", "out/", "./out", ".", "out/inner", "..")
            ),
        }
    )


def open_kind(folder: Path) -> Run:
    from spec_export.build import make_bundle
    from spec_export.build.make_bundle import BuildOptions

    room = folder / "room"
    room.mkdir(parents=True)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    class Loaded(Exception):
        pass

    def run(case: dict[str, Any]) -> None:
        out = room / "out"
        fill(out, case["out"])
        (room / "neighbour").write_text(FOREIGN)
        os.chdir(room)
        before = snapshot(out)

        def load(source: Any) -> Any:
            if case["ends"] == "by Ctrl-C":
                raise KeyboardInterrupt
            raise Loaded

        # a bundle of one's own may be replaced, so a build may get as far as loading its model
        real = make_bundle.target.open_weights
        make_bundle.target.open_weights = load  # type: ignore[assignment]
        try:
            with refusing():
                make_bundle.build(
                    BuildOptions(str(model), ["prompt_lookup"], out=Path(case["place"]))
                )
        except (Loaded, KeyboardInterrupt):
            pass
        except Refused:
            if snapshot(out) != before:
                raise Wrong("a refused build has changed its folder") from None
            raise
        finally:
            make_bundle.target.open_weights = real
            litter = {path.name for path in room.iterdir()} - {"out", "elsewhere", "neighbour"}
        if snapshot(out) != before or (room / "neighbour").read_text() != FOREIGN:
            raise Wrong("a build that failed has changed its folder")
        if case["out"]["kind"] != "none" and case["place"] in ("out", "out/", "./out"):
            _require_ours(out, case)
        if litter:
            raise Wrong(f"a build that failed has left something: {sorted(litter)}")

    return run


def _require_ours(out: Path, case: dict[str, Any]) -> None:
    """Raises Wrong if a build would go on to replace a folder that holds other people's files."""
    if not out.is_dir() or out.is_symlink():
        raise Wrong(f"a build goes on with a {case['out']['kind']} in its place")
    own = set()
    if case["out"]["kind"] == "bundle" and "manifest.json" not in case["out"]["files"]:
        own = {"manifest.json", *json.loads((out / "manifest.json").read_text())["files"]}
    foreign = sorted(
        name
        for file in out.rglob("*")
        if file.is_file() and (name := str(file.relative_to(out))) not in own
    )
    if foreign:
        raise Wrong(f"a build goes on to replace other people's files: {foreign}")


KIND = Kind("out folder", cases, open_kind, weight=6, megabytes=2048)
