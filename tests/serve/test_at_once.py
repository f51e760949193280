"""Services that are started on one directory in the same instant: one serves, and the others say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("serve")]

GUARANTEES = (
    "Of several services that start on one directory, one serves; the "
    "others end with one message and exit status 2.",
)


def test_one_of_several_serves_and_the_others_end_with_an_error(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_TOKEN"}
    command = [sys.executable, "-m", "paceline", "serve", "--dir", str(tmp_path / "state"), "--port", "0"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    try:
        said = [process.stdout.readline() for process in started]  # type: ignore[union-attr]
        serving = [process for process, line in zip(started, said, strict=True) if line]
        refused = [process for process, line in zip(started, said, strict=True) if not line]
        assert len(serving) == 1, said
        for process in refused:
            assert process.wait(400) == 2
            complaint = process.stderr.read()  # type: ignore[union-attr]
            assert complaint.startswith("paceline: ")
            assert complaint.count("\n") == 1
        serving[0].send_signal(signal.SIGTERM)
        assert serving[0].wait(400) == 128 + signal.SIGTERM
    finally:
        for process in started:
            process.kill()
            process.communicate()
