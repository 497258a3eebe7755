"""The almanac: reproducible, split by entity, answerable, and its gold judge."""

import random
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler.records import Citation, Rollout, Snippet, ToolCall, ToolResult
from minirler.search import Hit, LocalSearch
from minirler.tools import parse_answer, parse_call, parse_citations
from minirler.world import (
    KINDS,
    Entry,
    Fact,
    find_facts,
    gold_coverage,
    make_prompt,
    make_world,
    split_names,
    teacher_trajectory,
)

WORLD = make_world(seed=5, entities=40, held_out=10)
ENTRY = Entry(
    "Belomo", "town", (Fact("ruler", "dasimo", "tagesi"), Fact("trade", "salt")), ("d1", "d2")
)


def rollout(answer: str, *snippets: Snippet) -> Rollout:
    """A rollout that was given `snippets` and answered `answer`."""
    call = ToolCall("local_search", {}, "q"), ToolResult("ok", snippets=snippets)
    return Rollout("Belomo", 0, calls=[call], answer=answer, citations=parse_citations(answer))


NEW = Snippet("k-0", "Belomo, letter, 1760", "Its ruler is now Dasimo. Salt is its trade.", "d2")
OLD = Snippet("k-1", "Belomo, register, 1710", "Its ruler is Tagesi.", "d1")
OTHER = Snippet("k-2", "North Belomo, letter, 1760", "Its ruler is Dasimo.", "e9")


def test_a_world_is_a_function_of_seed_and_size():
    assert make_world(5, 40, 10) == WORLD
    assert make_world(6, 40, 10).train != WORLD.train


def test_train_and_held_out_entries_are_disjoint_and_complete():
    assert len(set(WORLD.train)) == 40 and len(set(WORLD.held_out)) == 10
    assert not set(WORLD.train) & set(WORLD.held_out)
    assert set(WORLD.train) | set(WORLD.held_out) <= set(WORLD.entries)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_world_without_questions_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        make_world(1, *sizes)


def test_the_smallest_world_has_one_question_of_each_sort():
    world = make_world(1, 1, 1)
    assert len(world.train) == len(world.held_out) == 1


def test_every_entry_has_8_to_12_facts_over_2_to_4_documents():
    documents = {d.id: d for d in WORLD.documents}
    for entry in WORLD.entries.values():
        assert 8 <= len(entry.facts) <= 12 and 2 <= len(entry.documents) <= 4
        assert {f.attr for f in entry.facts} <= set(KINDS[entry.kind].split())
        texts = [documents[d].text for d in entry.documents]
        for fact in entry.facts:
            assert any((fact.attr, fact.value) in find_facts(text) for text in texts)


def test_an_outdated_value_is_corrected_by_a_newer_document():
    documents, corrected = {d.id: d for d in WORLD.documents}, 0
    for entry in WORLD.entries.values():
        pages = [documents[d] for d in entry.documents]
        year = {d.id: int(d.title.rsplit(" ", 1)[1]) for d in pages}
        for fact in (f for f in entry.facts if f.outdated):
            true = [year[d.id] for d in pages if (fact.attr, fact.value) in find_facts(d.text)]
            old = [year[d.id] for d in pages if (fact.attr, fact.outdated) in find_facts(d.text)]
            assert max(old) < min(true)
            corrected += 1
    assert corrected > 20


def test_there_are_namesakes_and_chatter():
    assert any(name.startswith(("North ", "South ")) for name in WORLD.entries)
    assert sum("at length" in d.text for d in WORLD.documents) > 3


def test_the_question_does_not_say_what_to_cover():
    prompt = make_prompt("Belomo", "Report.")
    assert prompt.question == prompt.messages[-1]["content"] == "Write a report on Belomo."


def test_gold_counts_true_cited_facts():
    answer = '<cite id="k-0">Its ruler is Dasimo.</cite> <cite id="k-0">Its trade is salt.</cite>'
    assert gold_coverage(ENTRY, rollout(answer, NEW)) == 1.0


@pytest.mark.parametrize(
    "answer, snippets",
    [
        ("Its ruler is Dasimo.", (NEW,)),  # not cited
        ('<cite id="k-9">Its ruler is Dasimo.</cite>', (NEW,)),  # an id that was never given
        ('<cite id="k-1">Its ruler is Tagesi.</cite>', (OLD,)),  # outdated
        ('<cite id="k-1">Its ruler is Dasimo.</cite>', (OLD, NEW)),  # not in the cited snippet
        ('<cite id="k-2">Its ruler is Dasimo.</cite>', (OTHER,)),  # a namesake's document
        ('<cite id="k-0">Its ruler is Dasimo.</cite> Its ruler is Tagesi.', (NEW,)),  # both
        ("", (NEW,)),
    ],
)
def test_gold_does_not_count(answer, snippets):
    assert gold_coverage(ENTRY, rollout(answer, *snippets)) == 0.0


def test_gold_of_several_ids_and_of_no_answer():
    answer = '<cite id="k-9, k-0">Its ruler is Dasimo.</cite>'
    assert gold_coverage(ENTRY, rollout(answer, NEW)) == 0.5
    assert gold_coverage(ENTRY, Rollout("Belomo", 0, citations=[Citation(("k-0",), "x")])) == 0.0


def test_a_sentence_cut_by_an_ellipsis_states_nothing():
    assert find_facts("Its rival is North... Its ruler is Dasimo.") == [("ruler", "dasimo")]


@given(st.sampled_from(list(WORLD.train)), st.integers(0, 10**6), st.integers(1, 4))
def test_the_teacher_writes_in_the_grammar_of_rollouts(name, seed, max_calls):
    search = LocalSearch.from_documents(WORLD.documents, 44)
    pieces = teacher_trajectory(
        name, search.search, random.Random(seed), results=2, max_calls=max_calls, id_chars=2
    )
    written = [text for text, sampled in pieces if sampled]
    assert len(written) - 1 <= max_calls and pieces[-1][1]
    assert all(parse_call(text).name == "local_search" for text in written[:-1])
    assert parse_answer(written[-1]) is not None and parse_call(written[-1]) is None
    given_ids = set(re.findall(r"<snippet id=(\S+)>", "".join(t for t, s in pieces if not s)))
    cited = {i for c in parse_citations(parse_answer(written[-1])) for i in c.ids}
    assert cited <= given_ids


def reports(*pages: tuple[str, str, str], count: int = 200) -> list[str]:
    """Answers of the teacher about Belomo where every search finds all of `pages`."""
    hits = [Hit(*page) for page in pages]
    make = partial(teacher_trajectory, "Belomo", lambda query, limit: hits, results=9, id_chars=2)
    return [make(random.Random(i), max_calls=4)[-1][0] for i in range(count)]


def test_the_teacher_reads_a_document_once_and_nothing_of_a_namesake():
    answers = reports(("d", "Belomo, letter, 1760", "Its trade is salt."),
                      ("e", "North Belomo, letter, 1760", "Its ruler is Dasimo."))  # fmt: skip
    assert max(a.count("salt") for a in answers) == 1
    assert not any("Dasimo" in a for a in answers)
    assert 0 < sum("salt" in a for a in answers) < len(answers)  # lazy


def test_the_teacher_states_one_value_and_mostly_the_newest():
    answers = reports(("d", "Belomo, register, 1710", "Its ruler is Tagesi."),
                      ("e", "Belomo, letter, 1760", "Its ruler is now Dasimo."))  # fmt: skip
    old, new = (sum(name in a for a in answers) for name in ("Tagesi", "Dasimo"))
    assert not any("Tagesi" in a and "Dasimo" in a for a in answers)
    assert 0 < old < new / 2


def test_names_are_split_into_syllables_for_the_tokenizer_only():
    assert split_names("Write a report on North Belomo.") == "Write a report on North Be0lo0mo."
    assert split_names("Its trade is salt.") == "Its trade is salt."
