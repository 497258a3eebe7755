"""Advantages and loss: hand-computed values, and the invariants that make training the same however
a batch is cut. `naive_loss` is the specification: plain Python, one token at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler.grpo import flat_groups, group_advantages, kl_terms, policy_loss
from minirler.reward import rubric_reward

NAN, INF = float("nan"), float("inf")


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def close(got, expected, tolerance=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance,
    )  # fmt: skip


def run(logps, old, advantages, mask=None, **settings):
    """(loss, stats, gradient by logps) of one call."""
    logps = tensor(logps).requires_grad_()
    mask = torch.ones(len(logps), dtype=torch.bool) if mask is None else torch.tensor(mask)
    settings.setdefault("denominator", int(mask.sum()))
    loss, stats = policy_loss(logps, tensor(old), tensor(advantages), mask, **settings)
    loss.backward()
    return loss.item(), stats, logps.grad


def naive_loss(logps, old, ref, advantages, mask, denominator, low, high, beta):
    terms = 0.0
    for x, o, r, a, m in zip(logps, old, ref, advantages, mask, strict=True):
        if m:
            ratio = math.exp(x - o)
            gain = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            terms += -gain + beta * (math.exp(r - x) - 1 - (r - x))
    return terms / denominator


# -- advantages


@pytest.mark.parametrize(
    "rewards", [[0.35] * 3, [0.7] * 6, [0.6000000238418579, 0.6000000834465027], [0.4], [0, 1e-6]]
)
@pytest.mark.parametrize("normalize", ["std", "std1", "none"])
def test_a_flat_group_has_advantages_of_exactly_zero(rewards, normalize):
    group = [0] * len(rewards)
    assert group_advantages(rewards, group, normalize=normalize).tolist() == [0.0] * len(rewards)
    assert flat_groups(rewards, group).all()


def test_std_is_that_of_the_population_unless_the_sample_one_is_asked_for():
    close(group_advantages([1, 0, 0, 0], [0] * 4), [1.732051] + [-0.577350] * 3, 1e-5)
    close(group_advantages([1, 0, 0, 0], [0] * 4, normalize="std1"), [1.5] + [-0.5] * 3, 1e-5)
    assert group_advantages([0.4], [0]).tolist() == [0.0]
    assert group_advantages([0.4], [0], normalize="std1").tolist() == [0.0]


def test_groups_are_by_id_whatever_their_order_and_size():
    cases = [
        ([2, 4, 9], [7, 7, 3], [-1, 1, 0]),
        ([10, 1, 20, 3], [5, -2, 5, -2], [-5, -1, 5, 1]),
        ([0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]),  # two groups of one prompt stay two
    ]
    for rewards, group, expected in cases:
        for ids in (group, torch.tensor(group), [f"group {g}" for g in group]):
            close(group_advantages(rewards, ids, normalize="none"), expected)


def test_unscored_rollouts_change_nothing_and_get_nothing():
    got = group_advantages([1, NAN, 0, 100], [0, 0, 0, 0], [True, False, True, False], "none")
    assert got.tolist() == [0.5, 0, -0.5, 0]
    alone = group_advantages([1.0, 5.0], [0, 0], torch.tensor([True, False]))
    assert alone.tolist() == [0, 0]
    assert flat_groups([1, 5, 1, 2], [0, 0, 1, 1], [True, False, True, True]).tolist() == [
        True, True, False, False,
    ]  # fmt: skip
    assert flat_groups([1, 5], [0, 0], [False, False]).all()


def test_bad_rewards_are_named():
    with pytest.raises(ValueError, match="reward 1 is scored but is nan"):
        group_advantages([1, NAN], [0, 0])
    with pytest.raises(ValueError, match="2 rewards, 1 group ids"):
        group_advantages([1, 2], [0])
    with pytest.raises(ValueError, match="'mean' is unknown"):
        group_advantages([1, 2], [0, 0], normalize="mean")


def test_no_rollouts_no_advantages():
    assert group_advantages([], []).shape == (0,)


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, -1.0]), st.integers(0, 3), st.booleans()),
    min_size=1, max_size=12,
)  # fmt: skip


@given(ROWS, st.randoms())
def test_permuting_rollouts_permutes_advantages(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = group_advantages(*zip(*rows, strict=True))
    close(group_advantages(*zip(*[rows[i] for i in order], strict=True)), straight[order])


@given(ROWS, st.floats(-5, 5), st.sampled_from([0.5, 2.0, 10.0]))
def test_adding_a_constant_or_scaling_changes_nothing(rows, constant, scale):
    rewards, group, scored = zip(*rows, strict=True)
    straight = group_advantages(rewards, group, scored)
    close(group_advantages([r + constant for r in rewards], group, scored), straight, 1e-5)
    close(group_advantages([r * scale for r in rewards], group, scored), straight, 1e-5)


@given(ROWS, st.sampled_from(["std", "std1", "none"]))
def test_advantages_of_a_group_sum_to_zero_and_are_zero_where_flat(rows, normalize):
    rewards, group, scored = zip(*rows, strict=True)
    got = group_advantages(rewards, group, scored, normalize)
    flat = flat_groups(rewards, group, scored)
    for name in set(group):
        here = torch.tensor([g == name for g in group])
        assert abs(got[here].sum()) < 1e-5
        assert len(flat[here].unique()) == 1
        assert bool(flat[here].all()) == bool((got[here] == 0).all())


@given(st.data())
def test_a_criterion_that_all_meet_equally_changes_no_advantage(data):
    size, width = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    cell = st.sampled_from([0.0, 0.5, 1.0])
    row = st.lists(cell, min_size=width, max_size=width)
    verdicts = data.draw(st.lists(row, min_size=size, max_size=size))
    weights = [1.0] + data.draw(st.lists(st.sampled_from([1.0, -1.0]), min_size=width - 1,
                                         max_size=width - 1))  # fmt: skip
    value, weight = data.draw(cell), data.draw(st.sampled_from([1.0, -1.0]))
    plain = [rubric_reward(row, weights) for row in verdicts]
    more = [rubric_reward([*row, value], [*weights, weight]) for row in verdicts]
    close(group_advantages(more, [0] * size), group_advantages(plain, [0] * size), 1e-5)


# -- loss


def test_clip_is_one_sided_for_both_signs():
    ratio, advantages = [1.6, 1.6, 0.7, 0.7, 1.24], [2.0, -1.0, 1.0, -2.0, 1.0]
    logps = [math.log(r) for r in ratio]
    loss, stats, grad = run(logps, [0.0] * 5, advantages, clip_low=0.2, clip_high=0.28)
    close(loss, -0.26)
    close(grad * 5, [0.0, 1.6, -0.7, 0.0, -1.24])
    close(stats["clip_high_frac"], 0.2)
    close(stats["clip_low_frac"], 0.2)
    close(stats["ratio_mean"], sum(ratio) / 5)
    for i, expected in enumerate([-2.56, 1.6, -0.7, 1.6, -1.24]):
        alone, _, _ = run(logps[i : i + 1], [0.0], advantages[i : i + 1], clip_high=0.28)
        close(alone, expected)


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_the_advantage():
    logps = [-0.1, -3.7, -11.2]
    loss, stats, grad = run(logps, logps, [1.0, -2.0, 0.5])
    assert stats["ratio_mean"] == 1.0 and stats["mismatch_kl"] == 0.0
    close(grad, [-1 / 3, 2 / 3, -0.5 / 3])


def test_k3_is_exact_near_zero_finite_far_away_and_never_nan():
    d = torch.tensor([0.0, 0.7, -0.7, 1e-4, 200.0, -200.0, INF, -INF], requires_grad=True)
    k3 = kl_terms(d, "k3")
    close(k3[:3].detach(), [0.0, 0.3137527, 0.1965853])
    close(k3[3].item() / 5.000167e-9, 1.0, 1e-2)
    close(k3[4].item() / 485165174.41, 1.0)
    assert (k3 >= 0).all() and k3.isfinite().all()
    k3.sum().backward()
    assert d.grad.isfinite().all() and d.grad[4] == 0


def test_kl_forms_have_their_values_and_gradients():
    logps, ref = [-1.0, -2.0], [-1.5, -1.0]  # d = ref - logp = -0.5, 1.0
    expected = {
        "k1": ([0.5, -1.0], [1.0, 1.0]),
        "k2": ([0.125, 0.5], [0.5, -1.0]),
        "k3": ([math.exp(-0.5) - 0.5, math.e - 2], [1 - math.exp(-0.5), 1 - math.e]),
    }
    for kl, (values, gradient) in expected.items():
        loss, stats, grad = run(
            logps, logps, [0.0, 0.0], ref_logps=tensor(ref), kl=kl, beta=0.1, denominator=1
        )
        close(loss, 0.1 * sum(values))
        close(grad, [0.1 * g for g in gradient])
        close(stats["kl"], sum(values) / 2)


def test_the_gradient_of_k1_as_a_loss_does_not_depend_on_the_reference():
    gradients = [
        run([-1.0, -5.0], [-1.0, -5.0], [1.0, -1.0], ref_logps=tensor(ref), kl="k1", beta=0.3)[2]
        for ref in ([-1.0, -5.0], [-9.0, 0.0], [-80.0, -1e4])
    ]
    assert all(torch.equal(g, gradients[0]) for g in gradients)


def test_mismatch_kl_compares_sampler_and_trainer_over_sampled_tokens():
    mask = [True, False, True]
    _, stats, _ = run([-1.0, -2.0, -1.0], [-1.5, 0.0, -1.0], [0.0] * 3, mask)
    close(stats["mismatch_kl"], (math.exp(0.5) - 1 - 0.5) / 2)


def test_huge_log_ratios_stay_finite():
    for logps, old in (([0.0], [-200.0]), ([-200.0], [0.0]), ([-1.0], [-INF])):
        for advantage in (1.0, -1.0):
            loss, stats, grad = run(logps, old, [advantage], ref_logps=tensor([-300.0]), beta=0.1)
            assert math.isfinite(loss) and grad.isfinite().all()
            assert all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("ratio", ["token", "sequence", "gspo"])
def test_what_stands_at_unsampled_tokens_reaches_neither_loss_nor_gradient(ratio):
    mask = [True, False, False, True]
    settings = {"ratio": ratio, "segment": torch.tensor([0, 0, 1, 1]), "beta": 0.1}
    clean = run([-1.0, 0, 0, -2.0], [-1.1, 0, 0, -2.1], [1.0, 0, 0, -1.0], mask,
                ref_logps=tensor([-1.2, 0, 0, -2.0]), **settings)  # fmt: skip
    for poison in (NAN, INF, -INF):
        bad = run([-1.0, poison, poison, -2.0], [-1.1, poison, poison, -2.1],
                  [1.0, poison, poison, -1.0], mask,
                  ref_logps=tensor([-1.2, poison, poison, -2.0]), **settings)  # fmt: skip
        assert bad[0] == clean[0] and bad[1] == clean[1]
        assert torch.equal(bad[2], clean[2]) and (bad[2][1:3] == 0).all()


@pytest.mark.parametrize("ratio", ["token", "sequence", "gspo"])
@pytest.mark.parametrize("denominator", [0, 5])
def test_nothing_sampled_gives_exactly_zero(ratio, denominator):
    rollout = torch.tensor([0, 0])
    loss, stats, grad = run([NAN, -1.0], [-1.0, INF], [1.0, 1.0], [False, False],
                            ratio=ratio, segment=rollout, denominator=denominator)  # fmt: skip
    assert loss == 0 and (grad == 0).all() and all(v == 0 for v in stats.values())


def test_a_denominator_of_zero_gives_exactly_zero_even_with_sampled_tokens():
    loss, _, grad = run([-1.0], [-2.0], [1.0], denominator=0)
    assert loss == 0 and (grad == 0).all()
    loss, _, _ = run([-1.0], [-1.0], [1.0], denominator=torch.tensor(0))
    assert loss == 0


def test_flat_groups_that_are_kept_have_no_policy_gradient_but_the_kl_acts():
    advantages = group_advantages([0.7] * 3, [0] * 3).tolist()
    logps, old = [-1.0, -2.0, -0.3], [-1.3, -1.0, -0.3]
    loss, _, grad = run(logps, old, advantages)
    assert loss == 0 and (grad == 0).all()
    _, _, grad = run(logps, old, advantages, ref_logps=tensor([-2.0, -2.5, -0.1]), beta=0.1)
    assert (grad != 0).all()


def test_truncated_rollouts_that_are_masked_leave_numerator_and_denominator():
    # On policy and with an advantage of -c every token's loss is c.
    token_loss, mask = [1.0] * 3 + [9.0] * 5, [True] * 3 + [False] * 5
    loss, _, _ = run([-1.0] * 8, [-1.0] * 8, [-c for c in token_loss], mask, denominator=sum(mask))
    close(loss, 1.0)


def test_token_mean_is_over_the_whole_step_however_it_is_split():
    losses, gradients = [], []
    for split in ([[1, 1, 1, 1, 7]], [[1, 1, 1, 1], [7]], [[7], [1, 1], [1, 1]]):
        ones = [[-1.0] * len(p) for p in split]
        cut = zip(ones, split, strict=True)
        parts = [run(one, one, [-c for c in p], denominator=5) for one, p in cut]
        losses.append(sum(loss for loss, _, _ in parts))
        gradients.append(sorted(g for _, _, grad in parts for g in grad.tolist()))
    close(losses, [2.2, 2.2, 2.2])
    close(gradients[1], gradients[0])
    close(gradients[2], gradients[0])


LOGP = st.floats(-3, 0, width=32)
TOKENS = st.lists(
    st.tuples(LOGP, LOGP, LOGP, st.sampled_from([-1.5, -1.0, 0.0, 0.5, 2.0]), st.booleans(),
              st.integers(0, 3)),
    min_size=1, max_size=16,
)  # fmt: skip


def settle(tokens, **settings):
    """`run` on tokens (logp, old, ref, advantage, mask, rollout)."""
    logps, old, ref, advantages, mask, rollout = (list(x) for x in zip(*tokens, strict=True))
    return run(logps, old, advantages, mask, ref_logps=tensor(ref), beta=0.1,
               segment=torch.tensor(rollout), **settings)  # fmt: skip


@given(TOKENS)
def test_token_loss_is_the_naive_one(tokens):
    logps, old, ref, advantages, mask, _ = zip(*tokens, strict=True)
    expected = naive_loss(logps, old, ref, advantages, mask, 7, 0.2, 0.3, 0.1)
    loss, _, grad = settle(tokens, denominator=7, clip_high=0.3)
    close(loss, expected, 1e-5)
    assert all(g == 0 for g, m in zip(grad.tolist(), mask, strict=True) if not m)


@given(TOKENS, st.sampled_from(["token", "sequence", "gspo"]), st.sets(st.integers(0, 3)),
       st.randoms())  # fmt: skip
def test_loss_and_gradient_do_not_depend_on_split_or_packing_order(tokens, ratio, first, random):
    tokens = [(*t[:3], [1.0, -0.5, 0.0, 2.0][t[5]], t[4], t[5]) for t in tokens]  # one a rollout
    whole, _, gradient = settle(tokens, denominator=7, ratio=ratio)
    order = list(range(len(tokens)))
    random.shuffle(order)
    loss, joined = 0.0, torch.zeros(len(tokens))
    for here in (True, False):
        part = [i for i in order if (tokens[i][5] in first) == here]
        if not part:
            continue
        value, _, grad = settle([tokens[i] for i in part], denominator=7, ratio=ratio)
        loss += value
        joined[part] = grad
    close(loss, whole, 1e-5)
    close(joined, gradient, 1e-5)


def test_rollout_ratios_are_the_product_and_the_geometric_mean():
    logps, old = [-1.0, -1.1, -2.0, -0.5], [-1.1, -1.0, -2.3, -0.5]
    mask, rollout = [True, True, True, False], torch.tensor([4, 9, 4, 9])  # rollout 4: +0.1, +0.3
    advantages = [1.0, -1.0, 1.0, -1.0]
    settings = {"segment": rollout, "clip_low": 0.9, "clip_high": 0.9, "denominator": 2}
    product, _, grad = run(logps, old, advantages, mask, ratio="sequence", **settings)
    close(product, (-math.exp(0.4) + math.exp(-0.1)) / 2)
    close(grad, [-math.exp(0.4) / 2, math.exp(-0.1) / 2, -math.exp(0.4) / 2, 0.0])
    geometric, _, grad = run(logps, old, advantages, mask, ratio="gspo", **settings)
    close(geometric, (-math.exp(0.2) + math.exp(-0.1)) / 2)
    close(grad, [-math.exp(0.2) / 4, math.exp(-0.1) / 2, -math.exp(0.2) / 4, 0.0])


def test_rollout_ratios_clip_the_rollout_and_average_the_kl_within_it():
    settings = {"segment": torch.zeros(2, dtype=torch.int64), "ratio": "sequence"}
    _, stats, grad = run([-1.0, -1.0], [-1.15, -1.15], [1.0, 1.0], denominator=1, **settings)
    assert stats["clip_high_frac"] == 1.0 and (grad == 0).all()  # e^0.3; e^0.15 would pass
    loss, _, _ = run([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], ref_logps=tensor([-3.0, -1.0]),
                     kl="k1", beta=1.0, denominator=1, **settings)  # fmt: skip
    close(loss, 1.0)  # (2 + 0) / 2


def test_truncated_importance_sampling_caps_the_weight_and_keeps_the_gradient():
    logps = [math.log(4.0), math.log(1.5), math.log(0.1), math.log(4.0)]
    _, _, grad = run(logps, [0.0] * 4, [1.0, 1.0, -1.0, -1.0], truncate=2.0, denominator=1)
    close(grad, [-2.0, -1.5, 0.1, 2.0])


def test_inputs_are_left_as_they_are_and_half_precision_is_computed_in_float32():
    logps = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    old, advantages, mask = tensor([-1.0, NAN]), tensor([1.0, 1.0]), torch.tensor([True, False])
    before = [x.clone() for x in (logps, old, advantages, mask)]
    loss, _ = policy_loss(logps, old, advantages, mask, denominator=1)
    assert loss.dtype == torch.float32
    for x, y in zip((logps, old, advantages, mask), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kl": "k4"}, "'k4' is unknown"),
        ({"ratio": "word"}, "'word' is unknown"),
        ({"ratio": "gspo"}, "needs segment"),
        ({"beta": 0.1}, "needs ref_logps"),
        ({"denominator": -1}, "denominator is -1"),
        ({"ref_logps": torch.zeros(3)}, r"mask is \[2\]"),
    ],
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        run([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], **settings)


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ValueError, match="mask has to be bool"):
        run([-1.0], [-1.0], [1.0], [1])
