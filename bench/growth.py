"""How a decoding step grows: with the rows of a batch, their context, and the rows that wait.

    python bench/growth.py [--largest 4096] [--folder bench/results]

The tiny shape in bfloat16 with random weights; each sweep changes one thing. Time is the CPU time
of the calling thread, so that a busy machine counts little. `overhead` is the share of a step that
is neither the model nor the drawing of tokens: scheduler, block tables, ids, positions, the record
of what was sampled. Writes growth.png where matplotlib is installed; ends in one JSON line.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from minirler import ops, sampler
from minirler.qwen3 import Qwen3, Qwen3Config

try:
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

STEPS, GROUP, BATCH, CONTEXT = 7, 8, 64, 128
MODEL_S = [0.0]  # spent in the model and in drawing, since it was set to 0


def counted(function):
    """`function`, its time added to MODEL_S."""
    def call(*arguments):
        started = time.thread_time()
        try:
            return function(*arguments)
        finally:
            MODEL_S[0] += time.thread_time() - started

    return call


def measure(model, batch: int, context: int, waiting: int = 0) -> dict:
    """Medians over decoding steps of `batch` rows of `context` tokens, `waiting` ones behind."""
    rows = sampler.Sampler(model, kv_tokens=batch * (context + 64), max_rows=batch,
                           token_budget=8192)  # fmt: skip
    for first in range(0, batch + waiting, GROUP):
        n = min(GROUP, batch + waiting - first) if first >= batch else min(GROUP, batch - first)
        params = sampler.SamplingParams(n=n, max_tokens=10**6)
        rows.add([(first + i) % 8192 for i in range(context)], params, first)
        if first + n == batch:  # these run before the others come
            while len(rows.scheduler.running) < batch:
                rows.step()
    seconds, overhead = [], []
    for _ in range(STEPS):
        MODEL_S[0], started = 0.0, time.thread_time()
        assert len(rows.step()) == batch
        seconds.append(time.thread_time() - started)
        overhead.append(1 - MODEL_S[0] / seconds[-1])
    middle = statistics.median(seconds)
    return {"batch": batch, "context": context, "waiting": waiting, "ms": 1e3 * middle,
            "tokens_per_s": batch / middle, "overhead": statistics.median(overhead)}  # fmt: skip


def sweeps(model, largest: int) -> dict[str, list[dict]]:
    """Rows of the three tables, by the name of what grows."""
    powers = [4**i for i in range(12) if 4**i <= largest]
    return {
        "batch": [measure(model, batch, CONTEXT) for batch in powers if batch <= 1024],
        "context": [measure(model, GROUP, length) for length in powers if 64 <= length],
        "waiting": [measure(model, BATCH, CONTEXT, count) for count in [0, *powers] if count != 1],
    }


def plot(tables: dict[str, list[dict]], path: Path) -> None:
    """Tokens a second and overhead, one panel a sweep."""
    figure, axes = plt.subplots(1, len(tables), figsize=(12, 3.4), layout="constrained")
    for axis, (name, rows) in zip(axes, tables.items(), strict=True):
        at = [max(row[name], 1) for row in rows]
        axis.plot(at, [row["tokens_per_s"] for row in rows], "o-", color="tab:blue")
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="tokens / s (solid)")
        right = axis.twinx()
        right.plot(at, [100 * row["overhead"] for row in rows], "s--", color="tab:orange")
        right.set(ylim=(0, 50), ylabel="overhead, % of a step (dashed)")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=4096)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3(Qwen3Config(8192, 256, 768, 6, 4, 2, 64))
    model.forward, ops.sample = counted(model.forward), counted(ops.sample)
    sampler.product = counted(sampler.product)
    tables = sweeps(model, arguments.largest)
    for name, rows in tables.items():
        print(f"{name:>8}   ms a step   tokens/s   overhead")
        for row in rows:
            print(f"{row[name]:8} {row['ms']:11.1f} {row['tokens_per_s']:10,.0f} "
                  f"{row['overhead']:10.1%}")  # fmt: skip
    if plt:
        plot(tables, arguments.folder / "growth.png")
    print(json.dumps({"bench": "growth", **tables, "threads": torch.get_num_threads(),
                      "load_average": os.getloadavg()[0]}))  # fmt: skip


if __name__ == "__main__":
    main()
