"""Files written whole or not at all: a reader never meets half of one."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paceline.errors import PacelineError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` beside ``path``, then put it in its place in one move.

    Raises PacelineError where the place cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        part = path.parent / f".paceline-{secrets.token_hex(8)}"  # short, whatever the name is
        try:
            with part.open("xb") as file:  # as readable as any other that the user writes
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PacelineError(
            f"cannot write {path}: {error.strerror or error}; choose a place that can be"
        ) from error
    return path


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises PacelineError where ``path`` could not be written after long work: before that."""
    path = Path(path)
    above = next((parent for parent in path.absolute().parents if os.path.exists(parent)), path)
    try:
        wrong = "it is a directory" if stat.S_ISDIR(path.stat().st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        wrong = "" if above.is_dir() else f"{above} is no directory"
    except OSError as error:
        wrong = error.strerror or str(error)
    if not wrong and not os.access(above, os.W_OK):
        wrong = f"{above} may not be written to"
    if wrong:
        raise PacelineError(f"cannot write {path}: {wrong}; choose a place that can be")
