"""The whole loop on a small almanac: replays, resumes, survives a failing judge, and its errors."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from minirler import train as loop
from minirler.config import ConfigError, load_config
from minirler.log import read_metrics
from minirler.offline import OfflineLM
from minirler.records import LMReply
from minirler.run import open_run

SMALL = (
    "world.entities=6", "world.held_out=2", "eval.prompts=2", "eval.every=1", "rollout.prompts=2",
    "rollout.group=4", "rollout.max_tokens=600", "train.steps=2", "train.checkpoint_every=1",
    "train.schedule=constant", "run.threads=1",  # a schedule that ends depends on train.steps
)  # fmt: skip


def settings(folder: Path, *overrides: str):
    """The default run made small, in `folder`; an override wins over SMALL."""
    chosen = {item.partition("=")[0]: item for item in (*SMALL, f"run.dir={folder}", *overrides)}
    return load_config(["configs/almanac.toml", *chosen.values()])


def train(folder: Path, *overrides: str) -> dict[str, str]:
    """Run to the end and return the final hashes."""
    run = open_run(settings(folder, *overrides))
    assert asyncio.run(loop.supervise(run)) == 0
    return run.hashes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A run of two steps that nothing disturbed, and its hashes."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(folder)


def test_a_run_replays_to_the_same_weights_buffer_and_traces(finished, tmp_path):
    assert train(tmp_path / "again") == finished[1]


def test_another_seed_is_another_run(finished, tmp_path):
    assert train(tmp_path / "other", "run.seed=1")["traces"] != finished[1]["traces"]


def test_the_speed_of_tools_changes_nothing(finished, tmp_path):
    run = open_run(settings(tmp_path / "slow"))
    answer, chance = run.engine.executor.run, random.Random(3)

    async def slow(*args):
        await asyncio.sleep(chance.uniform(0, 0.05))
        return await answer(*args)

    run.engine.executor.run = slow
    assert asyncio.run(loop.supervise(run)) == 0
    assert run.hashes() == finished[1]


@pytest.mark.parametrize("phase", ["sample_and_score", "hold_out"])
def test_a_run_that_is_interrupted_and_resumed_ends_the_same(finished, tmp_path, phase):
    run, calls = open_run(settings(tmp_path / "cut")), []
    original = getattr(loop, phase)

    async def interrupt_the_second(run_):
        calls.append(1)
        if len(calls) == 2:
            task = asyncio.current_task()
            asyncio.get_running_loop().call_later(0.2, task.cancel)
        return await original(run_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, phase, interrupt_the_second)
        assert asyncio.run(loop.supervise(run)) == 130
    assert train(tmp_path / "cut") == finished[1]
    rows = read_metrics(tmp_path / "cut" / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]


def test_more_steps_go_on_from_a_finished_run(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "longer")
    longer = train(tmp_path / "longer", "train.steps=3")
    assert longer == train(tmp_path / "straight", "train.steps=3")


def test_a_finished_run_is_not_trained_again(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "same")
    assert train(tmp_path / "same") == finished[1]


def test_traces_hold_what_was_sampled_and_how_it_was_judged(finished):
    folder, _ = finished
    groups = [json.loads(line) for line in (folder / "rollouts/step_000001.jsonl").open()]
    assert len(groups) == 2
    for group in groups:
        assert len(group["rollouts"]) == len(group["rewards"]) == len(group["verdicts"]) == 4
        assert all(len(row) == len(group["criteria"]) for row in group["verdicts"])
        for rollout in group["rollouts"]:
            first, *rest = rollout["segments"]
            assert not first["sampled"]
            assert all(len(s["ids"]) == len(s["logps"]) for s in rest)
            assert [s["sampled"] for s in rest] == [i % 2 == 0 for i in range(len(rest))]
            assert all(x <= 0 for s in rest if s["sampled"] for x in s["logps"])
            assert len(rollout["calls"]) == sum(not s["sampled"] for s in rest)
    assert any(group["criteria"] for group in groups)


def test_sampler_and_trainer_agree_on_log_probs(finished):
    rows = [r for r in read_metrics(finished[0] / "metrics.jsonl") if r.get("trained_tokens")]
    assert rows and all(0 <= r["mismatch_kl"] <= 1e-6 for r in rows)
    assert all(r["ratio_mean"] == pytest.approx(1, abs=1e-4) for r in rows)


def test_metrics_name_the_parts_of_the_reward_and_of_the_time(finished):
    row = next(r for r in read_metrics(finished[0] / "metrics.jsonl") if "reward" in r)
    assert {f"reward/{x}" for x in ("rubric", "citation", "format", "search")} <= row.keys()
    assert {"seconds", "seconds/sampling", "seconds/judge", "tokens_per_s"} <= row.keys()


def test_a_step_with_nothing_to_learn_from_leaves_the_weights_alone(tmp_path):
    run = open_run(settings(tmp_path / "flat"))
    groups = asyncio.run(loop.sample_and_score(run))
    for group in groups:
        group.rewards = [0.25] * len(group.rewards)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    assert loop.update(run, groups) == {"flat_share": 1.0, "trained_tokens": 0, "packed_tokens": 0}
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())


def test_the_size_of_micro_batches_changes_neither_loss_nor_gradient(tmp_path):
    metrics = []
    for tokens in (700, 16384):
        run = open_run(settings(tmp_path / str(tokens), f"train.micro_batch_tokens={tokens}"))
        groups = asyncio.run(loop.sample_and_score(run))
        for group in groups:
            group.rewards = [float(k) for k in range(len(group.rewards))]
        metrics.append(loop.update(run, groups))
    few, one = metrics
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "ratio_mean"):
        assert few[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tmp_path):
    run = open_run(settings(tmp_path / "nan"))
    groups = asyncio.run(loop.sample_and_score(run))
    for i, group in enumerate(groups):
        group.rewards = [float(i + k) for k in range(len(group.rewards))]
        for rollout in group.rollouts:
            next(s for s in rollout.segments if s.sampled).logps[0] = float("nan")
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    assert loop.update(run, groups)["skipped"] == 1.0
    assert all(torch.equal(v, before[k]) for k, v in run.model.state_dict().items())


class Deaf:
    """A language model that never answers."""

    async def complete(self, request):
        return LMReply(None, "error", "connection refused")


class NotPersistent(OfflineLM):
    """A generator that fails at persistent rubrics alone."""

    async def complete(self, request):
        if request.task == "rubrics_persistent":
            return LMReply(None, "error", "connection refused")
        return await super().complete(request)


def test_a_judge_that_fails_scores_nothing_and_retires_nothing(tmp_path):
    run = open_run(settings(tmp_path / "deaf"))
    run.judge.lms = [Deaf()]
    groups = asyncio.run(loop.sample_and_score(run))
    answered = [g for g in groups if any(r.answer for r in g.rollouts)]
    assert answered
    for group in answered:
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            assert reward is None or rollout.answer is None
    assert not any(run.buffer.retired(name) for name in run.prompts)


def test_a_generator_that_fails_adds_nothing_and_is_counted(tmp_path):
    run = open_run(settings(tmp_path / "mute"))
    run.generator = Deaf()
    asyncio.run(loop.sample_and_score(run))
    assert run.notes and not any(run.buffer.criteria(name) for name in run.prompts)


def test_persistent_rubrics_that_failed_are_made_at_the_next_visit(tmp_path):
    run = open_run(settings(tmp_path / "late"))
    able, run.generator = run.generator, NotPersistent()
    groups = asyncio.run(loop.sample_and_score(run))
    assert run.notes and all(c.kind == "evolving" for g in groups for c in g.criteria)
    group = next(g for g in groups if run.buffer.criteria(g.prompt.id))
    run.generator = able
    again = asyncio.run(loop.score(run, group.rollouts))
    assert any(c.kind == "persistent" for c in again.criteria)


def test_a_first_step_that_scores_nothing_ends_the_run_with_the_reason(tmp_path, capsys):
    run = open_run(settings(tmp_path / "dead", "eval.every=9"))
    run.judge.lms = [Deaf()]
    with pytest.raises(ConfigError, match="scored none of its 8 rollouts: connection refused"):
        asyncio.run(loop.supervise(run))
    assert "8 of 8 rollouts unscored, 0 tokens trained on" in capsys.readouterr().out
    again = open_run(run.config)
    assert again.step == 0 and not list((run.folder / "rollouts").iterdir())


def test_settings_that_were_refused_do_not_bind_the_run_folder(tmp_path, capsys):
    fails(capsys, *small(tmp_path / "r", "rollout.max_prompt_tokens=5"))
    assert open_run(settings(tmp_path / "r")).step == 0


def test_evolving_rubrics_can_be_turned_off(tmp_path):
    run = open_run(settings(tmp_path / "fixed", "rubrics.evolve=false"))
    groups = asyncio.run(loop.sample_and_score(run))
    assert all(c.kind == "persistent" for g in groups for c in g.criteria)


def test_a_reference_model_pulls_only_where_beta_says_so(tmp_path):
    run = open_run(settings(tmp_path / "ref", "algo.beta=0.01"))
    groups = asyncio.run(loop.sample_and_score(run))
    for group in groups:
        group.rewards = [float(k) for k in range(len(group.rewards))]
    assert abs(loop.update(run, groups)["kl"]) < 1e-6  # policy and reference are still the same
    assert open_run(settings(tmp_path / "none")).reference is None


# ---- errors of one line


def fails(capsys, *arguments: str) -> str:
    """What the command line prints to stderr where it refuses; one line."""
    assert loop.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def small(folder: Path, *more: str) -> list[str]:
    """Command line of a small run."""
    return ["configs/almanac.toml", *SMALL, f"run.dir={folder}", *more]


def test_an_unknown_key_names_the_nearest(tmp_path, capsys):
    error = fails(capsys, *small(tmp_path / "r", "rollout.grup=4"))
    assert "rollout.grup" in error and "rollout.group" in error


def test_a_filter_that_truncates_is_refused_with_the_reason(tmp_path, capsys):
    for key in ("rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1"):
        assert "full softmax" in fails(capsys, *small(tmp_path / "r", key))


def test_a_cache_in_bytes_that_holds_no_rollout_is_refused_with_both_numbers(tmp_path, capsys):
    error = fails(capsys, *small(tmp_path / "r", "sampler.kv_bytes=1000000"))
    assert "tokens, 0.9 MiB) is too small for one sequence of 664 tokens" in error


def test_a_missing_corpus_names_the_path_and_the_command(tmp_path, capsys):
    error = fails(capsys, *small(tmp_path / "r", f"tools.corpus={tmp_path}/none.sqlite"))
    assert "none.sqlite" in error and "minirler.search index" in error


def test_prompts_without_a_corpus_are_refused(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Who?"}\n{"question": "Where?"}\n')
    assert "tools.corpus" in fails(capsys, *small(tmp_path / "r", f"data.source={data}"))


def test_an_empty_data_file_is_named(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl" in fails(
        capsys, *small(tmp_path / "r", f"data.source={tmp_path}/empty.jsonl")
    )


def test_a_prompt_that_is_too_long_is_named_with_both_numbers(tmp_path, capsys):
    error = fails(capsys, *small(tmp_path / "r", "rollout.max_prompt_tokens=8"))
    assert "prompt '" in error and " 8" in error and "tokens" in error


def test_a_context_that_is_too_small_is_refused_with_the_numbers(tmp_path, capsys):
    error = fails(
        capsys, "configs/almanac.toml", f"run.dir={tmp_path}/r", "rollout.max_tokens=5000"
    )
    assert "5000" in error and "context" in error


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    error = fails(capsys, *small(tmp_path / "file" / "run"))
    assert "run.dir" in error and "file/run" in error


def test_a_run_folder_of_other_settings_is_refused(finished, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path / "r")
    error = fails(capsys, *small(tmp_path / "r", "train.lr=1e-5"))
    assert "train.lr" in error and "run.dir" in error


def test_more_prompts_a_step_than_there_are_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rollout.prompts = 7"):
        open_run(settings(tmp_path / "r", "rollout.prompts=7"))
