import json

import numpy as np
import pytest

from paceline import cli, runs
from paceline.data import traces
from support.guarantees import guarantee


def whatif(*arguments):
    return cli.run(["whatif", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    pace = np.broadcast_to([0.001, 0.001, 0.001, 0.004], (20, 4))
    return traces.write(tmp_path / "speeds.csv", traces.Trace(pace, 0 * pace))


@pytest.fixture
def run(tmp_path):
    with runs.Recorder.create(
        tmp_path / "run", {"policy": "equal", "workers": 2, "engine": "torch"}
    ) as recorder:
        for t in range(12):
            recorder.round(
                round=t,
                epoch=0,
                time=0.3 * (t + 1),
                seconds=0.3,
                batch=40,
                loads=[20, 20],
                compute=[0.1, 0.3],
            )
    return tmp_path / "run"


def test_finding_and_table_are_printed(run, capsys):
    assert whatif(run, "--policy", "level", "--policy", "dolbie") == 0
    shown = capsys.readouterr().out
    assert "Take level: it would have needed" in shown
    assert "instead of the 3.6 s under equal" in shown
    assert "The workers spent 33 % of their time, 2.4 s, waiting, 100 % of it for worker 1." in shown
    # speeds 3 : 1, so 30 and 10 samples and 0.15 s a round from the second on
    assert "30/10" in shown


def test_json(run, capsys):
    assert whatif(run, "--policy", "level", "--policy", "equal", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["take"] == "level"
    assert told["policies"]["equal"]["seconds"] == pytest.approx(3.6)
    assert told["policies"]["level"]["seconds"] == pytest.approx(0.3 + 11 * 0.15)
    assert told["policies"]["level"]["loads"][-1] == [30, 10]
    assert told["blame"] == pytest.approx([0, 2.4])


def test_a_trace(trace, capsys):
    assert whatif(trace, "--global-batch", 400) == 0
    shown = capsys.readouterr().out
    assert "124/123/123/30" in shown  # 124 ms each, whoever has the last sample; ties go to the lowest rank
    assert "under equal" in shown


def test_work_that_moves_within_the_round_where_no_plan_can_know(tmp_path, capsys):
    pace = np.array([1e-3, 1e-3, 4e-3]) * np.exp(0.5 * np.random.default_rng(3).standard_normal((60, 3)))
    file = traces.write(tmp_path / "unsteady.csv", traces.Trace(pace, 0 * pace))
    assert whatif(file, "--global-batch", 768) == 0
    assert "Take auto: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "can_change"),
    [
        ({"engine": "torch", "loop": "whole"}, True),
        ({"engine": "torch", "loop": "local", "model": "mlp", "data": "digits"}, False),  # paceline train
        ({"engine": "service", "job": "digits"}, False),
    ],
)
def test_loop_that_claims_work_is_advised_only_to_scripts(tmp_path, capsys, config, can_change):
    pace = np.array([1e-3, 1e-3, 4e-3]) * np.exp(0.5 * np.random.default_rng(3).standard_normal((60, 3)))
    facts = {"policy": "equal", "workers": 3} | config
    with runs.Recorder.create(tmp_path / "run", facts) as recorder:
        for t, each in enumerate(pace):
            recorder.round(
                round=t,
                epoch=0,
                time=40 * pace[: t + 1].max(1).sum(),
                seconds=40 * each.max(),
                batch=120,
                loads=[40, 40, 40],
                compute=40 * each,
            )
    assert whatif(tmp_path / "run") == 0
    assert ('Pace(..., loop="round")' in capsys.readouterr().out) == can_change


def test_nothing_to_gain(tmp_path, capsys):
    pace = np.full((10, 3), 0.001)
    file = traces.write(tmp_path / "even.csv", traces.Trace(pace, 0 * pace))
    assert whatif(file, "--global-batch", 255) == 0
    shown = capsys.readouterr().out
    assert "keep what you have" in shown
    assert "No worker waited" in shown


@guarantee("`whatif` on a folder of several runs gives one message with the command for each of them.")
def test_comparison_lists_its_runs(run, capsys):
    assert whatif(run.parent) == 2
    told = capsys.readouterr().err
    assert f"{run.parent} holds 1 run; expected the run itself: paceline whatif {run}" in told


@pytest.mark.parametrize("name", ["gone", "gone.csv"])
def test_what_is_not_there(tmp_path, capsys, name):
    assert whatif(tmp_path / name) == 2
    assert name in capsys.readouterr().err


def test_mistakes_exit_with_2(run, trace, capsys):
    for arguments, says in (
        ([run, "--global-batch", 5], "a run knows its own"),
        ([run, "--policy", "nobody"], "'nobody' is unknown"),
        ([trace, "--global-batch", 0], "global_batch=0"),
    ):
        assert whatif(*arguments) == 2
        told = capsys.readouterr().err
        assert says in told
        assert "Traceback" not in told
