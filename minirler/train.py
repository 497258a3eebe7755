"""The loop: sample, judge, evolve, advantage, pack, step, sync.

    python -m minirler.train [CONFIG] [key=value ...]
    torchrun --nproc-per-node 8 -m minirler.train [CONFIG] [key=value ...]
    python -m minirler.train replay=RUN         # run again, and tell the first difference

Without arguments it trains the small policy on the almanac, on a CPU, in minutes, with no key and
no network. A run folder that exists is resumed from its newest complete checkpoint. Ctrl-C saves
and ends; a second Ctrl-C ends at once. Several ranks share a step's prompts, then its tokens; each
holds all groups and the same rubric buffer. Ctrl-C ends them after the step.

Not here: how a step of the loop is done (each is a module of its own), and how the parts are put
together and kept (`run`).
"""

import asyncio
import json
import signal
import sys
import time
import traceback
from contextlib import aclosing
from pathlib import Path

import torch

from . import monitor
from .attention import lent
from .config import ConfigError, load_config, table
from .evaluate import METRICS, evaluate
from .evolve import evolving_rubrics, persistent_rubrics
from .grpo import flat_groups
from .log import Bar, before_after, say
from .ranks import Ranks, join
from .records import Group, Prompt, Rollout
from .replay import replay
from .report import report
from .reward import apply_
from .run import Run, open_run
from .sampler import SamplingParams
from .update import update

MAX_SKIPS = 3  # steps in a row without a finite loss and gradient, after which a run ends
DEFAULT = Path(__file__).parents[1] / "configs" / "almanac.toml"


async def train(run: Run, until: int | None = None) -> None:
    """Train from where the run stands to step `until` (`train.steps`). Cancelling is safe at every
    await: the state is whole at a step border, and nothing before `update` touches the weights."""
    settings = run.config.train
    while True:
        if is_evaluation_due(run):
            await hold_out(run)
        if run.step >= (settings.steps if until is None else until):
            break
        started = time.monotonic()
        groups = await sample_and_score(run)
        with lent(run.sampler.cache):
            metrics = update(run, groups)
        run.policy.sync_()
        run.sampler.weights_changed()
        run.step += 1
        report(run, groups, metrics, time.monotonic() - started)
        run.capture()
        lasting = run.ranks.gather(monitor.lasting(run.rows, run.config.monitor.patience))[0]
        is_lost, is_ending = run.skips >= MAX_SKIPS, any(run.ranks.gather(run.should_end))
        ends = bool(lasting) and run.config.monitor.stop
        is_due = run.step % settings.checkpoint_every == 0 or run.step == settings.steps
        if ends or is_lost or is_ending or is_due:
            run.save()
        if is_lost:
            raise FloatingPointError(
                f"loss or gradient was not finite in {run.skips} steps in a row; step {run.step} is"
                f" saved in {run.folder}: lower train.lr, or look at its rollouts"
            )
        if is_ending:
            raise asyncio.CancelledError
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
    prompts = run.ranks.share(prompts)
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
    return exchange(run, [groups[prompt.id] for prompt in prompts])


def exchange(run: Run, groups: list[Group]) -> list[Group]:
    """The groups of all ranks in prompt order, of this rank's; all buffers then agree."""
    mine = {group.prompt.id for group in groups}
    groups = run.ranks.unshare(groups)
    for group in groups:
        if group.prompt.id not in mine:
            for method, arguments in group.changes:
                getattr(run.buffer, method)(group.prompt.id, *arguments)
    run.notes = [note for notes in run.ranks.gather(run.notes) for note in notes]
    return groups


async def score(run: Run, rollouts: list[Rollout]) -> Group:
    """Judge one group: by persistent rubrics, and by evolving ones from its own contrast."""
    cfg, buffer, prompt = run.config.rubrics, run.buffer, run.prompts[rollouts[0].prompt_id]
    changes = []

    def change(method: str, *arguments) -> None:
        changes.append((method, arguments))
        getattr(buffer, method)(prompt.id, *arguments)

    with run.timers("judge"):
        if not any(rubric.kind == "persistent" for rubric in buffer.criteria(prompt.id)):
            rubrics, why = await persistent_rubrics(run.generator, run.search, prompt, cfg)
            change("add", rubrics)
            run.notes += [why] if why else []
        new = []
        if cfg.evolve and run.step % cfg.evolve_every == 0:
            new, why = await evolving_rubrics(
                run.generator, prompt, rollouts, buffer, cfg, run.step
            )
            run.notes += [why] if why else []
        if cfg.score_new == "same_step":
            change("add", new)
        group = Group(prompt, rollouts, buffer.criteria(prompt.id), changes=changes)
        answers = [rollout.answer for rollout in rollouts]
        group.verdicts = await run.judge.score_group(prompt.question, answers, group.criteria)
        outcome = apply_(group, run.config.reward, run.config.judge)
        change("observe", [c.id for c in group.criteria], outcome.observed)
        if cfg.score_new == "next_visit":
            change("add", new)
    return group


def is_evaluation_due(run: Run) -> bool:
    """At the start, every `eval.every` steps and at the end, once each, if entries are held out."""
    due = (
        run.step in (0, run.config.train.steps) or run.step % (run.config.eval.every or 10**9) == 0
    )
    return bool(run.held_out) and due and run.step not in run.evaluations


async def hold_out(run: Run) -> None:
    """Evaluate on the held-out entries and note the result."""
    with Bar(len(run.held_out), "held out") as bar:
        row = await evaluate(
            run.engine, run.world, run.held_out, [run.prompt_ids(p) for p in run.held_out],
            run.config.eval.temperature, run.config.run.seed, run.step, bar, run.ranks,
        )  # fmt: skip
    run.evaluations[run.step] = row
    run.write({f"held_out/{name}": x for name, x in row.items()})
    run.timers.reset()
    say(f"held out at step {run.step}: gold coverage {row['gold']:.3f}, {row['tokens']:.0f} tokens")


async def supervise(run: Run) -> int:
    """`train`, then the table of what it brought. The first Ctrl-C cancels this task: save and
    end. One of several ranks must not leave the others in mid-step: it waits for the step's end."""
    if run.ranks.size > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, run.end_soon)
    try:
        await train(run)
    except asyncio.CancelledError:
        run.save()
        say(f"\ninterrupted: saved step {run.captured['step']} in {run.folder}; run again to go on")
        return 130
    finally:
        await run.close()
    if run.evaluations:
        first, last = min(run.evaluations), max(run.evaluations)
        say(f"\nheld-out questions, step {first} -> step {last}")
        say(before_after(run.evaluations[first], run.evaluations[last], dict(METRICS)))
    hashes = run.hashes()
    if run.ranks.is_first:
        (run.folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")
    say("hashes: " + "  ".join(f"{name} {value[:12]}" for name, value in hashes.items()))
    say(f"run folder: {run.folder}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line; a rank that fails takes the others with it, and they say why."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].startswith("replay="):
        return replay(Path(argv[0].removeprefix("replay=")), train)
    ranks = join()
    try:
        status = start(argv, ranks)
    except BaseException as error:
        if ranks.size > 1:
            traceback.print_exc()
        ranks.fail(error)
        raise
    ranks.leave()
    return status


def start(argv: list[str], ranks: Ranks) -> int:
    """Train. What the user can mend (setting, file, disk) is an error of one line."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        config = load_config(argv, DEFAULT)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        say(table(config))
        run = open_run(config, ranks)
        say(run.sampler.room(config.rollout.max_prompt_tokens + config.rollout.max_tokens))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        ranks.fail(error)
        return 2
    try:
        say(f"{run.folder}: {len(run.prompts)} prompts, {config.train.steps} steps, at {run.step}")
        return asyncio.run(supervise(run))
    except (ConfigError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        ranks.fail(error)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
