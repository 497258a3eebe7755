"""Noise that is a function: Gumbel noise from a counter, the same whatever the batch or the rank.

A token's draw depends on (seed, prompt key, step, sample, position, token) and on nothing else. The
kernels make the same 32-bit words where they sample; what stands here is their specification, and
what filtered sampling uses.

Not here: the choice of a token (`ops`).
"""

import hashlib

import numpy as np
import torch

PHILOX_ROUNDS = 10
NOISE_TILE = 1 << 15  # counters at once: the temporaries stay in the processor's cache


def noise_key(seed, prompt_key):
    """The 64-bit key of a prompt's noise: a hash of the seed and the prompt's key (str or int)."""
    name = prompt_key if isinstance(prompt_key, str) else int(prompt_key)  # 1 and "1" differ
    digest = hashlib.blake2b(repr((int(seed), name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def philox4x32(counter, key):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Four counter and two key words, uint64 arrays below 2**32 that broadcast together; returns four
    such arrays. The 64-bit type holds the full product of two words.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> shift) ^ (c1 ^ k0), p1 & low
        c2, c3 = (p0 >> shift) ^ (c3 ^ k1), p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def gumbel_noise(keys, steps, samples, positions, V):
    """Standard Gumbel noise, float32 [B, V]: row i depends on the i-th entries and nothing else.

    keys [B] from `noise_key`; steps, samples, positions [B] non-negative, below 2**32. The counter
    of token v is (step, sample, position, v // 4), its word v % 4.
    """
    columns = (keys, steps, samples, positions)
    keys, *words = (np.asarray(x, dtype=np.uint64)[:, None] for x in columns)
    low, high = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
    fours = np.arange(-(-V // 4), dtype=np.uint64)[None]  # [1, V/4]
    noise = torch.empty(len(keys), V)
    rows = max(1, NOISE_TILE // max(1, fours.size))
    for i in range(0, len(keys), rows):
        part = slice(i, i + rows)
        out = philox4x32((*(w[part] for w in words), fours), (low[part], high[part]))
        draws = np.stack(np.broadcast_arrays(*out), axis=-1).astype(np.float64)  # [rows, V/4, 4]
        uniform = torch.from_numpy(draws).flatten(1).add_(0.5).mul_(2.0**-32)  # never 0, never 1
        # the first log in float64: float32 has no numbers this close to 1
        noise[part] = uniform.log_().neg_().float().log_().neg_()[:, :V]
    return noise
