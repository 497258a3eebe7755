"""HF checkpoints to and from `Qwen3`: safetensors, sharded or not, and config.json of either style.

    model = load_model("Qwen3-8B", dtype="bfloat16", device="cuda")
    save_model(model, "out")          # transformers and vLLM load it

Strict on purpose: a tensor that is missing, left over or of another shape, a setting that this
model does not implement, a damaged file: each is a ValueError of one line that names file and
tensor. A model that loads with one matrix at its random start still talks, and costs a day.

Not here: pickled checkpoints, quantised weights, downloads. The tokenizer's files are
`tokenizer`'s.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .qwen3 import Qwen3, Qwen3Config
from .rotary import Yarn
from .tokenizer import model_end_ids, read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
DIMENSIONS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "head_dim")
# HF's values where a file is silent.
DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768, "initializer_range": 0.02}
ROPE_KEYS = {"rope_type", "type", "rope_theta"}
YARN_KEYS = {field.name for field in fields(Yarn)}


def load_model(path: str | Path, dtype: str = "float32", device: str = "cpu") -> Qwen3:
    """The model of an HF folder, every weight converted to `dtype` on `device`.

    Of the two layouts, model.safetensors wins over an index, as for transformers. A surplus
    lm_head.weight beside tied embeddings is accepted and ignored: the flag decides. Peak memory is
    the model plus one tensor.
    """
    folder = Path(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    config = read_config(folder)
    with torch.device("meta"):  # shapes only: no random start for weights that are read anyway
        model = Qwen3(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    for file in weight_files(folder):
        read_tensors(file, shapes, state, config.tie_word_embeddings, DTYPES[dtype], device)
    check_complete(folder, shapes, state)
    model.load_state_dict(state, assign=True)
    return model.to(device)


def fill_from_(model: Qwen3, path: str | Path, put: Callable[[Tensor, Tensor], None]) -> None:
    """Fill a model in place from an HF folder: put(parameter, whole tensor in its dtype) for each.

    The files are read one after the other, on the CPU: one of them is the extra memory.
    """
    folder, parameters = Path(path), dict(model.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    seen: dict[str, Tensor] = {}
    for file in weight_files(folder):
        state: dict[str, Tensor] = {}
        read_tensors(file, shapes, state, model.config.tie_word_embeddings, dtype, "cpu")
        for name, tensor in state.items():
            put(parameters[name], tensor)
        seen |= dict.fromkeys(state)
    check_complete(folder, shapes, seen)


def read_tensors(file: Path, shapes: dict, state: dict[str, Tensor], is_tied: bool,
                 dtype: torch.dtype, device: str) -> None:
    """Add the tensors of one file to `state`, each checked against `shapes`."""
    try:
        with safe_open(str(file), framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():
                if name == HEAD and is_tied:
                    continue
                if name not in shapes:
                    raise ValueError(f"{file}: surplus tensor {name}, unknown to config.json")
                if name in state:
                    raise ValueError(f"{file}: tensor {name} is in another file too")
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != tuple(shapes[name]):
                    raise ValueError(f"{file}: tensor {name} has shape {list(shape)}, config.json "
                                     f"makes it {list(shapes[name])}")
                state[name] = tensors.get_tensor(name).to(dtype)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: truncated or damaged, copy it again ({error})") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; every shard that the index names must be
    there."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    files = read_weight_map(index)
    if files is None:
        raise ValueError(f"{folder}: has neither {SINGLE} nor {INDEX}; is it an HF checkpoint?")
    for name, file in sorted(files.items()):
        if not (folder / file).is_file():
            raise ValueError(f"{index}: names {file} for tensor {name}, but there is no such file")
    return [folder / file for file in sorted(set(files.values()))]


def read_weight_map(index: Path) -> dict[str, str] | None:
    """Tensor name -> file name, of an index; None where there is no index."""
    data = read_json(index)
    if data is None:
        return None
    files = data.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{index}: has no weight_map from tensor names to file names")
    return files


def check_complete(folder: Path, shapes: dict, state: dict[str, Tensor]) -> None:
    """ValueError that names the first missing tensor and the file that should hold it."""
    missing = [name for name in shapes if name not in state]
    if missing:
        has_single = (folder / SINGLE).is_file()
        files = {} if has_single else read_weight_map(folder / INDEX) or {}
        file = folder / files.get(missing[0], SINGLE if has_single else INDEX)
        raise ValueError(f"{file}: tensor {missing[0]} is missing ({len(missing)} missing in all)")


def read_config(folder: str | Path) -> Qwen3Config:
    """config.json of a Qwen3 folder, with the end ids of generation_config.json added.

    Both styles are read: rotary settings nested in `rope_parameters`, or top-level `rope_theta`
    beside `rope_scaling`. Whatever would change the function that the weights compute, and is not
    implemented here, is an error.
    """
    file = Path(folder) / "config.json"
    data = read_json(file)
    if data is None:
        raise ValueError(f"{file}: no such file; give an HF model folder")
    check_supported(file, data)
    for key in DIMENSIONS:
        if type(data.get(key)) is not int or data[key] < 1:
            raise ValueError(f"{file}: {key} must be a whole number above 0, not {data.get(key)!r}")
    settings = {key: data.get(key, default) for key, default in DEFAULTS.items()}
    theta, yarn = read_rope(file, data, settings["max_position_embeddings"])
    settings |= {key: data[key] for key in DIMENSIONS}
    ends = tuple(sorted(model_end_ids(file.parent)))
    return Qwen3Config(**settings, rope_theta=theta, yarn=yarn, eos_token_ids=ends)


def check_supported(file: Path, data: dict) -> None:
    """ValueError for an architecture or activation other than ours."""
    for key, value in {"model_type": "qwen3", "hidden_act": "silu"}.items():
        if data.get(key) != value:
            raise ValueError(f"{file}: {key} {data.get(key)!r} is not supported, only {value!r}")
    kinds = set(data.get("layer_types") or ()) - {"full_attention"}
    if data.get("use_sliding_window") or kinds:
        raise ValueError(f"{file}: sliding-window attention is not supported, only full attention")


def read_rope(file: Path, data: dict, max_positions: int) -> tuple[float, Yarn | None]:
    """Base and YaRN settings. A base that is nowhere is an error: a wrong guess reads as a model
    that forgets with distance. Explicit YaRN numbers win; the ratio of lengths is only a
    fallback."""
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope.get("rope_theta", data.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"{file}: rope_theta, in rope_parameters or at the top level, must be a "
                         f"positive number, not {theta!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"{file}: rope_type {kind!r} is not supported, only 'default' and 'yarn'")
    unknown = sorted(set(rope) - ROPE_KEYS - (YARN_KEYS if kind == "yarn" else set()))
    if unknown and rope[unknown[0]] != {"partial_rotary_factor": 1.0}.get(unknown[0]):
        raise ValueError(f"{file}: {unknown[0]} is not supported for rope_type {kind!r}")
    if kind == "default":
        return float(theta), None
    original = rope.setdefault("original_max_position_embeddings", max_positions)
    rope.setdefault("factor", max_positions / original)
    return float(theta), Yarn(**{key: rope[key] for key in YARN_KEYS if key in rope})


def save_model(model: Qwen3, path: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write an HF folder: weights in their dtype, config.json, and generation_config.json if ends
    are known.

    Loading it again is the identity. Tied embeddings are stored once. Weights beyond
    `max_shard_bytes` go to several files with an index; weight files of an earlier save in the
    folder are removed. config.json comes last: a folder without it is an unfinished one.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors*"):
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", old.name):
            old.unlink()
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    shards = split_shards(state, max_shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        # transformers asks for the mark
        save_file(shard, str(folder / file), metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(map(num_bytes, state.values()))
        weight_map = {name: f for f, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    save_config(model, folder)


def save_config(model: Qwen3, folder: Path) -> None:
    """Write config.json, and generation_config.json if ends are known."""
    if model.config.eos_token_ids:
        ends = {"eos_token_id": list(model.config.eos_token_ids)}
        write_json(folder / "generation_config.json", ends)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(folder / "config.json", config_json(model.config, dtype))


def split_shards(state: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Consecutive tensors in files of at most `max_bytes`, unless one tensor alone has more."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + num_bytes(tensor) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes(tensor)
    return shards


def num_bytes(tensor: Tensor) -> int:
    """Size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def config_json(config: Qwen3Config, dtype: str) -> dict:
    """config.json in the old style (top-level `rope_theta`), which old and new readers
    understand."""
    data = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "torch_dtype": dtype, "use_cache": True, "use_sliding_window": False,
            "sliding_window": None}
    data |= {key: getattr(config, key) for key in (*DIMENSIONS, *DEFAULTS)}
    data |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.yarn is not None:
        plain = asdict(Yarn(config.yarn.factor, 0))
        given = {key: value for key, value in asdict(config.yarn).items() if value != plain[key]}
        data["rope_scaling"] = {"rope_type": "yarn", "factor": config.yarn.factor} | given
    if config.eos_token_ids:
        data["eos_token_id"] = list(config.eos_token_ids)
    return data


def write_json(file: Path, data: dict) -> None:
    """Write indented JSON, keys in order."""
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
