"""Imports DFlash, DFlash 2 and DSpark drafters as their libraries write them, and refuses others.

The published forward pass is written here after its definition, and shares no code with ours.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from importing import Lines, backbone_of, require_refused, write
from lossless import require_lossless
from module_and_graph import guesses_of
from tiny_gguf import write_model
from tiny_target import save_llama, teach
from torch import Tensor
from workshop import WORDS

from spec_export.build import make_bundle
from spec_export.build.drafters import load_module
from spec_export.build.make_bundle import BuildOptions
from spec_export.cli import main
from spec_export.drafters import dflash
from spec_export.drafters.layers import Batch
from spec_export.imports.drafters import importer
from spec_export.imports.drafters.importer import Overrides, run
from spec_export.model import target
from spec_export.model.hidden_states import features_and_taps
from spec_export.training.checkpoint import load_drafter
from spec_runtime.errors import UserError

N, VOCAB, ROWS, MASK, THETA = 6, 98, 4, 9, 300.0
EPS = 2**-16  # which float32 holds exactly, so that GGUF files give graphs of the others' make
IDS = torch.arange(0, VOCAB, 2)  # the draft vocabulary of speculators' files
OFFSETS = {"d2t": IDS - torch.arange(len(IDS))}
LAYER: dict[str, Any] = {
    **{"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "hidden_act": "silu"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": EPS},
    **{"num_hidden_layers": 2, "head_dim": 8, "rope_theta": THETA},
}
NESTED = {"target_layer_ids": [0, 2, 5], "mask_token_id": MASK}
FLAT = {"target_layer_ids": [0, 2, 5], "mask_token_id": MASK, "block_size": ROWS}
SPECULATORS: dict[str, Any] = {
    **{"aux_hidden_state_layer_ids": [1, 3, N], "mask_token_id": MASK, "block_size": ROWS},
    "transformer_layer_config": {
        **{key: value for key, value in LAYER.items() if key != "rope_theta"},
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    },
}
MARKOV = {"markov_rank": 5, "sample_from_anchor": True}
EXTRA = torch.ones(1, 1)
WINDOW, TOP = 5, 7  # positions of a sliding window, and candidates of a selector
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": TOP}
DFLASH2 = {"conv_size": 3, "conv_group": 8, "markov_rank": 6, "selector": True, "top_k": TOP}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
CUT = ("speculators", "GGUF")  # formats that are written with a draft vocabulary
GRAPHS = ("z-lab", "speculators' windows", "GGUF's dflash2")


def flat_markov(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("markov_head.").removesuffix(".weight") if "markov" in name else name: x
        for name, x in state.items()
    }


def gguf_tensors(state: dict[str, Tensor]) -> dict[str, Any]:
    """Returns tensors by llama.cpp's names, and ids in d2t; a rotation's halves stay apart."""
    found = {}
    for line in GGUF_NAMES.split():
        theirs, _, names = line.partition("=")
        for i in range(2):
            name = f"{names.replace('{i}', str(i))}.weight"
            if name in state:
                found[f"{theirs.replace('{i}', str(i))}.weight"] = state[name].numpy()
    for i, (theirs, ours) in itertools.product(range(2), (("attn", "attention"), ("ffn", "mlp"))):
        if f"layers.{i}.{ours}_conv.base_kernel" in state:
            base = state[f"layers.{i}.{ours}_conv.base_kernel"]
            found[f"blk.{i}.{theirs}_conv_base"] = base.numpy()
    return found


GGUF_NAMES = """
fc=fc enc.output_norm=hidden_norm output_norm=norm output=lm_head token_embd=embed_tokens
markov_w1=markov_head.markov_w1 markov_w2=markov_head.markov_w2
blk.{i}.attn_norm=layers.{i}.input_layernorm blk.{i}.ffn_norm=layers.{i}.post_attention_layernorm
blk.{i}.attn_q=layers.{i}.self_attn.q_proj blk.{i}.attn_k=layers.{i}.self_attn.k_proj
blk.{i}.attn_v=layers.{i}.self_attn.v_proj blk.{i}.attn_output=layers.{i}.self_attn.o_proj
blk.{i}.attn_q_norm=layers.{i}.self_attn.q_norm blk.{i}.attn_k_norm=layers.{i}.self_attn.k_norm
blk.{i}.ffn_gate=layers.{i}.mlp.gate_proj blk.{i}.ffn_up=layers.{i}.mlp.up_proj
blk.{i}.ffn_down=layers.{i}.mlp.down_proj
blk.{i}.attn_conv_proj=layers.{i}.attention_conv.kernel_projection
blk.{i}.ffn_conv_proj=layers.{i}.mlp_conv.kernel_projection
selector_predecessor=candidate_selector.predecessor_codebook
selector_successor=candidate_selector.successor_codebook
selector_hidden=candidate_selector.hidden_projection
"""
GGUF_KEYS: dict[str, Any] = {
    **{"embedding_length": 32, "block_count": 2, "attention.head_count": 4, "block_size": ROWS},
    **{"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8},
    **{"rope.freq_base": THETA, "target_layers": [1, 3, N]},  # layers' inputs
    "attention.layer_norm_rms_epsilon": EPS,
}

# A config as the library writes it, fields of our drafter, and how its tensors are written.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = {
    "z-lab": (LAYER | {"dflash_config": NESTED, "block_size": ROWS}, {}, dict),
    "ModelOpt": (
        LAYER
        | {
            "dflash_config": NESTED
            | {"projector_type": "dspark", "shift_label": True, "block_size": ROWS}
            | {"markov_rank": 5, "markov_head_type": "vanilla", "use_confidence_head": True}
        },
        MARKOV,
        lambda state: flat_markov(state) | {"confidence_proj.weight": torch.ones(1, 37)},
    ),
    "speculators": (
        SPECULATORS | {"speculators_model_type": "dflash", "draft_vocab_size": len(IDS)},
        {"own_head": True},
        lambda state: state | OFFSETS,
    ),
    "speculators' dspark": (
        SPECULATORS | {"speculators_model_type": "dspark"} | MARKOV,
        MARKOV | {"own_embedding": True, "own_head": True},
        dict,
    ),
    "GGUF": (
        GGUF_KEYS,
        {"own_head": True},
        lambda state: gguf_tensors(state) | {"d2t": IDS.numpy()},
    ),
    "GGUF's dspark": (
        GGUF_KEYS | {"sample_from_anchor": True, "has_confidence_head": True},
        MARKOV | {"own_embedding": True, "own_head": True},
        lambda state: (
            gguf_tensors(state)
            | {"conf_proj.weight": np.ones((1, 37), np.float32), "conf_proj.bias": EXTRA[0].numpy()}
        ),
    ),
    "z-lab's dflash2": (
        LAYER
        | {"architectures": ["DFlash2DraftModel"], "use_sliding_window": True, "is_causal": False}
        | SLIDING
        | {"dflash_config": NESTED | SELECTOR | {"block_size": ROWS}},
        DFLASH2 | {"sliding_layers": (0, 1), "window": WINDOW},
        lambda state: {
            name.removesuffix(".weight") if "codebook" in name else name: tensor
            for name, tensor in state.items()
        },
    ),
    "z-lab's windows": (
        LAYER
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
        | {"dflash_config": NESTED, "block_size": ROWS},
        {"sliding_layers": (1,), "causal_layers": (1,), "window": WINDOW},
        dict,
    ),
    "speculators' windows": (
        SPECULATORS
        | {"speculators_model_type": "dflash"}
        | {
            "transformer_layer_config": SPECULATORS["transformer_layer_config"]
            | SLIDING
            | {"use_sliding_window": True}
        },
        {"sliding_layers": (0, 1), "causal_layers": (0, 1), "window": WINDOW},
        dict,
    ),
    "speculators' dflash2": (
        SPECULATORS
        | SELECTOR
        | {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
        | {"sliding_window_non_causal": True},
        DFLASH2,
        dict,
    ),
    "GGUF's dflash2": (
        GGUF_KEYS
        | SELECTOR
        | {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [False, True]},
        DFLASH2 | {"sliding_layers": (1,), "window": WINDOW},
        gguf_tensors,
    ),
    "DeepSpec": (
        LAYER | FLAT | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0},
        {"sample_from_anchor": True},
        dict,
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("blocks") / "llama", num_hidden_layers=N)
    return teach(folder, WORDS[:2], num_steps=15)


def published_state(drafter: Any) -> dict[str, Tensor]:
    """Returns the weights of a drafter of ours as `speculators` names and stores them."""
    state = {
        "fc.weight": drafter.fusion.fc.T,
        "hidden_norm.weight": drafter.fusion.out_norm,
        "norm.weight": drafter.norm,
        "lm_head.weight": drafter.head if drafter.config.own_head else drafter.head_VD,
        "embed_tokens.weight": drafter.embedding_table,
    }
    if drafter.config.selector:
        state["candidate_selector.predecessor_codebook.weight"] = drafter.markov_read
        state["candidate_selector.successor_codebook.weight"] = drafter.markov_write
        state["candidate_selector.hidden_projection.weight"] = drafter.markov_hidden.T
    elif drafter.config.markov_rank:
        state["markov_head.markov_w1.weight"] = drafter.markov_read
        state["markov_head.markov_w2.weight"] = drafter.markov_write
    H, G, Dh = drafter.dims.num_heads, drafter.dims.num_kv_heads, drafter.dims.head_dim
    for i, layer in enumerate(drafter.layers):
        parts = dict(
            zip(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                layer.qkv.T.split((H * Dh, G * Dh, G * Dh)),
                strict=True,
            )
        )
        parts["mlp.gate_proj"], parts["mlp.up_proj"] = layer.gate_up.T.chunk(2)
        parts |= {"self_attn.o_proj": layer.out.T, "mlp.down_proj": layer.down.T}
        parts |= {"input_layernorm": layer.attention_norm}
        parts |= {"post_attention_layernorm": layer.mlp_norm}
        parts |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        for name in ("attention_conv", "mlp_conv") if drafter.config.conv_size else ():
            convolution = getattr(layer, name)
            state[f"layers.{i}.{name}.base_kernel"] = convolution.base
            parts[f"{name}.kernel_projection"] = convolution.project.T
        state |= {f"layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def published_block(
    state: dict[str, Tensor], taps: list[Tensor], root: int, fields: dict[str, Any]
) -> Tensor:
    """Returns what the head reads, a row for each of the block's, after context rows [p, D]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * state[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T

    context = norm(linear(torch.cat(taps, -1), "fc"), "hidden_norm")
    x = state["embed_tokens.weight"][[root] + [MASK] * (ROWS - 1)]
    p = len(context)
    frequency = THETA ** -(torch.arange(0, 8, 2) / 8)
    angle = torch.outer(torch.arange(p + ROWS).float(), frequency).repeat(1, 2)

    def turn(heads: Tensor, rows: slice) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * angle.cos()[rows] + torch.cat((-second, first), -1) * angle.sin()[rows]

    def convolved(h: Tensor, coefficients: Tensor, name: str, side: int) -> Tensor:
        if f"{name}.base_kernel" not in state:
            return h
        rows = []
        for j in range(ROWS):
            row = torch.zeros(32)
            for back in range(min(j, 2) + 1):
                dynamic = coefficients[j].view(2, 3, 4)[side, back].repeat_interleave(8)
                row += (state[f"{name}.base_kernel"][side, back] + dynamic) * h[j - back]
            rows.append(row)
        return torch.stack(rows)

    def coefficients(h: Tensor, name: str) -> Tensor:
        name = f"{name}.kernel_projection"
        return linear(h, name) if f"{name}.weight" in state else h

    position = torch.arange(p + ROWS)
    for i in range(2):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        of_attention = coefficients(h, f"layers.{i}.attention_conv")
        h = convolved(h, of_attention, f"layers.{i}.attention_conv", 0)
        both = torch.cat((context, h))
        q = norm(linear(h, f"{at}.q_proj").view(ROWS, 4, 8), f"{at}.q_norm").transpose(0, 1)
        k = norm(linear(both, f"{at}.k_proj").view(p + ROWS, 2, 8), f"{at}.k_norm").transpose(0, 1)
        v = linear(both, f"{at}.v_proj").view(p + ROWS, 2, 8).transpose(0, 1)
        k, v = turn(k, slice(None)).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        score = turn(q, slice(p, None)) @ k.transpose(1, 2) * 8**-0.5
        apart = position[p:, None] - position
        if i in fields.get("sliding_layers", ()):
            score = score.masked_fill(apart.abs() >= WINDOW, -torch.inf)
        if i in fields.get("causal_layers", ()):
            score = score.masked_fill(apart < 0, -torch.inf)
        weight = torch.softmax(score, -1)
        mixed = linear((weight @ v).transpose(0, 1).reshape(ROWS, 32), f"{at}.o_proj")
        x = x + convolved(mixed, of_attention, f"layers.{i}.attention_conv", 1)
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        of_mlp = coefficients(h, f"layers.{i}.mlp_conv")
        h = convolved(h, of_mlp, f"layers.{i}.mlp_conv", 0)
        gate, up = (linear(h, f"layers.{i}.mlp.{part}_proj") for part in ("gate", "up"))
        mixed = linear(gate * torch.sigmoid(gate) * up, f"layers.{i}.mlp.down_proj")
        x = x + convolved(mixed, of_mlp, f"layers.{i}.mlp_conv", 1)
    return norm(x, "norm")


def random_drafter(name: str, llama: Path) -> dflash.Drafter:
    config = dflash.Config(
        taps=(1, 3, N), block_size=ROWS, mask_token_id=MASK, rope={"rope_theta": THETA},
        norm_eps=EPS, head_dim=8, num_heads=4, num_kv_heads=2, intermediate_size=48,
        **FORMATS[name][1],
    )  # fmt: skip
    torch.manual_seed(3)
    ids = IDS if name in CUT else None
    drafter = dflash.Drafter(config, target.ends(backbone_of(llama)[1]), ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return drafter


def write_format(folder: Path, name: str, llama: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns a folder or file of this format, and all weights by speculators' names; z-lab and
    ModelOpt write none of the target's."""
    config, _, tensors_of = FORMATS[name]
    state = published_state(random_drafter(name, llama))
    lends = name.startswith(("z-lab", "ModelOpt"))
    lent = ("lm_head.weight", "embed_tokens.weight") if lends else ()
    tensors = tensors_of({key: tensor for key, tensor in state.items() if key not in lent})
    if name.startswith("GGUF"):
        path = folder.with_suffix(".gguf")
        write_model(path, "dspark" if "dspark" in name else "dflash", tensors, config, MASK)
        return path, state
    return write(folder, config, tensors), state


FIELDS = (  # that a reading decides
    *("own_head", "own_embedding", "markov_rank", "sample_from_anchor", "selector", "conv_size"),
    *("conv_group", "sliding_layers", "causal_layers", "window", "top_k"),
)


def require_selected(
    state: dict[str, Tensor],
    rows: Tensor,
    logits: Tensor,
    root: int,
    ids: Tensor,
    log_probs: Tensor,
    pairs: Tensor,
) -> None:
    """Checks all edges of a lattice by DFlash 2's selector: what each candidate's probability is
    among its guess's, after the root and after each candidate before it."""
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection")
    before, behind, project = (state[f"candidate_selector.{name}.weight"] for name in names)
    previous = torch.tensor([root])
    for k, unary in enumerate(logits):
        assert sorted(ids[k].tolist()) == sorted(unary.topk(len(ids[k])).indices.tolist())
        gate = before[previous] * (project @ rows[k])
        expected = torch.log_softmax(unary[ids[k]] + gate @ behind[ids[k]].T, -1)
        got = pairs[k - 1] if k else log_probs[:1]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        previous = ids[k]
    assert (log_probs[0].diff() <= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_block_is_guessed_as_its_library_says(name: str, llama: Path, tmp_path: Path) -> None:
    """All guesses of whole blocks against the published forward pass, within 1e-4, and those of a
    Markov head after each of the candidates before them: of the module and, where it is of another
    make, of the graph, see test_drafter_graphs.py too."""
    folder, state = write_format(tmp_path / "x", name, llama)
    report = Lines()
    out = run(str(folder), str(llama), tmp_path / "out", report=report, is_measured=False)
    assert report.lines[0].startswith(f"x: {name.partition(chr(39))[0]}'s dflash; ")
    assert f"; taps 1, 3, {N}; " in report.lines[0]
    assert report.warnings == []
    hf_model, backbone = backbone_of(llama)
    module: Any = load_module(load_drafter(out), backbone.config, target.ends(backbone))
    fields = FORMATS[name][1]
    is_anchor = fields.get("sample_from_anchor", False)
    for key in FIELDS:
        assert getattr(module.config, key) == fields.get(
            key, getattr(dflash.Config(taps=(1,)), key)
        )
    vocabulary = module.draft_token_ids
    assert vocabulary.tolist() == list(range(0, VOCAB, 2 if name in CUT else 1))
    token_T = torch.arange(3, 15) * 7 % VOCAB
    with torch.no_grad():
        _, *taps = features_and_taps(hf_model.model, token_T[None], module.config.taps)
    fuses = name == "z-lab"  # in the target's graph; those of others read the taps
    tap_TF = None if fuses else torch.cat(taps, -1)[0]
    folder = tmp_path / "graphs"
    guesses = guesses_of(module, hf_model, token_T, folder, tap_TF=tap_TF, fuses=fuses)
    for ids, log_probs, pairs in itertools.islice(guesses, 2 if name in GRAPHS else 1):
        assert (pairs is not None) == ("markov_rank" in fields)
        assert ids.shape[1] == ROWS - (0 if is_anchor else 1)
        for t in range(11):
            root = int(token_T[t + 1])
            rows = published_block(state, [tap[0, : t + 1] for tap in taps], root, fields)
            rows = rows[0 if is_anchor else 1 :]
            logits = rows @ state["lm_head.weight"].T
            if module.config.selector:
                assert pairs is not None
                require_selected(state, rows, logits, root, ids[t], log_probs[t], pairs[t])
                continue
            if pairs is not None:
                read, bias = (state[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
                logits[0] += bias @ read[root]
            index = torch.searchsorted(vocabulary, ids[t].contiguous())
            expected = torch.log_softmax(logits, -1).gather(1, index)
            torch.testing.assert_close(log_probs[t], expected, rtol=0, atol=1e-4)
            for k, pair_CC in enumerate(() if pairs is None else pairs[t]):
                biased = logits[k + 1] + read[ids[t, k]] @ bias.T
                after = torch.log_softmax(biased, -1).gather(1, index[k + 1].expand(VOCAB, -1))
                torch.testing.assert_close(pair_CC, after, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speculators' dspark", "z-lab's dflash2"])
def test_an_imported_block_drafter_changes_no_token(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build imports and measures it itself."""
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    folder, _ = write_format(tmp_path / "x", name, llama)
    options: Any = {"model": str(llama), "drafter_checkpoints": [folder]}
    bundle = make_bundle.build(BuildOptions(out=tmp_path / "bundle", lanes=1, **options))
    require_lossless(bundle, ["dflash"])


def test_the_alignment_that_no_file_names_is_asked_for(llama: Path, tmp_path: Path) -> None:
    name = "speculators' dspark"
    config = {key: x for key, x in FORMATS[name][0].items() if key != "sample_from_anchor"}
    folder = write(tmp_path / "x", config, published_state(random_drafter(name, llama)))
    report = Lines()
    out = run(str(folder), str(llama), tmp_path / "a", report=report, is_measured=False)
    doubt = "sample_from_anchor is not in the config, read as no: --alignment anchor"
    assert report.warnings == [f"doubt: {doubt}"]
    assert load_drafter(out).config["sample_from_anchor"] is False
    given = ["--target", str(llama), "--out", str(tmp_path / "b"), "--no-measure"]
    with pytest.raises(SystemExit) as ended:
        main(["import", str(folder), *given, "--alignment", "anchor"])
    assert ended.value.code in (0, None)
    assert load_drafter(tmp_path / "b").config["sample_from_anchor"] is True


@pytest.mark.parametrize(("name", "is_anchor"), [("GGUF", False), ("GGUF's dspark", True)])
def test_a_gguf_file_without_an_alignment_is_read_as_llama_cpp_does(
    name: str, is_anchor: bool, llama: Path, tmp_path: Path
) -> None:
    keys, _, tensors_of = FORMATS[name]
    tensors = tensors_of(published_state(random_drafter(name, llama)))
    write_model(tmp_path / "x.gguf", "dflash", tensors, keys | {"sample_from_anchor": None}, MASK)
    report = Lines()
    out = run(
        str(tmp_path / "x.gguf"), str(llama), tmp_path / "out", report=report, is_measured=False
    )
    assert load_drafter(out).config["sample_from_anchor"] is is_anchor
    read = "sample_from_anchor is not in the config, read as yes: --alignment fill-in"
    assert report.warnings == ([f"doubt: {read}"] if is_anchor else [])


GGUF_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "windows somewhere": ({"attention.sliding_window": 8}, {}, "got layer_types None in the conf"),
    "windows of one": (
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, {},
        "for each of 2 layers",
    ),
    "a rotation of sections": (
        {"rope.dimension_sections": [4, 0, 0, 0]}, {}, r"got dflash\.rope\.dimension_sections \[4",
    ),
    "part of a head turned": ({"rope.dimension_count": 4}, {}, "dimension_count 4, expected the"),
    "capped": ({"final_logit_softcapping": 30.0}, {}, "got final_logit_softcapping 30.0 in the"),
    "multiplied": ({"logit_scale": 0.5}, {}, "got output_multiplier 0.5 in the config, expected"),
    "no layers": ({"target_layers": None}, {}, "got aux_hidden_state_layer_ids None in the confi"),
    "other layers": ({"block_count": 3}, {}, "got num_hidden_layers 3 and weights of 2 layers"),
    "no heads": ({"attention.head_count": 0}, {}, "num_attention_heads: got int 0, expected"),
    "sinks": ({}, {"blk.0.attn_sinks.weight": EXTRA[0].numpy()}, r"got blk\.0\.attn_sinks\.weight"),
    "scales": ({}, {"fc.scale": EXTRA[0].numpy()}, r"got fc\.scale, which no drafter"),
    "a convolution": ({}, {"blk.1.attn_conv_base": EXTRA.numpy()}, "base_kernel, which no drafter"),
    "a selector of fewer tokens": (
        {}, {"selector_hidden.weight": EXTRA.numpy()}, "got a selector and a head of 49 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_other_gguf_files_of_blocks_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    more_keys, more, message = GGUF_REFUSED[case]
    keys, _, tensors_of = FORMATS["GGUF"]
    tensors = tensors_of(published_state(random_drafter("GGUF", llama))) | more
    write_model(tmp_path / "x.gguf", "dflash", tensors, keys | more_keys, MASK)
    require_refused(tmp_path / "x.gguf", llama, tmp_path / "out", message)


def test_a_poor_block_drafter_is_read_otherwise(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer.reference, "prompts", lambda: ("say abc, 1",))
    shown: list[Any] = []
    monkeypatch.setattr(
        Lines, "table", lambda self, header, rows: shown.extend(rows), raising=False
    )
    config = FORMATS["z-lab"][0] | {"dflash_config": NESTED | {"target_layer_ids": [0, 2, 4]}}
    state = published_state(random_drafter("z-lab", llama))
    run(str(write(tmp_path / "x", config, state)), str(llama), tmp_path / "out", report=Lines())
    assert [words for words, _ in shown] == [
        *("as read", "--alignment anchor", "--taps 0,2,4", "--taps 2,4,6")
    ]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no width": ({"layer_types": ["sliding_attention"] * 2}, {}, "got sliding_window None in the"),
    "a narrow window": (SLIDING | {"sliding_window": 3}, {}, "got sliding_window 3 in the config,"),
    "other kinds": ({"layer_types": ["linear"] * 2}, {}, r"got layer_types \['linear', 'line"),
    "kinds of more": (SLIDING | {"layer_types": ["sliding_attention"]}, {}, "for each of 2 layers"),
    "no kinds": ({"use_sliding_window": True}, {}, "got layer_types None in the config, exp"),
    "ModelOpt's windows": ({"use_swa": True}, {}, "got use_swa True in the config, expected False"),
    "biases": ({"attention_bias": True}, {}, "got attention_bias True in the config"),
    "a bias": ({}, {"layers.0.self_attn.q_proj.bias": EXTRA}, "got layers.0.self_attn.q_proj.bia"),
    "scaled": ({"input_embedding_scale": 5.5}, {}, "got input_embedding_scale 5.5 in the config"),
    "multiplied": ({"output_multiplier": 2.0}, {}, "got output_multiplier 2.0 in the config"),
    "capped": ({"final_logit_softcapping": 30.0}, {}, "got final_logit_softcapping 30.0 in the"),
    "gated": ({"markov_head_type": "gated"}, {}, "got markov_head_type 'gated' in the config"),
    "rnn": ({}, {"markov_head.joint_proj.weight": EXTRA}, "recurrent Markov head: not supported"),
    "half a selector": (
        {}, {"candidate_selector.predecessor_codebook": EXTRA}, "got no tensor candidate_selector",
    ),
    "half a convolution": (
        {}, {"layers.0.mlp_conv.base_kernel": EXTRA}, r"got layers\.0\.mlp_conv\.base_kernel",
    ),
    "a convolution of one group": (
        {},
        {"layers.0.attention_conv.base_kernel": torch.ones(2, 3, 30)}
        | {"layers.0.attention_conv.kernel_projection.weight": torch.ones(24, 32)},
        r"got layers\.0\.attention_conv of shapes \[2, 3, 30\] and \[24, 32\], expected \[2, si",
    ),
    "Domino": (
        {"dflash_config": NESTED | {"projector_type": "domino"}}, {}, "got projector_type 'domino'",
    ),
    "Laguna": ({}, {"layers.0.self_attn.qkv_proj.weight": EXTRA}, "Laguna: not supported yet"),
    "an encoder": ({}, {"encoder.fc.weight": EXTRA}, "got encoder.fc.weight, DFlash with an enco"),
    "a gate by ModelOpt": ({}, {"gate_proj.weight": EXTRA}, "ModelOpt's DSpark with a gated"),
    "a state by ModelOpt": ({}, {"joint_proj.weight": EXTRA}, "recurrent Markov head: not sup"),
    "another family": ({"model_type": "gemma3_text"}, {}, "got model_type 'gemma3_text'"),
    "another family's layers": (
        {"transformer_layer_config": LAYER | {"model_type": "kimi_k2"}}, {}, "'kimi_k2' in the con",
    ),
    "a rotation": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "got rotary embedding 'dynamic'",
    ),
    "XPress": ({"speculators_model_type": "xpress"}, {}, "got speculators_model_type 'xpress' in"),
    "an unknown key": ({"residual_scale": 0.5}, {}, "got residual_scale 0.5 in the config, a key"),
    "an unknown mask": (
        {"dflash_config": NESTED | {"mask_token_id": 151669}}, {}, "got mask_token_id 151669, exp",
    ),
    "half a head": ({}, {"markov_w1": torch.ones(VOCAB, 5)}, "and 1 tables of rank 5, exp"),
    "no Markov head": ({"markov_rank": 5}, {}, "got markov_rank 5 and 0 tables of rank 0, expect"),
    "other layers": ({"num_hidden_layers": 3}, {}, "got num_hidden_layers 3 and weights of 2 lay"),
    "other taps": (
        {"dflash_config": NESTED | {"target_layer_ids": [1, 2]}}, {}, "got fc for 3 taps and ids",
    ),
    "another target": ({}, {"fc.weight": torch.ones(32, 40)}, "got fc of 40 inputs, expected a mu"),
    "a block of one": ({"block_size": 1}, {}, "block_size: got int 1, expected 2 or more"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"conv_kernel_size": 2}, "got conv_kernel_size 2 in the config and tensors of 3"),
        ({"conv_group_size": 16}, "got conv_group_size 16 in the config and tensors of 8"),
        ({"selector_rank": 9}, "got selector_rank 9 in the config and tensors of 6"),
        ({"selector_top_k": 0}, "got selector_top_k 0 in the config, expected a number of candid"),
    ],
)
def test_a_dflash2_config_that_its_tensors_contradict_is_refused(
    more: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    name = "speculators' dflash2"
    config, _, tensors_of = FORMATS[name]
    tensors = tensors_of(published_state(random_drafter(name, llama)))
    with pytest.raises(UserError, match=message):
        run(str(write(tmp_path / "x", config | more, tensors)), str(llama), tmp_path / "out")


@pytest.mark.parametrize("case", REFUSED)
def test_other_block_drafters_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    state = published_state(random_drafter("z-lab", llama))
    folder = write(tmp_path / "x", FORMATS["z-lab"][0] | config, state | tensors)
    require_refused(folder, llama, tmp_path / "out", message)


def test_a_mask_row_of_its_own_is_refused(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_format(tmp_path / "x", "z-lab", llama)
    torch.save({"embedding": torch.ones(32), "mask_token_id": MASK}, folder / "mask_embedding.pt")
    message = "got mask_embedding.pt, expected a mask that is one of the target's tokens: a row of"
    require_refused(folder, llama, tmp_path / "out", message)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
        ("gemma2", {"final_logit_softcapping": 0.5, "head_dim": 8, "query_pre_attn_scalar": 8}),
    ],
)
def test_a_targets_scales_and_softcap_are_not_its_drafters(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """z-lab's drafters read the target's tables as they are stored, and cap nothing."""
    model = save_llama(tmp_path / family, family=family, num_hidden_layers=N, **options)
    folder, state = write_format(tmp_path / "x", "z-lab", model)
    out = run(str(folder), str(model), tmp_path / "out", is_measured=False)
    hf_model, backbone = backbone_of(model)
    module: Any = load_module(load_drafter(out), backbone.config, target.ends(backbone))
    assert module.config.own_embedding
    assert module.config.own_head is (family == "granite")
    state["embed_tokens.weight"] = hf_model.model.embed_tokens.weight
    token_T = torch.arange(3, 15) * 7 % VOCAB
    with torch.no_grad():
        states = features_and_taps(hf_model.model, token_T[None], module.config.taps)
        batch = Batch(token_T[None], token_T[None] >= 0, torch.cat(states, -1), torch.tensor([12]))
        ids, log_probs = module.guesses(batch, VOCAB)
        taps = [tap[0, :9] for tap in states[1:]]
        rows = published_block(state, taps, int(token_T[9]), {})[1:]
        expected = torch.log_softmax(rows @ hf_model.lm_head.weight.T, -1).gather(1, ids[0, 8])
    torch.testing.assert_close(log_probs[0, 8], expected, rtol=0, atol=1e-4)


def test_a_block_leaves_nothing_to_decide_about_outputs(llama: Path, tmp_path: Path) -> None:
    folder, _ = write_format(tmp_path / "x", "z-lab", llama)
    with pytest.raises(UserError, match=r"got --norm-output for .*, a drafter of z-lab, expected"):
        run(str(folder), str(llama), tmp_path / "out", Overrides(norm_output=True))
