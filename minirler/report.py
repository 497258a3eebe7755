"""What a step says: its row of metrics.jsonl, its console line, and what went wrong in it.

Not here: how lines and rows are written (`log`), and when an alarm rings (`monitor`).
"""

from collections.abc import Iterator

from . import monitor
from .config import ConfigError
from .log import mean, say, step_line
from .records import Group
from .run import Run


def report(run: Run, groups: list[Group], metrics: dict, seconds: float) -> None:
    """Write the step to the run folder and one line of it to the console.

    ConfigError where the first step of a run has scored nothing: the others would not either, and
    each costs what its tools and its judge cost.
    """
    row = step_row(run, groups, metrics, seconds)
    ringing = monitor.lasting(run.rows, 1)
    row["alarms"] = monitor.alarms([*run.rows, row])
    run.record(groups, row)
    settings = run.config.train
    say(step_line(run.step, settings.steps, row, (settings.steps - run.step) * seconds))
    for name in row["alarms"]:
        if name not in ringing:  # told once, where it begins
            say(f"  alarm {name}: {monitor.ALARMS[name][1]}")
    count = sum(len(group.rewards) for group in groups)
    why = row["last_note"] or row["judge/last_error"]
    if row["unscored"] or not row["trained_tokens"]:
        say(f"  {row['unscored']} of {count} rollouts unscored, {row['trained_tokens']} tokens "
            f"trained on{': ' * bool(why)}{why}")  # fmt: skip
    if run.step == 1 and row["unscored"] == count:
        raise ConfigError(f"the first step scored none of its {count} rollouts: {why}")


def step_row(run: Run, groups: list[Group], metrics: dict, seconds: float) -> dict:
    """The row of metrics.jsonl; README explains its keys."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.num_sampled() for rollout in rollouts)
    rewards = [reward for group in groups for reward in group.rewards]
    row = {"reward": mean([reward for reward in rewards if reward is not None])}
    for name in groups[0].components:
        values = [x for group in groups for x in group.components[name] if x is not None]
        row[f"reward/{name}"] = mean(values)
    if run.evaluations:
        row["held_out"] = run.evaluations[max(run.evaluations)]["gold"]
    row |= metrics | {
        "unscored": rewards.count(None),
        "sampled_tokens": tokens / len(rollouts),
        "answered": mean([float(r.answer is not None) for r in rollouts]),
        "length_stops": mean([float(r.stop_reason == "length") for r in rollouts]),
        "calls": mean([float(len(r.calls)) for r in rollouts]),
        "criteria": mean([float(len(g.criteria)) for g in groups]),
        "seconds": seconds, "tokens_per_s": tokens / seconds,
    }  # fmt: skip
    row |= {f"seconds/{name}": x for name, x in run.timers.reset().items()}
    counts = run.ranks.gather(vars(run.judge.take_counts()))
    row |= {f"judge/{name}": add(part[name] for part in counts) for name in counts[0]}
    row |= {"generator_notes": len(run.notes), "last_note": run.notes[-1] if run.notes else ""}
    run.notes.clear()
    return row | monitor.indicators(groups)


def add(parts: Iterator) -> float | str:
    """The sum over the ranks; of texts the first that says something."""
    first, *others = parts
    for other in others:
        first = first or other if isinstance(first, str) else first + other
    return first
