"""Writes the block drafters beside this file with the libraries that define them, `speculators`
0.9.0 and z-lab's `dflash` 0.1.0.

Each folder has what a library saves of a tiny random drafter, and golden.npz: what it was given
(states f32[T, 3·D] of the target, tokens i64[T], and the target's embedding and head f32[V, D]),
the logits f32[T - 1, B, Vd] of all rows of the blocks whose roots are the tokens 1 to T - 1, and of
DSpark the bias f32[V, Vd] after each token. Run it as write.py, with `dflash` installed too:

    python tests/export/written_by_speculators/write_blocks.py
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache
from speculators.model import SpeculatorModel
from speculators.train.cli import build_draft_model
from speculators.train.config.schema import TrainConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from write import IDS, SIZES, D, V

T, LAYERS, MASK = 9, 8, 5
STATES = torch.randn(T, 3 * D, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(2))


def save_target(folder: str) -> LlamaForCausalLM:
    """Writes the target and returns it."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, rms_norm_eps=1e-5, rope_parameters=rope)
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return model.float()


def randomise(model: torch.nn.Module, lent: tuple[str, ...]) -> None:
    """Draws all parameters but those whose names begin with one of `lent`, the target's."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(lent):
                wide = parameter.dim() > 1
                drawn = torch.randn_like(parameter) * (0.15 if wide else 0.2) + (not wide)
                parameter.copy_(drawn.bfloat16())


def save_golden(folder: Path, target: LlamaForCausalLM, **golden: torch.Tensor) -> None:
    golden |= {"embedding": target.model.embed_tokens.weight, "head": target.lm_head.weight}
    golden |= {"states": STATES, "tokens": TOKENS}
    arrays: Any = {key: x.detach().numpy() for key, x in golden.items()}
    np.savez(folder / "golden.npz", **arrays)


def block_logits(model: Any) -> torch.Tensor:
    """Returns the logits f32[T - 1, B, Vd] of a drafter of speculators, a block at a time."""
    B, found = model.block_size, []
    states, tokens = torch.zeros(1, T + B, 3 * D), torch.zeros(1, T + B, dtype=torch.long)
    states[0, :T], tokens[0, :T] = STATES, TOKENS
    for root in range(1, T):
        is_root = (torch.arange(T + B) == root)[None]
        one_document = torch.zeros(1, T + B, dtype=torch.long)
        _, logits, *_ = model._backbone_forward(
            states, tokens, is_root, states[..., :D], one_document, max_anchors=1
        )
        found.append(logits[0])
    return torch.stack(found)


def write(name: str, kind: str, target: LlamaForCausalLM, folder: str, **flags: Any) -> None:
    """Writes a drafter as the training command of speculators makes it of these flags; all others
    are the command's own."""
    groups: dict[str, Any] = {"draft": {}, "dflash": {}, "dspark": {}}
    for flag, value in flags.items():
        place = "dspark" if flag == "markov_rank" else "draft"
        groups["dflash" if flag == "block_size" else place][flag] = value
    groups["draft"] |= {"mask_token_id": MASK, "draft_attn_impl": "eager"}
    config = TrainConfig(speculator_type=kind, verifier={"verifier_name_or_path": folder}, **groups)
    t2d = d2t = None
    Vd = flags.get("draft_vocab_size", V)
    if Vd < V:
        t2d, d2t = torch.isin(torch.arange(V), IDS), IDS - torch.arange(Vd)
    arguments = argparse.Namespace(**config.flatten())
    drafter = SpeculatorModel.registry[kind]
    model: Any = build_draft_model(arguments, drafter, t2d, d2t, Vd).float().eval()
    randomise(model, ("embed_tokens", "verifier", "nothing" if Vd < V else "lm_head"))
    model.config.speculators_config.verifier.name_or_path = None  # a folder that goes
    golden = {}
    with torch.no_grad():
        golden["logits"] = block_logits(model)
        if kind == "dspark":
            every, hidden = torch.arange(V)[None], torch.zeros(1, V, D)
            bias = model.markov_head.block_bias(prev_token_ids=every, hidden_states=hidden)
            golden["bias"] = bias[0]
    path = Path(__file__).parent / name
    model.bfloat16().save_pretrained(path)
    (path / "config.py").unlink()  # code, which no importer runs
    save_golden(path, target, **golden)


def write_zlab(name: str, target: LlamaForCausalLM, layers: int, **given: Any) -> None:
    """Writes a drafter of z-lab, which drafts as its inference does: over its cache, to which the
    context is added a row at a time, and out of which each block is cropped. What is not given is
    not in the file either, and is what the library takes for it."""
    given |= {"num_hidden_layers": layers, "num_target_layers": LAYERS}
    config = Qwen3Config(**SIZES, **given)
    absent = {"rope_parameters"} - given.keys()
    folder = Path(__file__).parent / name
    model = DFlashDraftModel(config)
    randomise(model, ("nothing",))
    model.bfloat16().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in written.items() if key not in absent}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n")
    model = DFlashDraftModel.from_pretrained(folder).float().eval()
    cache, found, B = _make_cache(model.config), [], model.block_size
    for root in range(1, T):
        block = torch.tensor([[int(TOKENS[root])] + [MASK] * (B - 1)])
        with torch.no_grad():
            hidden = model(
                target_hidden=STATES[None, root - 1 : root],
                noise_embedding=target.model.embed_tokens(block),
                position_ids=torch.arange(root - 1, root + B)[None],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(model.compute_logits(hidden, target.lm_head)[0])
        _crop_to(cache, root)
    save_golden(folder, target, logits=torch.stack(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lent = save_target(folder)
        taps = {"target_layer_ids": [1, 3, LAYERS]}
        full: dict[str, Any] = {"num_layers": 2, "full_attention_indices": [0, 1]} | taps
        rope = {"rope_type": "default", "rope_theta": 300.0}
        about = {"target_layer_ids": [0, 2, LAYERS - 1], "mask_token_id": MASK}
        settings = {"head_dim": 16, "block_size": 5, "rope_parameters": rope}
        write_zlab("z-lab", lent, layers=2, dflash_config=about, **settings)
        about = {"mask_token_id": MASK}
        write_zlab("z-lab-defaults", lent, layers=3, dflash_config=about, head_dim=8)
        write("dflash", "dflash", lent, folder, block_size=5, draft_vocab_size=len(IDS), **full)
        write("dspark", "dspark", lent, folder, markov_rank=4, **full)
        write("dflash-trained", "dflash", lent, folder)
        write("dspark-trained", "dspark", lent, folder, num_layers=2, markov_rank=4, **taps)
