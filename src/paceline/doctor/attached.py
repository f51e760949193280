"""Within a script that ``paceline doctor`` started: watches its first DistributedDataParallel module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

DIRECTORY, STEPS = "PACELINE_DOCTOR_DIR", "PACELINE_DOCTOR_STEPS"  # set by the command for its child
SEEN, WRONG = "seen", "wrong"  # files beside the record, for the command to read


def watch(model: Any) -> None:
    """Watch it, or leave a sentence for the command; never disturb the script."""
    place = Path(os.environ[DIRECTORY])
    try:
        (place / SEEN).touch()
        from paceline.doctor.probe import Probe

        Probe(model, int(os.environ[STEPS]), place / "run")
    except (PacelineError, OSError) as error:
        (place / WRONG).write_text(str(error), encoding="utf-8")
