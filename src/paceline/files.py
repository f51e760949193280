"""Files written whole or not at all: a reader never meets half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.errors import PacelineError

PART = ".paceline-"  # begins the name of what is not in its place yet


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` beside ``path``, then put it in its place in one move.

    Raises PacelineError where the place cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        part = part_of(path)
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


def part_of(path: Path) -> Path:
    """A new name beside ``path``, for what will be moved into its place."""
    return path.parent / f"{PART}{secrets.token_hex(8)}"  # short, whatever the name is


def sweep(directory: Path) -> None:
    """Delete what a program that was killed had not yet moved into its place. Nobody may be writing there."""
    for path in directory.glob(f"{PART}*"):
        path.unlink(missing_ok=True)


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises PacelineError where ``path`` could not be written after long work: before that."""
    path = Path(path)
    _check(path, "it is a directory" if os.path.isdir(path) else "")


def check_directory(path: str | os.PathLike[str]) -> None:
    """The same for a directory to write into, which may be there already."""
    path = Path(path)
    _check(path / "file" if os.path.isdir(path) else path, "it is a file" if os.path.isfile(path) else "")


def _check(path: Path, wrong: str) -> None:
    above = next((parent for parent in path.absolute().parents if os.path.exists(parent)), path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        wrong = wrong or ("" if above.is_dir() else f"{above} is no directory")
    except OSError as error:
        wrong = error.strerror or str(error)
    if not wrong and not os.access(above, os.W_OK):
        wrong = f"{above} may not be written to"
    if wrong:
        raise PacelineError(f"cannot write {path}: {wrong}; choose a place that can be")
