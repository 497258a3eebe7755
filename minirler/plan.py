"""What a run will take of each device's memory, reckoned before anything is loaded.

    python -m minirler.plan configs/rler-qwen3-8b.toml --ranks 8 --memory-gb 80
    python -m minirler.plan CONFIG --ranks 2 --memory-gb 24 train.micro_batch_tokens=8192

The shape comes from config.json in `model.path`, or from `model.preset` where there is no such
folder. Status 1 where the run does not fit, with what to change. Shapes of tensors alone are
counted, exactly; MARGIN stands for the allocator's gaps and the libraries' own.

Not here: time, and the host's memory.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .config import Config, ConfigError, asset_path, load_config
from .qwen3 import Qwen3Config
from .weights import read_config

GB = 10**9
MARGIN = 1.08
BYTES = {"float32": 4, "bfloat16": 2}
PRESETS = {  # published shapes
    "qwen3-0.6b": Qwen3Config(151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": Qwen3Config(151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": Qwen3Config(151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": Qwen3Config(151936, 4096, 12288, 36, 32, 8, 128, tie_word_embeddings=False),
    "qwen3-14b": Qwen3Config(151936, 5120, 17408, 40, 40, 8, 128, tie_word_embeddings=False),
    "qwen3-32b": Qwen3Config(151936, 5120, 25600, 64, 64, 8, 128, tie_word_embeddings=False),
}


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank by name, and what follows. `update` and `sampling` are two moments of a
    step: the cache is lent to the update, gradients and activations are gone while sampling."""

    always: dict[str, int]
    update: dict[str, int]
    sampling: dict[str, int]
    memory: int  # of the device
    micro_batch_tokens: int = 0  # the longest micro-batch that would fit; 0 where none does

    @property
    def peak(self) -> int:
        """Bytes at the fuller of the two moments, MARGIN included."""
        parts = max(sum(self.update.values()), sum(self.sampling.values()))
        return int(MARGIN * (sum(self.always.values()) + parts))

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.memory


def plan(config: Config, shape: Qwen3Config, ranks: int, memory: int) -> Plan:
    """`reckon`, and the longest micro-batch that would fit, by halving."""
    fitting, too_many = 0, 1 << 24
    while too_many - fitting > 1:
        tokens = (fitting + too_many) // 2
        settings = replace(config.train, micro_batch_tokens=tokens)
        if reckon(replace(config, train=settings), shape, ranks, memory).fits:
            fitting = tokens
        else:
            too_many = tokens
    return replace(reckon(config, shape, ranks, memory), micro_batch_tokens=fitting)


def reckon(config: Config, shape: Qwen3Config, ranks: int, memory: int) -> Plan:
    """Reckon a run of `shape` on `ranks` devices of `memory` bytes each.

    As `dist` does it: masters, moments and gradients are float32 shards of a replica; a layer, the
    embedding or the head is whole while it runs, in the compute dtype. One process in float32 has
    one model for everything; in bfloat16 a copy is what is trained and sampled from.
    """
    size, settings = BYTES[config.model.dtype], config.train
    layer, ends = layer_parameters(shape), shape.vocab_size * shape.hidden_size
    count = num_parameters(shape)
    shard = count * config.dist.replicas // ranks
    on_device = 0 if config.dist.offload else 1
    trained = adapter_parameters(config, shape) if config.lora.rank else shard
    always = {"masters (float32)": 4 * trained * on_device, "moments (2 x float32)": 8 * trained
              * on_device}  # fmt: skip
    if config.lora.rank:
        always["the frozen model, for all"] = size * count
    elif ranks > 1 or size < 4:
        always["the sampler's copy"] = size * count
    if config.algo.beta and config.algo.reference == "first" and not config.lora.rank:
        always["reference"] = size * count * config.dist.replicas // ranks
    tokens, width = settings.micro_batch_tokens, size * shape.hidden_size
    kept = layer_activations(shape, size)  # bytes a token and layer
    saved = width if settings.checkpoint_activations else kept
    head = size * min(tokens, settings.logits_chunk) * shape.vocab_size
    head += 0 if config.lora.rank else 4 * ends + (2 * ends if size < 4 else 0)
    inside = 2 * (size * shape.intermediate_size + width)  # gradients within a layer
    inside += kept if settings.checkpoint_activations else 0  # it is computed again
    update = {
        "gradients (float32)": 4 * trained * on_device,
        "activations": (shape.num_hidden_layers * saved + width) * tokens,
        "the head's backward, or a layer's": max(head, inside * tokens),
    }
    if ranks > 1:  # the running layer, the next one, and a gradient of it before it is split
        update["gathered parameters"] = size * max(3 * layer, layer + 2 * ends)
    row = size * (2 * shape.intermediate_size + 4 * shape.hidden_size)
    sampling = {
        "KV cache": kv_bytes(config, shape, size),
        "a sampler step": config.sampler.token_budget * row
        + 4 * config.sampler.max_rows * shape.vocab_size,
    }
    return Plan(always, update, sampling, memory)


def layer_parameters(shape: Qwen3Config) -> int:
    """Parameters of one layer."""
    d, D = shape.hidden_size, shape.head_dim
    heads = 2 * shape.num_attention_heads + 2 * shape.num_key_value_heads
    return d * D * heads + 3 * d * shape.intermediate_size + 2 * d + 2 * D


def num_parameters(shape: Qwen3Config) -> int:
    """All parameters; a tied embedding counts once."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return shape.num_hidden_layers * layer_parameters(shape) + ends + shape.hidden_size


def adapter_parameters(config: Config, shape: Qwen3Config) -> int:
    """Parameters of all adapters."""
    d, inner, D = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_attention_heads * D, shape.num_key_value_heads * D
    sizes = {"q_proj": d + q, "k_proj": d + kv, "v_proj": d + kv, "o_proj": q + d,
             "gate_proj": d + inner, "up_proj": d + inner, "down_proj": inner + d}  # fmt: skip
    targets = [name.strip() for name in config.lora.targets.split(",")]
    wide = sum(size for name, size in sizes.items() if name in targets)
    return shape.num_hidden_layers * config.lora.rank * wide


def layer_activations(shape: Qwen3Config, size: int) -> int:
    """Bytes that a layer keeps of a token for its backward pass.

    Of the width: the stream twice, its norms, what is added to it (7). Of the heads: projection,
    norm, rotation and output (4 each of queries and keys; the values stand for the keys' output).
    Of the inner width: gate, up, silu and their product. And float32 numbers of the norms.
    """
    H, K, D = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    wide = 7 * shape.hidden_size + 4 * (H + K) * D + 4 * shape.intermediate_size
    return size * wide + 4 * (2 * H + K + 2)


def kv_bytes(config: Config, shape: Qwen3Config, size: int) -> int:
    """Bytes of the cache."""
    token = 2 * size * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    return config.sampler.kv_bytes or config.sampler.kv_tokens * token


def shape_of(config: Config) -> Qwen3Config:
    """The model's shape: of its folder, else of `model.preset`. ConfigError where neither is."""
    if (Path(asset_path(config.model.path)) / "config.json").is_file():
        return read_config(asset_path(config.model.path))
    if config.model.preset not in PRESETS:
        raise ConfigError(f"model.path = {config.model.path!r} has no config.json: set model.preset"
                          f" to one of {', '.join(PRESETS)}")  # fmt: skip
    return PRESETS[config.model.preset]


def table(plan: Plan) -> str:
    """The plan for people, in GB (10^9 bytes)."""
    lines = []
    for title, parts in (("always", plan.always), ("update", plan.update),
                         ("sampling", plan.sampling)):  # fmt: skip
        lines += [f"  {name:46} {size / GB:8.2f} GB" for name, size in parts.items()]
        lines.append(f"{title:48} {sum(parts.values()) / GB:8.2f} GB")
    lines.append(f"{f'peak, with {MARGIN - 1:.0%} for gaps':48} {plan.peak / GB:8.2f} GB "
                 f"of {plan.memory / GB:.0f}")  # fmt: skip
    lines.append(f"a micro-batch may hold {plan.micro_batch_tokens:,} tokens")
    return "\n".join(lines)


def advice(plan: Plan, config: Config) -> str:
    """What to change where the plan does not fit."""
    sampling = MARGIN * (sum(plan.always.values()) + sum(plan.sampling.values()))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    if sampling > plan.memory:
        return "lower sampler.kv_tokens, or use more ranks"
    if plan.micro_batch_tokens >= longest:
        return f"lower train.micro_batch_tokens to {plan.micro_batch_tokens}"
    if not config.train.checkpoint_activations:
        return "set train.checkpoint_activations=true"
    return "use more ranks, dist.offload=true, lora.rank, or shorter rollouts (rollout.max_tokens)"


def main(argv: list[str] | None = None) -> int:
    """Command line: 0 where the run fits, 1 where it does not, 2 for an error."""
    parser = argparse.ArgumentParser(prog="minirler.plan")
    parser.add_argument("settings", nargs="+", help="CONFIG [key=value ...]")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=80.0, help="of one device, 10^9 bytes")
    given = parser.parse_args(argv)
    try:
        config = load_config(given.settings)
        if given.ranks < 1 or given.ranks % config.dist.replicas:
            raise ConfigError(f"dist.replicas = {config.dist.replicas} does not divide --ranks")
        made = plan(config, shape_of(config), given.ranks, int(given.memory_gb * GB))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(made))
    print("it fits" if made.fits else f"it does not fit: {advice(made, config)}")
    return int(not made.fits)


if __name__ == "__main__":
    sys.exit(main())
