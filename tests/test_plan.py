"""The plan of memory: counts against real models, kept tensors and the peak of a real process; and
every shipped configuration loads and fits what its first lines name."""

import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from minirler import lora
from minirler import plan as planning
from minirler.config import load_config
from minirler.pack import pack
from minirler.plan import PRESETS, layer_activations, num_parameters, plan
from minirler.policy import batch_logps
from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.records import Rollout, Segment

GPU = [path for path in sorted(Path("configs").glob("*.toml"))
       if "minirler.plan" in path.read_text("utf-8")]  # fmt: skip
BASE = ["configs/almanac.toml", "train.logits_chunk=64"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_the_model(name):
    with torch.device("meta"):
        model = Qwen3(PRESETS[name])
    assert num_parameters(PRESETS[name]) == sum(p.numel() for p in model.parameters())


def test_published_totals():
    assert num_parameters(PRESETS["qwen3-0.6b"]) == 596_049_920
    assert num_parameters(PRESETS["qwen3-8b"]) == 8_190_735_360


def test_adapters_have_the_parameters_of_real_ones():
    shape = Qwen3Config(100, 64, 160, 3, 4, 2, 32)
    for targets in ("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "v_proj,down_proj"):
        config = load_config(["configs/almanac.toml", "lora.rank=5", f"lora.targets={targets}"])
        model = Qwen3(shape)
        lora.attach_(model, config.lora, 0)
        real = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert planning.adapter_parameters(config, shape) == real


def batch(tokens, vocabulary):
    ids = [i % vocabulary for i in range(tokens)]
    rollout = Rollout("p", 0, [Segment(ids[:9], [0.0] * 9, False, 0),
                               Segment(ids[9:], [0.0] * (tokens - 9), True, 0)])  # fmt: skip
    return pack([rollout], [1.0], tokens)[0]


@pytest.mark.parametrize("layers", [2, 5])
def test_activations_are_the_bytes_that_autograd_keeps(layers):
    """In float32: in bfloat16 torch's norms keep float32 copies on a CPU, though not on a GPU."""
    shape, tokens = Qwen3Config(1000, 64, 160, layers, 4, 2, 32), 512
    model, kept = Qwen3(shape), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive: addresses stay theirs
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch_logps(model, batch(tokens, 1000), deterministic=False)
    reckoned = tokens * (layers * layer_activations(shape, 4) + 4 * shape.hidden_size)
    assert sum(size for size, _ in kept.values()) == pytest.approx(reckoned, rel=0.05)


def peak(work):
    """Most bytes of tensors that `work` had alive at once, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("vocabulary, is_checkpointed", [
    (4096, False), (4096, True), (32768, False), (32768, True)])  # fmt: skip
def test_the_peak_of_an_update_is_as_planned_within_a_tenth(vocabulary, is_checkpointed):
    shape, tokens = Qwen3Config(vocabulary, 256, 1024, 4, 4, 2, 64), 1024
    model = Qwen3(shape)
    for layer in model.model.layers:
        layer.is_checkpointed = is_checkpointed

    def backward():
        part = batch(tokens, 4096)
        batch_logps(model, part, chunk=256, deterministic=False)[0].sum().backward()

    backward()  # from here on there are gradients, the fuller case
    config = load_config([
        "configs/almanac.toml", "rollout.max_tokens=500", "train.micro_batch_tokens=1024",
        "train.logits_chunk=256", f"train.checkpoint_activations={str(is_checkpointed).lower()}",
    ])  # fmt: skip
    update = plan(config, shape, 1, 10**12).update
    reckoned = sum(update.values()) - update["gradients (float32)"]
    assert peak(backward) == pytest.approx(reckoned, rel=0.1)


# ------------------------------------------------------------------------------ configurations


def test_there_are_configurations_for_gpus():
    assert len(GPU) >= 5


@pytest.mark.parametrize("path", GPU, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads_and_fits_what_it_names(path, capsys):
    command = re.search(r"python -m minirler\.plan (.*)", path.read_text("utf-8"))[1].split()
    assert command[0] == str(path)
    assert planning.main(command) == 0, capsys.readouterr().out
    assert "it fits" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", [
    ("sampler.kv_tokens=2000000", "lower sampler.kv_tokens"),
    ("train.micro_batch_tokens=90000", "lower train.micro_batch_tokens to "),
    ("train.checkpoint_activations=false", "set train.checkpoint_activations=true"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_change(change, words, capsys):
    command = ["configs/rler-qwen3-8b.toml", change, "--ranks", "8"]
    assert planning.main(command) == 1
    out = capsys.readouterr().out
    assert "it does not fit" in out and words in out


def test_the_tokens_that_a_micro_batch_may_hold_just_fit():
    shape, memory = PRESETS["qwen3-8b"], 80 * 10**9
    most = plan(load_config(["configs/rler-qwen3-8b.toml"]), shape, 8, memory).micro_batch_tokens
    for tokens in (most, most + 1):
        config = load_config(["configs/rler-qwen3-8b.toml", f"train.micro_batch_tokens={tokens}"])
        assert plan(config, shape, 8, memory).fits == (tokens == most)


def test_more_ranks_take_less_and_an_unknown_shape_is_named(capsys):
    config, shape = load_config(["configs/rler-qwen3-8b.toml"]), PRESETS["qwen3-8b"]
    peaks = [plan(config, shape, ranks, 80 * 10**9).peak for ranks in (8, 16, 32)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[2]
    assert planning.main(["configs/rler-qwen3-8b.toml", "model.preset="]) == 2
    assert "set model.preset to one of qwen3-0.6b" in capsys.readouterr().err
