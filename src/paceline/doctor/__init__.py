"""Find what slows a DistributedDataParallel run down, without changing how it trains.

From a shell: ``paceline doctor -- torchrun --nproc-per-node 4 train.py``. In your own script, after the model has
been wrapped:

    import paceline.doctor

    paceline.doctor.watch(ddp)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.commands import installation
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.doctor.probe import Probe

STEPS = 200
"""The default number of optimizer steps to watch."""

__all__ = ["STEPS", "watch"]


def watch(model: Any, steps: int = STEPS, run_dir: str | os.PathLike[str] | None = None) -> Probe:
    """Watch this DistributedDataParallel module for some optimizer steps; rank 0 then prints what it found.

    Training continues unchanged, and all hooks are removed after ``steps`` steps. Call it on every rank.

    Args:
        model: The wrapped module.
        steps: Optimizer steps to watch; the first few are not measured.
        run_dir: A new directory for the record (by default none is kept); ``paceline whatif`` reads it.

    Returns:
        The probe, which removes its hooks when it is done.

    Raises:
        PacelineError: If there is nothing to watch (another kind of model, or only one process), or if the package
            that prints the findings is not installed.
    """
    try:
        from paceline.doctor.findings import diagnose, show
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise PacelineError(f"{missing} is not installed; {installation('cli')}") from error
    from paceline.doctor.probe import Probe

    return Probe(model, steps, run_dir, lambda run: show(diagnose(run)))
