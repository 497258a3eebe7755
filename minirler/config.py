"""Configuration: defaults in `settings`, differences in a TOML file, then key=value overrides.

    python -m minirler.train configs/almanac.toml train.steps=10 run.dir=runs/short

Not here: anything that reads a key. An unknown key, a wrong type or a value out of range is a
`ConfigError` of one line that names the key and the fix.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
from pathlib import Path

from . import settings as known
from .settings import (
    AlgoConfig,
    Config,
    DataConfig,
    DistConfig,
    EvalConfig,
    JudgeConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RubricsConfig,
    RunConfig,
    SamplerConfig,
    SFTConfig,
    ToolsConfig,
    TrainConfig,
    WorldConfig,
)

__all__ = [
    "AlgoConfig", "Config", "ConfigError", "DataConfig", "DistConfig", "EvalConfig", "JudgeConfig",
    "LoraConfig",
    "ModelConfig", "RewardConfig", "RolloutConfig", "RubricsConfig", "RunConfig", "SFTConfig",
    "SamplerConfig", "ToolsConfig", "TrainConfig", "WorldConfig", "asset_path", "load_config",
    "table", "to_toml",
]  # fmt: skip


class ConfigError(ValueError):
    """A setting is wrong; the message is one line that names the key and the fix."""


LARGEST = 2**63 - 1  # of TOML, and of torch
USAGE = "usage: [CONFIG.toml] section.key=value ..."


def load_config(argv: list[str], default: Path | None = None) -> Config:
    """The configuration of a command line: an optional TOML file, then `section.key=value` items.

    Without a file `default` is read (None: the defaults of the dataclasses). Numbers may be spelled
    in any way that Python reads (`1e-6`, `"1e-6"`, `1_000`), and a whole number also as `1e3`.
    Raises ConfigError.
    """
    overrides = list(argv)
    if overrides and not re.match(r"[\w.-]+=", overrides[0]) and not overrides[0].startswith("-"):
        default = Path(overrides.pop(0))
    settings = read_toml(default) if default is not None else {}
    seen = set()
    for item in overrides:
        name, equals, value = item.partition("=")
        if not equals or name.startswith("-"):
            raise ConfigError(f"{item!r} is no setting; {USAGE}")
        if name in seen:
            raise ConfigError(f"{name} is given twice on the command line; keep one")
        seen.add(name)
        settings[name] = coerce(name, value, "the command line")
    return check(build(settings))


def read_toml(path: Path) -> dict:
    """The settings of a TOML file, as {"section.key": value}, each known and of the right type."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}{nearby(Path(path))}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # of TOML or of UTF-8
        raise ConfigError(f"{path} is not TOML: {' '.join(str(error).split())}") from None
    settings = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}] in {path}{nearest(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {path} is a section: write [{section}], keys below it")
        for key, value in table.items():
            settings[f"{section}.{key}"] = coerce(f"{section}.{key}", value, path)
    return settings


def build(settings: dict) -> Config:
    """The Config with these {"section.key": value} settings in place of the defaults."""
    values = {section: {} for section in SECTIONS}
    for name, value in settings.items():
        section, key = name.split(".")
        values[section][key] = value
    return Config(**{section: SECTIONS[section](**kw) for section, kw in values.items()})


def coerce(name: str, value, where):
    """`value` (of TOML, or text of the command line) as the type that the key `name` has."""
    if name in known.REFUSED:
        raise ConfigError(f"{name} in {where}: {known.REFUSED[name]}")
    if name not in TYPES:
        raise ConfigError(f"unknown key {name!r} in {where}{nearest(name, TYPES)}")
    kind = TYPES[name]
    try:
        return READERS[kind](value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} in {where} must be {READS[kind]}, not {value!r}") from None


def as_bool(value) -> bool:
    """True or False; of texts only "true" and "false"."""
    if value is True or value is False:
        return value
    if value not in ("true", "false"):
        raise ValueError(value)
    return value == "true"


def as_float(value) -> float:
    """A finite float, from a number or its text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(value)
    if not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def as_int(value) -> int:
    """An int, from a whole number in any spelling; large ones do not pass through a float."""
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass  # "1e3" is whole, though int() does not read it
    if not as_float(value).is_integer():
        raise ValueError(value)
    return int(as_float(value))


def as_str(value) -> str:
    """Text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(value)
    return value.encode().decode()  # a lone surrogate (undecodable argument) raises


def check(config: Config) -> Config:
    """`config` itself if every value is in range; raises ConfigError with both numbers."""
    for name, value in flatten(config).items():
        if name in known.CHOICES and value not in known.CHOICES[name]:
            raise ConfigError(f"{name} = {value!r}: choose one of {', '.join(known.CHOICES[name])}")
        if isinstance(value, str):
            continue
        if value < known.LEAST.get(name, 0):
            raise ConfigError(f"{name} = {value}: must be at least {known.LEAST.get(name, 0)}")
        if value > known.MOST.get(name, LARGEST):
            raise ConfigError(f"{name} = {value}: must be at most {known.MOST.get(name, LARGEST)}")
        if name in known.POSITIVE and value <= 0:
            raise ConfigError(f"{name} = {value}: must be above 0")
    check_pairs(config)
    return config


def check_pairs(c: Config) -> None:
    """What two settings must have between them."""
    longest = c.rollout.max_prompt_tokens + c.rollout.max_tokens
    whole = f"rollout.max_prompt_tokens + rollout.max_tokens = {longest}"
    for room in ("train.micro_batch_tokens", "sampler.kv_tokens"):
        if flatten(c)[room] < longest and not (room == "sampler.kv_tokens" and c.sampler.kv_bytes):
            raise ConfigError(f"{room} = {flatten(c)[room]}: must be at least {whole}")
    if c.judge.min_scored > c.rollout.group:
        raise ConfigError(f"judge.min_scored = {c.judge.min_scored}: must be at most "
                          f"rollout.group = {c.rollout.group}")
    if c.data.source == "almanac" and c.rollout.prompts > c.world.entities:
        raise ConfigError(f"rollout.prompts = {c.rollout.prompts}: must be at most "
                          f"world.entities = {c.world.entities}, or prompts repeat in a step")
    if c.sft.num_heads % c.sft.num_kv_heads:
        raise ConfigError(f"sft.num_heads = {c.sft.num_heads}: must be a multiple of "
                          f"sft.num_kv_heads = {c.sft.num_kv_heads}")
    if not any(x for x in dataclasses.astuple(c.reward) if isinstance(x, float)):
        raise ConfigError("every weight of [reward] is 0: nothing to learn from")
    if c.judge.backend == "openai" and not c.judge.model:
        raise ConfigError("judge.model is empty: name the model that judge.backend = 'openai' asks")
    if not re.fullmatch(r"[A-Za-z_]\w*", c.judge.api_key_env):  # not echoed: it may be the key
        raise ConfigError("judge.api_key_env must be the name of an environment variable that "
                          "holds the key, never the key")


def nearest(name: str, known) -> str:
    """A hint for a mistyped name: the same key of another section, else the closest spelling."""
    tail = name.rpartition(".")[2]
    same = [k for k in known if "." in name and k.rpartition(".")[2] == tail]
    close = same or difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(SECTIONS)}"


def nearby(path: Path) -> str:
    """A hint for a missing file: the TOML files of its folder, closest name first."""
    names = sorted(p.name for p in path.parent.glob("*.toml"))
    names.sort(key=lambda n: -difflib.SequenceMatcher(None, n, path.name).ratio())
    return f"; {path.parent} has {', '.join(names[:4])}" if names else f"; {USAGE}"


def flatten(config: Config) -> dict:
    """{"section.key": value} of every setting, in order."""
    tables = dataclasses.asdict(config)
    return {f"{s}.{key}": value for s, table in tables.items() for key, value in table.items()}


def table(config: Config) -> str:
    """Every setting, aligned, by section; `*` marks one that differs from its default (shown)."""
    defaults, lines = flatten(Config()), []
    width = max(len(name.split(".")[1]) for name in defaults)
    for name, value in flatten(config).items():
        section, key = name.split(".")
        if f"[{section}]" not in lines:
            lines.append(f"[{section}]")
        changed = "" if value == defaults[name] else f"  (default {toml_value(defaults[name])})"
        lines.append(f"{'*' if changed else ' '} {key:<{width}}  {toml_value(value)}{changed}")
    return "\n".join(lines)


def to_toml(config: Config) -> str:
    """The whole configuration as TOML; `load_config` of it gives an equal one."""
    parts = []
    for section, values in dataclasses.asdict(config).items():
        parts.append(f"[{section}]")
        parts += [f"{key} = {toml_value(value)}" for key, value in values.items()] + [""]
    return "\n".join(parts)


def toml_value(value) -> str:
    """One TOML value. JSON's escapes are TOML's, but for DEL, which TOML wants escaped too."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def asset_path(path: str) -> Path:
    """Where `package:NAME` (data shipped in minirler/assets) lies; any other path as it is."""
    if not path.startswith("package:"):
        return Path(path)
    assets = Path(__file__).parent / "assets"
    found = assets / path.removeprefix("package:")
    if not found.exists():
        names = ", ".join(sorted(p.name for p in assets.glob("[!.]*"))) or "nothing"
        raise ConfigError(f"the package ships no {path!r}; minirler/assets has {names}")
    return found


SECTIONS = {f.name: f.type for f in dataclasses.fields(Config)}
TYPES = {f"{s}.{f.name}": f.type for s, c in SECTIONS.items() for f in dataclasses.fields(c)}
READERS = {bool: as_bool, int: as_int, float: as_float, str: as_str}
READS = {bool: "true or false", int: "a whole number", float: "a finite number",
         str: "text in quotes"}  # fmt: skip
