"""Defines what drafters borrow from their target."""

from dataclasses import dataclass

from torch import Tensor

from spec_runtime.errors import UserError


@dataclass(frozen=True)
class LayerDims:
    """The sizes of a decoder layer; most drafters take their target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"got {self.num_heads} heads over {self.num_kv_heads} key/value heads, "
                "expected a multiple: check the target's configuration"
            )


@dataclass(frozen=True)
class TargetEnds:
    """The parts that a drafter borrows from its target, frozen.

    They are embedding, LM head and final norm (float32), the rotary tables cos and sin (f32
    [positions, r/2], r columns of a head being turned), and the last layer: tensors by
    `DecoderLayer`'s parameter names, for layers that start from it, or
    none where the target's layers are built in another way.
    """

    dims: LayerDims
    embed_VD: Tensor
    head_VD: Tensor
    final_norm_D: Tensor
    cos: Tensor
    sin: Tensor
    last_layer: dict[str, Tensor]

    @property
    def feature_scale(self) -> float:
        """Returns a final feature's root mean square, which the target's last norm gives it."""
        return self.final_norm_D.float().square().mean().sqrt().item()
