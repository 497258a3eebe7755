"""Several ranks are one trainer: same rollouts, loss, gradient; they skip, save and end together.

The processes are real ones (gloo, on this machine); a session of them runs several things, as each
takes seconds to start, and the tests look at what its ranks brought home.
"""

import asyncio
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minirler import checkpoint
from minirler import train as loop
from minirler import update as updates
from minirler.config import DistConfig, load_config
from minirler.dist import empty_model, open_policy, put_, whole
from minirler.log import read_metrics
from minirler.pack import pack
from minirler.policy import batch_logps
from minirler.ranks import Ranks, join
from minirler.records import Rollout, Segment
from minirler.run import open_run
from minirler.sampler import Sampler, SamplingParams
from minirler.state import load_masters
from minirler.weights import fill_from_, load_model

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = 3  # a step: uneven on 2 ranks, and one of 4 has none
SMALL = (
    "world.entities=6", "world.held_out=3", "eval.prompts=3", f"rollout.prompts={PROMPTS}",
    "rollout.group=2", "rollout.max_tokens=400", "train.steps=2", "train.schedule=constant",
    "train.max_grad_norm=1e9", "train.micro_batch_tokens=500", "run.threads=1", "train.lr=1e-3",
)  # fmt: skip

OPTIONS = ("algo.beta=0.1", "algo.kl_in=reward", "algo.reference=step", "algo.ratio=gspo")


def settings(folder: Path, *overrides: str) -> list[str]:
    """Command line of a run made small; an override wins over SMALL."""
    chosen = {item.partition("=")[0]: item for item in (*SMALL, f"run.dir={folder}", *overrides)}
    return ["configs/almanac.toml", *chosen.values()]


# ---- what a rank does


def enter(action, rank: int, size: int, port: int, results: Path, *arguments) -> None:
    """A process of a job: be `rank`, do `action`, leave what it returns in a file."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in where.items()}
    torch.set_num_threads(1)
    ranks = join()
    found = action(ranks, *arguments)
    (results / f"{action.__name__}{rank}").write_bytes(pickle.dumps(found))
    ranks.leave()


def launch(action, size: int, folder: Path, *arguments) -> list:
    """What `action(ranks, *arguments)` returns on each of `size` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=enter, args=(action, rank, size, port, folder, *arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    files = (folder / f"{action.__name__}{rank}" for rank in range(size))
    return [pickle.loads(file.read_bytes()) for file in files]


def step(ranks: Ranks, folder: Path, *overrides: str) -> dict:
    """One step of a run: what was sampled, and what was learned from it."""
    run = open_run(load_config(settings(folder, *overrides)), ranks)
    groups = asyncio.run(loop.sample_and_score(run))
    for i, group in enumerate(groups):
        group.rewards = [float((i + 1) * k) for k in range(len(group.rewards))]
    gradients, take = {}, run.optimizer.step

    def look() -> None:
        named = run.model.named_parameters()
        gradients.update((name, whole(p.grad).clone()) for name, p in named)
        take()

    run.optimizer.step = look
    addresses = [p.data_ptr() for p in run.policy.copy.parameters()]
    metrics = updates.update(run, groups)
    run.policy.sync_()
    masters = {name: whole(p.detach()).clone() for name, p in run.model.named_parameters()}
    copy = dict(run.policy.copy.named_parameters())
    return {
        "rollouts": [r.segments for group in groups for r in group.rollouts],
        "buffer": run.buffer.state(), "order": run.order.state(), "metrics": metrics,
        "gradients": gradients, "masters": masters,
        "copy": {name: p.detach() for name, p in copy.items()},
        "is_in_place": addresses == [p.data_ptr() for p in copy.values()],
        "shares": run.policy.copy is run.model,
        "own_elements": sum(
            getattr(p, "to_local", lambda p=p: p)().numel() for p in run.model.parameters()
        ),
    }  # fmt: skip


def poison(ranks: Ranks, folder: Path) -> dict:
    """A run in which one rank's log-probs are NaN for ever: how it goes."""
    run, good = open_run(load_config(settings(folder, "train.steps=9")), ranks), updates.batch_logps

    def bad(*arguments):
        logps, entropy = good(*arguments)
        return logps * (float("nan") if ranks.rank == ranks.size - 1 else 1.0), entropy

    updates.batch_logps, before = bad, whole(next(run.model.parameters()).detach()).clone()
    try:
        asyncio.run(loop.supervise(run))
        error = ""
    except FloatingPointError as failure:
        error = str(failure)
    finally:
        updates.batch_logps = good
    same = torch.equal(whole(next(run.model.parameters()).detach()), before)
    return {"step": run.step, "skips": run.skips, "error": error, "same": same}


def golden_gradients(ranks: Ranks, case: str) -> dict:
    """Gradients of a model's sum of log-probs, in shards where there are several ranks."""
    folder, gradients = GOLDEN / case, {}
    model = empty_model(folder, "float32", "float32", DistConfig(), ranks)
    fill_from_(model, folder, put_)
    ids = [list(range(1 + i, 9 + 2 * i)) for i in range(3)]
    rollouts = [
        Rollout("p", i, [Segment(x[:3], [0.0] * 3, False, 0), Segment(x[3:], [0.0] * len(x[3:]),
                                                                    True, 0)])
        for i, x in enumerate(ids)
    ]  # fmt: skip
    for batch in pack(rollouts, [1.0] * 3, 16, ranks.rank, ranks.size):
        (batch_logps(model, batch)[0].sum() * ranks.size).backward()
    for name, parameter in model.named_parameters():
        gradients[name] = whole(parameter.grad)
    return gradients


def go_on(ranks: Ranks, folder: Path) -> dict:
    """Run to the end, or go on from where the folder stands; the last step and the weights."""
    run = open_run(load_config(settings(folder, "train.checkpoint_every=1")), ranks)
    started = run.step
    assert asyncio.run(loop.supervise(run)) == 0
    return {
        "started": started,
        "weights": {name: whole(p.detach()).clone() for name, p in run.model.named_parameters()},
        "buffer": run.buffer.state(),
    }


def two(ranks: Ranks, folder: Path) -> dict:
    """The session of two ranks."""
    return {
        "step": step(ranks, folder / "step2"),
        "bfloat16": step(ranks, folder / "half2", "model.dtype=bfloat16"),
        "checkpointed": step(ranks, folder / "less2", "train.checkpoint_activations=true"),
        "reference": step(ranks, folder / "ref2", "algo.beta=0.1"),
        "options": step(ranks, folder / "opt2", *OPTIONS),
        "untied": golden_gradients(ranks, "untied"),
        "poison": poison(ranks, folder / "nan2"),
        "whole": go_on(ranks, folder / "whole2"),
    }


def four(ranks: Ranks, folder: Path) -> dict:
    """The session of four ranks; folder/on4 holds a checkpoint of two."""
    return {
        "step": step(ranks, folder / "step4"),
        "replicated": step(ranks, folder / "hsdp4", "dist.replicas=2"),
        "resumed": go_on(ranks, folder / "on4"),
    }


# ---- the same step on 1, 2 and 4 ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all runs of this module are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(folder) -> dict:
    """One process, by float32 and by bfloat16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {
        "step": step(Ranks(), folder / "step1"),
        "bfloat16": step(Ranks(), folder / "half1", "model.dtype=bfloat16"),
        "reference": step(Ranks(), folder / "ref1", "algo.beta=0.1"),
        "options": step(Ranks(), folder / "opt1", *OPTIONS),
        "poison": poison(Ranks(), folder / "nan1"),
    }
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(folder) -> list[dict]:
    """What the two ranks of `two` brought home."""
    found = launch(two, 2, folder, folder)
    shutil.copytree(folder / "whole2", folder / "on4")
    shutil.rmtree(folder / "on4" / "checkpoints" / "step_000002")
    shutil.copytree(folder / "on4", folder / "on1")
    return found


@pytest.fixture(scope="module")
def quartet(folder, pair) -> list[dict]:
    """What the four ranks of `four` brought home."""
    return launch(four, 4, folder, folder)


def close(one: dict, other: dict, tolerance: float = 1e-5) -> bool:
    """Are the tensors of two models alike, relative to the largest?"""
    largest = max(x.abs().max().item() for x in one.values())
    difference = max((one[n].float() - other[n].float()).abs().max().item() for n in one)
    return one.keys() == other.keys() and difference <= tolerance * largest


def check_same_step(one: dict, many: list[dict]) -> None:
    """All ranks hold what the one process has."""
    for found in many:
        assert [[s.ids for s in x] for x in found["rollouts"]] == [
            [s.ids for s in x] for x in one["rollouts"]
        ]
        logps = ([x for r in y["rollouts"] for s in r for x in s.logps] for y in (found, one))
        assert list(next(logps)) == pytest.approx(list(next(logps)), abs=1e-5)
        assert found["buffer"] == one["buffer"] and found["order"] == one["order"]
        for name in one["metrics"].keys() - {"packed_tokens"}:  # idle tokens are packed too
            expected = pytest.approx(one["metrics"][name], rel=1e-5, abs=1e-6)
            assert found["metrics"][name] == expected, name
        assert close(one["gradients"], found["gradients"])
        assert found["metrics"] == many[0]["metrics"]
        assert all(torch.equal(found["masters"][n], x) for n, x in many[0]["masters"].items())


@pytest.mark.long
def test_two_ranks_sample_and_learn_what_one_process_does(single, pair):
    assert single["step"]["metrics"]["grad_norm"] > 0.01
    check_same_step(single["step"], [found["step"] for found in pair])


@pytest.mark.long
def test_four_ranks_one_of_them_empty_do_too(single, quartet):
    check_same_step(single["step"], [found["step"] for found in quartet])


@pytest.mark.long
def test_replicas_of_shards_do_too(single, quartet):
    check_same_step(single["step"], [found["replicated"] for found in quartet])


@pytest.mark.long
def test_checkpointed_activations_change_nothing(single, pair):
    check_same_step(single["step"], [found["checkpointed"] for found in pair])


@pytest.mark.long
def test_a_reference_in_shards_pulls_as_a_whole_one(single, pair):
    check_same_step(single["reference"], [found["reference"] for found in pair])


@pytest.mark.long
def test_what_counts_rollouts_or_looks_at_all_of_them_does_so_over_all_ranks(single, pair):
    check_same_step(single["options"], [found["options"] for found in pair])


@pytest.mark.long
def test_each_rank_holds_its_part_of_the_weights_and_a_whole_copy_in_place(single, pair, quartet):
    total = sum(x.numel() for x in single["step"]["masters"].values())
    for many, size in ((pair, 2), (quartet, 4)):
        assert sum(found["step"]["own_elements"] for found in many) == total
        for found in (found["step"] for found in many):
            assert found["own_elements"] < 1.1 * total / size
            assert found["is_in_place"] and not found["shares"]
            assert all(torch.equal(found["copy"][n], x) for n, x in found["masters"].items())
    assert quartet[0]["replicated"]["own_elements"] > 0.9 * total / 2


@pytest.mark.long
def test_a_head_of_its_own_gets_its_gradient_in_shards_too(pair):
    expected = golden_gradients(Ranks(), "untied")
    assert "lm_head.weight" in expected
    assert all(close(expected, found["untied"]) for found in pair)


@pytest.mark.long
def test_bfloat16_computes_on_float32_masters_in_one_process_and_in_two(single, pair):
    one, many = single["bfloat16"], [found["bfloat16"] for found in pair]
    for found in (one, *many):
        assert all(x.dtype == torch.float32 for x in found["masters"].values())
        assert all(x.dtype == torch.float32 for x in found["gradients"].values())
        assert found["is_in_place"] and not found["shares"]
        for name, x in found["masters"].items():
            assert torch.equal(found["copy"][name], x.to(torch.bfloat16))
        # the masters keep what a weight in bfloat16 would have lost
        assert any((x != x.to(torch.bfloat16).float()).any() for x in found["masters"].values())
    assert close(one["gradients"], many[0]["gradients"], 0.03)
    assert many[0]["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], abs=1e-2)


def test_one_float32_process_shares_one_model(single):
    assert single["step"]["shares"] and single["step"]["is_in_place"]


# ---- together in what goes wrong


@pytest.mark.long
def test_a_nan_on_one_rank_skips_on_all_and_the_third_ends_with_a_saved_state(folder, pair):
    for found in (found["poison"] for found in pair):
        assert found["step"] == found["skips"] == 3 and found["same"]
        assert "3 steps in a row" in found["error"]
    check_saved_after_skips(folder / "nan2")


def test_three_nans_in_a_row_end_one_process_too(folder, single):
    found = single["poison"]
    assert found["step"] == found["skips"] == 3 and found["same"] and found["error"]
    check_saved_after_skips(folder / "nan1")


def check_saved_after_skips(folder: Path) -> None:
    """Three steps are logged as skipped, and a checkpoint of the third is there."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    assert [row["skipped"] for row in rows] == [1.0, 1.0, 1.0]
    saved = checkpoint.load_latest(folder)
    assert saved.step == 3 and saved.state["skips"] == 3


PROGRAM = """
import os, signal, sys, time
from minirler import ranks, train
ranks.SILENT_S = 6.0
update = train.update
def broken(run, groups):
    if run.step == 1:
        {act}
    return update(run, groups)
train.update = broken
sys.exit(train.main(sys.argv[1:]))
"""
BARE = """
import os, signal, sys, time
from types import SimpleNamespace
from minirler import ranks
ranks.SILENT_S = 6.0
run = SimpleNamespace(ranks=ranks.join())
{act}
time.sleep(999)
"""
ENDS = {  # what happens to a rank in step 2; to the last two without a run, as they take seconds
    "fails": "if run.ranks.rank == 1: raise ValueError('the key of rank 1')",
    "disk": "if run.ranks.rank == 1: raise OSError('the disk is full')",
    "killed": "if run.ranks.rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
    "first": "if run.ranks.rank == 0: os.kill(os.getpid(), signal.SIGKILL)",
    "stuck": "os.kill(os.getpid(), signal.SIGSTOP) if run.ranks.rank else time.sleep(999)",
}


@pytest.fixture(scope="module")
def ends(folder) -> dict:
    """By name of ENDS: statuses, stderrs and when each of two ranks ended. All at the same time."""
    jobs = {name: begin(folder / name, act) for name, act in ENDS.items()}
    when, end = {}, time.monotonic() + 100
    while len(when) < 2 * len(jobs) - 1 and time.monotonic() < end:  # the stuck one stays
        for name, job in jobs.items():
            for rank, process in enumerate(job):
                if process.poll() is not None:
                    when.setdefault((name, rank), time.monotonic())
        time.sleep(0.1)
    found = {}
    for name, job in jobs.items():
        for process in job:
            process.kill()
        texts = [process.communicate()[1] for process in job]
        times = [when.get((name, rank)) for rank in range(2)]
        found[name] = [process.returncode for process in job], texts, times
    return found


def begin(folder: Path, act: str) -> list[subprocess.Popen]:
    """Start two ranks that do `act` in step 2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = BARE if folder.name in ("first", "stuck") else PROGRAM
    command = [sys.executable, "-c", program.format(act=act), *settings(folder)]
    processes = []
    for rank in range(2):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
        env = os.environ | {name: str(value) for name, value in where.items()}
        env["OMP_NUM_THREADS"] = "1"
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return processes


@pytest.mark.long
def test_a_rank_that_fails_ends_every_rank_with_its_own_error(ends):
    codes, texts, (_, _) = ends["fails"]
    assert codes == [1, 1]
    assert "rank 1: ValueError: the key of rank 1" in texts[0] and "Traceback" not in texts[0]
    assert "ValueError: the key of rank 1" in texts[1] and "Traceback" in texts[1]


@pytest.mark.long
def test_an_error_that_the_user_can_mend_is_one_line_on_every_rank(ends):
    codes, texts, _ = ends["disk"]
    assert codes == [1, 1] and "error: rank 1: OSError: the disk is full" in texts[0]
    assert "error: the disk is full" in texts[1]
    assert not any("Traceback" in text for text in texts)


@pytest.mark.long
@pytest.mark.parametrize("name, victim", [("killed", 1), ("first", 0)])
def test_a_rank_that_is_killed_in_mid_step_ends_the_others_within_a_minute(ends, name, victim):
    codes, texts, when = ends[name]
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    assert when[1 - victim] - when[victim] < 60
    assert "error" in texts[1 - victim].lower()


@pytest.mark.long
def test_a_rank_that_stands_still_is_missed_by_its_silence(ends):
    codes, texts, _ = ends["stuck"]
    assert codes[0] == 1 and "rank 1 has given no sign of life" in texts[0]


# ---- checkpoints of several ranks


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_one_and_by_four(folder, pair, quartet):
    expected = pair[0]["whole"]
    assert expected["started"] == 0
    for found in (*(found["resumed"] for found in quartet), go_on(Ranks(), folder / "on1")):
        assert found["started"] == 1
        assert found["buffer"] == expected["buffer"]
        assert close(expected["weights"], found["weights"], 1e-4)
    rows = [row["step"] for row in read_metrics(folder / "on4" / "metrics.jsonl") if "loss" in row]
    assert rows == [1, 2]


@pytest.mark.long
def test_export_writes_what_the_shards_hold_with_the_tokenizer(folder, pair, tmp_path, capsys):
    source = folder / "whole2" / "step_000002"
    assert checkpoint.main(["export", str(source), str(tmp_path / "out")]) == 0
    model = load_model(tmp_path / "out")
    for name, expected in pair[0]["whole"]["weights"].items():
        assert torch.equal(model.get_parameter(name), expected), name
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert checkpoint.main(["export", str(tmp_path), str(tmp_path / "no")]) == 2
    assert "is no complete checkpoint" in capsys.readouterr().err


@pytest.mark.long
def test_damage_to_any_shard_is_found(folder, pair, tmp_path):
    shutil.copytree(folder / "whole2", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    listed = json.loads((newest / "COMPLETE").read_text())["files"]
    shards = sorted(newest.glob("model/__*.distcp"))
    assert {path.name[:3] for path in shards} == {"__0", "__1"}
    assert {f"model/{path.name}" for path in shards} <= listed.keys()
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is not complete"):
        assert checkpoint.load_latest(tmp_path / "run").step == 1


# ---- without processes


def test_masters_take_up_the_gradients_of_every_micro_batch_in_float32(tmp_path):
    masters = load_masters(GOLDEN / "tied", "bfloat16", DistConfig(), Ranks())
    policy = open_policy(masters, GOLDEN / "tied", "bfloat16", Ranks())
    ids = torch.arange(1, 9)[None]
    expected = {}
    for scale in (1.0, 2.0**-9):  # the second would vanish beside the first in bfloat16
        (policy.trained.logits(ids).logsumexp(-1).sum() * scale).backward()
        assert all(parameter.grad is None for parameter in policy.trained.parameters())
        for name, parameter in masters.named_parameters():
            expected[name] = parameter.grad.clone() if scale == 1 else expected[name]
    for name, parameter in masters.named_parameters():
        total = expected[name] * (1 + 2.0**-9)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-6, atol=0)


def test_the_sampler_sees_new_weights_in_place():
    masters = load_masters(GOLDEN / "tied", "bfloat16", DistConfig(), Ranks())
    policy = open_policy(masters, GOLDEN / "tied", "bfloat16", Ranks())
    sampler, params = Sampler(policy.copy, kv_tokens=256), SamplingParams(max_tokens=8)
    before = sampler.generate([[1, 2, 3]], params)
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.mul_(1.5)
    policy.sync_()
    sampler.weights_changed()
    assert sampler.generate([[1, 2, 3]], params) != before


def test_a_share_and_its_inverse_deal_out_every_item_once():
    for size in (1, 2, 3, 5):
        ranks = [Ranks(rank, size) for rank in range(size)]
        items = list(range(7))
        shares = [rank.share(items) for rank in ranks]
        assert sorted(x for share in shares for x in share) == items
        for rank in ranks:
            rank.gather = lambda mine, shares=shares: shares
            assert rank.unshare(shares[rank.rank]) == items


def test_a_limit_is_divided_but_never_to_nothing():
    assert Ranks(0, 8).limit(256) == 32 and Ranks(0, 8).limit(3) == 1 and Ranks().limit(5) == 5
