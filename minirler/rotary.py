"""Rotary position embedding, plain and with YaRN: from positions to rotated queries and keys.

`config` is a `Qwen3Config`, of which head_dim, rope_theta and yarn are read. Not here: other rope
types.

Shapes: N packed tokens, D head dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary frequencies (Peng et al., 2023), applied at every position.

    `attention_factor` None means 0.1 ln(factor) + 1. `truncate` rounds the ramp's ends to whole
    dimensions, as the published checkpoints were trained.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class Rope(nn.Module):
    """Cosine and sine tables of the rotary embedding, from float32 frequencies."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inv_freq(config), persistent=False)

    def _apply(self, fn, recurse=True):
        # A cast of the model to bfloat16 would round the frequencies too, and the angle at position
        # 10,000 would be wrong by whole turns: make them anew, on the device that `fn` moves to.
        super()._apply(fn, recurse)
        self.inv_freq = inv_freq(self.config).to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [N] -> cos, sin [N, 1, D], in `dtype`; sin's first half is negated for
        `rotate`."""
        angles = positions.float()[:, None, None] * self.inv_freq  # [N, 1, D/2]
        scale = attention_factor(self.config)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [N, H, D]. The roll swaps the halves; sin carries the sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inv_freq(config) -> Tensor:
    """Rotary frequencies, float32 [D/2], on the CPU; radians a position.

    Computed in float32, as for the published checkpoints: a more exact value would differ from
    theirs, and the difference grows with the position.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    plain = 1.0 / config.rope_theta**half  # [D/2]
    if config.yarn is None:
        return plain
    low, high = yarn_ramp(config)
    index = torch.arange(len(half), dtype=torch.float32, device="cpu")
    slow = ((index - low) / max(high - low, 0.001)).clamp(0, 1)  # 1: a long wave, interpolated
    return plain / config.yarn.factor * slow + plain * (1 - slow)


def yarn_ramp(config) -> tuple[float, float]:
    """First and last dimension of the ramp between kept and interpolated frequencies (YaRN, eq.
    17-18)."""
    yarn, dim = config.yarn, config.head_dim

    def dimension(turns: float) -> float:  # that makes so many turns over the original context
        length = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.rope_theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def attention_factor(config) -> float:
    """What cos and sin are multiplied by: 1 without YaRN; an explicit value wins over the
    formula."""
    if config.yarn is None:
        return 1.0
    if config.yarn.attention_factor is not None:
        return config.yarn.attention_factor
    factor = config.yarn.factor
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
