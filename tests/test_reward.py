"""Rewards: the rubric rules of both papers, the other components, missing verdicts, no answer."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler.config import JudgeConfig, RewardConfig
from minirler.records import Citation, Group, Prompt, Rollout, Snippet, ToolCall, ToolResult
from minirler.reward import (
    apply_,
    citation_reward,
    format_reward,
    rubric_reward,
    search_reward,
    total,
)

RUBRIC_ONLY = RewardConfig(rubric=1.0, citation=0.0, format=0.0, search=0.0)
TOLERANT = JudgeConfig(max_missing=0.3, min_scored=2)


@dataclass
class Criterion:
    weight: float


def search(query, status="ok", name="local_search", **arguments):
    snippets = (Snippet(f"s-{query}", "t", "x"),) if status == "ok" else ()
    return ToolCall(name, arguments, query), ToolResult(status, snippets=snippets)


def rollout(answer="a", calls=(), citations=()):
    return Rollout("q", 0, calls=list(calls), answer=answer, citations=list(citations))


def group(verdicts, weights, answers=None):
    answers = answers or ["a"] * len(verdicts)
    rollouts = [rollout(answer) for answer in answers]
    return Group(Prompt("q", "?", ()), rollouts, [Criterion(w) for w in weights], verdicts)


def test_rubric_reward_divides_by_the_positive_weights_of_what_was_scored():
    cases = [
        ([1, 1, -1], [1, 0.5, 1], 0.25),
        ([0.5], [1], 1.0),  # a floor of 1 on the weights would say 0.5
        ([0.25, 0.25], [1, 0], 0.5),
        ([-1], [1], -1.0),  # no positive weight: divided by |w|
        ([-1], [0], 0.0),
        ([1, 1, 1], [1, None, 0.5], 0.75),
        ([2, 1], [None, None], None),
        ([0, 0], [1, 1], None),
        ([0, 3], [1, None], None),  # what is left has no weight
        ([], [], None),
    ]
    for weights, verdicts, expected in cases:
        got = rubric_reward(verdicts, weights)
        assert got == (expected if expected is None else pytest.approx(expected, abs=1e-9))


def test_mean_rule_is_the_mean_over_scored_criteria():
    assert rubric_reward([1, 0, None, 1], [1, 1, 1, 1], rule="mean") == pytest.approx(2 / 3)
    assert rubric_reward([1, 0], [5, 1], rule="mean") == 0.5
    assert rubric_reward([None], [1], rule="mean") is None


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'sum' is unknown"):
        rubric_reward([1], [1], rule="sum")
    with pytest.raises(ValueError, match="2 verdicts do not match 1"):
        rubric_reward([1, 1], [1])
    with pytest.raises(ValueError, match="group q.*2 rows of 1"):
        apply_(group([[1.0], []], [1]), RUBRIC_ONLY, TOLERANT)


def test_format_pays_for_answer_citation_and_call_separately():
    cite = Citation(("s-1",), "a claim")
    assert format_reward(rollout(None)) == 0
    assert format_reward(rollout("a")) == 0.5
    assert format_reward(rollout("a", [search("x")], [cite])) == pytest.approx(1.0)
    assert format_reward(rollout(None, [search("x", "error")], [cite])) == pytest.approx(0.2)
    assert format_reward(rollout("a", [search("x", "limit")])) == 0.5  # never executed
    for hollow in (Citation((), "a claim"), Citation(("s-1",), "  "), Citation(("",), "a claim")):
        assert format_reward(rollout("a", [], [hollow])) == 0.5


def test_search_counts_successful_distinct_searches_up_to_three():
    assert search_reward(rollout()) == 0
    same = [search("Belomo  river"), search("belomo river"), search(" BELOMO river ")]
    assert search_reward(rollout("a", same)) == pytest.approx(1 / 3)
    failed = [search("a", s) for s in ("error", "timeout", "limit")]
    assert search_reward(rollout("a", failed)) == 0
    two = [search("a"), search("a", limit="3")]
    assert search_reward(rollout("a", two)) == pytest.approx(2 / 3)
    assert search_reward(rollout("a", [search("a"), search("a", name="browse_webpage")])) < 0.5
    assert search_reward(rollout("a", [search(str(i)) for i in range(5)])) == 1.0


def test_citation_is_the_share_of_distinct_ids_that_exist():
    calls = [search("1"), search("2"), search("3", "error")]
    cites = [Citation(("s-1", "s-9"), "x"), Citation(("s-1",), "y"), Citation(("s-2", "s-3"), "z")]
    assert citation_reward(rollout("a", calls, cites)) == pytest.approx(2 / 4)
    assert citation_reward(rollout(None, calls, cites)) == 0
    assert citation_reward(rollout("a", calls)) == 0


def test_total_is_the_weighted_sum_and_missing_if_a_part_is():
    parts = {"rubric": 0.5, "citation": 1.0, "format": 0.5, "search": 1.0}
    weights = {"rubric": 0.5, "citation": 0.2, "format": 0.2, "search": 0.1}
    assert total(parts, weights) == pytest.approx(0.25 + 0.2 + 0.1 + 0.1)
    assert total(parts | {"rubric": None}, weights) is None
    assert total(parts | {"rubric": None}, weights | {"rubric": 0.0}) == pytest.approx(0.4)


def test_a_criterion_with_a_gap_is_left_out_for_the_whole_group():
    g = group([[1.0, 0, 1, 1], [0.5, None, 0, 1], [0.0, 1, 0, 1]], [1, 1, 1, -1])
    outcome = apply_(g, RUBRIC_ONLY, TOLERANT)
    assert outcome.counted == [True, False, True, True]
    assert g.rewards == pytest.approx([(1 + 1 - 1) / 2, (0.5 + 0 - 1) / 2, (0 + 0 - 1) / 2])
    assert outcome.observed == g.verdicts and not outcome.dropped


def test_too_many_missing_verdicts_leave_a_rollout_unscored_and_its_siblings_whole():
    g = group([[1.0, 0], [None, 1], [0.0, 1]], [1, 1])  # a half is missing, above 0.3
    outcome = apply_(g, RUBRIC_ONLY, TOLERANT)
    assert g.rewards == [0.5, None, 0.5]
    assert g.components["rubric"] == [0.5, None, 0.5]
    assert outcome.counted == [True, True]  # the gap was in a rollout that does not count
    assert outcome.observed[1] == [None, None]  # nor do its other verdicts, for the buffer


def test_missing_is_not_a_score_of_zero():
    verdicts = [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0]]
    zero, missing = group(verdicts, [1] * 4), group([verdicts[0], [1.0, None, 1.0, 1.0]], [1] * 4)
    apply_(zero, RUBRIC_ONLY, TOLERANT), apply_(missing, RUBRIC_ONLY, TOLERANT)
    assert zero.rewards == [1.0, 0.75]
    assert missing.rewards == [1.0, 1.0]


def test_exactly_the_allowed_share_of_missing_verdicts_is_allowed():
    g = group([[None] * 3 + [1.0] * 7, [0.0] * 10], [1] * 10)
    apply_(g, RUBRIC_ONLY, TOLERANT)
    assert g.rewards == [1.0, 0.0]


def test_no_answer_is_the_worst_reward_and_neither_missing_nor_observed():
    g = group([[None, None], [1.0, 0.0], [0.0, 0.0]], [1, -1], [None, "a", "a"])
    g.rollouts[0].calls = [search(q) for q in "xyz"]
    outcome = apply_(g, RewardConfig(), TOLERANT)
    assert g.components["rubric"] == [-1.0, 1.0, 0.0]
    assert g.components["search"][0] == g.components["citation"][0] == 0
    assert g.rewards[0] == pytest.approx(0.5 * -1 + 0.2 * 0.2)  # the call still pays format
    assert outcome.observed == [[None, None], [1.0, 0.0], [0.0, 0.0]]
    assert outcome.counted == [True, True]


def test_what_a_judge_said_of_an_answer_that_is_not_there_does_not_count():
    g = group([[1.0, 0.0], [1.0, 0.0]], [1, -1], [None, "a"])
    apply_(g, RUBRIC_ONLY, TOLERANT)
    assert g.rewards == [-1.0, 1.0]


@pytest.mark.parametrize("min_scored, dropped", [(2, False), (3, True)])
def test_a_group_with_too_few_scored_rollouts_is_dropped(min_scored, dropped):
    g = group([[1.0], [None], [0.0]], [1])
    outcome = apply_(g, RUBRIC_ONLY, JudgeConfig(min_scored=min_scored))
    assert outcome.dropped == dropped
    assert g.rewards == ([None] * 3 if dropped else [1.0, None, 0.0])
    assert outcome.observed[1] == [None]
    assert outcome.observed[0] == ([None] if dropped else [1.0])


def test_a_group_without_criteria_is_dropped_unless_rubrics_have_no_weight():
    g = group([[], []], [])
    assert apply_(g, RewardConfig(), TOLERANT).dropped and g.rewards == [None, None]
    assert not apply_(g, RewardConfig(rubric=0.0), TOLERANT).dropped
    assert g.rewards == pytest.approx([0.1, 0.1])


def test_a_group_in_which_nothing_was_judged_is_dropped():
    g = group([[None, None]] * 4, [1, 1])
    assert apply_(g, RUBRIC_ONLY, TOLERANT).dropped


VERDICT = st.sampled_from([0.0, 0.5, 1.0])


@given(st.data())
def test_a_criterion_left_out_gives_what_the_group_without_it_gives(data):
    size = data.draw(st.integers(2, 5))
    width = data.draw(st.integers(4, 6))  # one gap of four is below the allowed share
    row = st.lists(VERDICT, min_size=width, max_size=width)
    verdicts = data.draw(st.lists(row, min_size=size, max_size=size))
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0, -1.0]), min_size=width, max_size=width))
    gone = data.draw(st.integers(0, width - 1))
    gaps = [[*row] for row in verdicts]
    for g in data.draw(st.sets(st.integers(0, size - 1), min_size=1)):
        gaps[g][gone] = None

    def without(row):
        return row[:gone] + row[gone + 1 :]

    holed = group(gaps, weights)
    smaller = group([without(row) for row in verdicts], without(weights))
    apply_(holed, RUBRIC_ONLY, TOLERANT), apply_(smaller, RUBRIC_ONLY, TOLERANT)
    assert holed.rewards == smaller.rewards


@given(st.lists(st.tuples(st.none() | VERDICT, st.sampled_from([-2.0, -1.0, 0.5, 1.0, 3.0]))))
def test_rubric_reward_lies_between_its_worst_and_its_best(pairs):
    verdicts, weights = [s for s, _ in pairs], [w for _, w in pairs]
    got = rubric_reward(verdicts, weights)
    scored = [(s, w) for s, w in pairs if s is not None]
    if not scored:
        assert got is None
        return
    worst = rubric_reward([float(w < 0) for _, w in scored], [w for _, w in scored])
    best = rubric_reward([float(w > 0) for _, w in scored], [w for _, w in scored])
    assert worst - 1e-12 <= got <= best + 1e-12


def test_the_rule_of_the_rubric_reward_is_a_setting():
    for rule, expected in (("rler", (1.0 - 0.5) / 1), ("mean", 0.75)):
        g = group([[1.0, 0.5], [1.0, 0.5]], weights=[1, -1])
        apply_(g, replace(RUBRIC_ONLY, rule=rule), TOLERANT)
        assert g.rewards == [expected] * 2
