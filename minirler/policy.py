"""What the model says of a packed micro-batch: log-probs and entropies of its trained tokens.

The trainer's half of the wall in `qwen3`: it passes attention within packed segments, where the
sampler passes the paged cache.
"""

from torch import Tensor

from .attention import packed_attention
from .ops import token_logps
from .pack import MicroBatch
from .qwen3 import Qwen3


def batch_logps(
    model: Qwen3,
    batch: MicroBatch,
    temperature: float = 1.0,
    num_valid: int | None = None,
    chunk: int = 1024,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution: float32 [N] each, 0 outside the
    mask.

    Both are of the softmax tempered by `temperature` over the first `num_valid` tokens. The former
    is differentiable; logits exist for `chunk` tokens at a time. `deterministic` is that of
    `packed_attention`.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, batch.cu_seqlens, deterministic)

    hidden = model(batch.ids, batch.positions, attend)  # [N, d]
    head = model.head_weight()  # [V, d]
    return token_logps(hidden, head, batch.targets, batch.mask, temperature, num_valid, chunk)
