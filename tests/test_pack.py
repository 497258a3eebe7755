"""Packing: the sampled ids are trained on, sequences stay apart, nothing is lost or split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler.grpo import policy_loss
from minirler.pack import pack, partition
from minirler.records import Rollout, Segment


def forced(*ids):
    return Segment(list(ids), [0.0] * len(ids), False, 0)


def sampled(*ids, logp=-1.0):
    return Segment(list(ids), [logp - 0.25 * k for k in range(len(ids))], True, 0)


def rollout(*segments, sample=0):
    return Rollout("q", sample, list(segments))


def tokens_trained(batch):
    return batch.targets[batch.mask].tolist()


def test_positions_targets_masks_and_logps_of_two_turns_by_hand():
    two_turns = rollout(forced(10, 11), sampled(20, 21), forced(30), sampled(40, 2))
    (batch,) = pack([rollout(forced(1), sampled(5)), two_turns], [0.5, -2.0], 9)
    assert batch.ids.tolist() == [1, 5, 10, 11, 20, 21, 30, 40, 2]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert batch.cu_seqlens == [0, 2, 9]
    assert batch.targets.tolist() == [5, 0, 11, 20, 21, 30, 40, 2, 0]
    assert batch.mask.tolist() == [True, False, False, True, True, False, True, True, False]
    assert batch.old_logps.tolist() == [-1, 0, 0, -1, -1.25, 0, -1, -1.25, 0]
    assert batch.advantages.tolist() == [0.5] * 2 + [-2.0] * 7
    assert batch.rollout.tolist() == [0] * 2 + [1] * 7
    assert batch.token_count() == 5
    integers = (batch.ids, batch.positions, batch.targets, batch.rollout)
    assert {x.dtype for x in integers} == {torch.int64}
    assert batch.mask.dtype == torch.bool and batch.old_logps.dtype == torch.float32


def test_the_mask_comes_from_the_segments_and_never_from_the_value_of_an_id():
    # 2 is both the pad and the end-of-sequence id: it can be sampled in the middle, and at the end.
    stopped = rollout(forced(9), sampled(5, 7, 2))
    went_on = rollout(forced(2), sampled(5, 2, 6, 7, 2))
    first, second = pack([stopped], [1.0], 10) + pack([went_on], [1.0], 10)
    assert tokens_trained(first) == [5, 7, 2]
    assert tokens_trained(second) == [5, 2, 6, 7, 2]
    assert second.ids.tolist() == [2, 5, 2, 6, 7, 2]


def test_ids_that_another_tokenisation_would_merge_are_trained_on_as_sampled():
    (batch,) = pack([rollout(forced(3, 3), sampled(6, 5), forced(2, 2))], [1.0], 10)
    assert batch.ids.tolist() == [3, 3, 6, 5, 2, 2]  # 6 5 spell what id 7 spells, too
    assert tokens_trained(batch) == [6, 5]
    assert batch.token_count() == len(batch.old_logps[batch.mask]) == 2


def test_rollouts_without_advantage_or_without_sampled_tokens_are_left_out():
    rollouts = [rollout(forced(1), sampled(i)) for i in (5, 6, 7)] + [rollout(forced(1, 2))]
    (batch,) = pack(rollouts, [1.0, None, 0.0, 1.0], 100)
    assert tokens_trained(batch) == [5, 7] and batch.rollout.unique().tolist() == [0, 2]
    assert pack(rollouts, [None] * 4, 100) == [] and pack([], [], 100) == []


def test_a_rollout_longer_than_a_micro_batch_is_an_error_with_both_numbers():
    long = rollout(forced(*range(6)), sampled(7), sample=3)
    with pytest.raises(ValueError, match="rollout q/3 has 7 tokens but a micro-batch only 6"):
        pack([rollout(forced(1), sampled(2)), long], [1.0, 1.0], 6)
    assert len(pack([long], [1.0], 7)) == 1
    assert pack([long], [None], 6) == []


def test_malformed_rollouts_are_named():
    with pytest.raises(ValueError, match="rollout q/0 starts with a sampled token"):
        pack([rollout(sampled(1, 2))], [1.0], 10)
    with pytest.raises(ValueError, match="segment 1 has 2 ids but 1 logps"):
        pack([rollout(forced(1), Segment([1, 2], [0.0], True, 0))], [1.0], 10)
    with pytest.raises(ValueError, match="1 advantages do not match 2"):
        pack([rollout(forced(1), sampled(2))] * 2, [1.0], 10)


def test_any_micro_batch_size_is_allowed_beside_any_group_size():
    rollouts = [rollout(forced(1), sampled(i)) for i in range(8)]  # two tokens each
    batches = pack(rollouts, [float(i) for i in range(8)], 6)
    assert [len(b.cu_seqlens) - 1 for b in batches] == [3, 3, 2]
    assert sorted(t for b in batches for t in tokens_trained(b)) == list(range(8))
    assert sorted(a for b in batches for a in b.advantages[b.mask].tolist()) == list(range(8))


def test_moving_keeps_everything_but_the_device():
    (batch,) = pack([rollout(forced(1), sampled(2, 3))], [1.0], 10)
    moved = batch.to("meta")
    assert moved.ids.is_meta and moved.advantages.is_meta and moved.cu_seqlens == batch.cu_seqlens


SEGMENTS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 4), max_size=4)), max_size=4)
ROLLOUTS = st.lists(
    SEGMENTS.map(
        lambda parts: rollout(forced(1), *[(sampled if s else forced)(*ids) for s, ids in parts])
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@given(ROLLOUTS, st.integers(17, 60))
def test_every_sampled_token_is_trained_once_and_nothing_else(rollouts, max_tokens):
    advantages = [float(i) for i in range(len(rollouts))]
    batches = pack(rollouts, advantages, max_tokens)
    assert all(len(b.ids) <= max_tokens for b in batches)
    seen = {}
    for b in batches:
        for start, end in zip(b.cu_seqlens, b.cu_seqlens[1:], strict=False):
            (i,) = b.rollout[start:end].unique().tolist()
            seen[i] = b.targets[start:end][b.mask[start:end]].tolist()
            assert b.ids[start:end].tolist() == [t for s in rollouts[i].segments for t in s.ids]
            assert b.positions[start:end].tolist() == list(range(end - start))
            assert b.advantages[start:end].unique().tolist() == [advantages[i]]
    expected = {
        i: [t for s in r.segments if s.sampled for t in s.ids] for i, r in enumerate(rollouts)
    }
    assert seen == {i: ids for i, ids in expected.items() if ids}
    assert sum(b.token_count() for b in batches) == sum(r.num_sampled() for r in rollouts)


@given(st.lists(st.integers(1, 20), max_size=20), st.integers(20, 50))
def test_parts_hold_everything_once_within_the_budget_and_are_balanced(lengths, max_tokens):
    parts = partition(dict(enumerate(lengths)), max_tokens)
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(0 < load <= max_tokens for load in loads)
    if loads:  # longest first into the emptiest: no part is ahead by more than one of its members
        assert all(max(loads) - load <= max(lengths) for load in loads)
        assert len(parts) <= 2 * sum(lengths) / max_tokens + 1
    assert parts == partition(dict(reversed(list(enumerate(lengths)))), max_tokens)


def running_mean_logps(batch, weight):
    """A causal toy model: [N] log-probs from the running mean of embeddings within a sequence."""
    embedded = weight[batch.ids] + 0.1 * batch.positions[:, None]  # [N, V]
    parts = [
        embedded[start:end].cumsum(0) / torch.arange(1, end - start + 1)[:, None]
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
    ]
    logps = torch.cat(parts).log_softmax(-1)
    return logps[torch.arange(len(batch.ids)), batch.targets]


def step_gradient(rollouts, advantages, max_tokens, size=1):
    weight = torch.linspace(-1, 1, 25).reshape(5, 5).double().cos().float().requires_grad_()
    shares = [pack(rollouts, advantages, max_tokens, rank, size) for rank in range(size)]
    batches = [batch for share in shares for batch in share]
    denominator = sum(b.token_count() for b in batches)
    total = torch.zeros(())
    for b in batches:
        logps = running_mean_logps(b, weight)
        loss, _ = policy_loss(logps, b.old_logps, b.advantages, b.mask, denominator=denominator)
        total = total + loss
    if batches:
        total.backward()
    return total.item(), weight.grad


@given(ROLLOUTS, st.integers(17, 60), st.integers(2, 5))
def test_ranks_get_every_token_once_in_equal_numbers_of_micro_batches(rollouts, max_tokens, size):
    advantages = [float(i) for i in range(len(rollouts))]
    shares = [pack(rollouts, advantages, max_tokens, rank, size) for rank in range(size)]
    trained = sum(rollout.num_sampled() > 0 for rollout in rollouts)
    assert {len(share) for share in shares} == {len(shares[0])}
    assert bool(shares[0]) == bool(trained)
    assert all(0 < len(b.ids) <= max_tokens for share in shares for b in share)
    busy = [b for share in shares for b in share if b.token_count()]
    rows = [i for b in busy for i in b.rollout.unique().tolist()]
    assert sorted(rows) == [i for i, r in enumerate(rollouts) if r.num_sampled()]
    assert len(busy) >= min(trained, size)  # nobody idles while another one has two
    assert sum(b.token_count() for b in busy) == sum(r.num_sampled() for r in rollouts)


@given(ROLLOUTS, st.integers(17, 60), st.integers(1, 4), st.randoms())
def test_loss_and_gradient_do_not_depend_on_packing_order_or_ranks(
    rollouts, max_tokens, size, random
):
    pairs = [(r, 0.5 - i) for i, r in enumerate(rollouts)]
    loss, gradient = step_gradient(*zip(*pairs, strict=True), 1000)
    random.shuffle(pairs)
    packed, packed_gradient = step_gradient(*zip(*pairs, strict=True), max_tokens, size)
    assert packed == pytest.approx(loss, rel=1e-5, abs=1e-6)
    if gradient is not None:
        torch.testing.assert_close(packed_gradient, gradient, rtol=1e-5, atol=1e-6)
