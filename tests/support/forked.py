"""Runs a script in processes that end as the interpreter ends, and for which PyTorch is loaded once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support import forks

TESTS = Path(__file__).parents[1]


def ended(ranks: int, script: Path, place: Path, *arguments: str) -> list[tuple[int, str]]:
    """The exit status of each rank, and what it wrote to standard error. place: an empty folder."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, forks.__file__, str(ranks), str(script), *arguments], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PACELINE_TESTS_SAID": str(place), "PYTHONPATH": path}, timeout=120, check=True,
    )  # fmt: skip
    statuses = json.loads(done.stdout.splitlines()[-1])
    return [(status, (place / str(rank)).read_text()) for rank, status in enumerate(statuses)]
