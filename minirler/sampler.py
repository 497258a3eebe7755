"""The sampler: continuous batching over a paged KV cache, one ragged step at a time.

    samples = Sampler(model).generate(prompts, SamplingParams(n=8, max_tokens=64))

or, where an environment answers between tokens: `add` rows, `step` until one has something to say,
`park` it, `extend` it with forced tokens, `finish` it.

Token ids only: text, stop strings and tools are the business of `rollout`. What a row draws depends
on its weights, its tokens and (seed, prompt key, step, sample, position), never on what else is in
the batch, on chunking, forks, parking or preemption.

Not here: who runs when (`scheduler`), who owns which block (`blocks`), the mathematics (`ops`,
`attention`).
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from . import ops
from .attention import kv_copy_, kv_write_, packed_attention, paged_attention, paged_rows
from .blocks import BlockPool
from .linear import product
from .noise import noise_key
from .scheduler import Chunk, Scheduler


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0 keep all.

    `max_tokens` counts sampled tokens of a row, `n` is rows a prompt. Log-probs are those of the
    tempered full softmax whatever the filters keep.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "finite and not negative"),
            "top_p": (0 <= self.top_p <= 1, "from 0 to 1"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (is_right, rule) in checks.items():
            if not is_right:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)}")
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        # made once: a step groups its rows by them
        object.__setattr__(self, "draw", (self.temperature, self.top_k, self.top_p, self.min_p))


class Token(NamedTuple):
    """One sampled token of a row; `stop_reason` is "stop", "length" or None (the row goes on)."""

    row: int
    id: int
    logp: float
    stop_reason: str | None


@dataclass(frozen=True)
class Sample:
    """What `generate` returns for one row; ids and log-probs include the sampled stop token."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logps: list[float]
    stop_reason: str


@dataclass
class _Sequence:
    """A row's tokens and what its noise depends on."""

    ids: list[int]
    params: SamplingParams
    key: int
    step: int
    sample: int
    num_sampled: int = 0


class Sampler:
    """Rows of `model` (a `Qwen3`) over a cache of `kv_tokens` tokens, or of at most `kv_bytes`.

    `token_budget` bounds the tokens of a step, `max_rows` the rows that run at once. Only the first
    `num_valid` vocabulary entries (default: all) can be drawn and count in log-probs.
    """

    def __init__(self, model, *, kv_tokens=65536, kv_bytes=0, block_size=16, token_budget=4096,
                 max_rows=256, num_valid=None):
        head, config = model.head_weight(), model.config
        self.token_bytes = (2 * config.num_hidden_layers * config.num_key_value_heads
                            * config.head_dim * head.element_size())  # fmt: skip
        kv_tokens = kv_bytes // self.token_bytes if kv_bytes else kv_tokens
        if kv_tokens < block_size:
            raise ValueError(f"a cache of {kv_tokens} tokens is less than one block of {block_size}"
                             ": raise kv_tokens, or kv_bytes")  # fmt: skip
        self.model = model
        self.num_valid = num_valid or config.vocab_size
        blocks = kv_tokens // block_size
        self.scheduler = Scheduler(BlockPool(blocks, block_size), token_budget, max_rows)
        shape = (config.num_hidden_layers, blocks, 2, config.num_key_value_heads, block_size,
                 config.head_dim)  # fmt: skip
        self.cache = torch.empty(shape, dtype=head.dtype, device=head.device)
        self._sequences: dict[int, _Sequence] = {}
        self._next_row = 0

    def add(self, prompt_ids: list[int], params: SamplingParams, key: str | int,
            step: int = 0) -> list[int]:
        """`params.n` rows that continue a prompt, which is computed once for all of them.

        `key` names the prompt in the noise, `step` the policy step. ValueError for a prompt that
        is empty, holds what is no token of the model, or can never fit.
        """
        ids = [int(i) for i in prompt_ids]
        vocab = self.model.config.vocab_size
        if not ids or not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"prompt {key!r} must be token ids from 0 to {vocab - 1}: {ids[:8]}")
        rows = list(range(self._next_row, self._next_row + params.n))
        self.scheduler.add(rows, len(ids))
        self._next_row += params.n
        noise = noise_key(params.seed, key)
        for number, row in enumerate(rows):
            self._sequences[row] = _Sequence(list(ids), params, noise, step, number)
        return rows

    def park(self, row: int) -> None:
        """Stop sampling a row until it is extended. It keeps its cache while there is room."""
        self.scheduler.park(row)

    def extend(self, row: int, ids: list[int]) -> None:
        """Append forced tokens to a row and let it run (again).

        ValueError when it has sampled all its max_tokens, or would no longer fit the cache.
        """
        sequence = self._sequences[row]
        if sequence.num_sampled >= sequence.params.max_tokens:
            raise ValueError(f"row {row} has sampled all its {sequence.num_sampled} tokens")
        self.scheduler.extend(row, len(ids))
        sequence.ids.extend(int(i) for i in ids)

    def finish(self, row: int) -> None:
        """Forget a row. Rows that stopped must be finished too; until then they are parked."""
        self.scheduler.finish(row)
        del self._sequences[row]

    def room(self, length: int) -> str:
        """How many sequences of `length` tokens the cache holds; ValueError if it is not one."""
        pool, tokens = self.scheduler.pool, self.scheduler.capacity
        size = f"{tokens} tokens, {tokens * self.token_bytes / 2**20:.1f} MiB"
        if not (count := pool.num_blocks // -(-length // pool.block_size)):
            raise ValueError(f"the cache ({size}) is too small for one sequence of {length} tokens:"
                             " raise sampler.kv_bytes")  # fmt: skip
        return f"KV cache: room for {count} sequences of {length} tokens ({size})"

    def num_tokens(self, row: int) -> int:
        """Tokens of a row: prompt, sampled and forced."""
        return len(self._sequences[row].ids)

    _rows = property(lambda self: getattr(self.model, "rows", ()))  # see `linear`

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything (parked rows do not count)."""
        return self.scheduler.has_work

    def weights_changed(self) -> None:
        """Call after the model's weights were filled anew: keys and values of the old ones go.

        Rows that are alive go on with the new weights; their cache is computed again.
        """
        self.scheduler.drop_cache()

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Compute one batch of chunks and sample a token for every row that is complete.

        A token with a stop_reason parks its row. [] when there was nothing to run, or when all that
        ran was a part of a prefill.
        """
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return []
        if plan.copies:
            kv_copy_(self.cache, plan.copies)
        hidden = self._forward(plan.chunks)
        rows, at = self._ready(plan)
        return self._sample(rows, hidden[at]) if rows else []

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Hidden states [N, d] of the chunks' tokens, which also land in the cache."""
        row_ids, starts, ends = zip(*chunks, strict=True)
        tables = [self.scheduler.pool.tables[row] for row in row_ids]
        device, num_blocks, size = self.cache.device, self.cache.shape[1], self.cache.shape[4]
        rows = paged_rows(tables, starts, ends, num_blocks, size, device)
        ids = [t for row, start, end in chunks for t in self._sequences[row].ids[start:end]]

        def attend(layer, q, k, v):
            kv_write_(self.cache[layer], k, v, rows.slots)
            return paged_attention(q, self.cache[layer], rows, None, bool(self._rows))

        return self.model(torch.tensor(ids, device=device), rows.positions, attend)

    def _ready(self, plan) -> tuple[list[int], list[int]]:
        """Rows that sample now, and where in the batch each one's last hidden state stands."""
        last = list(accumulate(chunk.end - chunk.start for chunk in plan.chunks))
        rows, at = [], []
        for index, members in self.scheduler.complete(plan):
            rows += members
            at += [last[index] - 1] * len(members)
        return rows, at

    def _sample(self, rows: list[int], hidden: torch.Tensor) -> list[Token]:
        """One token for each row from its hidden state [B, d]."""
        head = self.model.head_weight()[: self.num_valid]
        logits = product(hidden, head, self._rows)  # [B, V]
        groups: dict[tuple, list[int]] = {}  # rows of like settings share one call
        for i, row in enumerate(rows):
            groups.setdefault(self._sequences[row].params.draw, []).append(i)
        tokens: list[Token | None] = [None] * len(rows)
        for settings, indices in groups.items():
            part = logits if len(groups) == 1 else logits[indices]
            sequences = [self._sequences[rows[i]] for i in indices]
            counters = zip(*((s.key, s.step, s.sample, len(s.ids)) for s in sequences), strict=True)
            ids, logps = ops.sample(part, *counters, *settings)
            for i, token, logp in zip(indices, ids.tolist(), logps.tolist(), strict=True):
                tokens[i] = self._record(rows[i], token, logp)
        return tokens

    def _record(self, row: int, token: int, logp: float) -> Token:
        """Append a sampled token to its row, and park the row where it ends."""
        sequence = self._sequences[row]
        params = sequence.params
        sequence.ids.append(token)
        sequence.num_sampled += 1
        self.scheduler.append(row)
        reason = None
        if token in params.stop_ids:
            reason = "stop"
        elif (sequence.num_sampled >= params.max_tokens
              or len(sequence.ids) > self.scheduler.capacity):  # the row fills the cache alone
            reason = "length"
        if reason:
            self.scheduler.park(row)
        return Token(row, token, logp, reason)

    @torch.inference_mode()
    def prompt_logps(self, prompt_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of all tokens of a prompt but the first, given those before, as of samples."""
        ids = torch.tensor(prompt_ids, device=self.cache.device)  # [N]

        def attend(_, q, k, v):
            return packed_attention(q, k, v, [0, len(ids)])

        hidden = self.model(ids, torch.arange(len(ids), device=ids.device), attend)[:-1]
        everywhere = torch.ones(len(hidden), dtype=torch.bool, device=ids.device)
        settings = ids[1:], everywhere, temperature, self.num_valid, 1024, self._rows
        return ops.token_logps(hidden, self.model.head_weight(), *settings)[0].tolist()

    def generate(self, prompts: list[list[int]], params: SamplingParams, keys=None) -> list[Sample]:
        """Continue every prompt `params.n` times; samples come in prompt, then sample order.

        `keys` (default: the prompts' indices) name the prompts in the noise; the step is 0.
        """
        if self._sequences:
            raise ValueError(f"generate needs an idle sampler: {len(self._sequences)} rows live")
        keys = range(len(prompts)) if keys is None else keys
        samples: dict[int, Sample] = {}
        try:
            for index, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
                for number, row in enumerate(self.add(prompt, params, key)):
                    samples[row] = Sample(index, number, [], [], "length")
            while self.has_work:
                for token in self.step():
                    sample = samples[token.row]
                    sample.token_ids.append(token.id)
                    sample.logps.append(token.logp)
                    if token.stop_reason:
                        samples[token.row] = replace(sample, stop_reason=token.stop_reason)
                        self.finish(token.row)
        finally:
            for row in list(self._sequences):
                self.finish(row)
        return list(samples.values())
