"""The offline LM: what it reads as a fact, what it finds in an answer, what it proposes."""

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler.lm import PROMPTS, make_request
from minirler.offline import REPEATS, OfflineLM, parse_facts
from minirler.records import LMRequest

QUESTION = "Write a report on Belomo."
RULER = "States, with a citation, that its ruler is Dasimo."
CHATTER = "Travellers speak of it at length."


def ask(task, **fields):
    reply = asyncio.run(OfflineLM().complete(LMRequest(task, fields, ())))
    return json.loads(reply.text)


def judge(answer, criterion, **fields):
    return ask("judge", question=QUESTION, answer=answer, criterion=criterion, **fields)["score"]


def source(title, text, name="kd-0"):
    return {"id": name, "title": title, "text": text}


def cited(text):
    return f'<cite id="kd-0">{text}</cite>'


def evolve(answers, sources, existing=(), limit=5):
    rollouts = [{"answer": answer, "sources": sources} for answer in answers]
    reply = ask("rubrics_evolving", question=QUESTION, existing=list(existing), rollouts=rollouts,
                limit=limit)  # fmt: skip
    sides = reply["positive_rubrics"], reply["negative_rubrics"]
    return [[rubric["description"] for rubric in side] for side in sides]


# ---- facts


@pytest.mark.parametrize(
    "text, facts",
    [
        ("Its ruler is Dasimo.", [("ruler", "Dasimo")]),
        ("Its ruler is now Dasimo.", [("ruler", "Dasimo")]),
        ("Dasimo is its ruler.", [("ruler", "Dasimo")]),
        ("Its rival is North Belomo.", [("rival", "North Belomo")]),
        ("Its year is 1603.", [("year", "1603")]),
        ("Its share is 3.5.", [("share", "3.5")]),
        ("1603 is its year.Its trade is salt.", [("year", "1603"), ("trade", "salt")]),
        ("Belomo, chronicle, 1743\nBelomo is a town. Salt is its trade.", [("trade", "Salt")]),
        ("Its ruler is Dasimo", []),
        ("Its trade is not salt. Its trade is salt and wine. Is its ruler Dasimo?", []),
        (CHATTER, []),
        ("...Belomo is its rival. ...Its trade is salt. Its ally is North...", [("trade", "salt")]),
    ],
)
def test_facts_are_whole_sentences_of_the_known_forms(text, facts):
    assert list(parse_facts(text)) == facts


ATTRIBUTES = st.from_regex(r"[a-z]{2,8}", fullmatch=True)
NAMES = st.from_regex(r"[A-Z][a-z]{1,7}( [A-Z][a-z]{1,7})?", fullmatch=True)
VALUES = st.one_of(NAMES, ATTRIBUTES, st.integers(0, 9999).map(str))
FORMS = st.sampled_from(["Its {a} is {v}.", "Its {a} is now {v}.", "{v} is its {a}."])


@given(st.lists(st.tuples(FORMS, ATTRIBUTES, VALUES)))
def test_facts_round_trip_through_their_sentences(facts):
    text = " ".join(["Belomo is a town.", *(f.format(a=a, v=v) for f, a, v in facts), CHATTER])
    assert list(parse_facts(text)) == [(a, v) for _, a, v in facts]


# ---- the judge


@pytest.mark.parametrize(
    "answer, score",
    [
        (cited("Its ruler is Dasimo. Its trade is salt."), 2),
        (cited("Its trade is salt.") + " Dasimo is its ruler.", 1),
        ("<cite>Its ruler is Dasimo.</cite>", 1),
        (cited("Its ruler is Dasimo") + ".", 2),
        (cited("Its ruler is Talesi."), 0),
        (cited("Its ruler is Dasimo.") + " Its ruler is Talesi.", 0),
        (cited("Its ruler is North Dasimo."), 0),
        (cited("Its heir is Dasimo."), 0),
        ("", 0),
    ],
)
def test_a_fact_counts_if_cited_half_if_not_and_not_at_all_beside_another_value(answer, score):
    assert judge(answer, RULER) == score


def test_the_judge_gives_a_reason_before_its_verdict_on_either_scale():
    fields = {"question": QUESTION, "answer": "Its ruler is Dasimo.", "criterion": RULER}
    assert list(ask("judge", **fields)) == ["reason", "score"]
    binary = ask("judge", **fields, scale="binary")
    assert list(binary) == ["reason", "met"] and binary["met"] is False
    assert ask("judge", **fields | {"answer": cited("Its ruler is Dasimo.")}, scale="binary")["met"]


@pytest.mark.parametrize(
    "criterion, yes, no",
    [
        ("Claims that its ruler is Talesi.", "Talesi is its ruler.", cited("Its ruler is Dasimo.")),
        (REPEATS, cited("Its trade is salt.") + " Its trade is salt.", "Its trade is salt."),
        (f'Copies the empty sentence "{CHATTER[:-1]}" from a source.', cited(CHATTER), "Yes."),
        ("States that its trade is salt.", "Salt is its trade.", "Its trade is wool."),
    ],
)
def test_faults_and_plain_facts_are_present_or_not(criterion, yes, no):
    assert (judge(yes, criterion), judge(no, criterion)) == (2, 0)


def test_a_criterion_in_other_words_is_judged_by_the_words_that_occur():
    criterion = "Mentions the salt trade along the river."
    assert judge("It mentions that salt is a trade along the river.", criterion) == 2
    assert judge("The river carried much salt.", criterion) == 1
    assert judge("Salt was sold there.", criterion) == 0


# ---- the generators


def test_queries_are_about_the_subject_or_else_the_question_and_its_names():
    assert ask("rubrics_queries", question=QUESTION, limit=2)["queries"] == [
        "Belomo",
        "Belomo chronicle",
    ]
    other = ask("rubrics_queries", question="who ruled North Belomo before Talesi?", limit=9)
    assert other["queries"] == ["who ruled North Belomo before Talesi?", "North Belomo", "Talesi"]


def test_persistent_rubrics_take_the_newest_value_of_the_subject_from_each_document_in_turn():
    documents = [
        source("Belomo, chronicle, 1710", "Its ruler is Talesi. Its trade is salt.", "old"),
        source("North Belomo, letter, 1790", "Its ruler is Rodite.", "namesake"),
        source("Belomo, register, 1750", "Its ruler is now Dasimo. Red is its colour.", "new"),
    ]
    ask_for = {"question": QUESTION, "documents": documents}
    reply = ask("rubrics_persistent", **ask_for, limit=4)
    assert [(r["description"], r["sources"]) for r in reply["positive_rubrics"]] == [
        ("States, with a citation, that its trade is salt.", ["old"]),
        (RULER, ["new"]),
        ("States, with a citation, that its colour is Red.", ["new"]),
    ]
    assert reply["negative_rubrics"] == []
    assert len(ask("rubrics_persistent", **ask_for, limit=1)["positive_rubrics"]) == 1


SOURCES = [
    source("Belomo, chronicle, 1710", f"Its ruler is Talesi. Its trade is salt. {CHATTER}"),
    source("Belomo, register, 1750", "Its ruler is now Dasimo. Its colour is red.", "kd-1"),
    source("North Belomo, letter, 1790", "Its ruler is Rodite. Its river is Loguma.", "kd-2"),
]
TRADE = "States, with a citation, that its trade is salt."
COLOUR = "States, with a citation, that its colour is red."


def test_evolving_merits_are_true_cited_facts_of_some_rollouts_the_most_even_split_first():
    all_three = cited("Its ruler is Dasimo. Its trade is salt. Its colour is red.")
    answers = [all_three, cited("Its ruler is Dasimo. Its trade is salt."),
               cited("Its ruler is Dasimo. Its trade is salt."), cited("Its ruler is Dasimo.")]
    assert evolve(answers, SOURCES) == [[COLOUR, TRADE], []]  # equally even: by name
    answers[2] = answers[3]
    assert evolve(answers, SOURCES) == [[TRADE, COLOUR], []]
    assert evolve(answers, SOURCES, limit=1) == [[TRADE], []]
    uncited = ["Its trade is salt. Its colour is red.", "Its trade is salt."]
    assert evolve(uncited, SOURCES) == [[], []]


def test_what_existing_criteria_ask_is_not_proposed_again():
    answers = [cited("Its ruler is Dasimo. Its trade is salt."), "Its trade is salt."]
    reworded = "  States, with a citation, that its trade is SALT.\n"
    assert evolve(answers, SOURCES, [reworded]) == [[RULER], []]
    assert evolve(answers, SOURCES, [RULER, reworded]) == [[], []]


def test_evolving_faults_are_what_some_rollouts_do_and_not_all():
    good, plain = cited("Its trade is salt."), "Its trade is salt."
    double = f"{plain} {plain}"
    copying = f"{plain} {CHATTER}"
    copied = f'Copies the empty sentence "{CHATTER[:-1]}" from a source.'
    assert evolve([good, good + plain], SOURCES)[1] == [REPEATS]
    assert evolve([good + plain, double], SOURCES)[1] == []
    assert evolve([plain, copying], SOURCES) == [[], [copied]]
    assert evolve([plain, copying], SOURCES, [copied]) == [[], []]
    assert evolve([copying, copying], SOURCES) == [[], []]


@pytest.mark.parametrize(
    "claim, fault",
    [
        ("Its ruler is Talesi.", "Claims that its ruler is Talesi."),  # a newer source knows better
        ("Its ruler is Rodite.", "Claims that its ruler is Rodite."),  # a namesake's
        ("Its emblem is lion.", "Claims that its emblem is lion."),  # nobody says so
    ],
)
def test_false_claims_are_faults(claim, fault):
    assert evolve([cited("Its trade is salt."), cited(claim + " Its trade is salt.")], SOURCES) == [
        [], [fault]]  # fmt: skip


def test_no_merit_has_a_fault_as_its_mirror():
    answers = [cited("Its ruler is Dasimo."), cited("Its ruler is Talesi.")]
    assert evolve(answers, SOURCES) == [[RULER], []]
    assert evolve(answers, SOURCES, [RULER]) == [[], []]
    fault = "Claims that its ruler is Talesi."
    assert evolve(answers, SOURCES, [fault]) == [[], []]
    assert evolve([answers[1], ""], SOURCES) == [[], [fault]]


def test_merits_and_faults_share_the_limit():
    facts = [f"Its {a} is {v}." for a, v in zip("abcdef", "uvwxyz", strict=True)]
    sources = [source("Belomo, letter, 1750", " ".join(facts))]
    wrong = "Its rival is Talesi. Its ally is Rodite. Its seat is Loguma."
    positive, negative = evolve([cited(" ".join(facts)), wrong], sources)
    assert (len(positive), len(negative)) == (3, 2)
    positive, negative = evolve([cited(facts[0]), wrong], sources)
    assert (len(positive), len(negative)) == (1, 3)


def test_every_proposed_criterion_splits_the_group_when_it_is_judged():
    answers = [cited("Its ruler is Dasimo. Its trade is salt.") + CHATTER,
               cited("Its colour is red. Its ruler is Talesi. Its emblem is lion."),
               "Its trade is salt. Its trade is salt."]  # fmt: skip
    proposed = [c for side in evolve(answers, SOURCES) for c in side]
    assert len(proposed) == 5
    for criterion in proposed:
        scores = [judge(answer, criterion) for answer in answers]
        assert min(scores) < 2 and max(scores) == 2, criterion


# ---- as an LM


def test_replies_do_not_depend_on_the_wording_of_the_prompts(tmp_path):
    sides = [cited("Its trade is salt."), "Its trade is salt."]
    requests = {
        "judge": {"question": QUESTION, "answer": sides[0], "criterion": TRADE},
        "rubrics_queries": {"question": QUESTION, "limit": 2},
        "rubrics_persistent": {"question": QUESTION, "documents": SOURCES, "limit": 4},
        "rubrics_evolving": {"question": QUESTION, "existing": [], "limit": 5,
                             "rollouts": [{"answer": a, "sources": SOURCES} for a in sides]},
    }  # fmt: skip
    for task, fields in requests.items():
        names = "".join(f"{{{name}}}" for name in fields)
        (tmp_path / f"{task}.txt").write_text("Quite other words: " + names)
        shipped, other = (make_request(task, fields, prompts_dir=d) for d in (PROMPTS, tmp_path))
        assert shipped.messages != other.messages
        replies = [asyncio.run(OfflineLM().complete(r)) for r in (shipped, other)]
        assert replies[0] == replies[1] and replies[0].text


def test_an_unknown_task_is_an_error_reply():
    reply = asyncio.run(OfflineLM().complete(LMRequest("poem", {}, ())))
    assert reply.text is None and "poem" in reply.error


PIECES = st.sampled_from(
    ["Its ruler is Dasimo.", "Belomo", '<cite id="a">', "</cite>", "...", "…", ".", " is its ", '"',
     "Claims that its a is b.", 'Copies the empty sentence "', ", 1750", "report on ", "\ud800"]
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(PIECES).map("".join))
DOCUMENT = st.fixed_dictionaries({"id": TEXTS, "title": TEXTS, "text": TEXTS})
DOCUMENTS = st.lists(DOCUMENT, max_size=3)
ROLLOUTS = st.lists(
    st.fixed_dictionaries({"answer": st.none() | TEXTS, "sources": DOCUMENTS}), max_size=4
)


@given(TEXTS, TEXTS, TEXTS, DOCUMENTS, ROLLOUTS, st.lists(TEXTS, max_size=3), st.integers(0, 6))
def test_any_text_gets_a_reply_of_the_right_form(
    question, answer, criterion, docs, rolls, old, limit
):
    verdict = ask("judge", question=question, answer=answer, criterion=criterion)
    assert verdict["score"] in (0, 1, 2)
    base = {"question": question, "limit": limit}
    assert len(ask("rubrics_queries", **base)["queries"]) <= limit
    for reply in (ask("rubrics_persistent", documents=docs, **base),
                  ask("rubrics_evolving", existing=old, rollouts=rolls, **base)):  # fmt: skip
        rubrics = reply["positive_rubrics"] + reply["negative_rubrics"]
        assert len(rubrics) <= limit and all(r["description"] for r in rubrics)


def test_fields_that_are_missing_or_of_another_type_do_no_harm():
    for task in ("judge", "rubrics_queries", "rubrics_persistent", "rubrics_evolving"):
        for value in (None, 3, [3], {"x": 1}):
            names = "question answer criterion documents existing rollouts limit".split()
            assert isinstance(ask(task, **dict.fromkeys(names, value)), dict)


def test_no_torch_is_imported():
    code = "import sys, minirler.offline, minirler.evolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
