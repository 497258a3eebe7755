"""The options of the algorithm, by enumeration: a policy over three tokens that writes two of them
has nine rollouts, so that the expectation of what an estimator's gradient is can be written down,
and compared with the gradient of what it is meant to estimate. And the same options in the loop."""

import asyncio
import math
from itertools import product

import pytest
import torch
from test_train import settings

from minirler import train as loop
from minirler.grpo import group_advantages, kl_terms, policy_loss
from minirler.run import open_run
from minirler.update import advantages_of, borders, rollout_kl, update

ROLLOUTS = list(product(range(3), repeat=2))
GAIN = torch.tensor([0.3, -1.2, 0.5, 2.0, 0.1, -0.4, 0.9, -0.7, 1.1], dtype=torch.float64)
BOTH = torch.ones(2, dtype=torch.bool)


def table(seed):
    """Logits [4, 3] of the next token after the start (row 3) and after each token, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def logps(theta):
    """[9, 2]: of each token of each rollout."""
    log = theta.log_softmax(-1)
    return torch.stack([torch.stack([log[3, a], log[a, b]]) for a, b in ROLLOUTS])


def gradient(value, theta):
    return torch.autograd.grad(value, theta)[0]


def expected(theta, old, advantages=GAIN, **options):
    """Sum over the rollouts of p(rollout) times the gradient of the loss: p is that of `old`."""
    theta = theta.clone().requires_grad_()
    total = 0.0
    for i, p in enumerate(logps(old).sum(1).exp()):
        now = logps(theta)[i]
        loss, _ = policy_loss(
            now, logps(old)[i], advantages[i].repeat(2), BOTH, segment=torch.zeros(2).long(),
            **{"denominator": 1, "clip_low": 1.0, "clip_high": math.inf} | options,
        )  # fmt: skip
        total = total + p * loss
    return gradient(total, theta)


def exact(theta, value):
    """Gradient of the sum over the rollouts of p(rollout) value(log p)[rollout]; p is theta's."""
    theta = theta.clone().requires_grad_()
    log = logps(theta)
    return gradient((log.sum(1).exp() * value(log)).sum(), theta)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)  # the loss is float32


@pytest.mark.parametrize("ratio, scale", [("token", 1), ("sequence", 1), ("gspo", 0.5)])
def test_on_policy_every_ratio_has_the_gradient_of_the_expected_reward(ratio, scale):
    """The geometric mean of two tokens has half of it."""
    theta = table(0)
    close(expected(theta, theta, ratio=ratio), scale * exact(theta, lambda _: -GAIN))


def test_off_policy_the_product_is_unbiased_and_the_token_ratio_is_not():
    theta, old = table(0), table(1)
    want = exact(theta, lambda _: -GAIN)
    close(expected(theta, old, ratio="sequence"), want)
    assert (expected(theta, old, ratio="token") - want).abs().max() > 0.01


def test_clip_higher_silences_a_gain_beyond_its_own_border():
    """Ratios beyond 1 + clip_high give nothing to good rollouts; below it, all they have."""
    theta, old = table(0), table(1)
    ratio = (logps(theta) - logps(old)).exp()
    for high in (0.2, 0.5):
        free = theta.clone().requires_grad_()
        passes = torch.where(GAIN[:, None] > 0, ratio < 1 + high, ratio > 1 - 0.1)  # [9, 2]
        weight = logps(old).sum(1).exp()[:, None] * GAIN[:, None] * passes
        want = gradient(-(weight * ratio * logps(free)).sum(), free)
        close(expected(theta, old, clip_low=0.1, clip_high=high), want)


def test_truncated_importance_sampling_weighs_each_token_by_its_ratio_up_to_the_cap():
    theta, old = table(0), table(1)
    ratio = (logps(theta) - logps(old)).exp()
    assert (ratio > 1.5).any() and (ratio < 1.5).any()
    free = theta.clone().requires_grad_()
    weight = logps(old).sum(1).exp()[:, None] * ratio.clamp(max=1.5) * GAIN[:, None]
    close(expected(theta, old, truncate=1.5), gradient(-(weight * logps(free)).sum(), free))


def kl_gradient(theta, q, kl):
    """Expected gradient of the KL term alone, of rollouts of theta."""
    free, total = theta.clone().requires_grad_(), 0.0
    for i, p in enumerate(logps(theta).sum(1).exp()):
        loss, _ = policy_loss(logps(free)[i], logps(theta)[i], torch.zeros(2), BOTH, denominator=1,
                              ref_logps=logps(q)[i], kl=kl, beta=1.0)  # fmt: skip
        total = total + p * loss
    return gradient(total, free)


def test_as_a_loss_k2_has_the_gradient_of_the_kl_k3_of_its_reverse_and_k1_none():
    """For each next token, given the tokens before it as they were sampled."""
    theta, q = table(0), table(2)
    free = theta.clone().requires_grad_()
    visits = torch.cat([theta.softmax(-1)[3], torch.ones(1, dtype=torch.float64)])  # of each row
    p, r = free.log_softmax(-1), q.log_softmax(-1)
    forward, reverse = (p.exp() * (p - r)).sum(1), (r.exp() * (r - p)).sum(1)
    close(kl_gradient(theta, q, "k2"), gradient(visits @ forward, free))
    p = free.log_softmax(-1)
    reverse = (r.exp() * (r - p)).sum(1)
    close(kl_gradient(theta, q, "k3"), gradient(visits @ reverse, free))
    close(kl_gradient(theta, q, "k1"), torch.zeros_like(theta))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_whole_rollouts():
    theta, q, beta = table(0), table(2), 0.3
    k1 = kl_terms(logps(q) - logps(theta), "k1").sum(1)  # [9]
    want = exact(theta, lambda log: beta * (log - logps(q)).sum(1) - GAIN)
    close(expected(theta, theta, advantages=GAIN - beta * k1), want)


@pytest.mark.parametrize("denominator", [7, 20])
def test_dr_grpo_is_the_policy_gradient_times_a_constant(denominator):
    """Groups of two: centring on a mean that holds the rollout itself takes half of the gain."""
    theta = table(0)
    free, total, p = theta.clone().requires_grad_(), 0.0, logps(theta).sum(1).exp()
    for i, j in product(range(9), repeat=2):
        advantages = group_advantages(GAIN[[i, j]], [0, 0], normalize="none")
        for row, a in ((i, advantages[0]), (j, advantages[1])):
            loss, _ = policy_loss(logps(free)[row], logps(theta)[row], a.repeat(2), BOTH,
                                  denominator=denominator)  # fmt: skip
            total = total + p[i] * p[j] * loss
    close(gradient(total, free), exact(theta, lambda _: -GAIN) / denominator)


# ------------------------------------------------------------------------------ in the loop


def sampled(folder, *overrides):
    """A small run, and one step's groups with rewards of 0, 1, 2, ... each."""
    run = open_run(settings(folder, *overrides))
    groups = asyncio.run(loop.sample_and_score(run))
    for group in groups:
        group.rewards = [float(k) for k in range(len(group.rewards))]
    return run, groups


def weights(run):
    return torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])


def test_mini_batches_and_epochs_are_that_many_steps_over_the_same_tokens(tmp_path):
    rows = {}
    for name, batches, epochs in (("one", 1, 1), ("four", 2, 2)):
        run, groups = sampled(tmp_path / name, f"train.mini_batches={batches}",
                              f"train.epochs={epochs}")  # fmt: skip
        rows[name] = update(run, groups)
        steps = run.optimizer.state[next(run.model.parameters())]["step"]
        assert steps == batches * epochs
    assert rows["one"]["trained_tokens"] == rows["four"]["trained_tokens"]
    assert rows["one"]["mismatch_kl"] < 1e-9 < rows["four"]["mismatch_kl"]  # later: off policy


def test_more_mini_batches_than_groups_are_as_many_as_groups():
    assert borders(2, 5) == [(0, 1), (1, 2)]
    assert borders(5, 2) == [(0, 2), (2, 5)] and borders(3, 1) == [(0, 3)]


def test_overlong_rollouts_are_compared_but_not_trained_on(tmp_path):
    run, groups = sampled(tmp_path / "long", "algo.mask_overlong=true")
    for group in groups:
        for k, rollout in enumerate(group.rollouts):
            rollout.stop_reason = "length" if k == 0 else "stop"
    kept = sum(r.num_sampled() for g in groups for r in g.rollouts[1:])
    metrics = update(run, groups)
    assert metrics["trained_tokens"] == kept
    for group in groups:  # the mean of 0, 1, 2, 3 stays 1.5: the overlong one has its part in it
        group.rewards = [0.0] + [1.5] * 3
        del group.rollouts[1:], group.rewards[1:]
    assert update(run, groups)["trained_tokens"] == 0


def test_a_constant_denominator_scales_the_loss_by_tokens_over_room(tmp_path):
    run, groups = sampled(tmp_path / "dr")
    tokens = update(run, groups)
    run, groups = sampled(tmp_path / "constant", "algo.denominator=max_tokens")
    room = update(run, groups)
    rollouts = sum(len(group.rollouts) for group in groups)
    scale = tokens["trained_tokens"] / (rollouts * run.config.rollout.max_tokens)
    assert room["loss"] == pytest.approx(scale * tokens["loss"], rel=1e-4, abs=1e-9)
    assert room["grad_norm"] == pytest.approx(scale * tokens["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("ratio", ["sequence", "gspo"])
def test_ratios_of_rollouts_train_in_the_loop(tmp_path, ratio):
    run, groups = sampled(tmp_path / ratio, f"algo.ratio={ratio}", "train.micro_batch_tokens=2048")
    before, metrics = weights(run), update(run, groups)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert not torch.equal(before, weights(run)) and math.isfinite(metrics["loss"])


def test_kl_in_the_reward_is_that_of_a_plain_forward_of_the_reference(tmp_path):
    run, groups = sampled(tmp_path / "kl", "algo.kl_in=reward", "algo.beta=0.5")
    with torch.no_grad():
        run.reference.head_weight().mul_(0.5)
    sums = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ids = torch.tensor([i for s in rollout.segments for i in s.ids])
        is_sampled = torch.tensor([s.sampled for s in rollout.segments for _ in s.ids])[1:]
        old = torch.tensor([x for s in rollout.segments for x in s.logps])[1:]
        logits = run.reference.logits(ids[None])[0, :-1, : run.tokenizer.num_valid]
        ref = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sums.append((old - ref)[is_sampled].sum().item())
    assert update(run, groups)["kl_in_reward"] == pytest.approx(sum(sums) / len(sums), rel=1e-4)


def test_kl_in_the_reward_favours_the_rollouts_that_the_reference_likes(tmp_path):
    run, groups = sampled(tmp_path / "sign", "algo.kl_in=reward", "algo.beta=0.5")
    groups[0].rewards = [1.0] * len(groups[0].rewards)
    with torch.no_grad():
        run.reference.head_weight().mul_(0.5)
    rollouts, index = groups[0].rollouts, torch.zeros(len(groups[0].rollouts), dtype=torch.int64)
    kl = rollout_kl(run, rollouts, torch.ones(len(rollouts), dtype=torch.bool))
    advantages, _ = advantages_of(run, groups[:1], rollouts, index)
    assert torch.equal(torch.tensor(advantages).argsort(), (-kl).argsort())


def test_a_reference_of_the_step_pulls_back_only_after_its_first_update(tmp_path):
    options = ("algo.beta=0.1", "algo.reference=step", "train.epochs=2", "train.lr=1e-5")
    run, groups = sampled(tmp_path / "step", *options)
    assert run.reference is None
    assert 0 < update(run, groups)["kl"] < 0.1  # the mean of 0 and of that after one update


def test_refill_draws_new_prompts_for_flat_groups_and_never_the_same_twice(tmp_path, monkeypatch):
    run = open_run(settings(tmp_path / "refill", "rollout.refill=2"))
    real, rounds = loop.sample_groups, []

    async def flat_at_first(run, prompts):
        groups = await real(run, prompts)
        rounds.append([prompt.id for prompt in prompts])
        for group in groups:
            spread = 0.0 if len(rounds) == 1 else 1.0
            group.rewards = [spread * k for k in range(len(group.rewards))]
        return groups

    monkeypatch.setattr(loop, "sample_groups", flat_at_first)
    groups = asyncio.run(loop.sample_and_score(run))
    assert [len(names) for names in rounds] == [2, 2]  # both were flat, both new ones are not
    names = [group.prompt.id for group in groups]
    assert names == rounds[0] + rounds[1] and len(set(names)) == 4
