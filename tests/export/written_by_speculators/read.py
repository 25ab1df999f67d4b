"""Reads drafters that `spec-export export` wrote with the library `speculators` 0.9.0 itself.

Each FOLDER is what was exported of the drafter in NAME, a folder beside this file, after an import.
The largest difference of the library's logits of both is printed; it has to be below 1e-4. Run it
where `write_blocks.py` runs, with a graph compiler turned off (TORCHDYNAMO_DISABLE=1):

    python tests/export/written_by_speculators/read.py FOLDER NAME [FOLDER NAME ...]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel
from write import guesses, levels
from write_blocks import block_logits


def difference(folder: str, name: str) -> float:
    config: Any = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    golden = np.load(Path(__file__).parent / name / "golden.npz")
    kind = config.speculators_model_type
    if kind in ("dflash", "dspark"):
        with torch.no_grad():
            found = block_logits(model).numpy()
            if kind == "dspark":
                hidden = torch.zeros(
                    1, len(golden["bias"]), config.transformer_layer_config.hidden_size
                )
                every = torch.arange(hidden.shape[1])[None]
                bias = model.markov_head.block_bias(prev_token_ids=every, hidden_states=hidden)
                assert np.abs(bias[0].numpy() - golden["bias"]).max() < 1e-4
    else:
        states, tokens = (torch.from_numpy(golden[key])[None] for key in ("states", "tokens"))
        found = (guesses if kind == "peagle" else levels)(model, states, tokens)
    return float(np.abs(found - golden["logits"]).max())


if __name__ == "__main__":
    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    largest = [difference(*pair) for pair in pairs]
    for (_, name), found in zip(pairs, largest, strict=True):
        print(f"{name}: {found:.1e}")
    sys.exit(not max(largest) < 1e-4)
