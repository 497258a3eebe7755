"""The loop: sample, judge, evolve, advantage, pack, step, sync.

    python -m minirler.train [CONFIG] [key=value ...]
    python -m minirler.train replay=RUN         # run again, and tell the first difference

Without arguments it trains the small policy on the almanac, on a CPU, in minutes, with no key and
no network. A run folder that exists is resumed from its newest complete checkpoint. Ctrl-C saves
and ends; a second Ctrl-C ends at once.

Not here: how a step of the loop is done (each is a module of its own), and how the parts are put
together and kept (`run`).
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import torch

from . import monitor
from .config import ConfigError, flatten, load_config, table
from .evaluate import METRICS, evaluate
from .evolve import evolving_rubrics, persistent_rubrics
from .grpo import flat_groups
from .log import Bar, before_after, say, step_line
from .records import Group, Prompt, Rollout
from .replay import first_difference, num_steps
from .reward import apply_
from .run import Run, open_run
from .sampler import SamplingParams
from .update import update

DEFAULT = Path(__file__).parents[1] / "configs" / "almanac.toml"


async def train(run: Run, until: int | None = None) -> None:
    """Train from where the run stands to step `until` (default: `train.steps`). Cancelling is safe
    at every await: the state is whole at a step border, and nothing before `update` touches the
    weights."""
    settings = run.config.train
    until = settings.steps if until is None else until
    while True:
        if is_evaluation_due(run):
            await hold_out(run)
        if run.step >= until:
            break
        started = time.monotonic()
        groups = await sample_and_score(run)
        metrics = update(run, groups)
        run.sampler.weights_changed()
        run.step += 1
        report(run, groups, metrics, time.monotonic() - started)
        run.capture()
        lasting = monitor.lasting(run.log.rows, run.config.monitor.patience)
        ends = bool(lasting) and run.config.monitor.stop
        if ends or run.step % settings.checkpoint_every == 0 or run.step == settings.steps:
            run.save()
        if ends:
            say(f"stopped (monitor.stop): {', '.join(lasting)}")
            break


async def sample_and_score(run: Run) -> list[Group]:
    """The groups of one step, in prompt order.

    `rollout.refill` times, prompts are drawn for the groups that turned out flat (DAPO's dynamic
    sampling, arXiv 2503.14476); the flat ones stay in the step, and its rubrics, unless dropped.
    """
    groups = await sample_groups(run, run.next_prompts(run.config.rollout.prompts))
    for _ in range(run.config.rollout.refill):
        seen = {group.prompt.id for group in groups}
        missing = run.config.rollout.prompts - sum(not is_flat(group) for group in groups)
        more = run.next_prompts(missing) if missing > 0 else []
        more = [prompt for prompt in more if prompt.id not in seen]  # a new epoch may repeat some
        if not more:
            break
        groups += await sample_groups(run, more)
    return groups


def is_flat(group: Group) -> bool:
    """Whether a group has nothing to learn from: no spread of rewards among its scored rollouts."""
    values = torch.tensor([reward or 0.0 for reward in group.rewards])
    scored = torch.tensor([reward is not None for reward in group.rewards])
    return bool(flat_groups(values, [0] * len(values), scored).all())


async def sample_groups(run: Run, prompts: list[Prompt]) -> list[Group]:
    """The groups of `prompts`. A group is judged while the others still decode."""
    cfg = run.config.rollout
    ids = [run.prompt_ids(prompt) for prompt in prompts]
    params = SamplingParams(temperature=cfg.temperature, seed=run.config.run.seed)
    scoring = []
    with Bar(len(prompts) * cfg.group, f"step {run.step + 1}") as bar:
        stream = run.engine.run(prompts, ids, cfg.group, params, run.step, on_progress=bar)
        async with aclosing(stream):
            async for rollouts in stream:
                scoring.append(asyncio.create_task(score(run, rollouts)))
    with run.timers("judge"):
        groups = {group.prompt.id: group for group in await asyncio.gather(*scoring)}
    return [groups[prompt.id] for prompt in prompts]


async def score(run: Run, rollouts: list[Rollout]) -> Group:
    """Judge one group: by persistent rubrics, and by evolving ones from its own contrast."""
    cfg, buffer, prompt = run.config.rubrics, run.buffer, run.prompts[rollouts[0].prompt_id]
    with run.timers("judge"):
        if not any(rubric.kind == "persistent" for rubric in buffer.criteria(prompt.id)):
            rubrics, why = await persistent_rubrics(run.generator, run.search, prompt, cfg)
            buffer.add(prompt.id, rubrics)
            run.notes += [why] if why else []
        new = []
        if cfg.evolve and run.step % cfg.evolve_every == 0:
            new, why = await evolving_rubrics(
                run.generator, prompt, rollouts, buffer, cfg, run.step
            )
            run.notes += [why] if why else []
        if cfg.score_new == "same_step":
            buffer.add(prompt.id, new)
        group = Group(prompt, rollouts, buffer.criteria(prompt.id))
        answers = [rollout.answer for rollout in rollouts]
        group.verdicts = await run.judge.score_group(prompt.question, answers, group.criteria)
        outcome = apply_(group, run.config.reward, run.config.judge)
        buffer.observe(prompt.id, [c.id for c in group.criteria], outcome.observed)
        if cfg.score_new == "next_visit":
            buffer.add(prompt.id, new)
    return group


def is_evaluation_due(run: Run) -> bool:
    """At the start, every `eval.every` steps and at the end, once each, if there is a gold
    judge."""
    due = (
        run.step in (0, run.config.train.steps) or run.step % (run.config.eval.every or 10**9) == 0
    )
    return bool(run.held_out) and due and run.step not in run.evaluations


async def hold_out(run: Run) -> None:
    """Evaluate on the held-out entries and note the result."""
    with Bar(len(run.held_out), "held out") as bar:
        row = await evaluate(
            run.engine, run.world, run.held_out, [run.prompt_ids(p) for p in run.held_out],
            run.config.eval.temperature, run.config.run.seed, run.step, bar,
        )  # fmt: skip
    run.evaluations[run.step] = row
    run.log.write({"step": run.step} | {f"held_out/{name}": x for name, x in row.items()})
    run.timers.reset()
    say(f"held out at step {run.step}: gold coverage {row['gold']:.3f}, {row['tokens']:.0f} tokens")


def report(run: Run, groups: list[Group], metrics: dict, seconds: float) -> None:
    """Write the step to the run folder and one line of it to the console."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.num_sampled() for rollout in rollouts)
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    row = {"reward": mean(rewards)}
    for name in groups[0].components:
        values = [x for group in groups for x in group.components[name] if x is not None]
        row[f"reward/{name}"] = mean(values)
    if run.evaluations:
        row["held_out"] = run.evaluations[max(run.evaluations)]["gold"]
    row |= metrics | {
        "unscored": sum(r is None for g in groups for r in g.rewards),
        "answer_tokens": tokens / len(rollouts),
        "answered": mean([float(r.answer is not None) for r in rollouts]),
        "length_stops": mean([float(r.stop_reason == "length") for r in rollouts]),
        "calls": mean([float(len(r.calls)) for r in rollouts]),
        "criteria": mean([float(len(g.criteria)) for g in groups]),
        "seconds": seconds, "tokens_per_s": tokens / seconds,
    }  # fmt: skip
    row |= {f"seconds/{name}": x for name, x in run.timers.reset().items()}
    row |= {f"judge/{name}": x for name, x in vars(run.judge.take_counts()).items()}
    row |= {"generator_notes": len(run.notes), "last_note": run.notes[-1] if run.notes else ""}
    row |= monitor.indicators(groups)
    ringing = monitor.lasting(run.log.rows, 1)
    row["alarms"] = monitor.alarms([*run.log.rows, row])
    run.notes.clear()
    run.record(groups, row)
    left = run.config.train.steps - run.step
    say(step_line(run.step, run.config.train.steps, row, left * seconds))
    for name in row["alarms"]:
        if name not in ringing:  # told once, where it begins
            say(f"  alarm {name}: {monitor.ALARMS[name][1]}")


def mean(values: list[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


async def supervise(run: Run) -> int:
    """`train`, then the table of what it brought. The first Ctrl-C cancels this task: save and
    end."""
    try:
        await train(run)
    except asyncio.CancelledError:
        run.save()
        say(f"\ninterrupted: saved step {run.captured['step']} in {run.folder}; run again to go on")
        return 130
    if run.evaluations:
        first, last = min(run.evaluations), max(run.evaluations)
        say(f"\nheld-out questions, step {first} -> step {last}")
        say(before_after(run.evaluations[first], run.evaluations[last], dict(METRICS)))
    hashes = run.hashes()
    (run.folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")
    say("hashes: " + "  ".join(f"{name} {value[:12]}" for name, value in hashes.items()))
    say(f"run folder: {run.folder}")
    return 0


def replay(folder: Path) -> str | None:
    """Run what `folder` holds again in a scratch folder next to it, step by step; returns the first
    difference in words, None if there is none.

    Raises ConfigError for a run that need not come out the same.
    """
    config = load_config([str(folder / "config.toml")])
    fixed = {"train.deterministic": True, "judge.backend": "offline", "tools.backend": "local"}
    for name, wanted in fixed.items():
        if (value := flatten(config)[name]) != wanted:
            raise ConfigError(f"{folder} had {name} = {value!r}: only {wanted!r} can be replayed")
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    steps = num_steps(folder)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-replay-", dir=folder.parent) as scratch:
        run = open_run(replace(config, run=replace(config.run, dir=scratch)))
        run.held_out.clear()  # evaluations change nothing that is compared
        for step in range(1, steps + 1):
            asyncio.run(train(run, step))
            if difference := first_difference(folder, run.folder, step):
                return difference
        stored, hashes = folder / "hashes.json", run.hashes()
        old = json.loads(stored.read_text()) if stored.exists() else hashes
        # those of an earlier end say nothing of the steps that came after it
        if old["traces"] == hashes["traces"] and old != hashes:
            return f"step {steps}: hashes {old}, in the replay {hashes}"
    return None


def main_replay(folder: Path) -> int:
    """`replay=RUN`: 0 where the run came out the same, 1 where not, 2 where it cannot be run."""
    try:
        difference = replay(folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(difference or f"{folder}: all {num_steps(folder)} steps came out the same")
    return int(difference is not None)


def main(argv: list[str] | None = None) -> int:
    """Command line. What the user can mend (setting, file, disk) is an error of one line."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].startswith("replay="):
        return main_replay(Path(argv[0].removeprefix("replay=")))
    try:
        config = load_config(argv, DEFAULT)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        say(table(config))
        run = open_run(config)
        say(run.sampler.room(config.rollout.max_prompt_tokens + config.rollout.max_tokens))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        say(f"{run.folder}: {len(run.prompts)} prompts, {config.train.steps} steps, at {run.step}")
        return asyncio.run(supervise(run))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
