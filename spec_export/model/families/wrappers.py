"""Knows the models of pictures or sound and text whose text part is a model of a family by itself.

Without the rest such a model computes what its text part does, so that only that is taken.
"""

import re
from collections.abc import Mapping
from typing import Any

# By model_type; each has the config of its text part in the field `text_config`.
WRAPPERS = (
    "aya_vision",
    "cohere2_vision",
    "exaone4_5",
    "gemma3",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "vipllava",
    "voxtral",
)
# Text parts that have a name of their own, by the family whose layer they have. A row's three
# positions, in time and in a picture, are equal without pictures, so that they rotate as one does.
OTHER_NAMES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Names of a text part's tensors in such a model's files, with its own names for them.
OWN_NAMES = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.(model\.)?": "model.",
}
OTHER_PARTS = re.compile(
    r"^(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|connector|"
    r"image_newline|mtp)(\.|$)"
)


def own_name(name: str) -> str:
    """Returns a tensor's name in such a model's files as its text part has it."""
    for pattern, own in OWN_NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def text_config(config: Any) -> Any:
    """Returns the transformers config of a model's text part, the config itself of any other."""
    if config.model_type not in WRAPPERS:
        return config
    part = config.text_config
    if part.model_type in OTHER_NAMES:
        from transformers import AutoConfig

        fields = part.to_dict() | {"model_type": OTHER_NAMES[part.model_type]}
        fields["norm_topk_prob"] = True  # of Qwen3-VL's experts, which have no field for it
        rope = fields["rope_parameters"]
        fields["rope_parameters"] = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
        part = AutoConfig.for_model(**fields)
    part.wrapper = config.model_type
    # The head stands outside of the part.
    part.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return part


def model_type(fields: Mapping[str, Any]) -> object:
    """Returns the model_type of the text part, by what a config.json says; None if it says none."""
    if fields.get("model_type") in WRAPPERS:
        part = fields.get("text_config")
        name = part.get("model_type") if isinstance(part, dict) else None
        return OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    return fields.get("model_type")
