"""One number for waiting, whoever tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import runs
from paceline.doctor.findings import diagnose, to_json
from paceline.doctor.phases import Phase
from paceline.live.panel import panel
from paceline.live.tail import Tail
from paceline.runs.run import waiting_share, waits
from paceline.simulate.whatif import of_run
from support.records import line

GUARANTEES = ("The doctor, the report, the live page and `whatif` give one share of waiting for a record.",)

NAN = np.nan
SPENT = {Phase.FORWARD: [0.02, 0.02, 0.06], Phase.REDUCE: [0.08, 0.08, 0.04]}


def test_a_worker_waits_until_the_last_one_is_done_and_no_longer() -> None:
    """Rounds of 10 s: what follows the last worker's end is nobody's waiting; nor is an absent worker's time."""
    compute = [[2.0, 6.0, 8.0], [4.0, NAN, 8.0], [5.0, NAN, NAN], [NAN, NAN, NAN]]
    assert np.array_equal(
        waits([10.0] * 4, compute), [[6, 2, 0], [4, NAN, 0], [0, NAN, NAN], [NAN, NAN, NAN]], equal_nan=True
    )
    assert waiting_share([10.0] * 4, compute) == pytest.approx(12 / 60)
    assert waiting_share([], np.zeros((0, 3))) is None


def test_round_without_its_last_worker_ends_the_waiting() -> None:
    assert np.array_equal(waits([5.0], [[2.0, 9.0]]), [[3.0, 0.0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rounds of 100 ms: three ranks work 20, 20 and 60 ms, 40 ms go into the exchange."""
    with runs.Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 3}) as record:
        for step in range(40):
            line(
                record, step, seconds=0.1, loads=[16] * 3, compute=[0.02, 0.02, 0.06],
                phases={phase.name: SPENT.get(phase, [0.0] * 3) for phase in Phase},
                counts={"fetches": [0] * 3, "backwards": [1] * 3, "exchanges": [1] * 3},
                loop=[{"lines": {}, "loader": None, "host": ""}] * 3,
            )  # fmt: skip
    return tmp_path / "run"


def test_report_doctor_live_page_and_whatif_agree(folder: Path) -> None:
    run, share = runs.read(folder), 2 * 40 / 300
    answer, found = of_run(run, ["equal"]), diagnose(run)
    assert runs.summarize(run)["idle_share"] == pytest.approx(share)
    assert answer.idle == pytest.approx(share)
    assert answer.policies["equal"].idle == pytest.approx(share)
    assert answer.lost == pytest.approx(answer.blame[2]) == pytest.approx(40 * 0.08)
    assert to_json(found)["answer"].idle == pytest.approx(share)
    tail = Tail(folder)
    tail.poll()
    assert "27 %" in panel(tail, None)["cards"]
