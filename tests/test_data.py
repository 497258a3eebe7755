"""Prompts are read strictly, with errors that name the line; their order is fair and resumable."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler.config import ConfigError
from minirler.data import PromptOrder, joined, read_prompts, read_system_prompt


def write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_a_question_becomes_a_chat_with_the_system_prompt(tmp_path):
    path = write(tmp_path, {"id": "a", "question": "Why?", "source": 3})
    (prompt,) = read_prompts(path, "Be kind.")
    assert prompt.id == "a" and prompt.question == "Why?" and prompt.kind == "long_form"
    assert prompt.messages == (
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"},
    )  # fmt: skip
    assert prompt.metadata == {"source": 3} and prompt.rubrics == ()


def test_a_chat_keeps_its_own_system_message_and_ends_in_the_question(tmp_path):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]  # fmt: skip
    (prompt,) = read_prompts(write(tmp_path, {"messages": chat}), "other")
    assert list(prompt.messages) == chat and prompt.question == "3" and prompt.id == "row-1"


def test_rubrics_come_from_the_row_or_from_its_ground_truth(tmp_path):
    rubrics = [{"description": "d", "title": "t", "weight": 2}]
    rows = [
        {"question": "q", "rubrics": rubrics},
        {"question": "q", "ground_truth": {"query": "q", "rubrics": rubrics}},
        {"question": "q", "ground_truth": json.dumps({"rubrics": rubrics})},
        {"question": "q", "ground_truth": "Paris"},
    ]
    prompts = read_prompts(write(tmp_path, *rows))
    assert [list(p.rubrics) for p in prompts] == [rubrics, rubrics, rubrics, []]
    assert prompts[3].metadata == {"ground_truth": "Paris"}


def test_blank_lines_a_bom_and_line_separators_inside_text_are_harmless(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes("\ufeff{\"question\": \"a\u2028b\"}\r\n\n{\"question\": \"c\"}".encode())
    prompts = read_prompts(path)
    assert [(p.id, p.question) for p in prompts] == [("row-1", "a\u2028b"), ("row-3", "c")]


def test_lone_surrogates_are_replaced_and_pairs_joined(tmp_path):
    row = r'{"question": "\ud83e\udded \ud83e", "rubrics": [{"description": "\udded"}]}'
    (prompt,) = read_prompts(write(tmp_path, row))
    assert prompt.question == "🧭 \ufffd" and prompt.rubrics[0]["description"] == "\ufffd"
    json.dumps([prompt.question, *prompt.rubrics, prompt.metadata], ensure_ascii=False).encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_whole_text_is_left_as_it_is(text):
    assert joined([{text: text}]) == [{text: text}]


@pytest.mark.parametrize(("row", "reason"), [
    ("{", "Expecting"),
    ("[1]", "no JSON object"),
    ("null", "no JSON object"),
    ({}, "`question` or `messages`"),
    ({"question": "q", "messages": []}, "one of them"),
    ({"question": ""}, "must be text"),
    ({"question": 3}, "must be text"),
    ({"messages": []}, "must be text"),
    ({"messages": "hi"}, "must be a list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "needs a role"),
    ({"messages": ["x"]}, "needs a role"),
    ({"messages": [{"role": "user", "content": None}]}, "must be text"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "must be the user's"),
    ({"question": "q", "rubrics": "r"}, "`rubrics`"),
    ({"question": "q", "rubrics": [{"title": "t"}]}, "`rubrics`"),
    ({"question": "q", "rubrics": [None]}, "`rubrics`"),
    ({"question": "q", "ground_truth": "{"}, "Expecting"),
    ({"question": "q", "id": None}, "`id`"),
    ({"question": "q", "kind": 3}, "`kind`"),
    ({"question": "q", "id": "same"}, "line 1"),
])  # fmt: skip
def test_a_bad_row_is_an_error_with_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path, {"id": "same", "question": "fine"}, "", row)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert f"{path}, line 3: " in message and reason in message and "\n" not in message


def test_missing_empty_and_unreadable_files_are_one_line_errors(tmp_path):
    for path in (tmp_path / "absent.jsonl", write(tmp_path, "", "  "), tmp_path):
        message = str(pytest.raises(ConfigError, read_prompts, path).value)
        assert str(path) in message and "\n" not in message
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    assert "latin.jsonl" in str(
        pytest.raises(ConfigError, read_prompts, tmp_path / "latin.jsonl").value
    )


def test_a_system_prompt_is_a_shipped_name_or_a_path(tmp_path):
    (tmp_path / "mine.txt").write_text(" Be brief.\n")
    assert read_system_prompt(str(tmp_path / "mine.txt")) == "Be brief."
    assert read_system_prompt("system_almanac")
    assert "system_nothing" in str(
        pytest.raises(ConfigError, read_system_prompt, "system_nothing").value
    )


STEPS = st.integers(1, 12).flatmap(
    lambda num: st.tuples(st.just(num), st.lists(st.integers(0, num), max_size=12))
)


@given(STEPS, st.integers())
def test_a_step_holds_no_prompt_twice_nor_one_that_its_epoch_gave_already(steps, seed):
    num, counts = steps
    order, seen, epoch = PromptOrder(num, seed), set(), 0
    for count in counts:
        taken = order.next(count)
        seen = seen if order.state()["epoch"] == epoch else set()
        epoch = order.state()["epoch"]
        assert len(set(taken)) == count and not seen & set(taken)
        assert set(taken) <= set(range(num))
        seen |= set(taken)


@given(st.integers(1, 6), st.integers(1, 6), st.integers())
def test_an_epoch_of_whole_steps_visits_every_prompt_once(steps, count, seed):
    order = PromptOrder(steps * count, seed)
    for _ in range(3):
        visits = [i for _ in range(steps) for i in order.next(count)]
        assert sorted(visits) == list(range(steps * count))


def test_an_epoch_leaves_out_fewer_than_a_step_takes():
    order = PromptOrder(11, seed=0)
    for epoch in range(5):
        visits = [i for _ in range(2) for i in order.next(4)]
        assert len(set(visits)) == 8 and order.state()["epoch"] == epoch
    with pytest.raises(ValueError, match="12 distinct prompts of 11"):
        order.next(12)


@given(STEPS, st.data(), st.integers())
def test_a_resumed_order_goes_on_as_if_uninterrupted(steps, data, seed):
    num, counts = steps
    order, resumed = PromptOrder(num, seed), PromptOrder(num, seed)
    kill = data.draw(st.integers(0, len(counts)))
    for count in counts[:kill]:
        order.next(count)
    resumed.load(json.loads(json.dumps(order.state())))
    assert [resumed.next(n) for n in counts[kill:]] == [order.next(n) for n in counts[kill:]]


def test_epochs_and_seeds_have_orders_of_their_own():
    order = PromptOrder(50, seed=1)
    first, second = order.next(50), order.next(50)
    assert first != second and PromptOrder(50, 2).next(50) not in (first, second)
    assert first == PromptOrder(50, 1).next(50) and first != sorted(first)
    with pytest.raises(ValueError):
        PromptOrder(0, 1)
