"""Makes the parts of a manifest: the target's, a drafter's and the tokenizer's entries."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from spec_export.build.drafters import LoadedDrafter
from spec_export.model.config import DecoderConfig
from spec_runtime.bundle.manifest import Dims, DrafterInfo, Graph, TargetInfo, TokenizerInfo
from spec_runtime.dialogue.response_template import ResponseTemplate
from spec_runtime.errors import UserError


def target_info(config: DecoderConfig, precision: str, is_modified: bool) -> TargetInfo:
    """Returns the target's entry.

    is_modified: the training of a drafter changed the target's weights.
    """
    return TargetInfo(
        family=config.family,
        dims=Dims(
            config.vocab_size,
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        ),
        precision=precision,
        max_length=config.max_length,
        scratch=config.scratch,
        rope={"type": config.rope.get("rope_type", "default")} | config.rope,
        taps=config.taps,
        position_convention="absolute",
        target_modified=is_modified,
    )


def drafter_info(
    drafter: LoadedDrafter,
    graphs: dict[str, Graph],
    trees: dict[str, Any],
    folder: Path,
    target_parameters: int,
    precision: str,
) -> DrafterInfo:
    """Writes the drafter's token ids, if it has its own, and returns its entry.

    In its config `extra_memory` is the number of its own parameters over the target's, and
    `precision` that of its weights.
    """
    saved, ids = drafter.saved, None
    if saved.draft_token_ids is not None:
        ids = f"drafters/{saved.name}/draft_token_ids.npy"
        (folder / ids).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / ids, saved.draft_token_ids)
    own = sum(parameter.numel() for parameter in drafter.module.parameters())
    measured = saved.provenance.get("validation") or {}
    return DrafterInfo(
        name=saved.name,
        config=drafter.runtime_config()
        | {
            "parameters": own,
            "extra_memory": round(own / target_parameters, 4),
            "precision": precision,
        },
        graphs=graphs,
        draft_token_ids=ids,
        calibration=None,
        trees=trees,
        expected_accepted_length=measured.get("accepted_length"),
    )


def require_fitting_tokens(tokenizer: Any, hf_model: Any) -> None:
    """Raises UserError if the target has no fast tokenizer, or if the tokenizer or the end of an
    answer has ids that the model's embedding does not have."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            "the target has no fast tokenizer (tokenizer.json): convert it with transformers first"
        )
    rows = hf_model.config.vocab_size
    ids = {number: text for text, number in backend.get_vocab().items()}
    for number in _end_ids(tokenizer, hf_model):
        if type(number) is not int:
            raise UserError(f"got {number!r:.80} as the end of an answer, expected a token id")
        ids.setdefault(number, "the end of an answer")
    highest = max(ids, default=0)
    if highest >= rows:
        raise UserError(
            f"got token {highest} ({ids[highest]!r:.80}) in the tokenizer, expected ids below "
            f"{rows}, the rows of the model's embedding: take the tokenizer of this model, or "
            "resize the model's embedding"
        )


def _end_ids(tokenizer: Any, hf_model: Any) -> list[int]:
    """Returns the ids that end an answer, by the generation config and the tokenizer."""
    config = hf_model.generation_config
    ends = None if config is None else config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [i for i in dict.fromkeys((*ends, tokenizer.eos_token_id)) if i is not None]


def write_tokenizer(
    tokenizer: Any, hf_model: Any, folder: Path, own: Path | None = None
) -> TokenizerInfo:
    """Writes tokenizer.json and the chat template, if there is one, and returns their entry.

    own: the target's own tokenizer.json, which is copied as it is.
    """
    backend = tokenizer.backend_tokenizer
    if own is None:
        # the tokenizer's own `save` raises a bare Exception when the disk is full
        (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    else:
        shutil.copyfile(own, folder / "tokenizer.json")
    template = None
    if getattr(tokenizer, "chat_template", None):
        template = "chat_template.jinja"
        (folder / template).write_text(tokenizer.chat_template, encoding="utf-8")
    eos = sorted(_end_ids(tokenizer, hf_model))
    return TokenizerInfo(
        file="tokenizer.json",
        sha256="",
        vocab_size=backend.get_vocab_size(),
        special_ids={"bos": tokenizer.bos_token_id, "eos": eos, "pad": tokenizer.pad_token_id},
        chat_template=template,
        special_tokens={
            name: text for name, text in tokenizer.special_tokens_map.items() if type(text) is str
        },
        response_template=_readable(getattr(tokenizer, "response_template", None)),
    )


def _readable(response_template: Any) -> dict[str, Any] | None:
    """Returns what a model ships to say how its answers are read, and None, with a warning, if that
    is not read here: its answers are then read by what its chat template writes."""
    if response_template is None:
        return None
    try:
        ResponseTemplate(response_template)
    except UserError as error:
        warnings.warn(f"{error}; it is left out of the bundle", stacklevel=2)
        return None
    return dict(response_template)
