"""An error that all ranks raise has one traceback, on the rank that found it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel
import paceline.torch
from paceline.torch.callbacks import Record

paceline.torch.join()
paceline.torch.Pace(DistributedDataParallel(torch.nn.Linear(2, 2)), global_batch=8, callbacks=[Record("there")])
"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_error_of_a_record_is_printed_by_one_rank(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run([*launcher, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert done.stderr.count("PacelineError: run directory there exists") == 1
    assert done.stderr.count("[rank0]: Traceback") == 1
    assert "[rank1]: Traceback" not in done.stderr
    assert "[rank2]: Traceback" not in done.stderr
