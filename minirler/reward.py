"""The reward of a rollout: what its rubrics say, its format, its searches, its citations.

`apply_` fills in the rewards of a whole group, because the rules about missing verdicts are rules
about siblings: those that are compared have to be compared on the same criteria. The small
functions above it each give one component of one rollout.

Not here: asking the judge (`judge`), turning rewards into advantages (`grpo`), retiring criteria
(`rubrics`). Everything is read from the execution records and the parsed answer, never from tags in
raw text, so that text which a tool returned cannot earn anything.
"""

import math
from dataclasses import dataclass

from .config import JudgeConfig, RewardConfig
from .records import Group, Rollout

Verdicts = list[float | None]  # one a criterion, in [0, 1]; None is missing
SEARCHES_FOR_FULL_REWARD = 3


def rubric_reward(verdicts: Verdicts, weights: list[float], rule: str = "rler") -> float | None:
    """Reward of one rollout from its C verdicts in [0, 1] (None: missing) and C weights.

    "rler" (DR Tulu): sum of w*s divided by the sum of the positive weights, or by the sum of |w|
    where no weight is positive; a negative weight can make it negative. "mean" (DR-Rubric, equation
    4): the mean of s. Both look at scored criteria alone. None where nothing was scored or every
    weight of the scored criteria is 0. ValueError: unequal lengths, unknown rule.

    >>> rubric_reward([1.0, 0.5, 1.0], [1, 1, -1])
    0.25
    """
    if rule not in ("rler", "mean"):
        raise ValueError(f"rubric reward rule {rule!r} is unknown: use 'rler' or 'mean'")
    if len(verdicts) != len(weights):
        raise ValueError(f"{len(verdicts)} verdicts do not match {len(weights)} weights")
    scored = [(s, w) for s, w in zip(verdicts, weights, strict=True) if s is not None]
    if not any(w for _, w in scored):
        return None
    if rule == "mean":
        return math.fsum(s for s, _ in scored) / len(scored)
    positive = math.fsum(w for _, w in scored if w > 0)
    scale = positive or math.fsum(-w for _, w in scored)
    return math.fsum(w * s for s, w in scored) / scale


def format_reward(rollout: Rollout) -> float:
    """In [0, 1]: 0.5 for a closed answer, 0.3 for a non-empty citation with an id, 0.2 for a call.

    These are DR Tulu's. A call that was refused because the limit was reached was not executed; one
    that failed was.
    """
    answered = rollout.answer is not None
    cited = answered and any(any(c.ids) and c.text.strip() for c in rollout.citations)
    called = any(result.status != "limit" for _, result in rollout.calls)
    return 0.5 * answered + 0.3 * cited + 0.2 * called


def search_reward(rollout: Rollout) -> float:
    """DR Tulu's: in [0, 1], successful, distinct searches, 1 from three on.

    A search is a call of a tool with "search" in its name. Two calls are the same if tool,
    arguments and content are; case and spacing of the content do not matter.
    """
    calls = [c for c, result in rollout.calls if "search" in c.name and result.status == "ok"]
    distinct = {(c.name, _folded(c.content), tuple(sorted(c.arguments.items()))) for c in calls}
    return min(len(distinct) / SEARCHES_FOR_FULL_REWARD, 1.0)


def citation_reward(rollout: Rollout) -> float:
    """In [0, 1]: the share of distinct cited ids that name a snippet which this rollout has seen.

    0 without an answer or without citations. Whether a snippet supports the claim plays no part.
    """
    citations = rollout.citations if rollout.answer is not None else []
    cited = {i for c in citations for i in c.ids if i}
    return len(cited & rollout.snippets().keys()) / len(cited) if cited else 0.0


def total(components: dict[str, float | None], weights: dict[str, float]) -> float | None:
    """The weighted sum of the components; None if one is missing, unless its weight is 0."""
    needed = [(components[name], weight) for name, weight in weights.items() if weight]
    if any(value is None for value, _ in needed):
        return None
    return math.fsum(value * weight for value, weight in needed)


@dataclass(frozen=True)
class Outcome:
    """How a group's scoring went, beside the rewards themselves.

    `counted` [C]: criteria that the rubric reward used. `observed` [G][C]: the verdicts that buffer
    statistics may see, all None for rollouts that are unscored or have no answer. `dropped`: too
    few rollouts were scored, and no reward of the group counts.
    """

    counted: list[bool]
    observed: list[Verdicts]
    dropped: bool


def apply_(group: Group, reward: RewardConfig, judge: JudgeConfig) -> Outcome:
    """Fill `group.components` and `group.rewards` (None: unscored) from its verdicts and rollouts.

    - A rollout with a larger share than `judge.max_missing` of its verdicts missing is unscored.
    - A criterion that still has a gap among the scored rollouts is left out for the whole group.
    - A rollout without an answer is not missing: it gets the least rubric reward (positive criteria
      unmet, negative ones met), and 0 for searching and citing.
    - A rollout with a component missing is unscored. A group without criteria has no rubric reward,
      so that all its rollouts are unscored (unless the rubric component has weight 0).
    - With fewer than `judge.min_scored` scored rollouts the whole group is dropped.

    ValueError where `group.verdicts` is not one row a rollout with one entry a criterion.
    """
    rows = _filled_rows(group)
    judged = [_share_missing(row) <= judge.max_missing for row in rows]
    kept = [row for row, ok in zip(rows, judged, strict=True) if ok]
    counted = [all(row[c] is not None for row in kept) for c in range(len(group.criteria))]
    group.components = {
        "rubric": [
            _rubric(rows[g], group, counted, reward.rule) if ok else None
            for g, ok in enumerate(judged)
        ],
        "citation": [citation_reward(r) for r in group.rollouts],
        "format": [format_reward(r) for r in group.rollouts],
        "search": [search_reward(r) if r.answer is not None else 0.0 for r in group.rollouts],
    }
    weights = {name: getattr(reward, name) for name in group.components}
    group.rewards = [
        total({name: v[g] for name, v in group.components.items()}, weights) if ok else None
        for g, ok in enumerate(judged)
    ]
    dropped = sum(t is not None for t in group.rewards) < judge.min_scored
    if dropped:
        group.rewards = [None] * len(rows)
    return Outcome(counted, _observed(group, rows), dropped)


def _filled_rows(group: Group) -> list[Verdicts]:
    """[G][C]: the group's verdicts; the worst ones where there is no answer, whatever is there."""
    width, worst = len(group.criteria), [float(c.weight < 0) for c in group.criteria]
    verdicts = group.verdicts if width else [[] for _ in group.rollouts]
    if len(verdicts) != len(group.rollouts) or any(len(row) != width for row in verdicts):
        raise ValueError(
            f"group {group.prompt.id}: verdicts have to be {len(group.rollouts)} rows of {width}, "
            f"got rows of {[len(row) for row in verdicts]}"
        )
    return [
        worst if rollout.answer is None else row
        for rollout, row in zip(group.rollouts, verdicts, strict=True)
    ]


def _observed(group: Group, rows: list[Verdicts]) -> list[Verdicts]:
    nothing: Verdicts = [None] * len(group.criteria)
    return [
        nothing if reward is None or rollout.answer is None else row
        for rollout, row, reward in zip(group.rollouts, rows, group.rewards, strict=True)
    ]


def _share_missing(row: Verdicts) -> float:
    return sum(s is None for s in row) / len(row) if row else 0.0


def _rubric(row: Verdicts, group: Group, counted: list[bool], rule: str) -> float | None:
    use = [c for c, ok in enumerate(counted) if ok]
    return rubric_reward([row[c] for c in use], [group.criteria[c].weight for c in use], rule)


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
