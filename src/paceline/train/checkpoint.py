"""The last two checkpoints of a run, each with a digest of all its bytes.

A checkpoint is a zip archive of torch or of numpy, and the digest is the archive's comment, so other programs can
still read the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError, saying
from paceline.files import part_of, read, write_whole
from paceline.torch import progress

_log = logging.getLogger(__name__)
MARK = b"paceline sha256 "
DIGITS = 64
CHECKPOINT = "checkpoint.pt"
PARTS = ("model", "optimizer", "pace")


def with_digest(archive: bytes) -> bytes:
    """The archive with the digest of its bytes as its comment. archive: a zip archive without a comment, whose last
    two bytes, the length of the comment, are therefore 0."""
    body = archive[:-2] + (len(MARK) + DIGITS).to_bytes(2, "little")
    return body + MARK + _digest(body)


def sound(content: bytes) -> bool:
    """Whether these bytes are unchanged since ``with_digest`` returned them."""
    body, end = content[: -len(MARK) - DIGITS], content[-len(MARK) - DIGITS :]
    return end == MARK + _digest(body)


class Checkpoints:
    """The newest checkpoint of a run and the one before it.

    newest: the file; the older one is in the same directory, as NAME-previous. decode: turns bytes into content;
    raises PacelineError for a content that it cannot use, and may raise anything for damaged bytes.
    """

    def __init__(self, newest: Path, decode: Callable[[bytes], dict[str, Any]]) -> None:
        self.newest, self._decode = newest, decode
        self.older = newest.with_name(f"{newest.stem}-previous{newest.suffix}")
        self._keeps: bool | None = None  # whether the newest is undamaged; None before it is checked
        self.note = ""  # a sentence on why ``load`` returned the older one

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint, or the previous one if the newest is damaged or missing; None if there is neither.

        Raises PacelineError if there is a checkpoint, and none can be used.
        """
        self.note, self._keeps = "", True
        if not self.newest.exists() and not self.older.exists():
            return None
        try:
            return self._read(self.newest)
        except PacelineError as error:
            if not self.older.exists():
                raise
            wrong = str(error)
        try:
            parts = self._read(self.older)
        except PacelineError as error:
            raise PacelineError(
                f"{wrong}, and {error}; start the run again, or put back a copy of one of them"
            ) from error
        self.note = f"{wrong}; the run continues from the checkpoint before it, {self.older.name}"
        self._keeps = False
        _log.info("%s", self.note)
        return parts

    def save(self, archive: bytes) -> None:
        """Write a zip archive as the newest; the one that was newest is kept, unless it is damaged."""
        self.commit(self.prepare(archive))

    def prepare(self, archive: bytes) -> Path:
        """Write a zip archive to a file beside the newest, which any process may ``commit`` or delete."""
        return write_whole(part_of(self.newest), with_digest(archive))

    def commit(self, prepared: Path) -> None:
        """Replace the newest checkpoint by the file that ``prepare`` has written."""
        try:
            if self._keeps is None:
                self._keeps = self.newest.exists() and sound(self.newest.read_bytes())
            if self._keeps and self.newest.exists():
                _link(self.newest, self.older)
            os.replace(prepared, self.newest)
        except OSError as error:
            prepared.unlink(missing_ok=True)
            raise PacelineError(f"cannot write {self.newest}: {error.strerror or error}") from error
        self._keeps = True

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise PacelineError(f"{path} does not exist")
        with saying(f"cannot read {path}"):
            content = read(path, sys.maxsize)
        if not sound(content):
            raise PacelineError(
                f"{path} is damaged or is no checkpoint: its bytes are not those that were written"
            )
        try:
            return self._decode(content)
        except PacelineError as error:
            raise PacelineError(f"{path} is damaged or is no checkpoint of this run: {error}") from error
        except Exception as error:  # torch and numpy raise many kinds of exceptions for damaged bytes
            raise PacelineError(f"{path} is damaged or is no checkpoint ({type(error).__name__})") from error


def of_run(run_dir: Path) -> Checkpoints:
    """The checkpoints of the engine "torch" in a run directory; ``load`` gives the state dicts named in PARTS."""
    return Checkpoints(run_dir / CHECKPOINT, decode)


def encode(**parts: Any) -> bytes:
    """An archive of the state dicts ``model``, ``optimizer`` and ``pace``, and any other part that is given."""
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """The parts that ``encode`` was given, read without running code from the file (weights_only). Raises
    PacelineError if the content is of another kind."""
    parts = torch.load(io.BytesIO(content), weights_only=True)
    if not isinstance(parts, dict) or any(not isinstance(parts.get(part), dict) for part in PARTS):
        raise PacelineError(f"expected {', '.join(PARTS)} in it")
    progress.check_state(parts["pace"])
    return parts


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _link(newest: Path, older: Path) -> None:
    """Make ``older`` a second name of the same file, so that there is a newest one at every moment."""
    part = part_of(older)
    try:
        os.link(newest, part)
        os.replace(part, older)
    except OSError:  # no links here; if nothing can be written at all, writing the newest raises
        with contextlib.suppress(OSError):
            os.replace(newest, older)
    finally:
        part.unlink(missing_ok=True)  # it is still there if both names already were the same file
