"""The update: the groups of a step to optimiser steps on packed micro-batches.

What is trained (advantages, what is left out), against what (the reference), and how often
(mini-batches, epochs). One mini-batch and one epoch are the default: then every token was sampled
by the weights that it trains, and the ratio is 1.

Not here: the loss (`grpo`), what a rollout is worth (`reward`).
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from . import lora
from .config import Config
from .dist import whole
from .grpo import flat_groups, group_advantages, kl_terms, policy_loss
from .pack import MicroBatch, pack
from .policy import batch_logps, set_lr_
from .records import Group, Rollout
from .run import Run


@dataclass(frozen=True)
class Part:
    """One optimiser step: this rank's micro-batches, the reference's log-probs [N] of each, and
    what all ranks' micro-batches have together."""

    batches: list[MicroBatch]
    ref_logps: list[Tensor | None]
    tokens: int  # that are trained on
    denominator: int  # of the loss


def update(run: Run, groups: list[Group]) -> dict[str, float]:
    """Train on all groups; returns what to log. Nothing to learn from: no step.

    `train.mini_batches` cuts the groups into so many optimiser steps, `train.epochs` repeats them;
    old log-probs stay those of the sampler, so that the ratio and its clip see every change.
    """
    algo, settings = run.config.algo, run.config.train
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    index = [i for i, group in enumerate(groups) for _ in group.rollouts]  # [R]
    with run.timers("update"):
        wanted, metrics = advantages_of(run, groups, rollouts, torch.tensor(index))
        parts = []
        for first, last in borders(len(groups), settings.mini_batches):
            mine = [a if first <= p < last else None for a, p in zip(wanted, index, strict=True)]
            batches = packed(run, rollouts, mine)
            counts = run.ranks.total({
                "trained_tokens": sum(batch.token_count() for batch in batches),
                "packed_tokens": sum(len(batch.ids) for batch in batches),
                "denominator": denominator(run.config, batches),
            })  # fmt: skip
            total = counts.pop("denominator")
            metrics |= {name: metrics[name] + count for name, count in counts.items()}
            if tokens := counts["trained_tokens"]:
                is_used = bool(algo.beta) and algo.kl_in == "loss"
                refs = [reference_logps(run, batch) if is_used else None for batch in batches]
                parts.append(Part(batches, refs, tokens, total))
        rows = [step_(run, part) for _ in range(settings.epochs) for part in parts]
    for name in rows[0] if rows else ():
        metrics[name] = sum(row[name] for row in rows) / len(rows)
    if rows:
        run.skips = run.skips + 1 if all(row["skipped"] for row in rows) else 0
    return metrics


def packed(run: Run, rollouts: list[Rollout], wanted: list[float | None]) -> list[MicroBatch]:
    """This rank's micro-batches, as many as the other ranks have."""
    ranks, limit = run.ranks, run.config.train.micro_batch_tokens
    batches = pack(rollouts, wanted, limit, ranks.rank, ranks.size)
    return [batch.to(ranks.device) for batch in batches]


def advantages_of(run: Run, groups: list[Group], rollouts: list[Rollout], index: Tensor
                  ) -> tuple[list[float | None], dict[str, float]]:
    """The advantage of every rollout [R], None where it is not trained on; and metrics of them."""
    algo = run.config.algo
    rewards = [reward for group in groups for reward in group.rewards]
    scored = torch.tensor([reward is not None for reward in rewards])  # [R]
    values = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64)  # [R]
    metrics = {"trained_tokens": 0, "packed_tokens": 0}
    if algo.beta and algo.kl_in == "reward":
        kl = rollout_kl(run, rollouts, scored)  # [R]
        values -= algo.beta * kl
        metrics["kl_in_reward"] = kl.sum().item() / max(1, int(scored.sum()))
    flat = flat_groups(values, index, scored)  # [R]
    metrics["flat_share"] = (flat & scored).float().mean().item()
    kept = scored & ~flat if algo.flat_groups == "drop" else scored
    if algo.mask_overlong:
        kept = kept & torch.tensor([rollout.stop_reason != "length" for rollout in rollouts])
    advantages = group_advantages(values, index, scored, algo.normalize).tolist()
    wanted = [a if k else None for a, k in zip(advantages, kept.tolist(), strict=True)]
    return wanted, metrics


def borders(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` groups cut into at most `parts` runs of nearly equal length: (first, behind the
    last)."""
    cuts = [count * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def rollout_kl(run: Run, rollouts: list[Rollout], scored: Tensor) -> Tensor:
    """k1 of the policy from the reference, summed over the sampled tokens of a rollout: [R].

    E[reward - beta * k1] = E[reward] - beta KL, and its policy gradient is that of the KL, which k1
    as a loss does not have (`grpo.kl_terms`). Unscored rollouts have 0.
    """
    kl = torch.zeros(len(rollouts), dtype=torch.float64)
    wanted = [0.0 if s else None for s in scored.tolist()]
    for batch in packed(run, rollouts, wanted):
        k1 = kl_terms(reference_logps(run, batch) - batch.old_logps, "k1")  # [N]
        kl.index_add_(0, batch.rollout[batch.mask].cpu(), k1[batch.mask].double().cpu())
    return torch.stack(run.ranks.gather(kl)).sum(0)


@torch.no_grad()
def reference_logps(run: Run, batch: MicroBatch) -> Tensor:
    """[N] float32: of the first policy (`algo.reference` "first") or of today's, before its
    update ("step")."""
    model = run.policy.trained if run.reference is None else run.reference
    is_base = bool(run.config.lora.rank) and run.config.algo.reference == "first"
    with lora.off(model) if is_base else nullcontext():
        return batch_logps(model, batch, *logp_settings(run.config, run.tokenizer.num_valid))[0]


def step_(run: Run, part: Part) -> dict[str, float]:
    """One optimiser step; returns its means. Left out where loss or gradient is not finite."""
    settings = run.config.train
    pairs = zip(part.batches, part.ref_logps, strict=True)
    rows = [backward(run, batch, ref, part) for batch, ref in pairs]
    metrics = run.ranks.total({name: sum(row[name] for row in rows) for name in rows[0]})
    norm = whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), settings.max_grad_norm))
    # A NaN must not reach the weights; a clamped NaN has a finite gradient, so look at both. They
    # are sums over all ranks, the same number on each, and so is what follows from them.
    is_finite = math.isfinite(norm) and math.isfinite(metrics["loss"])
    if is_finite:
        schedule = settings.schedule, run.step, settings.steps, settings.warmup_steps
        set_lr_(run.optimizer, settings.lr, *schedule)
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return metrics | {"grad_norm": norm.item(), "skipped": float(not is_finite)}


def denominator(config: Config, batches: list[MicroBatch]) -> int:
    """What the sum of the loss is divided by, over an optimiser step: this rank's part of it.

    "tokens": the trained tokens; "max_tokens": rollouts times `rollout.max_tokens`, a constant that
    does not favour short or long ones (Dr. GRPO, arXiv 2503.20783). With a ratio of whole rollouts
    their number.
    """
    rollouts = sum(len(batch.cu_seqlens) - 1 for batch in batches if batch.token_count())
    if config.algo.ratio != "token":
        return rollouts
    if config.algo.denominator == "max_tokens":
        return rollouts * config.rollout.max_tokens
    return sum(batch.token_count() for batch in batches)


def backward(run: Run, batch: MicroBatch, ref_logps: Tensor | None, part: Part
             ) -> dict[str, float]:
    """Gradient of one micro-batch of `part`; the numbers are its shares of means over tokens."""
    algo = run.config.algo
    settings = logp_settings(run.config, run.tokenizer.num_valid)
    logps, entropy = batch_logps(run.policy.trained, batch, *settings)  # [N]
    loss, stats = policy_loss(
        logps, batch.old_logps, batch.advantages, batch.mask, denominator=part.denominator,
        clip_low=algo.clip_low, clip_high=algo.clip_high, ratio=algo.ratio, segment=batch.rollout,
        ref_logps=ref_logps, kl=algo.kl, beta=algo.beta if algo.kl_in == "loss" else 0.0,
        truncate=algo.truncate or None,
    )  # fmt: skip
    (loss * run.ranks.size).backward()  # FSDP takes the mean over the ranks
    share = batch.token_count() / part.tokens
    shares = {name: share * value for name, value in stats.items()}
    return {"loss": loss.item(), "entropy": entropy.sum().item() / part.tokens} | shares


def logp_settings(config: Config, num_valid: int) -> tuple:
    """The settings of `batch_logps`, which the policy and its reference share."""
    settings = config.train
    return config.rollout.temperature, num_valid, settings.logits_chunk, settings.deterministic
