"""Checkpoints: everything comes back, and no kill, damage or full disk costs more than one save.

Kills are real: a forked child sends itself SIGKILL at its n-th call that touches the disk.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler import checkpoint
from minirler.checkpoint import (
    CheckpointError,
    load_latest,
    log_offset,
    save,
    truncate_log,
)
from minirler.state import (
    load_optimizer,
    optimizer_state,
    restore_rng,
    rng_state,
    tensor_bytes,
)

BUFFER = {
    "q1": {
        "persistent": ["p1"],
        "active": [{"description": "réf \U0001f600 \ud800", "weight": -1.0, "seen": 3}],
        "retired": ["old", "older"],
    }
}
STATE = {"buffer": BUFFER, "data": {"epoch": 1, "row": 7}, "rng": {}, "logs": {"metrics.jsonl": 12}}


def write_model(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights" * 100)


def write(run_dir, step, keep=3, state=STATE, model=write_model, moments=None):
    moments = {"exp_avg/w": torch.full((3,), float(step))} if moments is None else moments
    return save(run_dir, step, write_model=model, optimizer=moments, state=state, keep=keep)


def latest(run_dir):
    """(step or None, warnings) of load_latest."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load_latest(run_dir)
    return found and found.step, [str(w.message) for w in caught]


def names(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def in_child(action):
    """Run `action` in a forked process; its exit code, negative if a signal ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = action() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- what is saved comes back


def test_everything_comes_back_as_it_was(tmp_path):
    path = write(tmp_path, 5)
    assert path == tmp_path / "checkpoints" / "step_000005"
    found = load_latest(tmp_path)
    assert (found.step, found.path) == (5, path)
    assert found.state == STATE | {"step": 5}
    assert list(found.state["buffer"]["q1"]) == list(BUFFER["q1"])
    assert (found.path / "model" / "model.safetensors").read_bytes() == b"weights" * 100
    assert found.optimizer["exp_avg/w"].tolist() == [5.0] * 3
    assert names(tmp_path) == ["step_000005"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_any_json_state_comes_back_identically(tmp_path_factory, extra):
    run_dir = tmp_path_factory.mktemp("run")
    state = extra | STATE
    write(run_dir, 1, state=state)
    assert load_latest(run_dir).state == state | {"step": 1}


def test_a_run_without_checkpoints_starts_anew(tmp_path):
    assert latest(tmp_path) == (None, [])


def test_state_that_is_no_strict_json_is_refused_by_key_and_leaves_nothing(tmp_path):
    for bad in (float("nan"), {1, 2}, torch.zeros(1)):
        with pytest.raises(ValueError, match="state 'data' is no strict JSON"):
            write(tmp_path, 1, state=STATE | {"data": bad})
    with pytest.raises(ValueError, match="keep is 0"):
        write(tmp_path, 1, keep=0)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("key", ["buffer", "data", "rng", "logs"])
def test_a_state_without_an_essential_part_is_an_error_that_names_it(tmp_path, key, monkeypatch):
    less = {k: v for k, v in STATE.items() if k != key}
    with pytest.raises(ValueError, match=f"has no '{key}'"):
        write(tmp_path, 1, state=less)
    with monkeypatch.context() as patch:  # as an older version would have written it
        patch.setattr(checkpoint, "STATE_KEYS", {})
        write(tmp_path, 1, state=less)
    with pytest.raises(ValueError, match=f"step_000001/state.json has no '{key}'"):
        load_latest(tmp_path)


# -- which one is taken


def test_the_newest_complete_one_is_found_by_number_and_damaged_ones_are_named(tmp_path):
    for step in (9, 10, 20, 30, 40):
        write(tmp_path, step, keep=9)
    folder = tmp_path / "checkpoints"
    (folder / "step_000009").rename(folder / "step_9")
    model = folder / "step_000030" / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    (folder / "step_000040").rename(folder / "step_000040.tmp")
    (folder / "latest").write_text("step_000030")
    step, warned = latest(tmp_path)
    assert step == 20
    assert len(warned) == 2 and "step_000040.tmp" in warned[0]
    assert "step_000030 is not complete (model/model.safetensors has 699 bytes" in warned[1]
    assert not (folder / "step_000040.tmp").exists()
    shutil.rmtree(folder / "step_000020")
    assert latest(tmp_path)[0] == 10
    shutil.rmtree(folder / "step_000010")
    assert latest(tmp_path)[0] == 9


@pytest.mark.parametrize(
    "name", ["state.json", "optimizer.safetensors", "model/config.json", "COMPLETE"]
)
@pytest.mark.parametrize("damage", ["lost", "empty", "flipped"])
def test_any_damage_to_any_file_falls_back_to_the_one_before(tmp_path, name, damage):
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    content = path.read_bytes()
    path.write_bytes(b"" if damage == "empty" else bytes([content[0] ^ 1]) + content[1:])
    if damage == "lost":
        path.unlink()
    step, warned = latest(tmp_path)
    assert step == 1 and len(warned) == 1 and name in warned[0]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    write(tmp_path, 1)
    (write(tmp_path, 2) / "state.json").write_text("{")
    write(tmp_path, 2)
    assert latest(tmp_path) == (2, [])


def test_a_complete_checkpoint_of_the_same_step_is_left_alone(tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 2, moments={"exp_avg/w": torch.zeros(1)})
    assert load_latest(tmp_path).optimizer["exp_avg/w"].tolist() == [2.0] * 3


# -- retention


def test_the_newest_are_kept_and_older_ones_deleted(tmp_path):
    for step in (8, 9, 10, 11, 100):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_000011", "step_000100"]
    write(tmp_path, 101, keep=1)
    assert names(tmp_path) == ["step_000101"]


def test_the_one_just_written_is_never_deleted_for_a_later_damaged_one(tmp_path):
    write(tmp_path, 10)
    (write(tmp_path, 20) / "model" / "model.safetensors").write_bytes(b"x")
    write(tmp_path, 15, keep=1)
    step, _ = latest(tmp_path)
    assert step == 15


def test_the_old_one_is_there_until_the_new_one_is_complete(tmp_path):
    write(tmp_path, 1, keep=1)

    def model(folder):
        write_model(folder)
        assert latest_complete(tmp_path) == ["step_000001"]

    write(tmp_path, 2, keep=1, model=model)
    assert names(tmp_path) == ["step_000002"]


def test_every_file_is_on_the_disk_before_the_mark_and_the_mark_before_the_name(
    tmp_path, monkeypatch
):
    log, real_fsync, real_rename = [], checkpoint._fsync, os.rename
    monkeypatch.setattr(checkpoint, "_fsync", lambda p: (log.append(p.name), real_fsync(p)))
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append("rename"), real_rename(a, b)))
    write(tmp_path, 1)
    mark, rename = log.index("COMPLETE"), log.index("rename")
    files = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json", "model"}
    assert files <= set(log[:mark])
    assert mark < rename and log[mark + 1] == "step_000001.tmp" and log[rename + 1] == "checkpoints"


def latest_complete(run_dir):
    return [p.parent.name for p in (run_dir / "checkpoints").glob("*/COMPLETE")]


# -- kills and full disks


def die_at(call):
    """Make the `call`-th disk operation of this process its last moment."""
    count = 0

    def wrap(function):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for module, name in (
        (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (os, "open"),
        (checkpoint, "_sha256"), (checkpoint.safetensors.torch, "save_file"),
    ):  # fmt: skip
        setattr(module, name, wrap(getattr(module, name)))


def test_a_kill_at_any_point_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    outcomes = []
    for call in range(1, 200):
        run_dir = tmp_path / str(call)
        write(run_dir, 9, keep=1)

        def action(run_dir=run_dir, call=call):
            die_at(call)
            write(run_dir, 10, keep=1)

        code = in_child(action)
        step, _ = latest(run_dir)
        assert step in (9, 10), f"killed at operation {call}: {names(run_dir)}"
        assert not list((run_dir / "checkpoints").glob("*.tmp"))
        write(run_dir, 11, keep=1)  # and the run goes on
        assert names(run_dir) == ["step_000011"]
        outcomes.append(step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert outcomes[0] == 9 and outcomes[-1] == 10 and len(outcomes) > 15
    assert outcomes == sorted(outcomes)


def test_a_kill_while_the_model_is_half_written_leaves_the_one_before(tmp_path):
    write(tmp_path, 9)

    def model(folder):
        (folder / "model.safetensors").write_bytes(b"wei")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: write(tmp_path, 10, model=model) and 0) == -signal.SIGKILL
    assert names(tmp_path) == ["step_000009", "step_000010.tmp"]
    step, warned = latest(tmp_path)
    assert step == 9 and "step_000010.tmp was left by a save that did not end" in warned[0]
    assert names(tmp_path) == ["step_000009"]


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so_in_one_line(tmp_path):
    write(tmp_path, 9)

    def model(folder):
        write_model(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, 10, model=model, keep=1)
    line = str(caught.value)
    assert "step_000010 was not saved" in line and "No space left" in line
    assert "the last usable one is step_000009" in line and "\n" not in line
    assert names(tmp_path) == ["step_000009"] and latest(tmp_path) == (9, [])


@pytest.mark.parametrize("limit", [0, 100, 2000])  # bytes a file: none, the model, the optimiser
def test_a_refused_write_of_any_file_is_a_save_error(tmp_path, limit):
    write(tmp_path, 9)

    def action():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write(tmp_path, 10, moments={"exp_avg/w": torch.zeros(1000)})
        except CheckpointError:
            return 7

    assert in_child(action) == 7
    assert names(tmp_path) == ["step_000009"] and latest(tmp_path) == (9, [])


def test_any_other_failure_passes_through_and_leaves_nothing_over(tmp_path):
    write(tmp_path, 9)

    def model(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 10, model=model)
    assert names(tmp_path) == ["step_000009"]


# -- the optimiser


def adam(weight, **settings):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.tensor(weight))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, **settings)


def advance(model, optimizer, gradients):
    for gradient in gradients:
        model.w.grad = torch.full_like(model.w, gradient)
        optimizer.step()


def test_resumed_adam_takes_the_steps_of_the_one_that_never_stopped(tmp_path):
    model, optimizer = adam([1.0])
    advance(model, optimizer, [0.5, -0.2])
    assert model.w.item() == pytest.approx(0.86543942, abs=1e-6)
    write(tmp_path, 2, moments=optimizer_state(optimizer, model))
    again, fresh = adam(model.w.tolist())
    load_optimizer(fresh, again, load_latest(tmp_path).optimizer)
    advance(again, fresh, [0.3, 0.1])
    assert again.w.item() == pytest.approx(0.7576585, abs=1e-6)  # 0.678 without the moments
    advance(model, optimizer, [0.3, 0.1])
    assert torch.equal(model.w, again.w)


def network(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 3)).square().mean() * (1 + random.random())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop", range(5))
def test_a_run_resumed_at_any_step_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, stop):
    model, optimizer = network(0)
    random.seed(1)
    train(model, optimizer, stop)
    path = write(
        tmp_path, stop, moments=optimizer_state(optimizer, model),
        state=STATE | {"rng": rng_state()},
        model=lambda folder: torch.save(model.state_dict(), folder / "model.pt"),
    )  # fmt: skip
    expected = train(model, optimizer, 4 - stop)

    resumed, fresh = network(5)
    found = load_latest(tmp_path)
    resumed.load_state_dict(torch.load(path / "model" / "model.pt"))
    load_optimizer(fresh, resumed, found.optimizer)
    restore_rng(found.state["rng"])
    assert train(resumed, fresh, 4 - stop) == expected
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_moments_are_kept_by_name_whatever_the_order_of_parameters():
    model, optimizer = network(0)
    train(model, optimizer, 2)
    backwards = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01)
    load_optimizer(backwards, model, optimizer_state(optimizer, model))
    for p in model.parameters():
        assert torch.equal(backwards.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
        assert backwards.state[p]["step"] == 2
    assert set(optimizer_state(optimizer, model)) == {
        f"{field}/{layer}.{part}" for field in ("exp_avg", "exp_avg_sq", "step")
        for layer in "02" for part in ("weight", "bias")
    }  # fmt: skip


def test_optimiser_states_that_do_not_fit_are_named():
    model, optimizer = network(0)
    train(model, optimizer, 1)
    good = optimizer_state(optimizer, model)
    cases = [
        ({k: v for k, v in good.items() if "2.bias" not in k}, "2.bias has no exp_avg"),
        ({k: v for k, v in good.items() if k != "step/0.weight"}, "0.weight has no step"),
        (good | {"exp_avg/9.weight": torch.zeros(1)}, "of 9.weight, a parameter that is not"),
        (good | {"exp_avg/0.bias": torch.zeros(5)}, r"0.bias is \[5\], the parameter \[4\]"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            load_optimizer(optimizer, model, tensors)
    with pytest.raises(ValueError, match="not one of the model's"):
        optimizer_state(optimizer, torch.nn.Linear(1, 1))


def test_tensor_bytes_are_those_in_memory_for_every_dtype_and_shape():
    assert tensor_bytes(torch.tensor([1, 2], dtype=torch.int16)) == b"\1\0\2\0"
    assert tensor_bytes(torch.tensor(1.0, dtype=torch.bfloat16)) == b"\x80\x3f"
    turned = torch.arange(6, dtype=torch.uint8).reshape(2, 3).t()
    assert tensor_bytes(turned) == bytes([0, 3, 1, 4, 2, 5])


# -- append-only logs


def test_a_log_is_cut_back_to_where_the_checkpoint_stands(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert log_offset(log) == 0
    log.write_text('{"é": 1}\n')
    offset = log_offset(log)
    assert offset == len('{"é": 1}\n'.encode())
    with open(log, "a") as file:
        file.write('{"step": 2}\n{"ste')
    truncate_log(log, offset)
    assert json.loads(log.read_text()) == {"é": 1}
    truncate_log(log, offset)
    truncate_log(log, 0)
    assert log.read_bytes() == b""


def test_a_log_that_lost_lines_is_an_error_that_names_it(tmp_path):
    log = tmp_path / "rubrics.jsonl"
    truncate_log(log, 0)
    with pytest.raises(ValueError, match="rubrics.jsonl has 0 bytes, its checkpoint 5"):
        truncate_log(log, 5)
    log.write_bytes(b"abc")
    with pytest.raises(ValueError, match="rubrics.jsonl has 3 bytes"):
        truncate_log(log, 5)
    assert log.read_bytes() == b"abc"
