"""Writes drafters of ours in the forms that other libraries read.

What a form cannot say is refused by name, because their readers would draft without it in silence.
"""

import json
import shutil
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from spec_export import drafters
from spec_export.build.drafters import load_module, shipped_drafter, warn_of_doubts
from spec_export.imports.drafters import medusa
from spec_export.imports.drafters.dflash import MARKOV, block_norms
from spec_export.imports.drafters.eagle3 import MASK, layer_norms
from spec_export.imports.drafters.folder import SEARCH, SEARCH_KEY
from spec_export.imports.drafters.parts import SLIDING, exact_dtype, layer_names
from spec_export.model import target
from spec_export.model.config import own_rotary_table
from spec_export.model.decoder import Backbone
from spec_export.model.files import HEADS
from spec_export.report import SILENT, Report
from spec_export.training.checkpoint import SavedDrafter, load_drafter
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.writing import replacing_folder, require_replaceable

# The drafters that a form can hold.
FORMS = {
    "speculators": ("dflash", "eagle3", "peagle"),
    "native": ("eagle3", "medusa"),
    "vllm-medusa": ("medusa",),
}
NO_FORM = {
    "amphista": "no published form has its attention between heads",
    "draft_model": "it borrows the target's embedding and head through products of its own",
    "eagle": "vLLM's has no norm before its layer and no bias in fc, ours may have both",
    "hydra": "the published form has biases and no norm before its heads, and ours the reverse",
    "parallelspec": "P-EAGLE has one mask row for all guesses and no final feature, ours has both",
    "pard": "it is a language model: what is imported is what other engines read",
    "redrafter": "TensorRT-LLM's form of it is not supported",
    "semi_autoregressive": "no published form has its layers",
    "skip_layer": "it is the target's own first layers",
}
ARCHITECTURES = {  # of speculators, by its kinds of drafters
    **{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"},
    **{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"},
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")  # whose tables do not depend on the context


@dataclass(frozen=True)
class Exported:
    """The content of a folder: config.json and the tensors, in float32."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights_file: str = "model.safetensors"


def run(checkpoint: str, form: str, model: str | None, out: Path, report: Report = SILENT) -> Path:
    """Writes a drafter as `form`, one of `FORMS`, to the new folder `out`; returns `out`.

    checkpoint: its folder, or the name of one that is shipped for the demo. model: the target that
    it was trained for, None for the demo. Raises UserError if it does not fit the target, and
    UnsupportedModelError, with its name, for what the form cannot say.
    """
    require_replaceable(out, _nothing, "an empty folder")
    saved = _saved(checkpoint, model)
    _require_form(saved, form)
    source = target.resolve(model, report)
    warn_of_doubts(saved, source, report)
    with report.status("loading the target"):
        hf_model, _ = target.load(source)
    backbone = Backbone.from_transformers(hf_model)
    module = load_module(saved, backbone.config, target.ends(backbone))
    if saved.name == "medusa":
        if form == "native":
            exported = _native_medusa(module, f"{saved.path}, as {form}", model)
        else:
            exported = _medusa(module, backbone)
    elif saved.name == "dflash":
        exported = _block_drafter(_Blocks(module, backbone, f"{saved.path}, as {form}"))
    else:
        write = _speculators if form == "speculators" else _native
        exported = write(_Eagle3(module, backbone, f"{saved.path}, as {form}"))
    if form == "speculators":
        exported.config["speculators_config"]["verifier"] = {
            "name_or_path": model if source.kind in ("hub", "folder") else None,
            "architectures": [type(hf_model).__name__],
        }
    settings = asdict(module.config)
    _write(exported, {name: settings[name] for name in SEARCH if name in settings}, out)
    if saved.bigrams is not None:
        report.line("its table of bigrams is left out: the form has no place for it")
    report.line("the engines that read this form draft chains, whose accepted length is shorter")
    return out


def _saved(checkpoint: str, model: str | None) -> SavedDrafter:
    if model is None and not Path(checkpoint).exists() and checkpoint in drafters.trainable():
        return shipped_drafter(checkpoint)
    return load_drafter(checkpoint)


def _require_form(saved: SavedDrafter, form: str) -> None:
    """Raises UnsupportedModelError if a drafter of this kind has no such form."""
    reason, forms = (
        NO_FORM.get(saved.name),
        [f for f, kinds in FORMS.items() if saved.name in kinds],
    )
    if not forms:
        known = ", ".join(sorted({*chain(*FORMS.values())}))
        raise UnsupportedModelError(
            f"got drafter {saved.name}, expected one of {known}: "
            f"{reason or 'others have no form for it'}"
        )
    if form not in forms:
        raise UserError(
            f"got format {form} for drafter {saved.name}, expected {' or '.join(forms)}"
        )


def _nothing(folder: Path) -> set[str] | None:
    """Says that no file in an existing folder may be replaced."""
    return None


def _write(exported: Exported, search: dict[str, int], out: Path) -> None:
    """Writes the folder whole or not at all, in bfloat16 if that loses nothing, with `search` for
    our own import."""
    dtype = exact_dtype(exported.tensors)
    tensors = {
        name: (each.to(dtype) if each.is_floating_point() else each).clone().contiguous()
        for name, each in exported.tensors.items()
    }
    config = exported.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with replacing_folder(out, _nothing, "an empty folder") as folder:
        text = json.dumps(config, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        weights = folder / exported.weights_file
        about = {"format": "pt", SEARCH_KEY: json.dumps(search)}
        safetensors.torch.save_file(tensors, weights, about)
        shutil.copymode(folder / "config.json", weights)  # safetensors makes it private


def _turned(weight: Tensor) -> Tensor:
    """Returns a product's weights, ours [in, out], as [out, in]; those of a norm or bias as they
    are."""
    weight = weight.detach().float()
    return weight.T if weight.dim() == 2 else weight


# ---- EAGLE-3 ----


class _Eagle3:
    """Holds what both forms say of a drafter, and refuses what one of them cannot."""

    def __init__(self, module: Any, backbone: Backbone, where: str) -> None:
        self.module, self.backbone, self._where = module, backbone, where
        self.config, self.dims = module.config, module.dims
        self.rope = self._rope()

    def require(self, name: str, value: Any, expected: Any) -> None:
        """Raises UnsupportedModelError, which names the field, unless it is as expected."""
        if value != expected:
            raise UnsupportedModelError(
                f"{self._where}: got {name} {value}, expected {expected}: it has no such form"
            )

    def _rope(self) -> dict[str, Any]:
        """Returns the parameters of the rotary embedding, as transformers writes them."""
        module, dims = self.module, self.dims
        rope = self.config.rope or self.backbone.config.rope
        rope = {name: each for name, each in rope.items() if not isinstance(each, dict)}
        kind = rope.setdefault("rope_type", "default")
        if kind not in ROPE_KINDS:
            self.require("rope_type", kind, " or ".join(ROPE_KINDS))
        self.require("rotary width", 2 * module.cos.shape[1], dims.head_dim)
        tables = own_rotary_table(rope, dims.head_dim, len(module.cos))
        is_same = all(map(torch.equal, tables, (module.cos, module.sin)))
        self.require("rotary tables", "of another kind" if not is_same else kind, kind)
        return rope

    def layer_config(self) -> dict[str, Any]:
        """Returns the keys of a decoder's config."""
        dims, target_config = self.dims, self.backbone.config
        return {
            "model_type": "qwen3" if self.config.qk_norms else "llama",
            "vocab_size": target_config.vocab_size,
            "hidden_size": dims.hidden_size,
            "intermediate_size": dims.intermediate_size,
            "num_hidden_layers": self.config.layers,
            "num_attention_heads": dims.num_heads,
            "num_key_value_heads": dims.num_kv_heads,
            "head_dim": dims.head_dim,
            "rms_norm_eps": dims.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": target_config.max_length,
            "tie_word_embeddings": False,
            **self._windows(),
        }

    def _windows(self) -> dict[str, Any]:
        """Returns the keys of layers with a window, none if there are none."""
        sliding = self.config.sliding_layers
        if not sliding:
            return {}
        kinds = [SLIDING if i in sliding else "full_attention" for i in range(self.config.layers)]
        window = self.config.window
        return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}

    def of_speculators(self, kind: str) -> dict[str, Any]:
        """Returns what `speculators` writes of a drafter of any kind; raises UnsupportedModelError
        for another width than the target's, which it cannot say."""
        self.require("hidden_size", self.dims.hidden_size, self.backbone.config.hidden_size)
        number = self.config.num_guesses
        return {
            "architectures": [ARCHITECTURES[kind]],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": number}],
                "default_proposal_method": "greedy",
            },
            "transformer_layer_config": self.layer_config() | {"rope_parameters": self.rope},
            "draft_vocab_size": len(self.module.draft_token_ids),
            "tie_word_embeddings": False,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns the weights as `speculators` names them, with the embedding that it reads."""
        module = self.module
        state = {name: each.detach().float() for name, each in module.state_dict().items()}
        state.pop("embedding", None)
        found = {
            "embed_tokens.weight": module.embedding_table.detach().float(),
            "fc.weight": state.pop("fusion.fc").T,
            "norm.weight": state.pop("norm"),
            "lm_head.weight": state.pop("head"),
        }
        if self.config.fc_norm:
            norms = enumerate(state.pop("fusion.norm"))
            found |= {f"fc_norm.{i}.weight": norm for i, norm in norms}
        elif self.config.norm_before_fc:
            found["input_norm.weight"] = state.pop("fusion.norm")
        if MASK in state:
            found[MASK] = state.pop(MASK).view(1, 1, -1)
        return found | self._layers(state) | self._vocabulary()

    def norms(self, i: int) -> dict[str, tuple[str, ...]]:
        """Returns the names of our norms in layer i, and of theirs."""
        return layer_norms(i, self.config.qk_norms)

    def _layers(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of all layers, the last ones that `state` has."""
        dims, found = self.dims, dict[str, Tensor]()
        heads = [count * dims.head_dim for count in (dims.num_heads, *2 * (dims.num_kv_heads,))]
        for i in range(self.config.layers):
            for ours, theirs in layer_names(i, self.norms(i)).items():
                rows = _turned(state.pop(ours))
                sizes = heads if len(theirs) == 3 else [len(rows) // len(theirs)] * len(theirs)
                found |= dict(zip(theirs, rows.split(sizes), strict=True))
        assert not state, sorted(state)
        return found

    def _vocabulary(self) -> dict[str, Tensor]:
        """Returns the maps between the target's tokens and those that are guessed."""
        if not self.has_draft_vocabulary:
            return {}
        ids, V = self.module.draft_token_ids, self.backbone.config.vocab_size
        of_drafts = ids - torch.arange(len(ids))
        return {"d2t": of_drafts, "t2d": torch.isin(torch.arange(V), ids)}

    @property
    def has_draft_vocabulary(self) -> bool:
        return len(self.module.draft_token_ids) < self.backbone.config.vocab_size


def _speculators(drafter: _Eagle3) -> Exported:
    """Returns a drafter as the library `speculators` 0.9 saves it, which vLLM reads."""
    config = drafter.config
    kind = "peagle" if hasattr(config, "mask_token_id") else "eagle3"
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "mask_token_id")
    about = drafter.of_speculators(kind) | {
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "embed_requires_grad": config.own_embedding,
        **{name: getattr(config, name) for name in flags if hasattr(config, name)},
    }
    return Exported(about, drafter.tensors())


def _native(drafter: _Eagle3) -> Exported:
    """Returns a drafter as the code of EAGLE's authors reads it, which has none of the variations:
    it takes the taps from no config, and its reader passes over tensors that it does not know."""
    config, dims, n = drafter.config, drafter.dims, drafter.backbone.config.num_layers
    drafter.require("taps", list(config.taps), [2, n // 2, n - 3])
    drafter.require("layers", config.layers, 1)
    drafter.require("sliding_layers", list(config.sliding_layers), [])
    for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norms"):
        drafter.require(name, getattr(config, name), False)
    drafter.require("head_dim", dims.head_dim, dims.hidden_size // dims.num_heads)
    drafter.require("rope_type", drafter.rope["rope_type"], "default")
    about = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(drafter.module.head),
        "rope_theta": drafter.rope["rope_theta"],
        **drafter.layer_config(),
    }
    tensors = {
        name.replace("layers.0.", "midlayer."): each for name, each in drafter.tensors().items()
    }
    if config.own_embedding or drafter.backbone.embedding.embedding_scale != 1:
        about["target_hidden_size"] = drafter.backbone.config.hidden_size
    else:  # its readers take the target's
        del tensors["embed_tokens.weight"]
    return Exported(about, tensors)


# ---- DFlash and DSpark ----


class _Blocks(_Eagle3):
    """Holds the same of a block drafter, whose embedding is the target's, and so is its head
    where it guesses among all tokens."""

    def norms(self, i: int) -> dict[str, tuple[str, ...]]:
        return block_norms(self.config.qk_norms)

    def tensors(self) -> dict[str, Tensor]:
        state = {name: each.detach().float() for name, each in self.module.state_dict().items()}
        own_head = state.pop("head", self.module.head_VD.float())
        found = {"lm_head.weight": own_head} if self.has_draft_vocabulary else {}
        found |= {
            "fc.weight": state.pop("fusion.fc").T,
            "hidden_norm.weight": state.pop("fusion.out_norm"),
            "norm.weight": state.pop("norm"),
        }
        for ours, theirs in (("markov_read", MARKOV[0]), ("markov_write", MARKOV[1])):
            if ours in state:
                found[f"markov_head.{theirs}.weight"] = state.pop(ours)
        return found | self._layers(state) | self._vocabulary()


# Fields of a block drafter that its form says, or that tell of training and search only.
SAID = (
    "taps",
    "layers",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "markov_rank",
    "rope",
    "own_head",
    "top_k",
    "anchor_fraction",
    "soft_weight",
    "decay",
    "norm_eps",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "sliding_layers",
    "window",
    "causal_layers",
)


def _block_drafter(drafter: _Blocks) -> Exported:
    """Returns a drafter as the library `speculators` 0.9 saves it, which vLLM reads."""
    config = drafter.config
    for field in fields(config):
        if field.name not in SAID:
            drafter.require(field.name, getattr(config, field.name), field.default)
    drafter.require("embedding_scale", drafter.backbone.embedding.embedding_scale, 1)
    if not drafter.has_draft_vocabulary:
        drafter.require("own_head", config.own_head, False)
    if config.causal_layers:
        drafter.require("causal_layers", list(config.causal_layers), list(config.sliding_layers))
    kind = "dspark" if config.markov_rank else "dflash"
    about = drafter.of_speculators(kind)
    if config.markov_rank:
        about |= {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
        about |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    same = ("block_size", "mask_token_id", "sample_from_anchor")
    about |= {name: getattr(config, name) for name in same}
    about["aux_hidden_state_layer_ids"] = list(config.taps)
    about["sliding_window_non_causal"] = bool(config.sliding_layers) and not config.causal_layers
    return Exported(about, drafter.tensors())


# ---- Medusa ----


def _medusa(module: Any, backbone: Backbone) -> Exported:
    """Returns heads as vLLM reads them; the target's head, if they share it, is among them."""
    config, V = module.config, backbone.config.vocab_size
    tensors = {}
    for name, each in module.state_dict().items():
        kind, *places, part = name.split(".")
        if kind == "blocks":
            head, layer = places
            tensors[medusa.VLLM_BLOCK.format(head, layer, part)] = _turned(each)
        else:
            assert kind == "output_heads", name
            tensors[medusa.VLLM_HEAD.format(part)] = each.detach().float()
    is_shared = config.heads == "shared"
    if is_shared:
        tensors[medusa.VLLM_SHARED] = module.head_VD.detach().float()
    Vd = len(module.head_VD)
    if Vd < V:
        tensors[medusa.VLLM_IDS] = module.draft_token_ids.clone()
    about = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": module.dims.hidden_size,
        "vocab_size": V,
        "truncated_vocab_size": Vd,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "original_lm_head": is_shared,
        "medusa_fc_bias": config.bias,
    }
    return Exported(about, tensors)


def _native_medusa(module: Any, where: str, model: str | None) -> Exported:
    """Returns heads as Medusa's authors read them: with biases, which may be 0, all tokens, and one
    block a head, which is run again for each further one."""
    config = module.config
    if len(module.head_VD) < len(module.embed_VD):
        raise UnsupportedModelError(
            f"{where}: got guesses among {len(module.head_VD)} tokens, expected all "
            f"{len(module.embed_VD)}: it has no such form"
        )
    tensors: dict[str, Tensor] = {}
    for i, blocks in enumerate(module.blocks):
        first = blocks[0].state_dict()
        for j, block in enumerate(blocks):
            if not all(torch.equal(each, first[part]) for part, each in block.state_dict().items()):
                raise UnsupportedModelError(
                    f"{where}: got num_layers {config.num_layers} of weights of their own, "
                    "expected 1, or the same weights in all: it has no such form"
                )
            weight = block.weight.detach().float()
            bias = torch.zeros(len(weight)) if block.bias is None else block.bias.detach().float()
            tensors |= {f"{i}.{j}.linear.weight": weight.T, f"{i}.{j}.linear.bias": bias}
        if module.output_heads:
            tensors[f"{i}.{config.num_layers}.weight"] = module.output_heads[i].detach().float()
    about: dict[str, Any] = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": model,
    }
    if config.heads == "shared":
        about["version"] = "2"
    return Exported(about, tensors, HEADS[0])
