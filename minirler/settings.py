"""Every setting: its name, its default, its unit and its limits. The only place for defaults.

Not here: reading, checking and printing, which `config` does. Other modules import these classes
from `config`.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunConfig:
    """The run folder and what holds for all of a run."""

    dir: str = "runs/run"  # the run folder; an existing one is resumed
    seed: int = 0
    threads: int = 0  # CPU threads of torch; 0 leaves torch's own choice
    services: str = "record"  # their replies are kept in the run folder; "replay": asked from there


@dataclass(frozen=True)
class ModelConfig:
    """The policy to start from."""

    path: str = "package:almanac"  # HF folder, or package:NAME for one in minirler/assets
    dtype: str = "float32"
    preset: str = ""  # the shape that `plan` reckons with where `path` is not there, "qwen3-8b"


@dataclass(frozen=True)
class DataConfig:
    """The questions."""

    source: str = "almanac"  # "almanac" (the made-up world) or a JSONL file of prompts
    system_prompt: str = "system_almanac"  # minirler/prompts/NAME.txt, or a path


@dataclass(frozen=True)
class WorldConfig:
    """The almanac: (seed, sizes) make all of it."""

    seed: int = 1
    entities: int = 256  # entries to train on
    held_out: int = 64  # entries to evaluate on, disjoint from the former


@dataclass(frozen=True)
class SamplerConfig:
    """The sampler's memory and batch sizes."""

    kv_tokens: int = 131072  # room of the KV cache, in tokens
    kv_bytes: int = 0  # the same in bytes, as many whole blocks as fit; 0: kv_tokens counts
    block_size: int = 16  # tokens a block
    token_budget: int = 4096  # tokens a step, prefill and decode together
    max_rows: int = 256  # sequences that run at once


@dataclass(frozen=True)
class RolloutConfig:
    """How rollouts are sampled, and their limits."""

    prompts: int = 32  # prompts a step
    group: int = 8  # rollouts a prompt
    temperature: float = 1.0
    max_prompt_tokens: int = 2048
    max_tokens: int = 16384  # tokens after the prompt, sampled and forced (tool output) together
    max_tool_calls: int = 10
    tool_wait_steps: int = 8  # deterministic mode: sampler steps from a call to its result
    stop: str = ""  # text that ends a rollout where the policy has written it; empty: none
    refill: int = 0  # times that new prompts are drawn in a step, for groups without a spread


@dataclass(frozen=True)
class ToolsConfig:
    """Search, and the limits of calls."""

    backend: str = "local"  # where searches go: "local" is an SQLite FTS5 corpus
    corpus: str = ""  # path of the index; empty: the almanac's own, made in the run folder
    results: int = 10  # documents a search
    snippet_words: int = 64  # words a snippet, at most 64 (a limit of FTS5)
    deadline_s: float = 180.0  # of one call, retries included
    max_concurrent: int = 64  # calls of one tool in flight
    retries: int = 3
    id_chars: int = 8  # length of the call part of a snippet id


@dataclass(frozen=True)
class JudgeConfig:
    """Who judges, and what happens to missing verdicts."""

    backend: str = "offline"  # "offline" | "openai"
    model: str = ""
    base_url: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    ensemble: str = ""  # more models of the endpoint that vote too, with commas between
    combine: str = "mean"  # of several judges' verdicts; or "majority"
    scale: str = "graded"  # "graded": 0..2; "binary"
    criteria_per_call: int = 1  # of one answer; 0: all
    max_concurrent: int = 256
    deadline_s: float = 600.0
    retries: int = 2  # of an unreadable reply
    max_tokens: int = 2048
    max_missing: float = 0.3  # share of missing verdicts above which a rollout is unscored
    min_scored: int = 2  # scored rollouts below which a group is dropped


@dataclass(frozen=True)
class RubricsConfig:
    """The rubric buffer, and how criteria are made."""

    evolve: bool = True
    evolve_every: int = 1  # steps between generations of evolving rubrics
    score_new: str = "same_step"  # new criteria score the rollouts they came from, or "next_visit"
    max_active: int = 5
    max_new: int = 5  # criteria accepted from one generation
    history: int = 64  # retired criteria remembered a prompt
    cooldown: int = 4  # visits after which a retired criterion may be proposed again
    persistent: int = 4  # persistent criteria made by search where the data set has none
    persistent_searches: int = 2
    generator_model: str = ""  # empty: the judge's
    max_rollout_chars: int = 24000  # of each rollout, or of all documents, shown to the generator


@dataclass(frozen=True)
class RewardConfig:
    """Weights of the components of the reward, and what the first of them is."""

    rule: str = "rler"  # weighted sum of verdicts over the positive weights; "mean": of verdicts
    rubric: float = 0.5
    citation: float = 0.2
    format: float = 0.2
    search: float = 0.1


@dataclass(frozen=True)
class AlgoConfig:
    """Advantages and loss (GRPO)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: str = "token"  # "sequence": of a whole rollout, a product; "gspo": its geometric mean
    denominator: str = "tokens"  # trained ones; "max_tokens": rollouts x rollout.max_tokens, fixed
    truncate: float = 0.0  # importance weights are cut here instead of clipped; 0: clipped
    kl: str = "k3"  # estimate of the KL divergence from the reference, in the loss
    kl_in: str = "loss"  # "reward": k1, taken off the reward of each rollout
    beta: float = 0.0  # weight of the KL divergence
    reference: str = "first"  # the first policy of the run; "step": that of the step's start
    mask_overlong: bool = False  # rollouts cut at rollout.max_tokens are not trained on
    normalize: str = "std"  # of the population; "std1": of a sample; "none"
    flat_groups: str = "drop"  # out of the loss and its denominator; "keep": counted, KL acts


@dataclass(frozen=True)
class TrainConfig:
    """The optimiser and the rhythm of checkpoints."""

    steps: int = 100
    mini_batches: int = 1  # optimiser steps that the groups of a step are cut into
    epochs: int = 1  # times that they are trained on
    lr: float = 5e-7
    warmup_steps: int = 0
    schedule: str = "constant"  # of the learning rate; "linear" and "cosine" fall to 0 at `steps`
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 18432  # tokens of one packed micro-batch; holds the longest rollout
    logits_chunk: int = 1024  # tokens whose logits exist at once
    deterministic: bool = False
    checkpoint_activations: bool = False  # keep a layer's input alone: less memory, a third slower
    checkpoint_every: int = 50
    keep_checkpoints: int = 3


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters instead of all weights, in one process."""

    rank: int = 0  # 0: all weights are trained
    alpha: float = 32.0  # what is added is scaled by alpha / rank
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True)
class DistConfig:
    """Several ranks (torchrun): how the policy is split over them."""

    replicas: int = 1  # of the sharded policy; as many as there are nodes keeps gathers within one
    offload: bool = False  # masters and moments in the host's memory, for CUDA


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation during the run."""

    every: int = 10  # steps between held-out evaluations; 0: only before and after
    prompts: int = 64
    temperature: float = 0.6  # as in DR Tulu's evaluations


@dataclass(frozen=True)
class MonitorConfig:
    """Alarms of `monitor`. They are always told; ending the run is a choice."""

    stop: bool = False  # an alarm that lasts ends the run, after a checkpoint
    patience: int = 3  # steps in a row that it has to last


@dataclass(frozen=True)
class SFTConfig:
    """The cold start: its optimiser and the size of the model that it makes."""

    steps: int = 3000
    batch: int = 8  # trajectories a step
    lr: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    init: str = ""  # a model (and its tokenizer) to start from; empty: random weights
    out: str = "runs/almanac-sft/model"
    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384


@dataclass(frozen=True)
class Config:
    """All sections."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    rubrics: RubricsConfig = field(default_factory=RubricsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)


# Limits of single settings, both ends included. No number here may be negative anyway.
LEAST = {
    "world.entities": 1, "world.held_out": 1, "sampler.kv_tokens": 1, "sampler.block_size": 1,
    "sampler.token_budget": 1, "sampler.max_rows": 1, "rollout.prompts": 1, "rollout.group": 2,
    "rollout.max_prompt_tokens": 1, "rollout.max_tokens": 1, "rollout.tool_wait_steps": 1,
    "tools.results": 1, "tools.snippet_words": 1, "tools.max_concurrent": 1, "tools.id_chars": 2,
    "judge.max_concurrent": 1, "judge.max_tokens": 1, "judge.min_scored": 1,
    "rubrics.evolve_every": 1, "rubrics.max_new": 1, "rubrics.max_rollout_chars": 1,
    "train.steps": 0, "train.mini_batches": 1, "train.epochs": 1, "train.micro_batch_tokens": 1,
    "train.logits_chunk": 1, "train.checkpoint_every": 1, "train.keep_checkpoints": 1,
    "dist.replicas": 1, "eval.prompts": 1, "monitor.patience": 1, "sft.steps": 1, "sft.batch": 1,
    "sft.vocab_size": 282, "sft.hidden_size": 1, "sft.num_layers": 1, "sft.num_heads": 1,
    "sft.num_kv_heads": 1, "sft.head_dim": 2, "sft.intermediate_size": 1,
}  # fmt: skip
MOST = {"tools.snippet_words": 64, "tools.id_chars": 16, "judge.max_missing": 1.0,
        "algo.clip_low": 1.0}  # fmt: skip
POSITIVE = ("rollout.temperature", "tools.deadline_s", "judge.deadline_s", "train.lr",
            "train.max_grad_norm", "sft.lr")  # fmt: skip
# Settings of other systems that there are not, and why.
REFUSED = dict.fromkeys(
    ("rollout.top_p", "rollout.top_k", "rollout.min_p"),
    "training samples from the full softmax: a filter would make the recorded log-probs those of "
    "another policy; lower rollout.temperature instead",
)
CHOICES = {
    "run.services": ("record", "replay", "live"),
    "model.dtype": ("float32", "bfloat16"),
    "tools.backend": ("local",),
    "judge.backend": ("offline", "openai"),
    "judge.scale": ("graded", "binary"),
    "judge.combine": ("mean", "majority"),
    "rubrics.score_new": ("same_step", "next_visit"),
    "reward.rule": ("rler", "mean"),
    "train.schedule": ("constant", "linear", "cosine"),
    "algo.ratio": ("token", "sequence", "gspo"),
    "algo.denominator": ("tokens", "max_tokens"),
    "algo.kl": ("k1", "k2", "k3"),
    "algo.kl_in": ("loss", "reward"),
    "algo.reference": ("first", "step"),
    "algo.normalize": ("std", "std1", "none"),
    "algo.flat_groups": ("drop", "keep"),
}
