"""Rollouts whose tools and judge take their time: the engine, against its two limits and a rival.

    python bench/overlap.py [--rollouts 64] [--tokens 16] [--calls 3] [--rounds 3]

Each rollout writes `--tokens` tokens a turn and calls a tool of 0.1 to 2 s after all but the last;
each ends in a judge of 0.5 s. What is written is scripted, the forward passes are real (tiny shape,
bfloat16, random weights). The limits: the same tokens with tools and judges that take no time, and
the slowest chain, a rollout's own tools, judge and tokens with the machine to itself. The rival is
the order of batches: everybody decodes, then every tool runs at once, then everybody decodes on,
and all are judged at the end. Medians; ends in one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time

import torch

from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.records import Prompt
from minirler.rollout import RolloutEngine
from minirler.sampler import Sampler, SamplingParams
from minirler.search import Hit
from minirler.tools import Executor

STOP, JUDGE_S, GROUP, PROMPT = 256, 0.5, 8, 96
CALL = b'<call_tool name="search">q</call_tool>'
RESULT = Hit("d", "A page", "It says so. " * 12)


class Bytes:
    """A tokenizer whose ids are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode_untrusted(self, text: str) -> list[int]:
        return list(text.encode())


class Scripted(Sampler):
    """Computes all that a sampler does, then says what its script has next."""

    def __init__(self, model, scripts: list[list[int]]):
        super().__init__(model, kv_tokens=len(scripts) * 2048)
        self.scripts = [iter(script) for script in scripts]  # by row

    def _record(self, row: int, token: int, logp: float):
        return super()._record(row, next(self.scripts[row]), logp)


def scripts(arguments, draw: random.Random) -> list[list[int]]:
    """What each rollout writes: turns of half to one and a half times `--tokens`."""
    def turn(end) -> list[int]:
        return [120] * int(arguments.tokens * draw.uniform(0.5, 1.5)) + list(end)

    return [[i for _ in range(arguments.calls) for i in turn(CALL)] + turn([STOP])
            for _ in range(arguments.rollouts)]  # fmt: skip


def waits(arguments, draw: random.Random) -> list[list[float]]:
    """Seconds of each rollout's calls."""
    return [[draw.uniform(0.1, 2.0) for _ in range(arguments.calls)]
            for _ in range(arguments.rollouts)]  # fmt: skip


async def overlapped(model, written, delays, judge_s: float) -> float:
    """Seconds of the engine; a group is judged from the moment that it is handed over."""
    left, size = [iter(row) for row in delays], min(GROUP, len(written))

    class Tools(Executor):
        async def run(self, call, prompt_id, sample, number):
            self.wait = next(left[int(prompt_id) * size + sample])
            return await super().run(call, prompt_id, sample, number)

    async def search(call):
        await asyncio.sleep(tools.wait)  # read before anything else can run
        return [RESULT]

    tools = Tools({"search": search}, max_concurrent=len(written))
    engine = RolloutEngine(Scripted(model, written), Bytes(), tools, max_tokens=10**6,
                           max_tool_calls=100, stop_ids=(STOP,))  # fmt: skip
    count = len(written) // size
    prompts = [Prompt(str(i), "", ()) for i in range(count)]
    started, judges = time.perf_counter(), []
    ids = [[i + 1] * PROMPT for i in range(count)]
    async for group in engine.run(prompts, ids, size, SamplingParams(), 0):
        judges += [asyncio.create_task(asyncio.sleep(judge_s)) for _ in group]
    await asyncio.gather(*judges)
    return time.perf_counter() - started


def in_batches(model, written, delays) -> float:
    """Seconds of the rival: a turn of everybody, the slowest of its tools, and so on."""
    sampler, text = Scripted(model, written), {}
    started = time.perf_counter()
    for i in range(len(written) // GROUP):
        params = SamplingParams(n=GROUP, max_tokens=10**6, stop_ids=(STOP,))
        text |= {row: b"" for row in sampler.add([i + 1] * PROMPT, params, i)}
    for turn in range(len(delays[0]) + 1):
        while sampler.has_work:
            for token in sampler.step():
                text[token.row] += bytes([token.id % 256])
                if token.stop_reason:
                    sampler.finish(token.row)
                elif text[token.row].endswith(CALL):
                    sampler.park(token.row)
        if turn < len(delays[0]):
            time.sleep(max(row[turn] for row in delays))
            for row in text:
                sampler.extend(row, [121] * 220)
    time.sleep(JUDGE_S)
    return time.perf_counter() - started


def measure(arguments, model, seed: int) -> dict[str, float]:
    """One round, seconds of each."""
    draw = random.Random(seed)
    written, delays = scripts(arguments, draw), waits(arguments, draw)
    nothing = [[0.0] * arguments.calls] * arguments.rollouts
    decode = asyncio.run(overlapped(model, written, nothing, 0.0))
    alone = asyncio.run(overlapped(model, written[:1], nothing[:1], 0.0)) / len(written[0])
    chain = max(sum(row) + JUDGE_S + alone * len(script)
                for row, script in zip(delays, written, strict=True))  # fmt: skip
    return {"decode_alone": decode, "slowest_chain": chain,
            "overlapped": asyncio.run(overlapped(model, written, delays, JUDGE_S)),
            "in_batches": in_batches(model, written, delays)}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=64, help=f"a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3(Qwen3Config(8192, 256, 768, 6, 4, 2, 64))
    rounds = [measure(arguments, model, seed) for seed in range(arguments.rounds)]
    ratios = [r["overlapped"] / max(r["decode_alone"], r["slowest_chain"]) for r in rounds]
    gains = [r["in_batches"] / r["overlapped"] for r in rounds]
    line = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    for key, seconds in line.items():
        print(f"{key:14} {seconds:6.2f} s")
    ratio, gain = statistics.median(ratios), statistics.median(gains)
    print(f"overlapped is {ratio:.2f}x the larger limit; batches take {gain:.2f}x as long")
    print(json.dumps({"bench": "overlap", **line, "of_limit": ratio, "gain": gain,
                      "settings": vars(arguments),
                      "load_average": os.getloadavg()[0]}))  # fmt: skip


if __name__ == "__main__":
    main()
