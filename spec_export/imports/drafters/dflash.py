"""Reads DFlash, DFlash 2 and DSpark drafters in the forms of z-lab, ModelOpt, speculators, DeepSpec
and llama.cpp.

All have the tensors `fc`, `hidden_norm` and `norm`, and ordinary layers; DSpark adds the two tables
of a Markov head, and DFlash 2 convolutions and a selector. They differ in what an id of a target's
layer means, its input or its output, and in which row of a block gives the first guess, which no
tensor shows.
"""

from typing import Any

import torch
from torch import Tensor

from spec_export.imports.drafters.folder import ForeignFolder, Reading
from spec_export.imports.drafters.parts import (
    layer_sizes,
    moved_taps,
    require_known_keys,
    require_nothing_given,
    rotary_parameters,
    sliding_layers,
    take_embedding,
    take_fc,
    take_head,
    take_layer,
    unsupported,
    with_defaults,
)
from spec_export.model.decoder import Backbone
from spec_export.model.deferred import real
from spec_runtime.errors import UnsupportedModelError, UserError

SHOWS = "DFlash and DSpark (fc.weight and hidden_norm.weight)"
KINDS = ("dflash", "dflash2", "dspark")  # of speculators
MODELS = ("llama", "qwen3")  # whose layers are ours
OTHER_KINDS = ("xpress",)
# Keys that change the forward pass, with the values that ours has. Others are refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "attention_sink_bias"), (False,)),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), (1,)),
    **{"final_logit_softcapping": (), "is_neox_style": (True,), "hidden_act": ("silu",)},
    **{"markov_head_type": ("vanilla",), "projector_type": ("dflash", "dflash2", "dspark")},
    "speculators_model_type": KINDS,
}
# Keys that are read, or that change nothing here.
KNOWN = (
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "block_size",
    "shift_label",
    "sample_from_anchor",
    "markov_rank",
    "use_confidence_head",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_anchors",
    "max_anchors",
    "sliding_window_non_causal",
    "dflash_config",
    "transformer_layer_config",
    "rope_theta",
    "rope_scaling",
    "is_causal",
    "causal",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
# Parts of tensors' names, ^ before their beginning, and whose they are.
REFUSED = {
    "encoder.": "DFlash with an encoder",
    "qkv_proj": "Laguna",
    "g_proj": "Laguna",
    "aux_hidden_norms": "Laguna",
    "joint_proj": "DSpark with a recurrent Markov head",
    "markov_head.gate_proj": "DSpark with a gated Markov head",
    "^gate_proj": "ModelOpt's DSpark with a gated Markov head",
    "gru": "Domino",
}
HARMLESS = ("t2d", "verifier_", "rotary_emb.inv_freq", "input_embed_fn.weight")
CONFIDENCE = ("confidence_head.", "confidence_proj", "conf_proj.")
MARKOV = ("markov_w1", "markov_w2")
SELECTOR = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
ROWS = {"z-lab": 16, "speculators": 8, "GGUF": 16}  # of a block; the others always name them
ANCHOR = {True: "anchor", False: "fill-in"}


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds a block drafter, by its tensors' names or its config."""
    named = {"fc.weight", "hidden_norm.weight"} <= folder.tensors.keys()
    kind = folder.config.get("speculators_model_type")
    return named or kind in KINDS + OTHER_KINDS or "dflash_config" in folder.config


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns a drafter's config and weights for this target; `given` is what the user decided.

    Raises UserError if the files do not fit each other or the target, and UnsupportedModelError,
    which names it, for whatever changes the forward pass and is not known.
    """
    _refuse(folder)
    config = _Settings(folder)
    decided = {key: value for key, value in given.items() if key not in ("taps", "alignment")}
    require_nothing_given(folder, decided, config.format)
    found = Reading(config.format, "dflash", {})
    fc, taps = take_fc(folder, backbone.config, given, config.taps, found)
    D = len(fc)
    is_anchor = config.is_anchor(given.get("alignment"), found)
    rows, mask = config.block_size(found), config.get("mask_token_id")
    V = backbone.config.vocab_size
    if mask is None or mask >= V:
        raise UserError(
            f"{folder.path}: got mask_token_id {mask!r:.40}, expected one below {V}, the rows of "
            "the target's embedding"
        )
    found.said.append(f"blocks of {rows} rows, alignment {ANCHOR[is_anchor]}")
    state = {
        "fusion.fc": fc.T,
        "fusion.out_norm": folder.take("hidden_norm.weight"),
        "norm": folder.take("norm.weight"),
    }
    fields: dict[str, Any] = {"taps": taps, "block_size": rows, "mask_token_id": mask}
    fields |= {"sample_from_anchor": is_anchor, "hidden_size": D}
    fields |= _layers(folder, config, state)
    fields |= config.masks(fields["layers"], rows, found)
    fields |= {"norm_eps": float(config.get("rms_norm_eps", 1e-6)), "rope": config.rope(found)}
    fields["own_embedding"] = take_embedding(folder, backbone, D, state, found)
    found.draft_token_ids = ids = take_head(folder, backbone, D, state, found)
    # ours reads the target's head with the scale of its logits, theirs as it is stored
    theirs = real(backbone.head.weight).float()[:V] * backbone.logit_scale
    fields["own_head"] = not torch.equal(state["head"], theirs if ids is None else theirs[ids])
    size = len(state["head"])
    if not fields["own_head"]:
        del state["head"]
    found.said.append("a head of its own" if fields["own_head"] else "the target's head")
    if any(name.startswith("candidate_selector.") for name in folder.tensors):
        fields |= _selector(folder, config, (V, size), state, found)
    else:
        fields["markov_rank"] = _markov(folder, config, (V, size), state, found)
    if any(name.startswith(CONFIDENCE) for name in folder.tensors):
        found.said.append("its confidence head is not read: guesses have probabilities")
    folder.require_all_read(HARMLESS + CONFIDENCE)
    found.config, found.state = fields, state
    found.others = {f"--alignment {ANCHOR[not is_anchor]}": {"sample_from_anchor": not is_anchor}}
    found.others |= moved_taps(taps, backbone.config.num_layers)
    return found


def _refuse(folder: ForeignFolder) -> None:
    """Raises UnsupportedModelError for tensors or files of drafters that are not supported."""
    for part, what in REFUSED.items():
        name = next((name for name in sorted(folder.tensors) if part in f"^{name}"), "")
        if name:
            raise UnsupportedModelError(f"{folder.path}: got {name}, {what}: not supported yet")
    if folder.path.is_dir() and (folder.path / "mask_embedding.pt").exists():
        raise UnsupportedModelError(
            f"{folder.path}: got mask_embedding.pt, expected a mask that is one of the target's "
            "tokens: a row of its own is not supported"
        )


# ---- the config ----


class _Settings:
    """Reads the config of a block drafter, whose keys may be nested in two ways."""

    def __init__(self, folder: ForeignFolder) -> None:
        top, self._folder = folder.config, folder
        layer = top.get("transformer_layer_config") or {}
        nested = top.get("dflash_config") or {}
        if layer:
            layer = with_defaults(folder, layer, MODELS)
        elif top.get("model_type") not in (None, *MODELS):
            raise unsupported(folder, "model_type", top["model_type"], " or ".join(MODELS))
        self._places = (nested, top, layer)
        for place in self._places:
            for name, values in ONLY.items():
                value = place.get(name)
                if value is not None and value not in values:
                    expected = " or ".join(map(str, values)) or "none"
                    raise unsupported(folder, name, value, expected)
            if not folder.path.is_file():  # a GGUF file's keys are looked at when it is read
                require_known_keys(folder, place, {*KNOWN, *ONLY})
        has_flags = bool({"shift_label", "projector_type"} & nested.keys())
        is_modelopt = has_flags or MARKOV[0] in folder.tensors
        kind = top.get("speculators_model_type")
        self.is_dspark = kind == "dspark" or f"{MARKOV[0]}.weight" in folder.tensors
        if folder.path.is_file():
            self.format = "GGUF"
        elif kind:
            self.format = "speculators"
        elif nested:
            self.format = "ModelOpt" if is_modelopt else "z-lab"
        elif "target_layer_ids" in top:
            self.format = "DeepSpec"
        else:
            raise UnsupportedModelError(
                f"{folder.path}: got a config without dflash_config, speculators_model_type and "
                "target_layer_ids, expected one of them"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the config, wherever it is nested; null counts as absent."""
        return next((p[name] for p in self._places if p.get(name) is not None), default)

    def taps(self, count: int, n: int, found: Reading) -> list[int]:
        """Returns `count` taps of a target of n layers: ids are layers' inputs in speculators'
        and GGUF files, and outputs in others."""
        is_input = self.format in ("speculators", "GGUF")
        name = "aux_hidden_state_layer_ids" if is_input else "target_layer_ids"
        ids = self.get(name)
        if ids is None and not is_input:
            steps, n = range(count), self.get("num_target_layers", n)
            ids = [round(1 + i * (n - 4) / (count - 1)) for i in steps] if count > 1 else [n // 2]
            found.doubts.append(f"the config names no layers: outputs {ids} are the usual ones")
        if ids is None:
            raise unsupported(self._folder, name, ids, "a list of integers")
        if is_input:
            return ids
        found.said.append(f"ids {', '.join(map(str, ids))} read as layers' outputs")
        return [i + 1 for i in ids]

    def is_anchor(self, given: str | None, found: Reading) -> bool:
        """Returns whether row k of a block guesses the token after its own."""
        if given is not None:
            return given == ANCHOR[True]
        if self.format == "DeepSpec":
            return True
        name = "shift_label" if self.format in ("z-lab", "ModelOpt") else "sample_from_anchor"
        value = self.get(name)
        if value is None and self.is_dspark:
            value = self.format == "GGUF"  # as llama.cpp reads it
            read = f"read as {'yes' if value else 'no'}: --alignment {ANCHOR[not value]}"
            found.doubts.append(f"{name} is not in the config, {read}")
        return bool(value)

    def block_size(self, found: Reading) -> int:
        """Returns the rows of a block."""
        rows = self.get("block_size")
        if rows is None:
            rows = ROWS.get(self.format)
            found.doubts.append(f"the config names no block_size: {rows} is the usual one")
        if rows is None:
            raise unsupported(self._folder, "block_size", rows, "2 rows or more")
        return rows

    def masks(self, count: int, rows: int, found: Reading) -> dict[str, Any]:
        """Returns the fields of layers with a window, and of those whose rows see no later row of
        the block; such are speculators' with a window unless it says otherwise, and z-lab's and
        ModelOpt's where nothing is said."""
        fields = sliding_layers(self._folder, self.get, count, rows, found)
        sliding = fields.get("sliding_layers", [])
        is_causal = self.get("is_causal", self.get("causal"))
        if self.format == "speculators":
            causal = [] if self.get("sliding_window_non_causal") else sliding
        elif is_causal is None and self.format != "GGUF":
            causal = sliding
        else:
            causal = list(range(count)) if is_causal else []
        if causal:
            found.said.append(f"causal blocks in layers {', '.join(map(str, causal))}")
        return fields | {"causal_layers": causal}

    def require(self, name: str, value: int) -> None:
        """Raises UserError if the config names another number than the tensors show."""
        named = self.get(name, value)
        if named != value:
            raise UserError(
                f"{self._folder.path}: got {name} {named!r:.40} in the config and tensors of "
                f"{value}: they are not of one drafter"
            )

    def rope(self, found: Reading) -> dict[str, Any]:
        """Returns the drafter's own rotary parameters."""
        names = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
        rope = rotary_parameters(self._folder, {key: self.get(key) for key in names})
        found.said.append(f"rotary base {rope['rope_theta']:g}, {rope['rope_type']}")
        return rope


# ---- the weights ----


def block_norms(has_head_norms: bool) -> dict[str, tuple[str, ...]]:
    """Returns the names of our norms in a layer, and of theirs; see parts.LAYER."""
    norms: dict[str, tuple[str, ...]] = {"attention_norm": ("input_layernorm",)}
    if has_head_norms:
        norms |= {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
    return norms


def _layers(folder: ForeignFolder, config: _Settings, state: dict[str, Tensor]) -> dict[str, Any]:
    """Moves the layers' weights into `state` and returns the fields that they decide."""
    count = 0
    while f"layers.{count}.input_layernorm.weight" in folder.tensors:
        count += 1
    named = config.get("num_hidden_layers", count)
    if not count or named != count:
        raise UserError(
            f"{folder.path}: got num_hidden_layers {named!r:.40} and weights of {count} layers, "
            "expected as many, 1 or more"
        )
    sizes = layer_sizes(folder, config.get("num_attention_heads"))
    has_norms = "layers.0.self_attn.q_norm.weight" in folder.tensors
    norms = block_norms(has_norms)
    fields: dict[str, Any] = {"layers": count, "qk_norms": has_norms} | sizes
    has_convolutions = "layers.0.attention_conv.base_kernel" in folder.tensors
    for i in range(count):
        take_layer(folder, i, norms, state)
        for part in ("attention_conv", "mlp_conv") if has_convolutions else ():
            fields |= _convolution(folder, config, f"layers.{i}.{part}", state)
    return fields


def _convolution(
    folder: ForeignFolder, config: _Settings, name: str, state: dict[str, Tensor]
) -> dict[str, int]:
    """Moves a convolution of this name into `state` and returns the fields that it decides."""
    state[f"{name}.project"] = project = folder.take(f"{name}.kernel_projection.weight").T
    base = folder.take(f"{name}.base_kernel", 3)
    (D, rows), size = project.shape, base.shape[1]
    if not size or not rows or base.shape != (2, size, D) or 2 * size * D % rows:
        raise UserError(
            f"{folder.path}: got {name} of shapes {list(base.shape)} and {[rows, D]}, expected "
            f"[2, size, {D}] and [2 · size · groups, {D}]"
        )
    state[f"{name}.base"] = base
    fields = {"conv_kernel_size": size, "conv_group_size": 2 * size * D // rows}
    for key, value in fields.items():
        config.require(key, value)
    return {"conv_size": size, "conv_group": fields["conv_group_size"]}


def _selector(
    folder: ForeignFolder,
    config: _Settings,
    sizes: tuple[int, int],
    state: dict[str, Tensor],
    found: Reading,
) -> dict[str, Any]:
    """Moves DFlash 2's selector into `state` and returns its fields; `sizes` as in `_markov`."""
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"{folder.path}: got a selector and a head of {sizes[1]} tokens, expected all "
            f"{sizes[0]}: a smaller vocabulary is not supported"
        )
    names = [name if name in folder.tensors else f"{name}.weight" for name in SELECTOR]
    tables = [folder.take(name) for name in names]
    rank, top_k = tables[0].shape[1], config.get("selector_top_k", 16)
    config.require("selector_rank", rank)
    if not 1 <= top_k <= sizes[0]:
        raise unsupported(folder, "selector_top_k", top_k, "a number of candidates")
    _take_tables(folder, tables, sizes, state)
    state["markov_hidden"] = folder.take("candidate_selector.hidden_projection.weight").T
    found.said.append(f"a selector of rank {rank} among {top_k} candidates")
    return {"markov_rank": rank, "selector": True, "top_k": top_k}


def _markov(
    folder: ForeignFolder,
    config: _Settings,
    sizes: tuple[int, int],
    state: dict[str, Tensor],
    found: Reading,
) -> int:
    """Moves the tables of a Markov head into `state` and returns its rank, 0 for none; `sizes` are
    the tokens of the target and those of the head."""
    tables = []
    for name in MARKOV:
        flat = name if name in folder.tensors else f"{name}.weight"
        flat = flat if flat in folder.tensors else f"markov_head.{name}.weight"
        if flat in folder.tensors:
            tables.append(folder.take(flat))
    rank = tables[0].shape[1] if tables else 0
    named = config.get("markov_rank", rank)
    if len(tables) == 1 or named != rank:
        raise UserError(
            f"{folder.path}: got markov_rank {named!r:.40} and {len(tables)} tables of rank "
            f"{rank}, expected two of this rank, or none and 0"
        )
    _take_tables(folder, tables, sizes, state)
    if rank:
        found.said.append(f"a Markov head of rank {rank}")
    return rank


def _take_tables(
    folder: ForeignFolder, tables: list[Tensor], sizes: tuple[int, int], state: dict[str, Tensor]
) -> None:
    """Moves the two tables of a Markov head or a selector into `state`, if there are any."""
    for ours, size, table in zip(("markov_read", "markov_write"), sizes, tables, strict=False):
        if len(table) < size or table.shape[1] != tables[0].shape[1]:
            raise UserError(
                f"{folder.path}: got a Markov table of shape {list(table.shape)}, expected "
                f"{[size, tables[0].shape[1]]}"
            )
        state[ours] = table[:size]
