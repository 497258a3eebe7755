"""The update alone: tokens/s, its share of what matrix products reach, weight sync, peak memory.

    python bench/train.py [--shape tiny | 0.6b] [--dtype float32 | bfloat16] [--tokens N]
    torchrun --nproc-per-node 2 bench/train.py ...          # the same in shards

Random weights of the shape, sequences of 256 tokens of which the last 128 are trained on. The model
FLOPs are those of the products of forward and backward (3 times the forward), attention counted,
the head for trained tokens alone; what is computed twice counts once. The limit is the best of some
large products in the same dtype in the same run, on all ranks at once. Ends in one JSON line.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from minirler.config import DistConfig
from minirler.dist import Policy, empty_model, open_policy
from minirler.grpo import policy_loss
from minirler.pack import MicroBatch, pack
from minirler.policy import batch_logps
from minirler.qwen3 import Qwen3Config
from minirler.ranks import Ranks, join
from minirler.records import Rollout, Segment
from minirler.weights import DTYPES, config_json, write_json

SHAPES = {  # vocabulary, width, inner width, layers, heads, kv heads, head dim
    "tiny": (8192, 256, 768, 6, 4, 2, 64),
    "0.6b": (151936, 1024, 3072, 28, 16, 8, 128),
}
LENGTH = 256  # tokens of a sequence; half of them are trained on


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=8192, help="of one update, over all ranks")
    parser.add_argument("--micro", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint-activations", action="store_true")
    given, ranks = parser.parse_args(), join()
    policy = random_policy(given.shape, given.dtype, ranks)
    for layer in policy.trained.model.layers:
        layer.is_checkpointed = given.checkpoint_activations
    batches = batches_of(given.tokens, given.micro, policy.copy.config.vocab_size, ranks)
    optimizer = torch.optim.AdamW(policy.masters.parameters(), lr=1e-6)
    parts = [measure(policy, optimizer, batches, ranks) for _ in range(given.repeats + 1)][1:]
    seconds = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    peak = sum(ranks.gather(matrix_flops(given.dtype, ranks.device)))
    show(given, ranks, seconds, flops(policy.copy.config, given.tokens), peak)
    ranks.leave()


def random_policy(shape: str, dtype: str, ranks: Ranks) -> Policy:
    """A policy with random weights, in shards where there are several ranks."""
    vocab, width, inner, layers, heads, kv_heads, head_dim = SHAPES[shape]
    config = Qwen3Config(vocab, width, inner, layers, heads, kv_heads, head_dim)
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", config_json(config, "float32"))
        masters = empty_model(folder, "float32", dtype, DistConfig(), ranks)
        masters.reset_parameters()
        return open_policy(masters, folder, dtype, ranks)


def batches_of(tokens: int, micro: int, vocab: int, ranks: Ranks) -> list[MicroBatch]:
    """This rank's micro-batches of an update."""
    half, random = LENGTH // 2, torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(tokens // LENGTH):
        ids = torch.randint(0, vocab, (LENGTH,), generator=random).tolist()
        prompt = Segment(ids[:half], [0.0] * half, False, 0)
        rollouts.append(Rollout("p", i, [prompt, Segment(ids[half:], [-9.0] * half, True, 0)]))
    advantages = [(-1.0) ** i for i in range(len(rollouts))]
    parts = pack(rollouts, advantages, micro, ranks.rank, ranks.size)
    return [batch.to(ranks.device) for batch in parts]


def measure(policy: Policy, optimizer, batches: list[MicroBatch], ranks: Ranks) -> dict:
    """Seconds of one update, of the optimiser's step in it, and of the sync after it."""
    total = ranks.total({"tokens": sum(batch.token_count() for batch in batches)})["tokens"]
    begin = now(ranks)
    for batch in batches:
        logps, _ = batch_logps(policy.trained, batch, deterministic=False)
        loss, _ = policy_loss(
            logps, batch.old_logps, batch.advantages, batch.mask, denominator=total
        )
        (loss * ranks.size).backward()
    torch.nn.utils.clip_grad_norm_(policy.masters.parameters(), 1.0)
    stepping = now(ranks)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    syncing = now(ranks)
    policy.sync_()
    end = now(ranks)
    return {"update": syncing - begin, "optimizer": syncing - stepping, "sync": end - syncing}


def now(ranks: Ranks) -> float:
    """The time at which all ranks have done what they were given."""
    if ranks.device != "cpu":
        torch.cuda.synchronize()
    ranks.barrier()
    return time.perf_counter()


def flops(config: Qwen3Config, tokens: int) -> float:
    """Of the products of an update's forward and backward."""
    heads, kv_heads, dim = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim,
    )  # fmt: skip
    width = config.hidden_size
    layer = width * dim * (2 * heads + 2 * kv_heads) + 3 * width * config.intermediate_size
    attention = 2 * heads * dim * LENGTH / 2  # multiply-adds a token: scores and values, causal
    head = width * config.vocab_size / 2  # for one token in two
    return 3 * 2 * tokens * (config.num_hidden_layers * (layer + attention) + head)


def matrix_flops(dtype: str, device: str) -> float:
    """FLOP/s of the best of some square products."""
    size = 2048 if device == "cpu" else 8192
    x = torch.randn(size, size, device=device).to(DTYPES[dtype])
    times = []
    for _ in range(6):
        started = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def show(given: argparse.Namespace, ranks: Ranks, seconds: dict, work: float, peak: float) -> None:
    """Print what was measured, on rank 0."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = max(ranks.gather(own if ranks.device == "cpu" else torch.cuda.max_memory_allocated()))
    if not ranks.is_first:
        return
    rate, share = given.tokens / seconds["update"], work / seconds["update"] / peak
    print(f"update     {seconds['update']:7.2f} s, {rate:,.0f} tokens/s; optimiser"
          f" {seconds['optimizer']:.3f} s of it; sync {seconds['sync']:.3f} s")  # fmt: skip
    print(f"limit      {share:.0%} of {peak / 1e9:,.0f} GFLOP/s of products alone")
    print(f"peak       {memory / 2**20:,.0f} MiB a rank; load average {os.getloadavg()[0]:.1f}")
    print(json.dumps({
        "bench": "train", "shape": given.shape, "dtype": given.dtype, "ranks": ranks.size,
        "device": ranks.device, "tokens": given.tokens, "seconds": seconds, "tokens_per_s": rate,
        "model_flops_share": share, "matrix_flops": peak, "peak_bytes": memory,
        "checkpoint_activations": given.checkpoint_activations,
        "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0],
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
