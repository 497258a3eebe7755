"""Each operation against plain torch on the same inputs in the same run, and against its limit.

    python bench/ops.py [--share S] [op ...]      op: logprob, decode, head (default: all)

The limit of `logprob` and of decoding is the time to read their bytes once, at the bandwidth of a
sum over as many bytes, measured in the same run; that of the fused head is its matrix products.
`--share 0.1` cuts the number of rows (not V, not the context), for machines that are slow or busy.
Ends in one JSON line; times are medians of a few runs. The naive head needs 4 GiB and, where the
CPU has no bfloat16 instructions, minutes: there its gradient's products are timed on fewer rows and
scaled, and the line says so.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time

import torch
import torch.nn.functional as F

from minirler import attention, kernels, ops

V = 151936  # of Qwen3
GIB = 2**30


def seconds(function, repeats: int = 5) -> float:
    """The median time of some calls, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth(size: int) -> float:
    """Bytes/s of reading `size` bytes once."""
    x = torch.ones(size // 4)
    return size / seconds(x.sum)


def report(name: str, ours: float, peers: dict[str, float], limit: float, what: str) -> None:
    """One line a measurement, times in ms."""
    others = ", ".join(f"{peer} {1e3 * x:.1f} ({x / ours:.1f}x)" for peer, x in peers.items())
    print(f"{name:28} {1e3 * ours:8.1f} ms, {others}, limit {1e3 * limit:.1f} ({what})")


def logprob(share: float) -> dict:
    """Log-prob, entropy and logsumexp of 512 rows, forward and with backward."""
    N, results = max(2, int(512 * share)), {}
    for dtype in (torch.bfloat16, torch.float32):  # the JSON line has the last
        logits = (3 * torch.randn(N, V)).to(dtype).requires_grad_()
        targets = torch.randint(0, V, (N,))

        def naive(logits=logits, targets=targets):
            table = torch.log_softmax(logits.float(), -1)
            return table.gather(1, targets[:, None]).sum(), -(table.exp() * table).sum(-1)

        def ours(reuse=False, logits=logits, targets=targets):
            logps, entropy, _ = ops.logprob(logits, targets, reuse=reuse)
            return logps.sum(), entropy

        def both(forward, outputs=1, logits=logits):
            logits.grad = None
            sum(x.sum() for x in forward()[:outputs]).backward()

        size = logits.numel() * logits.element_size()
        rate = bandwidth(size)
        with torch.no_grad():
            mine, torchs = seconds(ours), seconds(naive, 3)
        torchs_both, with_entropy, apart, mine_both = (
            seconds(lambda f=f, n=n: both(f, n), 3)
            for f, n in ((naive, 1), (naive, 2), (ours, 1), (lambda: ours(reuse=True), 1))
        )  # the last one overwrites the logits
        name = f"logprob {N} x {V} {str(dtype)[6:]}"
        report(f"{name}", mine, {"torch": torchs}, size / rate, f"read {size / 1e6:.0f} MB")
        peers = {"torch": torchs_both, "torch, entropy's gradient too": with_entropy}
        limit = 3 * size / rate, "read twice, write once"
        report("  with backward", apart, peers, *limit)
        report("  with backward, reuse", mine_both, peers, *limit)
        results = {
            "logprob_fwd_speedup": torchs / mine,
            "logprob_fwdbwd_speedup": torchs_both / mine_both,
            "logprob_fwdbwd_speedup_new_memory": torchs_both / apart,
            "logprob_fwdbwd_speedup_over_entropy_gradient": with_entropy / mine_both,
        }
    return results


def decode(share: float) -> dict:
    """One query a row over 1,024 cached tokens: 16 query, 8 kv heads of 128, bf16, blocks of 16."""
    B, H, K, D, context, block = max(1, int(32 * share)), 16, 8, 128, 1024, 16
    n = context // block
    cache = torch.randn(B * n, 2, K, block, D).bfloat16()
    tables = torch.randperm(B * n).view(B, n)
    rows = attention.paged_rows(tables.tolist(), [context - 1] * B, [context] * B, B * n, block)
    q = torch.randn(B, H, D).bfloat16()

    def gathered():
        pages = cache[tables.flatten()].view(B, n, 2, K, block, D).permute(2, 0, 3, 1, 4, 5)
        return pages.reshape(2, B, K, context, D)

    def sdpa(kv):
        return F.scaled_dot_product_attention(q[:, :, None], *kv, enable_gqa=True)

    kv = gathered()
    grouped = q.view(B, K, H // K, D)
    ours = seconds(lambda: attention.paged_attention(q, cache, rows))
    peers = {
        "gather + SDPA": seconds(lambda: sdpa(gathered()), 3),
        "SDPA, contiguous": seconds(lambda: sdpa(kv), 3),
        "SDPA, contiguous, heads grouped by hand": seconds(
            lambda: F.scaled_dot_product_attention(grouped, *kv), 3
        ),
    }
    size = cache.numel() * 2
    report(f"paged decode B {B}", ours, peers, size / bandwidth(size), f"read {size / 1e6:.0f} MB")
    times = list(peers.values())
    return {"paged_decode_speedup": times[0] / ours,
            "paged_vs_contiguous": ours / min(times[1:])}  # fmt: skip


class Peak:
    """The most memory of the process, in bytes, while the block ran, beyond that at its start."""

    def __enter__(self):
        self.start, self.most, self.is_on = resident(), 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while self.is_on:
            self.most = max(self.most, resident() - self.start)
            time.sleep(0.002)

    def __exit__(self, *_):
        self.is_on = False
        self.thread.join()


def resident() -> int:
    """Bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def head(share: float) -> dict:
    """Log-probs through the head [V, 1,024], bf16, of 4,096 tokens: memory and time."""
    N, d = max(64, int(4096 * share)), 1024
    hidden = torch.randn(N, d).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(V, d)).bfloat16().requires_grad_()
    targets, mask = torch.randint(0, V, (N,)), torch.ones(N, dtype=torch.bool)

    def fused(mask):
        hidden.grad = weight.grad = None
        # Fewer chunks, fewer passes over the float32 gradient: 1,536 are 0.44 GiB of logits.
        ops.token_logps(hidden, weight, targets, mask, chunk=1536)[0].sum().backward()

    fused(torch.arange(N) < 8)  # warms up
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    with Peak() as peak:
        fused(mask)
    ours = time.perf_counter() - started
    gradients = weight.numel() * 4 + hidden.numel() * 2  # the float32 sum, and that of hidden
    extra = (peak.most - gradients) / GIB
    is_slow = torch.backends.cpu.get_cpu_capability() != "AVX512"
    naive = naive_head_scaled(hidden, weight, targets) if is_slow else naive_head(
        hidden, weight, targets)  # fmt: skip
    kind = torch.float32 if is_slow else torch.bfloat16
    x, w = torch.randn(min(N, 512), d).to(kind), torch.randn(8192, d).to(kind)
    product = seconds(lambda: x @ w.T, 3) * (N / len(x)) * (V / len(w))
    report(f"fused head {N} x {d} x {V}", ours, {"naive": naive}, 4 * product,
           f"4 {str(kind)[6:]} products")  # fmt: skip
    print(f"  beyond the gradients' {gradients / GIB:.2f} GiB: {extra:.2f} GiB"
          + ", naive scaled from fewer rows and columns" * is_slow)  # fmt: skip
    return {"fused_head_extra_gib": extra, "fused_head_time_ratio": ours / naive,
            "fused_head_naive_is_scaled": is_slow}  # fmt: skip


def naive_head(hidden, weight, targets) -> float:
    """Seconds of forward and backward with all logits in memory."""

    def run():
        hidden.grad = weight.grad = None
        ops.logprob(F.linear(hidden, weight), targets)[0].sum().backward()

    return seconds(run, 1)


def naive_head_scaled(hidden, weight, targets) -> float:
    """The same of 64 rows and 2,048 columns, scaled to all; products are nearly all of it."""
    rows, columns = min(64, len(hidden)), 2048
    part = hidden.detach()[:rows].requires_grad_(), weight.detach()[:columns].requires_grad_()
    return naive_head(*part, targets[:rows] % columns) * len(hidden) / rows * V / columns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*", default=["logprob", "decode", "head"])
    parser.add_argument("--share", type=float, default=1.0)
    arguments = parser.parse_args()
    if kernels.backend() == "torch":
        sys.exit("the kernels are not built, or MINIRLER_OPS is set: there is nothing to compare")
    torch.manual_seed(0)
    line = {"bench": "ops", "threads": torch.get_num_threads(), "share": arguments.share}
    for name in arguments.ops:
        line |= {"logprob": logprob, "decode": decode, "head": head}[name](arguments.share)
    print(json.dumps(line | {"load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
