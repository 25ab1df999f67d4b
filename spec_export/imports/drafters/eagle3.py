"""Reads EAGLE-3 drafters in the forms of its authors, of speculators, ModelOpt, SpecForge,
AngelSlim and DeepSpec, and speculators' P-EAGLE ones.

All have the tensors of one layer that reads pairs, `midlayer.*` or `layers.0.*`, and a few ordinary
ones after it. They differ in norms, which tensors show, in flags, which only the config has, and in
what an id of a target's layer means: the layer's input, or its output. P-EAGLE
adds the states of mask rows.
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
from spec_runtime.errors import UnsupportedModelError, UserError

# Keys that change the forward pass, with the values that ours has. Others are refused.
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), (True,)),
    **dict.fromkeys(("use_last_layernorm", "next_layer_regular"), (True,)),
    "use_mtp_layernorm": (False,),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias"), (False,)),
    **dict.fromkeys(("position_embedding_type", "norm_type"), ("rope", "rms")),
    "use_rotary_pos_emb": (True,),
    "parallel_draft_step": (1,),
    "hidden_act": ("silu",),
    "model_type": ("llama", "qwen3"),
}
COPIED = ("qwen2", "phi3")
# Keys of a nested `eagle_config` that are read, or change nothing here.
NESTED = (
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_output",
    "norm_before_residual",
    "num_aux_hidden_states",
    "eagle_architecture",
    "parallel_draft_heads_num_layers",
)
TOP = (
    "transformer_layer_config",
    "eagle_config",
    "speculators_model_type",
    "target_layer_ids",
    "rope_theta",
    "rope_scaling",
)
# Beginnings of tensors' names that change nothing: copies of the target's and derived ones.
HARMLESS = ("t2d", "verifier_", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
REFUSED = {
    "parallel_draft_heads.": "ModelOpt's parallel heads",
    "additional_layers.": "SGLang's additional layers",
}


MASK = "mask_hidden"  # the states of P-EAGLE's mask rows
SHOWS = "EAGLE-3 (midlayer.* or layers.0.hidden_norm.weight)"


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds an EAGLE-3 drafter, by its tensors' names."""
    return any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in folder.tensors)


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns a drafter's config and weights for this target; `given` are fields of our config that
    the user decided.

    Raises UserError if the files do not fit each other or the target, and UnsupportedModelError,
    which names it, for whatever changes the forward pass and is not known.
    """
    config = _Settings(folder)
    folder.tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in folder.tensors.items()
    }
    for name, what in REFUSED.items():
        if any(tensor.startswith(name) for tensor in folder.tensors):
            raise UnsupportedModelError(f"{folder.path}: got {name}*, {what}: not supported yet")
    of_blocks = {name: value for name, value in given.items() if name == "alignment"}
    require_nothing_given(folder, of_blocks, config.format)
    found = Reading(config.format, config.drafter, {})
    fc, taps = take_fc(folder, backbone.config, given, config.taps, found)
    D = len(fc)
    state = {"fusion.fc": fc.T, "norm": folder.take("norm.weight")}
    fc_norms = [f"fc_norm.{i}.weight" for i in range(len(taps))]
    fields: dict[str, Any] = {"taps": taps}
    fields["fc_norm"] = fc_norms[0] in folder.tensors
    fields["norm_before_fc"] = "input_norm.weight" in folder.tensors
    for name in ("fc_norm", "norm_before_fc"):
        config.require_flag(name, fields[name])
    if fields["fc_norm"]:
        state["fusion.norm"] = torch.stack([folder.take(name) for name in fc_norms])
    elif fields["norm_before_fc"]:
        state["fusion.norm"] = folder.take("input_norm.weight")
    if found.name == "peagle":
        fields |= _masks(folder, config, fc.shape[1], state, given)
    else:
        fields["norm_output"] = config.norm_output(found)
    fields["norm_before_residual"] = config.norm_before_residual(found)
    fields |= {key: value for key, value in given.items() if key != "taps"}
    fields |= _layers(folder, config, state)
    group = fields.get("num_masks", 0) + 1
    fields |= sliding_layers(folder, config.get, fields["layers"], group, found)
    fields |= {"norm_eps": float(config.get("rms_norm_eps", 1e-6)), "rope": config.rope(found)}
    fields |= {"hidden_size": D}
    fields["own_embedding"] = take_embedding(folder, backbone, D, state, found)
    found.draft_token_ids = take_head(folder, backbone, D, state, found)
    folder.require_all_read(HARMLESS)
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norms")
    on = [name for name in flags if fields.get(name)]
    found.said.append(f"layers: {fields['layers']}, {', '.join(on) or 'no further norms'}")
    found.config, found.state = fields, state
    found.others = _other_readings(fields, backbone.config.num_layers)
    return found


# ---- the config ----


class _Settings:
    """Reads an EAGLE-3 config, whose keys may be nested in two ways."""

    def __init__(self, folder: ForeignFolder) -> None:
        top, self._folder, self._path = folder.config, folder, folder.path
        self._layer = top.get("transformer_layer_config") or top
        self._nested = top.get("eagle_config") or {}
        if self._layer is not top:
            self._layer = with_defaults(folder, self._layer, ONLY["model_type"])
        self._top = top
        self.format = self._format(folder)
        kind, has_masks = top.get("speculators_model_type"), MASK in folder.tensors
        self.drafter = "peagle" if kind == "peagle" else "eagle3"
        if has_masks != (kind == "peagle"):
            raise UnsupportedModelError(
                f"{folder.path}: got speculators_model_type {kind!r:.40} "
                f"{'with' if has_masks else 'without'} weights {MASK}, expected them with "
                "'peagle', and with no other"
            )
        for name, values in ONLY.items():
            # a config whose layers are nested has another kind of its own at the top
            value = self._layer.get(name) if name == "model_type" else self.get(name)
            if name == "model_type" and self._layer is top:
                values += COPIED  # the target's, of a drafter whose layers are Llama's
            if value is not None and value not in values:
                raise self._unsupported(name, value, " or ".join(map(str, values)))
        unknown = sorted(set(self._nested) - set(NESTED) - set(ONLY))
        if unknown:
            raise self._unsupported(f"eagle_config.{unknown[0]}", self._nested[unknown[0]], "none")
        if not folder.path.is_file():  # a GGUF file's keys are looked at when it is read
            known = {*TOP, *NESTED, *ONLY}
            require_known_keys(folder, top, known)
            require_known_keys(folder, top.get("transformer_layer_config") or {}, known)

    def _format(self, folder: ForeignFolder) -> str:
        if folder.path.is_file():
            return "GGUF"
        kind, names = self._top.get("speculators_model_type"), self._top.get("architectures")
        if kind is not None:
            if kind not in ("eagle3", "peagle"):
                raise self._unsupported("speculators_model_type", kind, "eagle3 or peagle")
            return "speculators"
        if "target_layer_ids" in self._top:
            return "DeepSpec"
        if not any(name.startswith("midlayer.") for name in folder.tensors):
            return "ModelOpt"
        if self._nested:
            return "SpecForge"
        return "AngelSlim" if names == ["Eagle3LlamaForCausalLM"] else "EAGLE"

    def _unsupported(self, name: str, value: Any, expected: str) -> Exception:
        return unsupported(self._folder, name, value, expected)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the config, wherever it is nested; null counts as absent."""
        for place in (self._top, self._nested, self._layer):
            if place.get(name) is not None:
                return place[name]
        return default

    def require_flag(self, name: str, is_there: bool) -> None:
        """Raises UserError if a flag contradicts the tensors."""
        if self.get(name) is not None and bool(self.get(name)) != is_there:
            raise UserError(
                f"{self._path}: got {name} {self.get(name)} in the config, and weights "
                f"{'with' if is_there else 'without'} such norms: they are not of one drafter"
            )

    def taps(self, count: int, n: int, found: Reading) -> list[int]:
        """Returns the taps of a target of n layers; `count` of them are expected.

        An id is a layer's input or its output, by the format. The three layers that both kinds of
        libraries take by default tell it, and so does n, which can only be an input's id.
        """
        default = [2, n // 2, n - 3]
        at_top = self._top.get("eagle_aux_hidden_state_layer_ids")
        ids = at_top or self.get("eagle_aux_hidden_state_layer_ids") or self.get("target_layer_ids")
        if ids is None:
            found.doubts.append(f"the config names no layers: taps {default} are the usual ones")
            return default
        outputs = [i + 1 for i in ids]
        if self.format == "GGUF":
            if ids == default:
                found.doubts.append(
                    f"llama.cpp once wrote layers {ids} whatever the drafter read: if its config "
                    "named others, give them with --taps"
                )
            return ids
        if ids == default or n in ids or (at_top is not None and outputs != default):
            return ids
        found.said.append(f"ids {', '.join(map(str, ids))} read as layers' outputs")
        if outputs != default and self.format != "DeepSpec":
            found.doubts.append(
                f"ids {ids} were read as layers' outputs, taps {outputs}; they may be inputs: "
                f"--taps {','.join(map(str, ids))}"
            )
        return outputs

    def norm_output(self, found: Reading) -> bool:
        """Returns whether the next row reads the normed output."""
        value = bool(self.get("norm_output", False))
        if value and self.format in ("SpecForge", "EAGLE"):
            found.doubts.append(
                "norm_output of SpecForge's files until September 2026 means something else: "
                "--norm-output no"
            )
        return value

    def norm_before_residual(self, found: Reading) -> bool:
        """Returns whether the first layer adds to the normed state."""
        value = self.get("norm_before_residual")
        if value is None and self.format == "speculators" and self.drafter == "eagle3":
            found.doubts.append(
                "norm_before_residual is not in the config, read as no: --norm-before-residual yes"
            )
        return bool(value)

    def num_guesses(self) -> int:
        """Returns how many tokens a P-EAGLE drafter is to guess, the number it was trained for."""
        about = self._top.get("speculators_config") or {}
        first, *_ = about.get("proposal_methods") or [{}]
        number: int | None = first.get("speculative_tokens")
        if number is None:
            raise UserError(
                f"{self._path}: got speculative_tokens None in the speculators_config, expected "
                "the number of guesses"
            )
        return number

    def rope(self, found: Reading) -> dict[str, Any]:
        """Returns the drafter's own rotary parameters."""
        rope = rotary_parameters(self._folder, self._layer)
        if self.format == "ModelOpt" and rope["rope_type"] == "yarn":
            found.doubts.append("ModelOpt adds YaRN when it exports, without training with it")
        found.said.append(f"rotary base {rope['rope_theta']:g}, {rope['rope_type']}")
        return rope


# ---- the weights ----


def layer_norms(i: int, has_head_norms: bool) -> dict[str, tuple[str, ...]]:
    """Returns the names of our norms in layer i, and of theirs; see parts.LAYER."""
    norms = {"attention_norm": "input_layernorm"}
    if i == 0:
        norms = {"attention_norm": "hidden_norm", "token_norm": "input_layernorm"}
    if has_head_norms:
        norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    return {ours: (theirs,) for ours, theirs in norms.items()}


def _layers(folder: ForeignFolder, config: _Settings, state: dict[str, Tensor]) -> dict[str, Any]:
    """Moves the layers' weights into `state` and returns the fields that they decide."""
    count = 1
    while f"layers.{count}.input_layernorm.weight" in folder.tensors:
        count += 1
    if config.format == "DeepSpec" and count > 1:
        raise UnsupportedModelError(f"{folder.path}: got {count} layers of DeepSpec, expected one")
    sizes = layer_sizes(folder, config.get("num_attention_heads"))
    has_norms = "layers.0.self_attn.q_norm.weight" in folder.tensors
    for i in range(count):
        take_layer(folder, i, layer_norms(i, has_norms), state)
    return {"layers": count, "qk_norms": has_norms} | sizes


def _masks(
    folder: ForeignFolder,
    config: _Settings,
    width: int,
    state: dict[str, Tensor],
    given: dict[str, Any],
) -> dict[str, Any]:
    """Moves the states f32[width] of P-EAGLE's mask rows into `state`, and returns the fields that
    mask rows have; `norm_output` changes nothing, for no row reads another one's output."""
    if "norm_output" in given:
        raise UserError(
            f"got --norm-output for {folder.path}, a P-EAGLE drafter, expected none: no row of it "
            "reads another one's output"
        )
    hidden, token = folder.take(MASK, 3), config.get("mask_token_id")
    if hidden.numel() != width:
        raise UserError(
            f"{folder.path}: got {MASK} of shape {list(hidden.shape)}, expected [1, 1, {width}]"
        )
    if token is None:
        raise UserError(
            f"{folder.path}: got mask_token_id None in the config, expected the id of "
            "the token that mask rows read"
        )
    state[MASK] = hidden.flatten()
    return {"num_masks": config.num_guesses() - 1, "mask_token_id": token}


def _other_readings(config: dict[str, Any], num_layers: int) -> dict[str, dict[str, Any]]:
    """Returns other readings of the same weights, in words: the fields in which they differ."""
    found = moved_taps(config["taps"], num_layers)
    for name in [each for each in ("norm_output", "norm_before_residual") if each in config]:
        value = not config[name]
        found[f"--{name.replace('_', '-')} {'yes' if value else 'no'}"] = {name: value}
    return found
