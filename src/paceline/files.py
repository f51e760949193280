"""Files written whole or not at all, so that a reader never meets half of one; and read without waiting for ever."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paceline.errors import PacelineError, saying

PART = ".paceline-"  # begins the name of what is not in its place yet
SMALL = 1 << 24  # bytes of a file that people write, at most
LARGE = 1 << 33  # of one that programs write, at most


def open_file(path: str | os.PathLike[str], most: int = LARGE) -> BinaryIO:
    """A regular file of at most ``most`` bytes, to read.

    Raises OSError also for anything else, so that nobody waits for a pipe's other end, or reads a device that never
    ends: its ``strerror`` is for people.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    wrong = ""
    if stat.S_ISDIR(status.st_mode):
        wrong = "it is a directory"
    elif not stat.S_ISREG(status.st_mode):
        wrong = "it is a pipe or a device, and no file"
    elif status.st_size > most:
        wrong = f"it has {status.st_size:,} bytes, and {most:,} are the most that are read"
    if wrong:
        os.close(handle)
        raise OSError(errno.EINVAL, wrong, os.fspath(path))
    return os.fdopen(handle, "rb")


def read(path: str | os.PathLike[str], most: int = LARGE) -> bytes:
    """All that is in a file, see ``open_file``."""
    with open_file(path, most) as file:
        return file.read()


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` beside ``path``, then put it in its place in one move.

    Raises PacelineError if the place cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    part = part_of(path)
    with saying(f"cannot write {path}", "choose a place that can be"):
        try:
            with part.open("xb") as file:  # as readable as any other that the user writes
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return path


def part_of(path: Path) -> Path:
    """A new name beside ``path``, for what will be moved into its place."""
    return path.parent / f"{PART}{secrets.token_hex(8)}"  # short, whatever the name is


def sweep(directory: Path) -> None:
    """Delete what a program that was killed had not yet moved into its place. Nobody may be writing there."""
    for path in directory.glob(f"{PART}*"):
        path.unlink(missing_ok=True)


def allow_open(least: int, who: str) -> None:
    """Let this process, and those that it starts, have as many files and connections open as the system allows.

    Shells often allow fewer. Raises PacelineError if ``who`` needs ``least``, and that is more.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # not ours to change
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < least:
        raise PacelineError(
            f"{who} may have {allowed} files and connections open: expected {least} or more; raise it with ulimit -n"
        )


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises PacelineError if ``path`` could not be written after long work: before that."""
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
