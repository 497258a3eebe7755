"""The operations in plain torch: the specification of every kernel, and what runs without one.

Arguments are checked by `ops`, which chooses between these and the kernels. Each function works on
any device and any float dtype.

Shapes: N packed tokens, B rows, V vocabulary, H query heads, K kv heads, D head dim, R rollouts, P
groups.
"""

import torch
import torch.nn.functional as F

GATHER_BYTES = 8 << 20  # keys and values copied at once while decoding
FOLD_QUERIES, FOLD_KEYS = 8, 32  # of one product in `folded_attention_ref`


def logprob_ref(logits, targets, mask, temperature, num_valid):
    """Log-prob of each target, entropy and logsumexp of its row: float32 [N], 0 outside the mask.

    Of softmax(logits[:, :num_valid] / temperature); logits [N, >= num_valid], mask [N] bool, None
    for all.
    """
    z = logits[:, :num_valid].float() / temperature  # bf16 would lose 0.01 nats a token
    if mask is not None:
        targets = targets.masked_fill(~mask, 0)
    all_logps = torch.log_softmax(z, dim=-1)  # [N, V]
    logps = all_logps.gather(1, targets[:, None])[:, 0]
    entropy = -(all_logps.exp() * all_logps.clamp(min=-1e30)).sum(dim=-1)  # 0 * log 0 is 0
    results = logps, entropy, torch.logsumexp(z, dim=-1)
    return results if mask is None else tuple(torch.where(mask, x, 0.0) for x in results)


def logprob_backward_ref(grad_logps, logits, targets, mask, lse, temperature, num_valid):
    """Gradient of logits: grad_logps / temperature * (onehot - p); 0 outside mask and num_valid."""
    scale = grad_logps[:, None] / temperature  # [N, 1]
    grad = torch.zeros_like(logits, dtype=torch.float32)
    z = logits[:, :num_valid].float() / temperature
    grad[:, :num_valid] = torch.exp(z - lse[:, None]) * -scale
    if mask is not None:
        targets = targets.masked_fill(~mask, 0)
    grad.scatter_add_(1, targets[:, None], scale)
    return (grad if mask is None else torch.where(mask[:, None], grad, 0.0)).to(logits.dtype)


def token_logps_ref(hidden, head, targets, mask, temperature=1.0, num_valid=None):
    """The fused head without the fusion: (logps, entropy) from all logits at once, in memory."""
    num_valid = num_valid or len(head)
    logits = F.linear(hidden, head)
    return logprob_ref(logits, targets, mask, temperature, num_valid)[:2]


def group_advantages_ref(rewards, offsets, scored, normalize, eps, flat):
    """(r - mean) / (std + eps) in each group, float32 [R]; exactly 0 if unscored, alone or flat.

    rewards float64 [R], sorted by group; group p is [offsets[p], offsets[p + 1]). normalize: "std"
    (population), "std1" (sample), "none". Flat: scored rewards differ by no more than `flat`.
    """
    advantages = torch.zeros_like(rewards)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = start + scored[start:end].nonzero()[:, 0]
        values = rewards[rows]
        if len(rows) < 2 or values.max() - values.min() <= flat:
            continue
        centred = values - values.mean()
        if normalize != "none":
            centred = centred / (values.std(correction=int(normalize == "std1")) + eps)
        advantages[rows] = centred
    return advantages.float()


def sample_ref(logits, noise, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Draw one token a row: (ids int64 [B], logps float32 [B]).

    logits [B, V], noise [B, V] Gumbel. The id is the argmax of logits / temperature + noise among
    what the filters keep; at temperature 0 that of the logits. The log-prob is that of the tempered
    *full* softmax, filters or not (at temperature 0: of the plain softmax).
    """
    z = logits.float()
    if temperature > 0:
        z = z / temperature
        scores = filtered(z, top_k, top_p, min_p) + noise
    else:
        scores = z
    ids = scores.argmax(dim=-1)
    return ids, torch.log_softmax(z, dim=-1).gather(1, ids[:, None])[:, 0]


def filtered(z, top_k, top_p, min_p):
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


def kv_write_ref(cache, k, v, slots):
    """Store k and v [N, K, D] in cache [blocks, 2, K, block_size, D] at `slots`, int64 [N].

    Slots below 0 are skipped.
    """
    block_size, is_kept = cache.shape[3], slots >= 0
    k, v, slots = k[is_kept], v[is_kept], slots[is_kept]
    cache[slots // block_size, :, :, slots % block_size] = torch.stack((k, v), dim=1)


def kv_copy_ref(cache, sources, targets):
    """Copy blocks in every layer of cache [L, blocks, ...]; all are read before any is written."""
    cache[:, targets] = cache[:, sources]


def paged_attention_ref(q, cache, tables, spans):
    """Attention of packed queries q [N, H, D] over the blocks of their rows -> [N, H, D].

    tables int [B, n]; spans, one a row: (first query, behind its last, tokens of the row); a row's
    queries are its last tokens. Rows of one query each are gathered together.
    """
    out = torch.empty_like(q)
    ones = [r for r, (start, end, _) in enumerate(spans) if end - start == 1]
    width = -(-max((spans[r][2] for r in ones), default=1) // cache.shape[3])  # blocks a row
    step = max(1, GATHER_BYTES // (width * cache[0].numel() * cache.element_size()))
    parts = [ones[i:i + step] for i in range(0, len(ones), step)]
    parts += [[r] for r, (start, end, _) in enumerate(spans) if end - start > 1]
    for part in parts:
        starts, ends, lengths = (torch.tensor(x, device=q.device)
                                 for x in zip(*(spans[r] for r in part), strict=True))
        count = int(ends[0] - starts[0])
        at = starts[:, None] + torch.arange(count, device=q.device)  # [rows, T]
        blocks = tables[part][:, : -(-int(lengths.max()) // cache.shape[3])]
        last = lengths[:, None] - count + torch.arange(count, device=q.device)  # key of each query
        out[at] = _gathered(q[at], cache, blocks, last)
    return out


def _gathered(q, cache, blocks, last):
    """q [B, T, H, D] over cache[blocks [B, n]], each query up to key `last` [B, T]."""
    kv = cache[blocks].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, R, K, keys, D]
    seen = torch.arange(kv.shape[3], device=q.device) <= last[..., None]  # [B, T, keys]
    # what no query sees may be anything: a weight of 0 does not hide a NaN
    k, v = kv.masked_fill(~seen[:, -1, None, :, None], 0.0)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen[:, None],
                                         enable_gqa=True)
    return out.transpose(1, 2)


def packed_attention_ref(q, k, v, lengths):
    """Causal attention inside each packed sequence: q [N, H, D], k and v [N, K, D] -> [N, H, D].

    Differentiable, by torch's own fused attention a sequence.
    """
    # split, not slices: each slice's backward would fill a zero tensor of all N tokens
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_causal(*part) for part in parts]) if lengths else torch.zeros_like(q)


def _causal(q, k, v):
    """Causal attention of one sequence: q [T, H, D], k and v [T, K, D] -> [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


# ------------------------------------------------------------ the same bits in any batch


def folded_paged_ref(q, cache, tables, spans):
    """`paged_attention_ref` whose bits are those of `FoldedPacked`, whatever the batch; slower."""
    size = cache.shape[3]

    def keys_at(rows, keys):
        # beyond a row's table anything will do
        blocks = tables[rows][:, (keys // size).clamp(max=tables.shape[1] - 1)]
        return cache[blocks.long(), :, :, keys % size]  # [tiles, keys, 2, K, D]

    return folded_attention_ref(q, spans, cache.shape[2], keys_at)


class FoldedPacked(torch.autograd.Function):
    """`packed_attention_ref` whose bits do not depend on the batch; the gradient is as there."""

    @staticmethod
    def forward(ctx, q, k, v, lengths):
        """[N, H, D]."""
        ctx.save_for_backward(q, k, v)
        ctx.lengths = lengths
        ends = torch.tensor(lengths, dtype=torch.int64, device=q.device).cumsum(0)
        starts, kv = ends - torch.tensor(lengths, device=q.device), torch.stack((k, v), 1)
        spans = [(end - n, end, n) for end, n in zip(ends.tolist(), lengths, strict=True)]

        def keys_at(rows, keys):
            return kv[(starts[rows, None] + keys).clamp(max=len(kv) - 1)]

        return folded_attention_ref(q, spans, k.shape[1], keys_at)

    @staticmethod
    def backward(ctx, grad):
        """Gradients of q, k and v, by torch's own attention."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = packed_attention_ref(*inputs, ctx.lengths)
        return *torch.autograd.grad(out, inputs, grad), None


def folded_attention_ref(q, spans, kv_heads, keys_at):
    """Causal attention of q [N, H, D] by online softmax over chunks of keys, from the first on.

    spans: those of `paged_attention_ref`. keys_at(rows [T], keys [n]) -> [T, n, 2, K, D], the keys
    and values of n positions in each of T rows. All products have one size (FOLD_QUERIES tokens of
    a kv head against FOLD_KEYS keys, in float32), so their bits do not depend on the batch; a chunk
    of which a query sees nothing changes nothing.
    """
    tiles = [(row, first, end, length - end) for row, (start, end, length) in enumerate(spans)
             for first in range(start, end, FOLD_QUERIES)]  # fmt: skip
    if not tiles:
        return torch.empty_like(q)
    rows, first, end, shift = torch.tensor(tiles, device=q.device).T[..., None]  # [T, 1]
    at = torch.minimum(first + torch.arange(FOLD_QUERIES, device=q.device), end - 1)
    last = at + shift  # [T, 8], of each query the last key
    T, D, group = len(tiles), q.shape[2], q.shape[1] // kv_heads
    x = q[at].float().view(T, FOLD_QUERIES, kv_heads, group, D).transpose(1, 2) * D**-0.5
    x = x.flatten(2, 3)  # [T, K, 8 * group, D]
    limit = last.repeat_interleave(group, 1)[:, None, :, None]  # [T, 1, 8 * group, 1]
    out = torch.zeros_like(x)
    top, total = x.new_full(x.shape[:3], -torch.inf), x.new_zeros(x.shape[:3])
    for start in range(0, int(last.max()) + 1, FOLD_KEYS):
        live = (last[:, -1] >= start).nonzero()[:, 0]
        keys = torch.arange(start, start + FOLD_KEYS, device=q.device)
        kv = keys_at(rows[live, 0], keys).float()
        # what no query sees may be anything: a weight of 0 does not hide a NaN
        kv = kv.masked_fill((keys > last[live, -1:])[..., None, None, None], 0.0)
        k, v = kv.permute(2, 0, 3, 1, 4)  # [live, K, keys, D]
        scores = (x[live] @ k.transpose(2, 3)).masked_fill(keys > limit[live], -torch.inf)
        peak = torch.maximum(top[live], scores.amax(-1))
        weights, fade = (scores - peak[..., None]).exp(), (top[live] - peak).exp()
        out[live] = out[live] * fade[..., None] + weights @ v
        total[live] = total[live] * fade + weights.sum(-1)
        top[live] = peak
    out = (out / total[..., None]).view(T, kv_heads, FOLD_QUERIES, group, D).transpose(1, 2)
    return torch.empty_like(q).index_put_((at,), out.flatten(2, 3).to(q.dtype))
