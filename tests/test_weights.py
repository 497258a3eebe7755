"""Checkpoints: saving and loading is the identity, and nothing wrong loads quietly."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minirler.qwen3 import Qwen3, Qwen3Config
from minirler.rotary import Yarn, attention_factor, inv_freq
from minirler.weights import load_model, read_config, save_model

GOLDEN = Path(__file__).parent / "golden"
SMALL = Qwen3Config(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=4)
MINIMAL = {"model_type": "qwen3", "hidden_act": "silu", "vocab_size": 11, "hidden_size": 8,
           "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 1, "head_dim": 128, "rope_theta": 1e6}


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def config_of(tmp_path, without=(), **changes):
    data = {key: value for key, value in (MINIMAL | changes).items() if key not in without}
    (tmp_path / "config.json").write_text(json.dumps(data))
    return read_config(tmp_path)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    save_model(Qwen3(replace(SMALL, tie_word_embeddings=False)), tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    shutil.copytree(GOLDEN / "tied", tmp_path / "tied")
    for file in (tmp_path / "tied").iterdir():
        file.chmod(0o644)
    return tmp_path / "tied"


# ------------------------------------------------------------------------- identity

CONFIGS = st.builds(
    replace, st.just(SMALL), tie_word_embeddings=st.booleans(), attention_bias=st.booleans(),
    yarn=st.none() | st.builds(Yarn, st.just(4.0), st.just(64), st.none() | st.just(1.0),
                               beta_fast=st.just(32.0) | st.just(16.0), truncate=st.booleans()),
    eos_token_ids=st.sampled_from([(), (2,), (2, 5)]), rope_theta=st.sampled_from([1e4, 1e6]))


@given(CONFIGS, st.sampled_from(["float32", "bfloat16", "float16"]),
       st.sampled_from([1, 700, 10**9]))
def test_saving_and_loading_is_the_identity(tmp_path_factory, config, dtype, max_shard_bytes):
    folder = tmp_path_factory.mktemp("model")
    model = Qwen3(config).to(getattr(torch, dtype))
    save_model(model, folder, max_shard_bytes)
    again = load_model(folder, dtype)
    assert again.config == config
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in ours)
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert torch.equal(model.model.rope.inv_freq, again.model.rope.inv_freq)


def test_a_reloaded_model_is_a_new_one_in_another_dtype(saved):
    model = load_model(saved, "bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = load_model(saved).lm_head.weight.to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight, expected)
    with pytest.raises(ValueError, match="dtype 'int8' is none of float32"):
        load_model(saved, "int8")


def test_names_index_and_sizes_are_those_of_hf(tmp_path):
    model = load_model(GOLDEN / "tied")
    save_model(model, tmp_path, max_shard_bytes=250_000)
    ours = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    theirs = json.loads((GOLDEN / "tied" / "model.safetensors.index.json").read_text())
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert all(sum(t.nbytes for t in load_file(tmp_path / f).values()) <= 250_000 for f in files)


@pytest.mark.parametrize("case", ["tied", "untied", "yarn"])
def test_config_json_says_what_the_original_said(case, tmp_path):
    save_model(load_model(GOLDEN / case), tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    theirs = json.loads((GOLDEN / case / "config.json").read_text())
    rope = theirs.get("rope_parameters") or theirs
    assert ours["rope_theta"] == rope["rope_theta"]
    assert ours["torch_dtype"] == theirs.get("dtype", theirs.get("torch_dtype")) == "float32"
    for key in ("architectures", "model_type", "hidden_act", "head_dim", "tie_word_embeddings",
                "sliding_window", "vocab_size", "rms_norm_eps", "num_key_value_heads"):
        assert ours[key] == theirs[key], key
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends["eos_token_id"] == [2]


def test_tied_embeddings_are_stored_once(tmp_path):
    save_model(Qwen3(SMALL), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
    names = [name for name, _ in load_model(tmp_path).named_parameters()]
    assert len(names) == len(set(names)) == len(tensors)


def test_a_smaller_save_leaves_no_shards_of_a_larger_one(tmp_path):
    first, second = Qwen3(SMALL), Qwen3(SMALL)
    save_model(first, tmp_path, max_shard_bytes=1)
    (tmp_path / "model-card.md").write_text("mine")
    save_model(second, tmp_path)
    kept = sorted(file.name for file in tmp_path.iterdir())
    assert kept == ["config.json", "model-card.md", "model.safetensors"]
    weight = load_model(tmp_path).model.embed_tokens.weight
    assert torch.equal(weight, second.model.embed_tokens.weight)


# ------------------------------------------------------------------------- tensors that are wrong


def test_the_flag_decides_whether_the_head_is_the_embedding(saved):
    file = saved / "model.safetensors"
    edit_tensors(file, lambda t: t["lm_head.weight"].fill_(9))
    assert load_model(saved).head_weight().eq(9).all()
    edit_json(saved / "config.json", tie_word_embeddings=True)
    tied = load_model(saved)  # the surplus head is ignored
    assert torch.equal(tied.head_weight(), load_file(file)["model.embed_tokens.weight"])
    edit_json(saved / "config.json", tie_word_embeddings=False)
    edit_tensors(file, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="model.safetensors: tensor lm_head.weight is missing"):
        load_model(saved)


BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    (lambda t: t.update({BIAS: torch.ones(8)}), f"surplus tensor {BIAS}"),
    (lambda t: t.update({"model.norm.weight": torch.ones(9)}),
     r"tensor model.norm.weight has shape \[9\], config.json makes it \[8\]"),
])
def test_tensors_that_do_not_fit_are_named_with_their_file(saved, change, message):
    edit_tensors(saved / "model.safetensors", change)
    with pytest.raises(ValueError, match=f"model.safetensors: {message}") as error:
        load_model(saved)
    assert "\n" not in str(error.value)


def test_biases_that_config_json_promises_must_be_there(saved):
    edit_json(saved / "config.json", attention_bias=True)
    with pytest.raises(ValueError, match=r"self_attn.q_proj.bias is missing \(8 missing in all\)"):
        load_model(saved)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors: truncated or damaged"):
        load_model(saved)


SECOND = "model-00002-of-00002.safetensors"


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded):
    (sharded / SECOND).unlink()
    with pytest.raises(ValueError, match=f"index.json: names {SECOND} for tensor model.layers.1"):
        load_model(sharded)


def test_a_tensor_that_its_shard_lacks_is_named_with_the_shard(sharded):
    edit_tensors(sharded / SECOND, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=f"{SECOND}: tensor model.norm.weight is missing"):
        load_model(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    edit_tensors(sharded / SECOND, lambda t: t.update(
        {"model.embed_tokens.weight": torch.zeros(320, 48)}))
    message = f"{SECOND}: tensor model.embed_tokens.weight is in another file too"
    with pytest.raises(ValueError, match=message):
        load_model(sharded)


def test_a_tensor_that_the_index_forgets_is_named_with_the_index(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    only = {n: f for n, f in weight_map.items() if f != SECOND}
    index.write_text(json.dumps({"weight_map": only}))
    with pytest.raises(ValueError, match=r"index.json: tensor model.layers.1\S+ is missing"):
        load_model(sharded)


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="model.safetensors.index.json: "):
        load_model(sharded)


def test_a_folder_without_weights_or_config_is_named(tmp_path):
    with pytest.raises(ValueError, match="config.json: no such file"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        load_model(tmp_path)


# ------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("rope", [
    {"rope_theta": 1000000},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
    {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
])
def test_rope_theta_is_read_nested_first_then_at_the_top(tmp_path, rope):
    config = config_of(tmp_path, without={"rope_theta"} - rope.keys(), **rope)
    assert config.rope_theta == 1e6
    assert inv_freq(config)[63].item() == pytest.approx(1.240938e-06, rel=1e-5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("change, factor, attention", [
    ({}, 4.0, 1.1386294),  # not 40960 / 32768
    ({"attention_factor": 1.0}, 4.0, 1.0),
    ({"rope_type": None, "type": "yarn"}, 4.0, 1.1386294),
    ({"factor": None}, 1.25, 1.0223144),
])
def test_explicit_yarn_numbers_win_over_the_ratio_of_lengths(tmp_path, change, factor, attention):
    config = config_of(tmp_path, max_position_embeddings=40960, rope_scaling=YARN | change)
    assert config.yarn.factor == factor
    assert attention_factor(config) == pytest.approx(attention, rel=1e-6)


def test_biases_and_head_width_are_read_and_not_derived(tmp_path):
    config = config_of(tmp_path, attention_bias=True)
    assert (config.attention_bias, config.head_dim) == (True, 128)
    assert config_of(tmp_path).attention_bias is False


@pytest.mark.parametrize("config_ends, generation_ends, expected", [
    (151645, [151645, 151643], (151643, 151645)), ([7], None, (7,)), (None, None, ())])
def test_end_ids_are_those_of_both_files(tmp_path, config_ends, generation_ends, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ends}))
    assert config_of(tmp_path, eos_token_id=config_ends).eos_token_ids == expected


@pytest.mark.parametrize("changes, message", [
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type 'linear'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
    ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"use_sliding_window": True}, "sliding"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ({"head_dim": None}, "head_dim"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers"),
])
def test_a_setting_that_would_change_the_model_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"config.json: .*{message}") as error:
        config_of(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[[1]]", "3"])
def test_a_config_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json: not a JSON object"):
        read_config(tmp_path)
