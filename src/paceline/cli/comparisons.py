"""What commands that read one run say of a folder of several."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs.run import runs_in
from paceline.runs.words import plural


def refuse_folder(folder: Path, command: str) -> None:
    """Raises PacelineError for a folder of runs, with the command for each of them."""
    if inside := runs_in(folder):
        each = ", ".join(f"{command} {path}" for path in inside)
        wanted = "the run itself" if len(inside) == 1 else "one of them"
        raise PacelineError(f"{folder} holds {plural(len(inside), 'run')}; expected {wanted}: {each}")
