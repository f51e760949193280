"""The record of work that moved within its rounds, in figures and in words."""

from __future__ import annotations

import pytest

from paceline.runs import Recorder, read
from paceline.runs.findings import findings
from paceline.runs.summary import summarize
from support.records import line


def record(folder, at_once):
    with Recorder.create(folder, {"policy": "auto", "workers": 2, "global_batch": 12}) as recorder:
        for t, portion in enumerate(at_once):
            pieces, spent = [[8], [4]], [[0.9], [1.0]]
            if portion < 1:
                pieces, spent = [[4, 3, 1], [3, 1]], [[0.5, 0.3, 0.1], [0.7, 0.3]]
            moved = {"pieces": pieces, "piece_seconds": spent, "at_once": portion, "piece_cost": 0.002}
            line(recorder, t, loads=[8, 4], compute=[0.9, 1.0], **moved)
    return read(folder)


def test_summary_has_the_moved_part(tmp_path):
    figures = summarize(record(tmp_path / "run", [1.0, 0.5, 0.3, 1.0]))
    assert figures["moved_rounds"] == 0.5
    assert figures["at_once"] == pytest.approx(0.4)
    assert figures["pieces"] == 2.5
    assert figures["pace_scatter"] == 0


def test_findings_name_what_was_chosen_and_why(tmp_path):
    moved = " ".join(findings(record(tmp_path / "moved", [0.5, 0.3, 0.4])))
    assert (
        "In 100 % of the rounds, work was rebalanced while the round ran: 40 % was assigned up front and the rest "
        "was claimed, in 2.5 pieces per worker. An extra piece costs 2 ms, and the time per sample varies by 0 % "
        "from round to round."
    ) in moved
    planned = " ".join(findings(record(tmp_path / "planned", [1.0, 1.0])))
    assert "Every round ran as planned: no work was rebalanced while a round ran." in planned
