"""The operations against independent arithmetic: float64, published vectors, plain loops.

What every backend has to do stands in `cases`; here, what is not a matter of the backend.
"""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler import attention, kernels, noise, ops
from minirler.noise import gumbel_noise, noise_key, philox4x32
from minirler.ops_ref import filtered, token_logps_ref

ROOT = Path(__file__).parent.parent
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# N, V: one row, nothing, an odd width, more rows than a chunk, one column
GRID = [(1, 8), (0, 8), (7, 13), (33, 517), (5, 1)]
no_kernels = pytest.mark.skipif("cpu" not in kernels.NATIVE, reason="the kernels are not built")


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_every_backend(case, backend, monkeypatch):
    case(cases.use(backend, monkeypatch))


# ------------------------------------------------------------------------------ log-probs


def test_the_temperature_acts_once():
    logps = ops.logprob(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([1]), None, 0.6)[0]
    assert logps.item() == pytest.approx(-3.374871, abs=1e-5)


def test_bfloat16_logits_are_normalised_in_float32():
    zeros = torch.zeros(1, 8192, dtype=torch.bfloat16)
    logps, entropy, _ = ops.logprob(zeros, torch.tensor([0]))
    assert logps.dtype == torch.float32
    assert logps.item() == pytest.approx(-math.log(8192), abs=1e-5)  # bfloat16 says -9.0
    assert entropy.item() == pytest.approx(math.log(8192), abs=1e-4)


def test_padded_columns_count_for_nothing():
    logits = torch.tensor([[0.0, 0, 0, 0, 9, 9]], requires_grad=True)
    logps, entropy, _ = ops.logprob(logits, torch.tensor([2]), num_valid=4)
    assert logps.item() == pytest.approx(-1.386294, abs=1e-5)
    assert entropy.item() == pytest.approx(1.386294, abs=1e-5)
    logps.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([-0.25, -0.25, 0.75, -0.25, 0, 0])


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


def qkv(N, H=4, K=2, D=8):
    return [cases.randn(N, heads, D, seed=j) for j, heads in enumerate((H, K, K))]


def test_packed_attention_checks_its_arguments():
    for borders in ([0, 4], [1, 10], [0, 11, 10], []):
        with pytest.raises(ValueError, match="10 packed tokens"):
            attention.packed_attention(*qkv(10), borders)
    q, k, v = qkv(10)
    for wrong in ((q, k[:9], v), (q[:, :3], k, v), (q, k, v[..., :4])):
        with pytest.raises(ValueError, match="do not fit"):
            attention.packed_attention(*wrong, [0, 10])
    assert attention.packed_attention(*qkv(0), [0]).shape == (0, 4, 8)
    assert torch.equal(attention.packed_attention(q, k, v, torch.tensor([0, 10])),
                       attention.packed_attention(q, k, v, [0, 10]))


@given(rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=6),
       block_size=st.integers(1, 20), D=st.sampled_from([8, 32]))
def test_paged_attention_equals_attention_over_each_row_alone(rows, block_size, D):
    """rows: (tokens cached before, new tokens); what is not written is NaN."""
    lengths = [sum(row) for row in rows]
    cached = cases.Cached(lengths, 4, 2, D, block_size, torch.float32, "cpu")
    out = cached.ask([before for before, _ in rows])
    expected = [cases.attention_loop(q[before:], k, v)
                for (q, k, v), (before, _) in zip(cached.data, rows, strict=True)]
    cases.close(out, torch.cat(expected))


def test_rows_beyond_their_blocks_are_refused_by_number():
    good = dict(tables=[[0, 3], [1]], starts=[2, 0], ends=[8, 4], num_blocks=4, block_size=4)
    assert attention.paged_rows(**good).slots.tolist() == [2, 3, 12, 13, 14, 15, 4, 5, 6, 7]
    for wrong in ({"tables": [[0, 3], [4]]}, {"tables": [[0, 3], [-1]]}, {"ends": [8, 5]},
                  {"starts": [2, 5]}, {"starts": [2, -1]}):
        with pytest.raises(ValueError, match="row 1: tokens"):
            attention.paged_rows(**good | wrong)


def test_the_cache_is_checked_before_a_pointer_leaves():
    cache = torch.zeros(4, 2, 2, 4, 32)
    k = torch.zeros(3, 2, 32)
    slots = torch.tensor([0, 1, 2])
    attention.kv_write_(cache, k, k, slots)
    for wrong in ((cache, k.bfloat16(), k), (cache, k[:, :1], k), (cache[:, :, :, ::2], k, k)):
        with pytest.raises(ValueError, match="does not take"):
            attention.kv_write_(*wrong, slots)
    rows = attention.paged_rows([[0]], [0], [3], 4, 4)
    with pytest.raises(ValueError, match="3 queries"):
        attention.paged_attention(torch.zeros(4, 4, 32), cache, rows)
    with pytest.raises(ValueError, match="beyond the cache's 4"):
        attention.kv_copy_(cache[None], [(0, 4)])


def test_block_copies_read_before_they_write():
    cache = torch.arange(8.0).view(2, 4, 1, 1, 1, 1).expand(2, 4, 2, 1, 1, 2).contiguous()
    attention.kv_copy_(cache, [(0, 1), (1, 2)])
    assert cache[..., 0, 0, 0, 0].tolist() == [[0, 0, 1, 3], [4, 4, 5, 7]]


@no_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype):
    def results():
        logits = (3 * cases.randn(9, 3000)).to(dtype).requires_grad_()
        targets = torch.arange(9)
        out = list(ops.logprob(logits, targets))
        out += ops.sample(logits, *cases.counters_of(9))
        inputs = [cases.randn(90, n, 32, seed=n, dtype=dtype).requires_grad_() for n in (4, 2, 2)]
        out.append(attention.packed_attention(*inputs, [0, 70, 90]))
        (out[0].sum() + out[-1].float().square().sum()).backward()
        return [x.detach() for x in out] + [x.grad for x in (logits, *inputs)]

    before = torch.get_num_threads()
    try:
        one, two = [(torch.set_num_threads(n), results())[1] for n in (1, 2)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


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
    assert " ".join(f"{int(w[0]):08x}" for w in philox4x32(*words)) == expected


def test_noise_is_the_gumbel_transform_of_the_counter_s_word():
    key, step, sample, position = 0x0123456789ABCDEF, 3, 2, 70000
    drawn = gumbel_noise([key], [step], [sample], [position], 11)
    for v in range(11):
        words = [np.array([w], dtype=np.uint64)
                 for w in (step, sample, position, v // 4, 0x89ABCDEF, 0x01234567)]
        word = int(philox4x32(words[:4], words[4:])[v % 4][0])
        expected = -math.log(-math.log((word + 0.5) / 2**32))
        assert drawn[0, v].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_extreme_words_give_finite_noise(monkeypatch):
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(noise, "philox4x32", lambda c, k, w=word: (np.full((1, 1), w),) * 4)
        drawn = gumbel_noise([1], [0], [0], [0], 4)
        assert drawn.isfinite().all() and drawn[0, 0].abs() > 3


def test_noise_of_a_row_does_not_depend_on_its_batch_or_on_tiles(monkeypatch):
    rows = [[7, 8, 9], [0, 1, 2], [5, 5, 6], [1, 2, 3]]
    together = gumbel_noise(*rows, 50)
    monkeypatch.setattr(noise, "NOISE_TILE", 1)
    for i in range(3):
        assert torch.equal(gumbel_noise(*([r[i]] for r in rows), 50)[0], together[i])
    assert torch.equal(gumbel_noise(*rows, 23), together[:, :23])
    assert gumbel_noise([], [], [], [], 5).shape == (0, 5)


def test_every_part_of_the_key_and_counter_matters():
    base = [noise_key(1, "a"), 2, 3, 4]
    drawn = [gumbel_noise(*([x] for x in base), 8)]
    for i, other in enumerate([noise_key(1, "b"), 3, 4, 5]):
        changed = [*base[:i], other, *base[i + 1:]]
        drawn.append(gumbel_noise(*([x] for x in changed), 8))
    assert all((a != b).all() for i, a in enumerate(drawn) for b in drawn[:i])


def test_noise_keys_are_64_bits_stable_and_distinct():
    keys = [(0, 1), (0, "1"), (1, 0), (0, "p"), (1, "p"), (0, "p'"), (11, 1), (1, 11)]
    values = [noise_key(*key) for key in keys]
    assert len(set(values)) == len(keys) and all(0 <= v < 2**64 for v in values)
    assert noise_key(np.int64(0), np.int64(1)) == values[0]
    assert values[3] == 1177383437609812698  # by b2sum: recorded runs depend on it


def drawn(logits, n, temperature, **settings):
    """Ids of n draws from the same logits [V], at n positions."""
    rows = torch.as_tensor(logits)[None].expand(n, -1)
    zeros = [0] * n
    return ops.sample(rows, [5] * n, zeros, zeros, range(n), temperature, **settings)[0]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_draws_follow_the_softmax(backend, monkeypatch):
    """A chi-square of 100,000 draws over 5 tokens; 23.5 is passed once in 10,000."""
    cases.use(backend, monkeypatch)
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]), 100_000
    expected = n * torch.softmax(logits / 0.8, -1)
    counts = torch.bincount(drawn(logits, n, 0.8), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_noise_is_uniform_over_the_vocabulary(backend, monkeypatch):
    """100,000 draws over 97 equal tokens: of 96 degrees of freedom; 150 once in 3,000."""
    cases.use(backend, monkeypatch)
    counts = torch.bincount(drawn(torch.zeros(97), 100_000, 1.0), minlength=97)
    assert ((counts - 100_000 / 97) ** 2 / (100_000 / 97)).sum() < 150


@given(V=st.integers(1, 70), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**32 - 1),
       temperature=st.sampled_from([0.0, 1e-3, 0.6, 1.0, 30.0]), scale=st.floats(0, 1e4),
       dead=st.integers(0, 69))
def test_a_draw_is_the_argmax_with_the_log_prob_of_the_trainer(V, seed, position, temperature,
                                                                scale, dead):
    logits = scale * cases.randn(1, V, seed=seed % 1000)
    logits[0, dead % V] = -math.inf if V > 1 else 0.0
    ids, logps = ops.sample(logits, [seed], [1], [2], [position], temperature)
    scores = logits.double() / (temperature or 1)
    if temperature:
        scores += gumbel_noise([seed], [1], [2], [position], V)
    best = scores[0].max()
    assert scores[0, ids[0]] >= best - 1e-6 * max(1.0, best.abs())  # two may round to one
    assert logits[0, ids[0]] > -math.inf
    assert torch.equal(logps, ops.logprob(logits, ids, None, temperature or 1.0)[0])


rewards_lists = st.lists(st.lists(st.floats(-100, 100), max_size=7), min_size=1, max_size=6)


@given(groups=rewards_lists, data=st.data())
def test_advantages_are_centred_scale_free_and_zero_where_nothing_is_scored(groups, data):
    offsets = torch.tensor([0, *map(len, groups)]).cumsum(0)
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    scored = torch.tensor([data.draw(st.booleans()) for _ in rewards], dtype=torch.bool)
    out = ops.group_advantages(rewards, offsets, scored, "std", 1e-8, 1e-6)
    shifted = ops.group_advantages(rewards + 3, offsets, scored, "std", 1e-8, 1e-6)
    junk = torch.where(scored, rewards, math.nan)
    assert torch.equal(ops.group_advantages(junk, offsets, scored, "std", 1e-8, 1e-6), out)
    assert not out[~scored].any() and out.dtype == torch.float32
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        part = out[start:end][scored[start:end]]
        kept = rewards[start:end][scored[start:end]]
        if len(kept) < 2 or kept.max() - kept.min() <= 1e-6:
            assert not part.any()
        else:
            assert part.sum().abs() < 1e-5 * len(part)
            if kept.max() - kept.min() > 1e-3:
                cases.close(shifted[start:end][scored[start:end]], part, factor=100)
                assert part.double().square().mean() == pytest.approx(1, abs=1e-4)


def test_advantages_check_their_arguments():
    rewards, scored = torch.zeros(3, dtype=torch.float64), torch.ones(3).bool()
    for offsets in ([0, 2], [1, 3], [0, 4, 3], []):
        with pytest.raises(ValueError, match="rise from 0 to the 3"):
            ops.group_advantages(rewards, torch.tensor(offsets, dtype=torch.int64), scored, "std",
                                 1e-8, 1e-6)
    with pytest.raises(ValueError, match="float64"):
        ops.group_advantages(rewards.float(), torch.tensor([0, 3]), scored, "std", 1e-8, 1e-6)


# ------------------------------------------------------------------------------ filters


def kept(probs, dtype=torch.float32, **filters):
    logits = torch.tensor([probs]).log().to(dtype).float()
    z = filtered(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters)
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
    ids = [i for i, x in enumerate(filtered(z, top_k, top_p, min_p)[0]) if x > -torch.inf]
    assert ids and len(ids) <= (top_k or len(logits))
    dropped = z[0, [i for i in range(len(logits)) if i not in ids]]
    assert not len(dropped) or z[0, ids].min() >= dropped.max()


def test_filtered_draws_keep_the_log_prob_of_the_full_softmax():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(50, 1)
    counters = range(50), [0] * 50, [0] * 50, [0] * 50
    ids, logps = ops.sample(logits, *counters, 0.5, top_k=2)
    assert set(ids.tolist()) == {1, 2}
    expected = ops.logprob(logits, ids, None, 0.5)[0]
    assert torch.equal(logps, expected)  # the same bits as the trainer's
    greedy, plain = ops.sample(logits, *counters, 0.0)
    assert set(greedy.tolist()) == {1} and torch.equal(plain, ops.logprob(logits, greedy)[0])


def test_sampling_ignores_padded_columns():
    logits = torch.tensor([[0.0, 1.0, 50.0]], dtype=torch.bfloat16).repeat(20, 1)
    ids, logps = ops.sample(logits, range(20), *[[0] * 20] * 3, num_valid=2)
    assert set(ids.tolist()) == {0, 1}
    expected = torch.where(ids == 1, 1.0, 0.0) - math.log(1 + math.e)
    assert torch.allclose(logps, expected, atol=1e-5)


# ------------------------------------------------------------------------------ the face


def test_wrong_arguments_are_refused_by_name():
    logits, targets = torch.zeros(3, 5), torch.tensor([0, 4, 1])
    for wrong, message in (
        ({"targets": torch.tensor([0, 5, 1])}, "target 5 of row 1"),
        ({"targets": torch.tensor([0, 4, -1])}, "target -1 of row 2"),
        ({"num_valid": 4}, "target 4 of row 1"), ({"num_valid": 6}, "num_valid is 6"),
        ({"num_valid": 0}, "num_valid is 0"), ({"targets": targets[:2]}, "int64 .3."),
        ({"targets": targets.int()}, "int64 .3."), ({"mask": targets}, "bool .3."),
        ({"temperature": 0.0}, "temperature is 0"), ({"temperature": math.nan}, "temperature"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.logprob(**{"logits": logits, "targets": targets} | wrong)
    with pytest.raises(ValueError, match="do not fit"):
        ops.token_logps(logits, logits.T, targets, targets > 0)
    with pytest.raises(ValueError, match="3 rows need as many"):
        ops.sample(logits, [1], [1], [1], [1])


def operations():
    """Arguments of every operation that has a schema."""
    x = cases.randn(4, 37).requires_grad_()
    targets, mask = torch.tensor([0, 36, 2, 5]), torch.tensor([True, True, False, True])
    hidden, head = (cases.randn(*shape).requires_grad_() for shape in ((4, 6), (37, 6)))
    settings = 0.7, 37
    lse = ops.logprob(x.detach(), targets, mask, *settings)[2]
    inputs = [cases.randn(9, n, 32, seed=n).requires_grad_() for n in (4, 2, 2)]
    borders = torch.tensor([0, 4, 9], dtype=torch.int32)
    yield torch.ops.minirler.logprob, (x, targets, mask, *settings, False)
    yield torch.ops.minirler.logprob, (x.detach().bfloat16(), targets, None, *settings, False)
    yield torch.ops.minirler.logprob_backward, (lse, x.detach(), targets, mask, lse, *settings)
    yield torch.ops.minirler.logprob_reuse, (x.detach().clone(), lse, targets, mask, lse, *settings)
    yield torch.ops.minirler.token_logps, (hidden, head, targets, mask, *settings, 2, [4, 8])
    if "cpu" in kernels.NATIVE:
        yield torch.ops.minirler.packed_attention, (*inputs, borders)


@pytest.mark.parametrize("index", range(6))
def test_operations_obey_the_rules_of_torch_library(index):
    listed = list(operations())
    if index == len(listed):
        pytest.skip("the kernels are not built")
    operation, arguments = listed[index]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic")  # fmt: skip
    torch.library.opcheck(operation.default, arguments, test_utils=tests)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_gradients_are_the_differences_of_results(backend, monkeypatch):
    """In float32, so with wide steps; float64 has no kernel and is checked as it should be."""
    cases.use(backend, monkeypatch)
    targets, mask = torch.tensor([0, 4, 2]), torch.tensor([True, True, False])
    for dtype, settings in ((torch.float64, {}), (torch.float32, {"eps": 1e-2, "atol": 1e-2})):
        x = cases.randn(3, 6, dtype=dtype).requires_grad_()
        h, w = (cases.randn(n, 4, seed=n, dtype=dtype).requires_grad_() for n in (3, 6))
        wide = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2} | settings  # results are float32
        assert torch.autograd.gradcheck(lambda x: ops.logprob(x, targets, mask, 0.7)[0], x, **wide)
        assert torch.autograd.gradcheck(
            lambda h, w: ops.token_logps(h, w, targets, mask, 0.7, chunk=2)[0], (h, w), **wide)


def test_autograd_refuses_to_read_logits_that_were_reused():
    logits = 1.0 * cases.randn(3, 9).requires_grad_()
    squares = logits.square().sum()
    ops.logprob(logits, torch.tensor([0, 1, 2]), reuse=True)[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_the_fused_head_is_its_plain_twin():
    hidden, head, targets, mask = problem(9, 31)
    got = ops.token_logps(hidden, head, targets, mask, 0.7, 30, chunk=4)
    for x, y in zip(got, token_logps_ref(hidden, head, targets, mask, 0.7, 30), strict=True):
        cases.close(x, y, factor=3)


def list_of_backends(**environment):
    """Lines and warnings of `python -m minirler.ops`."""
    done = subprocess.run([sys.executable, "-m", "minirler.ops"], capture_output=True, text=True,
                          check=True, cwd=ROOT, env=os.environ | environment)
    return done.stdout.splitlines(), done.stderr


def test_the_module_lists_its_backends():
    lines, _ = list_of_backends()
    assert f"logprob {kernels.backend()}" in lines and len(lines) == 8
    assert all(hasattr(ops, line.split()[0]) for line in lines)
    lines, warnings = list_of_backends(MINIRLER_OPS="torch")
    assert "logprob torch" in lines and "paged_attention torch" in lines and not warnings


def test_an_unknown_choice_of_backend_is_refused(monkeypatch):
    monkeypatch.setenv("MINIRLER_OPS", "cuda")
    with pytest.raises(ValueError, match="set it to torch"):
        kernels.load()


def test_missing_kernels_are_told_once_with_the_command_that_builds_them(monkeypatch):
    monkeypatch.delenv("MINIRLER_OPS", raising=False)
    monkeypatch.setattr(kernels, "_C", None)
    monkeypatch.setattr(kernels, "MISSING", "no such module", raising=False)
    with pytest.warns(UserWarning, match="plain torch.*pip install -e ."):
        assert kernels.load() == {}


@pytest.mark.long
def test_without_a_compiler_the_package_installs_warns_and_works(tmp_path):
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "minirler"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
    broken = os.environ | {"CXX": "/nonexistent", "MINIRLER_NATIVE": "", "MINIRLER_CUDA": "0"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, env=broken, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING: minirler._C was not built" in done.stderr
    for strict in ({"MINIRLER_NATIVE": "require"}, {"MINIRLER_CUDA": "1"}, {"MINIRLER_CUDA": "on"}):
        asked = subprocess.run(command, cwd=tmp_path, env=broken | strict, capture_output=True)
        assert asked.returncode, strict
    plain = os.environ | {"PYTHONPATH": "", "MINIRLER_OPS": ""}
    # an editable install would find its own _C for this copy
    code = ("import runpy, sys; sys.meta_path = [f for f in sys.meta_path if not getattr(f, "
            "'__module__', '').startswith('__editable__')]; "
            "runpy.run_module('minirler.ops', run_name='__main__')")  # fmt: skip
    listed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=plain,
                            capture_output=True, text=True)
    assert "logprob torch" in listed.stdout
    assert listed.stderr.count("pip install -e .") == 1
