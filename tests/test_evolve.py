"""Generations: real searches, checked items, and nothing changed where one fails."""

import asyncio
import copy
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler.config import ConfigError, RubricsConfig
from minirler.evolve import (
    dataset_rubrics,
    evolving_rubrics,
    persistent_rubrics,
    show_rollout,
)
from minirler.lm import PROMPTS
from minirler.offline import OfflineLM
from minirler.records import LMReply, Prompt, Rollout, Snippet, ToolCall, ToolResult
from minirler.rubrics import MAX_DESCRIPTION, RubricBuffer, make_rubric
from minirler.search import Document, Hit, LocalSearch
from minirler.tools import ID_ALPHABET, parse_citations

PROMPT = Prompt("b", "Write a report on Belomo.", ())
CFG = RubricsConfig()


class FakeLM:
    """Says what it is told to say, a reply a task, and keeps the requests."""

    def __init__(self, **replies):
        self.replies, self.requests = replies, []

    async def complete(self, request):
        self.requests.append(request)
        reply = self.replies.get(request.task)
        return reply if isinstance(reply, LMReply) else LMReply(json.dumps(reply))


def rollout(answer, snippets=()):
    result = ToolResult("ok", snippets=tuple(snippets))
    citations = parse_citations(answer or "")
    return Rollout("b", 0, calls=[(ToolCall("local_search", {}, "x"), result)], answer=answer,
                   citations=citations)  # fmt: skip


def filled_buffer():
    buffer = RubricBuffer()
    buffer.add("b", [make_rubric("b", "p1", kind="persistent"), make_rubric("b", "r1")])
    return buffer


def evolve(reply, buffer=None, rollouts=None, cfg=CFG):
    lm = FakeLM(rubrics_evolving=reply)
    buffer = filled_buffer() if buffer is None else buffer
    rollouts = [rollout("one"), rollout("two")] if rollouts is None else rollouts
    return *asyncio.run(evolving_rubrics(lm, PROMPT, rollouts, buffer, cfg, 7)), lm.requests


async def nothing_found(query):
    return []


# ---- evolving rubrics


@pytest.mark.parametrize(
    "reply, added",
    [
        (LMReply(None, "error", "no reply within 600 s"), []),
        (LMReply(None), []),
        (LMReply("I cannot do that."), []),
        (LMReply('{"positive_rubrics": [{"description": "x"}]', "length"), []),
        ({"positive_rubrics": None, "negative_rubrics": [{"description": "d", "title": "t"}]},
         [("d", -1.0)]),
        ({"negative_rubrics": [{"description": "d"}]}, [("d", -1.0)]),
        ([{"description": "x"}], []),
        ({"positive_rubrics": [{"description": "x"}, {"title": "no text"}, "str"]}, [("x", 1.0)]),
        ({"positive_rubrics": [], "negative_rubrics": []}, []),
        ({"positive_rubrics": "x", "negative_rubrics": {"description": "x"}}, []),
        ({"positive_rubrics": [{"description": d} for d in (" ", 3, None, "-", "y" * 9999)]}, []),
        ({"positive_rubrics": [{"description": "P1."}, {"description": "R1"}]}, []),
    ],
)  # fmt: skip
def test_a_failed_or_odd_generation_changes_nothing_about_the_rubrics_in_use(reply, added):
    buffer = filled_buffer()
    before, events = copy.deepcopy(buffer.state()), buffer.drain_events()
    rubrics, reason, _ = evolve(reply, buffer)
    assert events and buffer.state() == before and buffer.drain_events() == []
    assert [(r.description, r.weight) for r in rubrics] == added
    buffer.add("b", rubrics)
    used = [(r.description, r.weight) for r in buffer.criteria("b")]
    assert used[0] == ("p1", 1.0) and sorted(used[1:]) == sorted([("r1", 1.0), *added])
    assert isinstance(reason, str) and (reason or rubrics or "rubrics" in str(reply))


def test_the_reason_says_why_nothing_came():
    assert "no reply within 600 s" in evolve(LMReply(None, "error", "no reply within 600 s"))[1]
    assert "I cannot" in evolve(LMReply("I cannot."))[1]
    assert "length" in evolve(LMReply("{", "length"))[1]
    assert "positive_rubrics is no list" in evolve({"positive_rubrics": "x"})[1]
    assert "not an object" in evolve({"positive_rubrics": ["x"]})[1]
    assert evolve({"positive_rubrics": [], "negative_rubrics": []})[1] == ""
    assert evolve({"positive_rubrics": [{"description": "x"}]})[1] == ""


def test_a_rubric_carries_its_sign_its_step_and_a_short_title():
    long = "States " + "word " * 60
    items = [{"description": f" {long}\n", "extra": 1}, {"description": "d", "title": " a\n b "}]
    rubrics = evolve({"positive_rubrics": items[:1], "negative_rubrics": items[1:]})[0]
    merit, fault = rubrics
    assert merit.description == long.strip() and merit.title == long[:77] + "..."
    assert (merit.weight, merit.kind, merit.born) == (1.0, "evolving", 7)
    assert (fault.title, fault.weight, fault.sources) == ("a b", -1.0, ())
    assert fault.id == make_rubric("b", "d").id


def test_one_description_with_both_signs_is_taken_once_and_the_limit_holds():
    items = [{"description": f"d{i}"} for i in range(8)]
    rubrics, reason, _ = evolve({"positive_rubrics": items, "negative_rubrics": items})
    assert [(r.description, r.weight) for r in rubrics] == [(f"d{i}", 1.0) for i in range(5)]
    assert "beyond the limit of 5" in reason and "repeats" in reason
    assert evolve({"positive_rubrics": items}, cfg=replace(CFG, max_new=0))[::2] == ([], [])


def test_a_contrast_takes_two_answers():
    for answers in ([], [None, None], ["one", None, " "]):
        rubrics, reason, requests = evolve({}, rollouts=[rollout(a) for a in answers])
        assert rubrics == [] and requests == [] and "nothing to compare" in reason


def test_the_generator_sees_persistent_active_and_lately_retired_rubrics():
    buffer = filled_buffer()
    old = make_rubric("b", "was flat")
    buffer.add("b", [old])
    buffer.observe("b", [old.id], [[1.0], [1.0]])
    request = evolve({}, buffer)[2][0]
    assert request.fields["existing"] == ["p1", "r1", "was flat"]
    assert (request.fields["question"], request.fields["limit"]) == (PROMPT.question, 5)
    assert all(text in request.messages[0]["content"] for text in ("was flat", "one", "two"))


def test_a_rollout_is_shown_within_its_budget_what_it_cites_first():
    snippets = [Snippet("k-0", "T", "x" * 50), Snippet("k-1", "T", "x" * 50),
                Snippet("k-2", "U", "y" * 50), Snippet("k-3", "V", "")]  # fmt: skip
    shown = rollout('<cite id="k-2">z</cite>', snippets)
    assert show_rollout(shown, 1000) == {
        "answer": shown.answer,
        "sources": [
            {"id": "k-2", "title": "U", "text": "y" * 50},
            {"id": "k-0", "title": "T", "text": "x" * 50},
        ],
    }
    length = len(shown.answer)
    assert show_rollout(shown, length + 21)["sources"] == [
        {"id": "k-2", "title": "U", "text": "y" * 17 + "..."}
    ]
    assert show_rollout(shown, 10) == {"answer": shown.answer[:7] + "...", "sources": []}
    assert show_rollout(rollout(None), 10) == {"answer": None, "sources": []}


@given(st.integers(1, 200), st.text(max_size=80),
       st.lists(st.tuples(st.text(max_size=9), st.text(max_size=40)), max_size=5))  # fmt: skip
def test_what_is_shown_of_a_rollout_never_exceeds_its_budget(max_chars, answer, texts):
    snippets = [Snippet(str(i), title, text) for i, (title, text) in enumerate(texts)]
    shown = show_rollout(rollout(answer, snippets), max_chars)
    used = len(shown["answer"] or "") + sum(
        len(s["title"]) + len(s["text"]) for s in shown["sources"]
    )
    assert used <= max_chars


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["description", "title", "sources"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["positive_rubrics", "negative_rubrics", "x"]), JSON))
def test_no_json_raises_and_what_is_accepted_the_buffer_accepts(reply):
    rubrics, reason, _ = evolve(reply)
    assert len(rubrics) <= CFG.max_new and isinstance(reason, str)
    assert len(filled_buffer().add("b", rubrics)) == len(rubrics)


# ---- persistent rubrics


DOCUMENTS = [
    Document("old", "Belomo, chronicle, 1710", "Belomo is a town. Its ruler is Talesi."),
    Document("new", "Belomo, register, 1750", "Belomo is a town. Its ruler is now Dasimo."),
    Document("other", "North Belomo, letter, 1790", "North Belomo is a town. Its river is Loguma."),
]
RULER = "States, with a citation, that its ruler is Dasimo."


def persist(lm, search=nothing_found, prompt=PROMPT, cfg=CFG):
    return asyncio.run(persistent_rubrics(lm, search, prompt, cfg))


def local(queries):
    index = LocalSearch.from_documents(DOCUMENTS)

    async def search(query):
        queries.append(query)
        return index.search(query, 10)

    return search


def test_persistent_rubrics_rest_on_documents_that_were_searched_for():
    queries = []
    rubrics, reason = persist(OfflineLM(), local(queries))
    assert queries == ["Belomo", "Belomo chronicle"] and reason == ""
    assert [(r.description, r.kind, r.weight, r.sources) for r in rubrics] == [
        (RULER, "persistent", 1.0, ("new",))
    ]


def test_equal_documents_are_shown_once_and_sources_are_ids_that_were_shown():
    item = {"description": "x", "sources": ["new", "invented", 3, "new", "old"]}
    lm = FakeLM(rubrics_queries={"queries": ["Belomo", "Belomo", "town", "third"]},  # fmt: skip
                rubrics_persistent={"positive_rubrics": [item], "negative_rubrics": [{}]})
    queries = []
    rubrics, reason = persist(lm, local(queries))
    assert queries == ["Belomo", "town"] and reason == ""
    shown = [d["id"] for d in lm.requests[1].fields["documents"]]
    assert sorted(shown) == ["new", "old", "other"]
    assert [(r.description, r.sources) for r in rubrics] == [("x", ("new", "old"))]


def test_one_failed_search_costs_its_hits_only():
    async def search(query):
        if query == "bad":
            raise ConnectionError("refused")
        return [Hit("new", "t", "text")]

    lm = FakeLM(rubrics_queries={"queries": ["bad", "good"]},
                rubrics_persistent={"positive_rubrics": [{"description": "x"}]})  # fmt: skip
    rubrics, reason = persist(lm, search)
    assert [r.description for r in rubrics] == ["x"] and "refused" in reason


def test_a_wrong_setting_is_no_failed_search():
    async def search(query):
        raise ConfigError("no index")

    with pytest.raises(ConfigError, match="no index"):
        persist(OfflineLM(), search)


@pytest.mark.parametrize("queries", [None, {"queries": None}, {"queries": [3, " "]}, {}, []])
def test_without_readable_queries_the_question_is_searched_for(queries):
    asked = []
    lm = FakeLM(rubrics_queries=queries, rubrics_persistent={"positive_rubrics": []})
    persist(lm, local(asked))
    assert asked == [PROMPT.question]


def test_without_documents_or_reply_there_are_no_rubrics_and_a_reason():
    assert persist(OfflineLM()) == ([], "the searches found nothing")
    failing = FakeLM(rubrics_queries=LMReply(None, "error", "down"),
                     rubrics_persistent=LMReply(None, "error", "down"))  # fmt: skip
    assert persist(failing, local([])) == ([], "no reply: down")
    assert persist(FakeLM(), cfg=replace(CFG, persistent=0)) == ([], "")


def test_the_data_set_s_rubrics_are_used_as_they_are_and_nothing_is_asked():
    raw = ({"description": "a  b", "weight": 3, "title": "t"}, {"description": "c", "weight": -0.5},
           {"description": "d"})  # fmt: skip
    lm = FakeLM()
    rubrics, reason = persist(lm, prompt=replace(PROMPT, rubrics=raw))
    assert lm.requests == [] and reason == ""
    assert [(r.description, r.title, r.weight, r.kind) for r in rubrics] == [
        ("a b", "t", 3.0, "persistent"),
        ("c", "c", -0.5, "persistent"),
        ("d", "d", 1.0, "persistent"),
    ]


@pytest.mark.parametrize(
    "bad", [{"description": "x", "weight": w} for w in (float("nan"), float("inf"), "1", True)]
    + [{}, {"description": ""}, {"description": "y" * (MAX_DESCRIPTION + 1)}, "x"]
)  # fmt: skip
def test_a_malformed_rubric_of_the_data_set_is_an_error_that_names_it(bad):
    prompt = replace(PROMPT, id="row 9", rubrics=({"description": "fine"}, bad))
    with pytest.raises(ValueError, match="'row 9', rubric 1: .*data set"):
        dataset_rubrics(prompt)


# ---- a whole visit, offline, and the prompts


def test_the_offline_generator_separates_a_group_through_the_real_checks():
    snippets = [Snippet(f"k-{i}", d.title, d.text) for i, d in enumerate(DOCUMENTS)]
    good = rollout('<cite id="k-1">Its ruler is Dasimo.</cite>', snippets)
    group = [good, rollout("Its ruler is Talesi.", snippets), rollout(None)]
    buffer = RubricBuffer()
    rubrics, reason = asyncio.run(evolving_rubrics(OfflineLM(), PROMPT, group, buffer, CFG, 0))
    assert [(r.description, r.weight) for r in rubrics] == [(RULER, 1.0)] and reason == ""
    buffer.add("b", rubrics)
    again = asyncio.run(evolving_rubrics(OfflineLM(), PROMPT, group, buffer, CFG, 1))
    assert again == ([], "")


def test_ids_in_the_example_of_the_system_prompt_can_never_be_real():
    text = (PROMPTS / "system_research.txt").read_text("utf-8")
    ids = set(re.findall(r"<snippet id=([\w-]+)>", text))
    cited = {i for c in parse_citations(text.rsplit("<answer>")[-1]) for i in c.ids}
    assert len(ids) == 3 and cited <= ids
    assert not any(set(name.split("-")[0]) <= set(ID_ALPHABET) for name in ids)
