"""Damaged files of a bundle: with hashes checked none passes, without them nothing crashes."""

from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kinds.manifests import generate_as_plain

FILES = (
    "chat_template.jinja",
    "drafters/medusa/drafter.onnx",
    "drafters/parallelspec/drafter.onnx",
    "target/target.onnx",
    "tokenizer.json",
)


def cases() -> SearchStrategy[Any]:
    """Draws cases. Without hashes only what the project reads itself is damaged: ONNX Runtime
    trusts the weights and shapes of a model that it has parsed, see the reliability page."""
    with_hashes = {
        "file": st.sampled_from(FILES),
        "damage": mutations.damages(),
        "verify": st.just(True),
    }
    without = with_hashes | {
        "file": st.sampled_from(("chat_template.jinja", "tokenizer.json")),
        "verify": st.just(False),
    }
    return st.fixed_dictionaries(with_hashes) | st.fixed_dictionaries(without)


def open_kind(folder: Path) -> Run:
    from tiny_bundle import Copy

    import spec_runtime

    copy = Copy(folder)

    def run(case: dict[str, Any]) -> None:
        name, is_checked = case["file"], case["verify"]
        whole = (copy.whole / name).read_bytes()
        content = mutations.damaged(whole, case["damage"])
        (copy.folder / name).write_bytes(content)
        drafter = "medusa" if "medusa" in name else "parallelspec"
        try:
            if not is_checked or content == whole:
                generate_as_plain(copy.folder, drafter, is_checked)
                with refusing():
                    engine = spec_runtime.load(copy.folder, "none", verify=is_checked)
                    engine.generate("hello", max_new_tokens=3)
                return
            try:
                with refusing():
                    spec_runtime.load(copy.folder, drafter)
            except Refused as refused:
                if "sha256" not in str(refused):
                    raise Wrong(f"refused for another reason: {refused}") from refused
                raise
            raise Wrong("a damaged file has passed")
        finally:
            (copy.folder / name).write_bytes(whole)

    return run


KIND = Kind("damaged file", cases, open_kind, weight=14)
