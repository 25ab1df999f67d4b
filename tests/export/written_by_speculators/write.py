"""Writes the EAGLE-3 drafters beside this file with the library `speculators` 0.9.0 itself.

Each folder has what the library saves of a tiny random drafter, and golden.npz: what it was given
(states f32[T, 3·D] of the target, tokens i64[T + 1]) and the logits f32[3, T, Vd] of its levels 0
to 2 along these tokens. Run it in an environment of its own, where speculators is installed:

    python tests/export/written_by_speculators/write.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

V, D, T, LEVELS = 98, 32, 12, 3
IDS = torch.arange(0, V, 2)
SIZES: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
}


def levels(model: Any, states: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """Returns the logits f32[LEVELS, T, Vd] along these tokens."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: logits.append(out))
    with torch.no_grad():
        documents = torch.zeros(1, T, dtype=torch.long)
        model(states, tokens[:, 1:], documents, ttt_steps=LEVELS)
    return torch.stack(logits)[:, 0].numpy()


def write(name: str, layer: Any, **flags: bool) -> None:
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=LEVELS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(IDS),
        speculators_config=about,
        eagle_aux_hidden_state_layer_ids=[2, 4, 8],
        **flags,
    )
    torch.manual_seed(len(name))
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.dim() > 1
            drawn = torch.randn_like(parameter) * (0.15 if wide else 0.2) + (not wide)
            parameter.copy_(drawn.bfloat16())
        model.d2t.copy_(IDS - torch.arange(len(IDS)))
        model.t2d.zero_()[IDS] = True
        generator = torch.Generator().manual_seed(1)
        states = torch.randn(1, T, 3 * D, generator=generator)
        tokens = torch.randint(V, (1, T + 1), generator=generator)
    logits = levels(model, states, tokens)
    folder = Path(__file__).parent / name
    model.bfloat16().save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # code, which no importer runs
    np.savez(folder / "golden.npz", states=states[0], tokens=tokens[0], logits=logits)


if __name__ == "__main__":
    trained = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    write("plain", LlamaConfig(**SIZES, num_hidden_layers=1))
    write(
        "trained",
        LlamaConfig(**SIZES, num_hidden_layers=2, rms_norm_eps=1e-5, rope_parameters=rope),
        **trained,
    )
    write("qwen3", Qwen3Config(**SIZES, num_hidden_layers=1, head_dim=16), fc_norm=True)
