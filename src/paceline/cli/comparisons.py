"""Folders of several runs, as ``paceline train --compare`` leaves them."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs.run import CONFIG
from paceline.runs.words import plural


def runs_in(folder: Path) -> list[Path]:
    """The runs right below a folder, by their names; empty where the folder is a run itself."""
    if (folder / CONFIG).is_file():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def refuse_folder(folder: Path, command: str) -> None:
    """Raises PacelineError for a folder of runs, with the command for each of them."""
    if inside := runs_in(folder):
        each = ", ".join(f"{command} {path}" for path in inside)
        wanted = "the run itself" if len(inside) == 1 else "one of them"
        raise PacelineError(f"{folder} holds {plural(len(inside), 'run')}; expected {wanted}: {each}")
