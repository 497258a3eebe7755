"""The model equals the reference's logits, greedy texts and gradients, packed or not."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.rotary import Yarn, attention_factor, inv_freq, rotate, yarn_ramp
from minirler.weights import load_model

GOLDEN = Path(__file__).parent / "golden"
CASES = ("tied", "untied", "yarn")  # untied: config.json in the old style
SMALL = Qwen3Config(vocab_size=23, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=6, initializer_range=0.4)


@cache
def golden(case):
    oracle = load_file(GOLDEN / case / "oracle.safetensors")
    rows = [ids[:n] for ids, n in zip(oracle["input_ids"], oracle["lengths"], strict=True)]
    return load_model(GOLDEN / case), oracle, rows


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_references(case):
    model, oracle, rows = golden(case)
    with torch.no_grad():
        logits = model.logits(oracle["input_ids"])  # padded on the right
    assert logits.dtype == torch.float32
    for i, row in enumerate(rows):
        difference = logits[i, : len(row)] - oracle["logits"][i, : len(row)]
        assert difference.abs().max() <= 5e-5


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_continuations_are_the_references(case):
    model, oracle, rows = golden(case)
    for row, expected in zip(rows, oracle["greedy"], strict=True):
        ids = row.tolist()
        for _ in expected:
            ids.append(model.logits(torch.tensor([ids]))[0, -1].argmax().item())
        assert ids[len(row) :] == expected.tolist()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_references(case):
    model, _, rows = golden(case)
    model.zero_grad()
    expected = load_file(GOLDEN / case / "grads.safetensors")
    logits = model.logits(rows[2][None])[0]
    loss = F.cross_entropy(logits[:-1], rows[2][1:])
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.pop("nll")[0], rtol=1e-5, atol=0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).abs().max()
        assert difference <= 5e-5 * expected[name].abs().max(), name


def packed_attend(lengths):
    """Causal attention within each of the packed sequences, by an explicit mask."""
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (segment[:, None] == segment).tril()

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
@torch.no_grad()
def test_packed_sequences_are_computed_as_if_alone(lengths):
    torch.manual_seed(sum(lengths))
    model = Qwen3(SMALL)
    rows = [torch.randint(0, SMALL.vocab_size, (n,)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = model(torch.cat(rows), positions, packed_attend(lengths))
    alone = torch.cat([model.logits(row[None])[0] for row in rows])
    torch.testing.assert_close(hidden @ model.head_weight().T, alone, rtol=0, atol=2e-5)


def naive_logits(model, ids):
    """The definition, one token and one head at a time, in float64."""
    c, w = model.config, {name: t.double() for name, t in model.state_dict().items()}

    def norm(x, name):
        return x / (x.square().mean() + c.rms_norm_eps).sqrt() * w[name]

    def linear(x, name):
        return w[name + ".weight"] @ x + w.get(name + ".bias", 0)

    def turn(x, position):  # pairs (i, i + D/2) as complex numbers
        half = c.head_dim // 2
        rate = torch.tensor([c.rope_theta ** (-i / half) for i in range(half)]).double()
        spin = torch.polar(torch.ones(half).double(), position * rate)
        z = torch.complex(x[:half], x[half:]) * spin
        return torch.cat((z.real, z.imag))

    stream = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        keys, values = [], []
        for t, x in enumerate(stream):
            h, a = norm(x, p + "input_layernorm.weight"), p + "self_attn."
            q, k, v = (linear(h, f"{a}{n}_proj").view(-1, c.head_dim) for n in "qkv")
            keys.append([turn(norm(head, a + "k_norm.weight"), t) for head in k])
            values.append(v)
            heads = []
            for i, head in enumerate(q):
                head, j = turn(norm(head, a + "q_norm.weight"), t), i // (len(q) // len(k))
                scores = torch.stack([head @ key[j] for key in keys]) / math.sqrt(c.head_dim)
                shares = scores.softmax(0)
                heads.append(sum(s * v[j] for s, v in zip(shares, values, strict=True)))
            x = x + linear(torch.cat(heads), a + "o_proj")
            h, m = norm(x, p + "post_attention_layernorm.weight"), p + "mlp."
            gate, up = linear(h, m + "gate_proj"), linear(h, m + "up_proj")
            stream[t] = x + linear(gate / (1 + (-gate).exp()) * up, m + "down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, "model.norm.weight") for x in stream])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_attention_bias_and_head_norms_are_independent_and_both_honoured(tied, bias):
    torch.manual_seed(0)
    model = Qwen3(replace(SMALL, attention_bias=bias, tie_word_embeddings=tied))
    for parameter in model.parameters():  # biases and norm weights that matter
        parameter.add_(torch.randn_like(parameter) * 0.3)
    names = dict(model.named_parameters())
    assert all((f"model.layers.1.self_attn.{n}_proj.bias" in names) == bias for n in "qkvo")
    assert all(f"model.layers.1.self_attn.{n}_norm.weight" in names for n in "qk")
    assert ("lm_head.weight" in names) == (not tied)
    ids = [3, 22, 0, 3, 7]
    logits = model.logits(torch.tensor([ids]))[0]
    torch.testing.assert_close(logits, naive_logits(model, ids).float(), rtol=0, atol=1e-4)


def test_head_is_the_embedding_iff_tied():
    model = Qwen3(replace(SMALL, vocab_size=3, hidden_size=2))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.tensor([[1.0, 0], [0, 2], [1, 1]]))
    hidden = torch.tensor([[3.0, 4.0]])
    assert (hidden @ model.head_weight().T).tolist() == [[3, 8, 7]]
    untied = Qwen3(replace(model.config, tie_word_embeddings=False))
    assert untied.head_weight() is untied.lm_head.weight
    assert untied.head_weight() is not untied.model.embed_tokens.weight


REAL = replace(SMALL, head_dim=128, rope_theta=1e6, max_position_embeddings=40960)


def test_rotary_frequencies_of_a_published_checkpoint():
    frequencies = inv_freq(REAL)
    assert frequencies[1].item() == pytest.approx(0.80584219, rel=1e-5)
    assert frequencies[63].item() == pytest.approx(1.240938e-06, rel=1e-5)
    assert attention_factor(REAL) == 1.0


def test_yarn_scales_slow_dimensions_and_ramps_between():
    config = replace(REAL, yarn=Yarn(4.0, 32768))
    assert yarn_ramp(config) == (23, 40)
    expected = {0: 1.0, 23: 0.0069783058, 31: 0.00080295973, 40: 4.4456985e-05, 63: 3.1023444e-07}
    frequencies = inv_freq(config)
    for i, value in expected.items():
        assert frequencies[i].item() == pytest.approx(value, rel=1e-5)
    assert attention_factor(config) == pytest.approx(1.1386294, rel=1e-6)


def test_yarn_obeys_an_explicit_attention_factor_at_every_position():
    config = replace(REAL, yarn=Yarn(4.0, 32768, attention_factor=1.5))
    cos, sin = Qwen3(config).model.rope(torch.tensor([0, 3, 40000]), torch.float32)
    assert cos.shape == sin.shape == (3, 1, 128)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 2.25))


def test_a_cast_leaves_the_rotary_frequencies_in_float32():
    model = Qwen3(SMALL)
    before = model.model.rope.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rope.inv_freq, before)
    assert model.logits(torch.tensor([[1, 2]])).dtype == torch.float32


@given(st.integers(0, 5000), st.integers(0, 200), st.integers(0, 5000))
def test_attention_scores_depend_on_distance_alone(start, distance, shift):
    generator = torch.Generator().manual_seed(distance)
    q, k = torch.randn(2, 1, 1, SMALL.head_dim, generator=generator)
    rope = Qwen3(SMALL).model.rope

    def score(at):
        here, there = (rope(torch.tensor([p]), torch.float32) for p in (at, at + distance))
        return (rotate(q, *here) * rotate(k, *there)).sum().item()

    assert score(start) == pytest.approx(score(start + shift), abs=2e-2)
    assert rotate(q, *rope(torch.tensor([start]), torch.float32)).norm() == pytest.approx(q.norm())


def test_new_weights_follow_the_generator_and_the_initializer_range():
    config = replace(SMALL, vocab_size=2000, attention_bias=True, initializer_range=0.05)
    torch.manual_seed(5)
    first = Qwen3(config).state_dict()
    torch.manual_seed(5)
    second = Qwen3(config).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.embed_tokens.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert first["model.layers.1.mlp.up_proj.weight"].std().item() == pytest.approx(0.05, rel=0.2)
    assert first["model.layers.0.self_attn.q_norm.weight"].eq(1).all()
    assert first["model.layers.0.self_attn.q_proj.bias"].eq(0).all()


@pytest.mark.parametrize("change", [{"num_key_value_heads": 3}, {"head_dim": 5}])
def test_impossible_head_counts_are_refused(change):
    (key,) = change
    with pytest.raises(ValueError, match=f"{key} {change[key]}"):
        replace(SMALL, **change)


def test_a_layer_that_keeps_its_input_alone_has_the_same_gradients():
    ids, gradients = torch.arange(1, 13).view(2, 6), []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model, runs = Qwen3(SMALL), []
        for layer in model.model.layers:
            layer.is_checkpointed, run = is_checkpointed, layer.run
            layer.run = lambda *args, run=run, runs=runs: (runs.append(1), run(*args))[1]
        model.logits(ids).square().sum().backward()
        assert len(runs) == (4 if is_checkpointed else 2)  # once more in the backward pass
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
