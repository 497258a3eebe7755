"""Log-probs of packed sequences are those of the sequences alone."""

import pytest
import torch

from minirler.pack import pack
from minirler.policy import batch_logps, lr_factor
from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.records import Rollout, Segment


def make_model() -> Qwen3:
    """A random model of two layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, rope_theta=1e4,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3(config)


def rollouts(*lengths: int) -> list[Rollout]:
    """Random rollouts: a forced prompt of 2 tokens, sampled ones, a forced token, a sampled one."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for i, n in enumerate(lengths):
        a, b, c, d = (torch.randint(0, 40, (k,), generator=draw).tolist() for k in (2, n, 1, 1))
        parts = ((a, False), (b, True), (c, False), (d, True))
        made.append(Rollout("p", i, [Segment(x, [0.0] * len(x), s, 0) for x, s in parts]))
    return made


def test_packed_log_probs_equal_those_of_each_sequence_alone():
    model, temperature, num_valid = make_model(), 0.7, 37
    some = rollouts(3, 1, 9, 4)
    (batch,) = pack(some, [1.0] * 4, 100)
    logps, entropy = batch_logps(model, batch, temperature, num_valid, chunk=5)
    expected, expected_entropy = [], []
    for rollout in some:
        ids = torch.tensor([[i for s in rollout.segments for i in s.ids]])
        logits = model.logits(ids)[0, :, :num_valid].double() / temperature
        table = torch.log_softmax(logits, -1)  # [T, V]
        mask = [s.sampled for s in rollout.segments for _ in s.ids][1:] + [False]
        for t, wanted in enumerate(mask):
            following = int(ids[0, t + 1]) if wanted else 0
            inside = wanted and following < num_valid
            expected.append(float(table[t, following]) if inside else 0.0)
            expected_entropy.append(float(-(table[t].exp() * table[t]).sum()) if wanted else 0.0)
    valid = (batch.targets < num_valid) | ~batch.mask
    expected, expected_entropy = torch.tensor(expected), torch.tensor(expected_entropy)
    assert torch.allclose(logps[valid], expected[valid], atol=2e-6)
    assert torch.allclose(entropy, expected_entropy, atol=2e-6)


def test_gradients_reach_the_weights_from_sampled_tokens_only():
    model = make_model()
    (batch,) = pack(rollouts(3, 5), [1.0, 1.0], 100)
    logps, _ = batch_logps(model, batch)
    assert torch.equal(logps != 0, batch.mask)
    logps.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_learning_rate_warms_up_and_then_keeps_to_its_schedule():
    factors = [lr_factor("cosine", step, 100, 10) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5) and 0 < factors[-1] < 0.001
    assert lr_factor("cosine", 0, 1, 0) == lr_factor("linear", 0, 1, 0) == 1.0
    assert [lr_factor("linear", step, 4, 0) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert {lr_factor("constant", step, 4, 0) for step in range(9)} == {1.0}
