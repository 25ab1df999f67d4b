"""Defines PARD: a whole language model guesses K + 1 tokens in one pass, through K mask rows.

Row t reads token t at position t, as in any language model, and guesses token t+1. Mask row d of
its group reads one and the same token, `mask_token_id`, is at position t+d, sees the tokens up to t
and its group's masks 1 … d, and guesses token t+1+d:

    q_{t+1+d} = softmax(model(tokens 0 … t, d masks)_{t+d})

    L = Σ_d decay^d · CE(p_{t+1+d}, q_{t+1+d}),     p the label's distribution

The model reads nothing of the target's: it is one drafter for all targets of its vocabulary. Row t
of this file's tensors is the model's row t+1, whose guess 0 is that of row t for all drafters. In
the graph mask d has the id V + d − 1, V being the target's number of tokens.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import onnx_ir as ir
import torch
from annotated_types import Gt, Le
from torch import Tensor, nn
from torch.nn import functional as F

from spec_export.drafters.fields import AtLeastOne, AtLeastZero, NoTaps, Share
from spec_export.drafters.layers import Batch, DrafterBase, export_cached
from spec_export.drafters.losses import IGNORED, position_weights
from spec_export.drafters.rollout import choose_groups
from spec_export.model import decoder
from spec_export.model.ends import TargetEnds
from spec_runtime.errors import UnsupportedModelError, UserError
from spec_runtime.files.mapping import Checked, brief

MODELS = ("llama", "qwen2", "qwen3")  # whose logits are the head's product and nothing else
CHUNK_GROUPS = 64  # groups of masks that stand in one pass over a sequence, where none is trained


@dataclass(frozen=True)
class Config(Checked):
    """The settings of PARD.

    `model` is the language model's config as transformers writes it, its `model_type` among
    `MODELS`. `num_masks` K masks, which all read the token `mask_token_id`, give K+1 guesses.
    `anchor_fraction` is the share of labelled rows that get masks in a training step, and
    `soft_weight` the share of the target's distribution in the labels.
    """

    model: dict[str, Any] = field(default_factory=dict)
    mask_token_id: AtLeastZero = 0
    num_masks: AtLeastZero = 7
    taps: NoTaps = ()
    top_k: AtLeastOne = 10
    anchor_fraction: Annotated[float, Gt(0), Le(1)] = 0.25
    soft_weight: Share = 0.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.model.get("model_type")
        if kind not in MODELS:
            raise UnsupportedModelError(
                f"got a model of model_type {kind!r:.40}, expected {' or '.join(MODELS)}"
            )

    @property
    def num_guesses(self) -> int:
        return self.num_masks + 1


class Drafter(DrafterBase):
    """The language model, with an embedding and a head of its own."""

    is_one_pass = True
    is_whole_model = True
    config: Config

    def __init__(
        self, config: Config, ends: TargetEnds, draft_token_ids: Tensor | None = None
    ) -> None:
        model = _new_model(config.model)
        rows = model.config.vocab_size
        if draft_token_ids is None and rows < len(ends.embed_VD):
            draft_token_ids = torch.arange(rows)  # the target pads its table with more
        super().__init__(config, ends, draft_token_ids)
        if max(config.mask_token_id, int(self.draft_token_ids.max())) >= rows:
            raise UserError(
                f"got a model of {rows} tokens, expected one with mask_token_id "
                f"{config.mask_token_id} and the draft vocabulary up to "
                f"{int(self.draft_token_ids.max())}"
            )
        self.model: Any = model

    @property
    def trains_output_head(self) -> bool:
        return True

    @property
    def head(self) -> Tensor:
        """The head's rows of the draft vocabulary, [Vd, d]."""
        weight: Tensor = self.model.lm_head.weight
        is_whole = len(self.draft_token_ids) == len(weight)
        return weight if is_whole else weight[self.draft_token_ids]

    def group_rows(self, token_BT: Tensor, anchor_BA: Tensor) -> Tensor:
        """Returns the last hidden states of the groups anchored at rows anchor_BA i64[B, A], the
        real row and its masks, [B, A, K+1, d]."""
        (B, T), A, K = token_BT.shape, anchor_BA.shape[1], self.config.num_masks
        device = token_BT.device
        depth_K1 = torch.arange(K + 1, device=device)
        position_BAK1 = anchor_BA[..., None] + 1 + depth_K1
        real_BT = torch.arange(T, device=device).expand(B, T)
        position_BN = torch.cat((real_BT, position_BAK1[..., 1:].flatten(1)), 1)
        last_BN = torch.cat((real_BT, (anchor_BA + 1).repeat_interleave(K, 1)), 1)
        own_A = torch.arange(A, device=device).repeat_interleave(K)
        group_N = F.pad(own_A, (T, 0), value=-1)  # no group: a real row
        is_before = position_BN[:, None] <= position_BN[..., None]
        sees_real = (group_N < 0) & (position_BN[:, None] <= last_BN[..., None])
        sees_own = (group_N >= 0) & (group_N == group_N[:, None]) & is_before
        hidden_BNd = self.model.model(
            input_ids=F.pad(token_BT, (0, A * K), value=self.config.mask_token_id),
            position_ids=position_BN,
            attention_mask=(sees_real | sees_own)[:, None],
            use_cache=False,
        ).last_hidden_state
        real_BTd, mask_BMd = hidden_BNd.split((T, A * K), 1)
        batch_B1 = torch.arange(B, device=device)[:, None]
        anchor_rows = real_BTd[batch_B1, anchor_BA + 1][:, :, None]
        return torch.cat((anchor_rows, mask_BMd.unflatten(1, (A, K))), 2)

    def loss(
        self, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a batch, f32 scalar, and each guess's top-1 hits `correct_K` and
        labelled rows `count_K`, i64[K+1].

        A guess's loss is a mean over the chosen groups whose token is an answer's and in the draft
        vocabulary. The groups belong to a random `anchor_fraction` of the labelled rows.
        """
        config, K = self.config, self.config.num_guesses
        assert batch.feature_BTF is not None, "the labels may be the target's"
        label_BRK = self.labels(batch, K)
        anchor_BA, label_BAK = choose_groups(
            label_BRK, (label_BRK != IGNORED).any(-1), config.anchor_fraction, generator
        )
        b, a, k = (label_BAK != IGNORED).nonzero(as_tuple=True)
        return self.loss_of_guesses(
            self.group_rows(batch.token_BT, anchor_BA)[b, a, k],
            label_BAK[b, a, k],
            k,
            position_weights(K, config.decay),
            batch.feature_BTF[b, anchor_BA[b, a] + 1 + k],
            self.head,
        )

    @torch.no_grad()
    def guesses(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the top guesses at every row: token ids i64 and log-probabilities f32, both
        [B, T-1, K+1, top_k]."""
        B, T = batch.token_BT.shape
        anchor_BR = torch.arange(T - 1, device=batch.token_BT.device).expand(B, T - 1)
        chunks = anchor_BR.split(CHUNK_GROUPS, 1)
        rows = torch.cat([self.group_rows(batch.token_BT, chunk) for chunk in chunks], 1)
        return self.top_guesses(rows, lambda hidden: hidden, top_k, self.head)

    def runtime_config(self) -> dict[str, Any]:
        own = self.one_pass_config("tokens", self.config.num_masks, self.config.num_guesses)
        return own | {"first_token": 0}

    def export(self, target: decoder.DecoderConfig) -> dict[str, ir.Model]:
        """Returns the graph "drafter" in the contiguous form.

        Its inputs are input_ids i64[1,N], position_ids, mask, logit_rows i64[M] and the caches; its
        outputs guess_ids i64[M,C], guess_log_probs f32[M,C] and the caches. Raises UserError if the
        model's context is shorter than the target's.
        """
        limit = self.model.config.max_position_embeddings
        if limit < target.max_length:
            raise UserError(
                f"got drafter pard with a context of {limit} tokens, expected the bundle's "
                f"{target.max_length}: pass --max-length {limit} or less"
            )
        backbone = decoder.Backbone.from_transformers(
            self.model, (), target.max_length, target.scratch
        )
        if len(self.draft_token_ids) < self.model.config.vocab_size:
            backbone.head = decoder.VocabularyTable(self.head)
        dtype, config, outputs = backbone.dtype, backbone.config, self.output_names()
        backbone.embedding = _MaskedTable(  # type: ignore[assignment]
            backbone.embedding, len(self.embed_VD), self.config.mask_token_id
        )
        graph = _DrafterGraph(self, backbone)
        model = export_cached(graph, config, dtype, outputs, "pard")
        return {"drafter": model}


class _DrafterGraph(nn.Module):
    """The graph "drafter": one chain of rows over a cache, top-k guesses out."""

    def __init__(self, drafter: Drafter, backbone: decoder.Backbone) -> None:
        super().__init__()
        self.drafter: Any = drafter
        self.backbone = backbone

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        logits_MV, _, *caches = self.backbone(*inputs)
        num_masks = self.drafter.config.num_masks
        return (*self.drafter.one_pass_outputs(logits_MV, num_masks), *caches)


class _MaskedTable(nn.Module):
    """An embedding `table`, whose row of the mask's token stands for all ids from `base` on."""

    def __init__(self, table: decoder.VocabularyTable, base: int, mask_token_id: int) -> None:
        super().__init__()
        self.table, self.base, self.mask_token_id = table, base, mask_token_id
        table.is_bounded = True

    def embed(self, ids_N: Tensor) -> Tensor:
        return self.table.embed(torch.where(ids_N >= self.base, self.mask_token_id, ids_N))


def _new_model(fields: dict[str, Any]) -> Any:
    """Returns a language model of transformers, with random weights; raises UserError if its config
    is faulty, and UnsupportedModelError for sliding windows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        raw = AutoConfig.for_model(**fields)
        model = AutoModelForCausalLM.from_config(
            raw, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:  # transformers does not say what it raises
        raise UserError(f"got a faulty model config: {brief(error)}") from error
    if "sliding_attention" in (getattr(raw, "layer_types", None) or ()):
        raise UnsupportedModelError("got a model with sliding windows, expected one without")
    return model.train(False)
