"""The held-out score is a mean over rollouts, and the same noise serves every evaluation."""

import asyncio

import pytest

from minirler.evaluate import METRICS, evaluate, measure
from minirler.records import Rollout, Segment, Snippet, ToolCall, ToolResult
from minirler.tools import parse_citations
from minirler.world import make_prompt, make_world

WORLD = make_world(3, 2, 2)
NAMES = WORLD.held_out


def perfect(name: str) -> Rollout:
    """A rollout that states and cites every true fact of an entry."""
    entry = WORLD.entries[name]
    claims = [f"Its {f.attr} is {f.value.title()}." for f in entry.facts]
    source = Snippet("k-0", name, " ".join(claims), entry.documents[0])
    answer = f'<cite id="k-0">{" ".join(claims)}</cite>'
    call = ToolCall("local_search", {}, name), ToolResult("ok", snippets=(source,))
    return Rollout(
        name, 0, [Segment([1, 2], [0.0, 0.0], False, 0), Segment([3], [-0.5], True, 0)], [call],
        "stop", answer, parse_citations(answer),
    )  # fmt: skip


class Engine:
    """Gives a perfect rollout for the first entry and an empty one for every other."""

    def __init__(self):
        self.asked = []

    async def run(self, prompts, ids, n, params, step, *, noise_step, on_progress):
        self.asked.append((n, params.temperature, params.seed, step, noise_step))
        for i, prompt in enumerate(prompts):
            yield [perfect(prompt.id) if i == 0 else Rollout(prompt.id, 0)]


def test_measures_of_a_perfect_and_of_an_empty_rollout():
    row = measure(WORLD, perfect(NAMES[0]))
    assert row == {
        "gold": 1.0, "format": 1.0, "search": pytest.approx(1 / 3), "citation": 1.0,
        "answered": 1.0, "calls": 1.0, "tokens": 1.0,
    }  # fmt: skip
    assert set(measure(WORLD, Rollout(NAMES[0], 0)).values()) == {0.0}


def test_the_score_is_the_mean_and_the_noise_is_that_of_step_0():
    engine = Engine()
    prompts = [make_prompt(name, "S") for name in NAMES]
    row = asyncio.run(evaluate(engine, WORLD, prompts, [[1], [1]], 0.6, 9, 30))
    assert row["gold"] == row["answered"] == 0.5
    assert engine.asked == [(1, 0.6, 9, 30, 0)]
    assert list(row) == [name for name, _ in METRICS]
