"""The cold start: its data, its loss, and that the shipped checkpoint is what it makes."""

import json
import math

import pytest
import torch

from minirler import sft
from minirler.config import asset_path, load_config
from minirler.tokenizer import Tokenizer
from minirler.tools import parse_call
from minirler.weights import load_model
from minirler.world import find_facts, make_prompt, make_world

CONFIG = load_config(["configs/almanac-sft.toml"])
SHIPPED = asset_path("package:almanac")


@pytest.fixture(scope="module")
def teacher() -> sft.Teacher:
    """The teacher of the shipped configuration."""
    return sft.Teacher(CONFIG, make_world(CONFIG.world.seed, CONFIG.world.entities, 1))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_path(SHIPPED)


def test_training_again_gives_the_recorded_losses(tmp_path):
    recorded = json.loads((SHIPPED / "losses.json").read_text())
    config = load_config(["configs/almanac-sft.toml", f"sft.out={tmp_path}"])
    losses = sft.train(config, stop_after=4)
    assert losses == pytest.approx(recorded[:4], rel=2e-3)


def test_without_a_model_to_start_from_it_makes_one_and_a_tokenizer(tmp_path):
    changes = ["sft.init=", "sft.vocab_size=640", "sft.warmup_steps=1", f"sft.out={tmp_path}"]
    config = load_config(["configs/almanac-sft.toml", *changes, "sft.steps=2", "sft.lr=1e-3"])
    first, second = sft.train(config)
    model, tokenizer = load_model(tmp_path), Tokenizer.from_path(tmp_path)
    assert first == pytest.approx(math.log(tokenizer.num_valid), rel=0.05) and second < first
    assert model.config.vocab_size == tokenizer.num_valid <= 640
    assert all(len(tokenizer.encode(name)) == 3 for name in make_world(9, 50, 1).train)


def test_the_recorded_losses_fall():
    recorded = json.loads((SHIPPED / "losses.json").read_text())
    assert len(recorded) == CONFIG.sft.steps
    assert sum(recorded[-100:]) < 0.95 * sum(recorded[100:200])  # from where the rate is whole


def test_the_shipped_checkpoint_is_small_and_loads(tokenizer):
    model = load_model(SHIPPED)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 5_000_000
    assert model.config.vocab_size == tokenizer.num_valid


def test_a_name_is_three_tokens_whether_it_was_seen_or_not(tokenizer):
    world = make_world(12345, 20, 1)
    for name in world.train:
        assert len(tokenizer.encode(name)) == len(tokenizer.encode(" " + name)) == 3


def test_a_trajectory_is_tokenised_as_a_rollout_is(tokenizer):
    pieces = [
        ("<think>I</think>\nask", True),
        ("\n<tool_output>x</tool_output>\n", False),
        ("so", True),
    ]
    rollout = sft.as_rollout(tokenizer, make_prompt("Belomo", "S").messages, pieces)
    prompt, *rest = rollout.segments
    assert prompt.ids == tokenizer.render(
        list(make_prompt("Belomo", "S").messages), add_generation_prompt=True
    )
    assert [s.sampled for s in rollout.segments] == [False, True, False, True]
    assert rest[0].ids == tokenizer.encode(pieces[0][0])
    assert rest[1].ids == tokenizer.encode_untrusted(pieces[1][0])
    assert rest[2].ids == [*tokenizer.encode("so"), tokenizer.im_end_id]


def test_only_what_the_teacher_writes_counts(teacher, tokenizer):
    for rollout in teacher.batch(tokenizer, 3):
        sampled = [segment.sampled for segment in rollout.segments[1:]]
        assert sampled == [number % 2 == 0 for number in range(len(sampled))]


def test_the_teacher_makes_one_search_to_all(teacher):
    numbers = [sum(not own for _, own in teacher.pieces(0, i)[1]) for i in range(40)]
    assert max(numbers) == CONFIG.rollout.max_tool_calls and min(numbers) == 1


def test_batches_are_a_function_of_seed_and_step(teacher, tokenizer):
    assert teacher.batch(tokenizer, 7) == teacher.batch(tokenizer, 7)
    assert teacher.batch(tokenizer, 7) != teacher.batch(tokenizer, 8)


def test_one_step_lowers_the_loss_of_its_own_batch(teacher, tokenizer):
    model = load_model(SHIPPED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    batch = teacher.batch(tokenizer, CONFIG.sft.steps)
    first = sft.train_step(model, optimizer, batch, CONFIG)
    assert sft.train_step(model, optimizer, batch, CONFIG) < first


def test_names_are_new_in_every_trajectory_and_hang_together(teacher):
    names = set()
    for index in range(20):
        name, pieces = teacher.pieces(9999, index)
        names.add(name)
        assert all(parse_call(t).content.split()[0] == name for t, own in pieces[:-1] if own)
        read = {fact for text, own in pieces if not own for fact in find_facts(text)}
        assert set(find_facts(pieces[-1][0])) <= read
    assert len(names) == 20  # by chance one may be that of an entry of the world
    assert len(names & set(teacher.names)) <= 2
