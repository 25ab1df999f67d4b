"""Makes a larger Llama, and its ParallelSpec, that compute what a small one computes.

Texts and accepted lengths are then the small model's own, and passes cost what the larger shape
costs. A matrix [out, in] keeps its block at the places of what is real. What is added comes out as
exactly 0.0: added rows are zero where they meet real inputs. Added columns, whose inputs are 0.0,
are random, so that no kernel times a matrix of zeros. Two dimensions in the place of one:

    [[a]] -> [[a, r],      r: random
              [0, r]]

Norms count the zeros: their gains are multiplied by √(D / D′), and eps is by D / D′. A head of Dh
becomes one of Dh′ = m · Dh whose queries are multiplied by √m, for attention divides by √Dh′.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from spec_export.build import drafters, make_bundle
from spec_export.build.make_bundle import BuildOptions
from spec_export.model import target
from spec_export.training import checkpoint
from tools.gpu.job import PRECISION_FOR, SMALL_LOGITS, Check, Shape
from tools.measure.compare import generated

LAYER = {
    "attention_norm": "input_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    "mlp_norm": "post_attention_layernorm",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
SHIPPED = Path(drafters.__file__).parents[1] / "assets/drafters" / target.DEMO_NAME / "parallelspec"
SPREAD = 0.02  # standard deviation of the random weights


def matrix(
    weight: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int], busy: Tensor
) -> Tensor:
    """Returns a matrix [out, in] with `weight` at these rows and columns.

    The other columns are random, but for those of `busy`: inputs that are not 0.0.
    """
    where = "cuda" if torch.cuda.is_available() else "cpu"
    whole = torch.randn(shape, device=where).mul_(SPREAD)
    whole[:, busy] = 0
    whole[rows.to(where)[:, None], columns.to(where)] = weight.to(where)
    return whole


@dataclass(frozen=True)
class Inflation:
    """Leads from a Llama's configuration to a larger shape."""

    small: Any
    large: Shape

    def __post_init__(self) -> None:
        old, new = self.small, self.large.options()
        fits = all(getattr(old, name) <= size for name, size in new.items())
        fits &= self.groups[0] <= self.groups[1] and new["head_dim"] % old.head_dim == 0
        if old.model_type != "llama" or not fits:
            raise ValueError(f"got {old.model_type} {old.to_dict()}, expected a llama within {new}")

    @property
    def groups(self) -> tuple[int, int]:
        """Returns how many query heads share a key head, before and after."""
        small, large = self.small, self.large
        before = small.num_attention_heads // small.num_key_value_heads
        return before, large.num_heads // large.num_kv_heads

    def heads(self, before: int, after: int) -> Tensor:
        """Returns the places of real heads' dimensions, where `before` heads of each key head
        become `after`.

        The halves of a head are turned against each other, dimension i by θ^(−2i / Dh), which is
        θ^(−2mi / Dh′): it goes to m · i of its half. Dh = 4, Dh′ = 8: 0 1 2 3 -> 0 2 4 6.
        """
        small, large = self.small, self.large
        half, times = small.head_dim // 2, large.head_dim // small.head_dim
        d = torch.arange(small.head_dim)
        place = d // half * (large.head_dim // 2) + d % half * times
        head = torch.arange(small.num_key_value_heads)[:, None] * after + torch.arange(before)
        return (head.view(-1, 1) * large.head_dim + place).flatten()

    def norm(self, gain: Tensor) -> Tensor:
        """Returns gains [..., D′] of gains [..., D]."""
        small, large = gain.shape[-1], self.large.hidden_size
        whole = torch.ones(*gain.shape[:-1], large)
        whole[..., :small] = gain * (small / large) ** 0.5
        return whole

    def layer(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a layer's norms and matrices [out, in], by the names of LAYER."""
        large, D, inside = self.large, self.large.hidden_size, self.large.intermediate_size
        real, inner = torch.arange(len(parts["o"])), torch.arange(len(parts["up"]))
        queries, keys = self.heads(self.groups[0], self.groups[1]), self.heads(1, 1)
        # An added head of a real group has something to say: the real values.
        busy = self.heads(self.groups[1], self.groups[1])
        scale = (large.head_dim / self.small.head_dim) ** 0.5
        q_width, kv_width = (n * large.head_dim for n in (large.num_heads, large.num_kv_heads))
        return {
            "attention_norm": self.norm(parts["attention_norm"]),
            "q": matrix(parts["q"] * scale, queries, real, (q_width, D), real),
            "k": matrix(parts["k"], keys, real, (kv_width, D), real),
            "v": matrix(parts["v"], keys, real, (kv_width, D), real),
            "o": matrix(parts["o"], real, queries, (D, q_width), busy),
            "mlp_norm": self.norm(parts["mlp_norm"]),
            "gate": matrix(parts["gate"], inner, real, (inside, D), real),
            "up": matrix(parts["up"], inner, real, (inside, D), real),
            "down": matrix(parts["down"], real, inner, (D, inside), inner),
        }


def inflate(
    model: Any, tokenizer: Any, large: Shape, lowest: int, folder: Path, dtype: torch.dtype
) -> Path:
    """Writes transformers' Llama in a larger shape, a file a layer, and returns the folder.

    Added tokens have the logits of the token `lowest`. Added layers are the last and add nothing.
    """
    weights, plan = model.state_dict(), Inflation(model.config, large)
    folder.mkdir(parents=True)
    places: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        kept = {key: tensor.to("cpu", dtype).contiguous() for key, tensor in tensors.items()}
        safetensors.torch.save_file(kept, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(kept, name))

    V, D = model.get_input_embeddings().weight.shape
    rows, real = torch.arange(V), torch.arange(D)
    embed = torch.zeros(large.vocab_size, large.hidden_size)
    embed[:V, :D] = model.get_input_embeddings().weight
    head = matrix(
        model.get_output_embeddings().weight,
        rows,
        real,
        (large.vocab_size, large.hidden_size),
        real,
    )
    head[V:] = head[lowest]
    norm = plan.norm(weights["model.norm.weight"])
    ends = {"model.embed_tokens": embed, "model.norm": norm, "lm_head": head}
    save("ends.safetensors", {f"{key}.weight": tensor for key, tensor in ends.items()})
    for i in range(large.num_layers):
        old = f"model.layers.{min(i, model.config.num_hidden_layers - 1)}"
        parts = {key: weights[f"{old}.{name}.weight"] for key, name in LAYER.items()}
        if i >= model.config.num_hidden_layers:
            parts = {key: torch.zeros_like(tensor) for key, tensor in parts.items()}
        named = {f"model.layers.{i}.{LAYER[k]}.weight": x for k, x in plan.layer(parts).items()}
        save(f"layer-{i:02}.safetensors", named)
    index = {"metadata": {}, "weight_map": places}  # transformers asks for both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = copy.deepcopy(model.config)
    for name, value in large.options().items():
        setattr(config, name, value)
    config.tie_word_embeddings = False
    config.rms_norm_eps *= D / large.hidden_size
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def inflate_drafter(source: Path, small: Any, large: Shape, folder: Path) -> Path:
    """Writes a ParallelSpec for the larger Llama, in float32, and returns the folder."""
    saved, plan = checkpoint.load_drafter(source), Inflation(small, large)
    if saved.name != "parallelspec":
        raise ValueError(f"got the drafter {saved.name}, expected parallelspec")
    state, D, new = dict(saved.state), small.hidden_size, large.hidden_size
    heads = small.num_attention_heads, small.num_key_value_heads, small.num_key_value_heads
    for name in [key for key in state if key.endswith(".qkv")]:
        own = name.removesuffix("qkv")
        parts = dict(
            zip("qkv", state[name].t().split([n * small.head_dim for n in heads]), strict=True)
        )
        parts |= {"o": state[f"{own}out"].t(), "down": state[f"{own}down"].t()}
        parts |= dict(zip(("gate", "up"), state[f"{own}gate_up"].t().chunk(2), strict=True))
        norms = ("attention_norm", "mlp_norm")
        got = plan.layer(parts | {key: state[own + key] for key in norms})
        state |= {own + key: got[key] for key in norms}
        state[name] = torch.cat([got[key] for key in "qkv"]).t()
        state[f"{own}gate_up"] = torch.cat((got["gate"], got["up"])).t()
        state |= {f"{own}out": got["o"].t(), f"{own}down": got["down"].t()}
    for name in state.keys() & {"input_norm", "final_norm"}:
        state[name] = plan.norm(state[name])
    state["mask_embed"] = torch.nn.functional.pad(state["mask_embed"], (0, new - D))
    if "fc" in state:
        chunks = [torch.arange(D) + i * new for i in range(len(state["fc"]) // D)]
        read, real = torch.cat(chunks), torch.arange(D)
        state["fc"] = matrix(state["fc"].t(), real, read, (new, len(chunks) * new), read).t()
    state = {key: tensor.cpu().contiguous() for key, tensor in state.items()}
    about = saved.provenance | {"target": large.name}
    ids, table = saved.draft_token_ids, saved.bigrams
    return checkpoint.save_drafter(
        folder, state, saved.name, saved.config, about, ids, table, torch.float32
    )


def bundle(check: Check) -> Path:
    """Inflates a target and its drafter and builds their bundle; keeps what the small one says."""
    model, tokenizer = target.load(target.resolve(check.model))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    texts = [encode(tokenizer, each.content) for each in check.prompts[: check.sizes.num_audited]]
    answers = [generated(model, text, check.sizes.audited_tokens) for text in texts]
    rows = [logits(model, text + more) for text, more in zip(texts, answers, strict=True)]
    behind = [each[len(text) - 1].cpu() for each, text in zip(rows, texts, strict=True)]
    np.save(check.work / SMALL_LOGITS, torch.stack(behind).numpy())
    large, dtype = check.sizes.bundle, {"cpu": torch.float32, "cuda": torch.float16}[check.device]
    grown = inflate(model, tokenizer, large, least(rows), check.work / large.name, dtype)
    trained = inflate_drafter(Path(check.drafter or SHIPPED), model.config, large, check.work / "d")
    check.kept |= {"checkpoint": str(grown), "texts": texts, "answers": answers}
    return make_bundle.build(
        BuildOptions(
            str(grown),
            drafter_checkpoints=[trained],
            precision=PRECISION_FOR[check.device],
            device=check.device,
            out=check.work / "bundle",
            lanes=check.sizes.lanes,
        )
    )


def encode(tokenizer: Any, text: str | list[dict[str, str]]) -> list[int]:
    """Returns the ids of a question or a conversation, by the chat template if there is one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def logits(model: Any, text: list[int]) -> Tensor:
    """Returns the logits [N, V] behind each token of a text."""
    with torch.inference_mode():
        return model(torch.tensor([text], device=model.device)).logits[0]  # type: ignore[no-any-return]


def least(rows: Sequence[Tensor]) -> int:
    """Returns the token whose largest logit is the smallest."""
    return int(torch.cat([*rows]).amax(0).argmin())
