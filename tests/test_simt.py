"""The CUDA kernels, run on the CPU by the emulator of `simt/`: bits, sizes, order and races.

What every backend has to do stands in `cases`. The emulator has to be trusted first: each kind of
bug that it is there to report is planted (`simt/bugs.cu`, and barriers taken out of the kernels
themselves) and has to be reported.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import attention_loop, randn
from simt import build

from minirler.attention import GROUPS, HEAD_DIMS
from minirler.attention import KEY_CHUNK as CHUNK
from minirler.noise import gumbel_noise, noise_key
from minirler.ops_ref import sample_ref

HERE = Path(__file__).parent
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
SEEDS = [None, "1", "7"]


@pytest.fixture(scope="module")
def simt():
    found = build.launchers()
    if found is None:
        pytest.skip("no C++ compiler: the CUDA kernels were not run")
    return found


def at(tensor):
    return 0 if tensor is None else tensor.data_ptr()


def is_bf16(tensor):
    return int(tensor.dtype == torch.bfloat16)


def close(ours, exact, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), exact.double(), rtol=tolerance, atol=tolerance,
                               equal_nan=True)  # fmt: skip


# ------------------------------------------------------------------------------ vocabulary


def flat(x, temperature, num_valid):
    """The fields of Logits."""
    return at(x), is_bf16(x), len(x), x.shape[1], x.stride(0), num_valid or x.shape[1], temperature


def logprob(simt, x, targets, mask=None, temperature=1.0, num_valid=None):
    out = torch.full((3, len(x)), 9.0)  # logps, entropy, lse
    simt["logprob"](*flat(x, temperature, num_valid), at(targets), at(mask), *map(at, out), 0)
    return out


def gradient(simt, x, targets, lse, grads, mask=None, temperature=1.0, num_valid=None, grad=None):
    grad = torch.full_like(x, 9.0) if grad is None else grad
    simt["logprob_backward"](*flat(x, temperature, num_valid), at(targets), at(mask), at(lse),
                             at(grads), at(grad), grad.stride(0), 0)  # fmt: skip
    return grad


def sample(simt, x, keys, counters, temperature=1.0, num_valid=None):
    ids, logps = torch.full((len(x),), -9), torch.full((len(x),), 9.0)
    keys = torch.from_numpy(np.asarray(keys, dtype=np.uint64).view(np.int64))
    columns = [torch.tensor(column) for column in zip(*counters, strict=True)]
    simt["sample"](*flat(x, temperature, num_valid), at(keys), *map(at, columns), at(ids),
                   at(logps), 0)  # fmt: skip
    return ids, logps


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_changes_no_bit(simt, dtype):
    rows = 3 * randn(3, 4104, dtype=dtype)
    targets, keys, counters = torch.tensor([0, 4, 4100]), [1, 2, 3], [(0, 0, i) for i in range(3)]
    for shift in range(1, 8):
        view = torch.empty(3 * 4111 + 16, dtype=dtype)[shift:][: 3 * 4111].view(3, 4111)
        view[:, :4104] = rows
        narrow = view[:, :4104]
        plain, shifted = logprob(simt, rows, targets), logprob(simt, narrow, targets)
        assert torch.equal(plain, shifted)
        assert torch.equal(*(gradient(simt, x, targets, plain[2], torch.ones(3)) for x in
                             (rows, narrow)))  # fmt: skip
        for one, other in zip(*(sample(simt, x, keys, counters) for x in (rows, narrow)),
                              strict=True):  # fmt: skip
            assert torch.equal(one, other)


def test_a_target_that_does_not_exist_is_not_read(simt):
    x, targets = torch.full((3, 9), torch.nan), torch.tensor([8, 9, -(2**40)])
    x[:, :8] = 0.0
    logps, entropy, lse = logprob(simt, x, targets, num_valid=8)
    assert (
        logps.isnan().all() and lse.tolist() == entropy.tolist() == [pytest.approx(np.log(8))] * 3
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_counters_and_keys_of_any_size_give_the_noise_of_the_twin(simt, dtype):
    x = randn(4, 130, dtype=dtype)
    counters = [(0, 0, 0), (7, 1, 3), (2**32 - 1, 5, 2**31), (1, 2**32 - 1, 8)]
    keys = [noise_key(3, "a"), noise_key(3, "b"), 2**64 - 1, 0]
    ids, logps = sample(simt, x, keys, counters, 0.7)
    noise = gumbel_noise(keys, *zip(*counters, strict=True), 130)
    assert ids.tolist() == sample_ref(x, noise, 0.7)[0].tolist()
    assert torch.equal(logps, logprob(simt, x, ids, temperature=0.7)[0])


def test_the_kernels_noise_is_the_twins_to_the_last_places(simt):
    """Between two equal logits the noise decides: move one until it does not."""
    V, keys, counters = 400, [11], [(1, 2, 3)]
    noise = gumbel_noise(keys, *zip(*counters, strict=True), V)[0]
    for i in range(41, V, 41):
        gap = (noise[0] - noise[i]).item()
        for margin, winner in ((1e-5, i), (-1e-5, 0)):
            x = torch.full((1, V), -torch.inf)
            x[0, 0], x[0, i] = 0.0, gap + margin
            assert sample(simt, x, keys, counters)[0].item() == winner


# ------------------------------------------------------------------------------ attention


class Paged:
    """Random rows [(tokens, queries)] in a cache whose unused slots hold NaN."""

    def __init__(self, simt, rows, K, G, D, block_size, dtype):
        self.simt, self.block_size, self.heads, self.dtype = simt, block_size, K * G, dtype
        lengths, counts = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        blocks = [-(-length // block_size) for length, _ in rows]
        self.cache = torch.full((sum(blocks), 2, K, block_size, D), torch.nan, dtype=dtype)
        self.tables = torch.full((len(rows), max(blocks)), 10**6, dtype=torch.int32)
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(5))
        for table, held in zip(self.tables, order.int().split(blocks), strict=True):
            table[: len(held)] = held
        self.k = [
            randn(length, K, D, dtype=dtype, seed=10 + r) for r, (length, _) in enumerate(rows)
        ]
        self.v = [
            randn(length, K, D, dtype=dtype, seed=90 + r) for r, (length, _) in enumerate(rows)
        ]
        self.q = [
            randn(count, K * G, D, dtype=dtype, seed=50 + r) for r, (_, count) in enumerate(rows)
        ]
        self.lengths, self.cu_seqlens = lengths, torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        self.scale = D**-0.5
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            tokens = torch.arange(len(k))
            slots = table[tokens // block_size].long() * block_size + tokens % block_size
            self.write(k, v, slots)

    def fields(self):
        blocks, _, K, block_size, D = self.cache.shape
        return at(self.cache), is_bf16(self.cache), blocks, K, block_size, D

    def write(self, k, v, slots):
        self.simt["kv_write"](*self.fields(), at(k), at(v), at(slots), len(k), 0)

    def attend(self, splits=1):
        q = torch.cat(self.q)
        longest, D = int(self.lengths.max()), q.shape[-1]
        scratch = torch.full((len(q) * self.heads * -(-longest // CHUNK) * (D + 2),), torch.nan)
        out = torch.full_like(q, 9.0)
        self.simt["paged_attention"](
            at(q), *self.fields(), len(self.lengths), len(q), at(self.cu_seqlens),
            at(self.lengths), at(self.tables), self.tables.stride(0), longest, self.heads,
            self.scale, at(out), at(scratch) if splits > 1 else 0, splits, 0)  # fmt: skip
        return out

    def exact(self):
        """In float64, one query at a time."""
        return torch.cat(
            [attention_loop(*row, self.scale) for row in zip(self.q, self.k, self.v, strict=True)]
        )


def packed(simt, q, k, v, borders, scale):
    out, lse = torch.full_like(q, 9.0), torch.full(q.shape[:2], 9.0)
    simt["packed_attention"](*map(at, (q, k, v)), *sizes(q, k, borders, scale), at(out), at(lse), 0)
    return out, lse


def sizes(q, k, borders, scale):
    return is_bf16(q), at(borders), len(borders) - 1, len(q), q.shape[1], *k.shape[1:], scale


def packed_gradients(simt, q, k, v, borders, scale, grad_out):
    out, lse = packed(simt, q, k, v, borders, scale)
    grads, scratch = [torch.full_like(x, 9.0) for x in (q, k, v)], torch.full_like(lse, 9.0)
    simt["packed_attention_backward"](*map(at, (q, k, v, out, grad_out, lse)),
                                      *sizes(q, k, borders, scale), *map(at, grads), at(scratch),
                                      0)  # fmt: skip
    return grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", GROUPS)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_paged_attention_is_that_of_float64_and_packed_attention_has_its_bits(simt, D, G, dtype):
    # a row without queries, one token, whole prompts, one query and several at the end of a row
    rows = [(4, 0), (1, 1), (5, 5), (7, 0), (18, 2), (9, 1)]
    paged = Paged(simt, rows, 2 if G == 1 else 1, G, D, {32: 1, 64: 16, 128: 5}[D], dtype)
    out = paged.attend()
    close(out, paged.exact(), dtype)
    for i, (length, count) in enumerate(rows):
        if not count:
            continue
        pad = randn(length - count, *paged.q[i].shape[1:], dtype=dtype, seed=99)
        borders = torch.tensor([0, length], dtype=torch.int32)
        whole, _ = packed(simt, torch.cat((pad, paged.q[i])), paged.k[i], paged.v[i], borders,
                          paged.scale)  # fmt: skip
        start, end = paged.cu_seqlens[i : i + 2]
        assert torch.equal(whole[length - count :], out[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_change_no_bit(simt, dtype):
    paged = Paged(simt, [(3 * CHUNK + 5, 2), (CHUNK, 1), (CHUNK + 1, 1)], 1, 2, 32, 16, dtype)
    out = paged.attend()
    close(out, paged.exact(), dtype)
    for splits in (2, 4, 9):
        assert torch.equal(paged.attend(splits), out)


def test_a_row_of_padding_without_tokens_gives_zeros(simt):
    paged = Paged(simt, [(3, 1), (1, 1)], 1, 2, 32, 2, torch.float32)
    paged.lengths[1] = 0
    for splits in (1, 2):
        out = paged.attend(splits)
        assert out[1].eq(0).all() and not out[0].eq(0).any()


def test_scores_of_any_size_neither_overflow_nor_hide_a_nan(simt):
    paged = Paged(simt, [(6, 1)], 1, 1, 32, 3, torch.float32)
    paged.scale = 1e4
    close(paged.attend(), paged.exact(), torch.bfloat16)
    paged.cache[:] = torch.nan
    assert paged.attend().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, G", [(32, 1), (32, 8), (64, 2), (128, 4)])
def test_packed_gradients_are_those_of_float64(simt, D, G, dtype):
    borders, K = torch.tensor([0, 1, 6, 6, 25], dtype=torch.int32), 2 if G == 1 else 1
    q, grad_out = (randn(25, K * G, D, dtype=dtype, seed=seed) for seed in (1, 4))
    k, v = (randn(25, K, D, dtype=dtype, seed=seed) for seed in (2, 3))
    ours = packed_gradients(simt, q, k, v, borders, D**-0.5, grad_out)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split([1, 5, 0, 19]) for x in exact), strict=True)
    torch.cat([attention_loop(*part) for part in parts]).backward(grad_out.double())
    for got, want in zip(ours, exact, strict=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]  # out is rounded in between
        torch.testing.assert_close(got.double(), want.grad, rtol=tolerance, atol=tolerance)


def test_attention_of_nothing_and_of_sizes_without_a_kernel(simt):
    nothing, borders = torch.zeros(0, 1, 32), torch.zeros(1, dtype=torch.int32)
    assert packed(simt, nothing, nothing, nothing, borders, 1.0)[0].shape == (0, 1, 32)
    for heads, D in ((1, 48), (3, 32), (16, 32)):
        q, k = torch.zeros(1, heads, D), torch.zeros(1, 1, D)
        with pytest.raises(RuntimeError, match="status 1"):
            packed(simt, q, k, k, torch.tensor([0, 1], dtype=torch.int32), 1.0)
    q = torch.zeros(33)[1:].view(1, 1, 32)
    with pytest.raises(RuntimeError, match="status 1"):
        packed(simt, q, q, q, torch.tensor([0, 1], dtype=torch.int32), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, shift", [(32, 0), (32, 1), (5, 0)])  # 16 bytes at once, and not
def test_cache_writes_and_copies_are_exact_and_touch_nothing_else(simt, D, shift, dtype):
    blocks, K, block_size = 4, 3, 4
    size = blocks * 2 * K * block_size * D
    cache = torch.full((size + shift,), 7.0, dtype=dtype)[shift:]
    cache = cache.view(blocks, 2, K, block_size, D)
    expected, fields = cache.clone(), (at(cache), is_bf16(cache), blocks, K, block_size, D)
    k, v = randn(4, K, D, dtype=dtype), randn(4, K, D, dtype=dtype, seed=1)
    slots = torch.tensor([5, 0, -1, 15])
    simt["kv_write"](*fields, at(k), at(v), at(slots), 4, 0)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, :, :, slot % block_size] = torch.stack((k[i], v[i]))
    assert torch.equal(cache, expected)
    sources, targets = torch.tensor([0, 3, 0]), torch.tensor([2, 1, 2])
    simt["kv_copy"](*fields, at(sources), at(targets), 3, 0)
    expected[[2, 1]] = expected[[0, 3]]
    assert torch.equal(cache, expected)
    simt["kv_copy"](*fields, at(sources), at(targets), 0, 0)
    simt["kv_write"](*fields, at(k), at(v), at(slots), 0, 0)
    assert torch.equal(cache, expected)


# ------------------------------------------------------------------------------ order, races


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_threads_and_blocks_changes_no_bit(simt, dtype, monkeypatch):
    x, targets = randn(3, 1029, dtype=dtype), torch.tensor([1, 2, 1028])
    paged = Paged(simt, [(CHUNK + 9, 2), (7, 1)], 1, 2, 32, 16, dtype)
    q, k, v = (randn(9, heads, 32, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    borders = torch.tensor([0, 2, 9], dtype=torch.int32)
    results = []
    for seed in SEEDS:
        monkeypatch.delenv("SIMT_SEED", raising=False)
        if seed:
            monkeypatch.setenv("SIMT_SEED", seed)
        found = logprob(simt, x, targets)
        results.append([
            found, gradient(simt, x, targets, found[2], torch.ones(3)),
            *sample(simt, x, [4, 5, 6], [(0, 0, i) for i in range(3)]),
            paged.attend(1), paged.attend(2), *packed(simt, q, k, v, borders, 0.2),
            *packed_gradients(simt, q, k, v, borders, 0.2, q),
        ])  # fmt: skip
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


RACE, BOUNDS = "thread", "address,undefined"
# what is planted: (the sanitizer that it takes, words of the report)
PLANTED = {
    "past_the_end": (BOUNDS, "heap-buffer-overflow"),
    "shared_index": (BOUNDS, "out of bounds for type 'float [64]'"),
    "dynamic_shared": (BOUNDS, "heap-buffer-overflow"),
    "read_after_write": (RACE, "data race"),
    "write_after_read": (RACE, "data race"),
    "missing_syncwarp": (RACE, "data race"),
    "shuffle_for_syncwarp": (RACE, "data race"),
    "divergent_barrier": ("", "wait at different __syncthreads"),
    "barrier_and_shuffle": ("", "deadlock"),
    "lane_left_early": ("", "deadlock, 0 of 31 live threads are at __syncthreads, thread 0"),
    "lane_not_in_mask": ("", "thread 0 is not in its mask"),
    "source_not_in_mask": ("", "lane 0 is not in the mask"),
    "too_many_threads": ("", "no such launch: grid 1,1,1 block 2048,1,1"),
}

RUN_PLANTED = """
import ctypes, sys
library, name, bug = sys.argv[1:]
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
x, out = malloc(256), malloc(256)
emulator = ctypes.CDLL(library)
emulator.simt_error.restype = ctypes.c_char_p
status = getattr(emulator, name)(int(bug), ctypes.c_void_p(x), ctypes.c_void_p(out))
print(emulator.simt_error().decode())
sys.exit(status != 0)
"""


def run(arguments, sanitize):
    """Run Python with what a sanitized library needs: (exit status, output)."""
    variables = build.environment(sanitize) if sanitize else {}
    process = subprocess.run([sys.executable, *arguments], env={**os.environ, **variables},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             timeout=900)  # fmt: skip
    return process.returncode, process.stdout


def check_planted(name):
    sanitize, words = PLANTED[name]
    library = build.build(HERE / "simt" / "bugs.cu", sanitize=sanitize)
    for bug in (0, 1):
        status, output = run(["-c", RUN_PLANTED, str(library), name, str(bug)], sanitize)
        assert (status != 0) == bool(bug), output
        assert (words in output) == bool(bug), output


@pytest.mark.parametrize("name", [name for name in PLANTED if not PLANTED[name][0]])
def test_a_hang_is_reported_with_where_it_hangs(name, simt):
    check_planted(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if PLANTED[name][0]])
def test_a_planted_bug_is_reported_by_the_sanitizer(name, simt):
    check_planted(name)


def test_dynamic_shared_memory_holds_nan_until_it_is_written(simt):
    emulator = ctypes.CDLL(str(build.build(HERE / "simt" / "bugs.cu")))
    x, out = torch.zeros(64), torch.zeros(64)
    assert emulator.uninitialised(1, ctypes.c_void_p(at(x)), ctypes.c_void_p(at(out))) == 0
    assert out.isnan().all()
    assert emulator.uninitialised(0, ctypes.c_void_p(at(x)), ctypes.c_void_p(at(out))) == 0
    assert torch.equal(out, x)


# -s: a sanitizer ends the process, and with it what pytest has kept of its report
PYTEST = ["-m", "pytest", "-sqx", "-p", "no:cacheprovider", "-m", "not long"]


@pytest.mark.long
@pytest.mark.parametrize("sanitize", [BOUNDS, RACE])
def test_the_kernels_are_clean_under_the_sanitizers(sanitize, simt):
    build.build(*build.kernels(), sanitize=sanitize)  # here: no compiler runs under a sanitizer
    tests = "simt and not same_bits and not hang and not dynamic"
    status, output = run([*PYTEST, str(HERE / "test_ops.py"), str(HERE / "test_simt.py"),
                          "-k", tests], sanitize)  # fmt: skip
    assert status == 0 and "ERROR" not in output and "WARNING: Thread" not in output, output


# The barriers of the kernels themselves: (kernels to build, file, what to take out, tests to run).
BARRIERS = {
    "vocabulary": (["logprob"], "softmax.h", "__syncthreads();\n  if (warp", "target"),
    "argmax": (["logprob", "sample"], "sample.cu", "__syncthreads();\n  if (warp", "counters"),
    "slots before they are read": (
        ["attention", "cache"], "attention.cu", "__syncthreads();\n  Partial p", "padding"),
    "slots after they are read": (
        ["attention", "cache"], "attention.cu", "__syncthreads();  // all", "padding"),
    "gradients before they are read": (
        ["attention", "attention_backward"], "attention_backward.cu",
        "__syncthreads();\n  if (threadIdx.x < D)", "gradients and 32-1"),
    "gradients after they are read": (
        ["attention", "attention_backward"], "attention_backward.cu",
        "__syncthreads();  // all", "gradients and 32-1"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_taken_out_of_a_kernel_is_reported_as_a_race(name, simt, tmp_path, monkeypatch):
    kernels, file, barrier, tests = BARRIERS[name]
    for path in (*build.CSRC.glob("*.h"), *(build.CSRC / f"{kernel}.cu" for kernel in kernels)):
        text = path.read_text("utf-8")
        if path.name == file:
            assert text.count(barrier) == 1
            text = text.replace(barrier, barrier.removeprefix("__syncthreads();"))
        (tmp_path / path.name).write_text(text, "utf-8")
    build.build(*build.kernels(tmp_path), sanitize=RACE)
    monkeypatch.setenv("SIMT_KERNELS", str(tmp_path))
    status, output = run([*PYTEST, str(HERE / "test_simt.py"), "-k", tests], RACE)
    assert status != 0 and "data race" in output, output
