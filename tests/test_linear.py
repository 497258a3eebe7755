"""Rows of products do not depend on the batch, so sampler and trainer compute the same numbers."""

import asyncio

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minirler import kernels, linear, update
from minirler import train as loop
from minirler.config import load_config
from minirler.linear import CANDIDATES, PLAIN, make_invariant_, product, set_rows_
from minirler.log import read_metrics
from minirler.pack import pack
from minirler.policy import batch_logps
from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.run import open_run

SMALL = (
    "world.entities=6", "world.held_out=2", "eval.prompts=2", "eval.every=0", "rollout.prompts=3",
    "rollout.group=4", "rollout.max_tokens=600", "train.steps=2", "run.threads=1",
)  # fmt: skip
# chunked prefills; and a cache of two rollouts, so that the others are preempted
TIGHT = ("sampler.token_budget=48", "sampler.kv_tokens=1600")


def tiny_model(**changes) -> Qwen3:
    """A random model whose sizes fill no vector evenly."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=20, intermediate_size=36, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3)
    return Qwen3(Qwen3Config(**sizes | changes))


def settings(folder, *overrides):
    """The default run made small."""
    return load_config(["configs/almanac.toml", *SMALL, f"run.dir={folder}", *overrides])


MODEL = tiny_model()
ROWS = make_invariant_([MODEL], 59)
WEIGHTS = {dtype: torch.randn(61, 36, generator=torch.Generator().manual_seed(1)).to(dtype)
           for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip


@given(dtype=st.sampled_from(list(WEIGHTS)), height=st.integers(1, 1400), data=st.data())
def test_a_row_has_the_same_bits_wherever_it_stands(dtype, height, data):
    x = torch.randn(1400, 36, generator=torch.Generator().manual_seed(2)).to(dtype)
    first = data.draw(st.integers(0, 1400 - height))
    part = x[first : first + height].clone()
    wanted = product(x, WEIGHTS[dtype], ROWS)[first : first + height]
    assert torch.equal(product(part, WEIGHTS[dtype], ROWS), wanted)
    assert torch.allclose(wanted.float(), F.linear(part, WEIGHTS[dtype]).float(), atol=1e-5)


@pytest.mark.parametrize("rows", [PLAIN, *CANDIDATES])
@pytest.mark.parametrize("height", [0, 1, 8, 33, 1100])
def test_output_and_gradients_are_those_of_the_plain_product(rows, height):
    results = []
    for chosen in (rows, None):
        draw = torch.Generator().manual_seed(3)
        x, w = (torch.randn(n, 36, generator=draw, requires_grad=True) for n in (height, 61))
        y = F.linear(x, w) if chosen is None else linear.linear(x, w, chosen)
        y.backward(torch.randn(y.shape, generator=draw))
        results.append((y, x.grad, w.grad))
    for mine, plain in zip(*results, strict=True):
        assert torch.allclose(mine, plain, atol=1e-3, rtol=1e-4)


def test_a_bias_is_added():
    layer = linear.Linear(36, 61)
    x = torch.randn(5, 36)
    plain, layer.rows = layer(x), ROWS
    assert torch.allclose(layer(x), plain, atol=1e-5)


def depends_on_height(below):
    """A product whose last bits depend on the height of the batch where that is under `below`."""
    def wrong(x, weight):
        return F.linear(x, weight) + (len(x) if len(x) < below else 0)
    return wrong


@pytest.mark.parametrize("below, chosen", [(1, (8, 512)), (9, (32, 512)), (25, (32, 512))])
def test_the_fastest_way_that_changes_no_bit_is_chosen(monkeypatch, below, chosen):
    wrong = depends_on_height(below)
    monkeypatch.setattr(linear, "product", lambda x, w, rows: torch.cat(
        [wrong(F.pad(p, (0, 0, 0, -len(p) % rows[0])), w)[: len(p)] for p in x.split(rows[1])]))
    model = tiny_model()
    state = torch.get_rng_state()
    assert make_invariant_([model], 59) == chosen
    assert model.rows == model.model.layers[1].mlp.up_proj.rows == chosen
    assert torch.equal(torch.get_rng_state(), state)  # the run's own generator did not move


def test_a_machine_where_no_way_will_do_is_told_the_setting(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    noisy = lambda x, w, rows: F.linear(x, w) + torch.rand((), generator=draw)  # noqa: E731
    monkeypatch.setattr(linear, "product", noisy)
    with pytest.raises(ValueError, match="train.deterministic=false"):
        make_invariant_([tiny_model()])


def test_the_test_at_the_start_takes_less_than_a_second():
    from_start = tiny_model(hidden_size=128, intermediate_size=384, vocab_size=512, head_dim=32)
    torch.set_num_threads(1)
    started = loop.time.process_time()
    make_invariant_([from_start])
    assert loop.time.process_time() - started < 1


@given(count=st.integers(1, 40))
def test_tokens_that_fill_a_batch_up_reach_no_other(count):
    ids = torch.arange(count)[None] % 59
    plain, filled = tiny_model(), MODEL
    filled.load_state_dict(plain.state_dict())
    set_rows_(filled, (32, 32))
    try:
        assert torch.allclose(filled.logits(ids), plain.logits(ids), atol=2e-5)
    finally:
        set_rows_(filled, ROWS)


@pytest.mark.parametrize("has_kernels, tight", [(True, ()), (True, TIGHT), (False, TIGHT)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_have_the_same_log_probs(tmp_path, monkeypatch, dtype, has_kernels,
                                                     tight):
    """Max |difference| is 0.0 over a step with tools, forks, chunked prefills and preemption."""
    if not has_kernels:
        monkeypatch.setattr(kernels, "NATIVE", {})
    run = open_run(settings(tmp_path / "run", f"model.dtype={dtype}", *tight))
    groups = asyncio.run(loop.sample_and_score(run))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert any(rollout.calls for rollout in rollouts)
    assert not tight or run.sampler.scheduler.num_evicted > 0
    for limit in (16384, 1200):
        for batch in pack(rollouts, [1.0] * len(rollouts), limit):
            args = update.logp_settings(run.config, run.tokenizer.num_valid)
            logps = batch_logps(run.policy.trained, batch, *args)[0][batch.mask].detach()
            assert float((logps - batch.old_logps[batch.mask]).abs().max()) == 0.0


def test_the_ratio_of_a_first_update_is_exactly_1_at_every_step(tmp_path, monkeypatch):
    run, seen, loss = open_run(settings(tmp_path / "run")), [], update.policy_loss

    def checked(logps, old_logps, advantages, mask, **more):
        seen.append(torch.equal((logps - old_logps)[mask].exp(), torch.ones(int(mask.sum()))))
        return loss(logps, old_logps, advantages, mask, **more)

    monkeypatch.setattr(update, "policy_loss", checked)
    before = run.model.head_weight().detach().clone()
    asyncio.run(loop.train(run))
    rows = [row for row in read_metrics(run.folder / "metrics.jsonl") if row.get("trained_tokens")]
    assert len(rows) == 2 and len(seen) >= 2 and all(seen)
    assert all(row["mismatch_kl"] == 0.0 for row in rows)
    assert not torch.equal(before, run.model.head_weight())  # the second step's weights are others


def test_the_fast_mode_reports_a_small_mismatch_every_step(tmp_path):
    run = open_run(settings(tmp_path / "run", "train.deterministic=false"))
    assert run.policy.copy.rows == run.policy.trained.rows == PLAIN
    asyncio.run(loop.train(run))
    rows = [row for row in read_metrics(run.folder / "metrics.jsonl") if row.get("trained_tokens")]
    assert len(rows) == 2 and all(0 <= row["mismatch_kl"] <= 1e-6 for row in rows)


@pytest.mark.long
def test_the_number_of_threads_changes_no_hash(tmp_path):
    """Where the library's products do not depend on it, which is tried first."""
    hashes, draw = [], torch.Generator().manual_seed(0)
    x, g = torch.randn(3001, 128, generator=draw), torch.randn(3001, 384, generator=draw)
    products = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            products.append(torch.cat([g.T @ x, product(g, x[:384].T, (8, 512))]))
        if not torch.equal(*products):
            pytest.skip("this machine's products depend on the number of threads")
        for threads in (1, 2):
            torch.set_num_threads(threads)
            run = open_run(settings(tmp_path / str(threads)))
            assert asyncio.run(loop.supervise(run)) == 0
            hashes.append(run.hashes())
    finally:
        torch.set_num_threads(1)
    assert hashes[0] == hashes[1]
