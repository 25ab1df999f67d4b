"""Imports EAGLE-3 and P-EAGLE drafters as their libraries write them, and refuses others."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from importing import Lines, backbone_of, require_refused, write
from lossless import require_lossless
from module_and_graph import guesses_of
from published_eagle3 import Published, published_state
from tiny_gguf import write_model
from tiny_target import save_llama, teach
from workshop import WORDS

from spec_export.build import make_bundle
from spec_export.build.drafters import load_module
from spec_export.build.make_bundle import BuildOptions
from spec_export.cli import main
from spec_export.drafters import eagle3, peagle
from spec_export.imports.drafters import exporter as export_drafter
from spec_export.imports.drafters import importer
from spec_export.imports.drafters.eagle3 import _Settings as Settings
from spec_export.imports.drafters.folder import ForeignFolder, Reading
from spec_export.imports.drafters.importer import Overrides, run
from spec_export.imports.drafters.parts import rotary_parameters, take_head
from spec_export.model import target
from spec_export.model.decoder import Backbone
from spec_export.model.hidden_states import features_and_taps
from spec_export.training.checkpoint import load_drafter
from spec_runtime.errors import UserError

N, VOCAB = 8, 98  # layers and tokens of the target
IDS = torch.arange(0, VOCAB, 2)  # the draft vocabulary
THETA = 300.0
SLIDING = ["sliding_attention"]
LAYER: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "hidden_act": "silu"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
}
OFFSETS = {"d2t": IDS - torch.arange(len(IDS)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
OFFSETS["t2d"][IDS] = True


MODELOPT = {  # as its exports name them
    **{"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
    **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
    **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
    "parallel_draft_heads_num_layers": 1,
}


def midlayer(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}


def gguf_tensors(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns tensors as llama.cpp writes them: by its names, with both halves of a rotation side
    by side, and ids in d2t."""
    found = {"d2t": IDS.numpy()}
    for line in GGUF_NAMES.split():
        theirs, _, name = line.partition("=")
        values = state[f"{name}.weight"].detach().numpy()
        heads = {"blk.0.attn_q": 4, "blk.0.attn_k": 2}.get(theirs)
        if heads:
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        found[f"{theirs}.weight"] = values
    return found


GGUF_NAMES = """
fc=fc output_norm=norm output=lm_head
blk.0.attn_norm=layers.0.input_layernorm blk.0.attn_norm_2=layers.0.hidden_norm
blk.0.attn_q=layers.0.self_attn.q_proj blk.0.attn_k=layers.0.self_attn.k_proj
blk.0.attn_v=layers.0.self_attn.v_proj blk.0.attn_output=layers.0.self_attn.o_proj
blk.0.ffn_norm=layers.0.post_attention_layernorm blk.0.ffn_gate=layers.0.mlp.gate_proj
blk.0.ffn_up=layers.0.mlp.up_proj blk.0.ffn_down=layers.0.mlp.down_proj
"""
GGUF_KEYS: dict[str, Any] = {
    **{"embedding_length": 32, "block_count": 1, "attention.head_count": 4},
    **{"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8},
    **{"rope.freq_base": THETA, "norm_before_residual": True, "target_hidden_size": 32},
    "extract_layers": [1, N // 2 - 1, N - 4],  # in a config they would be layers' outputs
}

# A config as the library writes it, what our drafter is, and how its tensors are written.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "EAGLE": (
        LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)},
        {"rope": {"rope_theta": 10000.0}},  # the base of a config without one
        lambda state: midlayer(state) | OFFSETS,
    ),
    "speculators": (
        {
            "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": [1, 4, N],
            **{"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
            "transformer_layer_config": LAYER
            | {"model_type": "qwen3", "rope_parameters": {"rope_theta": THETA}, "head_dim": 8}
            | {"num_hidden_layers": 1, "layer_types": SLIDING, "sliding_window": 5}
            | {"use_sliding_window": True},
        },
        {
            **{"taps": (1, 4, N), "norm_before_residual": True, "norm_before_fc": True},
            **{"norm_output": True, "qk_norms": True, "own_embedding": True},
            **{"sliding_layers": (0,), "window": 5},
        },
        lambda state: state | OFFSETS,
    ),
    "ModelOpt": (
        LAYER | {"rope_theta": THETA, "eagle_config": MODELOPT},
        {"taps": (1, 3, 5)},
        lambda state: state | {"d2t": OFFSETS["d2t"]},
    ),
    "SpecForge": (
        LAYER
        | {"rope_theta": THETA, "eagle_config": {"fc_norm": True}, "target_hidden_size": 32}
        | {"model_type": "qwen2", "torch_dtype": "bfloat16", "target_model_type": "qwen2"}
        | {"layer_types": SLIDING, "sliding_window": 4},
        {"fc_norm": True, "sliding_layers": (0,), "window": 4},
        lambda state: midlayer(state) | OFFSETS,
    ),
    "AngelSlim": (
        LAYER
        | {"rope_theta": THETA, "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 16}
        | {"tie_word_embeddings": True},
        {"head_dim": 16},
        lambda state: midlayer(state) | {"d2t": IDS},
    ),
    "DeepSpec": (
        LAYER | {"rope_theta": THETA, "target_layer_ids": [-1, 1, 2, 3, 7], "model_type": "qwen3"},
        {"taps": (0, 2, 3, 4, N), "qk_norms": True, "own_embedding": True},
        lambda state: state | OFFSETS,
    ),
    "GGUF": (
        GGUF_KEYS,
        {"taps": (1, N // 2 - 1, N - 4), "norm_before_residual": True},
        gguf_tensors,
    ),
    "GGUF of today": (
        GGUF_KEYS | {"extract_layers": None, "target_layers": [1, 4, N], "norm_before_fc": True},
        {"taps": (1, 4, N), "norm_before_residual": True, "norm_before_fc": True},
        lambda state: (
            gguf_tensors(state)
            | {"enc.output_norm.weight": state["input_norm.weight"].detach().numpy()}
        ),
    ),
}


GRAPHS = ("speculators", "GGUF")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("import") / "llama", num_hidden_layers=N)
    return teach(folder, WORDS[:2], num_steps=15)


def random_drafter(backbone: Backbone, options: dict[str, Any]) -> eagle3.Drafter:
    known: dict[str, Any] = {
        "taps": (2, N // 2, N - 3),
        "rope": {"rope_theta": THETA},
        "norm_eps": 1e-5,
    }
    torch.manual_seed(3)
    drafter = eagle3.Drafter(eagle3.Config(**known | options), target.ends(backbone), IDS)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


PEAGLE: dict[str, Any] = {
    **{"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]},
    **{"mask_token_id": 9, "draft_vocab_size": len(IDS), "embed_requires_grad": True},
    **{"norm_before_fc": True, "norm_output": True, "fc_norm": False},
    "eagle_aux_hidden_state_layer_ids": [1, 4, N],
    "speculators_config": {
        "algorithm": "peagle",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
    },
    "transformer_layer_config": LAYER
    | {"num_hidden_layers": 2, "rope_parameters": {"rope_theta": THETA}, "head_dim": 8}
    | {"layer_types": [*SLIDING, "full_attention"], "sliding_window": 5},
}


def write_peagle(folder: Path, llama: Path) -> tuple[Path, peagle.Drafter]:
    """Returns a folder as speculators writes it, and the drafter that is in it."""
    torch.manual_seed(4)
    config = peagle.Config(
        taps=(1, 4, N), layers=2, num_masks=3, mask_token_id=9, norm_before_fc=True,
        own_embedding=True, rope={"rope_theta": THETA}, norm_eps=1e-5,
        sliding_layers=(0,), window=5,
    )  # fmt: skip
    drafter = peagle.Drafter(config, target.ends(backbone_of(llama)[1]), IDS)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return write(folder, PEAGLE, published_state(drafter) | OFFSETS), drafter


def write_format(folder: Path, name: str, llama: Path) -> tuple[Path, eagle3.Drafter]:
    """Returns a folder or file of this format, and the drafter that is in it."""
    config, options, tensors_of = FORMATS[name]
    drafter = random_drafter(backbone_of(llama)[1], options)
    state = published_state(drafter)
    if not drafter.config.own_embedding:
        del state["embed_tokens.weight"]
    if name.startswith("GGUF"):
        path = folder / "gguf.gguf"
        write_model(path, "eagle3", tensors_of(state), config)
        return path, drafter
    return write(folder / name, config, tensors_of(state)), drafter


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_drafter_guesses_as_its_library_says(name: str, llama: Path, tmp_path: Path) -> None:
    """Levels 0 to 2 of what was imported, as module and, of some, as graph, against the published
    forward pass on the weights as they were written, within 1e-4; the importer knows nothing but
    the files."""
    folder, drafter = write_format(tmp_path, name, llama)
    report = Lines()
    saved = load_drafter(
        run(str(folder), str(llama), tmp_path / "out", report=report, is_measured=False)
    )
    assert report.lines[0].startswith(f"{folder.stem.lower()}: {name.split()[0]}'s eagle3; ")
    hf_model, backbone = backbone_of(llama)
    module = load_module(saved, backbone.config, target.ends(backbone))
    assert module.config.taps == drafter.config.taps
    assert module.draft_token_ids.tolist() == IDS.tolist()
    token_T = torch.arange(3, 15) * 7 % VOCAB
    assert drafter.config.rope is not None
    published = Published(drafter, drafter.config.rope["rope_theta"])
    with torch.no_grad():
        _, *taps = features_and_taps(hf_model.model, token_T[None], module.config.taps)
        fused = published.fused([tap[0] for tap in taps])
        rows = [published.levels(fused[: t + 1], token_T.tolist(), 3) for t in range(8)]
        expected_RKV = torch.stack([torch.stack([published.log_q(x) for x in row]) for row in rows])
    fuses = name == "speculators"  # in the target's graph; that of the other reads the taps
    tap_TF = None if fuses else torch.cat(taps, -1)[0]
    guesses = guesses_of(module, hf_model, token_T, tmp_path / "graphs", 3, tap_TF, fuses)
    for ids, log_probs, _ in itertools.islice(guesses, 2 if name in GRAPHS else 1):
        require_near(ids[:8, :3], log_probs[:8, :3], expected_RKV)


def require_near(ids: torch.Tensor, log_probs: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares guesses of the whole draft vocabulary with log-probabilities in its order."""
    of_ids = expected.gather(-1, torch.searchsorted(IDS, ids.contiguous()))
    torch.testing.assert_close(log_probs, of_ids, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "trained", "qwen3", "peagle"])
def test_what_speculators_wrote_guesses_as_speculators_does(
    name: str, llama: Path, tmp_path: Path
) -> None:
    """Files and logits are of the library itself, see written_by_speculators/write.py: levels 0 to
    2 of the module, and of two graphs, within 1e-4, where its rows still read true tokens, or
    P-EAGLE's guesses."""
    folder = Path(__file__).parent / "written_by_speculators" / name
    out = run(str(folder), str(llama), tmp_path / "out", is_measured=False)
    hf_model, backbone = backbone_of(llama)
    module = load_module(load_drafter(out), backbone.config, target.ends(backbone))
    golden = np.load(folder / "golden.npz")
    token_T, states_TF = (torch.from_numpy(golden[key]) for key in ("tokens", "states"))
    tap_TF = torch.nn.functional.pad(states_TF, (0, 0, 0, 1))
    expected_KRV = torch.log_softmax(torch.from_numpy(golden["logits"]), -1)
    num_levels = 1 if name == "peagle" else 3
    guesses = guesses_of(module, hf_model, token_T, tmp_path / "graphs", num_levels, tap_TF)
    for ids, log_probs, _ in itertools.islice(guesses, 2 if name in ("qwen3", "peagle") else 1):
        for k in range(3):
            rows = slice(0, len(token_T) - max(num_levels, k + 1))
            require_near(ids[rows, k], log_probs[rows, k], expected_KRV[k, rows])


def test_a_drafter_with_masks_guesses_as_published(llama: Path, tmp_path: Path) -> None:
    """All guesses of what was imported against the published forward pass, within 1e-4. For the
    graph see test_drafter_graphs.py."""
    folder, drafter = write_peagle(tmp_path / "x", llama)
    report = Lines()
    out = run(str(folder), str(llama), tmp_path / "out", report=report, is_measured=False)
    assert report.lines[0].startswith("x: speculators's peagle; ")
    assert report.warnings == []
    hf_model, backbone = backbone_of(llama)
    module = load_module(load_drafter(out), backbone.config, target.ends(backbone))
    assert module.config.num_guesses == 4
    token_T = torch.arange(3, 15) * 7 % VOCAB
    published = Published(drafter, THETA)
    with torch.no_grad():
        _, *taps = features_and_taps(hf_model.model, token_T[None], module.config.taps)
        fused = published.fused([tap[0] for tap in taps])
        rows = [published.group(fused[: t + 1], token_T.tolist(), 3) for t in range(11)]
        expected_RKV = torch.stack([published.log_q(row) for row in rows])
    ids, log_probs, _ = next(guesses_of(module, hf_model, token_T, tmp_path / "graphs"))
    require_near(ids, log_probs, expected_RKV)


PEAGLE_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no masks": ({}, {"mask_hidden": None}, "'peagle' without weights mask_hidden, expected"),
    "masks of other taps": (
        {}, {"mask_hidden": torch.ones(1, 1, 64)}, r"mask_hidden of shape \[1, 1, 64\], expected",
    ),
    "no mask token": ({"mask_token_id": None}, {}, "got mask_token_id None in the config"),
    "a mask token of nobody": (
        {"mask_token_id": VOCAB}, {}, f"got mask_token_id {VOCAB}, expected one of the target's",
    ),
    "no number of guesses": ({"speculators_config": {}}, {}, "got speculative_tokens None in the"),
    "another tensor": ({}, {"mask_bias": torch.ones(1)}, "got mask_bias, which no drafter"),
    "an unknown key": ({"residual_scale": 0.5}, {}, "got residual_scale 0.5 in the config, a key"),
    "a window in the group": (
        {"transformer_layer_config": PEAGLE["transformer_layer_config"] | {"sliding_window": 3}},
        {}, "got sliding_window 3 in the config, expected 4 positions or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PEAGLE_REFUSED)
def test_other_drafters_with_masks_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    config, tensors, message = PEAGLE_REFUSED[case]
    _, drafter = write_peagle(tmp_path / "right", llama)
    whole = published_state(drafter) | OFFSETS | tensors
    kept = {name: tensor for name, tensor in whole.items() if tensor is not None}
    folder = write(tmp_path / "x", PEAGLE | config, kept)
    require_refused(folder, llama, tmp_path / "out", message)


def test_what_a_drafter_leaves_undecided_only_is_decided(llama: Path, tmp_path: Path) -> None:
    """Masks leave nothing to decide about outputs, and rows of pairs have no alignment."""
    for folder, given, message in (
        (
            write_peagle(tmp_path / "x", llama)[0],
            Overrides(norm_output=True),
            "norm-output .*P-EAG",
        ),
        (
            write_format(tmp_path, "EAGLE", llama)[0],
            Overrides(alignment="anchor"),
            "alignment .*EAG",
        ),
    ):
        with pytest.raises(UserError, match=f"got --{message}.*, expected"):
            run(str(folder), str(llama), tmp_path / "out", given)


@pytest.mark.slow
def test_imported_drafters_change_no_token(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build imports and measures them itself, beside an int8 target."""
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    folders = [
        write_format(tmp_path, "speculators", llama)[0],
        write_peagle(tmp_path / "x", llama)[0],
    ]
    options: Any = {"model": str(llama), "drafter_checkpoints": folders, "precision": "int8"}
    bundle = make_bundle.build(BuildOptions(out=tmp_path / "bundle", lanes=1, **options))
    require_lossless(bundle, ["eagle3", "peagle"])


@pytest.mark.slow
def test_a_wrong_tap_is_found_and_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter reads taps only, and has learnt the measured answers by heart."""
    hf_model, backbone = backbone_of(llama)
    _, tokenizer = target.load(target.resolve(str(llama)))
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1", "say one two. 3"))
    drafter = random_drafter(backbone, {"taps": (1, 4, 6), "fc_norm": True, "ttt_steps": 2})
    answers = []
    for answer in importer._answers(hf_model, tokenizer):
        with torch.no_grad():
            states = features_and_taps(hf_model.model, answer.token_BT, drafter.config.taps)
        answers.append(dataclasses.replace(answer, feature_BTF=torch.cat(states, -1)))
    drafter.layers[0].token_norm.requires_grad_(False).zero_()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for step in range(100):
        optimizer.zero_grad()
        loss, _ = drafter.loss(answers[step % len(answers)])
        loss.backward()
        optimizer.step()
    monkeypatch.setattr(importer, "POOR", 99.0)
    state = published_state(drafter)
    del state["embed_tokens.weight"]
    said, length = {}, {}
    for taps in ("1,4,6", "2,5,7"):
        ids = [int(tap) for tap in taps.split(",")]
        config = LAYER | {"rope_theta": THETA, "eagle_aux_hidden_state_layer_ids": ids}
        folder = write(tmp_path / taps, config, midlayer(state) | OFFSETS)
        given = ["import", str(folder), "--target", str(llama), "--out"]
        with pytest.raises(SystemExit) as end:
            main([*given, str(tmp_path / f"out {taps}")])
        assert not end.value.code
        said[taps] = capsys.readouterr().err
        length[taps] = float(
            said[taps].split("accepted length of its chains on 2 answers: ")[1][:4]
        )
    assert "no other reading is better: was it trained for this target?" in said["1,4,6"]
    assert re.findall(r"--taps 1,4,6 +│ +(\S+)", said["2,5,7"]) == [f"{length['1,4,6']:.2f}"]
    assert "the best reading is another one: import it again with --taps 1,4,6" in said["2,5,7"]
    with pytest.raises(SystemExit) as end:
        main([*given, str(tmp_path / "mended"), "--taps", "1,4,6"])
    assert not end.value.code
    imported = load_drafter(tmp_path / "mended").provenance["imported"]
    assert imported["chain_length"] == pytest.approx(length["1,4,6"], abs=0.01)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another kind of speculators": (
        {"speculators_model_type": "mlp"}, {}, "got speculators_model_type 'mlp'",
    ),
    "PARD-2": (
        {"pard_token": 5, "pard2": True}, {}, "got pard2 in the config, a drafter of PARD-2, expec",
    ),
    "masks of another library": ({}, {"mask_hidden": torch.ones(1)}, "None with weights mask_hid"),
    "ModelOpt's heads": ({}, {"parallel_draft_heads.0.x": torch.ones(1)}, "parallel heads"),
    "a tensor": ({}, {"layers.0.gate.weight": torch.ones(1)}, r"got layers\.0\.gate\.weight"),
    "biases": ({"attention_bias": True}, {}, "got attention_bias True in the config, expected Fal"),
    "no taps": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "got use_aux_hidden_state"),
    "an unknown switch": ({"eagle_config": {"spin": 2}}, {}, r"got eagle_config\.spin 2"),
    "an unknown key": ({"residual_scale": 0.5}, {}, "got residual_scale 0.5 in the config, a key"),
    "an unknown key of the layer": (
        {"transformer_layer_config": LAYER | {"logit_scale": 2.0}}, {}, "got logit_scale 2.0 in",
    ),
    "another family": ({"model_type": "kimi_k2"}, {}, "got model_type 'kimi_k2'"),
    "windows without a width": ({"layer_types": SLIDING}, {}, "got sliding_window None in the"),
    "windows of nobody": (
        {"use_sliding_window": True, "sliding_window": 8}, {}, "got layer_types None in the config",
    ),
    "windows that are off": (
        {"layer_types": SLIDING, "sliding_window": 8, "use_sliding_window": False}, {},
        "got use_sliding_window False in the config, expected True beside sliding_attention",
    ),
    "windows of more layers": (
        {"layer_types": SLIDING * 2, "sliding_window": 8}, {}, "for each of 1 layers",
    ),
    "layers of another kind": ({"layer_types": ["linear"]}, {}, r"got layer_types \['linear'\]"),
    "a flag without a norm": ({"fc_norm": True}, {}, "got fc_norm True in the config, and"),
    "ids of fewer layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, "for 3 taps and ids of 2",
    ),
    "a layer that is not there": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}, {}, r"got taps \[1, 2, 30\], expected",
    ),
    "one tensor twice": ({}, {"model.fc.weight": torch.ones(1)}, "got tensors fc.weight and model"),
    "another target's fc": ({}, {"fc.weight": torch.ones(32, 90)}, "got fc of 90 inputs"),
    "another target's tokens": ({}, {"d2t": OFFSETS["d2t"] + 60}, "got a map d2t that is neither"),
    "a norm with two axes": ({}, {"norm.weight": torch.ones(2, 2)}, r"norm\.weight of shape"),
    "a product with one": ({}, {"fc.weight": torch.ones(4)}, r"got fc\.weight of shape \[4\]"),
    "keys of another width": (
        {}, {"midlayer.self_attn.k_proj.weight": torch.ones(16, 60)}, "tensors that do not fit",
    ),
    "gates of another height": (
        {}, {"midlayer.mlp.gate_proj.weight": torch.ones(47, 32)}, r"^\S+/x\b.*gate_up",
    ),
    "a map of pairs": ({}, {"d2t": torch.zeros(49, 2, dtype=torch.int64)}, "got a map d2t that is"),
    "a short map": ({}, {"t2d": torch.ones(49, dtype=torch.bool)}, "d2t and t2d of different"),
    "maps that differ": ({}, {"t2d": ~OFFSETS["t2d"]}, "d2t and t2d of different tokens"),
    "a rotary embedding": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {},
        r"^\S+/x: got rotary embedding 'dynamic'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def native(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_format(tmp_path_factory.mktemp("native"), "EAGLE", llama)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(
    case: str, native: Path, llama: Path, tmp_path: Path
) -> None:
    config, tensors, message = REFUSED[case]
    whole = safetensors.torch.load_file(native / "model.safetensors")
    folder = write(
        tmp_path / "x", json.loads((native / "config.json").read_text()) | config, whole | tensors
    )
    require_refused(folder, llama, tmp_path / "out", message)


def test_missing_tensors_and_other_models_are_named(
    native: Path, llama: Path, tmp_path: Path
) -> None:
    whole = safetensors.torch.load_file(native / "model.safetensors")
    del whole["midlayer.mlp.up_proj.weight"]
    folder = write(tmp_path / "x", json.loads((native / "config.json").read_text()), whole)
    with pytest.raises(UserError, match=r"got no tensor layers\.0\.mlp\.up_proj\.weight, expected"):
        run(str(folder), str(llama), tmp_path / "out", is_measured=False)
    with pytest.raises(UserError, match="without the tensors of a drafter that can be imported"):
        run(str(llama), str(llama), tmp_path / "out", is_measured=False)


def test_pickled_weights_hold_tensors_only(native: Path, llama: Path, tmp_path: Path) -> None:
    whole = safetensors.torch.load_file(native / "model.safetensors")
    (tmp_path / "x").mkdir()
    shutil.copy(native / "config.json", tmp_path / "x")
    torch.save(whole, tmp_path / "x/pytorch_model.bin")
    assert run(str(tmp_path / "x"), str(llama), tmp_path / "out", is_measured=False).is_dir()
    torch.save({"fc.weight": Path("/")}, tmp_path / "x/pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors"):
        run(str(tmp_path / "x"), str(llama), tmp_path / "other", is_measured=False)


def test_the_command(
    native: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["import", str(native), "--target", str(llama), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--no-measure", "--taps", "1,4,x"])
    assert end.value.code == 2
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--no-measure", "--taps", "1,4,6", "--norm-output", "yes"])
    assert not end.value.code
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out")
    config = load_drafter(tmp_path / "out").config
    assert (config["taps"], config["norm_output"]) == ([1, 4, 6], True)


GGUF_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "scaling": ({"rope.scaling.type": "yarn"}, {}, r"got eagle3\.rope\.scaling\.type 'yarn': it"),
    "scaling by length": (
        {}, {"rope_factors_long.weight": np.ones(4, np.float32)}, r"got rope_factors_long\.weight",
    ),
    "other factors": ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, "got 3 factors in rope"),
    "no factors": ({}, {"rope_freqs.weight": np.zeros(4, np.float32)}, "got float 0.0, expec"),
    "part of a head turned": ({"rope.dimension_count": 4}, {}, "dimension_count 4, expected the"),
    "heads that do not fit": ({"attention.head_count": 5}, {}, "got 5 heads for the 32 rows of"),
    "another tensor": (
        {}, {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}, r"got blk\.0\.attn_q_norm\.we",
    ),
}  # fmt: skip


def test_a_gguf_files_factors_divide_the_frequencies(llama: Path, tmp_path: Path) -> None:
    """llama.cpp writes them for LLaMA 3's rotation; tables within 1e-5."""
    _, drafter = write_format(tmp_path, "GGUF", llama)
    factors = np.array([1, 1.5, 4, 8], np.float32)
    tensors = gguf_tensors(published_state(drafter)) | {"rope_freqs.weight": factors}
    write_model(tmp_path / "scaled.gguf", "eagle3", tensors, GGUF_KEYS)
    out = run(str(tmp_path / "scaled.gguf"), str(llama), tmp_path / "out", is_measured=False)
    _, backbone = backbone_of(llama)
    module = load_module(load_drafter(out), backbone.config, target.ends(backbone))
    frequency = THETA ** -(torch.arange(0, 8, 2) / 8) / torch.from_numpy(factors)
    angle = torch.outer(torch.arange(len(module.cos)).float(), frequency)
    torch.testing.assert_close(module.cos, angle.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(module.sin, angle.sin(), rtol=0, atol=1e-5)
    for form in ("native", "speculators"):
        with pytest.raises(UserError, match="got rope_type longrope, expected default"):
            export_drafter.run(str(out), form, str(llama), tmp_path / form)


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_other_gguf_files_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    keys, tensors, message = GGUF_REFUSED[case]
    _, drafter = write_format(tmp_path, "GGUF", llama)
    whole = gguf_tensors(published_state(drafter)) | tensors
    write_model(tmp_path / "other.gguf", "eagle3", whole, GGUF_KEYS | keys)
    require_refused(tmp_path / "other.gguf", llama, tmp_path / "out", message)
    write_model(tmp_path / "model.gguf", "llama", {}, {})
    with pytest.raises(UserError, match="GGUF file of architecture 'llama', expected a drafter's"):
        run(str(tmp_path / "model.gguf"), str(llama), tmp_path / "out")


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_rotation_is_stretched_from_the_drafters_own_positions(kind: str) -> None:
    """Where a config does not name the length before the stretching, it is that of the config."""
    given: dict[str, Any] = {"rope_scaling": {"type": kind, "factor": 4.0}}
    folder: Any = None  # is only named in refusals
    read = rotary_parameters(folder, {**given, "max_position_embeddings": 64})
    assert read["original_max_position_embeddings"] == 64
    given["rope_scaling"]["original_max_position_embeddings"] = 16
    read = rotary_parameters(folder, {**given, "max_position_embeddings": 64})
    assert read["original_max_position_embeddings"] == 16


def test_a_drafter_without_a_head_has_the_targets_rows_of_its_tokens(llama: Path) -> None:
    backbone, state = backbone_of(llama)[1], dict[str, torch.Tensor]()
    offsets = {"d2t": torch.tensor([1, 1, 3])}
    folder, found = ForeignFolder(llama, [], {}, offsets), Reading("EAGLE", "eagle3", {})
    ids = take_head(folder, backbone, backbone.config.hidden_size, state, found)
    assert ids is not None
    assert ids.tolist() == [1, 2, 5]
    assert torch.equal(state["head"], backbone.head.weight[ids])


NESTED, TOP = "eagle_config", "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({NESTED: {TOP: [2, 4, 5]}}, [2, 4, 5]),  # the usual inputs
        ({NESTED: {TOP: [1, 3, 4]}}, [2, 4, 5]),  # the usual outputs
        ({NESTED: {TOP: [1, 2, 6]}}, [2, 3, 7]),
        ({NESTED: {TOP: [1, 2, 8]}}, [1, 2, 8]),  # no layer 8 has an output
        ({TOP: [1, 3, 4]}, [2, 4, 5]),
        ({TOP: [1, 2, 6]}, [1, 2, 6]),
        ({}, [2, 4, 5]),
    ],
)
def test_ids_of_layers_are_inputs_or_outputs(llama: Path, config: Any, taps: list[int]) -> None:
    folder, found = ForeignFolder(llama, [], config, {}), Reading("EAGLE", "eagle3", {})
    assert Settings(folder).taps(3, 8, found) == taps
