"""Reads what the forms of several drafters have in common: fc, embedding, head, decoder layers and
rotary parameters."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from spec_export.imports.drafters.folder import ForeignFolder, Reading
from spec_export.model.decoder import Backbone, DecoderConfig
from spec_export.model.deferred import real
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import brief

# Our weights of a layer, [in, out], and theirs, [out, in], whose rows ours hold side by side.
LAYER = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "mlp_norm": ("post_attention_layernorm",),
}

# Keys of published configs that tell of training, target or library, or repeat what shapes tell.
HARMLESS_KEYS = (
    "torch_dtype",
    "auto_map",
    "_attn_implementation",
    "transformers_version",
    "_name_or_path",
    "speculators_version",
    "speculators_config",
    "embed_requires_grad",
    "target_hidden_size",
    "target_model_type",
    "target_text_model_type",
    "target_model_name_or_path",
    "modal_type",
    "base_model_name_or_path",
    "num_target_layers",
    "draft_num_hidden_layers",
    "ttt_length",
    "step_loss_decay",
    "draft_vocab_size",
    "org_vocab_size",
    "max_sequence_length",
    "attention_head_dim",
    "use_qk_norm",
    "cla_share_factor",
    "dense_list",
    "pool_type",
    "decoder_sparse_step",
    "router_aux_loss_coef",
    "num_aux_hidden_states",
    "parallel_draft_heads_num_layers",
    "eagle_architecture",
)

SLIDING = "sliding_attention"


def exact_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Returns bfloat16 if all floating tensors have it without loss, else float32."""
    floats = [each for each in tensors.values() if each.is_floating_point()]
    is_exact = all(torch.equal(each, each.bfloat16().float()) for each in floats)
    return torch.bfloat16 if is_exact else torch.float32


def unsupported(folder: ForeignFolder, name: str, value: Any, expected: str) -> Exception:
    """Returns the error about a key of the config whose value is not supported."""
    return UnsupportedModelError(
        f"{folder.path}: got {brief(name, 80)} {value!r:.40} in the config, expected {expected}: "
        "such a drafter is not supported"
    )


def require_known_keys(
    folder: ForeignFolder, config: dict[str, Any], known: Collection[str]
) -> None:
    """Raises UnsupportedModelError, which names it, for a key that may change the forward pass.

    That is one with a value, which is not in `known`, in the configs of transformers' Llama and
    Qwen3, or among those that are published and change nothing; ids of tokens do not either.
    """
    from transformers import AutoConfig

    every = {*known, *HARMLESS_KEYS}
    for kind in ("llama", "qwen3"):
        every |= AutoConfig.for_model(kind).to_dict().keys()
    left = sorted(name for name, value in config.items() if value and name not in every)
    for name in left:
        if not name.endswith("_id"):
            raise UnsupportedModelError(
                f"{folder.path}: got {brief(name, 80)} {config[name]!r:.40} in the config, a key "
                "that is not known: if it changes nothing in the forward pass, remove it from there"
            )


def with_defaults(
    folder: ForeignFolder, layer: dict[str, Any], kinds: Collection[str]
) -> dict[str, Any]:
    """Returns a nested layer config, one of these kinds of models, with the defaults of its kind,
    which are not written."""
    from transformers import AutoConfig

    kind = layer.get("model_type", "qwen3")
    if kind not in kinds:
        raise unsupported(folder, "model_type", kind, " or ".join(kinds))
    fields = {key: value for key, value in layer.items() if key != "model_type"}
    try:
        whole: dict[str, Any] = AutoConfig.for_model(kind, **fields).to_dict()
    except Exception as error:  # transformers does not say what it raises
        raise UserError(f"{folder.path}: got a faulty layer config: {brief(error)}") from error
    return whole


def require_nothing_given(folder: ForeignFolder, given: dict[str, Any], library: str) -> None:
    """Raises UserError if the user decided something that a library's files do not leave open."""
    for name in given:
        raise UserError(
            f"got --{name.replace('_', '-')} for {folder.path}, a drafter of {library}, expected "
            "none: it has no such setting"
        )


def take_fc(
    folder: ForeignFolder,
    target: DecoderConfig,
    given: dict[str, Any],
    named: Callable[[int, int, Reading], list[int]],
    found: Reading,
) -> tuple[Tensor, list[int]]:
    """Takes the matrix fc from the folder, and returns it with the taps that it reads side by side.

    The number of taps follows from fc's width. The taps are those that the user has given;
    otherwise `named` names them, from the number of taps and the target's number of layers.
    """
    fc, width = folder.take("fc.weight"), target.hidden_size
    if fc.shape[1] % width:
        raise UserError(
            f"{folder.path}: got fc of {fc.shape[1]} inputs, expected a multiple of the target's "
            f"hidden size of {width}: it was trained for another target"
        )
    count = fc.shape[1] // width
    taps = list(given.get("taps") or named(count, target.num_layers, found))
    target.require_taps(taps)
    if len(taps) != count:
        raise UserError(
            f"{folder.path}: got fc for {count} taps and ids of {len(taps)}, expected as many: "
            "name the layers with --taps"
        )
    found.said.append(f"taps {', '.join(map(str, taps))}")
    return fc, taps


def moved_taps(taps: Collection[int], num_layers: int) -> dict[str, dict[str, Any]]:
    """Returns the readings of the same weights with all taps one layer off, in words."""
    every = [[tap + step for tap in taps] for step in (-1, 1)]
    return {
        f"--taps {','.join(map(str, moved))}": {"taps": moved}
        for moved in every
        if min(moved) >= 0 and max(moved) <= num_layers
    }


def take_embedding(
    folder: ForeignFolder, backbone: Backbone, D: int, state: dict[str, Tensor], found: Reading
) -> bool:
    """Takes the embedding and returns whether it is another one than what ours borrow."""
    table = backbone.embedding
    theirs = real(table.weight).float()
    if "embed_tokens.weight" in folder.tensors:
        own = folder.take("embed_tokens.weight")[: len(theirs)]
        if len(own) < len(theirs):
            raise UserError(
                f"{folder.path}: got an embedding of {len(own)} tokens, expected the target's "
                f"{len(theirs)}: it was trained for another target"
            )
    else:
        own = theirs
    if own.shape != (len(theirs), D):
        raise UserError(
            f"{folder.path}: got embedding rows of {own.shape[1]}, expected hidden size {D}"
        )
    is_targets = table.embedding_scale == 1 and torch.equal(own, theirs)
    found.said.append("the target's embedding" if is_targets else "an embedding of its own")
    if not is_targets:
        state["embedding"] = own
    return not is_targets


def take_head(
    folder: ForeignFolder, backbone: Backbone, D: int, state: dict[str, Tensor], found: Reading
) -> Tensor | None:
    """Takes the head, the target's where the file has none, and returns the tokens of its rows."""
    V = backbone.config.vocab_size
    maps = [folder.tensors.pop(name, None) for name in ("d2t", "draft_id_to_target_id")]
    offset = next((each for each in maps if each is not None), None)
    head = folder.take("lm_head.weight") if "lm_head.weight" in folder.tensors else None
    if offset is None:
        ids = None
        if head is None:
            head = real(backbone.head.weight).float()
        elif len(head) < V:
            ids = torch.arange(len(head))
        head = head[:V]
    else:
        ids = _draft_ids(offset, V, folder)
        if head is None:
            head = real(backbone.head.weight).float()[ids]
        shown = folder.tensors.get("t2d")
        if shown is not None and not (
            shown.dim() == 1
            and len(shown) > int(ids[-1])
            and int(shown.sum()) == len(ids)
            and bool(shown[ids].all())
        ):
            raise UserError(f"{folder.path}: got maps d2t and t2d of different tokens")
    if head.shape != (V if ids is None else len(ids), D):
        raise UserError(
            f"{folder.path}: got a head of shape {list(head.shape)}, expected "
            f"{[V if ids is None else len(ids), D]}"
        )
    found.said.append(f"{len(head)} of {V} tokens")
    state["head"] = head
    return ids


def _draft_ids(map_D: Tensor, V: int, folder: ForeignFolder) -> Tensor:
    """Returns the target's ids of a draft vocabulary, from offsets or from the ids themselves."""
    known = [torch.arange(map_D.numel()) + map_D.long(), map_D.long()] if map_D.dim() == 1 else []
    for ids in known:
        if len(ids) and int(ids[0]) >= 0 and int(ids[-1]) < V and bool((ids.diff() > 0).all()):
            return ids
    raise UserError(
        f"{folder.path}: got a map d2t that is neither offsets nor rising ids below {V}, the "
        "target's tokens: it was trained for another target"
    )


def layer_names(i: int, norms: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns the names of our weights of layer i, with these `norms` of its, and for each those of
    the tensors that it holds."""
    return {
        f"layers.{i}.{ours}": tuple(f"layers.{i}.{each}.weight" for each in theirs)
        for ours, theirs in (LAYER | norms).items()
    }


def take_layer(
    folder: ForeignFolder, i: int, norms: dict[str, tuple[str, ...]], state: dict[str, Tensor]
) -> None:
    """Moves the weights of layer i into `state`, by our names; see `layer_names`."""
    for ours, theirs in layer_names(i, norms).items():
        parts = torch.cat([folder.take(name) for name in theirs])
        state[ours] = parts.T if parts.dim() == 2 else parts


def layer_sizes(folder: ForeignFolder, num_heads: Any) -> dict[str, int]:
    """Returns the sizes of the layers, which are not yet taken, from the shapes of layer 0.

    Raises UserError if the config's `num_heads` does not fit them.
    """
    rows = {
        part: len(folder.tensors.get(f"layers.0.{part}_proj.weight", ()))
        for part in ("self_attn.q", "self_attn.k", "mlp.up")
    }
    if num_heads is None or rows["self_attn.q"] % num_heads:
        raise UserError(
            f"{folder.path}: got num_attention_heads {num_heads!r:.40} and {rows['self_attn.q']} "
            "rows of q_proj, expected a multiple"
        )
    head_dim = rows["self_attn.q"] // num_heads
    return {
        "num_heads": num_heads,
        "num_kv_heads": rows["self_attn.k"] // max(head_dim, 1),
        "head_dim": head_dim,
        "intermediate_size": rows["mlp.up"],
    }


def sliding_layers(
    folder: ForeignFolder, get: Callable[[str], Any], count: int, least: int, found: Reading
) -> dict[str, Any]:
    """Returns the fields of layers with a window, which a config says of each of its `count` layers
    by `layer_types`, in a GGUF file true for one with a window.

    get: a value of the config by its name. Raises UnsupportedModelError, which names it, for what
    is said by halves, and for a window narrower than `least` positions.
    """
    kinds, window = get("layer_types"), get("sliding_window")
    is_on = get("use_sliding_window")
    if kinds is None and (is_on or (folder.path.is_file() and window)):
        raise unsupported(folder, "layer_types", None, "the kind of each layer")
    kinds = [{True: SLIDING, False: "full_attention"}.get(kind, kind) for kind in kinds or ()]
    strange = [kind for kind in kinds if kind not in (SLIDING, "full_attention")]
    sliding = [i for i, kind in enumerate(kinds) if kind == SLIDING]
    if strange or (sliding and len(kinds) != count):
        expected = f"{SLIDING} or full_attention for each of {count} layers"
        raise unsupported(folder, "layer_types", strange or kinds, expected)
    if sliding and is_on is False:
        raise unsupported(folder, "use_sliding_window", False, f"True beside {SLIDING}")
    if sliding and (window or 0) < least:
        raise unsupported(folder, "sliding_window", window, f"{least} positions or more")
    if not sliding:
        return {}
    found.said.append(f"windows of {window} in layers {', '.join(map(str, sliding))}")
    return {"sliding_layers": sliding, "window": window}


def rotary_parameters(folder: ForeignFolder, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the drafter's own rotary parameters, by a config of its layers; the base is 10000
    where none is named."""
    rope = dict(config.get("rope_parameters") or {}) or dict(config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise unsupported(folder, "rope_parameters", "by kinds of layers", "one set of them")
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta") or 10000.0
    limit = config.get("max_position_embeddings")
    if rope["rope_type"] in ("yarn", "llama3") and limit:
        rope.setdefault("original_max_position_embeddings", limit)
    return rope
