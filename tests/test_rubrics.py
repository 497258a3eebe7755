"""The buffer is compared with a naive model of its rules under any sequence of operations."""

import copy
import itertools
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minirler.config import ConfigError
from minirler.rubrics import MAX_DESCRIPTION, Rubric, RubricBuffer, fold, make_rubric

HISTORY, COOLDOWN, CAP = 3, 2, 2


def rubric(name, weight=1.0, kind="evolving", born=0):
    return Rubric(name, f"criterion {name}", name, weight, kind, born)


def persistent(name, weight=2.5):
    return rubric(name, weight, "persistent")


def ids(rubrics):
    return [r.id for r in rubrics]


def filled(names, **settings):
    buffer = RubricBuffer(**settings)
    buffer.add("p", [rubric(name) for name in names])
    return buffer


def observe(buffer, columns, counted=None, prompt_id="p"):
    """Verdicts given by column, as {id: values over the rollouts}."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    buffer.observe(prompt_id, list(columns), rows, counted)


# -- identity


def test_wordings_that_differ_in_case_space_and_punctuation_are_one():
    a = make_rubric("p", "Names the river's SOURCE.")
    b = make_rubric("p", "  names the river’s\tsource -- ")
    assert a.id == b.id and a.description != b.description
    assert make_rubric("p", "Names the river's mouth.").id != a.id
    assert make_rubric("other", "Names the river's SOURCE.").id != a.id
    assert fold("ＦＵＬＬ－width “Straße”!") == "full width strasse"


def test_an_id_does_not_depend_on_title_weight_kind_or_sources():
    a = make_rubric("p", "x")
    b = make_rubric("p", "x", "t", 3, "persistent", 7, ["doc"])
    assert a.id == b.id and b == Rubric(a.id, "x", "t", 3.0, "persistent", 7, ("doc",))


# -- what is accepted


@pytest.mark.parametrize(
    "bad",
    [
        replace(rubric("a"), description=""), replace(rubric("a"), description=" .,- "),
        replace(rubric("a"), description="x" * (MAX_DESCRIPTION + 1)),
        replace(rubric("a"), description="half \ud83e"), replace(rubric("a"), description=None),
        rubric("a", 2.0), rubric("a", 0.0), rubric("a", math.nan), persistent("a", math.inf),
        persistent("a", math.nan), persistent("a", "1"), rubric("a", kind="static"),
    ],
)  # fmt: skip
def test_a_bad_rubric_is_refused_and_harms_no_neighbour(bad):
    buffer = RubricBuffer()
    assert ids(buffer.add("p", [bad, rubric("b"), persistent("c", -0.3)])) == ["c", "b"]
    rejected = [e for e in buffer.drain_events() if e["event"] == "rejected"]
    assert [e["id"] for e in rejected] == ["a"] and rejected[0]["why"]


def test_an_id_in_use_is_refused():
    buffer = RubricBuffer()
    buffer.add("p", [persistent("a"), rubric("b")])
    assert buffer.add("p", [rubric("a"), rubric("b", -1.0), persistent("b"), persistent("a")]) == []
    assert ids(buffer.add("q", [rubric("a")])) == ["a"]  # another prompt


@given(st.permutations([rubric("a"), rubric("a", -1.0), persistent("b"), rubric("b"), rubric("c")]))
def test_order_and_duplicates_of_what_is_added_do_not_matter(rubrics):
    reference, other = RubricBuffer(), RubricBuffer()
    reference.add("p", sorted(rubrics, key=repr))
    other.add("p", [*rubrics, *rubrics])
    assert reference.state() == other.state() and len(other.criteria("p")) == 3


def test_criteria_are_persistent_by_id_then_active_by_birth():
    buffer = RubricBuffer()
    buffer.add("p", [rubric("z", born=1), rubric("y", born=1), persistent("x"), persistent("b")])
    buffer.add("p", [rubric("a", born=2)])
    assert ids(buffer.criteria("p")) == ["b", "x", "y", "z", "a"]
    assert ids(buffer.active("p")) == ["y", "z", "a"] and buffer.criteria("unknown") == []


# -- what stays


def test_flat_criteria_retire_and_persistent_ones_never_do():
    buffer = filled("ab")
    buffer.add("p", [persistent("c")])
    observe(buffer, {"a": [0.5, 0.5, 0.5], "b": [0.0, 1.0, 0.5], "c": [1.0, 1.0, 1.0]})
    assert ids(buffer.active("p")) == ["b"] and ids(buffer.retired("p")) == ["a"]
    assert ids(buffer.criteria("p")) == ["c", "b"]


@pytest.mark.parametrize(("gap", "stays"), [(0.0, False), (1e-6, False), (2e-6, True)])
def test_flat_is_a_span_and_not_an_exact_equality(gap, stays):
    buffer = filled("a")
    observe(buffer, {"a": [0.0, gap, 0.0]})
    assert bool(buffer.active("p")) is stays


def test_too_few_verdicts_decide_nothing():
    buffer = filled("a", min_scored=3)
    observe(buffer, {"a": [1.0, 1.0, None, None]})
    assert ids(buffer.active("p")) == ["a"]
    observe(buffer, {"a": [1.0, 1.0, 1.0, None]})
    assert buffer.active("p") == []


def test_rows_that_do_not_count_make_no_spread():
    for last, counted in ((0.0, [True, True, False]), (None, None)):
        buffer = filled("a")
        observe(buffer, {"a": [1.0, 1.0, last]}, counted)
        assert ids(buffer.retired("p")) == ["a"]
    buffer = filled("a")
    observe(buffer, {"a": [1.0, 1.0, 0.0]})
    assert ids(buffer.active("p")) == ["a"]


GRID = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])
VERDICTS = st.integers(1, 6).flatmap(
    lambda g: st.dictionaries(st.sampled_from("abcdefgh"), st.lists(GRID, min_size=g, max_size=g))
)


def survivors(columns, active, cap, min_scored=2):
    """Brute force: of all subsets that may stay, the one with the largest spreads, then ids."""
    spread = {name: -1.0 for name in active}  # never measured: after all that were
    for name in set(columns) & set(active):
        values = [v for v in columns[name] if v is not None]
        if len(values) >= min_scored:
            spread[name] = None if np.ptp(values) <= 1e-6 else round(float(np.std(values)), 9)
    able = sorted(name for name in active if spread[name] is not None)
    subsets = itertools.combinations(able, min(cap, len(able)))
    return max(
        subsets, key=lambda names: (sum(spread[n] + 2 for n in names), [-ord(n) for n in names])
    )


@settings(max_examples=50)
@given(VERDICTS, st.integers(0, 4))
def test_the_cap_keeps_the_largest_spreads(columns, cap):
    buffer = filled("abcdef", max_active=cap)
    observe(buffer, columns)
    assert ids(buffer.active("p")) == list(survivors(columns, "abcdef", cap))


@settings(max_examples=50)
@given(VERDICTS, st.randoms(use_true_random=False))
def test_order_and_duplicates_of_what_is_observed_do_not_matter(columns, chance):
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    reference, other = filled("abcdef", max_active=3), filled("fedcba", max_active=3)
    reference.observe("p", list(columns), rows)
    order = chance.choices(range(len(columns)), k=4) + list(range(len(columns))) if columns else []
    chance.shuffle(order)
    chance.shuffle(rows)
    other.observe("p", [list(columns)[i] for i in order], [[row[i] for i in order] for row in rows])
    assert reference.state() == other.state()
    assert json.dumps(reference.state()) == json.dumps(other.state())


def test_columns_of_one_id_that_disagree_are_taken_together():
    for rows in ([[1.0, 0.0], [1.0, None]], [[0.0, 1.0], [None, 1.0]]):
        buffer = filled("a")
        buffer.observe("p", ["a", "a"], rows)
        assert buffer.drain_events()[-1]["spreads"]["a"] == pytest.approx(math.sqrt(2) / 3)


def test_mirrored_verdicts_tie_exactly():
    buffer = filled("ab", max_active=1)  # 1/3 and 2/3 round differently; the spreads are equal
    observe(buffer, {"a": [0.0, 0.0, 1.0], "b": [1.0, 1.0, 0.0]})
    (visit,) = [e for e in buffer.drain_events() if e["event"] == "visit"]
    assert visit["spreads"]["a"] == visit["spreads"]["b"] == pytest.approx(math.sqrt(2) / 3)
    assert ids(buffer.active("p")) == ["a"]


def test_the_unmeasured_stay_while_there_is_room_and_the_last_measure_holds():
    buffer = filled("ab", max_active=2)
    observe(buffer, {"a": [0.0, 1.0], "b": [0.0, 0.5]})
    buffer.add("p", [rubric("c"), rubric("d")])
    observe(buffer, {"a": [None, None], "b": [0.0, 0.5], "c": [None, 1.0]})
    assert ids(buffer.active("p")) == ["a", "b"] and ids(buffer.retired("p")) == ["c", "d"]
    buffer = filled("ab", max_active=2)
    observe(buffer, {})
    assert ids(buffer.active("p")) == ["a", "b"]


def test_the_past_returns_after_its_cooldown_and_no_sooner():
    buffer = filled("a", cooldown=3)
    observe(buffer, {"a": [1.0, 1.0]})
    for visit in range(5):
        taken = ids(buffer.add("p", [rubric("a", -1.0)]))
        assert taken == (["a"] if visit == 3 else [])
        observe(buffer, {"a": [0.0, 1.0]})
    assert ids(buffer.active("p")) == ["a"] and buffer.retired("p") == []
    counts = buffer.counts("p")
    assert (counts["accepted"], counts["forgotten"], counts["active"]) == (2, 1, 1)


def test_a_persistent_rubric_is_taken_though_its_twin_was_just_retired():
    buffer = filled("a")
    observe(buffer, {"a": [1.0, 1.0]})
    assert ids(buffer.add("p", [persistent("a")])) == ["a"] and buffer.retired("p") == []


def test_visits_of_one_prompt_leave_the_others_alone():
    buffer = filled("a")
    buffer.add("q", [rubric("a")])
    before = buffer.state()["prompts"]["q"]
    observe(buffer, {"a": [1.0, 1.0]})
    assert buffer.state()["prompts"]["q"] == before and buffer.active("p") == []


def test_reading_an_unknown_prompt_creates_nothing():
    buffer = RubricBuffer()
    assert (buffer.criteria("p"), buffer.active("p"), buffer.retired("p")) == ([], [], [])
    assert buffer.counts("p")["accepted"] == 0 and buffer.state()["prompts"] == {}


@pytest.mark.parametrize(
    ("rows", "counted", "words"),
    [([[1.0, 1.0], [1.0]], None, "row 1"), ([[1.0, math.nan]], None, "row 0"),
     ([[1.0, 1.0]], [True, False], "2 entries")],
)  # fmt: skip
def test_verdicts_of_the_wrong_form_are_refused_and_change_nothing(rows, counted, words):
    buffer = filled("ab")
    before = buffer.state()
    with pytest.raises(ValueError, match=words):
        buffer.observe("p", ["a", "b"], rows, counted)
    assert buffer.state() == before


# -- events and state


def test_events_tell_each_life_and_are_no_part_of_the_state():
    buffer = filled("abc", max_active=1)
    observe(buffer, {"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 0.5]})
    before = buffer.state()
    events = buffer.drain_events()
    assert [e["event"] for e in events] == ["born"] * 3 + ["visit"] + ["retired"] * 2
    assert {e["prompt_id"] for e in events} == {"p"} and events[0]["description"] == "criterion a"
    assert events[3]["spreads"] == {"a": 0.0, "b": 0.5, "c": 0.25}
    assert [(e["id"], e["why"], e["spread"]) for e in events[4:]] == [
        ("a", "flat", 0.0), ("c", "cap", 0.25)
    ]  # fmt: skip
    json.dumps(events)
    assert buffer.drain_events() == [] and buffer.state() == before


def lived():
    buffer = RubricBuffer(max_active=2, history=2)
    text = "réf 🧭 «ü»"
    buffer.add("q1", [make_rubric("q1", text, "t", -1.0, born=3, sources=("d1", "d2"))])
    buffer.add("q1", [persistent("p2"), persistent("p1", -0.5), *map(rubric, "abcdef")])
    observe(buffer, {"a": [0.1, 0.7, 0.2], "b": [0.0, 0.3, 1.0], "c": [1.0, 1.0, 1.0]}, None, "q1")
    return buffer


def test_a_buffer_survives_json_with_order_and_unicode():
    buffer = lived()
    text = json.dumps(buffer.state(), ensure_ascii=False).encode()
    again = RubricBuffer.from_state(json.loads(text))
    assert again.state() == buffer.state() and json.dumps(again.state()).encode() != b""
    assert json.dumps(again.state(), ensure_ascii=False).encode() == text
    for name in ("criteria", "active", "retired"):
        assert getattr(again, name)("q1") == getattr(buffer, name)("q1")
    assert buffer.counts("q1")["forgotten"] == 3 and len(buffer.retired("q1")) == 2


def test_a_restored_buffer_goes_on_as_the_uninterrupted_one():
    buffer = lived()
    again = RubricBuffer.from_state(json.loads(json.dumps(buffer.state())))
    saved = buffer.state()
    untouched = copy.deepcopy(saved)
    third = RubricBuffer.from_state(saved)
    for each in (buffer, again, third):
        each.add("q1", [rubric("g"), rubric("c")])
        observe(each, {"g": [0.0, 0.9], "a": [0.5, 0.4], "b": [None, None]}, None, "q1")
    assert buffer.state() == again.state() == third.state()
    assert saved == untouched  # neither buffer writes into a state that was handed out


@pytest.mark.parametrize("state", [None, {}, [], {"version": 0}, {"version": "1", "prompts": {}}])
def test_a_state_of_another_version_is_refused(state):
    with pytest.raises(ValueError, match="state version"):
        RubricBuffer.from_state(state)


def test_a_malformed_state_is_refused():
    retired = ("prompts", "q1", "retired", 0, "weight")
    paths = [("settings",), ("prompts",), ("settings", "history"), retired]
    paths += [("prompts", "q1", name) for name in ("active", "visits", "spreads", "retired_at")]
    for path in paths:
        state = lived().state()
        place = state
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = "broken"
        with pytest.raises(ValueError, match="rubric buffer"):
            RubricBuffer.from_state(state)
    state = lived().state()
    state["prompts"]["q1"]["accepted"] += 1
    with pytest.raises(ValueError, match="accepted is not"):
        RubricBuffer.from_state(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rubrics.max_active", -1), ("judge.min_scored", 0), ("rubrics.history", 1.5),
     ("rubrics.cooldown", True)],
)
def test_wrong_settings_are_named(key, value):
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is"):
        RubricBuffer(**{key.partition(".")[2]: value})


def test_a_prompt_id_that_json_would_change_is_refused():
    with pytest.raises(ValueError, match="prompt id 1"):
        RubricBuffer().add(1, [])


# -- any sequence of operations

PROMPT_IDS = st.sampled_from(["p", "q"])
NAMES = st.lists(st.sampled_from("abcdefgh"), max_size=5)


class BufferMachine(RuleBasedStateMachine):
    """Keeps, beside the buffer, what was ever accepted and what each visit was to leave."""

    def __init__(self):
        super().__init__()
        self.buffer = RubricBuffer(CAP, history=HISTORY, cooldown=COOLDOWN)
        self.num_accepted = {"p": 0, "q": 0}
        self.persistent = {"p": set(), "q": set()}

    @rule(prompt_id=PROMPT_IDS, names=NAMES, weight=st.sampled_from([1.0, -1.0, 0.5]))
    def add_evolving(self, prompt_id, names, weight):
        before = self.buffer.criteria(prompt_id)
        accepted = self.buffer.add(prompt_id, [rubric(name, weight) for name in names])
        assert len(accepted) == len({r.id for r in accepted} - set(ids(before)))
        assert set(ids(self.buffer.criteria(prompt_id))) == {*ids(before), *ids(accepted)}
        assert weight != 0.5 or accepted == []
        self.num_accepted[prompt_id] += len(accepted)

    @rule(prompt_id=PROMPT_IDS, names=NAMES)
    def add_persistent(self, prompt_id, names):
        active = set(ids(self.buffer.active(prompt_id)))
        accepted = self.buffer.add(prompt_id, [persistent(name) for name in names])
        assert set(ids(accepted)) == set(names) - active - self.persistent[prompt_id]
        self.persistent[prompt_id] |= set(ids(accepted))
        self.num_accepted[prompt_id] += len(accepted)

    @rule(prompt_id=PROMPT_IDS, columns=VERDICTS, seed=st.integers(0, 99))
    def observe(self, prompt_id, columns, seed):
        num_rows = len(next(iter(columns.values()), []))
        counted = [random.Random(seed + i).random() < 0.8 for i in range(num_rows)]
        active, others = self.buffer.active(prompt_id), {"p": "q", "q": "p"}[prompt_id]
        other_state = self.buffer.state()["prompts"].get(others)
        observe(self.buffer, columns, counted, prompt_id)
        left = {r.id for r in self.buffer.active(prompt_id)}
        assert len(left) <= CAP and left <= set(ids(active))
        for name in left & set(columns):  # nothing flat stays
            values = [v for v, c in zip(columns[name], counted, strict=True) if c and v is not None]
            assert len(values) < 2 or max(values) - min(values) > 1e-6
        gone = set(ids(active)) - left
        latest = ids(self.buffer.retired(prompt_id))[-len(gone) :] if gone else []
        assert set(latest) <= gone and len(latest) == min(len(gone), HISTORY)
        assert self.buffer.state()["prompts"].get(others) == other_state

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.buffer.state()))
        self.buffer = RubricBuffer.from_state(state)
        assert self.buffer.state() == state

    @invariant()
    def every_rubric_is_accounted_for(self):
        for prompt_id, num_accepted in self.num_accepted.items():
            counts = self.buffer.counts(prompt_id)
            parts = ("persistent", "active", "retired", "forgotten")
            assert sum(counts[part] for part in parts) == counts["accepted"] == num_accepted
            places = [*self.buffer.criteria(prompt_id), *self.buffer.retired(prompt_id)]
            assert len(set(ids(places))) == len(places)
            assert counts["retired"] == len(self.buffer.retired(prompt_id)) <= HISTORY

    @invariant()
    def persistent_rubrics_are_never_dropped(self):
        for prompt_id, names in self.persistent.items():
            kept = [r.id for r in self.buffer.criteria(prompt_id) if r.kind == "persistent"]
            assert kept == sorted(names)


TestAnySequence = BufferMachine.TestCase
TestAnySequence.settings = settings(max_examples=30, stateful_step_count=25)
