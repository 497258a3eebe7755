"""One list of cases for every backend of the operations: torch, cpu, simt (emulated CUDA), cuda.

A case calls `minirler.ops` and `minirler.attention` on tensors of `device` and compares with
arithmetic in float64, with plain loops, or bit for bit with another way to the same number. Small,
because the emulator runs a thread of the GPU after another.
"""

import math

import numpy as np
import pytest
import torch

from minirler import kernels, ops
from minirler.attention import kv_copy_, kv_write_, packed_attention, paged_attention, paged_rows
from minirler.noise import gumbel_noise

BACKENDS = ("torch", "cpu", "simt", "cuda")
F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 1.6e-2}  # of one rounding to the dtype, and a little
CASES = []


def use(backend, monkeypatch):
    """Make `backend` compute; returns the device for its tensors. Skips where it cannot run."""
    native = kernels.NATIVE
    if backend == "torch":
        native = {}
    elif backend == "simt":
        build = pytest.importorskip("simt.build")
        launchers = build.launchers()
        if launchers is None:
            pytest.skip("no C++ compiler for the emulator")
        native = {"cpu": launchers}
    elif backend not in native or (backend == "cuda" and not torch.cuda.is_available()):
        pytest.skip(f"no {backend} kernels here")
    monkeypatch.setattr(kernels, "NATIVE", native)
    return "cuda" if backend == "cuda" else "cpu"


def case(function):
    """Enter a case into the list."""
    CASES.append(function)
    return function


def close(got, expected, dtype=F32, factor=1.0):
    """Equal within the dtype's tolerance, NaN and infinities included."""
    tolerance = factor * TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), expected.cpu().double(), atol=tolerance,
                               rtol=tolerance, equal_nan=True)


def randn(*shape, seed=0, dtype=F32, device="cpu"):
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def targets_of(N, below, device):
    return torch.randint(0, below, (N,), generator=torch.Generator().manual_seed(1)).to(device)


def exact(logits, targets, temperature=1.0, num_valid=None):
    """(logps, entropy, lse) in float64; differentiable."""
    z = logits.double()[:, :num_valid] / temperature
    table = torch.log_softmax(z, -1)
    p = table.exp()
    entropy = -torch.where(p > 0, p * table, 0.0 * p).sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy, torch.logsumexp(z, -1)


# ------------------------------------------------------------------------------ log-probs

# nothing; one column; odd widths; a pack of 16 bytes and its neighbours; more than a block of
# threads, and than a block of the CPU kernel
GRID = [(0, 8), (3, 1), (2, 7), (3, 8), (2, 9), (2, 517), (1, 2049)]


@case
def logprobs_and_gradients_are_those_of_the_tempered_softmax(device):
    for N, V in GRID:
        for dtype, temperature, trim in ((F32, 1.0, 0), (F32, 0.6, 1), (BF16, 1.3, 3)):
            num_valid = max(1, V - trim)
            logits = (3 * randn(N, V, device=device)).to(dtype).requires_grad_()
            targets, weights = targets_of(N, num_valid, device), torch.linspace(-1, 2, N).to(device)
            got = ops.logprob(logits, targets, None, temperature, num_valid)
            (got[0] * weights).sum().backward()
            copy = logits.detach().double().requires_grad_()
            expected = exact(copy, targets, temperature, num_valid)
            (expected[0] * weights).sum().backward()
            for x, y in zip(got, expected, strict=True):
                assert x.dtype == F32
                close(x, y, factor=3)
            assert logits.grad.dtype == dtype and not logits.grad[:, num_valid:].any()
            close(logits.grad, copy.grad, dtype)


@case
def logits_may_be_views_that_start_and_stride_anywhere(device):
    for dtype in (F32, BF16):
        whole = (3 * randn(6, 43, device=device)).to(dtype)
        for view in (whole[:, 1:38], whole[::2, 3:], whole[1:, :1], whole.T):
            targets = targets_of(len(view), view.shape[1], device)
            x = view.detach().requires_grad_()
            logps, _, _ = ops.logprob(x, targets)
            logps.sum().backward()
            copy = view.double().requires_grad_()
            expected = exact(copy, targets)[0]
            expected.sum().backward()
            close(logps, expected, factor=3)
            close(x.grad, copy.grad, dtype)


@case
def impossible_and_undefined_logits_have_the_results_of_log_softmax(device):
    inf, nan = math.inf, math.nan
    rows = [[0, -inf, 0, 1], [-inf, 0, 1, 2], [-inf] * 4, [0, nan, 1, 2], [-inf, nan, -inf, -inf],
            [1e4, -1e4, 0, 1e4]]  # fmt: skip
    for dtype in (F32, BF16):
        logits = torch.tensor(rows, device=device, dtype=dtype)
        logps, entropy, lse = ops.logprob(logits, torch.zeros(6, dtype=torch.int64, device=device))
        h = math.log(2)
        close(logps, torch.tensor([-math.log(2 + math.e), -inf, nan, nan, nan, -h]))
        close(entropy[[1, 2, 3, 4, 5]], torch.tensor([0.832396, nan, nan, nan, h]))
        close(lse[1:5], torch.tensor([2.407606, -inf, nan, nan]))
        assert entropy[0].isfinite() and lse[5].item() == pytest.approx(logits[5, 0].item() + h)


@case
def impossible_logits_get_a_gradient_of_exactly_zero(device):
    logits = torch.tensor([[0.0, -math.inf, 0.0, -200.0]], device=device, requires_grad=True)
    ops.logprob(logits, torch.tensor([0], device=device))[0].sum().backward()
    assert logits.grad[0, [1, 3]].tolist() == [0, 0]
    close(logits.grad[0], torch.tensor([0.5, 0, -0.5, 0]))


@case
def masked_rows_are_zero_and_get_no_gradient_whatever_they_hold(device):
    for mask in ([True, False, True, False], [False] * 4):
        mask = torch.tensor(mask, device=device)
        logits, targets = randn(4, 19, device=device), targets_of(4, 19, device)
        logits[~mask] = math.nan
        targets[~mask] = -100
        logits.requires_grad_()
        results = ops.logprob(logits, targets, mask)
        results[0].sum().backward()
        for x in results:
            assert not x[~mask].any() and x[mask].isfinite().all()
        assert logits.grad.isfinite().all() and not logits.grad[~mask].any()
        assert logits.grad[mask].any() or not mask.any()


@case
def extreme_temperatures_neither_overflow_nor_lose_the_target(device):
    logits = 3 * randn(4, 33, device=device)
    targets = logits.argmax(-1)
    for temperature in (1e-3, 0.05, 50.0, 1e4):
        got = ops.logprob(logits, targets, None, temperature)
        for x, y in zip(got, exact(logits, targets, temperature), strict=True):
            close(x, y, factor=3)


@case
def the_gradient_may_take_the_place_of_the_logits(device):
    for dtype in (F32, BF16):
        logits = (3 * randn(3, 35, device=device)).to(dtype)
        targets, grads = targets_of(3, 30, device), torch.tensor([1.0, -2.0, 0.5], device=device)
        _, _, lse = ops.logprob(logits, targets, None, 0.7, 30)
        arguments = grads, logits, targets, None, lse, 0.7, 30
        apart = ops.logprob_backward_op(*arguments)
        ops.logprob_backward_(logits, *arguments)
        assert torch.equal(apart, logits)


@case
def reused_logits_give_the_same_gradient(device):
    hidden, head = randn(3, 6, device=device), randn(35, 6, seed=1, device=device)
    targets, mask = targets_of(3, 30, device), torch.tensor([True, False, True], device=device)
    grads = []
    for reuse in (False, True):
        x = hidden.clone().requires_grad_()
        logits = x @ head.T
        before = logits.detach().clone()
        ops.logprob(logits, targets, mask, 0.7, 30, reuse)[0].sum().backward()
        grads.append(x.grad)
        assert torch.equal(before, logits) == (not reuse)
    assert torch.equal(*grads)


@case
def the_fused_head_equals_the_whole_logits_with_gradients(device):
    for dtype, trim, chunk in ((F32, 0, 64), (F32, 2, 2), (BF16, 1, 3)):
        hidden, head = randn(7, 6, seed=2, device=device), randn(13, 6, seed=3, device=device)
        hidden, head = (x.to(dtype).requires_grad_() for x in (hidden, head))
        targets = targets_of(7, 13 - trim, device)
        mask = torch.tensor([1, 0, 1, 1, 0, 1, 1], device=device).bool()
        logps, entropy = ops.token_logps(hidden, head, targets, mask, 0.7, 13 - trim, chunk)
        weights = torch.linspace(-1, 2, 7, device=device)
        (logps * weights).sum().backward()
        h, w = (x.detach().double().requires_grad_() for x in (hidden, head))
        expected = exact(h @ w.T, targets, 0.7, 13 - trim)
        (expected[0] * mask * weights).sum().backward()
        close(logps, expected[0] * mask, dtype, 4)
        close(entropy, expected[1] * mask, dtype, 4)
        close(hidden.grad, h.grad, dtype, 4)
        close(head.grad, w.grad, dtype, 4)


# ------------------------------------------------------------------------------ advantages


@case
def advantages_are_those_of_each_group_alone(device):
    groups = [[0.1, 0.9, 0.4], [0.7] * 7, [5.0], [], [0.1] * 7, [1.0, 2.0], [0.0, 1e-6], [3, 9, 4]]
    skipped = {(0, 1), (7, 2)}  # unscored
    sizes = torch.tensor([0, *map(len, groups)]).cumsum(0)
    scored = [(p, i) not in skipped for p, group in enumerate(groups) for i in range(len(group))]
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    rewards[[1, -1]] = math.nan  # an unscored reward may be anything
    inputs = rewards.to(device), sizes.to(device), torch.tensor(scored, device=device)
    for normalize in ("std", "std1", "none"):
        got = ops.group_advantages(*inputs, normalize, 1e-8, 1e-6).tolist()
        at = 0
        for p, group in enumerate(groups):
            kept = [r for i, r in enumerate(group) if (p, i) not in skipped]
            for i, r in enumerate(group):
                expected = 0.0
                if (p, i) not in skipped and max(kept) - min(kept) > 1e-6:
                    std = {"std": np.std(kept), "std1": np.std(kept, ddof=1), "none": 1 - 1e-8}
                    expected = (r - np.mean(kept)) / (std[normalize] + 1e-8)
                assert got[at + i] == pytest.approx(expected, rel=1e-6)
                assert expected != 0 or got[at + i] == 0
            at += len(group)
    nothing = torch.zeros(0, dtype=torch.float64, device=device)
    empty = ops.group_advantages(nothing, sizes[:1].to(device), nothing.bool(), "std", 1e-8, 1e-6)
    assert empty.shape == (0,)


# ------------------------------------------------------------------------------ draws


def counters_of(B):
    """Keys, steps, samples and positions of some size, no two rows alike."""
    keys = [(0x9E3779B97F4A7C15 * (i + 1)) % 2**64 for i in range(B)]
    return keys, [3] * B, [i % 5 for i in range(B)], [2**31 + 7 * i for i in range(B)]


@case
def a_draw_is_the_argmax_of_logits_and_noise(device):
    for V, num_valid in ((1, 1), (5, 5), (130, 127), (1030, 1027)):
        for dtype, temperature in ((F32, 1.0), (BF16, 0.6), (F32, 4.0)):
            logits = (2 * randn(9, V, device=device)).to(dtype)
            ids, logps = ops.sample(logits, *counters_of(9), temperature, num_valid=num_valid)
            z = logits.cpu().double()[:, :num_valid] / temperature
            scores = z + gumbel_noise(*counters_of(9), num_valid).double()
            assert ids.tolist() == scores.argmax(-1).tolist()
            trained = ops.logprob(logits, ids, None, temperature, num_valid)[0]
            assert torch.equal(logps, trained)  # the same bits
    assert [x.shape for x in ops.sample(logits[:0], *counters_of(0))] == [(0,), (0,)]


@case
def temperature_zero_takes_the_first_of_the_largest(device):
    logits = torch.zeros(3, 70, device=device)
    logits[0, [5, 40, 66]], logits[1, 69] = 2.0, 1.0
    ids, logps = ops.sample(logits, *counters_of(3), 0.0)
    assert ids.tolist() == [5, 69, 0]
    assert torch.equal(logps, ops.logprob(logits, ids)[0])


@case
def impossible_tokens_are_never_drawn_and_undefined_rows_say_so(device):
    logits = torch.full((6, 21), -math.inf, device=device)
    logits[0, 17], logits[1, [3, 20]], logits[2, 0] = 0.0, -1e30, 5.0
    logits[3] = 1.0
    logits[3, 8] = math.nan
    logits[4, 2] = math.nan
    for temperature in (0.0, 0.8):
        ids, logps = ops.sample(logits, *counters_of(6), temperature)
        assert ids.tolist()[:1] + ids.tolist()[2:] == [17, 0, 8, 2, 0] and ids[1] in (3, 20)
        close(logps, torch.tensor([0, -math.log(2), 0, math.nan, math.nan, math.nan]))


# ------------------------------------------------------------------------------ attention


def attention_loop(q, k, v, scale=None):
    """Causal attention of one sequence whose last len(q) tokens ask, in float64; differentiable.

    `scale` of the scores, default D ** -0.5.
    """
    group, before = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * (scale or q.shape[2] ** -0.5)
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


class Cached:
    """A cache of one layer that holds rows of random tokens in scattered blocks."""

    def __init__(self, lengths, H, K, D, block_size, dtype, device, seed=0):
        widths = [-(-n // block_size) for n in lengths]
        order = np.random.default_rng(seed).permutation(sum(widths)).tolist()
        self.tables = [[order.pop() for _ in range(width)] for width in widths]
        # no block to spare, and junk where nothing is written: a read too far is seen
        shape = (max(1, sum(widths)), 2, K, block_size, D)
        self.cache = torch.full(shape, math.nan, dtype=dtype, device=device)
        self.data = [[randn(n, heads, D, seed=7 * i + j, dtype=dtype, device=device)
                      for j, heads in enumerate((H, K, K))] for i, n in enumerate(lengths)]
        if lengths:
            _, k, v = (torch.cat(x) for x in zip(*self.data, strict=True))
            kv_write_(self.cache, k, v, self.rows([0] * len(lengths), lengths).slots)

    def rows(self, starts, ends):
        return paged_rows(self.tables, starts, ends, len(self.cache), self.cache.shape[3],
                          self.cache.device)

    def ask(self, starts, splits=None):
        """Attention of all tokens from `starts` on, packed."""
        ends = [len(q) for q, _, _ in self.data]
        q = torch.cat([q[start:] for (q, _, _), start in zip(self.data, starts, strict=True)])
        return paged_attention(q, self.cache, self.rows(starts, ends), splits)


# H, K, D, block size: each group size and head size of the kernels, pages of one token, of more
# tokens than a chunk; and sizes that no kernel has
SIZES = [(2, 2, 32, 1), (4, 2, 64, 16), (4, 1, 128, 5), (8, 1, 32, 64), (3, 1, 32, 4), (4, 2, 8, 3)]


@case
def paged_attention_equals_attention_over_each_row_alone(device):
    lengths, starts = [1, 40, 33, 35, 9], [0, 39, 30, 0, 9]  # decode, chunk, prefill, nothing
    for H, K, D, block_size in SIZES:
        for dtype in (F32, BF16):
            cached = Cached(lengths, H, K, D, block_size, dtype, device)
            out = cached.ask(starts)
            expected = torch.cat([attention_loop(q[start:], k, v) for (q, k, v), start
                                  in zip(cached.data, starts, strict=True)])
            assert out.dtype == dtype
            close(out, expected, dtype)


@case
def keys_and_values_are_stored_exactly_and_blocks_copied(device):
    for dtype in (F32, BF16):
        cached = Cached([5, 3], 2, 2, 32, 2, dtype, device)
        _, k, v = cached.data[0]
        for t in range(5):
            page = cached.cache[cached.tables[0][t // 2]]
            assert torch.equal(page[0, :, t % 2], k[t]) and torch.equal(page[1, :, t % 2], v[t])
        unused = cached.cache[cached.tables[1][1]][:, :, 1]
        assert unused.isnan().all()  # nothing else was touched
        layers = torch.stack([cached.cache, 2 * cached.cache])
        before = layers.clone()
        kv_copy_(layers, [(0, 4), (2, 1)])
        assert torch.equal(layers[:, [4, 1]].nan_to_num(), before[:, [0, 2]].nan_to_num())
        assert torch.equal(layers[:, [0, 2, 3]].nan_to_num(), before[:, [0, 2, 3]].nan_to_num())


@case
def slots_below_zero_are_skipped(device):
    for dtype, D in ((F32, 32), (BF16, 5)):  # 16 bytes at once, and not
        cache = torch.zeros(3, 2, 2, 2, D, dtype=dtype, device=device)
        k, v = (randn(4, 2, D, seed=j, dtype=dtype, device=device) for j in (0, 1))
        expected = cache.clone()
        for token, offset in ((1, 1), (3, 0)):
            expected[1, :, :, offset] = torch.stack((k[token], v[token]))
        kv_write_(cache, k, v, torch.tensor([-1, 3, -6, 2], device=device))
        assert torch.equal(cache, expected)


@case
def a_query_has_the_same_bits_whatever_else_is_computed(device):
    """Batch, chunks of a prefill, block size, splits, packing: only the twin may round."""
    is_exact = bool(kernels.NATIVE)
    # one row is longer than a chunk of keys of the GPU, 256
    for dtype, lengths, H in ((F32, [260, 37], 1), (BF16, [40, 33, 9], 2)):
        cached = Cached(lengths, H, 1, 32, 16, dtype, device)
        whole = cached.ask([0] * len(lengths))
        packed = [torch.cat(x) for x in zip(*cached.data, strict=True)]
        borders = np.cumsum([0, *lengths]).tolist()
        small_pages = Cached(lengths, H, 1, 32, 7, dtype, device, seed=1)
        others = [packed_attention(*packed, borders)]
        for rows, new, splits in ((cached, 20, 1), (cached, 1, 2), (small_pages, 5, None)):
            starts = [max(0, n - new) for n in lengths]
            others.append(whole.clone())
            at = [i for start, a, b in zip(starts, borders, borders[1:], strict=False)
                  for i in range(a + start, b)]
            others[-1][at] = rows.ask(starts, splits)
        for other in others:
            assert torch.equal(other, whole) or not is_exact
            close(other, whole, dtype)


@case
def packed_attention_and_its_gradients_are_those_of_each_segment(device):
    borders = [0, 7, 7, 8, 44]  # an empty segment and one of a single token among them
    for H, K, D, _ in SIZES:
        for dtype in (F32, BF16) if D == 32 else (F32,):  # 128 is slow where it is emulated
            inputs = [randn(44, heads, D, seed=j, dtype=dtype, device=device).requires_grad_()
                      for j, heads in enumerate((H, K, K))]
            grad = randn(44, H, D, seed=9, dtype=dtype, device=device)
            out = packed_attention(*inputs, borders)
            out.backward(grad)
            copies = [x.detach().double().requires_grad_() for x in inputs]
            expected = torch.cat([attention_loop(*(x[a:b] for x in copies)) for a, b
                                  in zip(borders, borders[1:], strict=False)])
            expected.backward(grad.double())
            close(out, expected, dtype)
            for x, y in zip(inputs, copies, strict=True):
                close(x.grad, y.grad, dtype, 4)


@case
def no_gradient_leaks_between_segments(device):
    inputs = [randn(40, heads, 32, seed=j, device=device) for j, heads in enumerate((2, 1, 1))]
    for x in inputs:
        x[:4] = math.nan
        x.requires_grad_()
    packed_attention(*inputs, [0, 4, 40])[4:].sum().backward()
    for x in inputs:
        assert x.grad[4:].isfinite().all() and x.grad[4:].any()
