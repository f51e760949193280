"""Where the traces and data sets lie that the papers' experiments, benchmarks and tests use."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """$PACELINE_DATA, else shared/data beside the repository. It need not exist: who reads a file checks."""
    named = os.environ.get("PACELINE_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
