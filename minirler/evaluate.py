"""Held-out evaluation of the policy on the almanac, by the true facts (`world.gold_coverage`).

`evaluate` samples one report a held-out entry and returns means. The gold score is for people to
look at: no training reward ever sees it. The noise is the same at every evaluation, so that two
evaluations differ by the policy alone.

Not here: benchmarks of real models.
"""

from collections.abc import Callable
from contextlib import aclosing

from .ranks import ALONE, Ranks
from .records import Prompt, Rollout
from .reward import citation_reward, format_reward, search_reward
from .rollout import RolloutEngine
from .sampler import SamplingParams
from .world import World, gold_coverage

METRICS = (
    ("gold", "gold coverage: true facts stated and cited"),
    ("format", "format reward"),
    ("search", "search reward"),
    ("citation", "citation reward: cited ids that exist"),
    ("answered", "share with an answer"),
    ("calls", "tool calls"),
    ("tokens", "tokens sampled"),
)


async def evaluate(
    engine: RolloutEngine, world: World, prompts: list[Prompt], ids: list[list[int]],
    temperature: float, seed: int, step: int,
    on_progress: Callable[[int, int], None] | None = None, ranks: Ranks = ALONE,
) -> dict[str, float]:  # fmt: skip
    """Means over `prompts` (one rollout each) of METRICS, all in [0, 1] but the two counts.

    Each rank samples its share of them, and all get the means.
    """
    params = SamplingParams(temperature=temperature, seed=seed)
    prompts, ids, rows = ranks.share(prompts), ranks.share(ids), []
    stream = engine.run(prompts, ids, 1, params, step, noise_step=0, on_progress=on_progress)
    async with aclosing(stream):
        async for (rollout,) in stream:
            rows.append(measure(world, rollout))
    rows = [row for part in ranks.gather(rows) for row in part]
    return {name: sum(r[name] for r in rows) / len(rows) for name, _ in METRICS}


def measure(world: World, rollout: Rollout) -> dict[str, float]:
    """METRICS of one rollout."""
    return {
        "gold": gold_coverage(world.entries[rollout.prompt_id], rollout),
        "format": format_reward(rollout),
        "search": search_reward(rollout),
        "citation": citation_reward(rollout),
        "answered": float(rollout.answer is not None),
        "calls": float(len(rollout.calls)),
        "tokens": float(rollout.num_sampled()),
    }
