"""What goes wrong in training while the reward rises: indicators of a step, and alarms about them.

    python -m minirler.monitor RUN        the alarms of a stored run, by step

An alarm is a function of the rows of metrics.jsonl up to a step and of nothing else, so a resumed
run has those of the run that was never interrupted, and a stored one can be read again. The
thresholds are ours where no paper gives one; they are in ALARMS, each with what to do.

Not here: what ends a run (`train`, with `monitor.stop`), and any torch.
"""

import sys
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from .log import read_metrics
from .records import Group

WINDOW = 5  # steps that are averaged, because a single one is noise
FLOOR = 0.02  # of the factor-two threshold in `stop_step`: 0 must not stop every run


def polarization(rewards: Iterable[float | None]) -> float:
    """Share of the rewards that are 0 or at least 0.99; None (unscored) does not count.

    DR-Rubric, section 4.4 and appendix I.5: a policy that games its rubrics has all or nothing.
    """
    scored = [reward for reward in rewards if reward is not None]
    return sum(r == 0 or r >= 0.99 for r in scored) / len(scored) if scored else 0.0


def stop_step(polarizations: list[float], rule: str = "max") -> int | None:
    """The first step (from 1) whose polarization is above its threshold; None: never. It latches.

    "max": threshold max(0.15, twice the step before), DR-Rubric's equation 10. That misses the stop
    that its table 20 reports for 14B; "either" stops where one of the two is passed, and has both.
    """
    if rule not in ("max", "either"):
        raise ValueError(f"rule {rule!r} is unknown: use 'max' or 'either'")
    for step, value in enumerate(polarizations, 1):
        limit = 0.15
        if step > 1:
            twice = max(FLOOR, 2 * polarizations[step - 2])
            limit = max(limit, twice) if rule == "max" else min(limit, twice)
        if value > limit:
            return step
    return None


def indicators(groups: list[Group]) -> dict[str, float]:
    """Shares of one step, in [0, 1]: `polarization` of the rubric rewards, `missing` verdicts of
    rollouts with an answer, `dead` (met by nobody) and `saturated` (by all) positive criteria,
    `corruption` of the text."""
    rewards = [r for group in groups for r in group.components.get("rubric", ())]
    verdicts, dead, saturated, criteria = [], 0, 0, 0
    for group in groups:
        rows = zip(group.rollouts, group.verdicts, strict=False)
        rows = [row for rollout, row in rows if rollout.answer is not None]
        verdicts += [verdict for row in rows for verdict in row]
        for criterion, column in zip(group.criteria, zip(*rows, strict=True), strict=False):
            known = [verdict for verdict in column if verdict is not None]
            if criterion.weight > 0 and len(known) > 1:
                criteria += 1
                dead += max(known) == 0
                saturated += min(known) == 1
    return {
        "polarization": polarization(rewards),
        "missing": verdicts.count(None) / max(1, len(verdicts)),
        "dead": dead / max(1, criteria),
        "saturated": saturated / max(1, criteria),
        "corruption": corruption(groups),
    }


def corruption(groups: list[Group]) -> float:
    """Share of the letters that the policy wrote in a script that its prompt does not have."""
    foreign = letters = 0
    for group in groups:
        known = scripts("".join(m["content"] for m in group.prompt.messages))
        for rollout in group.rollouts:
            written = [name for c in rollout.text if (name := script(c))]
            letters += len(written)
            foreign += sum(name not in known for name in written)
    return foreign / max(1, letters)


def scripts(text: str) -> set[str]:
    """The scripts of the letters in `text`: {"LATIN", "CJK", ...}."""
    return {name for c in text if (name := script(c))}


@lru_cache(maxsize=4096)
def script(character: str) -> str:
    """The script of a letter, by its Unicode name; "" of what is no letter."""
    if not character.isalpha():
        return ""
    return unicodedata.name(character, "UNNAMED").split()[0].split("-")[0]


def alarms(rows: list[dict]) -> list[str]:
    """The names of the alarms at the last of the rows of metrics.jsonl, steps and evaluations."""
    steps = [row for row in rows if "reward" in row]
    return [name for name, (rings, _) in ALARMS.items() if steps and rings(steps, rows)]


def lasting(rows: list[dict], patience: int) -> list[str]:
    """The alarms that the last `patience` steps all had."""
    last = [set(row.get("alarms", ())) for row in rows if "reward" in row][-patience:]
    return sorted(set.intersection(*last)) if len(last) == patience else []


def mean(steps: list[dict], name: str, first: bool = False) -> float | None:
    """Mean of a metric over the last (or the first) WINDOW steps that have it; None: too few."""
    values = [row[name] for row in steps if row.get(name) is not None]
    values = values[:WINDOW] if first else values[-WINDOW:]
    return sum(values) / WINDOW if len(values) == WINDOW else None


def above(name: str, limit: float):
    """Rings where the mean of a metric is above `limit`."""
    return lambda steps, rows: (mean(steps, name) or 0.0) > limit


def has_drifted(steps: list[dict], rows: list[dict]) -> bool:
    """Whether reports are half as long again as at first, or a third shorter."""
    before, now = mean(steps, "sampled_tokens", first=True), mean(steps, "sampled_tokens")
    return bool(before) and not 2 / 3 <= now / before <= 1.5


def has_polarized(steps: list[dict], rows: list[dict]) -> bool:
    """Whether polarization is above 0.15 and above twice what it was at first."""
    before, now = mean(steps, "polarization", first=True), mean(steps, "polarization")
    return now is not None and now > max(0.15, 2 * before)


def has_collapsed(steps: list[dict], rows: list[dict]) -> bool:
    """Whether entropy is below a fifth of what it was at first."""
    before, now = mean(steps, "entropy", first=True), mean(steps, "entropy")
    return now is not None and now < before / 5


def is_gradient_dead(steps: list[dict], rows: list[dict]) -> bool:
    """Whether the loss is 0 and the gradient below a tenth of its trailing mean."""
    norms = [row["grad_norm"] for row in steps if row.get("grad_norm") is not None]
    if steps[-1].get("loss") or len(norms) <= WINDOW:
        return False
    return norms[-1] < 0.1 * sum(norms[-WINDOW - 1 : -1]) / WINDOW


def has_kl_jumped(steps: list[dict], rows: list[dict]) -> bool:
    """Whether the KL is five times the most that it was before."""
    values = [row["kl"] for row in steps if row.get("kl") is not None]
    return len(values) > WINDOW and values[-1] > max(1e-3, 5 * max(values[:-1]))


def is_gamed(steps: list[dict], rows: list[dict]) -> bool:
    """Whether held-out gold fell by 0.02 between the last two evaluations while the training reward
    between them was 0.02 above that before the first."""
    at = [i for i, row in enumerate(rows) if row.get("held_out/gold") is not None]
    if len(at) < 3:
        return False
    before, now = (
        [row["reward"] for row in rows[a:b] if row.get("reward") is not None]
        for a, b in zip(at[-3:], at[-2:], strict=False)
    )
    fell = rows[at[-2]]["held_out/gold"] - rows[at[-1]]["held_out/gold"]
    return bool(before and now) and fell > 0.02 < sum(now) / len(now) - sum(before) / len(before)


# name: (does it ring at the last of the steps, given all rows?, what it says)
ALARMS = {
    "flat": (above("flat_share", 0.5), "more than half of the groups have no spread: criteria are "
             "too easy or too hard, or the temperature is too low"),
    "dead": (above("dead", 0.5), "more than half of the positive criteria are met by no report"),
    "saturated": (above("saturated", 0.5), "more than half of the positive criteria are met by all "
                  "reports"),
    "length": (has_drifted, "reports have become much longer or shorter than at first: look for "
               "padding, or for a criterion that punishes what it should ask for"),
    "missing": (above("missing", 0.1), "more than a tenth of the verdicts is missing: the judge "
                "fails, see the judge/ columns"),
    "gap": (is_gamed, "the training reward rises while held-out gold falls: the judge is gamed"),
    "polarized": (has_polarized, "rewards are all or nothing (DR-Rubric's sign of gaming)"),
    "entropy": (has_collapsed, "entropy is below a fifth of what it was at first: lower the rate"),
    "gradient": (is_gradient_dead, "the loss is 0 and the gradient has died"),
    "kl": (has_kl_jumped, "the KL is five times its highest value so far: lower the rate"),
    "corruption": (above("corruption", 0.02), "the policy writes in scripts that the prompt does "
                   "not have"),
}  # fmt: skip


def main(folder: str) -> None:
    """Print the alarms of a stored run, where they begin."""
    rows, ringing = read_metrics(Path(folder) / "metrics.jsonl"), set()
    for i, row in enumerate(rows):
        if "reward" in row:
            now = set(alarms(rows[: i + 1]))
            for name in sorted(now - ringing):
                print(f"step {row['step']}: {name}: {ALARMS[name][1]}")
            ringing = now
    print(f"{folder}: {sum('reward' in row for row in rows)} steps, ringing at the end: "
          f"{', '.join(sorted(ringing)) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "metrics.jsonl").is_file():
        sys.exit("usage: python -m minirler.monitor RUN, a run folder with a metrics.jsonl")
    main(sys.argv[1])
