"""Who is the straggler, since when, and what balancing saves."""

import numpy as np
import pytest

from paceline.live import panel
from paceline.live.tail import Tail
from paceline.runs import Recorder, read
from paceline.runs.columns import Columns
from paceline.runs.words import about
from support.growing import go_on, start


def columns(tmp_path, compute, loads=None, policy="equal", beyond=0.0, **extras):
    compute = np.asarray(compute, float)
    loads = np.where(np.isnan(compute), np.nan, 10.0 if loads is None else np.asarray(loads, float))
    with Recorder.create(tmp_path / "run", {"policy": policy, "workers": compute.shape[1]}) as recorder:
        for t, row in enumerate(compute):
            recorder.round(
                round=t, epoch=0, time=float(t + 1), seconds=float(np.nanmax(row)) + beyond,
                batch=int(np.nansum(loads[t])), loads=loads[t], compute=row, **extras,
            )  # fmt: skip
    return Columns.of(read(tmp_path / "run"))


def test_the_straggler_and_since_when(tmp_path):
    compute = np.ones((100, 3))
    compute[40:, 1] = 3.0
    compute[70, 1] = 0.5  # one good round does not end it
    found = panel.straggler(columns(tmp_path, compute))
    assert found.worker == 1
    assert found.since == 40
    assert found.cost == pytest.approx(59 * 2 * 2)


def test_no_straggler_is_named_where_workers_take_turns_or_are_equal(tmp_path):
    turns = np.ones((60, 4))
    turns[np.arange(60), np.arange(60) % 4] = 2.0
    assert panel.straggler(columns(tmp_path / "a", turns)) is None
    assert panel.straggler(columns(tmp_path / "b", np.tile([1.0, 1.05, 1.0], (30, 1)))) is None
    assert panel.straggler(Columns()) is None


def test_a_straggler_that_is_no_more_is_not_named(tmp_path):
    compute = np.ones((50, 3))
    compute[:40, 2] = 5.0
    assert panel.straggler(columns(tmp_path, compute)) is None


def test_from_the_first_round_on(tmp_path):
    found = panel.straggler(columns(tmp_path, np.tile([1.0, 2.0, 1.0], (3, 1))))
    assert (found.worker, found.since) == (1, 0)


def test_what_balancing_would_save(tmp_path):
    # 40 samples on workers of 100, 100, 100 and 25 samples a second: 123 ms at best, 400 ms with equal parts.
    found = panel.saving(columns(tmp_path, np.tile([0.1, 0.1, 0.1, 0.4], (80, 1)), beyond=0.01))
    assert found.other == "level"
    assert found.real == pytest.approx(0.41)
    assert found.would == pytest.approx(0.14)  # 13, 12, 12 and 3 samples, and what is no worker's
    assert panel.saving_sentence(found).startswith("Balancing would save 270 ms per round: level would take")


def test_what_balancing_saves(tmp_path):
    loads, compute = np.array([13, 12, 12, 3]), np.array([0.13, 0.12, 0.12, 0.12])
    found = panel.saving(columns(tmp_path, np.tile(compute, (80, 1)), loads, policy="level"))
    assert found.other == "equal"
    assert found.real == pytest.approx(0.13)
    assert found.would == pytest.approx(0.4)
    assert panel.saving_sentence(found) == (
        "Balancing saves 270 ms per round now: an equal split would take 400 ms instead of 130 ms."
    )


def test_equal_workers_have_nothing_to_gain(tmp_path):
    found = panel.saving(columns(tmp_path, np.tile([0.1, 0.1], (20, 1))))
    assert "would save almost nothing" in panel.saving_sentence(found)


@pytest.mark.parametrize(
    ("quorum", "stale", "told"), [(2, [0, 0, 0], True), (3, [0, 0, 1], True), (3, [0] * 3, False)]
)
def test_a_server_that_does_not_wait_for_all_is_not_compared(tmp_path, quorum, stale, told):
    found = columns(
        tmp_path,
        np.tile([0.1, 0.1, 0.4], (20, 1)),
        quorum=quorum,
        present=3,
        staleness=stale,
        dropped={"late": 1},
    )
    assert (panel.saving(found) is None) == told
    assert found.dropped == {"late": 20}


def test_one_worker_and_absent_ones(tmp_path):
    assert panel.saving(columns(tmp_path / "a", np.ones((5, 1)))) is None
    compute = np.tile([0.1, 0.1, 0.4], (30, 1))
    compute[20:, 2] = np.nan
    found = panel.saving(columns(tmp_path / "b", compute))
    assert found.real == pytest.approx((5 * 0.4 + 10 * 0.1) / 15)
    assert found.would == pytest.approx((5 * 0.14 + 10 * 0.1) / 15)  # 14, 13 and 3 samples; two alike


def test_split_for_a_slow_worker_is_reported_without_contradiction(tmp_path):
    loads = np.tile([16, 16, 16, 4], (40, 1))
    found = columns(tmp_path, loads * [0.001, 0.001, 0.001, 0.004], loads, policy="level")
    assert panel.speeds(found) == ["Worker 3 is 4.0x slower per sample than the others."]
    tail = Tail(tmp_path / "run")
    tail.poll()
    sentences = panel.panel(tail, None, panel.speeds(found))["sentences"]
    assert sentences[:2] == [*panel.speeds(found), "No worker is consistently last now."]


def test_slow_worker_is_named_beside_a_changed_one(tmp_path):
    compute = np.tile([1.0, 1.0, 1.0, 4.0], (100, 1))
    compute[50:, 0] = 2.0
    assert panel.speeds(columns(tmp_path, compute)) == [
        "Worker 3 is 4.0x slower per sample than the others.",
        "From round 50 on, worker 0 was 2.0x slower per sample than before.",
    ]


def test_how_long_the_rest_will_take(tmp_path):
    with start(tmp_path / "run") as recorder:
        go_on(recorder, 0, 120)  # 0.3 s each, 50 rounds an epoch
    columns = Columns.of(read(tmp_path / "run"))
    assert panel.rounds_in_all(columns, {"steps": 400, "epochs": 2}) == 400
    assert panel.rounds_in_all(columns, {"steps": None, "epochs": 4}) == 200
    assert panel.rounds_in_all(columns, {}) is None
    assert panel.seconds_left(columns, 200) == pytest.approx(80 * 0.3)
    assert panel.seconds_left(columns, 120) is None
    assert panel.seconds_left(columns, None) is None


def test_it_is_not_known_before_the_first_epoch_is_over(tmp_path):
    with start(tmp_path / "run") as recorder:
        go_on(recorder, 0, 50)
    assert panel.rounds_in_all(Columns.of(read(tmp_path / "run")), {"epochs": 4}) is None


@pytest.mark.parametrize(
    ("left", "words"),
    [(0.2, "1 s"), (7.6, "8 s"), (38, "40 s"), (70, "1 min"), (100, "2 min"), (7500, "2 h 5 min")],
)
def test_time_left_is_rounded_to_what_is_known(left, words):
    assert about(left) == words
