"""``paceline simulate --learn``, and the papers' experiments that stand on it."""

from __future__ import annotations

import csv
import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from paceline.cli import run
from paceline.papers import experiments
from paceline.papers.dbw_training import reached, smoothed
from paceline.papers.wlbs import lasting
from paceline.simulate import Scenario, WorkerClass
from paceline.simulate import run as run_rounds
from paceline.simulate.learning import learn, server_config
from paceline.simulate.timing import Constant

SCENARIO = """
global_batch = 80
rounds = 25
[[workers]]
count = 4
seconds_per_sample = 0.0
overhead = {model = "exponential", mean = 0.7, shift = 0.3}
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "four.toml"
    path.write_text(SCENARIO.replace("0.0", "0.001"))
    return str(path)


def test_learning_reports_used_and_dropped_gradients(scenario, tmp_path, capsys):
    arguments = ["simulate", scenario, "--learn", "--backup", "static:3", "--policy", "level"]
    figures = tmp_path / "figures.json"
    assert run([*arguments, "--json", str(figures), "--plot", str(tmp_path / "pictures")]) == 0
    told = capsys.readouterr().out
    assert "25 updates" in told
    assert "75 gradients used" in told
    found = json.loads(figures.read_text())
    assert found["curves"]["quorum"] == [3] * 25
    assert found["curves"]["loss"][-1] < found["curves"]["loss"][0]
    assert (tmp_path / "pictures" / "learning.png").stat().st_size > 0


def test_learning_reports_samples_dropped_by_a_threshold(scenario, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    arguments = ["simulate", scenario, "--learn", "--backup", "dropcompute:tau=0.5,pieces=4", "--json"]
    assert run([*arguments, str(figures)]) == 0
    found = json.loads(figures.read_text())
    used, dropped = sum(found["curves"]["samples"]), found["samples_dropped"]
    assert used + dropped == 25 * 80
    assert f"dropped: {found['gradients_dropped']['cut short']} cut short" in capsys.readouterr().out
    assert used >= 25 * 4 * 5  # each its first piece
    assert dropped > 0


def test_the_scenarios_limits_and_drawn_classes_hold_in_learning_too(tmp_path):
    kinds = ((0.001, 0, 5), (0.001, 0, None), (0.004, 12, None))
    classes = tuple(WorkerClass(Constant(pace), least=least, most=most) for pace, least, most in kinds)
    limited = Scenario(classes, global_batch=40, rounds=6)
    learnt = learn(limited, server_config(limited, policy="level", lr=0.1))
    loads = np.array([update.loads for update in learnt.updates])
    assert loads[:, 0].max() <= 5
    assert loads[:, 2].min() >= 12
    drawn = Scenario(tuple(WorkerClass(Constant(s)) for s in (0.001, 0.1)), global_batch=40, draw=4, rounds=1)
    for seed in range(3):  # the slowest of an equal division ends the round, in both
        each = dataclasses.replace(drawn, seed=seed)
        played = run_rounds(each, ["equal"]).policies["equal"].latency[0, 0]
        assert learn(each, server_config(each)).updates[0].seconds == pytest.approx(played)


def test_what_happens_to_workers(tmp_path, capsys):
    path, figures = tmp_path / "four.toml", tmp_path / "figures.json"
    path.write_text("""
global_batch = 60
rounds = 12
give_up_seconds = 2.0
events = [
    { round = 3, worker = 0, kind = "leave" },
    { round = 5, worker = 1, kind = "die" },
    { round = 7, worker = 2, kind = "freeze", rounds = 2 },
    { round = 9, worker = 3, kind = "join" },
]
[[workers]]
count = 4
seconds_per_sample = 0.01
overhead = 0.3
[[workers]]
seconds_per_sample = 0.01
overhead = 0.3
link = { megabytes = 1.0, mbps = 80.0 }
""")
    assert run(["simulate", str(path), "--learn", "--json", str(figures)]) == 0
    curves = json.loads(figures.read_text())["curves"]
    # Worker 4 sets the time, 0.4 s and 10 ms a sample: its part of the 60 samples among those who are there (worker 3
    # comes late), or what those who reported in the round before leave to it. For who dies and who freezes the
    # others wait 2 s.
    alone = [0.55, 0.55, 0.55, 0.6, 2.0, 0.7, 2.0, 1.0, 1.0, 0.6, 0.6, 0.6]
    assert np.diff(curves["now"], prepend=0.0) == pytest.approx(alone)
    assert curves["quorum"] == [4, 4, 3, 3, 2, 2, 1, 1, 3, 3, 3, 3]
    assert "1 left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sync", "ssp:-1"], "staleness=-1"),
        (["--sync", "lsp:9:2"], "group=9: expected a whole number, 0 to 4"),
        (["--backup", "static:5"], "k=5"),
        (["--sync", "ssp:2", "--mode", "pull"], "exclude each other"),
        (["--sync", "ssp:2", "--backup", "dbw"], "leave out --backup"),
        (["--model", "transformer"], "transformer"),
        (
            ["--every", "soon"],
            "every='soon': expected steps, 1 or more, seconds such as '2 s' or 2.0, or 'auto'",
        ),
        (["--every", "0"], "every='0'"),
        (
            ["--every", "8", "--sync", "asp"],
            "--sync asp is for a parameter server, which --every does not use",
        ),
        (["--outer", "mean"], "--outer mean is for merges: expected --every with it"),
        (["--every", "8", "--outer", "adam"], "outer optimizer 'adam'"),
        (["--every", "8", "--outer", "nesterov:momentum=1"], "a momentum above 0 and below 1"),
    ],
)
def test_mistakes_raise_one_error(scenario, options, says, capsys):
    assert run(["simulate", scenario, "--learn", *options]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "option",
    [
        ["--every", "8"], ["--outer", "mean"], ["--loss", "0"], ["--sync", "bsp"], ["--backup", "everyone"],
        ["--mode", "pull"], ["--rate", "fixed"], ["--lr", "1"], ["--data", "digits"], ["--model", "mlp"],
    ],
)  # fmt: skip
def test_training_option_without_learn_raises(scenario, option, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert run(["simulate", scenario, *option, "--json", str(figures)]) == 2
    told = capsys.readouterr().err
    assert f"{option[0]} is for training: expected --learn with it" in told
    assert told.count("\n") == 1
    assert not figures.exists()


def test_a_trace_shorter_than_the_run(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text(
        "round,worker,seconds_per_sample,overhead_seconds\n"
        + "".join(f"{t},{w},0.01,0.1\n" for t in range(3) for w in range(2))
    )
    assert run(["simulate", "--trace", str(tmp_path / "trace.csv"), "--rounds", "9", "--learn"]) == 2
    assert "the trace has 3" in capsys.readouterr().err


def test_times_to_a_loss():
    class Update:
        def __init__(self, now, loss):
            self.ended, self.loss = now, loss

    updates = [Update(float(t), loss) for t, loss in enumerate([5, 4, 3, 2, 1, 0])]
    assert smoothed(updates).tolist() == [5, 4.5, 4, 3.5, 3, 2]
    assert reached(updates, 3.2) == 4.0
    assert reached(updates, 0.1) == float("inf")


def test_wlbs_with_a_lagging_and_a_dead_node(tmp_path):
    """WLBS, experiments."""
    result = experiments("wlbs")["faults"](tmp_path, True)
    rows = (tmp_path / "faults.csv").read_text().splitlines()
    assert all(row.endswith("True") for row in rows[1:])
    assert "BSP, equal" in result["ours"]
    for row in csv.DictReader(rows):
        assert 0 < float(row["seconds_to_target"]) <= float(row["seconds"])


def test_an_accuracy_is_reached_when_it_stays():
    ends = [1.0, 2.0, 4.0, 8.0]
    assert lasting([0.1, 0.9, 0.7, 0.9], ends, 0.8) == 8.0
    assert lasting([0.1, 0.8, 0.85, 0.9], ends, 0.8) == 2.0
    assert lasting([0.8, 0.8, 0.8, 0.8], ends, 0.8) == 1.0
    assert lasting([0.9, 0.9, 0.9, 0.7], ends, 0.8) == np.inf
