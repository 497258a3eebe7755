"""Rollouts to packed micro-batches: whole sequences, end to end, under a token budget.

A micro-batch is one row of N tokens without padding. `cu_seqlens` says where its sequences begin,
and attention stays within them; positions restart at 0. Ids are the ids that were sampled: no text
is encoded here, nothing is appended, and what is trained on comes from the segments' origin, never
from the value of an id (an end-of-sequence id in the middle is a token like any other).

Not here: advantages (`grpo`). A sequence is never split: what does not fit is an error.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .records import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """S sequences in a row, N tokens in all. Place i of every [N] tensor predicts `targets[i]`."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, from 0 in each sequence
    cu_seqlens: list[int]  # [S + 1], from 0 to N; on the host, because it steers loops and launches
    targets: Tensor  # [N] int64, the next token of the sequence; 0 at its last position
    mask: Tensor  # [N] bool, is the target a token that the policy sampled?
    old_logps: Tensor  # [N] float32, the sampler's log-prob of the target; 0 where mask is False
    advantages: Tensor  # [N] float32, of the rollout
    rollout: Tensor  # [N] int64, index of the rollout in the list that was packed

    def token_count(self) -> int:
        """Tokens that are trained on: the step's sum of these is the denominator of the loss."""
        return int(self.mask.sum())

    def to(self, device: str | torch.device) -> "MicroBatch":
        """The same micro-batch on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})


def pack(
    rollouts: list[Rollout], advantages: list[float | None], max_tokens: int,
    rank: int = 0, size: int = 1,
) -> list[MicroBatch]:
    """Pack the rollouts whose advantage is not None (None: unscored or dropped) under `max_tokens`.

    Of `size` ranks that are given the same rollouts, each gets its own micro-batches, as many as
    the others, so that their collectives stay in step: one that is short of them gets an idle one,
    of one token that is not trained on.

    Deterministic in the order of the rollouts, balanced by tokens, in as few micro-batches as the
    greedy rule finds. Rollouts without a sampled token are left out: they have nothing to train.
    ValueError: a rollout longer than `max_tokens`; one that starts with a sampled token, whose
    log-prob nothing predicts; a segment whose ids and logps differ in number; unequal lengths.
    """
    if len(advantages) != len(rollouts):
        raise ValueError(f"{len(advantages)} advantages do not match {len(rollouts)} rollouts")
    kept = [i for i, a in enumerate(advantages) if a is not None and rollouts[i].num_sampled()]
    lengths = {i: _checked_length(rollouts[i], max_tokens) for i in kept}
    return [
        _micro_batch([(i, rollouts[i], advantages[i]) for i in part]) if part else _idle()
        for part in partition(lengths, max_tokens, size)[rank::size]
    ]


def partition(lengths: dict[int, int], max_tokens: int, size: int = 1) -> list[list[int]]:
    """Split keys into balanced parts of at most `max_tokens` each (no single length may be above).

    Longest first, each into the emptiest part; `size` parts more until that fits, so that their
    number is a multiple of it. Within a part and between parts, keys ascend.
    """
    order = sorted(lengths, key=lambda i: (-lengths[i], i))
    num_parts = -(-sum(lengths.values()) // max_tokens)
    num_parts = -(-num_parts // size) * size
    while True:
        parts: list[list[int]] = [[] for _ in range(num_parts)]
        loads = [0] * num_parts
        for i in order:
            emptiest = loads.index(min(loads))
            parts[emptiest].append(i)
            loads[emptiest] += lengths[i]
        if max(loads, default=0) <= max_tokens:
            return sorted(sorted(part) for part in parts)
        num_parts += size


def _checked_length(rollout: Rollout, max_tokens: int) -> int:
    name = f"rollout {rollout.prompt_id}/{rollout.sample}"
    for k, s in enumerate(rollout.segments):
        if len(s.ids) != len(s.logps):
            raise ValueError(f"{name}: segment {k} has {len(s.ids)} ids but {len(s.logps)} logps")
    if next(s for s in rollout.segments if s.ids).sampled:
        raise ValueError(f"{name} starts with a sampled token: it needs a prompt")
    length = sum(len(s.ids) for s in rollout.segments)
    if length > max_tokens:
        raise ValueError(
            f"{name} has {length} tokens but a micro-batch only {max_tokens}: "
            "raise train.micro_batch_tokens or lower rollout.max_tokens"
        )
    return length


def _idle() -> MicroBatch:
    """One token that counts for nothing."""
    integer, flag, number = torch.tensor([0]), torch.tensor([False]), torch.tensor([0.0])
    return MicroBatch(integer, integer, [0, 1], integer, flag, number, number, integer)


def _micro_batch(members: list[tuple[int, Rollout, float]]) -> MicroBatch:
    ids, positions, targets, mask, logps, advantages, owner = ([] for _ in range(7))
    cu_seqlens = [0]
    for index, rollout, advantage in members:
        sequence = [i for s in rollout.segments for i in s.ids]
        length = len(sequence)
        ids += sequence
        positions += range(length)
        # Position i predicts token i + 1, so all that belongs to a token moves to the place before.
        targets += sequence[1:] + [0]
        mask += [s.sampled for s in rollout.segments for _ in s.ids][1:] + [False]
        logps += [x if s.sampled else 0.0 for s in rollout.segments for x in s.logps][1:] + [0.0]
        advantages += [advantage] * length
        owner += [index] * length
        cu_seqlens.append(len(ids))
    integers = (torch.tensor(x, dtype=torch.int64) for x in (ids, positions, targets, owner))
    ids_t, positions_t, targets_t, index_t = integers
    return MicroBatch(
        ids=ids_t,
        positions=positions_t,
        cu_seqlens=cu_seqlens,
        targets=targets_t,
        mask=torch.tensor(mask, dtype=torch.bool),
        old_logps=torch.tensor(logps, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        rollout=index_t,
    )
