"""What the model says of a packed micro-batch: log-probs and entropies of its trained tokens.

The trainer's `attend` for `qwen3`: attention within packed sequences, where the sampler passes the
paged cache. And the learning rate's schedule, which both trainings share.
"""

import math

import torch
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

    def read(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:  # [N, d], [V, d]
        settings = temperature, num_valid, chunk, model.rows
        return token_logps(hidden, head, batch.targets, batch.mask, *settings)

    return model(batch.ids, batch.positions, attend, read)


def set_lr_(
    optimizer: torch.optim.Optimizer, lr: float, schedule: str, step: int, steps: int, warmup: int
) -> None:
    """Set the learning rate of `step`: `lr` times `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * lr_factor(schedule, step, steps, warmup)


def lr_factor(schedule: str, step: int, steps: int, warmup: int) -> float:
    """Factor in (0, 1] of the learning rate at `step` (from 0) of `steps`.

    A linear warm-up over `warmup` steps, then "constant", or "linear" or "cosine" (half a wave)
    towards 0 after the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return 1.0
    return 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
