"""Writes the drafters beside this file with the library `speculators` 0.9.0 itself.

Each folder has what the library saves of a tiny random EAGLE-3 or P-EAGLE drafter, and golden.npz:
what it was given (states f32[T, 3·D] of the target, tokens i64[T + 1]) and the logits f32[3, T, Vd]
of its levels 0 to 2 along these tokens, P-EAGLE's of its guesses 0 to 2 at each row. Run it in an
environment of its own, where speculators is installed (P-EAGLE's loss must not be compiled:
TORCHDYNAMO_DISABLE=1):

    python tests/export/written_by_speculators/write.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
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


def guesses(model: Any, states: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """Returns the logits f32[LEVELS, T, Vd] of a P-EAGLE drafter's groups at every row; guess k of
    the last k rows is 0, for the library has no masks past the end."""
    anchors = [torch.arange(T - depth) for depth in range(LEVELS)]
    anchor, depth = (
        torch.cat(anchors),
        torch.arange(LEVELS).repeat_interleave(torch.tensor([len(each) for each in anchors])),
    )
    peagle.generate_cod_sample_indices = lambda **sampling: (anchor, depth)
    peagle.compute_metrics = lambda **loss: (None, {})
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: found.append(out[0]))
    with torch.no_grad():
        documents = torch.zeros(1, T, dtype=torch.long)
        model(states, tokens[:, 1:], documents, verifier_last_hidden_states=states[..., :D])
    logits = torch.zeros(LEVELS, T, len(IDS))
    logits[depth, anchor] = found[0]
    return logits.numpy()


def write(name: str, layer: Any, **flags: Any) -> None:
    layer._attn_implementation = "eager"
    is_peagle = "mask_token_id" in flags
    about = SpeculatorsConfig(
        algorithm="peagle" if is_peagle else "eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=LEVELS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = (PEagleSpeculatorConfig if is_peagle else Eagle3SpeculatorConfig)(
        transformer_layer_config=layer,
        draft_vocab_size=len(IDS),
        speculators_config=about,
        eagle_aux_hidden_state_layer_ids=[2, 4, 8],
        **flags,
    )
    torch.manual_seed(len(name))
    model = (peagle.PEagleDraftModel if is_peagle else Eagle3DraftModel)(config).float().eval()
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
    logits = (guesses if is_peagle else levels)(model, states, tokens)
    folder = Path(__file__).parent / name
    model.bfloat16().save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # code, which no importer runs
    np.savez(folder / "golden.npz", states=states[0], tokens=tokens[0], logits=logits)


if __name__ == "__main__":
    trained = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    wide: dict[str, Any] = {"sliding_window": 2048, **kinds}
    narrow: dict[str, Any] = {"sliding_window": 5, **kinds}
    write("plain", LlamaConfig(**SIZES, num_hidden_layers=1))
    write(
        "trained",  # with the windows that its training command gives
        LlamaConfig(**SIZES, num_hidden_layers=2, rms_norm_eps=1e-5, rope_parameters=rope, **wide),
        **trained,
    )
    write(
        "peagle",  # with one that is narrower than the text
        LlamaConfig(
            **SIZES, num_hidden_layers=2, rms_norm_eps=1e-5, rope_parameters=rope, **narrow
        ),
        mask_token_id=5,
        norm_before_fc=True,
        norm_output=True,  # of which the library makes nothing here
    )
    write("qwen3", Qwen3Config(**SIZES, num_hidden_layers=1, head_dim=16), fc_norm=True)
