"""Workers without Python: the examples in JavaScript and Perl share a job, and the faster one gets more samples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

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
    with served.process(tmp_path / "state", "--batch", 60, "--workers", 2) as service:
        env = os.environ | {"PACELINE_URL": service.url, "PACELINE_TOKEN": served.TOKEN}
        workers = [
            subprocess.Popen(
                [program, EXAMPLES / file, name, milliseconds], env=env, stdout=subprocess.PIPE, text=True
            )
            for (program, file), name, milliseconds in ((fast, "fast", "1"), (slow, "slow", "4"))
        ]
        said = [worker.communicate(timeout=120)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
        loads = [[int(load) for load in re.findall(r": (\d+) samples", text)] for text in said]
        assert [len(each) for each in loads] == [8, 8]
        assert loads[0][-1] > 2 * loads[1][-1], "the faster one has more to do"
        state = service.ask("GET", "/v1/jobs/default").content
        assert (state["rounds"], state["present"]) == (8, 0)
