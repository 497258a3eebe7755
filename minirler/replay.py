"""What a step leaves behind to be compared with, and the first place where two runs differ.

    python -m minirler.train replay=RUN     runs RUN again in a scratch folder next to it

A trace holds every token that was sampled, with its log-prob, every call with its result, every
criterion, verdict and reward, and no times. A deterministic run gives it again, bit for bit, where
tools and judge do: the local corpus and the offline judge.

Not here: running (`train`). No torch.
"""

import dataclasses
import json
from itertools import zip_longest
from pathlib import Path

from .records import Group


def trace(group: Group) -> dict:
    """A group as JSON: enough to judge it again or to look at it. No times, so that it replays."""
    return {
        "prompt": dataclasses.asdict(group.prompt),
        "criteria": [dataclasses.asdict(c) for c in group.criteria],
        "verdicts": group.verdicts,
        "components": group.components,
        "rewards": group.rewards,
        "rollouts": [
            dataclasses.asdict(r)
            | {"calls": [(dataclasses.asdict(c), _timeless(result)) for c, result in r.calls]}
            for r in group.rollouts
        ],
    }


def _timeless(result) -> dict:
    return {k: v for k, v in dataclasses.asdict(result).items() if k != "seconds"}


def step_path(folder: Path, step: int) -> Path:
    """Where the traces of `step` lie in a run folder."""
    return folder / "rollouts" / f"step_{step:06d}.jsonl"


def num_steps(folder: Path) -> int:
    """How many steps a run folder holds. ValueError where there is none, or one is missing."""
    names = [path.stem for path in (folder / "rollouts").glob("step_*.jsonl")]
    steps = sorted(int(name.removeprefix("step_")) for name in names)
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise ValueError(f"{folder / 'rollouts'} lacks a step: it holds {steps}")
    return len(steps)


def first_difference(stored: Path, again: Path, step: int) -> str | None:
    """Where `step` of two run folders first differs, in words; None if it does not.

    Tokens come first, in the order of prompts, samples and positions: what follows from them
    differs too. A position counts all tokens of a rollout from 0, those of the prompt included.
    """
    groups = [_lines(step_path(folder, step)) for folder in (stored, again)]
    for old, new in zip_longest(*groups, fillvalue={}):
        if (name := _name(old)) != _name(new):
            return f"step {step}: prompt {name!r}, in the replay {_name(new)!r}"
        for a, b in zip_longest(old["rollouts"], new["rollouts"], fillvalue={}):
            where = f"step {step}, rollout {name}/{(a or b)['sample']}"
            for position, (x, y) in enumerate(zip_longest(_tokens(a), _tokens(b))):
                if x != y:
                    return f"{where}, token {position}: {_spelled(x)}, in the replay {_spelled(y)}"
            if keys := _differing(a, b):
                return f"{where}: other {keys}"
        if keys := _differing(old, new):
            return f"step {step}, prompt {name}: other {keys}"
    events = [[e for e in _lines(folder / "rubrics.jsonl") if e["step"] == step]
              for folder in (stored, again)]  # fmt: skip
    for old, new in zip_longest(*events):
        if old != new:
            return f"step {step}, rubrics.jsonl: {json.dumps(old)}, in the replay {json.dumps(new)}"
    return None


def _lines(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _name(group: dict) -> str | None:
    return group["prompt"]["id"] if group else None


def _tokens(rollout: dict) -> list[tuple[int, float, bool]]:
    """(id, log-prob, was it sampled?) of every token."""
    return [(token, logp, s["sampled"]) for s in rollout.get("segments", ())
            for token, logp in zip(s["ids"], s["logps"], strict=True)]  # fmt: skip


def _spelled(token: tuple[int, float, bool] | None) -> str:
    if token is None:
        return "none"
    return f"id {token[0]} (log-prob {token[1]!r}{'' if token[2] else ', not sampled'})"


def _differing(old: dict, new: dict) -> str:
    return ", ".join(key for key in old if old[key] != new.get(key))
