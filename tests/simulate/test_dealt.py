"""Samples that cost differently on the virtual clock: the reference's tables, and what cannot be played."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline import PacelineError
from paceline.cli import run as command
from paceline.simulate import dealt, toml
from paceline.simulate.rounds import run as run_rounds
from paceline.simulate.scenario import Event, Samples, Scenario, WorkerClass
from paceline.simulate.timing import Constant

TEXT = {"mu": 5.0, "sigma": 1.0, "least": 16, "most": 1024, "alpha": 0.001}


def scenario(workers: int, batch: int, slow: int = 1, rounds: int = 300, **samples: object) -> Scenario:
    classes = (WorkerClass(Constant(1e-3), count=workers - 1), WorkerClass(Constant(slow * 1e-3)))
    described = Samples(**{**TEXT, **samples})  # type: ignore[arg-type]
    return Scenario(classes, global_batch=batch, rounds=rounds, samples=described)


@pytest.mark.parametrize(
    ("workers", "batch", "slow", "as_equal", "by_speed"),
    [(8, 256, 1, 1.0, 1.0), (8, 256, 4, 0.28, 0.999), (8, 64, 4, 0.28, 0.996), (4, 32, 4, 0.31, 0.996)],
)
def test_unpadded_samples_reach_the_references_share_of_the_bound(
    workers: int, batch: int, slow: int, as_equal: float, by_speed: float
) -> None:
    outcome = dealt.run(scenario(workers, batch, slow, 100), ["equal", "level", "optimum"])
    assert outcome.of_bound("equal", "by cost") == pytest.approx(as_equal, abs=0.01)
    assert outcome.of_bound("optimum", "by cost") == pytest.approx(by_speed, abs=0.01)
    # level is told nothing of the speeds and the costs; its first round is an equal one.
    latency = outcome.ways["level", "by cost"].latency
    assert outcome.bound[3:].sum() / latency[3:].sum() == pytest.approx(by_speed, abs=0.01)


@pytest.mark.parametrize(
    ("workers", "batch", "slow", "as_equal", "by_speed"),
    [(8, 256, 1, 0.77, 0.77), (8, 256, 4, 0.23, 0.775), (4, 32, 4, 0.245, 0.635), (2, 64, 1, 0.42, 0.425)],
)
def test_padded_samples_are_at_least_as_good_as_the_reference(
    workers: int, batch: int, slow: int, as_equal: float, by_speed: float
) -> None:
    one = dealt.run(scenario(workers, batch, slow, 60, padded=True, micro_steps=1), ["equal", "optimum"])
    assert one.of_bound("equal", "by cost") >= as_equal - 0.005
    assert one.of_bound("optimum", "by cost") >= by_speed - 0.005
    several = dealt.run(scenario(workers, batch, slow, 20, padded=True, launch=0.3), ["optimum"])
    assert several.of_bound("optimum", "by cost") > by_speed + 0.1
    assert several.ways["optimum", "by cost"].micro_batches > 2


def test_rounds_by_count_are_slices_of_the_epochs_order() -> None:
    """The same draws in plain numpy: equal slices, each padded to its longest sample."""
    what = scenario(4, 32, 4, rounds=50, padded=True)
    outcome = dealt.run(what, ["equal"])
    rng = np.random.default_rng((0, 0, 1))
    lengths = np.clip(np.rint(rng.lognormal(5, 1, 50 * 32)), 16, 1024)
    costs = (lengths + 0.001 * lengths**2) / (lengths + 0.001 * lengths**2).mean()
    rounds = costs[rng.permutation(50 * 32)].reshape(50, 4, 8)
    seconds = 8 * rounds.max(-1) * [1e-3, 1e-3, 1e-3, 4e-3]
    np.testing.assert_allclose(outcome.ways["equal", "by count"].latency[:, 0], seconds.max(-1))
    np.testing.assert_allclose(outcome.bound[:, 0], rounds.sum((1, 2)) / 3250)


def test_workers_that_leave_have_their_samples_dealt_to_others() -> None:
    what = Scenario(
        (WorkerClass(Constant(1e-3), count=3),),
        global_batch=32,
        rounds=12,
        samples=Samples(**TEXT),  # type: ignore[arg-type]
        events=(Event(5, 1, "leave"), Event(9, 1, "join")),
    )
    outcome = dealt.run(what, ["level"])
    latency = outcome.ways["level", "by cost"].latency[:, 0] / outcome.bound[:, 0]
    assert latency[[4, 5, 6, 7, 9, 10, 11]].max() < 1.1  # in its first round back, it has nothing planned yet


def test_impossible_scenario_raises(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    what = scenario(2, 16)
    with pytest.raises(PacelineError, match=r"paceline\.simulate\.dealt\.run"):
        run_rounds(what, ["equal"])
    dies = Scenario(what.workers, global_batch=16, samples=what.samples, events=(Event(2, 0, "die"),))
    with pytest.raises(PacelineError, match="does not go with events die and freeze"):
        dealt.run(dies, ["equal"])
    workers = "[[workers]]\ncount = 2\nseconds_per_sample = 0.001\n"
    for table, said in (
        ('file = "none.txt"', "cannot read the lengths"),
        ('distribution = "cauchy"', "expected one of lognormal, uniform, or a file"),
        ("sigma = 70.0", "sigma=70: expected 0 to 10"),
        ('file = "words.txt"', "expected a number on each line"),
        ('file = "empty.txt"', "empty.txt holds no lengths: it is empty; expected a number on each line"),
        ("micro_batch_cost = 3.0\nleast = 5", "longer than a micro-batch may be"),
    ):
        (tmp_path / "words.txt").write_text("12\nlong\n")
        (tmp_path / "empty.txt").write_text("# none yet\n\n")
        path = tmp_path / "s.toml"
        path.write_text(f"global_batch = 8\nrounds = 3\n[samples]\n{table}\n{workers}")
        assert command(["simulate", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_lengths_from_a_file_are_played_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "lengths.txt").write_text("\n".join(str(10 + 7 * number % 90) for number in range(100)))
    path = tmp_path / "mine.toml"
    path.write_text(
        'global_batch = 16\nrounds = 10\npolicies = ["equal", "level"]\n[samples]\nfile = "lengths.txt"\n'
        "[[workers]]\ncount = 2\nseconds_per_sample = 0.001\n"
    )
    assert toml.read(path).samples.file == tmp_path / "lengths.txt"
    assert command(["simulate", str(path), "--json", str(tmp_path / "out.json")]) == 0
    assert "by cost takes" in capsys.readouterr().out
    told = json.loads((tmp_path / "out.json").read_text())
    assert {(each["policy"], each["divided"]) for each in told["policies"]} == {
        (name, way) for name in ("equal", "level") for way in ("by count", "by cost")
    }
    for each in told["policies"]:
        assert len(each["round_seconds"]) == 10
        assert 0 < each["of_bound"] <= 1
