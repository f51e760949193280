"""Folders of several runs, as ``paceline train --compare`` leaves them."""

from __future__ import annotations

from pathlib import Path

from paceline.runs.run import CONFIG


def runs_in(folder: Path) -> list[Path]:
    """The runs right below a folder, in the order in which they were started; empty where it is a run itself."""
    if (folder / CONFIG).is_file():
        return []
    found = []
    for config in folder.glob(f"*/{CONFIG}"):
        try:
            found.append((config.stat().st_mtime, config.parent))
        except OSError:  # it has gone meanwhile
            continue
    return [run for _, run in sorted(found)]
