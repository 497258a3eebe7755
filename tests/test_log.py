"""What is logged can be read by strict readers, survives a kill, and is out at once."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirler.config import ConfigError
from minirler.log import (
    Bar,
    MetricsLog,
    Timers,
    before_after,
    duration,
    read_metrics,
    step_line,
    strict,
)


def refuse(name):
    raise ValueError(f"{name} is not JSON")


def strictly(line):
    return json.loads(line, parse_constant=refuse)


def test_a_row_is_strict_json_whatever_the_numbers_are(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "kl": math.nan, "max": math.inf, "loss": 0.5, "n": np.int64(3),
               "t": torch.tensor(2.0)})
    row = strictly(log.path.read_text())
    assert row == {
        "step": 1, "kl": None, "max": None, "loss": 0.5, "n": 3, "t": 2.0, "nonfinite": 2,
    }  # fmt: skip
    assert type(row["n"]) is int


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12,
))  # fmt: skip
def test_any_values_give_strict_json_and_the_finite_ones_are_kept(value):
    clean, nonfinite = strict(value)
    text = json.dumps(clean, allow_nan=False)
    assert strictly(text) == clean
    assert nonfinite == count_nonfinite(value)
    if not nonfinite:
        assert clean == value


def count_nonfinite(value):
    if isinstance(value, list | dict):
        return sum(map(count_nonfinite, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, float) and not math.isfinite(value))


def test_nested_values_scalars_and_nan_in_them_are_counted():
    value = {"a": [np.float32(0.5), torch.tensor(math.nan), (1, np.inf)], "b": {"c": np.bool_(1)}}
    assert strict(value) == ({"a": [0.5, None, [1, None]], "b": {"c": True}}, 2)


def test_a_row_is_on_disk_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(3):
        log.write({"step": step, "text": "\ud83e é"})
        assert [r["step"] for r in read_metrics(log.path)] == list(range(step + 1))
        assert log.offset() == log.path.stat().st_size


def test_a_row_cut_short_by_a_kill_is_skipped_and_the_next_one_starts_clean(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1})
    with open(log.path, "ab") as file:
        file.write(b'{"step": 2, "re')
    assert [r["step"] for r in read_metrics(log.path)] == [1]
    again = MetricsLog(tmp_path)
    again.write({"step": 2})
    assert [r["step"] for r in read_metrics(again.path)] == [1, 2]


def test_a_resumed_log_drops_what_came_after_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1})
    offset, content = log.offset(), log.path.read_bytes()
    log.write({"step": 2})
    log.close()
    resumed = MetricsLog(tmp_path, offset)
    assert resumed.path.read_bytes() == content
    resumed.write({"step": 2, "again": True})
    assert read_metrics(resumed.path)[1]["again"] is True
    with pytest.raises(ValueError, match="metrics.jsonl"):
        MetricsLog(tmp_path, 10_000)


def test_a_damaged_line_within_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_folder_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="run.dir") as caught:
        MetricsLog(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_overlapping_blocks_of_one_name_count_once():
    now = [0.0]
    timers = Timers(clock=lambda: now[0])
    with timers("judge"):
        now[0] = 1.0
        with timers("judge"), timers("tools"):
            now[0] = 3.0
        now[0] = 4.0
    now[0] = 9.0
    with pytest.raises(KeyError), timers("judge"):
        now[0] = 9.5
        raise KeyError
    assert timers.reset() == {"judge": 4.5, "tools": 2.0}
    assert timers.reset() == {}


def test_the_console_line_has_every_number_and_leaves_out_what_is_missing():
    row = {"reward": 0.5, "reward/rubric": 0.25, "reward/search": 1.0, "reward/citation": None,
           "held_out": 0.71, "entropy": 1.25, "mismatch_kl": 2e-7, "tokens_per_s": 1234.4,
           "seconds": 10.0, "seconds/sampling": 6.0, "seconds/judge": 1.5, "seconds/update": 2.5}
    assert step_line(7, 100, row, eta_s=620.0) == (
        "step   7/100  reward 0.500 (rubric 0.25, search 1.00)  held-out 0.710  entropy 1.250  "
        "mismatch KL 2.0e-07  1,234 tokens/s  sampling 60% tools 0% judge 15% update 25%  10.0 s  "
        "ETA 10m20s"
    )
    assert step_line(1, 9, {"reward": None, "entropy": 0.0}) == "step 1/9  entropy 0.000"


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (0, 59.4, 60, 75.2, 3600, 7384)] == [
        "0s", "59s", "1m00s", "1m15s", "1h00m", "2h03m",
    ]  # fmt: skip


def test_the_closing_table_shows_before_after_and_change():
    lines = before_after({"gold": 0.5, "x": 1.0}, {"gold": 0.75}, {"gold": "coverage", "x": "x"})
    assert [line.split() for line in lines.split("\n")] == [
        ["before", "after", "change"],
        ["coverage", "0.500", "->", "0.750", "+0.250"],
        ["x", "1.000", "->", "-", "-"],
    ]
    assert len({len(line) for line in lines.split("\n")}) == 1  # aligned


def test_a_bar_is_silent_without_a_terminal(capsys):
    with Bar(8, "step 1") as bar:
        bar(3, 120)
        bar(8, 300)
    assert capsys.readouterr() == ("", "")


def test_what_is_said_is_out_at_once_though_standard_output_is_a_pipe():
    code = "from minirler.log import say; import os; say('one'); os._exit(0)"  # no flush at exit
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stdout == b"one\n"
