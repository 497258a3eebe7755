"""Killed anywhere, a run that is started again ends as the one that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
STEPS = 4
SMALL = (
    "world.entities=6", "world.held_out=2", "eval.prompts=2", "eval.every=2", "rollout.prompts=2",
    "rollout.group=4", "rollout.max_tokens=600", f"train.steps={STEPS}",
    "train.checkpoint_every=1", "run.threads=1",
)  # fmt: skip

# The program of `python -m minirler.train`, with tools that take their time, so that most moments
# have some in flight.
SLOW_TOOLS = """
import asyncio, random, sys
from minirler import train, tools
answer = tools.Executor.run
async def run(self, *args):
    await asyncio.sleep(random.uniform(0.0, 0.1))
    return await answer(self, *args)
tools.Executor.run = run
sys.exit(train.main(sys.argv[1:]))
"""


def start(folder: Path) -> subprocess.Popen:
    """Start (or go on with) a run."""
    arguments = ["configs/almanac.toml", *SMALL, f"run.dir={folder}"]
    command = [sys.executable, "-c", SLOW_TOOLS, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(folder: Path) -> dict[str, str]:
    """Run to the end; the final hashes."""
    process = start(folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return json.loads((folder / "hashes.json").read_text())


def wait_for(process: subprocess.Popen, condition, timeout_s: float = 120) -> bool:
    """Poll until `condition()` holds; False if the process ends before."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    raise TimeoutError("the run got stuck")


def kill(process: subprocess.Popen) -> None:
    """SIGKILL, and read what is left."""
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, str]:
    """Hashes of the run that was never killed."""
    return finish(tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize("chain", range(4))
def test_killed_five_times_at_random_it_ends_the_same(whole, tmp_path, chain):
    chance, folder, kills = random.Random(chain), tmp_path / "run", 0
    for _ in range(5):
        process = start(folder)
        wait_for(process, (folder / "metrics.jsonl").exists)  # past the imports
        time.sleep(chance.uniform(0, 5))
        kills += process.poll() is None
        kill(process)
    assert kills >= 2
    assert finish(folder) == whole


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_in_the_middle_of_a_save_it_ends_the_same(whole, tmp_path, step):
    folder = tmp_path / "run"
    temporary = folder / "checkpoints" / f"step_{step:06d}.tmp"
    process = start(folder)
    caught = wait_for(process, temporary.exists)
    kill(process)
    assert caught
    assert finish(folder) == whole


def test_ctrl_c_saves_and_ends_and_the_run_goes_on(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(process, (folder / "checkpoints" / "step_000001" / "COMPLETE").exists)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: saved step" in output, output
    assert "Traceback" not in output
    assert finish(folder) == whole


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(process, (folder / "checkpoints" / "step_000001" / "COMPLETE").exists)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - started < 10


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(whole, tmp_path):
    folder = tmp_path / "run"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))"
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    process = start(folder)
    wait_for(process, (folder / "checkpoints" / "step_000001" / "COMPLETE").exists)
    kill(process)
    command = [sys.executable, "-c", f"{limit}\n{ignore}\n{SLOW_TOOLS}", "configs/almanac.toml"]
    full = subprocess.run(
        [*command, *SMALL, f"run.dir={folder}"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert full.returncode == 2, full.stdout + full.stderr
    (line,) = [x for x in full.stderr.splitlines() if x.startswith("error:")]
    assert "step_0000" in line and "checkpoint" in line
    assert finish(folder) == whole
