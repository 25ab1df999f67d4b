"""Tests bundles built with each --attention: real graphs of a tiny target give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import fake_ort_cuda as fake  # noqa: E402
from workshop import Workshop  # noqa: E402

import spec_runtime  # noqa: E402
from spec_export import calibrate, check, make_bundle  # noqa: E402
from spec_export import cli as export_cli  # noqa: E402
from spec_export.make_bundle import BuildOptions  # noqa: E402
from spec_runtime import bundle as bundles  # noqa: E402
from spec_runtime.backends import session, shapes  # noqa: E402
from spec_runtime.trees.tree import is_chain  # noqa: E402

# one pass with a cache; level by level, in its own cache and in the target's; without a cache
DRAFTERS = ("parallelspec", "eagle", "skip_layer", "medusa")
PROMPTS = ("say abc, 3", "one two. one two. one", "The quick brown fox; 0123 0123")
OPTIONS: Any = {"max_new_tokens": 60, "ignore_eos": True}


class Bundles:
    """Builds each bundle when it is first asked for."""

    def __init__(self, workshop: Workshop, folder: Path) -> None:
        self._workshop, self._folder = workshop, folder

    def __call__(
        self,
        attention: str,
        precision: str = "fp32",
        drafters: Sequence[str] = DRAFTERS,
        **options: Any,
    ) -> Path:
        out = self._folder / "-".join([attention, precision, *options.values()])
        if not out.exists():
            make_bundle.build(
                BuildOptions(
                    str(self._workshop.llama()),
                    drafter_checkpoints=[self._workshop.drafter(name) for name in drafters],
                    precision=precision,
                    attention=attention,
                    out=out,
                    **options,
                )
            )
        return out


@pytest.fixture(scope="module")
def built(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(workshop, tmp_path_factory.mktemp("attention"))


@pytest.mark.parametrize("attention", ["full_buffer", "chain"])
@pytest.mark.parametrize("name", [*DRAFTERS, "prompt_lookup", "none"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_every_attention_gives_the_tokens_of_plain_decoding_with_a_bias(
    built: Bundles, attention: str, name: str, sampling: dict[str, Any]
) -> None:
    plain = spec_runtime.load(built("bias"), "none", threads=1)
    lookup = False if name in DRAFTERS else None
    engine = spec_runtime.load(built(attention), name, threads=1, lookup=lookup)
    depth, shapes = 0, set()
    for prompt in PROMPTS:
        expected = plain.generate(prompt, **OPTIONS, **sampling).token_ids
        tokens = []
        for step in engine.steps(prompt, **OPTIONS, **sampling):
            tokens += step.tokens
            depth = max(depth, step.num_accepted)
            if step.verified is not None:
                shapes.add(is_chain(step.verified.tree.parent_N))
        assert tokens == expected, prompt
    # a drafter trained for two steps is seldom right with its first guess
    if name in ("prompt_lookup", "skip_layer") or (name != "none" and attention != "chain"):
        assert depth > 0, "no draft was ever right"
    assert shapes == ({True} if attention == "chain" or name == "none" else {True, False})


@pytest.mark.parametrize("attention", ["full_buffer", "chain"])
def test_fp16_and_int8_emit_the_argmax_of_the_row_that_verified_it(
    built: Bundles, attention: str
) -> None:
    for precision in ("fp16", "int8"):
        engine = spec_runtime.load(built(attention, precision, ()), "prompt_lookup", threads=1)
        num_accepted = 0
        for prompt in PROMPTS:
            for step in engine.steps(prompt, **OPTIONS):
                if step.verified is not None:
                    assert step.tokens == step.verified.argmax_N[step.path].tolist()
                    num_accepted += step.num_accepted
        assert num_accepted > 0


def test_the_manifest_says_which_graph_has_which(built: Bundles) -> None:
    for attention in bundles.ATTENTIONS:
        manifest = bundles.read(built(attention)).manifest
        target = manifest.graphs["target"]
        assert (target.form, target.attention) == ("slots", attention)
        others = {"slots": "bias" if attention == "chain" else attention, "stateless": "bias"}
        for drafter in manifest.drafters:
            for graph in drafter.graphs.values():
                assert graph.attention == others[graph.form]
            assert ("lookup_nodes" in drafter.trees) == (attention != "chain")


@pytest.mark.parametrize("attention", ["full_buffer", "chain"])
@pytest.mark.parametrize("name", ["parallelspec", "skip_layer"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_cuda_backend_feeds_each_what_it_reads(
    built: Bundles, monkeypatch: pytest.MonkeyPatch, attention: str, name: str, cuda_graphs: bool
) -> None:
    """A fake device that computes on the CPU gives the same tokens; masks are whole, or absent."""
    folder = built(attention, "fp16", ("parallelspec", "skip_layer"), device="cuda")
    expected = spec_runtime.load(folder, name, threads=1, lookup=False)
    tokens = [expected.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS]
    device = fake.install(monkeypatch)
    monkeypatch.setattr(shapes, "MIN_MASK", 16)
    engine = spec_runtime.load(
        folder, name, threads=1, lookup=False, backend="cuda", cuda_graphs=cuda_graphs
    )
    assert [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS] == tokens
    graphs = [shapes for shapes in device.shapes if "feature_rows" not in shapes]
    widths = {shapes["mask"][3] if "mask" in shapes else None for shapes in graphs}
    capacity = engine.target._cache.capacity
    if attention == "full_buffer":
        assert widths == {capacity}
    else:
        assert None in widths
        assert (len(widths) > 2) == (name == "skip_layer"), "its own graph has a mask, cut"
    settings = [
        {key: value for key, value in each.items() if "graph" not in key and key != "use_tf32"}
        for each in device.settings
    ]
    assert settings == [{"sdpa_kernel": "16"} if attention == "full_buffer" else {}] * len(settings)


@pytest.mark.parametrize("attention", ["full_buffer", "chain"])
def test_check_passes(
    workshop: Workshop, built: Bundles, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = check.run(str(workshop.llama()), built(attention), [])
    assert [row.name for row in rows if not row.passed or row.skipped] == []
    names = {row.name for row in rows}
    assert ("random trees" in names) == ("permuted slots" in names) == (attention != "chain")
    assert "perplexity ratio" in names
    assert f"accepted, {DRAFTERS[0]}" in names


def test_calibration_is_refused_for_chains(built: Bundles) -> None:
    before = (built("chain") / bundles.MANIFEST).read_bytes()
    with pytest.raises(ValueError, match="was built with --attention chain, expected another one"):
        calibrate.run(built("chain"))
    assert (built("chain") / bundles.MANIFEST).read_bytes() == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attention": "flash"}, "got attention 'flash', expected one of bias, full_buffer, chain"),
        (
            {"attention": "chain", "form": "contiguous"},
            "got attention chain with the contiguous form, expected bias: only the slots form",
        ),
        (
            {"attention": "full_buffer", "backend": "tensorrt"},
            "got attention full_buffer with the contiguous form, expected bias",
        ),
        ({"attention": "chain", "fuse": True}, "got fuse with attention chain, expected bias"),
        (
            {"attention": "full_buffer", "fuse": True},
            "got fuse with attention full_buffer, expected",
        ),
        (
            {"attention": "chain", "device": "cuda", "precision": "fp32"},
            "got attention chain with the contiguous form, expected bias",
        ),
    ],
)
def test_what_build_refuses(
    workshop: Workshop, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        make_bundle.build(BuildOptions(str(workshop.llama()), out=tmp_path / "out", **options))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_line(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", "--model", str(workshop.llama()), "--out", str(tmp_path / "out")]
    for arguments, in_message in (
        (["--attention", "flash"], "flash"),
        (["--attention", "chain", "--form", "contiguous"], "got attention chain with the cont"),
    ):
        with pytest.raises(SystemExit) as end:
            export_cli.main([*command, *arguments])
        assert end.value.code == 2
        assert in_message in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        export_cli.main([*command, "--attention", "chain"])
    assert not end.value.code
    assert bundles.read(tmp_path / "out").manifest.graphs["target"].attention == "chain"


def test_rows_below_the_mark_are_those_written(built: Bundles) -> None:
    """With a chain target and with a mask, generating leaves the same rows in the cache."""
    caches = []
    for attention in ("bias", "chain"):
        engine = spec_runtime.load(built(attention), "none", threads=1)
        engine.generate(PROMPTS[0], **OPTIONS)
        length, backend = engine.target.length, engine.target._backend
        assert isinstance(backend, session.OrtBackend)
        rows = [np.array(value.numpy())[:, :, :length] for value in backend.buffers.values()]
        caches.append(np.stack(rows))
    assert np.abs(caches[0] - caches[1]).max() <= 1e-4 * np.abs(caches[0]).max()
