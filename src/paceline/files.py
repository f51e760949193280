"""Files written whole or not at all: a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paceline.errors import PacelineError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` beside ``path``, then put it in its place in one move.

    Raises PacelineError where the place cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes private files; these are as readable as any other that the user writes.
            os.chmod(part, 0o666 & ~_umask())
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PacelineError(
            f"cannot write {path}: {error.strerror or error}; choose a place that can be"
        ) from error
    return path


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises PacelineError where ``path`` could not be written after long work: before that."""
    path = Path(path)
    above = next(parent for parent in path.absolute().parents if parent.exists())
    wrong = "it is a directory" if path.is_dir() else "" if above.is_dir() else f"{above} is no directory"
    if not wrong and not os.access(above, os.W_OK):
        wrong = f"{above} may not be written to"
    if wrong:
        raise PacelineError(f"cannot write {path}: {wrong}; choose a place that can be")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
