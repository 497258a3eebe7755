"""The numerical operations that are worth a kernel of their own, in plain torch.

Trainer and sampler both go through this file, so that a log-prob, a random draw or an attention has
one definition: float32 whatever the model computes in, the tempered *full* softmax over the first
`num_valid` vocabulary entries (the rows beyond are padding that no tokenizer can name), and noise
that depends on nothing but its key and counter.

Not here: the model (`qwen3`), and who may write which cache block (`blocks`).

    python -m minirler.ops        one line an op with the backend that runs it

Shapes: N packed tokens, B rows, T time, V vocabulary, H query heads, K kv heads, D head dim.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


def logprob(logits, targets, temperature=1.0, num_valid=None):
    """Log-prob of each target and entropy of its row: float32 [N] each; the former differentiable.

    logits [N, V] of any float dtype (-inf is a token that cannot be drawn), targets [N] int64 below
    `num_valid` (default V). Both are those of softmax(logits[:, :num_valid] / temperature).
    """
    z = logits[:, :num_valid].float() / temperature  # bf16 would lose 0.01 nats a token
    all_logps = torch.log_softmax(z, dim=-1)  # [N, V]
    with torch.no_grad():
        entropy = -(all_logps.exp() * all_logps.clamp(min=-1e30)).sum(dim=-1)  # 0 * log 0 is 0
    return all_logps.gather(1, targets[:, None])[:, 0], entropy


def token_logps(hidden, head, targets, mask, temperature=1.0, num_valid=None, chunk=1024):
    """`logprob` of the logits hidden @ head.T, of which only `chunk` rows exist at a time.

    hidden [N, d], head [V, d], targets [N] int64, mask [N] bool -> (logps, entropy), float32 [N].
    Rows outside the mask are not computed: both results are 0 there and the gradient is exactly 0,
    whatever their hidden state or target holds. The backward pass computes the logits again.
    """
    return _TokenLogps.apply(hidden, head, targets, mask, temperature, num_valid, chunk)


class _TokenLogps(torch.autograd.Function):
    """Forward keeps no logits; backward recomputes them chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, head, targets, mask, temperature, num_valid, chunk):
        rows = mask.nonzero()[:, 0]  # synchronises on a GPU: the row count shapes the work
        logps = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logps)
        for part in rows.split(chunk):
            logits = F.linear(hidden[part], head[:num_valid])  # [chunk, V]
            logps[part], entropy[part] = logprob(logits, targets[part], temperature)
        ctx.save_for_backward(hidden, head, targets, rows)
        ctx.settings = temperature, num_valid, chunk
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, grad_logps, _):
        hidden, head, targets, rows = ctx.saved_tensors
        temperature, num_valid, chunk = ctx.settings
        valid = head[:num_valid]
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # one accumulator in float32: bf16 would drop small chunks beside a large sum
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in rows.split(chunk):
            x = hidden[part]
            scale = grad_logps[part, None] / temperature  # [chunk, 1]
            grad = torch.softmax(F.linear(x, valid).float() / temperature, dim=-1).mul_(-scale)
            grad.scatter_add_(1, targets[part, None], scale)  # scale * (onehot - p)
            grad = grad.to(x.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ valid
            if grad_head is not None:
                grad_head[:num_valid] += (grad.T @ x).float()
        grad_head = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None, None, None


def packed_attention(q, k, v, cu_seqlens):
    """Causal attention inside each packed segment: q [N, H, D], k and v [N, K, D] -> [N, H, D].

    `cu_seqlens` (list or tensor, one more than segments, from 0 to N) holds the segment borders.
    Differentiable; H must be a multiple of K.
    """
    borders = cu_seqlens.tolist() if torch.is_tensor(cu_seqlens) else list(cu_seqlens)
    lengths = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    if sum(lengths) != len(q) or borders[:1] != [0] or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the {len(q)} packed tokens: {borders}")
    # split, not slices: each slice's backward would fill a zero tensor of all N tokens
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_causal(*part) for part in parts]) if lengths else torch.zeros_like(q)


def _causal(q, k, v):
    """Causal attention of one sequence: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


# The KV cache of one layer is [blocks, block_size, 2, K, D]: key and value of a token side by side,
# so that a row's context is gathered by one copy of whole blocks and read in place.
TILE_BYTES = 2 << 20  # gathered at once while decoding: still in the processor's cache when read
TILE_QUERIES = 512  # of one chunk: bounds its mask, and early tiles skip the last keys


@dataclass(frozen=True)
class Tile:
    """Queries [start, stop) of a packed batch: `rows` rows of equally many, each over `blocks`.

    `blocks` int64 [rows * blocks a row]; `mask` [rows, 1, queries a row, keys] is 0 or -inf. A tile
    without mask is one row from its first token on: causal over its own keys, nothing to gather.
    """

    start: int
    stop: int
    rows: int = 1
    blocks: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def kv_write_(cache, k, v, slots):
    """Store k and v [N, K, D] in a layer's cache; slots int64 [N], block * block_size + offset."""
    cache.flatten(0, 1).index_copy_(0, slots, torch.stack((k, v), dim=1))


def kv_copy_(cache, sources, targets):
    """Copy blocks in every layer of cache [L, blocks, ...]; all are read before any is written."""
    cache[:, targets] = cache[:, sources]


def decode_tiles(tables, lengths, like):
    """Tiles for rows of one query each, the first rows of a packed batch, *longest first*.

    tables int64 [B, n] (padded with any valid block) and lengths [B] (tokens, the query's own
    included) are numpy arrays; `like` is one layer's cache.
    """
    block_size, token_bytes = like.shape[1], like[0, 0].numel() * like.element_size()
    tiles, start = [], 0
    while start < len(lengths):
        blocks = -(-int(lengths[start]) // block_size)
        keys = blocks * block_size
        stop = min(len(lengths), start + max(1, TILE_BYTES // (keys * token_bytes)))
        hidden = np.arange(keys) >= lengths[start:stop, None]  # [rows, keys]
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(like)[:, None, None]
        table = torch.from_numpy(tables[start:stop, :blocks].flatten()).to(like.device)
        tiles.append(Tile(start, stop, stop - start, table, mask))
        start = stop
    return tiles


def chunk_tiles(table, start, end, at, like):
    """Tiles for tokens [start, end) of one row, which stand at `at` in the packed batch.

    table int64 [n] numpy; like `decode_tiles`.
    """
    if start == 0:
        return [Tile(at, at + end)]
    tiles = []
    for first in range(start, end, TILE_QUERIES):
        last = min(end, first + TILE_QUERIES)
        blocks = -(-last // like.shape[1])
        hidden = np.arange(blocks * like.shape[1]) > np.arange(first, last)[:, None]
        mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(like)[None, None]
        held = torch.from_numpy(table[:blocks]).to(like.device)
        tiles.append(Tile(at + first - start, at + last - start, 1, held, mask))
    return tiles


def paged_attention(q, k, v, cache, tiles):
    """Attention of packed queries q [N, H, D] over one layer's cache -> [N, H, D].

    k and v [N, K, D] are those of the same tokens, written to the cache already. The tiles cover N.
    """
    out = torch.empty_like(q)
    for tile in tiles:
        own = slice(tile.start, tile.stop)
        if tile.mask is None:
            out[own] = _causal(q[own], k[own], v[own])
        else:
            out[own] = _gathered(q[own], cache, tile)
    return out


def _gathered(q, cache, tile):
    """Attention of one tile's queries over its rows' blocks."""
    heads, kv_heads = q.shape[1], cache.shape[3]
    kv = cache.index_select(0, tile.blocks).view(tile.rows, -1, *cache.shape[2:])  # [R, T, 2, K, D]
    k, v = kv.permute(2, 0, 3, 1, 4)  # [R, K, T, D] each, not copied
    if tile.mask.shape[2] == 1:  # the heads of one group as its queries: its keys are read once
        grouped = q.view(tile.rows, kv_heads, heads // kv_heads, -1)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=tile.mask).view(q.shape)
    q = q.transpose(0, 1)[None]  # [1, H, T, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=tile.mask, enable_gqa=True)
    return out[0].transpose(0, 1)


PHILOX_ROUNDS = 10
NOISE_TILE = 1 << 15  # counters at once: the temporaries stay in the processor's cache


def noise_key(seed, prompt_key):
    """The 64-bit key of a prompt's noise: a hash of the seed and the prompt's key (str or int)."""
    name = prompt_key if isinstance(prompt_key, str) else int(prompt_key)  # 1 and "1" differ
    digest = hashlib.blake2b(repr((int(seed), name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def philox4x32(counter, key):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Four counter and two key words, uint64 arrays below 2**32 that broadcast together; returns four
    such arrays. The 64-bit type holds the full product of two words.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> shift) ^ (c1 ^ k0), p1 & low
        c2, c3 = (p0 >> shift) ^ (c3 ^ k1), p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def gumbel_noise(keys, steps, samples, positions, V):
    """Standard Gumbel noise, float32 [B, V]: row i depends on the i-th entries and nothing else.

    keys [B] from `noise_key`; steps, samples, positions [B] non-negative, below 2**32. The counter
    of token v is (step, sample, position, v // 4), its word v % 4.
    """
    columns = (keys, steps, samples, positions)
    keys, *words = (np.asarray(x, dtype=np.uint64)[:, None] for x in columns)
    low, high = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
    fours = np.arange(-(-V // 4), dtype=np.uint64)[None]  # [1, V/4]
    noise = torch.empty(len(keys), V)
    rows = max(1, NOISE_TILE // max(1, fours.size))
    for i in range(0, len(keys), rows):
        part = slice(i, i + rows)
        out = philox4x32((*(w[part] for w in words), fours), (low[part], high[part]))
        draws = np.stack(np.broadcast_arrays(*out), axis=-1).astype(np.float64)  # [rows, V/4, 4]
        uniform = torch.from_numpy(draws).flatten(1).add_(0.5).mul_(2.0**-32)  # never 0, never 1
        # the first log in float64: float32 has no numbers this close to 1
        noise[part] = uniform.log_().neg_().float().log_().neg_()[:, :V]
    return noise


def sample(logits, noise, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, num_valid=None):
    """Draw one token a row: (ids int64 [B], logps float32 [B]).

    logits [B, V] of any float dtype, noise [B, >= num_valid] Gumbel. The id is the argmax of
    logits / temperature + noise among what the filters keep; at temperature 0 that of the logits.
    The log-prob is that of the tempered *full* softmax over the first `num_valid` entries, filters
    or not (at temperature 0: of the plain softmax).
    """
    z = logits[:, :num_valid].float()
    if temperature > 0:
        z = z / temperature
        scores = _filtered(z, top_k, top_p, min_p) + noise[:, : z.shape[1]]
    else:
        scores = z
    ids = scores.argmax(dim=-1)
    return ids, torch.log_softmax(z, dim=-1).gather(1, ids[:, None])[:, 0]


def _filtered(z, top_k, top_p, min_p):
    """z [B, V] with -inf for what the filters drop; the most likely token always stays."""
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return z
    ranked, order = z.sort(dim=-1, descending=True, stable=True)  # ties: the smaller id first
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
    probs = ranked.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    # smallest prefix that reaches top_p: a token stays while those before it do not reach it; the
    # tolerance is the rounding of a float32 sum, else an exact tie would keep one more
    keep &= probs.cumsum(dim=-1) - probs < top_p - 1e-6 if top_p < 1 else keep
    keep &= probs >= min_p * probs[:, :1]
    keep[:, 0] = True
    return z.masked_fill(~keep.gather(1, order.argsort(dim=-1)), -torch.inf)


BACKENDS = dict.fromkeys(
    ("logprob", "token_logps", "packed_attention", "paged_attention", "kv_write_", "kv_copy_",
     "gumbel_noise", "sample"), "torch")

if __name__ == "__main__":
    for op, backend in BACKENDS.items():
        print(op, backend)
