"""Opening a bundle: which drafter, which tokenizer, and what is refused. Graphs are toys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import known
from toy_backend import FEATURE_WIDTH, ToyTarget
from toy_bundle import SCRATCH, write_bundle

import spec_runtime
from spec_runtime.bundle import manifest as bundle
from spec_runtime.errors import UserError
from spec_runtime.loop import answering
from spec_runtime.trees.budget import Budget, Grown, Static

pytestmark = pytest.mark.usefixtures("toy_graphs")

WIDE = {"num_masks": 16, "mask_token_base": 258, "inputs": "tokens"}


def test_the_default_drafter_is_the_first_else_prompt_lookup(tmp_path: Path) -> None:
    assert spec_runtime.load(write_bundle(tmp_path)).drafter == "prompt_lookup"


def test_a_trained_drafter_end_to_end(tmp_path: Path, toy_graphs: list[ToyTarget]) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",))
    engine = spec_runtime.load(folder, threads=1)
    assert engine.drafter == "parallelspec"
    assert engine.budget == Budget(6, growth=Grown(0.04))
    result = engine.generate("hello", max_new_tokens=30)
    assert result.stats.accepted_length > 1.5
    others = {name: engine.with_drafter(name) for name in ("none", "prompt_lookup", None)}
    assert others[None].drafter == "parallelspec"
    for other in others.values():
        assert other.target is engine.target
        assert other.tokenizer is engine.tokenizer
        assert other.generate("hello", max_new_tokens=30).token_ids == result.token_ids
    assert len(toy_graphs) == 1, "the target is opened once"
    assert engine.proposer._rows._backend._feature_width == FEATURE_WIDTH * 2  # type: ignore[attr-defined]


def test_text_goes_in_and_out(tmp_path: Path) -> None:
    engine = spec_runtime.load(write_bundle(tmp_path), "none")
    text = "<user>grüß € 😀</>\n<assistant>"
    ids = engine.encode("grüß € 😀")
    assert len(ids) == len(text.encode())  # not truncated, no BOS of the tokenizer's own
    assert engine.tokenizer.decode([256, *ids, 257]) == text
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    pieces = "".join(engine.stream("grüß", **options))
    result = known(engine.last_result)
    assert pieces == result.text == engine.tokenizer.decode(result.token_ids)


@pytest.mark.parametrize("name", ["nosuch", "None", ""])
def test_an_unknown_drafter_is_refused_before_anything_slow(
    tmp_path: Path, toy_graphs: list[ToyTarget], name: str
) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",))
    known = "parallelspec, prompt_lookup, lookahead, none"
    with pytest.raises(spec_runtime.UnknownDrafterError, match=f"got drafter '{name}'") as caught:
        spec_runtime.load(folder, drafter=name)
    assert not toy_graphs
    assert str(caught.value).endswith(f"expected one of {known}")
    assert ", ".join(caught.value.known) == known
    assert (caught.value.param, caught.value.code) == ("drafter", "unknown_drafter")
    with pytest.raises(spec_runtime.UnknownDrafterError, match=known):
        spec_runtime.load(folder).with_drafter(name)


def test_a_bundle_of_an_older_version_with_a_graph_for_nobody_still_runs(
    tmp_path: Path, toy_graphs: list[ToyTarget]
) -> None:
    """Those of `build --fuse` have a graph that is hashed and no longer opened."""
    folder = write_bundle(tmp_path, ("parallelspec",))
    expected = spec_runtime.load(folder, threads=1).generate("hello", max_new_tokens=30)
    manifest = bundle.read(folder).manifest
    fused = replace(manifest.graphs["target"], file="parallelspec-fused.onnx")
    (folder / fused.file).write_bytes(b"a graph that nobody opens")
    graphs = {**manifest.graphs, "parallelspec-fused": fused}
    bundle.write_manifest(folder, replace(manifest, graphs=graphs))
    assert fused.file in bundle.read(folder).manifest.files
    toy_graphs.clear()
    result = spec_runtime.load(folder, threads=1).generate("hello", max_new_tokens=30)
    assert (result.token_ids, result.stats.steps) == (expected.token_ids, expected.stats.steps)
    assert len(toy_graphs) == 1, "the target's only"


@pytest.mark.parametrize(
    ("changes", "arguments", "why"),
    [
        ({"vocab_size": 300}, {}, "got 258 tokens, expected the manifest's 300"),
        ({"num_logits": 200}, {}, "at most the target's 200"),
        ({"trees": {"nodes": 3}}, {}, "trees: got unknown key 'nodes'; expected keys max_nodes"),
        ({"trees": {"max_nodes": 17}}, {}, "trees of 17 nodes, expected at most .* 16"),
        ({"trees": {"lookup_nodes": -1}}, {}, "trees.lookup_nodes: got int -1, expected 0 or more"),
        ({"trees": {"paths": [[0], 1]}}, {}, "got trees paths .*, expected lists of ranks below"),
        ({"trees": {"paths": [[1, 0]]}}, {}, r"got path \[1, 0\], expected"),
        ({"config": {"num_masks": 3}}, {}, "expected num_masks, mask_token_base, inputs"),
        ({"config": WIDE}, {}, "got 16 masks, expected fewer than the bundle's scratch of 16"),
        ({"drafters": ("from_the_future",)}, {}, "'from_the_future' needs a newer runtime"),
        ({}, {"context": 1}, "got context 1, expected 16 or more"),
        ({}, {"drafter": "none", "lookup": True}, "with drafter none, expected a trained one"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], arguments: dict[str, Any], why: str
) -> None:
    made = {"drafters": ("parallelspec",), **changes}
    with pytest.raises(UserError, match=why):
        spec_runtime.load(write_bundle(tmp_path, **made), **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("threads", value) for value in ("2", 0, -1, 1.5, True)),
        *(("verify", 1), ("verify", None), ("lookup", "yes"), ("profile", "no"), ("strict", 0)),
        *(("drafter", 3), ("backend", None), ("backend", ["cuda"]), ("path", None), ("path", 7)),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(tmp_path: Path, argument: str, value: Any) -> None:
    arguments = {"path": write_bundle(tmp_path), argument: value}
    with pytest.raises(UserError, match=rf"{argument}\b.*, expected") as caught:
        spec_runtime.load(**arguments)
    assert str(value) in str(caught.value)


def test_numpys_number_of_threads_is_taken(tmp_path: Path, toy_graphs: list[ToyTarget]) -> None:
    threads: Any = np.int64(1)
    spec_runtime.load(str(write_bundle(tmp_path)), threads=threads)
    assert toy_graphs


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(bundle.BundleError, match=r"tokenizer\.json"):  # by its hash
        spec_runtime.load(folder)
    with pytest.raises(bundle.BundleError, match="is not a tokenizer"):
        spec_runtime.load(folder, verify=False)


def test_eos_and_bos_reach_the_chat_template(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    engine = spec_runtime.load(folder, "none", verify=False)
    assert known(engine.tokenizer.template).render([{"role": "user", "content": ""}]) == "<s>|</s>"
    assert engine.encode("x") == [256, *engine.tokenizer.encode("|", False), 257]


def test_a_bundle_may_bring_a_static_tree(tmp_path: Path) -> None:
    trees = {"paths": [[0], [1], [0, 0]], "min_probability": 0.5}
    engine = spec_runtime.load(write_bundle(tmp_path, ("parallelspec",), trees=trees))
    assert engine.budget == Budget(4, growth=Static(((0,), (1,), (0, 0))))
    sizes = [
        step.verified.argmax_N.shape[0]
        for step in engine.steps("hello", max_new_tokens=20)
        if step.verified is not None
    ]
    assert set(sizes[:-2]) == {4}


def test_lookup_may_be_merged_into_a_trained_drafters_trees(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",), trees={"max_nodes": 8, "lookup_nodes": 3})
    merged = spec_runtime.load(folder)
    assert merged.drafter == "parallelspec+prompt_lookup"
    alone = merged.with_drafter(None, lookup=False)
    assert alone.drafter == "parallelspec"
    plain = merged.with_drafter("none")
    for prompt in ("hello hello hello", "abcabcab", "x"):
        expected = plain.generate(prompt, max_new_tokens=40).token_ids
        for engine in (merged, alone):
            assert engine.generate(prompt, max_new_tokens=40).token_ids == expected
    assert alone.with_drafter(None).drafter == merged.drafter


@pytest.mark.parametrize(("expected", "num_warnings"), [(None, 0), (2.0, 1)])
def test_only_what_a_bundle_expects_something_of_is_judged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    expected: float | None,
    num_warnings: int,
) -> None:
    """The toy drafter is always right, which is suspicious."""
    monkeypatch.setattr(answering, "JUDGED_STEPS", 8)
    folder = write_bundle(tmp_path, ("parallelspec",), expected=expected)
    loaded = spec_runtime.load(folder)
    engines = [loaded, loaded.with_drafter("prompt_lookup"), loaded.with_drafter("none")]
    for engine in engines:
        engine.generate("ab", max_new_tokens=60, ignore_eos=True)
    assert len(caplog.messages) == num_warnings
    loaded.with_drafter("parallelspec").generate("ab", max_new_tokens=60, ignore_eos=True)
    assert len(caplog.messages) == 2 * num_warnings
    for message in caplog.messages:
        assert message.startswith("drafter parallelspec: all drafted tokens were accepted in ")


def test_lookahead_gets_the_larger_tree_that_it_needs(tmp_path: Path) -> None:
    engine = spec_runtime.load(write_bundle(tmp_path, ("parallelspec",)), "lookahead")
    assert engine.budget == Budget(SCRATCH), "as large as the scratch allows"
    assert engine.with_drafter("prompt_lookup").budget == Budget(12)
