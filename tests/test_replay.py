"""A stored run comes out the same again; where something was altered, replay names the place."""

import asyncio
import json
import shutil

import pytest

from minirler import train as loop
from minirler.config import load_config
from minirler.replay import first_difference, replayed, step_path
from minirler.run import open_run

SMALL = (
    "world.entities=4", "world.held_out=1", "eval.every=0", "eval.prompts=1", "rollout.prompts=2",
    "rollout.group=2", "rollout.max_tokens=400", "train.steps=2", "run.threads=1",
)  # fmt: skip


def settings(folder, *overrides):
    """A run of two steps in `folder`."""
    return load_config(["configs/almanac.toml", *SMALL, f"run.dir={folder}", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert asyncio.run(loop.supervise(open_run(settings(folder)))) == 0
    return folder


def altered(finished, tmp_path, change, step=2):
    """A copy of the run in which `change(groups)` was made to the traces of a step."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    path = step_path(folder, step)
    groups = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    change(groups)
    path.write_text("".join(json.dumps(group) + "\n" for group in groups), "utf-8")
    return folder


def test_a_run_comes_out_the_same_and_leaves_no_scratch_folder(finished, capsys):
    before = sorted(path.name for path in finished.parent.rglob("*"))
    assert loop.main([f"replay={finished}"]) == 0
    assert "all 2 steps came out the same" in capsys.readouterr().out
    assert sorted(path.name for path in finished.parent.rglob("*")) == before


def test_an_altered_token_is_named_by_step_rollout_and_position(finished, tmp_path, capsys):
    place = {}

    def change(groups):
        rollout = groups[1]["rollouts"][1]
        prompt, turn = rollout["segments"][:2]
        place.update(name=groups[1]["prompt"]["id"], at=len(prompt["ids"]) + 3, was=turn["ids"][3])
        turn["ids"][3] += 1

    folder = altered(finished, tmp_path, change)
    assert loop.main([f"replay={folder}"]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"step 2, rollout {place['name']}/1, token {place['at']}: id "
                           f"{place['was'] + 1} (log-prob ")  # fmt: skip
    assert f"in the replay id {place['was']} (log-prob " in told


def test_other_weights_are_told_though_every_token_is_the_same(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    hashes = json.loads((folder / "hashes.json").read_text())
    (folder / "hashes.json").write_text(json.dumps(hashes | {"weights": "0" * 64}))
    assert "000000" in replayed(folder, loop.train)


@pytest.mark.parametrize("change, words", [
    (lambda g: g[0]["rollouts"][0]["segments"][1]["logps"].__setitem__(2, -0.5), "log-prob -0.5"),
    (lambda g: g[0]["rollouts"][1]["segments"][-1]["ids"].pop() and
     g[0]["rollouts"][1]["segments"][-1]["logps"].pop(), "none, in the replay id"),
    (lambda g: g[1]["rewards"].__setitem__(0, 9.0), "other rewards"),
    (lambda g: g[1]["rollouts"][0].__setitem__("stop_reason", "lost"), "other stop_reason"),
    (lambda g: g.pop(), "in the replay"),
    (lambda g: g.reverse(), "prompt"),
])  # fmt: skip
def test_whatever_was_altered_is_the_first_difference(finished, tmp_path, change, words):
    folder = altered(finished, tmp_path, change)
    assert first_difference(folder, finished, 1) is None
    assert words in first_difference(folder, finished, 2)


def test_an_altered_event_of_a_rubric_is_told(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    path = folder / "rubrics.jsonl"
    path.write_text("".join(path.read_text("utf-8").splitlines(True)[:-1]), "utf-8")
    assert "rubrics.jsonl: null" in first_difference(folder, finished, 2)


def test_a_run_that_need_not_come_out_the_same_is_refused(tmp_path, capsys):
    open_run(settings(tmp_path / "run", "train.deterministic=false"))
    assert loop.main([f"replay={tmp_path / 'run'}"]) == 2
    assert "train.deterministic = False" in capsys.readouterr().err
    assert loop.main([f"replay={tmp_path / 'none'}"]) == 2
    assert "none" in capsys.readouterr().err


def test_a_run_that_lacks_a_step_is_refused(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    step_path(folder, 1).unlink()
    assert loop.main([f"replay={folder}"]) == 2
    assert "lacks a step" in capsys.readouterr().err
