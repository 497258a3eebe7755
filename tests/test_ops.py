"""The operations against independent arithmetic: float64, published vectors, plain loops."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# N, V: one row, nothing, an odd width, more rows than a chunk, one column
GRID = [(1, 8), (0, 8), (7, 13), (33, 517), (5, 1)]


def logits_and_targets(N, V, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(N, V, generator=generator) * scale,
            torch.randint(0, V, (N,), generator=generator))


# ------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize("N, V", GRID)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_is_log_softmax_in_float64(N, V, temperature):
    logits, targets = logits_and_targets(N, V)
    logps, entropy = ops.logprob(logits, targets, temperature)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    assert logps.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps.double(), exact.gather(1, targets[:, None])[:, 0],
                               atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=2e-5,
                               rtol=1e-5)


def test_the_temperature_acts_once():
    logps, _ = ops.logprob(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([1]), 0.6)
    assert logps.item() == pytest.approx(-3.374871, abs=1e-5)


def test_bfloat16_logits_are_normalised_in_float32():
    logps, entropy = ops.logprob(torch.zeros(1, 8192, dtype=torch.bfloat16), torch.tensor([0]))
    assert logps.dtype == torch.float32
    assert logps.item() == pytest.approx(-math.log(8192), abs=1e-5)  # bfloat16 says -9.0
    assert entropy.item() == pytest.approx(math.log(8192), abs=1e-4)


def test_padded_columns_count_for_nothing():
    logits = torch.tensor([[0.0, 0, 0, 0, 9, 9]], requires_grad=True)
    logps, entropy = ops.logprob(logits, torch.tensor([2]), num_valid=4)
    assert logps.item() == pytest.approx(-1.386294, abs=1e-5)
    assert entropy.item() == pytest.approx(1.386294, abs=1e-5)
    logps.sum().backward()
    assert logits.grad[0].tolist() == [-0.25, -0.25, 0.75, -0.25, 0, 0]


def test_impossible_and_extreme_logits_stay_finite_where_they_should():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1e4, -1e4, 0.0]], requires_grad=True)
    logps, entropy = ops.logprob(logits, torch.tensor([0, 0]))
    assert logps.tolist() == pytest.approx([-math.log(2), 0.0])
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0])
    logps.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([0.5, 0, -0.5])
    assert ops.logprob(logits, torch.tensor([1, 1]))[0].tolist() == [-math.inf, -2e4]


def problem(N, V, d=6, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, d, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(V, d, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, max(1, V - 1), (N,), generator=generator)
    return hidden, head, targets, torch.rand(N, generator=generator) < 0.6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("N, V", GRID)
@pytest.mark.parametrize("temperature, trim, chunk", [(1.0, 0, 1024), (0.7, 1, 4)])
def test_token_logps_equal_the_whole_logits_with_gradients(N, V, temperature, trim, chunk, dtype):
    if V == 1:
        trim = 0
    hidden, head, targets, mask = problem(N, V, dtype=dtype)
    logps, entropy = ops.token_logps(hidden, head, targets, mask, temperature, V - trim, chunk)
    weights = torch.linspace(-1, 2, N)
    (logps * weights).sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, head))
    exact = torch.log_softmax((h @ w.T)[:, : V - trim] / temperature, -1)
    expected = exact.gather(1, targets[:, None])[:, 0] * mask
    (expected * weights).sum().backward()
    tolerance = {"atol": 10 * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(logps.double(), expected.detach(), **tolerance)
    torch.testing.assert_close(entropy.double(), (-(exact.exp() * exact).sum(-1) * mask).detach(),
                               **tolerance)
    torch.testing.assert_close(hidden.grad.double(), h.grad, **tolerance)
    torch.testing.assert_close(head.grad.double(), w.grad, **tolerance)
    assert logps.dtype == torch.float32 and hidden.grad.dtype == head.grad.dtype == dtype


def test_masked_rows_are_zero_and_get_exactly_no_gradient_whatever_they_hold():
    hidden, head, targets, mask = problem(9, 11)
    with torch.no_grad():
        hidden[~mask] = torch.nan
    targets[~mask] = -100
    before = hidden.detach().clone(), targets.clone()
    logps, entropy = ops.token_logps(hidden, head, targets, mask, chunk=2)
    logps.sum().backward()
    assert not logps[~mask].any() and not entropy[~mask].any() and not hidden.grad[~mask].any()
    assert hidden.grad.isfinite().all() and head.grad.isfinite().all() and head.grad.any()
    assert (logps[mask] < 0).all() and not entropy.requires_grad
    torch.testing.assert_close((hidden.detach(), targets), before, equal_nan=True)  # not written to


def test_nothing_masked_in_gives_zero_gradients():
    hidden, head, targets, mask = problem(5, 7)
    logps, entropy = ops.token_logps(hidden, head, targets, torch.zeros_like(mask))
    logps.sum().backward()
    assert not any(x.any() for x in (logps, entropy, hidden.grad, head.grad))


def test_only_the_wanted_gradients_are_computed():
    hidden, head, targets, mask = problem(5, 7)
    ops.token_logps(hidden.detach(), head, targets, mask)[0].sum().backward()
    assert head.grad.any()
    assert not ops.token_logps(hidden.detach(), head.detach(), targets, mask)[0].requires_grad


# ------------------------------------------------------------------------------ attention


def causal_loop(q, k, v):
    """Attention of one sequence in float64, head by head, query by query."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores = k[: t + 1, g].double() @ q[t, h].double() / q.shape[2] ** 0.5
            out[t, h] = scores.softmax(0) @ v[: t + 1, g].double()
    return out


def qkv(N, H=4, K=2, D=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, heads, D, generator=generator) for heads in (H, K, K)]


@pytest.mark.parametrize("H, K", [(4, 2), (3, 3), (4, 1)])
def test_packed_attention_is_causal_attention_of_each_segment(H, K):
    q, k, v = qkv(20, H, K)
    borders = [0, 7, 7, 8, 20]  # an empty segment and one of a single token among them
    expected = torch.cat([causal_loop(q[a:b], k[a:b], v[a:b])
                          for a, b in zip(borders, borders[1:], strict=False)])
    for cu_seqlens in (borders, torch.tensor(borders)):
        out = ops.packed_attention(q, k, v, cu_seqlens)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_packed_attention_does_not_leak_gradients_between_segments():
    q, k, v = (x.requires_grad_() for x in qkv(10))
    ops.packed_attention(q, k, v, [0, 4, 10])[4:].sum().backward()
    assert not any(x.grad[:4].any() for x in (q, k, v))
    assert all(x.grad[4:].any() for x in (q, k, v))


def test_packed_attention_checks_its_borders():
    for borders in ([0, 4], [1, 10], [0, 11, 10], []):
        with pytest.raises(ValueError, match="10 packed tokens"):
            ops.packed_attention(*qkv(10), borders)
    assert ops.packed_attention(*qkv(0), [0]).shape == (0, 4, 8)


@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
       block_size=st.integers(1, 5), tile=st.integers(1, 4000), queries=st.integers(1, 5))
def test_paged_attention_equals_attention_over_each_row_alone(rows, block_size, tile, queries):
    """rows: (tokens cached before, new tokens). Blocks are scattered; unused slots hold junk."""
    rows = sorted((r for r in rows if r[1] == 1), reverse=True) + [r for r in rows if r[1] > 1]
    width = -(-max(sum(row) for row in rows) // block_size)
    order = np.random.default_rng(0).permutation(len(rows) * width).reshape(len(rows), width)
    cache = torch.full((order.size, block_size, 2, 2, 8), 1e3)
    data = [qkv(sum(row), seed=i) for i, row in enumerate(rows)]
    slots = [order[i][np.arange(sum(row)) // block_size] * block_size
             + np.arange(sum(row)) % block_size for i, row in enumerate(rows)]
    for (_, k, v), where in zip(data, slots, strict=True):
        ops.kv_write_(cache, k, v, torch.from_numpy(where))
    ones = sum(new == 1 for _, new in rows)
    lengths = np.array([sum(row) for row in rows])
    old, ops.TILE_BYTES, ops.TILE_QUERIES = (ops.TILE_BYTES, ops.TILE_QUERIES), tile, queries
    try:
        tiles, at = ops.decode_tiles(order[:ones], lengths[:ones], cache), ones
        for i, (before, new) in enumerate(rows[ones:], ones):
            tiles += ops.chunk_tiles(order[i], before, before + new, at, cache)
            at += new
    finally:
        ops.TILE_BYTES, ops.TILE_QUERIES = old
    packed = [torch.cat([x[j][before:] for x, (before, _) in zip(data, rows, strict=True)])
              for j in range(3)]
    out = ops.paged_attention(*packed, cache, tiles)
    expected = torch.cat([causal_loop(*x)[before:]
                          for x, (before, _) in zip(data, rows, strict=True)])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_block_copies_read_before_they_write():
    cache = torch.arange(8.0).view(2, 4, 1).repeat(1, 1, 3)  # [L, blocks, ...]
    ops.kv_copy_(cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache[:, :, 0].tolist() == [[0, 0, 1, 3], [4, 4, 5, 7]]


# ------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("counter, key, expected", [  # Random123's known answers, 10 rounds
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1")])
def test_philox_gives_the_published_answers(counter, key, expected):
    words = [[np.array([int(w, 16)], dtype=np.uint64) for w in text.split()]
             for text in (counter, key)]
    assert " ".join(f"{int(w[0]):08x}" for w in ops.philox4x32(*words)) == expected


def test_noise_is_the_gumbel_transform_of_the_counter_s_word():
    key, step, sample, position = 0x0123456789ABCDEF, 3, 2, 70000
    noise = ops.gumbel_noise([key], [step], [sample], [position], 11)
    for v in range(11):
        words = [np.array([w], dtype=np.uint64)
                 for w in (step, sample, position, v // 4, 0x89ABCDEF, 0x01234567)]
        word = int(ops.philox4x32(words[:4], words[4:])[v % 4][0])
        expected = -math.log(-math.log((word + 0.5) / 2**32))
        assert noise[0, v].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_extreme_words_give_finite_noise(monkeypatch):
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(ops, "philox4x32", lambda c, k, w=word: (np.full((1, 1), w),) * 4)
        noise = ops.gumbel_noise([1], [0], [0], [0], 4)
        assert noise.isfinite().all() and noise[0, 0].abs() > 3


def test_noise_of_a_row_does_not_depend_on_its_batch_or_on_tiles(monkeypatch):
    rows = [[7, 8, 9], [0, 1, 2], [5, 5, 6], [1, 2, 3]]
    together = ops.gumbel_noise(*rows, 50)
    monkeypatch.setattr(ops, "NOISE_TILE", 1)
    for i in range(3):
        assert torch.equal(ops.gumbel_noise(*([r[i]] for r in rows), 50)[0], together[i])
    assert torch.equal(ops.gumbel_noise(*rows, 23), together[:, :23])
    assert ops.gumbel_noise([], [], [], [], 5).shape == (0, 5)


def test_every_part_of_the_key_and_counter_matters():
    base = [ops.noise_key(1, "a"), 2, 3, 4]
    noise = [ops.gumbel_noise(*([x] for x in base), 8)]
    for i, other in enumerate([ops.noise_key(1, "b"), 3, 4, 5]):
        changed = [*base[:i], other, *base[i + 1:]]
        noise.append(ops.gumbel_noise(*([x] for x in changed), 8))
    assert all((a != b).all() for i, a in enumerate(noise) for b in noise[:i])


def test_noise_keys_are_64_bits_stable_and_distinct():
    keys = [(0, 1), (0, "1"), (1, 0), (0, "p"), (1, "p"), (0, "p'"), (11, 1), (1, 11)]
    values = [ops.noise_key(*key) for key in keys]
    assert len(set(values)) == len(keys) and all(0 <= v < 2**64 for v in values)
    assert ops.noise_key(np.int64(0), np.int64(1)) == values[0]
    assert values[3] == 1177383437609812698  # by b2sum: recorded runs depend on it


def test_draws_follow_the_softmax():
    """A chi-square of 20,000 draws over 5 tokens; 23.5 is passed once in 10,000."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    n, p = 20000, torch.softmax(logits / 0.8, -1)
    zeros = [0] * n
    noise = ops.gumbel_noise([5] * n, zeros, zeros, range(n), 5)
    ids, _ = ops.sample(logits.repeat(n, 1), noise, 0.8)
    counts = torch.bincount(ids, minlength=5)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 23.5


# ------------------------------------------------------------------------------ filters


def kept(probs, dtype=torch.float32, **filters):
    logits = torch.tensor([probs]).log().to(dtype).float()
    z = ops._filtered(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters)
    return [i for i, x in enumerate(z[0].tolist()) if x > -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p, expected", [
    (0.6, [0, 1]), (0.5, [0]), (0.75, [0, 1]), (0.8, [0, 1, 2]), (1e-8, [0]), (0.0, [0]),
    (1.0, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_prefix_that_reaches_it(top_p, expected, dtype):
    probs = [0.5, 0.25, 0.125, 0.125]
    if dtype == torch.bfloat16 and top_p in (0.5, 0.75):
        exact = torch.tensor(probs).log().to(dtype).double().softmax(0)  # no exact tie any more
        expected = [0] + [i for i in range(1, 4) if exact[:i].sum() < top_p - 1e-6]
    assert kept(probs, dtype, top_p=top_p) == expected


def test_top_p_is_reached_by_an_exact_tie_despite_the_rounding_of_the_sum():
    assert [len(kept([0.1] * 10, top_p=k / 10)) for k in range(1, 11)] == list(range(1, 11))
    assert [len(kept([0.04] * 25, top_p=k / 25)) for k in range(1, 26)] == list(range(1, 26))


def test_top_k_keeps_exactly_k_and_min_p_compares_with_the_best():
    probs = [0.1, 0.4, 0.1, 0.1, 0.3]
    assert kept(probs, top_k=3) == [0, 1, 4]  # of equal ones the smaller ids
    assert kept(probs, top_k=9) == kept(probs) == [0, 1, 2, 3, 4]
    assert kept(probs, min_p=0.7) == [1, 4] and kept([0.4, 0.4, 0.2], min_p=1.0) == [0, 1]
    assert kept(probs, top_k=2, top_p=0.5) == [1]  # 0.4 / 0.7 of what top_k left reaches 0.5
    assert kept(probs, top_k=2, top_p=0.6) == [1, 4]


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.floats(0.01, 1),
       st.integers(0, 5), st.floats(0, 1))
def test_filters_keep_a_set_of_the_most_likely_tokens(logits, top_p, top_k, min_p):
    z = torch.tensor([logits])
    ids = [i for i, x in enumerate(ops._filtered(z, top_k, top_p, min_p)[0]) if x > -torch.inf]
    assert ids and len(ids) <= (top_k or len(logits))
    dropped = z[0, [i for i in range(len(logits)) if i not in ids]]
    assert not len(dropped) or z[0, ids].min() >= dropped.max()


def test_filtered_draws_keep_the_log_prob_of_the_full_softmax():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(50, 1)
    noise = ops.gumbel_noise(range(50), [0] * 50, [0] * 50, [0] * 50, 3)
    ids, logps = ops.sample(logits, noise, 0.5, top_k=2)
    assert set(ids.tolist()) == {1, 2}
    expected, _ = ops.logprob(logits, ids, 0.5)
    assert torch.equal(logps, expected)  # the same bits as the trainer's
    greedy, plain = ops.sample(logits, None, 0.0)
    assert set(greedy.tolist()) == {1} and torch.equal(plain, ops.logprob(logits, greedy)[0])


def test_sampling_ignores_padded_columns_and_accepts_wider_noise():
    logits = torch.tensor([[0.0, 1.0, 50.0]], dtype=torch.bfloat16)
    ids, logps = ops.sample(logits, torch.zeros(1, 3), num_valid=2)
    assert ids.tolist() == [1] and logps.item() == pytest.approx(1 - math.log(1 + math.e), abs=1e-5)


def test_the_module_lists_its_backends():
    out = subprocess.run([sys.executable, "-m", "minirler.ops"], capture_output=True, text=True,
                         check=True).stdout.splitlines()
    assert "logprob torch" in out and "paged_attention torch" in out
    assert all(hasattr(ops, line.split()[0]) for line in out)
