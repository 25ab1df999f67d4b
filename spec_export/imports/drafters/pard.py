"""Reads PARD's drafters: the folder of a whole language model, whose config names its mask token.

How many tokens a pass guesses is not in the files. They are trained for 8; as all masks are one
token, fewer or more can be asked for.
"""

from typing import Any

from spec_export.drafters.draft_model import require_same_tokens
from spec_export.imports.drafters.folder import PARD, ForeignFolder, Reading
from spec_export.imports.drafters.parts import require_nothing_given, unsupported
from spec_export.model import target
from spec_export.model.decoder import Backbone

SHOWS = f"PARD ({PARD} in the config)"


def matches(folder: ForeignFolder) -> bool:
    """Says whether a folder holds such a drafter, by its config."""
    return PARD in folder.config


def read(folder: ForeignFolder, backbone: Backbone, given: dict[str, Any]) -> Reading:
    """Returns a drafter's config and weights, and what it asks of the target's tokenizer.

    Raises UserError if the files are damaged or do not fit each other, and UnsupportedModelError
    for a language model that is not supported.
    """
    require_nothing_given(folder, given, "PARD")
    source = target.resolve(str(folder.path))
    model, tokenizer = target.load(source)
    rows, mask_id = model.config.vocab_size, folder.config[PARD]
    if mask_id is None or mask_id >= rows:
        raise unsupported(folder, PARD, mask_id, f"one of its {rows} tokens")
    kind, count = model.config.model_type, model.num_parameters()
    return Reading(
        "PARD",
        "pard",
        {"model": model.config.to_diff_dict(), "mask_token_id": mask_id},
        {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        said=[f"a {kind} of {count:,} weights", f"mask token {mask_id}"],
        require_tokenizer=lambda target_tokenizer: require_same_tokens(
            target_tokenizer.get_vocab(), tokenizer.get_vocab(), rows, mask_id
        ),
    )
