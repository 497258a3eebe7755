"""Tokens a second of the sampler, beside transformers and vLLM on the same prompts in the same run.

    python bench/sampler.py [WORKLOAD ...] [--rounds 3] [--share 0.5]

Random weights in bfloat16, prompts of 64 to 128 tokens, ragged numbers of new tokens, temperature
1; only tokens that were asked for count, prefill is in the time. Workloads: tiny-32, tiny-64 (13 MB
of weights), 0.6b-8, 0.6b-32 (Qwen3-0.6B's shape), tail (tiny, 32 rows, log-normal lengths whose
longest is 10 times the median), each with its batch.

The engines take turns, each in a process of its own, and medians over the rounds are told. Peers
run where they are installed: transformers by this Python, or another one that
BENCH_TRANSFORMERS_PYTHON names; vLLM (eager) by BENCH_VLLM_PYTHON. The limit is the time to read
the weights once a step and each row's cache once a token at the bandwidth of a sum, measured here.
Ends in one JSON line.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {  # vocabulary, width, inner width, layers, heads, kv heads, head dim
    "tiny": (8192, 256, 768, 6, 4, 2, 64),
    "0.6b": (151936, 1024, 3072, 28, 16, 8, 128),
}
WORKLOADS = {"tiny-32": ("tiny", 32), "tiny-64": ("tiny", 64), "0.6b-8": ("0.6b", 8),
             "0.6b-32": ("0.6b", 32), "tail": ("tiny", 32)}  # fmt: skip
PEERS = {"transformers": "BENCH_TRANSFORMERS_PYTHON", "vllm": "BENCH_VLLM_PYTHON"}


def workload(name: str, share: float) -> tuple[list[list[int]], list[int]]:
    """(prompts, how many tokens each has to get); `share` cuts the latter."""
    shape, batch = WORKLOADS[name]
    draw = random.Random(0)
    prompts = [[draw.randrange(2, SHAPES[shape][0]) for _ in range(draw.randint(64, 128))]
               for _ in range(batch)]  # fmt: skip
    new = [draw.randint(64, 128) for _ in range(batch)]
    if name == "tail":
        new = sorted(draw.lognormvariate(0, 1) for _ in range(batch))
        new = [int(32 * min(10.0, x / new[batch // 2])) + 1 for x in new]
        new[-1] = 320
        draw.shuffle(new)
    return prompts, [max(1, int(n * share)) for n in new]


def ours(shape: str, prompts, new):
    """A function that generates, and the bytes of weights and cache."""
    import torch

    from minirler.qwen3 import Qwen3, Qwen3Config
    from minirler.sampler import Sampler, SamplingParams

    V, d, inner, L, H, K, D = SHAPES[shape]
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3(Qwen3Config(V, d, inner, L, H, K, D))
    tokens = sum(-(-(len(p) + n) // 16) * 16 for p, n in zip(prompts, new, strict=True))
    sampler = Sampler(model, kv_tokens=tokens)

    def generate():
        for i, (prompt, n) in enumerate(zip(prompts, new, strict=True)):
            sampler.add(prompt, SamplingParams(max_tokens=n), i)
        while sampler.has_work:
            for token in sampler.step():
                if token.stop_reason:
                    sampler.finish(token.row)

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return generate, weights + sampler.cache.nbytes


def hugging_face(shape: str):
    """The configuration of the same model."""
    from transformers import Qwen3Config

    V, d, inner, L, H, K, D = SHAPES[shape]
    return Qwen3Config(
        vocab_size=V, hidden_size=d, intermediate_size=inner, num_hidden_layers=L,
        num_attention_heads=H, num_key_value_heads=K, head_dim=D, tie_word_embeddings=True,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def transformers(shape: str, prompts, new):
    """`generate` on one batch, padded on the left; finished rows go on being computed."""
    import torch
    from transformers import Qwen3ForCausalLM, StoppingCriteria

    model = Qwen3ForCausalLM(hugging_face(shape)).to(torch.bfloat16).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    ends = torch.tensor(new) + width

    class Lengths(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return ids.shape[1] >= ends

    def generate():
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max(new), do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
                stopping_criteria=[Lengths()],
            )  # fmt: skip

    return generate, 0


def vllm(shape: str, prompts, new):
    """vLLM's CPU backend, eager, dummy weights, a pool of 1 GiB."""
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                   "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(int(threads)))),
                   "HF_HUB_OFFLINE": "1"}  # fmt: skip
    config = hugging_face(shape)
    config.architectures = ["Qwen3ForCausalLM"]
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    from vllm import LLM, SamplingParams

    llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
              max_model_len=1024, max_num_seqs=len(prompts), enforce_eager=True,
              enable_prefix_caching=False, disable_log_stats=True, seed=0)  # fmt: skip
    params = [SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True,
                             detokenize=False) for n in new]  # fmt: skip

    def generate():
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    return generate, 0


def child(engine: str, name: str, share: float) -> None:
    """One engine, one workload: warms up, then prints seconds and memory as JSON."""
    import torch

    prompts, new = workload(name, share)
    before = resident("VmRSS")
    generate, size = globals()[engine](WORKLOADS[name][0], prompts, new)
    generate()
    started = time.perf_counter()
    generate()
    seconds = time.perf_counter() - started
    block = torch.ones(256 << 20, dtype=torch.int8) if engine == "ours" else None
    line = {"seconds": seconds, "tokens": sum(new), "expected": size,
            "grown": resident("VmHWM") - before}  # fmt: skip
    if block is not None:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            block.view(torch.float32).sum()
            times.append(time.perf_counter() - start)
        line["bandwidth"] = len(block) / min(times)
    print("RESULT " + json.dumps(line), flush=True)


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def run(engine: str, python: str, name: str, share: float) -> dict:
    """One child's result."""
    command = [python, __file__, name, "--child", engine, "--share", str(share)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{engine} failed on {name}:\n{done.stderr[-2000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def limit_s(name: str, share: float, bandwidth: float) -> float:
    """Seconds to read the weights once a step, and the cache of each row once a token."""
    shape, _ = WORKLOADS[name]
    V, d, inner, L, H, K, D = SHAPES[shape]
    weights = 2 * (V * d + L * (d * D * (2 * H + 2 * K) + 3 * d * inner))
    prompts, new = workload(name, share)
    rows = zip(prompts, new, strict=True)
    cached = sum(sum(range(len(p), len(p) + n)) for p, n in rows) * 4 * L * K * D
    return (max(new) * weights + cached) / bandwidth


def engines() -> dict[str, str]:
    """Which engines run, and by which Python."""
    found = {"ours": sys.executable}
    for name, variable in PEERS.items():
        if os.environ.get(variable):
            found[name] = os.environ[variable]
        elif importlib.util.find_spec(name):
            found[name] = sys.executable
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.workloads[0], arguments.share)
    pythons, line = engines(), {"bench": "sampler", "share": arguments.share}
    for missing in PEERS.keys() - pythons.keys():
        print(f"{missing} is not installed: left out")
    for name in arguments.workloads:
        results: dict[str, list[dict]] = {engine: [] for engine in pythons}
        for _ in range(arguments.rounds):
            for engine, python in pythons.items():
                results[engine].append(run(engine, python, name, arguments.share))
        rates = {engine: statistics.median(r["tokens"] / r["seconds"] for r in rows)
                 for engine, rows in results.items()}  # fmt: skip
        mine = results["ours"]
        limit = limit_s(name, arguments.share, max(r["bandwidth"] for r in mine))
        of_limit = limit * rates["ours"] / mine[0]["tokens"]
        memory = statistics.median(r["grown"] / r["expected"] for r in mine)
        peers = ", ".join(f"{engine} {rate:,.1f} ({rates['ours'] / rate:.2f}x)"
                          for engine, rate in rates.items() if engine != "ours")  # fmt: skip
        print(f"{name:8} {rates['ours']:8,.1f} tokens/s, {of_limit:.0%} of the bandwidth's; "
              f"{peers or 'no peer'}; memory {memory:.2f}x of weights + cache", flush=True)
        line[name] = {"tokens_per_s": rates, "of_bandwidth": of_limit, "memory": memory}
    print(json.dumps(line | {"load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
