"""Attention and the KV cache: what the sampler reads through block tables, what the trainer packs.

Both fold each query's keys in one order, in chunks from the first key on, so that the same query
has the same bits in either, whatever the batch, the block tables or the chunks of a prefill. Plain
torch (`ops_ref`) does so where `deterministic` asks for it.

Not here: who may write which block (`blocks`).

Shapes: N packed tokens, B rows, H query heads, K kv heads, D head dim, L layers. The cache of a
layer is [blocks, 2, K, block_size, D]: keys, then values, a page of each head in one piece.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from . import ops_ref as ref
from .kernels import DTYPES, is_native, launch

HEAD_DIMS, GROUPS = (32, 64, 128), (1, 2, 4, 8)  # that the kernels are compiled for
KEY_CHUNK = 256  # keys that a thread block of the GPU folds alone: kChunkKeys in kernels.h
GPU_BLOCKS = 1024  # thread blocks that fill a large GPU


@dataclass(frozen=True)
class PagedRows:
    """B rows of packed queries, each the last tokens of its row, and the blocks that hold them."""

    tables: Tensor  # [B, n] int32, blocks in the order of tokens
    lengths: Tensor  # [B] int32, tokens of the row, its queries included
    cu_seqlens: Tensor  # [B + 1] int32, from 0 to N
    slots: Tensor  # [N] int64, where each query's own key and value belong
    positions: Tensor  # [N] int64, of each query in its row
    spans: list[tuple[int, int, int]]  # on the host: first query, behind the last, length

    @property
    def num_queries(self) -> int:
        """N."""
        return self.spans[-1][1] if self.spans else 0

    @cached_property
    def max_length(self) -> int:
        """Of the longest row."""
        return max((length for _, _, length in self.spans), default=0)


def paged_rows(tables, starts, ends, num_blocks, block_size, device="cpu") -> PagedRows:
    """Rows whose tokens [start, end) are computed now.

    tables: lists of blocks, one a row; starts, ends [B]. ValueError names the row that its blocks
    do not hold.
    """
    starts, ends = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    widths = np.array([len(table) for table in tables], dtype=np.int64)
    padded = np.zeros((len(tables), max(widths, default=0)), dtype=np.int64)  # [B, n]
    blocks = np.fromiter(chain.from_iterable(tables), dtype=np.int64, count=widths.sum())
    padded[np.arange(padded.shape[1]) < widths[:, None]] = blocks
    wrong = (starts < 0) | (ends < starts) | (ends > widths * block_size)
    wrong |= ((padded < 0) | (padded >= num_blocks)).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row}: tokens {starts[row]} to {ends[row]} in blocks {tables[row]}, "
                         f"of {num_blocks} of {block_size} tokens each")  # fmt: skip
    counts = ends - starts
    borders = np.concatenate([[0], counts.cumsum()])  # [B + 1]
    row_of = np.repeat(np.arange(len(counts)), counts)  # [N]
    position = np.arange(borders[-1]) - borders[row_of] + starts[row_of]
    slots = padded[row_of, position // block_size] * block_size + position % block_size
    small = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (padded, ends, borders))
    spans = list(zip(borders[:-1].tolist(), borders[1:].tolist(), ends.tolist(), strict=True))
    large = (torch.from_numpy(x).to(device) for x in (slots, position))
    return PagedRows(*small, *large, spans)


def kv_write_(cache, k, v, slots):
    """Store k and v [N, K, D] in a layer's cache; slots int64 [N], block * block_size + offset.

    `slots` come from `paged_rows`, which has checked them; those below 0 (padding) are skipped.
    """
    check_cache(cache, k, v)
    if not is_native(cache, k, v):
        return ref.kv_write_ref(cache, k, v, slots)
    k, v = k.contiguous(), v.contiguous()
    launch("kv_write", cache.device, *fields(cache), k, v, slots, len(slots))


def kv_copy_(cache, copies):
    """Copy blocks, (source, target) pairs, in every layer of cache [L, blocks, ...].

    All are read before any is written.
    """
    sources, targets = zip(*copies, strict=True)
    if not 0 <= min(sources + targets) <= max(sources + targets) < cache.shape[1]:
        raise ValueError(f"copies of blocks beyond the cache's {cache.shape[1]}: {copies}")
    tensors = [torch.tensor(x, device=cache.device) for x in (sources, targets)]
    is_chain = not set(sources).isdisjoint(targets)  # the kernel keeps no order
    if is_chain or not (is_native(cache) and cache.is_contiguous()):
        return ref.kv_copy_ref(cache, *tensors)
    for layer in cache:
        launch("kv_copy", cache.device, *fields(layer), *tensors, len(copies))


def paged_attention(q, cache, rows, splits=None, deterministic=False):
    """Attention of packed queries q [N, H, D] over one layer's cache -> [N, H, D].

    The keys and values of the queries' own tokens are in the cache already. `splits` (default: by
    what fills a GPU) is how many thread blocks share a query's keys; no result depends on it.
    `deterministic`: in plain torch too a query's bits are those of `packed_attention`.
    """
    N, H, D = q.shape
    check_cache(cache, q[:, : cache.shape[2]])
    if N != rows.num_queries or H % cache.shape[2]:
        raise ValueError(f"q is {list(q.shape)}, the rows have {rows.num_queries} queries and the "
                         f"cache {cache.shape[2]} heads")  # fmt: skip
    if not (is_native(q, cache) and has_kernel(D, H, cache.shape[2])):
        plain = ref.folded_paged_ref if deterministic else ref.paged_attention_ref
        return plain(q, cache, rows.tables, rows.spans)
    chunks = -(-rows.max_length // KEY_CHUNK)
    if splits is None:
        splits = GPU_BLOCKS // (N * cache.shape[2]) if q.device.type == "cuda" else 1
    splits = max(1, min(splits, chunks))
    size = N * H * chunks * (D + 2) if splits > 1 else 0
    scratch = torch.empty(size, dtype=torch.float32, device=q.device)
    q, out = aligned(q), torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = (len(rows.spans), N, rows.cu_seqlens, rows.lengths, rows.tables,
                 rows.tables.shape[1], rows.max_length, H, D**-0.5)  # fmt: skip
    launch("paged_attention", q.device, q, *fields(cache), *arguments, out, scratch, splits)
    return out


def packed_attention(q, k, v, cu_seqlens, deterministic=True):
    """Causal attention inside each packed sequence: q [N, H, D], k and v [N, K, D] -> [N, H, D].

    `cu_seqlens` (list or tensor, one more than sequences, from 0 to N) holds their borders.
    Differentiable; H must be a multiple of K. The bits are those of `paged_attention`;
    `deterministic=False` gives them up for torch's own fused attention, where that is faster: on a
    GPU, and without a kernel.
    """
    borders = cu_seqlens.tolist() if torch.is_tensor(cu_seqlens) else list(cu_seqlens)
    lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    if sum(lengths) != len(q) or borders[:1] != [0] or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(q)} packed tokens: {borders}")
    if k.shape != v.shape or k[:, 0].shape != q[:, 0].shape or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit")
    is_wanted = deterministic or q.device.type == "cpu"
    if not (is_wanted and is_native(q, k, v) and has_kernel(q.shape[2], q.shape[1], k.shape[1])):
        plain = ref.FoldedPacked.apply if deterministic else ref.packed_attention_ref
        return plain(q, k, v, lengths)
    on_device = torch.tensor(borders, dtype=torch.int32, device=q.device)
    return packed_attention_op(q, k, v, on_device)[0]


@custom_op("minirler::packed_attention", mutates_args=())
def packed_attention_op(q: Tensor, k: Tensor, v: Tensor,
                        cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N, H, D] and logsumexp of the scaled scores, float32 [N, H]; kernels only."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    launch("packed_attention", q.device, q, k, v, *sizes(q, k, cu_seqlens), out, lse)
    return out, lse


@packed_attention_op.register_fake
def _(q, k, v, cu_seqlens):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("minirler::packed_attention_backward", mutates_args=())
def packed_attention_backward_op(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the weights are computed again."""
    inputs = [aligned(x) for x in (q, k, v, out, grad_out)]
    q, k, v = inputs[:3]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scratch = torch.empty_like(lse)
    launch("packed_attention_backward", q.device, *inputs, lse, *sizes(q, k, cu_seqlens), *grads,
           scratch)  # fmt: skip
    return grads


@packed_attention_backward_op.register_fake
def _(q, k, v, out, grad_out, lse, cu_seqlens):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def save_packed(ctx, inputs, output):
    """What the backward pass of `packed_attention` needs."""
    ctx.mark_non_differentiable(output[1])
    q, k, v, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def backward_of_packed(ctx, grad_out, _lse):
    """Gradients of the inputs of `packed_attention`."""
    q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
    return *packed_attention_backward_op(q, k, v, out, grad_out, lse, cu_seqlens), None


packed_attention_op.register_autograd(backward_of_packed, setup_context=save_packed)


def has_kernel(head_dim, heads, kv_heads):
    """Whether the attention kernels are compiled for these sizes."""
    return head_dim in HEAD_DIMS and heads // kv_heads in GROUPS


def check_cache(cache, *tensors):
    """ValueError unless the tensors [N, K, D] belong to a layer's cache [blocks, 2, K, size, D]."""
    wanted = cache.shape[2], cache.shape[4]
    if cache.dim() != 5 or not cache.is_contiguous() or any(
        (*x.shape[1:],) != wanted or x.dtype != cache.dtype for x in tensors
    ):
        got = [f"{x.dtype} {list(x.shape)}" for x in tensors]
        raise ValueError(f"cache {cache.dtype} {list(cache.shape)} does not take {', '.join(got)}")


def fields(cache):
    """The fields of `Cache` in csrc/kernels.h."""
    return cache, DTYPES[cache.dtype], cache.shape[0], *cache.shape[2:]


def sizes(q, k, cu_seqlens):
    """What the launchers of packed attention want to know."""
    heads = q.shape[1], k.shape[1], q.shape[2]
    return DTYPES[q.dtype], cu_seqlens, len(cu_seqlens) - 1, len(q), *heads, q.shape[2] ** -0.5


def aligned(x):
    """x, contiguous and at an address that is a multiple of 16 bytes: the GPU loads so many."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@contextmanager
def lent(cache: Tensor) -> Iterator[None]:
    """Within, the cache's memory is free for others; what it held is lost, and so is its address.

    An update needs the room while nobody samples, and no key or value outlives new weights.
    """
    storage = cache.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(size)
