"""A run and its folder: puts the parts together, resumes, records, saves.

    RUN/config.toml         the resolved configuration
    RUN/metrics.jsonl       one line a step and one a held-out evaluation
    RUN/rollouts/           one JSONL of traces a step, one line a group
    RUN/rubrics.jsonl       births, visits and retirements of criteria
    RUN/checkpoints/        everything that resuming needs
    RUN/corpus.sqlite       the search index of the almanac
    RUN/hashes.json         of weights, buffer and traces, once the run has ended

State changes hands only at step borders: `capture` notes it there and `save` writes what was
noted. So a run that is interrupted within a step is saved as of that step's start. Of several ranks
each has a `Run` with the same state; rank 0 writes the files.

Not here: the loop (`train`), and how its parts are made (`parts`).
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from . import checkpoint, lora, parts, state
from .config import Config, ConfigError, asset_path, to_toml
from .data import PromptOrder
from .dist import Policy, open_policy, open_reference, whole
from .judge import Judge
from .linear import make_invariant_
from .lm import OpenAILM
from .log import MetricsLog, Timers
from .qwen3 import Qwen3
from .ranks import ALONE, Ranks
from .records import LM, Group, Prompt
from .rollout import RolloutEngine
from .rubrics import RubricBuffer
from .sampler import Sampler
from .search import LocalSearch
from .tokenizer import Tokenizer
from .weights import load_model
from .world import World

LOGS = ("metrics.jsonl", "rubrics.jsonl")


@dataclass
class Run:
    """The parts of a run, and how far it has come: `step` updates done, `evaluations` by step."""

    config: Config
    ranks: Ranks
    folder: Path
    tokenizer: Tokenizer
    policy: Policy
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
    log: MetricsLog | None  # of rank 0
    timers: Timers
    step: int = 0
    skips: int = 0  # steps in a row that were skipped because something was not finite
    evaluations: dict[int, dict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what went wrong in making rubrics, this step
    captured: dict = field(default_factory=dict)
    should_end: bool = False  # after this step

    @property
    def model(self) -> Qwen3:
        """What is optimised."""
        return self.policy.masters

    @property
    def rows(self) -> list[dict]:
        """The lines of metrics so far; rank 0 has them."""
        return self.log.rows if self.log else []

    def end_soon(self) -> None:
        """Save and end after this step."""
        self.should_end = True

    async def search(self, query: str) -> list:
        """A search on behalf of the rubric generator."""
        return self.corpus.search(query, self.config.tools.results)

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the order."""
        names = list(self.prompts)
        return [self.prompts[names[i]] for i in self.order.next(count)]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return parts.prompt_ids(self.config, self.tokenizer, prompt)

    def record(self, groups: list[Group], metrics: dict) -> None:
        """Write one step: its traces, rubric events (in the groups' order) and metrics."""
        place = {group.prompt.id: i for i, group in enumerate(groups)}
        events = sorted(self.buffer.drain_events(), key=lambda event: place[event["prompt_id"]])
        if not self.ranks.is_first:
            return
        path = self.folder / "rollouts" / f"step_{self.step:06d}.jsonl"
        lines = (json.dumps(trace(group), ensure_ascii=False) for group in groups)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        with open(self.folder / "rubrics.jsonl", "a", encoding="utf-8") as file:
            for event in events:
                file.write(json.dumps({"step": self.step} | event, ensure_ascii=False) + "\n")
        self.write(metrics)

    def write(self, metrics: dict) -> None:
        """Write a line of metrics."""
        if self.log:
            self.log.write({"step": self.step} | metrics)

    def capture(self) -> None:
        """Note the state at this step border; `save` writes it."""
        logs = LOGS if self.ranks.is_first else ()
        self.captured = {
            "step": self.step,
            "buffer": self.buffer.state(),
            "data": self.order.state(),
            "rng": state.rng_state(),
            "skips": self.skips,
            "logs": {name: checkpoint.log_offset(self.folder / name) for name in logs},
            "evaluations": {str(step): row for step, row in self.evaluations.items()},
        }

    def save(self) -> None:
        """Write a checkpoint of the state that `capture` noted."""
        model, optimizer, ranks = self.model, self.optimizer, self.ranks
        checkpoint.save(
            self.folder, self.captured["step"], state=self.captured,
            write_model=self._write_model,
            optimizer=state.optimizer_state(optimizer, model) if ranks.size == 1 else {},
            keep=self.config.train.keep_checkpoints, ranks=ranks,
        )  # fmt: skip

    def _write_model(self, folder: Path) -> None:
        if self.config.lora.rank:
            lora.save_adapter(self.model, folder, self.config.lora, self.config.model.path)
        else:
            state.write_model(folder, self.model, self.optimizer, self.ranks)

    async def close(self) -> None:
        """Close the connections to services."""
        for lm in (*self.judge.lms, self.generator):
            if isinstance(lm, OpenAILM):
                await lm.close()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the weights, of the rubric buffer and of all traces. A collective."""
        if self.ranks.size == 1:
            weights = hashlib.sha256(safetensors.torch.save(self.model.state_dict()))
        else:  # one parameter at a time: all of them would not fit a host that holds shards
            weights = hashlib.sha256()
            for name, parameter in self.model.named_parameters():
                weights.update(name.encode() + state.tensor_bytes(whole(parameter)))
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


def open_run(config: Config, ranks: Ranks = ALONE) -> Run:
    """Build all parts for `config`, and resume if its run folder holds a checkpoint.

    Raises ConfigError, in one line, for whatever is missing, cannot be written or does not fit.
    """
    path = asset_path(config.model.path)
    tokenizer = Tokenizer.from_path(path)
    world, prompts, held_out = parts.questions(config)
    folder = ranks.first_then_others(lambda: parts.open_folder(config, ranks))
    saved = ranks.gather(checkpoint.load_latest(folder) if ranks.is_first else None)[0]
    policy = _policy(config, path, saved.path / "model" if saved else path, ranks)
    reference = _reference(config, path, ranks)
    _prepare_(config, policy, reference, tokenizer.num_valid)
    sampler = Sampler(
        policy.copy, num_valid=tokenizer.num_valid, **dataclasses.asdict(config.sampler)
    )
    parts.check_sizes(config, sampler, tokenizer, prompts, held_out)
    corpus = ranks.first_then_others(lambda: parts.corpus(config, folder, world))
    (judges, generator), timers = parts.language_models(config, folder, ranks), Timers()
    run = Run(
        config, ranks, folder, tokenizer, policy, reference=reference,
        optimizer=torch.optim.AdamW(
            [p for p in policy.masters.parameters() if p.requires_grad], lr=config.train.lr,
            weight_decay=config.train.weight_decay,
        ),
        sampler=sampler,
        engine=parts.engine(config, sampler, tokenizer, parts.executor(config, corpus, ranks),
                            timers),
        judge=Judge(judges, config.judge), generator=generator, corpus=corpus,
        buffer=RubricBuffer(
            config.rubrics.max_active, config.judge.min_scored, config.rubrics.history,
            config.rubrics.cooldown,
        ),
        world=world, prompts={p.id: p for p in prompts}, held_out=held_out,
        order=PromptOrder(len(prompts), config.run.seed),
        log=MetricsLog(folder, saved.state["logs"]["metrics.jsonl"] if saved else 0)
        if ranks.is_first else None,
        timers=timers,
    )  # fmt: skip
    if ranks.is_first:  # last: settings that were refused must not bind a run folder
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    _restore(run, saved)
    run.capture()
    return run


def _policy(config: Config, path: Path, weights: Path, ranks: Ranks) -> Policy:
    """The policy of `weights`: all of them, or the adapters of the model in `path`."""
    if not config.lora.rank:
        masters = state.load_masters(weights, config.model.dtype, config.dist, ranks)
        return open_policy(masters, path, config.model.dtype, ranks)
    if ranks.size > 1:
        raise ConfigError(f"lora.rank = {config.lora.rank}: adapters are trained by one process")
    model = load_model(path, config.model.dtype, ranks.device)
    lora.attach_(model, config.lora, config.run.seed)
    if weights != path:
        lora.load_adapter_(model, weights)
    return Policy(model, model, model)


def _reference(config: Config, path: Path, ranks: Ranks) -> Qwen3 | None:
    """The policy that training began with, where the KL from it counts; None with adapters, which
    are taken off for it."""
    if not config.algo.beta or config.algo.reference != "first" or config.lora.rank:
        return None
    return open_reference(path, config.model.dtype, config.dist, ranks)


def _prepare_(config: Config, policy: Policy, reference: Qwen3 | None, num_valid: int) -> None:
    """Set how the models compute."""
    for layer in policy.trained.model.layers:
        layer.is_checkpointed = config.train.checkpoint_activations
    if config.train.deterministic:
        make_invariant_([m for m in (policy.copy, policy.trained, reference) if m], num_valid)


def _restore(run: Run, saved: checkpoint.Checkpoint | None) -> None:
    """Bring the run to where `saved` stands (None: the start) and drop what was written later."""
    if saved:
        run.step, noted = saved.step, saved.state
        run.buffer = RubricBuffer.from_state(noted["buffer"])
        run.order.load(noted["data"])
        run.skips = noted.get("skips", 0)
        run.evaluations = {int(step): row for step, row in noted["evaluations"].items()}
        state.read_moments_(saved.path, run.model, run.optimizer)
        state.restore_rng(noted["rng"])
    if not run.ranks.is_first:
        return
    offset = saved.state["logs"]["rubrics.jsonl"] if saved else 0
    checkpoint.truncate_log(run.folder / "rubrics.jsonl", offset)
    for path in (run.folder / "rollouts").glob("step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > run.step:
            path.unlink()
