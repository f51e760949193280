"""Files written whole or not at all, so that no reader finds half of one, and files read without endless waits."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paceline.errors import PacelineError, saying

PART = ".paceline-"  # prefix of the name of a file that is not in its place yet
SMALL = 1 << 24  # bytes, the most of a file that people write
LARGE = 1 << 33  # bytes, the most of a file that programs write


def open_file(path: str | os.PathLike[str], most: int = LARGE) -> BinaryIO:
    """Opens a regular file of at most ``most`` bytes for reading.

    Raises OSError for anything else too, so that no caller waits for a pipe's other end, or reads a device that never
    ends; its ``strerror`` can be shown to users.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    wrong = ""
    if stat.S_ISDIR(status.st_mode):
        wrong = "it is a directory"
    elif not stat.S_ISREG(status.st_mode):
        wrong = "it is a pipe or a device, not a file"
    elif status.st_size > most:
        wrong = f"it has {status.st_size:,} bytes, and {most:,} are the most that are read"
    if wrong:
        os.close(handle)
        raise OSError(errno.EINVAL, wrong, os.fspath(path))
    return os.fdopen(handle, "rb")


def read(path: str | os.PathLike[str], most: int = LARGE) -> bytes:
    """The whole content of a file, see ``open_file``."""
    with open_file(path, most) as file:
        return file.read()


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write ``content`` to a new file beside ``path``, then rename it to ``path`` in one step. A link to a file
    stays, and the file is replaced; a pipe or a device is written to.

    Raises PacelineError if the file cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with saying(f"cannot write {path}", "choose a place that can be"):
        if _open_already(path):
            with path.open("wb") as file:
                file.write(data)
            return path
        path = _behind_link(path)
        part = part_of(path)
        try:
            with part.open("xb") as file:  # with the user's default permissions
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return path


def _open_already(path: Path) -> bool:
    """Whether this is a pipe, a device, or what a process has open: another file in its place would take it from its
    other users."""
    system = path.absolute().parts[:2] in (("/", "dev"), ("/", "proc"))
    if system and os.path.islink(path):  # such as /dev/stdout
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _behind_link(path: Path) -> Path:
    """The file itself, if this is a link to one."""
    return path.resolve() if os.path.islink(path) else path


def place_first(part: Path, path: Path) -> None:
    """Put the whole file ``part`` in its place, unless another process was first; ``part`` is gone afterwards."""
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.rename(part, path)
    finally:
        part.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """A new name beside ``path`` for a file that will be renamed to ``path``."""
    return path.parent / f"{PART}{secrets.token_hex(8)}"  # short, even if the name is long


def sweep(directory: Path) -> None:
    """Delete the unfinished files of a program that was killed. No program may be writing to the directory."""
    for path in directory.glob(f"{PART}*"):
        path.unlink(missing_ok=True)


def allow_open(least: int, who: str) -> None:
    """Raise this process's limit of open files and connections, and its children's, to what the system allows.

    Shells often set a lower one. Raises PacelineError if ``who`` needs at least ``least`` and the limit is lower.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system may not let this process change it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < least:
        raise PacelineError(
            f"{who} may have {allowed} files and connections open: expected {least} or more; raise it with ulimit -n"
        )


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises PacelineError if ``path`` cannot be written: call it before long work whose result goes there."""
    path = Path(path)
    if _open_already(path):
        if not os.access(path, os.W_OK):
            raise PacelineError(f"cannot write {path}: it may not be written to; choose a place that can be")
        return
    path = _behind_link(path)
    missing = not os.path.lexists(path.absolute().parent)  # the folder of a file is not created
    wrong = f"the folder {path.parent} does not exist" if missing else ""
    _check(path, "it is a directory" if os.path.isdir(path) else wrong)


def check_directory(path: str | os.PathLike[str]) -> None:
    """The same for a directory to write into, which may be there already."""
    path = Path(path)
    _check(path / "file" if os.path.isdir(path) else path, "it is a file" if os.path.isfile(path) else "")


def _check(path: Path, wrong: str) -> None:
    above = next((parent for parent in path.absolute().parents if os.path.exists(parent)), path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        wrong = wrong or ("" if above.is_dir() else f"{above} is not a directory")
    except OSError as error:
        wrong = error.strerror or str(error)
    if not wrong:
        try:  # what the permissions allow, the file system may still refuse
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as error:
            wrong = f"{above} may not be written to ({error.strerror or error})"
    if wrong:
        raise PacelineError(f"cannot write {path}: {wrong}; choose a place that can be")
