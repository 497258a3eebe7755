"""Adapters: at first they change nothing; unmerged they are what merging gives; the base stays."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import settings, train

from minirler import lora
from minirler import train as loop
from minirler.checkpoint import export
from minirler.config import ConfigError, LoraConfig
from minirler.pack import pack
from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.run import open_run
from minirler.update import reference_logps
from minirler.weights import load_model

IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
RANK2 = LoraConfig(rank=2, alpha=6.0)


def model(seed=0, settings=RANK2, moved=False):
    torch.manual_seed(seed)
    made = Qwen3(Qwen3Config(40, 16, 24, 2, 4, 2, 4, initializer_range=0.3))
    lora.attach_(made, settings, seed=1)
    if moved:
        for adapter in lora.adapters(made).values():
            torch.nn.init.normal_(adapter.lora_B, std=0.2)
    return made


def test_a_fresh_adapter_changes_nothing_and_only_adapters_are_trained():
    torch.manual_seed(0)
    plain = Qwen3(Qwen3Config(40, 16, 24, 2, 4, 2, 4, initializer_range=0.3))
    assert torch.equal(model().logits(IDS), plain.logits(IDS))
    trained = {n for n, p in model().named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)


def test_unmerged_is_merged_by_hand_and_off_is_the_base():
    made = model(moved=True)
    base = {name: p.clone() for name, p in made.named_parameters() if "lora_" not in name}
    unmerged = made.logits(IDS)
    with lora.off(made):
        without = made.logits(IDS)
    assert not torch.allclose(unmerged, without, atol=1e-3)
    by_hand = Qwen3(made.config)
    for name, parameter in by_hand.named_parameters():
        value = base[name]
        adapter = lora.adapters(made).get(name.removesuffix(".weight"))
        if adapter is not None:
            value = value + 6.0 / 2 * adapter.lora_B @ adapter.lora_A
        parameter.data.copy_(value)
    torch.testing.assert_close(unmerged, by_hand.logits(IDS))
    lora.merge_(made)
    assert not lora.adapters(made)
    torch.testing.assert_close(unmerged, made.logits(IDS))


def test_merging_a_small_change_into_bfloat16_would_lose_it():
    """Why the sampler applies adapters unmerged."""
    made = model(moved=True).to(torch.bfloat16)
    for adapter in lora.adapters(made).values():
        adapter.float()
        adapter.lora_B.data.mul_(1e-3)
    name, adapter = next(iter(lora.adapters(made).items()))
    weight = made.get_submodule(name).weight
    merged = (weight.float() + adapter.delta()).bfloat16()
    assert (merged == weight).float().mean() > 0.5
    x = torch.randn(9, 16).bfloat16()
    assert (adapter(x, ()) != 0).float().mean() > 0.9


def test_files_are_pefts_and_come_back_equal(tmp_path):
    made = model(moved=True)
    lora.save_adapter(made, tmp_path, RANK2, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 6.0, "LORA")
    assert "q_proj" in config["target_modules"] and len(config["target_modules"]) == 7
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"
    assert tensors[name.format("A")].shape == (2, 16) and tensors[name.format("B")].shape == (8, 2)
    again = model()
    lora.load_adapter_(again, tmp_path)
    assert torch.equal(again.logits(IDS), made.logits(IDS))


def test_adapters_of_another_rank_or_other_targets_are_refused(tmp_path):
    lora.save_adapter(model(), tmp_path, RANK2, "base")
    with pytest.raises(ValueError, match="another lora.rank"):
        lora.load_adapter_(model(settings=LoraConfig(rank=3)), tmp_path)
    with pytest.raises(ValueError, match="other targets"):
        lora.load_adapter_(model(settings=LoraConfig(rank=2, targets="q_proj")), tmp_path)
    for targets in ("q_proj,nothing", "", "lm_head"):
        with pytest.raises(ConfigError, match="choose from q_proj"):
            model(settings=LoraConfig(rank=2, targets=targets))


# ------------------------------------------------------------------------------ in the loop

SMALL = ("lora.rank=4", "train.lr=0.01", "algo.beta=0.01")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps with adapters, and its hashes."""
    folder = tmp_path_factory.mktemp("lora") / "whole"
    return folder, train(folder, *SMALL)


def test_a_run_trains_adapters_and_nothing_else(finished):
    run = open_run(settings(finished[0], *SMALL))
    base = load_model(Path("minirler/assets/almanac"))
    now = run.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in base.state_dict().items())
    assert any(a.lora_B.abs().max() > 0 for a in lora.adapters(run.model).values())
    assert run.reference is None
    saved = finished[0] / "checkpoints" / "step_000002" / "model"
    assert {path.name for path in saved.iterdir()} >= {"adapter_config.json"}
    assert not list(saved.glob("model*.safetensors"))


def test_a_run_with_adapters_resumes_to_the_same(finished, tmp_path):
    folder = tmp_path / "resumed"
    train(folder, *SMALL, "train.steps=1")
    assert train(folder, *SMALL) == finished[1]


def test_sampler_and_trainer_agree_bit_for_bit_with_adapters(finished):
    groups = [json.loads(line) for line in
              (finished[0] / "rollouts" / "step_000002.jsonl").read_text("utf-8").splitlines()]
    assert groups
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    kls = [row["mismatch_kl"] for row in rows if "mismatch_kl" in row]
    assert kls == [0.0, 0.0]


def test_the_reference_is_the_base(tmp_path):
    run = open_run(settings(tmp_path / "ref", *SMALL))
    groups = asyncio.run(loop.sample_and_score(run))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    (batch, *_) = pack(rollouts, [1.0] * len(rollouts), 16384)
    before = reference_logps(run, batch)
    for adapter in lora.adapters(run.model).values():
        torch.nn.init.normal_(adapter.lora_B, std=0.1)
    assert torch.equal(reference_logps(run, batch), before)


def test_export_merges(finished, tmp_path):
    run = open_run(settings(finished[0], *SMALL))
    out = export(finished[0] / "step_000002", tmp_path / "out")
    merged = load_model(out)
    torch.testing.assert_close(merged.logits(IDS), run.model.logits(IDS), rtol=1e-4, atol=1e-4)
    assert (out / "tokenizer.json").is_file()
