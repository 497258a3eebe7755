"""Alarms: the paper's own numbers; for each alarm a run in which it rings, and one in which not."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_train import settings

from minirler import monitor
from minirler import train as loop
from minirler.log import MetricsLog, read_metrics
from minirler.records import Group, Prompt, Rollout
from minirler.rubrics import make_rubric
from minirler.run import open_run

RUN_30B = [0.096, 0.054, 0.195, 0.249, 0.767]  # DR-Rubric, its five bootstrap steps
RUN_14B = [0.02, 0.026, 0.062]  # 14B; the first is not given, and the third is 2.4 times 0.026
shares = st.lists(st.floats(0, 1), max_size=8)


def test_polarization_counts_nothing_and_everything():
    assert monitor.polarization([0.0, 0.99, 1.0, 0.5, 0.9899, None]) == 3 / 5
    assert monitor.polarization([]) == monitor.polarization([None]) == 0.0


def test_the_papers_30b_run_stops_at_its_third_step_by_both_rules():
    assert monitor.stop_step(RUN_30B) == monitor.stop_step(RUN_30B, "either") == 3
    assert monitor.stop_step(RUN_30B[:2]) is None
    assert monitor.stop_step(RUN_30B[3:4]) == 1  # the first has no step before it: 0.15


def test_the_papers_14b_run_stops_at_its_third_step_only_by_either():
    assert monitor.stop_step(RUN_14B) is None
    assert monitor.stop_step(RUN_14B, "either") == 3
    assert monitor.stop_step([0.0, 0.019], "either") is None  # twice nothing stops nobody


@given(shares, shares, st.sampled_from(["max", "either"]))
def test_a_stop_latches_and_either_is_never_later_than_max(first, more, rule):
    at = monitor.stop_step(first, rule)
    if at:
        assert monitor.stop_step(first + more, rule) == at
    early, late = monitor.stop_step(first, "either"), monitor.stop_step(first, "max")
    assert late is None or early <= late


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="'mean' is unknown"):
        monitor.stop_step([], "mean")


# ------------------------------------------------------------------------------ indicators


def group(verdicts, weights=None, texts=None, answers=None):
    """A group of a Latin prompt with this verdict matrix [G][C]."""
    weights = weights or [1.0] * len(verdicts[0])
    rollouts = [
        Rollout("p", k, answer=(answers or ["x"] * len(verdicts))[k], text=(texts or {}).get(k, ""))
        for k in range(len(verdicts))
    ]
    criteria = [make_rubric("p", f"criterion {i}", weight=w) for i, w in enumerate(weights)]
    prompt = Prompt("p", "Who?", ({"role": "user", "content": "Who is Belomo?"},))
    return Group(prompt, rollouts, criteria, verdicts, {"rubric": [0.0, 1.0, 0.5]})


def test_indicators_of_a_step_by_hand():
    verdicts = [[0.0, 1.0, 0.5, None, 0.0], [0.0, 1.0, 1.0, None, 0.0], [0.0, None, 1.0, 0.0, 0.0]]
    found = monitor.indicators([group(verdicts, [1, 1, 1, 1, -1])])
    # the fourth has one verdict, the fifth is negative: three criteria count
    assert found["dead"] == found["saturated"] == 1 / 3
    assert found["missing"] == 3 / 15 and found["polarization"] == 2 / 3


def test_rollouts_without_an_answer_have_no_part_in_missing_and_dead():
    found = monitor.indicators([group([[1.0], [1.0], [None]], answers=["x", "x", None])])
    assert found["missing"] == 0 and found["saturated"] == 1.0


def test_corruption_is_the_share_of_letters_in_scripts_that_the_prompt_lacks():
    texts = {0: "Belomo is \u00e9t\u00e9, 12 <b>", 1: "\u6f22\u5b57 and \u0434\u0430"}
    found = monitor.corruption([group([[1.0]] * 2, texts=texts)])
    assert found == 4 / (len("Belomo") + len("is") + 3 + 1 + 3 + 4)
    assert monitor.corruption([group([[1.0]])]) == 0.0


@given(st.lists(st.lists(st.none() | st.floats(0, 1), min_size=2, max_size=2), max_size=4))
def test_indicators_are_shares_of_anything(rows):
    found = monitor.indicators([group(rows)] if rows else [])
    assert all(0 <= value <= 1 for value in found.values())


# ------------------------------------------------------------------------------ alarms

QUIET = {"reward": 0.5, "sampled_tokens": 100, "entropy": 1.0, "grad_norm": 1.0, "loss": 0.1,
         "kl": 0.01, "flat_share": 0.1, "dead": 0.1, "saturated": 0.1, "missing": 0.0,
         "polarization": 0.05, "corruption": 0.0}  # fmt: skip
LOUD = {
    "flat": {"flat_share": 0.6}, "dead": {"dead": 0.6}, "saturated": {"saturated": 0.6},
    "length": {"sampled_tokens": 160}, "missing": {"missing": 0.2}, "entropy": {"entropy": 0.1},
    "polarized": {"polarization": 0.3}, "corruption": {"corruption": 0.05},
}  # fmt: skip


def run_of(*changes):
    return [QUIET | change for change in changes]


def test_a_quiet_run_rings_nothing_nor_does_a_short_or_an_empty_one():
    assert monitor.alarms([]) == [] == monitor.alarms([{"step": 0, "held_out/gold": 0.5}])
    for steps in range(1, 20):
        assert monitor.alarms(run_of(*[{}] * steps)) == []


@pytest.mark.parametrize("name", LOUD)
def test_an_alarm_rings_when_a_window_of_steps_is_bad_and_no_other_does(name):
    assert monitor.alarms(run_of(*[{}] * 9, LOUD[name])) == []  # a single bad step is noise
    assert monitor.alarms(run_of(*[{}] * 9, *[LOUD[name]] * 5)) == [name]


def test_shorter_reports_ring_as_longer_ones_do():
    assert monitor.alarms(run_of(*[{}] * 5, *[{"sampled_tokens": 60}] * 5)) == ["length"]


def test_a_dead_gradient_and_a_jump_of_the_kl_ring_at_once():
    dead = {"loss": 0.0, "grad_norm": 0.05}
    assert monitor.alarms(run_of(*[{}] * 6, dead)) == ["gradient"]
    assert monitor.alarms(run_of(*[{}] * 6, {"loss": 0.0})) == []
    assert monitor.alarms(run_of(*[{}] * 6, {"grad_norm": 0.05})) == []
    assert monitor.alarms(run_of(*[{}] * 6, {"kl": 0.06})) == ["kl"]
    assert monitor.alarms(run_of(*[{}] * 6, {"kl": 0.04})) == []


def test_gold_that_falls_while_the_reward_rises_rings():
    def rows(golds, rewards):
        for gold, reward in zip(golds, rewards, strict=True):
            yield {"step": 0, "held_out/gold": gold}
            yield QUIET | {"reward": reward}

    assert monitor.alarms(list(rows([0.5, 0.6, 0.5], [0.4, 0.6, 0.7]))) == ["gap"]
    assert monitor.alarms(list(rows([0.5, 0.6, 0.59], [0.4, 0.6, 0.7]))) == []
    assert monitor.alarms(list(rows([0.5, 0.6, 0.5], [0.6, 0.6, 0.7]))) == []
    assert monitor.alarms(list(rows([0.6, 0.5], [0.6, 0.7]))) == []


def test_an_alarm_lasts_when_all_of_the_last_steps_had_it():
    rows = [{"reward": 1, "alarms": a} for a in (["kl"], ["kl", "flat"], ["flat", "kl"])]
    rows.insert(2, {"step": 2, "held_out/gold": 0.5})
    assert monitor.lasting(rows, 3) == ["kl"] and monitor.lasting(rows, 2) == ["flat", "kl"]
    assert monitor.lasting(rows, 4) == monitor.lasting([], 1) == []


# ------------------------------------------------------------------------------ in the loop


def test_an_alarm_that_lasts_ends_the_run_where_that_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "alarms", lambda rows: ["kl"])
    for stop, steps in (("true", 2), ("false", 4)):
        run = open_run(settings(tmp_path / stop, f"monitor.stop={stop}", "monitor.patience=2",
                                "train.steps=4", "eval.every=9"))  # fmt: skip
        assert asyncio.run(loop.supervise(run)) == 0
        printed = capsys.readouterr().out
        assert run.step == steps and printed.count("alarm kl") == 1
        assert ("stopped (monitor.stop): kl" in printed) == (stop == "true")
        assert open_run(run.config).step == steps  # it was saved
    rows = [r for r in read_metrics(tmp_path / "false" / "metrics.jsonl") if "reward" in r]
    assert all(0 <= row["polarization"] <= 1 and row["alarms"] == ["kl"] for row in rows)


def test_a_stored_run_tells_where_its_alarms_began(tmp_path, capsys):
    log = MetricsLog(tmp_path)
    for step, row in enumerate(run_of(*[{}] * 7, *[LOUD["flat"]] * 6), 1):
        log.write({"step": step} | row)
    monitor.main(str(tmp_path))
    first, last = capsys.readouterr().out.splitlines()
    # four quiet steps and one of 0.6 have a mean of 0.2: it takes five bad ones, steps 8 to 12
    assert first.startswith("step 12: flat: ") and last.endswith("ringing at the end: flat")
