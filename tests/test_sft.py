"""The cold start: its data, its loss, and that the shipped checkpoint is what it makes."""

import json
import math

import pytest
import torch

from minirler import sft
from minirler.config import asset_path, load_config
from minirler.tokenizer import Tokenizer
from minirler.weights import load_model
from minirler.world import make_prompt, make_world

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
    recorded = json.loads((SHIPPED / "losses.json").read_text())["almanac-sft"]
    config = load_config(["configs/almanac-sft.toml", f"sft.out={tmp_path}"])
    losses = sft.train(config, stop_after=4)
    assert losses == pytest.approx(recorded[:4], rel=2e-3)


def test_the_recorded_losses_fall():
    recorded = json.loads((SHIPPED / "losses.json").read_text())
    first, second = recorded["almanac-sft"], recorded["almanac-sft-2"]
    assert first[0] > 6 and sum(first[-20:]) / 20 < 0.3
    assert sum(second[-50:]) < 0.9 * sum(second[:50])


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


def test_tool_output_counts_only_in_the_first_part(teacher, tokenizer):
    border = math.ceil(CONFIG.sft.all_tokens * CONFIG.sft.steps)
    early, late = (teacher.batch(tokenizer, step) for step in (border - 1, border))
    assert all(s.sampled for r in early for s in r.segments[1:])
    assert all(len(r.segments) > 2 and not r.segments[2].sampled for r in late)


def test_searches_grow_from_one_to_all(teacher):
    def most_calls(step):
        return max(sum(not s for _, s in teacher.pieces(step, i)[1]) for i in range(40))

    assert most_calls(0) == 1
    assert most_calls(CONFIG.sft.steps) == CONFIG.rollout.max_tool_calls


def test_batches_are_a_function_of_seed_and_step(teacher, tokenizer):
    assert teacher.batch(tokenizer, 7) == teacher.batch(tokenizer, 7)
    assert teacher.batch(tokenizer, 7) != teacher.batch(tokenizer, 8)


def test_the_schedule_warms_up_and_falls_to_nothing():
    factors = [sft.schedule(step, 100, 10) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5) and 0 < factors[-1] < 0.001
    assert sft.schedule(0, 1, 0) == 1.0


def test_one_step_lowers_the_loss_of_its_own_batch(teacher, tokenizer):
    model = load_model(SHIPPED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    batch = teacher.batch(tokenizer, CONFIG.sft.steps)
    first = sft.train_step(model, optimizer, batch, CONFIG)
    assert sft.train_step(model, optimizer, batch, CONFIG) < first


def test_new_names_are_in_no_two_trajectories_and_hang_together(teacher):
    config = load_config(["configs/almanac-sft.toml", "sft.new_names=true"])
    renamed = sft.Teacher(config, make_world(CONFIG.world.seed, CONFIG.world.entities, 1))
    names = set()
    for index in range(20):
        (old, before), (new, after) = (t.pieces(9, index) for t in (teacher, renamed))
        names.add(new)
        assert len("".join(t for t, _ in before)) == len("".join(t for t, _ in after))
        written = ["".join(t for t, own in pieces if own) for pieces in (before, after)]
        assert written[0].count(old) == written[1].count(new) > 0
    assert len(names) == 20 and not names & set(teacher.names)
