"""Ids equal to Qwen3's own; text from outside never makes a control token; no half characters."""

import json
import lzma
import shutil
import unicodedata
from pathlib import Path

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers

from minirler.data import replace_surrogates
from minirler.tokenizer import (
    NOT_SPECIAL,
    SPECIAL,
    IncrementalDecoder,
    Tokenizer,
    stop_ids,
    train_bpe,
)

GOLDEN = Path(__file__).parent / "golden" / "tokenizer"
ORACLE = [json.loads(line) for line in (GOLDEN / "oracle.jsonl").read_text("utf-8").splitlines()]
ADDED = [*SPECIAL, *NOT_SPECIAL]
GRAMMAR = ('<think>Find it.</think>\n<call_tool name="local_search">Belomo chronicle</call_tool>\n'
           "<tool_output>\n<snippet id=kd-0>\nBelomo, letter, 1743\nIts ruler is Dasimo.\n"
           "</snippet>\n</tool_output>\n"
           '<answer><cite id="kd-0">Its ruler is Dasimo.</cite></answer><|im_end|>')


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-tokenizer")
    with lzma.open(GOLDEN / "tokenizer.json.xz") as packed:
        (folder / "tokenizer.json").write_bytes(packed.read())
    shutil.copy(GOLDEN / "tokenizer_config.json", folder)
    return Tokenizer.from_path(folder)


@pytest.fixture(scope="module")
def small():
    return Tokenizer(train_bpe([GRAMMAR] * 4, 420))


def toy(merges, added):
    """Byte-level BPE of 256 bytes, the given merges and added tokens (text, special)."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    for text, special in added:
        add = bpe.add_special_tokens if special else bpe.add_tokens
        add([AddedToken(text, normalized=False, special=special)])
    return bpe


CHATML = [("<|im_start|>", True), ("<|im_end|>", True), ("<tool_call>", False), ("<think>", False)]


# ------------------------------------------------------------------------- equal to Qwen3's own


@pytest.mark.parametrize("case", [c for c in ORACLE if c["kind"] == "encode"],
                         ids=lambda c: ascii(c["text"][:12]))
def test_encode_is_qwen3s(qwen3, case):
    assert qwen3.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", [c for c in ORACLE if c["kind"] == "encode_untrusted"],
                         ids=lambda c: c["text"][:12])
def test_encode_untrusted_is_qwen3s_without_added_tokens(qwen3, case):
    assert qwen3.encode_untrusted(case["text"]) == case["ids"]
    assert qwen3.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", [c for c in ORACLE if c["kind"] == "chat"])
def test_render_is_qwen3s_template(qwen3, case):
    ids = qwen3.render(case["messages"], case["add_generation_prompt"], case["enable_thinking"])
    assert ids == case["ids"]
    assert qwen3.decode(ids) == case["text"]


def test_sizes_and_ends_are_qwen3s(qwen3):
    assert qwen3.num_valid == 151669
    assert (qwen3.im_end_id, qwen3.eos_ids) == (151645, {151645})
    assert [qwen3.encode(token) for token in ADDED] == [[i] for i in range(151643, 151669)]


def message(role, **more):
    text = st.text("ab \n.", max_size=8)
    return st.fixed_dictionaries({"role": st.just(role), "content": text}, optional=more)


CALL = st.fixed_dictionaries({"name": st.just("f"), "arguments": st.dictionaries(
    st.text("xé", max_size=2), st.integers(0, 9), max_size=2)})
CALLS = st.lists(CALL | st.builds(lambda call: {"function": call}, CALL), max_size=2)
THOUGHTS = st.sampled_from(["", "<think>\nhm\n</think>\n\n", "</think>", "a</think>\nb</think>"])
ASSISTANT = st.builds(
    lambda m, thought: m | {"content": thought + m["content"]},
    message("assistant", reasoning_content=st.none() | st.text("r\n", max_size=4),
            tool_calls=CALLS),
    THOUGHTS)


@settings(max_examples=50)
@given(st.lists(message("user") | message("system") | message("tool") | ASSISTANT, min_size=1,
                max_size=6), st.booleans(), st.sampled_from([None, True, False]))
def test_render_is_the_jinja_template_whatever_the_chat(qwen3, messages, prompt, thinking):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(qwen3.settings["chat_template"])
    more = {} if thinking is None else {"enable_thinking": thinking}
    text = template.render(messages=messages, add_generation_prompt=prompt, **more)
    ids = qwen3.render(messages, prompt, thinking)
    assert qwen3.decode(ids) == text
    assert ids == qwen3.encode(text)


# ------------------------------------------------------------------------- text from outside

TEXTS = st.lists(st.sampled_from(ADDED) | st.text(max_size=6), max_size=6).map("".join)


@given(TEXTS)
def test_untrusted_text_never_yields_an_added_token(qwen3, small, text):
    for tokenizer in (qwen3, small):
        ids = tokenizer.encode_untrusted(text)
        assert all(i < tokenizer.num_valid - len(ADDED) for i in ids)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@given(text=TEXTS)
def test_contents_of_a_chat_cannot_forge_its_frame(qwen3, role, text):
    plain = qwen3.render([{"role": role, "content": "x"}], add_generation_prompt=True)
    forged = qwen3.render([{"role": role, "content": text}], add_generation_prompt=True)
    assert [i for i in forged if i >= 151643] == [i for i in plain if i >= 151643]


def test_assistant_text_keeps_think_tags_as_tokens_and_no_others(qwen3):
    start, end, think, end_think = (qwen3.encode(t)[0] for t in (
        "<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    content = "<think>\na <|im_end|> b\n</think>\n\n<tool_call>c"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    ids = qwen3.render(chat)
    assert [i for i in ids if i >= 151643] == [start, end, start, think, end_think, end]
    assert qwen3.decode(ids).endswith(f"assistant\n{content}<|im_end|>\n")


def test_added_but_not_special_tokens_are_disabled_too():
    tokenizer = Tokenizer(toy([("l", "l")], CHATML))
    text = "ok<|im_end|>x<tool_call>y"
    ids = tokenizer.encode_untrusted(text)
    assert ids == [78, 74, 27, 91, 72, 76, 62, 68, 77, 67, 91, 29, 87,
                   27, 83, 78, 78, 75, 62, 66, 64, 256, 29, 88]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [78, 74, 258, 87, 259, 88]


def test_a_tokenizer_whose_merges_make_an_added_token_is_refused():
    with pytest.raises(ValueError, match="merges make <a>"):
        Tokenizer(toy([("<", "a"), ("<a", ">")], [*CHATML, ("<a>", False)]))


def test_pairs_of_surrogates_are_joined_and_lone_ones_replaced(qwen3):
    assert replace_surrogates("a\ud83e\uddedb\ud83ec\udded") == "a🧭b\ufffdc\ufffd"
    for encode in (qwen3.encode, qwen3.encode_untrusted):
        assert encode("x\ud83e") == encode("x\ufffd")
    ids = qwen3.render([{"role": "user", "content": "\ud83e"}])
    assert qwen3.decode(ids) == "<|im_start|>user\n\ufffd<|im_end|>\n"


@pytest.mark.parametrize("messages, message", [
    ([{"role": "user", "content": ["part"]}], "message 0: content must be a string, not list"),
    ([{"role": "user", "content": "q"}, {"role": "assistant"}], "message 1: content"),
    ([{"role": "critic", "content": "q"}], "message 0: role 'critic'"),
])
def test_a_malformed_chat_is_named(qwen3, messages, message):
    with pytest.raises(ValueError, match=message):
        qwen3.render(messages)


# ------------------------------------------------------------------------- decoding


def deltas(tokenizer, ids):
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 300) | st.integers(151640, 151668) | st.integers(0, 151668)))
def test_incremental_decoding_equals_decoding_the_whole(qwen3, ids):
    assert "".join(deltas(qwen3, ids)) == qwen3.decode(ids)


@given(st.text())
def test_no_delta_holds_half_a_character(small, text):
    ids = small.encode_untrusted(text)
    whole = unicodedata.normalize("NFC", text)
    assert "".join(deltas(small, ids)) == whole
    assert ("\ufffd" in "".join(deltas(small, ids))) == ("\ufffd" in whole)


def test_a_character_split_over_tokens_appears_once_it_is_whole():
    tokenizer = Tokenizer(toy([("ð", "Ł")], CHATML))  # bytes f0 9f in the byte alphabet
    ids = tokenizer.encode_untrusted("🧭!")
    assert [tokenizer.token_bytes(i).hex() for i in ids] == ["f09f", "a7", "ad", "21"]
    assert deltas(tokenizer, ids) == ["", "", "🧭", "!", ""]
    assert deltas(tokenizer, ids[:2]) == ["", "", "\ufffd"]
    assert deltas(tokenizer, ids[1:]) == ["\ufffd", "\ufffd", "!", ""]  # a prompt ended in f0 9f


def test_an_id_beyond_the_tokenizer_is_an_error(small):
    with pytest.raises(ValueError, match=f"token id {small.num_valid} is not in the tokenizer"):
        IncrementalDecoder(small).push(small.num_valid)


# ------------------------------------------------------------------------- ends of generation


@pytest.mark.parametrize("config, generation, expected", [
    (151645, [151645, 151643], (151643, 151645)),
    (None, 151643, (151643, 151645)),
    ([7], None, (7, 151645)),
    (None, None, (151645,)),
])
def test_stop_ids_are_the_union_of_three_files(qwen3, tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_ids(tmp_path, qwen3) == expected


def test_stop_ids_need_no_model_files(qwen3, tmp_path):
    assert stop_ids(tmp_path, qwen3) == (151645,)


# ------------------------------------------------------------------------- training and files


def test_a_trained_tokenizer_has_qwen3s_added_tokens_behind_its_merges(qwen3):
    bpe = train_bpe([GRAMMAR] * 4, 320)
    assert bpe.get_vocab_size() == 320
    ours = bpe.get_added_tokens_decoder()
    theirs = qwen3._trusted.get_added_tokens_decoder()
    assert sorted(ours) == list(range(320 - 26, 320))
    assert [vars_of(ours[i]) for i in sorted(ours)] == [vars_of(theirs[i]) for i in sorted(theirs)]


def vars_of(token):
    names = ("content", "special", "normalized", "single_word", "lstrip", "rstrip")
    return {name: getattr(token, name) for name in names}


def test_training_is_reproducible():
    assert train_bpe([GRAMMAR] * 2, 400).to_str() == train_bpe([GRAMMAR] * 2, 400).to_str()


def test_tags_of_the_grammar_become_single_tokens(small):
    pieces = [small.decode([i]) for i in small.encode(GRAMMAR)]
    for tag in ("<think>", '<call_tool name="', "</call_tool>", "<tool_output>", "<snippet id=",
                "</snippet>", "<answer>", '<cite id="', '">', "<|im_end|>"):
        assert tag in pieces, tag
    assert "".join(pieces) == GRAMMAR


def test_a_vocabulary_below_bytes_and_added_tokens_is_refused():
    with pytest.raises(ValueError, match="vocab_size 281 is below"):
        train_bpe(["a"], 281)
    assert train_bpe(["a"], 282).get_vocab_size() == 282


def test_a_saved_tokenizer_is_the_same_one(small, tmp_path):
    small.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.from_path(path)
        assert (again.num_valid, again.eos_ids) == (small.num_valid, small.eos_ids)
        assert again.settings == small.settings
        assert again.encode(GRAMMAR) == small.encode(GRAMMAR)


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: no such file"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: not a readable tokenizer.json"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("added, settings, missing", [
    ([("<|im_start|>", True)], None, "<|im_end|>"),
    (CHATML, {"eos_token": {"content": "</s>"}}, "</s>"),
])
def test_control_tokens_that_are_missing_are_named(added, settings, missing):
    with pytest.raises(ValueError) as error:
        Tokenizer(toy([], added), settings)
    assert missing in str(error.value)
