"""Cold start: supervised training of the small Qwen3 policy on the lazy teacher's trajectories.

    python -m minirler.sft configs/almanac-sft.toml

makes a folder (weights, config, its own BPE, the loss of every step) that `model.path` can name.
The one shipped in `minirler/assets/almanac` was made by just that command. Tool output is masked:
the loss is the mean negative log-likelihood of the teacher's own tokens (DR Tulu's cold start).

Not here: resuming. It takes minutes; an interrupted one leaves what was saved, every 100 steps.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch

from .config import Config, asset_path, load_config, table
from .data import read_system_prompt
from .log import duration, say
from .pack import pack
from .policy import batch_logps, set_lr_
from .qwen3 import Qwen3, Qwen3Config
from .records import Rollout, Segment
from .search import LocalSearch
from .tokenizer import Tokenizer, train_bpe
from .weights import load_model, save_model
from .world import (
    SYLLABLES,
    World,
    make_prompt,
    make_world,
    rename,
    split_names,
    syllable_text,
    teacher_trajectory,
)

DEFAULT = Path(__file__).parents[1] / "configs" / "almanac-sft.toml"
TELL_EVERY_S = 5.0  # a line about the training
CHATML = ("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n")


def train(config: Config, stop_after: int | None = None) -> list[float]:
    """Train and save to `config.sft.out`; return the loss of each step.

    `stop_after` ends early without changing the schedule.
    """
    torch.manual_seed(config.run.seed)
    world = make_world(config.world.seed, config.world.entities, config.world.held_out)
    teacher = Teacher(config, world)
    if config.sft.init:
        path = asset_path(config.sft.init)
        tokenizer, model = Tokenizer.from_path(path), load_model(path)
    else:
        tokenizer = make_tokenizer(teacher, config)
        model = Qwen3(_model_config(config, tokenizer))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.sft.lr,
        betas=(0.9, 0.95),
        weight_decay=config.sft.weight_decay,
    )
    losses, started, told = [], time.monotonic(), -TELL_EVERY_S
    for step in range(min(config.sft.steps, stop_after or config.sft.steps)):
        schedule = "cosine", step, config.sft.steps, config.sft.warmup_steps
        set_lr_(optimizer, config.sft.lr, *schedule)
        losses.append(train_step(model, optimizer, teacher.batch(tokenizer, step), config))
        seconds = time.monotonic() - started
        if seconds - told > TELL_EVERY_S or step + 1 == config.sft.steps:
            told, left = seconds, seconds / (step + 1) * (config.sft.steps - step - 1)
            say(f"sft {step + 1}/{config.sft.steps}  loss {losses[-1]:.4f}  {seconds:.0f} s"
                f"  ETA {duration(left)}")  # fmt: skip
        if (step + 1) % 100 == 0 or step + 1 == config.sft.steps:
            save(config.sft.out, model, tokenizer, losses)
    return losses


def train_step(model: Qwen3, optimizer, rollouts: list[Rollout], config: Config) -> float:
    """One optimiser step on the mean NLL of the sampled tokens of `rollouts`."""
    batches = pack(rollouts, [1.0] * len(rollouts), config.train.micro_batch_tokens)
    denominator = sum(int(b.mask.sum()) for b in batches)
    total = 0.0
    for batch in batches:
        settings = config.train.logits_chunk, config.train.deterministic
        logps, _ = batch_logps(model, batch, 1.0, None, *settings)  # [N]
        loss = -(logps * batch.mask).sum() / denominator
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


class Teacher:
    """The lazy teacher at work in a world: batches of trajectories, each a function of (seed,
    step)."""

    def __init__(self, config: Config, world: World):
        self.config, self.names = config, world.train
        self.search = LocalSearch.from_documents(world.documents, config.tools.snippet_words)
        self.system = read_system_prompt(config.data.system_prompt)

    def pieces(self, step: int, index: int) -> tuple[str, list[tuple[str, bool]]]:
        """(entry, trajectory), whose names are new in each: one that comes back is remembered,
        not copied."""
        cfg = self.config
        rng = random.Random(f"{cfg.run.seed} {step} {index}")
        name = rng.choice(self.names)
        pieces = teacher_trajectory(
            name, self.search.search, rng, results=cfg.tools.results,
            max_calls=cfg.rollout.max_tool_calls, id_chars=cfg.tools.id_chars,
        )  # fmt: skip
        table = dict(zip(SYLLABLES, rng.sample(SYLLABLES, len(SYLLABLES)), strict=True))
        return rename(name, table), [(rename(text, table), written) for text, written in pieces]

    def batch(self, tokenizer: Tokenizer, step: int) -> list[Rollout]:
        """The trajectories of one step as rollouts: the ids that a rollout of the same text has."""
        rollouts = []
        for index in range(self.config.sft.batch):
            name, pieces = self.pieces(step, index)
            messages = make_prompt(name, self.system).messages
            rollouts.append(as_rollout(tokenizer, messages, pieces))
        return rollouts


def as_rollout(tokenizer: Tokenizer, messages, pieces: list[tuple[str, bool]]) -> Rollout:
    """Tokenise a trajectory segment by segment; the teacher's last piece ends in the stop token."""
    ids = tokenizer.render(list(messages), add_generation_prompt=True)
    segments = [Segment(ids, [0.0] * len(ids), False, 0)]
    for i, (text, sampled) in enumerate(pieces):
        ids = tokenizer.encode(text) if sampled else tokenizer.encode_untrusted(text)
        if i + 1 == len(pieces):
            ids = [*ids, tokenizer.im_end_id]
        segments.append(Segment(ids, [0.0] * len(ids), sampled, 0))
    return Rollout("", 0, segments, stop_reason="stop")


def make_tokenizer(teacher: Teacher, config: Config) -> Tokenizer:
    """A small BPE, trained on 300 trajectories of a step that is never trained on."""
    texts = [teacher.system, *CHATML]
    for index in range(300):
        name, pieces = teacher.pieces(config.sft.steps, index)
        texts += [make_prompt(name, "").question, *(text for text, _ in pieces)]
    texts = [syllable_text(), *(split_names(text) for text in texts)]
    return Tokenizer(train_bpe(texts, config.sft.vocab_size))


def save(out: str, model: Qwen3, tokenizer: Tokenizer, losses: list[float]) -> None:
    """Write weights, tokenizer and the losses so far."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    tokenizer.save(folder)
    (folder / "losses.json").write_text(json.dumps([round(x, 5) for x in losses]) + "\n")


def _model_config(config: Config, tokenizer: Tokenizer) -> Qwen3Config:
    sft = config.sft
    context = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    return Qwen3Config(
        vocab_size=tokenizer.num_valid, hidden_size=sft.hidden_size,
        intermediate_size=sft.intermediate_size, num_hidden_layers=sft.num_layers,
        num_attention_heads=sft.num_heads, num_key_value_heads=sft.num_kv_heads,
        head_dim=sft.head_dim, tie_word_embeddings=True, max_position_embeddings=context,
        rope_theta=1e5, eos_token_ids=tuple(sorted(tokenizer.eos_ids)),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Command line: `python -m minirler.sft [CONFIG] [key=value ...]`."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv, DEFAULT)
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        print(table(config), flush=True)
        train(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {config.sft.out} has what was saved last, every 100 steps")
        return 130
    print(f"saved to {config.sft.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
