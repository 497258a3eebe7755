"""Settings are strict, errors are one line with the fix, and what is saved reads back the same."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirler import settings
from minirler.config import (
    TYPES,
    Config,
    ConfigError,
    asset_path,
    build,
    check,
    flatten,
    load_config,
    table,
    to_toml,
)


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, "utf-8")
    return str(path)


def error(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_in_range_and_need_no_file():
    assert load_config([]) == Config()


def test_limits_and_choices_name_settings_that_exist():
    for names in (settings.LEAST, settings.MOST, settings.POSITIVE, settings.CHOICES):
        assert set(names) <= set(TYPES)


def test_command_line_goes_over_file_over_default(tmp_path):
    path = write(tmp_path, "[train]\nlr = 1e-3\nsteps = 7\n")
    config = load_config([path, "train.steps=9"])
    assert (config.train.lr, config.train.steps) == (1e-3, 9)
    assert config.train.warmup_steps == Config().train.warmup_steps
    assert load_config(["train.steps=3"], path).train == dataclasses.replace(
        Config().train, lr=1e-3, steps=3
    )
    assert load_config([write(tmp_path, "")], "absent.toml") == Config()


@pytest.mark.parametrize("spelling", ["1e-6", '"1e-6"', "0.000001", '"0.000_001"', "1E-6"])
def test_a_float_reads_the_same_in_any_spelling(tmp_path, spelling):
    assert load_config([write(tmp_path, f"[train]\nlr = {spelling}\n")]).train.lr == 1e-6
    assert load_config([f"train.lr={spelling.strip(chr(34))}"]).train.lr == 1e-6


def test_a_float_setting_takes_a_whole_number_and_stays_a_float(tmp_path):
    value = load_config([write(tmp_path, "[train]\nweight_decay = 1\n")]).train.weight_decay
    assert value == 1.0 and type(value) is float


def test_an_int_setting_takes_whole_numbers_only():
    assert load_config(["train.steps=1e3"]).train.steps == 1000
    assert type(load_config(["train.steps=1e3"]).train.steps) is int
    big = 2**53 + 1  # not a float
    assert load_config([f"run.seed={big}"]).run.seed == big
    for text in ("1.5", "nan", "inf", "true", "", "ten"):
        assert "train.steps" in error([f"train.steps={text}"])


def test_a_bool_reads_true_and_false_only(tmp_path):
    assert load_config(["rubrics.evolve=false"]).rubrics.evolve is False
    assert load_config(["train.deterministic=true"]).train.deterministic is True
    for text in ("True", "1", "0", "yes", "no", ""):
        assert "true or false" in error([f"rubrics.evolve={text}"])
    assert "rubrics.evolve" in error([write(tmp_path, "[rubrics]\nevolve = 1\n")])


def test_types_do_not_mix(tmp_path):
    for line in ("run.dir = 3", "run.dir = true", "train.lr = true", "train.lr = [1]",
                 "train.lr = inf", "train.steps = {a = 1}", "train.lr = 1979-05-27"):
        message = error([write(tmp_path, line)])
        assert line.split(" ")[0] in message and "run.toml" in message


def test_an_unknown_key_is_refused_with_the_nearest_name_and_the_file(tmp_path):
    message = error([write(tmp_path, "[train]\nstpes = 3\n")])
    assert "train.stpes" in message and "train.steps" in message and "run.toml" in message
    message = error([write(tmp_path, "[trian]\nsteps = 3\n")])
    assert "[trian]" in message and "did you mean train" in message and "run.toml" in message
    assert "did you mean train.lr" in error(["rollout.lr=1"])  # right key, wrong section
    assert "did you mean train.steps" in error(["trian.steps=1"])
    assert "known: run, model" in error(["zzz=1"])
    assert "write [train]" in error([write(tmp_path, "train = 3\n")])


def test_a_key_given_twice_is_refused(tmp_path):
    assert "twice" in error(["train.lr=1", "train.lr=1"])
    assert "run.toml" in error([write(tmp_path, "[train]\nlr = 1\nlr = 2\n")])


def test_files_that_cannot_be_read_are_named(tmp_path):
    good = write(tmp_path, "")
    assert "run.toml" in error([str(tmp_path / "rum.toml")])
    assert "rum.toml" in error([str(tmp_path / "rum.toml")])
    assert str(tmp_path) in error([str(tmp_path)])  # a folder
    assert "run.toml is not TOML" in error([write(tmp_path, "[train\n")])
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "run.toml is not TOML" in error([good])
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")  # a BOM is harmless
    assert load_config([good]).train.steps == 3


def test_what_is_no_setting_says_how_to_write_one(tmp_path):
    for argv in (["--help"], ["--train.steps=3"], ["train.steps=3", "a.toml"], ["train.lr=1", ""]):
        assert "section.key=value" in error(argv)


@pytest.mark.parametrize(("argument", "numbers"), [
    ("rollout.group=0", ("rollout.group = 0", "2")),
    ("rollout.group=1", ("rollout.group = 1", "2")),
    ("train.lr=0", ("train.lr = 0.0", "above 0")),
    ("train.lr=-1e-6", ("train.lr = -1e-06", "0")),
    ("rollout.temperature=0", ("rollout.temperature = 0.0", "above 0")),
    ("tools.snippet_words=0", ("0", "1")),
    ("tools.snippet_words=65", ("65", "64")),
    ("tools.max_concurrent=0", ("0", "1")),
    ("tools.max_concurrent=-3", ("-3", "1")),
    ("judge.max_concurrent=0", ("0", "1")),
    ("judge.max_missing=1.5", ("1.5", "1.0")),
    ("judge.min_scored=9", ("9", "rollout.group = 8")),
    ("train.micro_batch_tokens=100", ("100", "18432")),
    ("rollout.max_tokens=20000", ("18432", "22048")),
    ("sampler.kv_tokens=64", ("64", "18432")),
    ("rollout.prompts=300", ("300", "256")),
    ("sft.num_kv_heads=3", ("4", "3")),
    (f"run.seed={2**63}", (str(2**63), str(2**63 - 1))),
])  # fmt: skip
def test_a_value_out_of_range_is_refused_with_both_numbers(argument, numbers):
    message = error([argument])
    assert argument.split("=")[0].split(".")[1] in message or "micro_batch" in message
    assert all(number in message for number in numbers), message


def test_a_group_may_be_of_any_size_from_two_and_need_not_divide_anything():
    # Prompts and rollouts a prompt are set apart, so that there is no remainder to refuse, and
    # advantages are computed before micro-batches are cut.
    for group in (2, 3, 7):
        assert load_config([f"rollout.group={group}"]).rollout.group == group


def test_enumerations_list_the_choices():
    for name, choices in settings.CHOICES.items():
        message = error([f"{name}=nothing"])
        assert all(choice in message for choice in choices) and name in message


def test_a_key_written_in_place_of_its_variable_is_refused_and_not_repeated():
    message = error(["judge.api_key_env=sk-abc-123"])
    assert "environment variable" in message and "sk-abc" not in message


def test_rewards_without_any_weight_are_refused():
    weights = [f"reward.{name}=0" for name in ("rubric", "citation", "format", "search")]
    assert "reward" in error(weights)


def test_a_hosted_judge_needs_a_model():
    assert "judge.model" in error(["judge.backend=openai"])
    assert load_config(["judge.backend=openai", "judge.model=m"]).judge.model == "m"


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = {bool: st.booleans(), int: st.integers(0, 2**63 - 1), str: TEXT,
          float: st.floats(allow_nan=False, allow_infinity=False)}  # fmt: skip
ANY = st.fixed_dictionaries({}, optional={name: VALUES[kind] for name, kind in TYPES.items()})


@given(ANY)
def test_toml_round_trip_is_the_identity(values):
    config = build(values)
    tables = tomllib.loads(to_toml(config))
    assert tables == dataclasses.asdict(config)
    assert [type(v) for t in tables.values() for v in t.values()] == list(TYPES.values())


def test_a_saved_configuration_loads_as_an_equal_one(tmp_path):
    config = load_config(["train.lr=1e-7", 'run.dir=a "b"\\c\n\x7f é', "rollout.group=3"])
    assert load_config([write(tmp_path, to_toml(config))]) == config


@given(st.text(), st.text())
def test_any_command_line_is_read_or_refused_in_one_line(name, value):
    for argument in (f"{name}={value}", f"train.lr={value}", f"train.steps={value}",
                     f"run.dir={value}", f"rubrics.evolve={value}"):
        try:
            load_config(["train.keep_checkpoints=2", argument])
        except ConfigError as caught:
            assert "\n" not in str(caught)


def test_the_table_shows_every_setting_and_marks_what_differs():
    lines = table(load_config(["train.lr=1e-4"])).split("\n")
    keys = [line for line in lines if not line.startswith("[")]
    assert len(keys) == len(flatten(Config()))
    assert [line for line in keys if line.startswith("*")] == [
        line for line in keys if "0.0001" in line and "(default 5e-07)" in line
    ]
    assert len({line.index(line.split()[-1]) for line in keys if line[0] == " "}) == 1  # aligned


def test_the_configuration_for_a_model_of_ones_own_asks_for_what_it_needs():
    with pytest.raises(ConfigError, match="^judge.model is empty"):
        load_config(["configs/research.toml"])
    config = load_config(["configs/research.toml", "judge.model=m"])
    assert config.judge.backend == "openai" and config.train.lr == settings.TrainConfig().lr
    assert config.rollout == settings.RolloutConfig() and config.tools == settings.ToolsConfig()


def test_a_plain_path_is_no_asset_and_a_missing_asset_is_named():
    assert asset_path("runs/x").as_posix() == "runs/x"
    assert "package:nothing" in str(pytest.raises(ConfigError, asset_path, "package:nothing").value)


def test_check_returns_what_it_was_given():
    assert check(Config()) == Config()
