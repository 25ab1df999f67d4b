"""Holds every family to one contract, on tiny random models.

The eager backbone equals transformers. One graph holds layers of all families side by side; in all
its forms it equals the eager layers.

Tolerance: 2e-5 of the largest value. Both sides are float32 but sum in different orders, which
measures 2e-6 at most; a wrong frequency, norm, slot or mask moves logits by percents, because the
random weights are large enough for attention to be peaked.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from graphs import Runner
from tiny_backbone import (
    CONTEXT,
    HEADS,
    LINEAR,
    LLAMA3,
    ORIGINAL,
    YARN,
    YARN_FACTOR,
    Decoder,
    backbone_of,
    chain,
    longrope,
    path_to,
    random_tokens,
    reference,
    tiny,
)
from tiny_target import make_tokenizer
from torch import Tensor

from spec_export.check.replay import TransformersModel
from spec_export.drafters import eagle, skip_layer
from spec_export.graphs import quantize
from spec_export.graphs.half import narrow
from spec_export.graphs.slots import to_slots
from spec_export.graphs.smooth import smooth
from spec_export.graphs.tensorrt import adapt, with_additive_masks
from spec_export.graphs.trace import export_backbone
from spec_export.model import pretrained, target, weights
from spec_export.model.config import CACHES, POSITIONS
from spec_export.model.decoder import Backbone, SharedInputs
from spec_export.model.deferred import is_deferred, real
from spec_export.model.families import FAMILIES, LayerKind
from spec_export.model.hidden_states import features_and_taps
from spec_export.model.modules.basic import LayerNorm
from spec_export.model.modules.convolution import with_ancestors
from spec_export.model.weights import StoredWeights
from spec_runtime.backends import session
from spec_runtime.bundle.manifest import ATTENTIONS
from spec_runtime.errors import UnsupportedModelError
from spec_runtime.loop import kv

RELATIVE_TOLERANCE = 2e-5
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
ROTATED = {"hidden_size": 64, "head_dim": 16}  # the least heads that an attention rotates itself
WINDOW = 8  # narrower than the texts here
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}
SOFTCAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
GROWTH = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 5}
# What a family's config needs so that its switches show; others have their defaults.
CASES: dict[str, dict[str, Any]] = {family: {} for family in FAMILIES} | {
    "apertus": {"rope_parameters": {"rope_theta": 500.0}},
    "cohere": {"logit_scale": 0.3},
    "cohere2": MIXED | {"logit_scale": 0.3},
    "cwm": MIXED | {"bos_token_id": 0},
    "exaone4": MIXED,
    "gemma2": MIXED | SOFTCAPS | {"query_pre_attn_scalar": 7},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 7, "final_logit_softcapping": 4.0},
    "gpt_oss": EXPERTS | {"swiglu_limit": 1.0, "rope_parameters": YARN, "sliding_window": WINDOW},
    "granite": SCALES,
    "granitemoe": SCALES | EXPERTS,
    "granitemoehybrid": SCALES
    | {"layer_types": ["attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 4}
    | {"shared_intermediate_size": 40, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"rope_parameters": DYNAMIC | {"alpha": 1000.0}},
    "internlm3": {"rope_parameters": DYNAMIC},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    "mellum": MIXED
    | EXPERTS
    | {"moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"]},
    "ministral": MIXED,
    "ministral3": {"rope_parameters": GROWTH},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS | {"sliding_window": None},
    "olmo3": MIXED,
    "olmoe": EXPERTS | {"norm_topk_prob": False},
    "phi3": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "qwen2": MIXED | {"use_sliding_window": True},
    "qwen3": MIXED | {"use_sliding_window": True},
    "qwen2_moe": EXPERTS
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    | {"decoder_sparse_step": 2},
    "qwen3_moe": EXPERTS
    | {"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_qkv_bias": True, "use_parallel_residual": False},
    "stablelm, parallel": {"use_parallel_residual": True},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": MIXED | SOFTCAPS | {"query_pre_attn_scalar": 7},
}


PARTIAL = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
SHORT = {"original_max_position_embeddings": ORIGINAL}
# What is the same in all families, and kinds of rotation.
MORE: dict[str, dict[str, Any]] = {
    "exaone4, without windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "smollm3, windows off": MIXED | {"use_sliding_window": False, "no_rope_layers": [1, 0]},
    "llama, one key/value head": {"num_key_value_heads": 1},
    "llama, as many key/value heads": {"num_key_value_heads": HEADS},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"head_dim": 32},
    "llama, linear": {"rope_parameters": LINEAR},
    "llama, llama3": {"rope_parameters": LLAMA3},
    "llama, yarn": {"rope_parameters": YARN},
    "llama, yarn with a factor": {"rope_parameters": YARN_FACTOR},
    "llama, longrope": {"rope_parameters": longrope(4)},
    "mistral, wide window": {"sliding_window": CONTEXT},
    "qwen3, biases, wide heads, yarn": {"attention_bias": True, "head_dim": 32}
    | {"rope_parameters": YARN},
    "phi3, partial": {"rope_parameters": PARTIAL},
    "phi3, longrope": {"rope_parameters": longrope(4)} | SHORT,
    "phi3, partial longrope": {"rope_parameters": longrope(2, partial_rotary_factor=0.5)} | SHORT,
}


@functools.cache
def model_of(case: str) -> Any:
    return tiny(case.split(",")[0], **SIZES | (CASES | MORE)[case])


def close(actual: Any, expected: Any) -> None:
    assert difference(actual, expected) <= RELATIVE_TOLERANCE


def difference(actual: Any, expected: Any) -> float:
    """Returns the largest difference, as a share of the largest value."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


class SideBySide(Backbone):
    """Holds layers of many families. All read the embedding, so that each shows its own error.

    Tap i is what layer i writes.
    """

    cases: list[str]  # of each layer

    def run_layers(
        self, input_ids: Tensor, kv: Sequence[Tensor], shared: SharedInputs, num_layers: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        embedded = self.embedding.embed(input_ids.view(-1))
        shared, positions = with_ancestors(shared, kv[-1], count=2)
        written: list[Tensor] = []
        caches: list[Tensor] = []
        for layer, kind in zip(self.layers, self.config.kinds, strict=True):
            past = kv[len(caches) : len(caches) + len(CACHES[kind.mixer])]
            y_ND, new = layer(embedded, past, shared)
            written.append(y_ND)
            caches += new
        return [*written, torch.stack(written).sum(0)], [*caches, positions]


def switches(layer: Any) -> set[tuple[str, str, str]]:
    """Returns what a layer is made of and its switches; of a number only whether it is 0, 1 or
    another."""
    found = set()
    for part in layer.modules():
        for name, value in (vars(part) | part._parameters | part._modules).items():
            if isinstance(value, (int, float)):
                shown = str(value if value in (0, 1) else "a number")
            elif isinstance(value, str):
                shown = value
            else:
                shown = getattr(value, "__name__", type(value).__name__)
            if not name.startswith("_"):
                found.add((type(part).__name__, name, shown))
    return found


@functools.cache
def side_by_side() -> SideBySide:
    """Returns layers that together have every switch of all cases, behind a scaled embedding and
    before scaled, capped logits."""

    def rotated(case: str) -> Any:
        return tiny(case.split(",")[0], **SIZES | ROTATED | CASES[case])

    backbones = {case: backbone_of(rotated(case)) for case in CASES}
    left: dict[tuple[str, int], set[tuple[str, str, str]]] = {
        (case, i): switches(layer)
        for case, backbone in backbones.items()
        for i, layer in enumerate(backbone.layers)
    }
    cases: list[str] = []
    layers: list[Any] = []
    kinds: list[LayerKind] = []
    tables: dict[str, Any] = {}
    while any(left.values()):  # the layer with the most switches that none has yet
        case, i = max(left, key=lambda place: len(left[place]))
        shown, backbone = left[case, i], backbones[case]
        left = {place: others - shown for place, others in left.items()}
        kind, each = backbone.config.kinds[i], cast(Any, backbone.layers[i])
        if kind.rope is not None:
            own = {"": (backbone.cos, backbone.sin)} | backbone.tables()
            each.attention.rope = str(len(layers))
            tables[each.attention.rope] = own[kind.rope]
        cases.append(case)
        layers.append(each)
        kinds.append(kind)
    first = backbone_of(rotated("ministral3"))
    config = replace(
        first.config, num_layers=len(layers), layers=tuple(kinds), taps=tuple(range(len(layers)))
    )
    made = SideBySide(
        config,
        first.embedding.weight,
        layers,
        LayerNorm(torch.linspace(0.5, 2, 64), torch.linspace(-1, 1, 64), 1e-5),
        None,
        {"": (first.cos, first.sin)} | tables,
        query_scale_S=first.query_scale_S,
        embedding_scale=3.0,
        logit_scale=0.5,
        logit_softcap=4.0,
    )
    made.cases = cases
    with torch.no_grad():  # without VNNI, ONNX Runtime refuses int8 weights that products share
        for number, parameter in enumerate(made.parameters()):
            parameter.mul_(1 + number / 10000)
    return made.eval()


@functools.cache
def graph_of_all() -> ir.Model:
    """Returns the graph of `side_by_side`, which takes long to trace. Change only clones."""
    return export_backbone(side_by_side())


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_the_backbone_equals_transformers(case: str) -> None:
    """Its logits, features and taps over a prompt in chunks; a node's logits are those of its path
    without the other nodes, and kept paths leave out rows.

    Above ORIGINAL tokens transformers, like us, takes longrope's long factors.
    """
    model = model_of(case)
    taps = (1, 0, model.config.num_hidden_layers)
    decoder, text = Decoder(backbone_of(model, taps=taps)), random_tokens(40, seed=1)
    with torch.no_grad():
        states = features_and_taps(model.model, torch.tensor([text]), taps)
    expected = reference(model, text)
    for rows in (slice(0, 23), slice(23, 40)):
        logits, *found = decoder.step(text[rows], chain(len(text[rows])))
        close(logits, expected[rows])
        for actual, state in zip(found, states, strict=True):
            close(actual, state[0, rows])
        decoder.keep(list(range(len(text[rows]))))
    for tokens, parents, kept in (
        (random_tokens(7, seed=3), [0, 0, 0, 1, 2, 4, 4], [0, 2, 4, 6]),
        (random_tokens(6, seed=4), [0, 0, 0, 2, 2, 3], [0, 2]),
        (random_tokens(1, seed=6), [0], [0]),
    ):
        logits = decoder.step(tokens, parents)[0]
        for leaf in set(range(len(tokens))) - set(parents[1:]):
            path = path_to(leaf, parents)
            of_path = reference(model, text + [tokens[i] for i in path])
            close(logits[path], of_path[len(text) :])
        decoder.keep(kept)
        text += [tokens[i] for i in kept]


@pytest.mark.parametrize("case", [*CASES, "llama, biases"])
def test_smoothing_for_int8_keeps_the_function_and_the_models_weights(case: str) -> None:
    model = model_of(case)
    backbone, step = backbone_of(model), (random_tokens(9, seed=1), chain(9))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = Decoder(backbone).step(*step)
    smooth(backbone, [random_tokens(12, seed=seed) for seed in range(2)])
    for actual, wanted in zip(Decoder(backbone).step(*step), expected, strict=True):
        close(actual, wanted)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("form", ["contiguous", *ATTENTIONS])
def test_all_layers_in_all_forms_of_the_graph_equal_the_eager_ones(
    form: str, tmp_path: Path
) -> None:
    """Over a prompt and two trees."""
    backbone, model = side_by_side(), graph_of_all().clone()
    if form != "contiguous":
        to_slots(model, form)
    kind, attention = (form, "bias") if form == "contiguous" else ("slots", form)
    runner = Runner(model, tmp_path, kind, 40, attention)
    eager = Decoder(backbone, 40)
    steps = (
        (random_tokens(12, seed=3), chain(12), list(range(12))),
        (random_tokens(6, seed=4), [0, 0, 0, 1, 2, 4], [0, 2, 4]),
        (random_tokens(4, seed=5), [0, 0, 1, 1], [0]),
    )
    for tokens, parents, kept in steps:
        errors = errors_of(runner, eager, tokens, parents)
        assert {k: error for k, error in errors.items() if error > RELATIVE_TOLERANCE} == {}
        runner.cache.commit(kept)
        eager.keep(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "other", "by_value"),
    [("bias", "bias", True), ("full_buffer", "full_buffer", True), ("bias", "append", False)],
)
def test_ways_to_write_are_equal(
    attention: str, other: str, by_value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, all layers' rows and outputs, over random trees whose lost nodes leave holes:
    by value as by row, and appended by the attention as to the same slots before it."""
    monkeypatch.setattr(session, "with_operators", lambda *_: None)  # ONNX Runtime's in all forms
    monkeypatch.setattr(kv, "WIDTHS", (1,))  # holes stay while there is room
    runners = []
    for i, (form, is_by_value) in enumerate([(attention, False), (other, by_value)]):
        model = to_slots(graph_of_all().clone(), form, is_by_value)
        folder = tmp_path / str(i)
        folder.mkdir()
        runners.append(Runner(model, folder, "slots", 28, form))
    if other == "append":
        runners[0].cache = kv.SlotCache(28, runners[0].backend.move_rows)
    rng = np.random.default_rng(6)
    for size in (12, 6, 1, 7, 4, 6, 5):
        parents = [0, *(int(rng.integers(i)) for i in range(1, size))]
        tokens = random_tokens(size, seed=size)
        expected, got = (runner.step(tokens, parents)["logits"] for runner in runners)
        assert np.array_equal(got, expected)
        path = path_to(int(rng.integers(size)), parents)
        for runner in runners:
            runner.cache.commit(path)
    for rows, values in zip(*(runner.backend.buffers.items() for runner in runners), strict=True):
        assert rows[0] == values[0]
        assert np.array_equal(rows[1].numpy(), values[1].numpy())


def errors_of(
    runner: Runner, eager: Decoder, tokens: list[int], parents: list[int]
) -> dict[str, float]:
    """Runs one step of a graph of `side_by_side`; returns the error of each layer and output."""
    cases = [f"{i} {case}" for i, case in enumerate(side_by_side().cases)]
    names = ["logits", "features", *(f"taps.{i}" for i in range(len(cases)))]
    got, expected = runner.step(tokens, parents, names), eager.step(tokens, parents)
    labels = ["logits", "features", *cases]
    return {
        label: difference(got[name], value)
        for label, name, value in zip(labels, names, expected, strict=True)
    }


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.2), ("int4", 0.45)])
def test_quantised_layers_stay_near(
    precision: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product is quantised but those of experts, which are too narrow here.

    The bound is twice and, for 4 bits of these narrow random weights, one and a half times what is
    measured.
    """
    monkeypatch.setattr(quantize, "SMALLEST", 1)
    model = quantize.quantize(to_slots(graph_of_all().clone()), precision)
    assert not {"Gemm"} & {node.op_type for node in model.graph}
    runner = Runner(model, tmp_path)
    errors = errors_of(runner, Decoder(side_by_side()), random_tokens(12, seed=6), chain(12))
    assert {k: error for k, error in errors.items() if not 1e-4 < error < tolerance} == {}


def test_a_drafter_on_the_targets_own_layers_reads_their_masks_and_tables(tmp_path: Path) -> None:
    """Its graph runs the first layer of Gemma 3, which has a rotary table of its own."""
    family = "gemma3_text"
    backbone = backbone_of(tiny(family, **SIZES | CASES[family]))
    drafter = skip_layer.Drafter(
        skip_layer.Config(layers=1, head="target", top_k=3), target.ends(backbone)
    )
    runner = Runner(to_slots(drafter.export_from_target(backbone)["drafter"]), tmp_path)
    text = random_tokens(10, seed=7)
    ids = runner.step(text, chain(10), ("guess_ids",))["guess_ids"]
    states = backbone_of(tiny(family, **SIZES | CASES[family]), taps=(1,))
    tap = Decoder(states).step(text, chain(10))[2]
    expected = (drafter.head_rows(tap) @ drafter.head_VD.T).topk(3).indices
    assert ids.tolist() == expected.tolist()


def test_softcaps_are_refused_with_tensorrt() -> None:
    with pytest.raises(UnsupportedModelError, match="got a softcap of 3 on attention scores"):
        with_additive_masks(graph_of_all().clone())


@pytest.mark.parametrize("case", CASES)
def test_drafters_borrow_what_the_target_computes_with(case: str) -> None:
    """Embedding and head come with the family's scales; a layer only where it is Llama's."""
    model = model_of(case)
    backbone, text = backbone_of(model), random_tokens(9, seed=8)
    ends = target.ends(backbone)
    with torch.no_grad():
        close(
            ends.embed_VD[text], model.get_input_embeddings()(torch.tensor(text)) * _factor(model)
        )
        logits, features, *_ = Decoder(backbone).step(text, chain(9))
        scored = features @ ends.head_VD.T
        cap = backbone.logit_softcap
        close(cap * torch.tanh(scored / cap) if cap else scored, logits)
        scores = model.lm_head(features)
        close(FAMILIES[model.config.model_type].logits(model.config, scores), logits)
        close(TransformersModel(model).logits(features.numpy()), logits)  # of `check`
    drafter = eagle.Drafter(eagle.Config(top_k=2), ends)
    lent = ends.last_layer.get("qkv")
    assert lent is None or torch.equal(drafter.layers[0].qkv, lent)


def _factor(model: Any) -> float:
    """Returns the scale of the embedding where transformers does not apply it in the module."""
    return float(getattr(model.config, "embedding_multiplier", 1.0))


WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # text and other parts, options
    "aya_vision": ("cohere2", "siglip_vision_model", {}),
    "exaone4_5": ("exaone4", "exaone4_5_vision", {}),
    "gemma3": ("gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
    "internvl": ("qwen3", "internvl_vision", {}),
    "lfm2_vl": ("lfm2", "siglip2_vision_model", {}),
    "llava": ("llama", "clip_vision_model", {}),
    "llava_next": ("mistral", "clip_vision_model", {}),
    "llava_onevision": ("qwen2", "siglip_vision_model", {}),
    "mistral3": ("mistral", "pixtral", {}),
    "smolvlm": ("llama", "smolvlm_vision", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision", {}),
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision", {}),
    "voxtral": ("llama", "voxtral_encoder", {}),
}
MROPE = {"rope_theta": 500.0, "mrope_section": [2, 1, 1]}  # pairs of a head by axis


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_model_of_pictures_or_sound_is_a_model(
    name: str, tmp_path: Path
) -> None:
    text_type, vision_type, options = WRAPPERS[name]
    text = SIZES | CASES.get(text_type, {"rope_parameters": MROPE})
    text |= EXPERTS | {"moe_intermediate_size": 24} if "moe" in text_type else {}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 98, "max_position_embeddings": 64, "initializer_range": 0.3}
    text |= {"final_logit_softcapping": None, "logit_scale": 1.0}  # which the whole model ignores
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "out_hidden_size": 32}
    part = "audio_config" if vision_type.endswith("encoder") else "vision_config"
    make = transformers.AutoConfig.for_model
    config = make(
        name,
        text_config=make(text_type, **text).to_dict(),
        **{part: make(vision_type, **vision).to_dict()},
        **options,
    )
    torch.manual_seed(0)
    whole: Any = transformers.AutoModelForMultimodalLM.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, _ = target.load(target.resolve(str(tmp_path)))
    tokens = random_tokens(12, seed=9)
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([tokens])).logits[0]
    close(Decoder(backbone_of(model)).step(tokens, chain(12))[0], expected)


@pytest.mark.parametrize("case", CASES)
def test_matrices_read_when_they_are_needed_are_the_models_own(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SMALL", 0)
    model = tiny(case.split(",")[0], **SIZES | CASES[case])
    model.save_pretrained(tmp_path)
    config = pretrained.read_config(tmp_path, None)
    _, tensors = pretrained.open_model(tmp_path, None, config)
    backbone = Backbone.deferred(config, StoredWeights(tensors))
    expected = dict(Backbone.from_transformers(model).named_parameters())
    found = dict(backbone.named_parameters())
    assert found.keys() == expected.keys()
    assert all(is_deferred(found[name]) for name in found if name.endswith("out.weight"))
    for name, parameter in found.items():
        assert torch.equal(real(parameter), expected[name]), name


def test_an_unknown_family_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    script = (
        "import sys\n"
        "from spec_export import cli\n"
        f"sys.argv[1:] = ['build', '--model', {str(tmp_path)!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n"
        "    print('torch' in sys.modules, stop.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False", "2"], done
    assert (
        "gpt2', which is not supported (it needs learned positions): expected one of" in done.stderr
    )


def test_tensorrt_refuses_convolutions() -> None:
    with pytest.raises(UnsupportedModelError, match="convolution layers and backend tensorrt"):
        adapt(graph_of_all().clone(), "fp16", 64)


def test_positions_stay_whole_numbers_in_half_precision() -> None:
    """In float16 they would be wrong from 2049 on."""
    graph = narrow(graph_of_all().clone(), "fp16").graph
    types = {value.name: value.dtype for value in graph.inputs if str(value.name).startswith("kv.")}
    assert types.pop(POSITIONS) == ir.DataType.INT64
    assert set(types.values()) == {ir.DataType.FLOAT16}
