"""A run whose judge is a server that fails a fifth of the time, in every way: it ends, no fault is
read as a score, nothing leaks, no secret is written, and it replays without the server."""

import asyncio
import gc
import hashlib
import json
import random

import pytest
from aiohttp import web
from test_endpoint import FAULTS, KEY, Server
from test_train import settings

from minirler import train as loop
from minirler.log import read_metrics
from minirler.run import open_run

KINDS = [*FAULTS, "status_400", "drip", "redirect"]


class Judge(Server):
    """Scores by a hash of the prompt; a fault on a fifth of the tries, drawn by their number."""

    def __init__(self):
        draw = random.Random(0)
        super().__init__(*(draw.choice(KINDS) if draw.random() < 0.2 else None
                           for _ in range(100_000)))  # fmt: skip
        self.given = {}

    async def handle(self, request):
        fault = next(self.faults)
        self.asked.append(fault)
        if fault:
            return await getattr(self, fault)(request)
        text = json.loads(await request.text())["messages"][0]["content"]
        score = hashlib.sha256(text.encode()).digest()[0] % 3
        self.given[score] = self.given.get(score, 0) + 1
        rubrics = [{"title": f"t{score}", "description": f"Names thing {score}."}]
        reply = {"reason": "so", "score": score, "positive_rubrics": rubrics,
                 "negative_rubrics": rubrics[:0], "queries": ["Belomo"]}  # fmt: skip
        message = {"role": "assistant", "content": json.dumps(reply)}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


async def run_it(folder, judge):
    """Train against the judge; tasks and sockets that are left afterwards are an error."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", judge.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        run = open_run(settings(
            folder, "judge.backend=openai", "judge.model=m", "judge.deadline_s=4",
            f"judge.base_url=http://127.0.0.1:{runner.addresses[0][1]}/v1", "train.steps=1",
            "world.entities=25", "rollout.prompts=25", "rollout.group=8", "eval.every=9",
        ))  # fmt: skip
        run.judge.lms[0].endpoint._first_wait_s = run.judge.lms[0].endpoint._max_wait_s = 0.02
        assert await loop.supervise(run) == 0
    finally:
        await runner.cleanup()
    left = [repr(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
    assert all("RequestHandler" in task for task in left), left
    return run


@pytest.mark.long
def test_a_run_of_200_rollouts_under_faults_ends_and_replays(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    gc.collect()
    recwarn.clear()
    judge = Judge()
    run = asyncio.run(run_it(tmp_path / "run", judge))
    hashes = run.hashes()
    faults = [fault for fault in judge.asked if fault]
    assert len(faults) > 0.15 * len(judge.asked) and set(KINDS) <= set(faults)
    (row,) = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert row["judge/missing"] > 0  # some were given up, and are missing
    path = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    groups = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert sum(len(group["rollouts"]) for group in groups) == 200
    scores = [v for g in groups for row, r in zip(g["verdicts"], g["rollouts"], strict=True)
              if r["answer"] is not None for v in row]  # fmt: skip
    assert None in scores and {v for v in scores if v is not None} == {0.0, 0.5, 1.0}
    for score in range(3):  # what was read is what was said: no fault became a score
        assert scores.count(score / 2) <= judge.given[score] * 8  # equal answers share a verdict
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    gc.collect()
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]
    assert loop.main([f"replay={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "hashes.json").read_text()) == hashes
