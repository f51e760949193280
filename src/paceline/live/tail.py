"""Follows the record of a run on disk, also if it is damaged or deleted; a ``poll`` costs what its new lines cost."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.files import open_file
from paceline.runs.columns import Columns
from paceline.runs.run import CONFIG, ROUNDS, SUMMARY, of_lines, read_all, read_facts

CHUNK = 4 << 20  # bytes read in one poll, so that a long record is shown while it is still being read


class Tail:
    """Reads one run directory while the run is going.

    ``columns`` are the rounds so far; ``config`` and ``summary`` the content of run.json and summary.json, {} if
    there is none. ``gone`` is a sentence if the directory has vanished or cannot be read, else "". ``touched`` is
    when the last round was written, in seconds since 1970; ``more`` whether the file has more to read already.

    Args:
        run_dir: The directory.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.gone = ""
        self._wrong: dict[str, str] = {}  # sentences on damage, by file
        self._seen: dict[str, tuple[int, ...]] = {}  # by small file: inode, size and ctime when last read
        self._bad = b""  # the damaged line that was found last
        self.touched = 0.0
        self._age, self._polled = 0.0, -math.inf  # age of the last round at the last poll, and its time
        self.more = False
        self._start_again()

    @property
    def silent(self) -> float:
        """Seconds since the last round was written, also if the machine's clock was set meanwhile."""
        return self._age + time.monotonic() - self._polled

    @property
    def damaged(self) -> str:
        """A sentence on the part of the record that is damaged, else ""."""
        return next((self._wrong[name] for name in (ROUNDS, CONFIG, SUMMARY) if self._wrong.get(name)), "")

    def poll(self) -> bool:
        """Read what is new, at most 4 MiB.

        Returns:
            Whether anything changed.
        """
        before = self._state()
        touched, now = self.touched, time.monotonic()
        try:
            os.stat(self.run_dir / CONFIG)
            self.config = self.columns.config = self._facts(CONFIG, self.config)
            self._read_rounds()
            self.summary = self._facts(SUMMARY, self.summary)
            self.gone = ""
        except (FileNotFoundError, NotADirectoryError):
            self._lost(f"The run directory {self.run_dir} is gone; this page shows what was read before.")
        except OSError as error:
            self._lost(f"The run directory {self.run_dir} cannot be read: {error.strerror or error}.")
        # The file's time may come from a clock that was set, or from another machine's: the age of a round that is
        # new in this poll is at most the time since the last poll.
        since = now - self._polled
        fresh = self.touched != touched
        self._age = min(max(time.time() - self.touched, 0.0), since) if fresh else self._age + since
        self._polled = now
        return self._state() != before

    @property
    def mark(self) -> str:
        """An identifier of what was read so far; equal for equal records."""
        return f"{self._offset}-{int(self.touched * 1e3)}-{len(self.summary)}"

    def _state(self) -> tuple[Any, ...]:
        return self._offset, self.touched, self.gone, self.damaged, self.config, self.summary, self.more

    def _lost(self, sentence: str) -> None:
        self.gone, self.more = sentence, False

    def _start_again(self) -> None:
        self.columns = Columns(self.run_dir, self.config)
        self._offset = 0
        self._last: dict[str, Any] | None = None  # the newest line
        self._wrong[ROUNDS] = ""

    def _facts(self, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """The content of run.json or summary.json, {} if there is no file; ``before`` if damaged or unchanged."""
        path = self.run_dir / name
        found: tuple[int, ...] = ()
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(path)
            found = status.st_ino, status.st_size, status.st_ctime_ns
        if found and found == self._seen.get(name):
            return before
        self._seen[name], self._wrong[name] = found, ""
        try:
            return read_facts(path) or {}
        except PacelineError as error:
            self._wrong[name] = f"{error}."
            if isinstance(error.__cause__, OSError):  # may pass without a change of the file
                del self._seen[name]
            return before

    def _read_rounds(self) -> None:
        try:
            file = open_file(self.run_dir / ROUNDS)
        except FileNotFoundError:
            if self._offset or self._wrong[ROUNDS]:
                self._start_again()
            self.touched = os.stat(self.run_dir / CONFIG).st_mtime
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset:
                self._start_again()
            self.touched = status.st_mtime
            file.seek(self._offset)
            if self._wrong[ROUNDS] and file.read(len(self._bad)) == self._bad:
                return
            self._wrong[ROUNDS] = ""
            file.seek(self._offset)
            data = file.read(CHUNK)
            while data and b"\n" not in data and (rest := file.read(CHUNK)):
                data += rest
            whole = data[: data.rfind(b"\n") + 1]  # the rest is a line that is still being written
            bad = self._take(whole)
            self.more = bool(whole) and self._offset < status.st_size and not bad
        if bad and bad != self._bad:
            self._bad = bad
            if self._offset:
                # Perhaps the file was cut and written again: then the chained checksums no longer match.
                self._start_again()
                self._read_rounds()

    def _take(self, data: bytes) -> bytes:
        """Take in lines up to the first damaged one; returns that one, or b"" if none is damaged."""
        texts = data.splitlines(keepends=True)
        lines, wrong = read_all(texts, self._last)
        if wrong:
            number = len(self.columns) + len(lines) + 1
            self._wrong[ROUNDS] = (
                f"{self.run_dir / ROUNDS}, line {number} is damaged: it {wrong}. The lines before it are shown."
            )
        if lines:
            self._last = lines[-1]
            self.columns.extend(of_lines(self.run_dir, self.config, lines))
        self._offset += sum(map(len, texts[: len(lines)]))
        return texts[len(lines)] if wrong else b""
