"""Reads a drafter that `spec-export export` wrote with the library `speculators` 0.9.0 itself.

FOLDER is what was exported of the drafter in NAME, a folder beside this file, after an import. The
largest difference of the library's logits of both is printed; it has to be below 1e-4. Run it where
`write.py` runs:

    python tests/export/written_by_speculators/read.py FOLDER NAME
"""

import sys
from pathlib import Path

import numpy as np
import torch
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from write import levels


def difference(folder: str, name: str) -> float:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    golden = np.load(Path(__file__).parent / name / "golden.npz")
    states, tokens = (torch.from_numpy(golden[key])[None] for key in ("states", "tokens"))
    return float(np.abs(levels(model, states, tokens) - golden["logits"]).max())


if __name__ == "__main__":
    found = difference(*sys.argv[1:])
    print(f"{found:.1e}")
    sys.exit(found >= 1e-4)
