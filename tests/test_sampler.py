"""The sampler against its specification: a naive loop that computes everything anew each token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler.attention import lent
from minirler.noise import gumbel_noise, noise_key
from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.sampler import Sampler, SamplingParams

VOCAB = 40


def tiny_model(seed=0, layers=2, vocab=VOCAB, head_dim=4):
    torch.manual_seed(seed)
    config = Qwen3Config(vocab, 16, 24, layers, 4, 2, head_dim, initializer_range=0.35)
    return Qwen3(config)


MODEL = tiny_model()


@torch.no_grad()
def naive(model, prompt, params, key, sample, step=0, num_valid=None, forced=None):
    """The specification: (ids after the prompt, log-probs of the sampled ones, stop reason)."""
    ids, logps = list(prompt), []
    while True:
        logits = model.logits(torch.tensor([ids]))[0, -1:, :num_valid]
        key64 = noise_key(params.seed, key)
        noise = gumbel_noise([key64], [step], [sample], [len(ids)], logits.shape[1])
        z = logits / (params.temperature or 1)
        token = int((z + noise * (params.temperature > 0)).argmax())
        ids.append(token)
        logps.append(float(torch.log_softmax(z, -1)[0, token]))
        if token in params.stop_ids:
            return ids[len(prompt):], logps, "stop"
        if len(logps) == params.max_tokens:
            return ids[len(prompt):], logps, "length"
        ids += (forced or {}).get(len(logps), [])


def check(samples, prompts, params, model=MODEL, **options):
    """Every sample is what the naive loop says."""
    assert [(s.prompt_index, s.sample_index) for s in samples] == [
        (i, j) for i in range(len(prompts)) for j in range(params.n)]
    for s in samples:
        ids, logps, reason = naive(model, prompts[s.prompt_index], params, s.prompt_index,
                                   s.sample_index, **options)
        assert (s.token_ids, s.stop_reason) == (ids, reason)
        assert s.logps == pytest.approx(logps, abs=2e-5)


def is_empty(sampler):
    """Nothing is left behind: no row, no block."""
    return not (sampler._sequences or sampler.scheduler.rows or sampler.scheduler.leaders
                or sampler.scheduler.has_work or sampler.scheduler.pool.num_used)


def drive(sampler, rows, forced, wait, events=None):
    """Step until all rows stop: {row: (ids, logps, reason)}; forced ids come `wait` steps late."""
    out = {row: ([], [], None) for row in rows}
    parked, steps = [], 0
    while sampler.has_work or parked:
        if (events or {}).get(steps):
            sampler.weights_changed()
        for token in sampler.step():
            ids, logps, _ = out[token.row]
            ids.append(token.id)
            logps.append(token.logp)
            out[token.row] = ids, logps, token.stop_reason
            more = forced.get(len(logps), [])
            if token.stop_reason:
                sampler.finish(token.row)
            elif more:
                sampler.park(token.row)
                parked.append((steps + wait, token.row, more))
        for due, row, more in [p for p in parked if p[0] <= steps]:
            sampler.extend(row, more)
            out[row][0].extend(more)
            parked.remove((due, row, more))
        steps += 1
    return out


prompt_lists = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=18),
                        min_size=1, max_size=4)


@given(prompts=prompt_lists, n=st.integers(1, 4), block_size=st.integers(1, 6),
       token_budget=st.integers(1, 24), max_rows=st.integers(1, 8), spare=st.integers(0, 40),
       max_tokens=st.integers(1, 10), stops=st.sets(st.integers(0, VOCAB - 1), max_size=4),
       forced=st.dictionaries(st.integers(1, 9), st.lists(st.integers(0, VOCAB - 1), min_size=1,
                                                          max_size=9), max_size=2),
       wait=st.integers(0, 6), changes=st.sets(st.integers(0, 30), max_size=2))
def test_same_noise_same_tokens_whatever_happens(prompts, n, block_size, token_budget, max_rows,
                                                 spare, max_tokens, stops, forced, wait, changes):
    """Batch, chunks, preemption (a cache hardly larger than one row), forks, parking, recompute."""
    longest = max(map(len, prompts)) + max_tokens + sum(map(len, forced.values()))
    kv_tokens = -(-longest // block_size) * block_size + spare
    sampler = Sampler(MODEL, kv_tokens=kv_tokens, block_size=block_size, token_budget=token_budget,
                      max_rows=max_rows)
    params = SamplingParams(n=n, max_tokens=max_tokens, stop_ids=tuple(stops), seed=3)
    where = {row: (i, j) for i, prompt in enumerate(prompts)
             for j, row in enumerate(sampler.add(prompt, params, f"p{i}", step=5))}
    out = drive(sampler, where, forced, wait, dict.fromkeys(changes, True))
    for row, (i, j) in where.items():
        ids, logps, reason = naive(MODEL, prompts[i], params, f"p{i}", j, 5, forced=forced)
        assert (out[row][0], out[row][2]) == (ids, reason)
        assert out[row][1] == pytest.approx(logps, abs=2e-5)
    assert is_empty(sampler)


def test_a_bare_sampler_generates_in_prompt_order():
    prompts = [[1, 2, 3], [4] * 40, [7]]
    params = SamplingParams(n=3, max_tokens=6)
    sampler = Sampler(MODEL)
    check(sampler.generate(prompts, params), prompts, params)
    assert is_empty(sampler)
    assert sampler.generate([], params) == []


@pytest.mark.parametrize("block_size, kv_tokens, token_budget", [(16, 4096, 64), (3, 66, 7)])
def test_a_model_of_sizes_that_kernels_have_samples_like_the_naive_loop(block_size, kv_tokens,
                                                                        token_budget):
    model, prompts = tiny_model(head_dim=32), [[1, 2, 3], [4] * 35, [7], [5, 6] * 10]
    sampler = Sampler(model, kv_tokens=kv_tokens, block_size=block_size, token_budget=token_budget)
    params = SamplingParams(n=2, max_tokens=9, temperature=0.9)
    check(sampler.generate(prompts, params), prompts, params, model)
    assert is_empty(sampler)


def test_preemption_replays_and_never_resamples():
    prompts, params = [[i] * 9 for i in range(6)], SamplingParams(n=2, max_tokens=20)
    sampler = Sampler(MODEL, kv_tokens=64, block_size=4)
    check(sampler.generate(prompts, params), prompts, params)
    assert sampler.scheduler.num_evicted > 0


def test_a_prompt_is_prefilled_once_for_its_samples():
    computed = []
    sampler = Sampler(MODEL, block_size=16)
    forward = sampler._forward
    sampler._forward = lambda chunks: (
        computed.append(sum(c.end - c.start for c in chunks)), forward(chunks))[1]
    rows = sampler.add([i % VOCAB for i in range(1000)], SamplingParams(n=16), "p")
    tokens = sampler.step()
    assert computed == [1000] and [token.row for token in tokens] == rows
    assert sampler.scheduler.pool.num_used == 63  # 62 full blocks and the partial tail, shared
    sampler.step()
    assert computed == [1000, 16]
    assert sampler.scheduler.pool.num_used == 62 + 16  # everybody writes into a tail of its own


def test_samples_of_a_group_differ_and_seeds_and_steps_count():
    model = tiny_model()
    torch.nn.init.zeros_(model.model.norm.weight)  # every logit is 0: only the noise decides
    params = SamplingParams(n=8, max_tokens=4, seed=7)

    def ids(params, keys=("k",)):
        return [s.token_ids for s in Sampler(model).generate([[1, 2]], params, keys)]

    first = ids(params)
    assert len({tokens[0] for tokens in first}) >= 4  # 7.3 of 40 expected
    assert ids(params) == first
    assert ids(replace(params, seed=8)) != first
    assert ids(params, keys=["other"]) != first
    sampler = Sampler(model)
    rows = sampler.add([1, 2], params, "k", step=1)
    assert [token.id for token in sampler.step()] != [tokens[0] for tokens in first]
    assert len(rows) == 8


def test_temperature_zero_is_argmax_with_plain_log_probs():
    params = SamplingParams(temperature=0, max_tokens=8)
    check(Sampler(MODEL).generate([[5, 6]], params), [[5, 6]], params)


def test_log_probs_are_of_the_tempered_softmax():
    """Temperature once, not twice and not never: logits 3, 1, 0 at 0.6 give -3.374871 for the 1."""
    class Fixed(torch.nn.Module):
        config = Qwen3Config(3, 3, 1, 1, 1, 1, 2)

        def head_weight(self):
            return torch.diag(torch.tensor([3.0, 1.0, 0.0]))

        rows = ()

        def forward(self, ids, positions, attend):
            return torch.ones(len(ids), 3)

    params = SamplingParams(n=200, temperature=0.6, max_tokens=1)
    got = {s.token_ids[0]: s.logps[0] for s in Sampler(Fixed()).generate([[0]], params)}
    assert got[1] == pytest.approx(-3.374871, abs=1e-5)


def test_filters_narrow_the_draw_but_not_the_log_prob():
    params = SamplingParams(temperature=0.8, top_k=1, max_tokens=5)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    one, two = (Sampler(MODEL).generate([[9]], p)[0] for p in (params, greedy))
    assert one.token_ids == two.token_ids
    ids = torch.tensor([[9, *one.token_ids]])
    logps = torch.log_softmax(MODEL.logits(ids)[0, :-1] / 0.8, -1)
    expected = logps.gather(1, ids[0, 1:, None])[:, 0]
    assert one.logps == pytest.approx(expected.tolist(), abs=2e-5)


def test_padding_of_the_vocabulary_is_never_drawn():
    model = tiny_model()
    with torch.no_grad():
        model.head_weight()[30:] *= 50  # would win almost always
    params = SamplingParams(n=20, max_tokens=10)
    samples = Sampler(model, num_valid=30).generate([[1]], params)
    assert max(max(s.token_ids) for s in samples) < 30
    check(samples, [[1]], params, model, num_valid=30)


def test_every_stop_id_stops_and_is_kept():
    free = Sampler(MODEL).generate([[1]], SamplingParams(max_tokens=12))[0]
    last, early = free.token_ids[-1], free.token_ids[4]
    for stops in ((early, last), (last, early)):
        s = Sampler(MODEL).generate([[1]], SamplingParams(max_tokens=12, stop_ids=stops))[0]
        end = min(free.token_ids.index(early), free.token_ids.index(last)) + 1
        assert (s.token_ids, s.stop_reason) == (free.token_ids[:end], "stop")
        assert len(s.logps) == end


def test_a_stop_id_in_the_prompt_or_among_forced_tokens_does_not_stop():
    free = Sampler(MODEL).generate([[1, 2]], SamplingParams(max_tokens=5))[0]
    unused = next(i for i in range(VOCAB) if i not in free.token_ids)
    sampler = Sampler(MODEL)
    row, = sampler.add([unused, 2], SamplingParams(max_tokens=3, stop_ids=(unused,)), 0)
    token, = sampler.step()
    if token.stop_reason is None:
        sampler.extend(row, [unused])
        assert sampler.num_tokens(row) == 4 and sampler.has_work


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers():
    sampler = Sampler(MODEL, kv_tokens=32)
    with pytest.raises(ValueError, match="33.*32"):
        sampler.add([1] * 33, SamplingParams(), 0)
    with pytest.raises(ValueError, match="33.*32"):
        sampler.generate([[1], [1] * 33], SamplingParams())
    assert is_empty(sampler)  # the first prompt was cleaned up
    row, = sampler.add([1] * 30, SamplingParams(), 0)
    with pytest.raises(ValueError, match="33.*32"):
        sampler.extend(row, [1, 1, 1])


def test_the_cache_is_as_large_as_its_bytes_allow_and_says_how_much_that_is():
    token = 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, their size, float32
    sampler = Sampler(MODEL, kv_bytes=token * 33, block_size=4)
    assert sampler.cache.nbytes == token * 32 and sampler.scheduler.capacity == 32
    assert sampler.room(9) == ("KV cache: room for 2 sequences of 9 tokens (32 tokens, 0.0 MiB)")
    with pytest.raises(ValueError, match="32 tokens.* one sequence of 33 tokens: raise"):
        sampler.room(33)
    with pytest.raises(ValueError, match="3 tokens is less than one block of 4"):
        Sampler(MODEL, kv_bytes=token * 3, block_size=4)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), st.sampled_from([0.5, 1.0]))
def test_log_probs_of_a_prompt_are_those_of_the_plain_forward(ids, temperature):
    ids = [i % (VOCAB - 2) for i in ids]
    logits = MODEL.logits(torch.tensor([ids]))[0, :-1, : VOCAB - 2] / temperature
    table = logits.log_softmax(-1).detach()
    wanted = [float(row[i]) for row, i in zip(table, ids[1:], strict=True)]
    got = Sampler(MODEL, num_valid=VOCAB - 2).prompt_logps(ids, temperature)
    assert got == pytest.approx(wanted, abs=2e-5)


def test_log_probs_of_samples_are_those_of_the_same_tokens_in_a_prompt():
    sampler = Sampler(MODEL)
    (sample,) = sampler.generate([[1, 2, 3]], SamplingParams(max_tokens=9, temperature=0.7))
    assert sampler.prompt_logps([1, 2, 3, *sample.token_ids], 0.7)[2:] == pytest.approx(
        sample.logps, abs=2e-5
    )


def test_a_row_that_fills_the_cache_alone_ends_with_length():
    sample, = Sampler(MODEL, kv_tokens=32).generate([[1] * 30], SamplingParams(max_tokens=99))
    ids, logps, _ = naive(MODEL, [1] * 30, SamplingParams(max_tokens=3), 0, 0)
    assert (sample.token_ids, sample.stop_reason) == (ids, "length")
    assert sample.logps == pytest.approx(logps, abs=2e-5)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB]])
def test_prompts_that_are_no_tokens_of_the_model_are_refused(prompt):
    with pytest.raises(ValueError, match="token ids from 0 to 39"):
        Sampler(MODEL).add(prompt, SamplingParams(), "key")


@pytest.mark.parametrize("bad", [
    {"n": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
    {"top_p": 1.1}, {"top_p": -0.1}, {"top_k": -1}, {"min_p": 2.0}, {"max_tokens": 0}])
def test_wrong_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_new_weights_are_used_and_old_keys_are_not():
    model = tiny_model(1)
    sampler = Sampler(model)
    params = SamplingParams(max_tokens=4)
    row, = sampler.add([1, 2, 3], params, "k")
    first, = sampler.step()
    with torch.no_grad():  # in place: the sampler's model object stays the same
        for new, old in zip(tiny_model(2).parameters(), model.parameters(), strict=True):
            old.copy_(new)
    sampler.weights_changed()
    second, = sampler.step()
    ids, logps, _ = naive(model, [1, 2, 3, first.id], SamplingParams(max_tokens=1), "k", 0)
    assert (second.id, second.row) == (ids[0], row)
    assert second.logp == pytest.approx(logps[0], abs=2e-5)


def test_the_cache_can_be_lent_and_comes_back_empty_at_its_size():
    sampler, params = Sampler(MODEL), SamplingParams(max_tokens=6)
    expected = sampler.generate([[1, 2, 3]], params)
    storage = sampler.cache.untyped_storage()
    size = storage.nbytes()
    row, = sampler.add([1, 2, 3], params, 0)
    tokens = sampler.step()
    with lent(sampler.cache):
        assert storage.nbytes() == 0
    sampler.weights_changed()
    assert storage.nbytes() == size
    while not tokens[-1].stop_reason:  # the row goes on where it was
        tokens += sampler.step()
    sampler.finish(row)
    assert [token.id for token in tokens] == expected[0].token_ids


def test_rows_can_be_finished_parked_and_extended_before_their_prefill():
    """The first row of a group computes for all; without it the next one takes over."""
    params = SamplingParams(n=5, max_tokens=3)
    sampler = Sampler(MODEL, token_budget=4, block_size=2)
    rows = sampler.add(list(range(10)), params, "k")
    sampler.step()
    sampler.finish(rows[0])  # leads, half computed
    sampler.park(rows[1])  # leads now
    sampler.extend(rows[2], [7])  # leads now, and has other tokens from here on
    sampler.finish(rows[4])  # follows
    sampler.extend(rows[1], [])
    out = drive(sampler, [rows[1], rows[2], rows[3]], {}, 0)
    for sample, prompt in ((1, range(10)), (2, [*range(10), 7]), (3, range(10))):
        ids, _, reason = naive(MODEL, prompt, params, "k", sample)
        assert out[rows[sample]][::2] == (ids, reason)
    assert is_empty(sampler)


def test_a_row_finishes_once_and_samples_no_more_than_its_limit():
    sampler = Sampler(MODEL)
    row, = sampler.add([1], SamplingParams(max_tokens=1), 0)
    assert sampler.step()[0].stop_reason == "length"
    assert not sampler.has_work and sampler.step() == []
    with pytest.raises(ValueError, match="sampled all its 1"):
        sampler.extend(row, [1])
    sampler.finish(row)
    with pytest.raises(KeyError):
        sampler.finish(row)


def test_generate_refuses_to_swallow_tokens_of_other_rows():
    sampler = Sampler(MODEL)
    sampler.add([1], SamplingParams(), 0)
    with pytest.raises(ValueError, match="1 rows live"):
        sampler.generate([[1]], SamplingParams())


def test_log_probs_stay_float32_in_a_bfloat16_model():
    model = tiny_model().to(torch.bfloat16)
    torch.nn.init.zeros_(model.model.norm.weight)
    sample, = Sampler(model).generate([[1]], SamplingParams(max_tokens=1))
    assert sample.logps[0] == pytest.approx(-3.6888795, abs=1e-6)  # -ln 40; bfloat16 says -3.6875
