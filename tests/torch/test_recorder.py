"""A plain DDP script with three more lines leaves a record of who computed how long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import runs
from paceline.simulate.whatif import of_run
from support.ranks import run_ranks
from support.recorded import plain_script, second_record

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("torch")]


def test_three_lines_record_a_plain_script(tmp_path: Path) -> None:
    run_ranks(3, plain_script, str(tmp_path / "run"), [0.02, 0.02, 0.06], 6)
    run = runs.read(tmp_path / "run")
    assert run.loads.tolist() == [[8, 8, 8]] * 6
    assert run.policy == "recorded"
    # Everybody's own seconds: with the wait in it all ranks would show the slowest one's 60 ms.
    assert np.median(run.compute[1:, :2]) < 0.045
    assert np.all(run.compute[:, 2] >= 0.06)
    assert 6 * 0.06 <= run.seconds.sum() < run.compute.sum()
    assert of_run(run, ["level"]).best == "level"


def test_a_directory_in_use_stops_every_rank_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    for sentence in run_ranks(2, second_record, str(tmp_path / "run")):
        assert "exists" in sentence
