"""Where a step of the default run spends its time, and what memory it peaks at.

    python bench/loop.py [steps]        (default 5 after one warm-up)

Runs the default configuration in a temporary folder. The limit that the update is held against is
measured in the same process: the same weights' matrix products alone, forward and backward. Ends in
one JSON line.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from minirler import train as loop
from minirler.config import load_config
from minirler.log import read_metrics

PARTS = ("sampling", "tools", "judge", "update")


def matmul_tokens_per_s(model, tokens: int = 8192) -> float:
    """Tokens/s that forward and backward would reach if they were the weights' products alone."""
    shapes = [p.shape for p in model.parameters() if p.dim() == 2]
    pairs = [(torch.randn(tokens, s[1]), torch.randn(s)) for s in shapes]
    times = []
    for _ in range(4):
        started = time.perf_counter()
        for x, w in pairs:
            y = x @ w.T  # [tokens, out]
            y @ w, y.T @ x  # gradients of input and weight
        times.append(time.perf_counter() - started)
    return tokens / statistics.median(times[1:])


def main() -> None:
    """Command line."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ["configs/almanac.toml", f"run.dir={folder}/run", f"train.steps={steps + 1}"]
        )
        torch.set_num_threads(config.run.threads or torch.get_num_threads())
        run = loop.open_run(config)
        run.held_out.clear()  # steps only, no evaluations
        loop.asyncio.run(loop.train(run))
        rows = [r for r in read_metrics(Path(folder) / "run/metrics.jsonl") if "reward" in r][1:]
        limit = matmul_tokens_per_s(run.model)
    middle = {
        key: statistics.median(row.get(key) or 0.0 for row in rows)
        for key in ("seconds", "tokens_per_s", *(f"seconds/{part}" for part in PARTS))
    }
    packed = statistics.median(row["packed_tokens"] for row in rows)
    update_rate = packed / middle["seconds/update"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for part in PARTS:
        seconds = middle[f"seconds/{part}"]
        print(f"{part:10} {seconds:7.2f} s a step  {seconds / middle['seconds']:6.1%}")
    print(f"{'whole':10} {middle['seconds']:7.2f} s a step, {middle['tokens_per_s']:,.0f} tokens/s")
    print(
        f"update     {update_rate:,.0f} packed tokens/s, {update_rate / limit:.0%} of the matrix "
        f"products' {limit:,.0f}"
    )
    print(f"peak RSS   {peak:,.0f} MiB; load average {os.getloadavg()[0]:.1f}")
    print(
        json.dumps(
            {
                "bench": "loop",
                "steps": len(rows),
                "seconds": middle["seconds"],
                "parts": {part: middle[f"seconds/{part}"] for part in PARTS},
                "tokens_per_s": middle["tokens_per_s"],
                "update_tokens_per_s": update_rate,
                "update_of_matmul_limit": update_rate / limit,
                "peak_rss_mib": peak,
                "load_average": os.getloadavg()[0],
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
