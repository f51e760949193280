"""Workers without Python: the examples in JavaScript and Perl share a job, and report the seconds that they took."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from paceline import runs
from support import served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (("node", "service_client.mjs"), ("node", "service_client.mjs")),
        (("perl", "service_client.pl"), ("perl", "service_client.pl")),
        (("node", "service_client.mjs"), ("perl", "service_client.pl")),
    ],
)
def test_examples_share_a_job(fast: tuple[str, str], slow: tuple[str, str], tmp_path: Path) -> None:
    for program, _ in (fast, slow):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with served.process(tmp_path, "--batch", 60, "--workers", 2) as service:
        env = os.environ | {"PACELINE_URL": service.url, "PACELINE_TOKEN": served.TOKEN}
        began = time.monotonic()
        workers = [
            subprocess.Popen(
                [program, EXAMPLES / file, name, milliseconds], env=env, stdout=subprocess.PIPE, text=True
            )
            for (program, file), name, milliseconds in ((fast, "fast", "1"), (slow, "slow", "4"))
        ]
        said = [worker.communicate(timeout=400)[0] for worker in workers]
        lasted = time.monotonic() - began
        assert [worker.returncode for worker in workers] == [0, 0]
        state = service.ask("GET", "/v1/jobs/default").content
        assert (state["rounds"], state["present"]) == (8, 0)
    run = runs.read(tmp_path / "runs" / "default")
    places = sorted(run.names, key=lambda place: run.names[place])  # the fast one's, the slow one's
    loads, seconds = run.loads[:, places], run.compute[:, places]
    printed = [[int(load) for load in re.findall(r": (\d+) samples", text)] for text in said]
    np.testing.assert_equal(loads.T, printed)
    np.testing.assert_equal(loads.sum(1), 60)
    assert (seconds > loads * [0.001, 0.004] - 0.002).all(), "a sleep lasts as long as it was asked to"
    assert (seconds.sum(0) < lasted).all(), "in seconds"
