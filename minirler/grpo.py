"""Group-relative policy optimisation: advantages, clipped loss, KL terms; pure tensor functions.

Not here: rollouts, packing, the optimiser, the model. The denominator of the loss is an argument:
it is counted once over the whole step (all micro-batches, all ranks), so that the sum of the losses
of the parts is the loss of the whole, however it is cut. Entropy is a metric and comes with the
log-probs (`ops`). Left out: the value function, the entropy bonus and the length penalty.

Shape letters: R rollouts, N packed tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops

FLAT_SPREAD = 1e-6  # rewards of a group that differ by no more are equal but for rounding
STD_EPSILON = 1e-8
MAX_LOG_RATIO = 20.0  # e^20 is 4.9e8: far beyond any use, far from float32's overflow


def group_advantages(
    rewards: Tensor | Sequence[float],
    group: Tensor | Sequence[int],
    scored: Tensor | Sequence[bool] | None = None,
    normalize: str = "std",
) -> Tensor:
    """Advantages [R] float32: (r - mean) / (std + 1e-8) over the scored rollouts of each group.

    rewards [R]; group [R], any ids in any order; scored [R] bool, default all. normalize: "std"
    (population), "std1" (sample), "none" (centred only). Exactly 0 for unscored rollouts, for
    groups of one, and for flat groups (max - min <= 1e-6: the std of equal floats is rounding
    noise, and noise divided by noise is an advantage of order 1). Computed in float64. DR-Rubric,
    equation 5; DR Tulu trains with the same. ValueError: unequal lengths, unknown `normalize`, a
    scored reward that is not finite.
    """
    if normalize not in ("std", "std1", "none"):
        raise ValueError(f"normalize {normalize!r} is unknown: use 'std', 'std1' or 'none'")
    rewards, scored = _rewards_and_scored(rewards, group, scored)
    rows = _rows_by_group(group)
    order = torch.cat([torch.empty(0, dtype=torch.int64), *rows])  # groups side by side
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    sizes = rewards[order], offsets, scored[order]
    advantages = torch.empty(len(rewards))
    advantages[order] = ops.group_advantages(*sizes, normalize, STD_EPSILON, FLAT_SPREAD)
    return advantages


def flat_groups(
    rewards: Tensor | Sequence[float],
    group: Tensor | Sequence[int],
    scored: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """Bool [R]: is the rollout's group flat (no spread, one scored rollout, or none at all)?

    Arguments and errors as in `group_advantages`. Such groups have no policy gradient.
    """
    rewards, scored = _rewards_and_scored(rewards, group, scored)
    flat = torch.zeros_like(scored)
    for rows in _rows_by_group(group):
        flat[rows] = _is_flat(rewards[rows[scored[rows]]])
    return flat


def policy_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *,
    denominator: float | Tensor, clip_low: float = 0.2, clip_high: float = 0.2,
    ref_logps: Tensor | None = None, kl: str = "k3", beta: float = 0.0,
    ratio: str = "token", segment: Tensor | None = None, truncate: float | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Clipped policy loss plus beta * KL: a sum over trained tokens / `denominator`, 0-dim float32.

        sum of [-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL] / denominator,
        r = exp(logps - old_logps)

    (PPO, arXiv 1707.06347; GRPO, 2402.03300; GSPO, 2507.18071; DR-Rubric, 2606.01091; k1, k2, k3:
    Schulman's note on approximating KL.) With one update a step r is 1 but for rounding, and the
    clip acts only where the sampler differs from the trainer.

    logps (with gradient), old_logps (the sampler's), advantages, ref_logps: float [N]. mask: bool
    [N], True where the token was sampled and counts; what stands elsewhere, NaN included, reaches
    neither loss nor gradient. denominator: the step's trained tokens; 0 gives 0, gradients too.
    ratio: "token"; "sequence", the product over a rollout (DR-Rubric, equation 7); "gspo", its
    geometric mean. The last two need segment [N], each token's rollout (advantages are constant in
    one), average the KL over a rollout (equation 6) and count rollouts in `denominator`.
    truncate: truncated importance sampling instead of clipping, with the gradient of
    min(ratio, truncate) * A * logp: for stale rollouts, whose tokens clipping would silence.
    Returns also stats, floats, means over this call (0 over nothing): ratio_mean, clip_low_frac,
    clip_high_frac (of ratios), kl, mismatch_kl (of tokens; k3 of sampler against trainer).
    ValueError: shapes differ, mask not bool, unknown names, something missing, denominator < 0.
    """
    _check_names(kl, ratio, beta, denominator, ref_logps, segment)
    _check_shapes(mask, logps, old_logps, advantages, ref_logps, segment)
    if not denominator:
        mask = torch.zeros_like(mask)
    # Selecting comes first: 0 * NaN is NaN in a backward pass, what is left out has no part in it.
    logps, old_logps, advantages = (x[mask].float() for x in (logps, old_logps, advantages))
    log_ratio = logps - old_logps  # [n], n trained tokens
    penalty = torch.zeros_like(logps)
    if ref_logps is not None:
        penalty = kl_terms(ref_logps[mask].float() - logps, kl)
    per_token = {"kl": penalty, "mismatch_kl": kl_terms(log_ratio.detach(), "k3")}
    if ratio != "token":  # from here on [rollouts]
        rows = _Rollouts(segment[mask])
        log_ratio = rows.sum(log_ratio) if ratio == "sequence" else rows.mean(log_ratio)
        penalty, advantages = rows.mean(penalty), rows.any_of(advantages)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    terms = _surrogate(log_ratio, advantages, clip_low, clip_high, truncate)
    if beta:
        terms = terms + beta * penalty
    loss = terms.sum() / (denominator if denominator else 1.0)
    return loss, _stats(log_ratio, advantages, clip_low, clip_high, per_token)


def kl_terms(d: Tensor, form: str) -> Tensor:
    """Estimates of the KL of policy p from reference q, from d = log q - log p at samples of p.

    "k1" -d, "k2" d^2/2, "k3" expm1(d) - d, never negative. As a loss k1 cannot pull the policy
    back: its gradient does not contain the reference (it is here because DR-Rubric, equation 6,
    prints it). k2 has the gradient of the reverse KL. In k3, expm1, because exp(d) - 1 - d cancels
    to 0 for small d; and the clamp before it, because after it the gradient would be 0 * inf.
    """
    if form == "k1":
        return -d
    if form == "k2":
        return d.square() / 2
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def _surrogate(log_ratio, advantages, clip_low, clip_high, truncate) -> Tensor:
    """The terms to minimise; one-sided: a ratio is clipped only where that lowers the gain."""
    ratio = log_ratio.exp()
    if truncate is not None:
        return -ratio.detach().clamp(max=truncate) * advantages * log_ratio
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@torch.no_grad()
def _stats(log_ratio, advantages, clip_low, clip_high, per_token) -> dict[str, float]:
    """Floats by one transfer for all, because each is a synchronisation on a GPU."""
    ratio = log_ratio.exp()
    means = {
        "ratio_mean": ratio,
        "clip_low_frac": (ratio < 1 - clip_low) & (advantages < 0),
        "clip_high_frac": (ratio > 1 + clip_high) & (advantages > 0),
        **per_token,
    }
    values = torch.stack([x.double().sum() / max(x.numel(), 1) for x in means.values()]).tolist()
    return dict(zip(means, values, strict=True))


class _Rollouts:
    """Sums and means over the tokens of each rollout: [n] -> [rollouts with a sampled token]."""

    def __init__(self, rollout: Tensor):
        ids, self.row = rollout.unique(return_inverse=True)
        self.size = torch.bincount(self.row, minlength=len(ids))

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self.size)).index_add(0, self.row, x)

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.size

    def any_of(self, x: Tensor) -> Tensor:
        """One of the rollout's values, exact where they are all equal, as a mean would not be."""
        out = x.new_zeros(len(self.size))
        out[self.row] = x
        return out


def _check_names(kl, ratio, beta, denominator, ref_logps, segment) -> None:
    if kl not in ("k1", "k2", "k3"):
        raise ValueError(f"kl {kl!r} is unknown: use 'k1', 'k2' or 'k3'")
    if ratio not in ("token", "sequence", "gspo"):
        raise ValueError(f"ratio {ratio!r} is unknown: use 'token', 'sequence' or 'gspo'")
    if ratio != "token" and segment is None:
        raise ValueError(f"ratio {ratio!r} needs segment, the index of the rollout of each token")
    if beta and ref_logps is None:
        raise ValueError(f"beta {beta} needs ref_logps, the log-probs of the reference")
    if denominator < 0:
        raise ValueError(f"denominator is {denominator}: it is a count, at least 0")


def _check_shapes(mask: Tensor, *tensors: Tensor | None) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has to be bool, not {mask.dtype}")
    shapes = [list(x.shape) for x in tensors if x is not None]
    if any(shape != list(mask.shape) for shape in shapes):
        raise ValueError(f"the tensors are {shapes} but the mask is {list(mask.shape)}")


def _rewards_and_scored(rewards, group, scored) -> tuple[Tensor, Tensor]:
    """Float64 [R] with 0 at unscored places, and bool [R]."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    scored = [True] * len(rewards) if scored is None else scored
    scored = torch.as_tensor(scored, dtype=torch.bool, device=rewards.device)
    if not len(rewards) == len(group) == len(scored):
        raise ValueError(
            f"{len(rewards)} rewards, {len(group)} group ids and {len(scored)} scored flags differ"
        )
    if not rewards[scored].isfinite().all():
        row = int((scored & ~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward {row} is scored but is {rewards[row].item()}")
    return torch.where(scored, rewards, 0.0), scored


def _rows_by_group(group: Tensor | Sequence[int]) -> list[Tensor]:
    rows: dict = {}
    for row, name in enumerate(group.tolist() if isinstance(group, Tensor) else group):
        rows.setdefault(name, []).append(row)
    return [torch.tensor(r) for r in rows.values()]


def _is_flat(values: Tensor) -> bool:
    return len(values) < 2 or bool(values.max() - values.min() <= FLAT_SPREAD)
