"""What a run is made of, from its configuration: folder, questions, search, tools, models to ask.

Each raises ConfigError, in one line, for whatever is missing or does not fit. Not here: the policy,
and how the parts work together (`run`).
"""

from pathlib import Path

from .config import Config, ConfigError, asset_path, flatten, load_config
from .data import read_prompts, read_system_prompt
from .evolve import dataset_rubrics
from .lm import OpenAILM
from .log import Timers
from .offline import OfflineLM
from .ranks import Ranks
from .recording import Cache
from .records import LM, Prompt
from .rollout import RolloutEngine
from .sampler import Sampler
from .search import LocalSearch, build_index
from .tokenizer import Tokenizer, stop_ids
from .tools import Executor, local_tools
from .world import World, make_prompt, make_world

# What may differ between a run folder's settings and those it is resumed with.
MAY_CHANGE = {"run.dir", "train.steps", "train.checkpoint_every", "train.keep_checkpoints",
              "train.checkpoint_activations", "dist.replicas", "dist.offload", "monitor.stop",
              "monitor.patience", "run.services"}  # fmt: skip


def open_folder(config: Config, ranks: Ranks) -> Path:
    """Make the run folder, or check that the one there was made with the same settings."""
    folder = Path(config.run.dir)
    if (folder / "config.toml").exists() and (folder / "config.toml").stat().st_size:
        before, now = flatten(load_config([str(folder / "config.toml")])), flatten(config)
        changed = [k for k in now if now[k] != before[k] and k not in MAY_CHANGE]
        if changed:
            what = ", ".join(f"{k} {before[k]!r} -> {now[k]!r}" for k in changed)
            raise ConfigError(
                f"{folder} was made with other settings ({what}): set another run.dir"
            )
    if not ranks.is_first:
        return folder
    try:
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").touch()  # `open_run` writes it
    except OSError as error:
        raise ConfigError(
            f"run.dir = {config.run.dir!r} cannot be written ({error.strerror}): set another one"
        ) from error
    return folder


def questions(config: Config) -> tuple[World | None, list[Prompt], list[Prompt]]:
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


def corpus(config: Config, folder: Path, world: World | None) -> LocalSearch:
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


def executor(config: Config, corpus: LocalSearch, ranks: Ranks) -> Executor:
    """The tools, with this rank's part of the limit."""
    tools = config.tools
    return Executor(
        local_tools(corpus, tools.results), max_concurrent=ranks.limit(tools.max_concurrent),
        deadline_s=tools.deadline_s, retries=tools.retries, id_chars=tools.id_chars,
        seed=config.run.seed,
    )  # fmt: skip


def language_models(config: Config, folder: Path, ranks: Ranks) -> tuple[list[LM], LM]:
    """(judges, rubric generator), with this rank's part of the limit."""
    judge = config.judge
    if judge.backend == "offline":
        return [OfflineLM()], OfflineLM()
    name = "services.sqlite" if ranks.is_first else f"services_{ranks.rank}.sqlite"
    lm = OpenAILM(
        judge.model, judge.base_url, judge.api_key_env, ranks.limit(judge.max_concurrent),
        judge.deadline_s, cache=Cache(folder / name, config.run.services),
    )  # fmt: skip
    others = [lm.with_model(name) for x in judge.ensemble.split(",") if (name := x.strip())]
    generator = config.rubrics.generator_model
    return [lm, *others], lm.with_model(generator) if generator else lm


def engine(
    config: Config, sampler: Sampler, tokenizer: Tokenizer, tools: Executor, timers: Timers
) -> RolloutEngine:
    """What runs rollouts."""
    path, rollout = asset_path(config.model.path), config.rollout
    return RolloutEngine(
        sampler, tokenizer, tools, timers=timers, max_tokens=rollout.max_tokens,
        max_tool_calls=rollout.max_tool_calls, stop_ids=stop_ids(path, tokenizer),
        stop=(rollout.stop,), deterministic=config.train.deterministic,
        tool_wait_steps=rollout.tool_wait_steps,
    )  # fmt: skip


def prompt_ids(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises ConfigError for one that is too long."""
    ids = tokenizer.render(list(prompt.messages), add_generation_prompt=True)
    limit = config.rollout.max_prompt_tokens
    if len(ids) > limit:
        raise ConfigError(
            f"prompt {prompt.id!r} has {len(ids)} tokens but rollout.max_prompt_tokens is"
            f" {limit}: raise that, or shorten the prompt"
        )
    return ids


def check_sizes(
    config: Config, sampler: Sampler, tokenizer: Tokenizer, prompts: list[Prompt],
    held_out: list[Prompt],
) -> None:  # fmt: skip
    """Raise ConfigError for what cannot fit the model's context, the cache or the questions."""
    rollout, context = config.rollout, sampler.model.config.max_position_embeddings
    if rollout.max_prompt_tokens + rollout.max_tokens > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_tokens = {rollout.max_prompt_tokens} +"
            f" {rollout.max_tokens} is more than the model's context of {context}: lower one"
        )
    if rollout.prompts > len(prompts):
        raise ConfigError(
            f"rollout.prompts = {rollout.prompts}, but there are {len(prompts)} prompts: lower it"
        )
    sampler.room(rollout.max_prompt_tokens + rollout.max_tokens)
    for prompt in [*prompts, *held_out]:
        prompt_ids(config, tokenizer, prompt)
