"""Qwen3, dense: the one model file, used by sampler and trainer alike.

    hidden = model(ids, positions, attend)  # [N, d], N packed tokens of any number of sequences
    logits = model.logits(ids)              # [B, T, V], plain causal forward, to read and check

The model does not know the KV cache, nor where one packed sequence ends: it hands queries, keys and
values (normed and rotated) to `attend(layer, q, k, v)`. The trainer passes packed attention, the
sampler write-then-paged-read.

Not here: reading of files (`weights`), the rotation (`rotary`), mixture of experts, sliding
windows. Parameters carry HF's names, so a checkpoint's state dict is this module's state
dict.

Shapes: B rows, T time, N packed tokens, V vocabulary, H query heads, K kv heads, D head dim, d
width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .linear import PLAIN, Linear, linear
from .rotary import Rope, Yarn, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Read = Callable[[Tensor, Tensor], object]


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
        self.rows = PLAIN  # `linear.set_rows_` sets it
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
        hidden = self._hidden(ids, positions, attend)
        if read is None:
            return hidden
        if self.config.tie_word_embeddings:
            return read(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden, read)

    def _hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, d]; N is filled up here, once, where products keep to `rows`."""
        count = len(ids)
        spare = -count % self.rows[0] if self.rows else 0
        if not spare:
            return self.model(ids, positions, attend)

        def attend_count(layer, *qkv):  # the tokens added reach no other
            return F.pad(attend(layer, *(x[:count] for x in qkv)), (0, 0, 0, 0, 0, spare))

        ids, positions = (F.pad(x, (0, spare)) for x in (ids, positions))
        return self.model(ids, positions, attend_count)[:count]

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
        return linear(hidden, self.head_weight(), self.rows).float().view(rows, time, -1)


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
        self.q_proj = Linear(width, q_width, bias=bias)
        self.k_proj = Linear(width, kv_width, bias=bias)
        self.v_proj = Linear(width, kv_width, bias=bias)
        self.o_proj = Linear(q_width, width, bias=bias)
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
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

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
