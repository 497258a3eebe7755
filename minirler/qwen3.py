"""Qwen3, dense: the one model file, used by sampler and trainer alike.

    hidden = model(ids, positions, attend)  # [N, d], N packed tokens of any number of sequences
    logits = model.logits(ids)              # [B, T, V], plain causal forward, to read and check

The model does not know the KV cache, nor where one packed sequence ends: it hands queries, keys and
values (normed and rotated) to `attend(layer, q, k, v)`. The trainer passes packed attention, the
sampler write-then-paged-read.

Not here: reading of files (`weights`), mixture of experts, sliding windows, rope types other than
plain and YaRN. Parameters carry HF's names, so a checkpoint's state dict is this module's state
dict.

Shapes: B rows, T time, N packed tokens, V vocabulary, H query heads, K kv heads, D head dim, d
width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Read = Callable[[Tensor, Tensor], object]


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


@dataclass(frozen=True)
class Qwen3Config:
    """Architecture in HF's words. `head_dim` is explicit: it need not be hidden_size / heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 1e6
    yarn: Yarn | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")


class Qwen3(nn.Module):
    """The language model. New weights are normal(0, initializer_range) from torch's generator."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh weights: matrices normal, biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, self.config.initializer_range)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, read: Read | None = None):
        """Hidden states after the final norm, or what `read` makes of them and the head.

        ids, positions: int64 [N], packed; a position counts from 0 within its own sequence.
        attend(layer, q [N, H, D], k [N, K, D], v [N, K, D]) -> [N, H, D]; it owns the causal mask,
        the 1/sqrt(D) scale and whatever isolates sequences. Returns [N, d] in the weights' dtype,
        or read(hidden [N, d], head [V, d]): a head in shards is whole within this call only.
        """
        hidden = self.model(ids, positions, attend)
        if read is None:
            return hidden
        if self.config.tie_word_embeddings:
            return read(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden, read)

    def head_weight(self) -> Tensor:
        """The output matrix [V, d]: the embedding itself where the two are tied."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def logits(self, ids: Tensor) -> Tensor:
        """float32 [B, T, V] of a plain causal forward over int64 ids [B, T]; differentiable.

        All V columns, unmasked. Pad on the right: causality keeps padding from what precedes it.
        """
        rows, time = ids.shape
        positions = torch.arange(time, device=ids.device).repeat(rows)  # [N]

        def attend(layer, q, k, v):
            q, k, v = (x.view(rows, time, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(rows * time, -1, q.shape[-1])

        hidden = self(ids.flatten(), positions, attend)  # [N, d]
        return F.linear(hidden, self.head_weight()).float().view(rows, time, -1)


class Head(nn.Linear):
    """The output matrix where it is not the embedding."""

    def forward(self, hidden: Tensor, read: Read = F.linear):
        return read(hidden, self.weight)


class Decoder(nn.Module):
    """Embedding, layers and final norm (HF's `model.` prefix)."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(ids)  # [N, d]
        cos, sin = self.rope(positions, x.dtype)  # once for all layers
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the stream."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.is_checkpointed = False  # keep the layer's input alone, compute the rest again

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.is_checkpointed and torch.is_grad_enabled():
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(self.run, x, cos, sin, attend, **settings)
        return self.run(x, cos, sin, attend)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The layer itself."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Projections, per-head norms of q and k (always there, whatever `attention_bias` says),
    rotation."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, width, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = (len(x), -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)  # [N, H, D]
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)  # [N, K, D]
        v = self.v_proj(x).view(heads)  # [N, K, D]
        return self.o_proj(attend(self.index, q, k, v).reshape(len(x), -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension, then by a learned weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rope(nn.Module):
    """Cosine and sine tables of the rotary embedding, from float32 frequencies."""

    def __init__(self, config: Qwen3Config):
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


def inv_freq(config: Qwen3Config) -> Tensor:
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


def yarn_ramp(config: Qwen3Config) -> tuple[float, float]:
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


def attention_factor(config: Qwen3Config) -> float:
    """What cos and sin are multiplied by: 1 without YaRN; an explicit value wins over the
    formula."""
    if config.yarn is None:
        return 1.0
    if config.yarn.attention_factor is not None:
        return config.yarn.attention_factor
    factor = config.yarn.factor
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
