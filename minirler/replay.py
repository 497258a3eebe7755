"""A stored run once more: does each step come out the same, and if not, where first not?

    python -m minirler.train replay=RUN     runs RUN again in a scratch folder next to it

A run's traces hold every token that was sampled, with its log-prob, every call with its result,
every criterion, verdict and reward, and no times. A deterministic run gives them again, bit for
bit, where tools and judge do: the local corpus and the offline judge.

Not here: the loop, which `train` hands in.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from .config import ConfigError, flatten, load_config
from .log import say
from .run import Run, open_run

FIXED = {"train.deterministic": True, "judge.backend": "offline", "tools.backend": "local"}
Train = Callable[[Run, int], Awaitable[None]]  # train.train: to a step


def replay(folder: Path, train: Train) -> int:
    """Say whether the run came out the same: 0 if it did, 1 if not, 2 where it cannot be run."""
    try:
        difference = replayed(folder, train)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(difference or f"{folder}: all {num_steps(folder)} steps came out the same")
    return int(difference is not None)


def replayed(folder: Path, train: Train) -> str | None:
    """Run again what `folder` holds, step by step; the first difference in words, None for none.

    Raises ConfigError for a run that need not come out the same.
    """
    config = load_config([str(folder / "config.toml")])
    for name, wanted in FIXED.items():
        if (value := flatten(config)[name]) != wanted:
            raise ConfigError(f"{folder} had {name} = {value!r}: only {wanted!r} can be replayed")
    steps = num_steps(folder)
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
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
