"""A run and its folder: puts the parts together, resumes, records, saves.

    RUN/config.toml         the resolved configuration
    RUN/metrics.jsonl       one line a step and one a held-out evaluation
    RUN/rollouts/           one JSONL of traces a step, one line a group
    RUN/rubrics.jsonl       births, visits and retirements of criteria
    RUN/checkpoints/        everything that resuming needs
    RUN/corpus.sqlite       the search index of the almanac
    RUN/hashes.json         of weights, buffer and traces, once the run has ended

State changes hands only at step borders: `capture` notes it there and `save` writes what was
noted. So a run that is interrupted within a step is saved as of that step's start.

Not here: the loop (`train`).
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from . import checkpoint
from .config import Config, ConfigError, asset_path, flatten, load_config, to_toml
from .data import PromptOrder, read_prompts, read_system_prompt
from .evolve import dataset_rubrics
from .judge import Judge
from .linear import make_invariant_
from .lm import OpenAILM
from .log import MetricsLog, Timers
from .offline import OfflineLM
from .qwen3 import Qwen3
from .recording import Cache
from .records import LM, Group, Prompt
from .rollout import RolloutEngine
from .rubrics import RubricBuffer
from .sampler import Sampler
from .search import LocalSearch, build_index
from .tokenizer import Tokenizer, stop_ids
from .tools import Executor, local_tools
from .weights import load_model, save_model
from .world import World, make_prompt, make_world

# What may differ between a run folder's settings and those it is resumed with.
MAY_CHANGE = {"run.dir", "train.steps", "train.checkpoint_every", "train.keep_checkpoints",
              "monitor.stop", "monitor.patience", "run.services"}  # fmt: skip
LOGS = ("metrics.jsonl", "rubrics.jsonl")


@dataclass
class Run:
    """The parts of a run, and how far it has come: `step` updates done, `evaluations` by step."""

    config: Config
    folder: Path
    tokenizer: Tokenizer
    model: Qwen3
    reference: Qwen3 | None
    optimizer: torch.optim.Optimizer
    sampler: Sampler
    engine: RolloutEngine
    judge: Judge
    generator: LM
    corpus: LocalSearch
    buffer: RubricBuffer
    world: World | None
    prompts: dict[str, Prompt]
    held_out: list[Prompt]
    order: PromptOrder
    log: MetricsLog
    timers: Timers
    step: int = 0
    evaluations: dict[int, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what went wrong in making rubrics, this step
    captured: dict = field(default_factory=dict)

    async def search(self, query: str) -> list:
        """A search on behalf of the rubric generator."""
        return self.corpus.search(query, self.config.tools.results)

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the order."""
        names = list(self.prompts)
        return [self.prompts[names[i]] for i in self.order.next(count)]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ConfigError for one that is too long."""
        ids = self.tokenizer.render(list(prompt.messages), add_generation_prompt=True)
        limit = self.config.rollout.max_prompt_tokens
        if len(ids) > limit:
            raise ConfigError(
                f"prompt {prompt.id!r} has {len(ids)} tokens but rollout.max_prompt_tokens is"
                f" {limit}: raise that, or shorten the prompt"
            )
        return ids

    def record(self, groups: list[Group], metrics: dict) -> None:
        """Write one step: its traces, rubric events and metrics."""
        path = self.folder / "rollouts" / f"step_{self.step:06d}.jsonl"
        lines = (json.dumps(trace(group), ensure_ascii=False) for group in groups)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        with open(self.folder / "rubrics.jsonl", "a", encoding="utf-8") as file:
            for event in self.buffer.drain_events():
                file.write(json.dumps({"step": self.step} | event, ensure_ascii=False) + "\n")
        self.log.write({"step": self.step} | metrics)

    def capture(self) -> None:
        """Note the state at this step border; `save` writes it."""
        self.captured = {
            "step": self.step,
            "buffer": self.buffer.state(),
            "data": self.order.state(),
            "rng": checkpoint.rng_state(),
            "logs": {name: checkpoint.log_offset(self.folder / name) for name in LOGS},
            "evaluations": {str(step): row for step, row in self.evaluations.items()},
        }

    def save(self) -> None:
        """Write a checkpoint of the state that `capture` noted."""
        checkpoint.save(
            self.folder, self.captured["step"], state=self.captured,
            write_model=lambda folder: save_model(self.model, folder),
            optimizer=checkpoint.optimizer_state(self.optimizer, self.model),
            keep=self.config.train.keep_checkpoints,
        )  # fmt: skip

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the weights, of the rubric buffer and of all traces."""
        weights = hashlib.sha256(safetensors.torch.save(self.model.state_dict()))
        traces = hashlib.sha256()
        for path in sorted((self.folder / "rollouts").iterdir()):
            traces.update(path.read_bytes())
        buffer = hashlib.sha256(json.dumps(self.buffer.state(), sort_keys=True).encode())
        parts = {"weights": weights, "buffer": buffer, "traces": traces}
        return {name: part.hexdigest() for name, part in parts.items()}


def trace(group: Group) -> dict:
    """A group as JSON: enough to judge it again or to look at it. No times, so that it replays."""
    return {
        "prompt": dataclasses.asdict(group.prompt),
        "criteria": [dataclasses.asdict(c) for c in group.criteria],
        "verdicts": group.verdicts,
        "components": group.components,
        "rewards": group.rewards,
        "rollouts": [
            dataclasses.asdict(r)
            | {"calls": [(dataclasses.asdict(c), _timeless(result)) for c, result in r.calls]}
            for r in group.rollouts
        ],
    }


def _timeless(result) -> dict:
    return {k: v for k, v in dataclasses.asdict(result).items() if k != "seconds"}


def open_run(config: Config) -> Run:
    """Build all parts for `config`, and resume if its run folder holds a checkpoint.

    Raises ConfigError, in one line, for whatever is missing, cannot be written or does not fit.
    """
    path = asset_path(config.model.path)
    tokenizer = Tokenizer.from_path(path)
    world, prompts, held_out = _questions(config)
    folder = _open_folder(config)
    saved = checkpoint.load_latest(folder)
    model = load_model(saved.path / "model" if saved else path, config.model.dtype)
    is_pulled_back = config.algo.beta and config.algo.reference == "first"
    reference = load_model(path, config.model.dtype) if is_pulled_back else None
    if config.train.deterministic:
        make_invariant_([model, reference] if reference else [model], tokenizer.num_valid)
    _check_sizes(config, model, len(prompts))
    sampler_settings = dataclasses.asdict(config.sampler)
    sampler = Sampler(model, num_valid=tokenizer.num_valid, **sampler_settings)
    corpus, timers = _corpus(config, folder, world), Timers()
    judge_lm, generator = _language_models(config, folder)
    run = Run(
        config, folder, tokenizer, model,
        reference=reference,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=config.train.lr, weight_decay=config.train.weight_decay
        ),
        sampler=sampler,
        engine=RolloutEngine(
            sampler, tokenizer, _executor(config, corpus), timers=timers,
            max_tokens=config.rollout.max_tokens, max_tool_calls=config.rollout.max_tool_calls,
            stop_ids=stop_ids(path, tokenizer), stop=(config.rollout.stop,),
            deterministic=config.train.deterministic,
            tool_wait_steps=config.rollout.tool_wait_steps,
        ),
        judge=Judge(judge_lm, config.judge), generator=generator, corpus=corpus,
        buffer=RubricBuffer(
            config.rubrics.max_active, config.judge.min_scored, config.rubrics.history,
            config.rubrics.cooldown,
        ),
        world=world, prompts={p.id: p for p in prompts}, held_out=held_out,
        order=PromptOrder(len(prompts), config.run.seed),
        log=MetricsLog(folder, saved.state["logs"]["metrics.jsonl"] if saved else 0), timers=timers,
    )  # fmt: skip
    for prompt in [*prompts, *held_out]:
        run.prompt_ids(prompt)
    _restore(run, saved)
    run.capture()
    return run


def _restore(run: Run, saved: checkpoint.Checkpoint | None) -> None:
    """Bring the run to where `saved` stands (None: the start) and drop what was written later."""
    if saved:
        run.step, state = saved.step, saved.state
        run.buffer = RubricBuffer.from_state(state["buffer"])
        run.order.load(state["data"])
        run.evaluations = {int(step): row for step, row in state["evaluations"].items()}
        checkpoint.load_optimizer(run.optimizer, run.model, saved.optimizer)
        checkpoint.restore_rng(state["rng"])
    offset = saved.state["logs"]["rubrics.jsonl"] if saved else 0
    checkpoint.truncate_log(run.folder / "rubrics.jsonl", offset)
    for path in (run.folder / "rollouts").glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > run.step:
            path.unlink()


def _open_folder(config: Config) -> Path:
    """Make the run folder, or check that the one there was made with the same settings."""
    folder = Path(config.run.dir)
    if (folder / "config.toml").exists():
        before, now = flatten(load_config([str(folder / "config.toml")])), flatten(config)
        changed = [k for k in now if now[k] != before[k] and k not in MAY_CHANGE]
        if changed:
            what = ", ".join(f"{k} {before[k]!r} -> {now[k]!r}" for k in changed)
            raise ConfigError(
                f"{folder} was made with other settings ({what}): set another run.dir"
            )
    try:
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r} cannot be written ({error.strerror}): set another one"
        ) from error
    return folder


def _questions(config: Config) -> tuple[World | None, list[Prompt], list[Prompt]]:
    """(world, prompts to train on, prompts to evaluate on)."""
    system = read_system_prompt(config.data.system_prompt)
    if config.data.source != "almanac":
        prompts = read_prompts(config.data.source, system)
        for prompt in prompts:
            dataset_rubrics(prompt)  # malformed rubrics are told at the start, not in mid-run
        return None, prompts, []
    world = make_world(config.world.seed, config.world.entities, config.world.held_out)
    held_out = [make_prompt(name, system) for name in world.held_out[: config.eval.prompts]]
    return world, [make_prompt(name, system) for name in world.train], held_out


def _corpus(config: Config, folder: Path, world: World | None) -> LocalSearch:
    """The search index: the one named, or the almanac's own, made in the run folder."""
    path = Path(config.tools.corpus or folder / "corpus.sqlite")
    if not config.tools.corpus:
        if world is None:
            raise ConfigError(
                "tools.corpus is empty: name an index, made by `python -m minirler.search index`"
            )
        if not path.exists():
            build_index(path, world.documents, progress=False)
    return LocalSearch(path, config.tools.snippet_words)


def _executor(config: Config, corpus: LocalSearch) -> Executor:
    tools = config.tools
    return Executor(
        local_tools(corpus, tools.results), max_concurrent=tools.max_concurrent,
        deadline_s=tools.deadline_s, retries=tools.retries, id_chars=tools.id_chars,
        seed=config.run.seed,
    )  # fmt: skip


def _language_models(config: Config, folder: Path) -> tuple[LM, LM]:
    """(judge, rubric generator)."""
    judge = config.judge
    if judge.backend == "offline":
        return OfflineLM(), OfflineLM()
    cache = Cache(folder / "services.sqlite", config.run.services)
    lm = OpenAILM(judge.model, judge.base_url, judge.api_key_env, judge.max_concurrent,
                  judge.deadline_s, cache=cache)  # fmt: skip
    return lm, lm.with_model(name) if (name := config.rubrics.generator_model) else lm


def _check_sizes(config: Config, model: Qwen3, num_prompts: int) -> None:
    rollout, context = config.rollout, model.config.max_position_embeddings
    if rollout.max_prompt_tokens + rollout.max_tokens > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_tokens = {rollout.max_prompt_tokens} +"
            f" {rollout.max_tokens} is more than the model's context of {context}: lower one"
        )
    if rollout.prompts > num_prompts:
        raise ConfigError(
            f"rollout.prompts = {rollout.prompts}, but there are {num_prompts} prompts: lower it"
        )
