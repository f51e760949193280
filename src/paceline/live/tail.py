"""Follows the record of a run on disk, whatever becomes of it: each ``poll`` costs what is new."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.files import open_file
from paceline.runs.columns import Columns
from paceline.runs.run import CONFIG, ROUNDS, SUMMARY, of_lines, read_all, read_facts

CHUNK = 4 << 20  # bytes read in one poll, so that a long record shows while it is still being read


class Tail:
    """One run directory.

    columns: the rounds so far. config, summary: run.json and summary.json ({} where there is none).
    gone: the sentence for a directory that has vanished, else "". damaged: the same for a bad line.
    touched: when the last round came, seconds since 1970. more: there is more to read already.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.gone = self.damaged = ""
        self.touched = 0.0
        self._age, self._polled = 0.0, -math.inf  # of the last round when it was polled, and when that was
        self.more = False
        self._anew = -1  # the file's size when it was last read from its beginning again
        self._start_again()

    @property
    def silent(self) -> float:
        """Seconds since the last round came, also where the machine's clock was set meanwhile."""
        return self._age + time.monotonic() - self._polled

    def poll(self) -> bool:
        """Read what is new; whether anything is."""
        before = self._state()
        touched, now = self.touched, time.monotonic()
        self.damaged = ""
        try:
            os.stat(self.run_dir / CONFIG)
            self.config = self.columns.config = read_facts(self.run_dir / CONFIG) or {}
            self._read_rounds()
            self.summary = read_facts(self.run_dir / SUMMARY) or {}
            self.gone = ""
        except (FileNotFoundError, NotADirectoryError):
            self._lost(f"The run directory {self.run_dir} is gone; this page shows what was read before.")
        except OSError as error:
            self._lost(f"The run directory {self.run_dir} cannot be read: {error.strerror or error}.")
        except PacelineError as error:
            self.damaged = f"{error}."
        # A clock that was set knows when the file was written as little as that of another machine does.
        since = now - self._polled
        fresh = self.touched != touched
        self._age = min(max(time.time() - self.touched, 0.0), since) if fresh else self._age + since
        self._polled = now
        return self._state() != before

    @property
    def mark(self) -> str:
        """Names what was read so far; the same for the same record, whoever reads it."""
        return f"{self._offset}-{int(self.touched * 1e3)}-{len(self.summary)}"

    def _state(self) -> tuple[Any, ...]:
        return self._offset, self.touched, self.gone, self.damaged, self.config, self.summary, self.more

    def _lost(self, sentence: str) -> None:
        self.gone, self.more = sentence, False

    def _start_again(self) -> None:
        self.columns = Columns(self.run_dir, self.config)
        self._offset = 0
        self._last: dict[str, Any] | None = None  # the newest line
        self.damaged = ""

    def _read_rounds(self) -> None:
        try:
            file = open_file(self.run_dir / ROUNDS)
        except FileNotFoundError:
            if self._offset:
                self._start_again()
            self.touched = os.stat(self.run_dir / CONFIG).st_mtime
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset:
                self._start_again()
            self.touched = status.st_mtime
            file.seek(self._offset)
            data = file.read(CHUNK)
            while data and b"\n" not in data and (rest := file.read(CHUNK)):
                data += rest
            whole = data[: data.rfind(b"\n") + 1]  # what stands after it is a line that is being written
            self._take(whole)
            self.more = bool(whole) and self._offset < status.st_size and not self.damaged
        if self.damaged and self._offset and self._anew != status.st_size:
            # It was cut and written again, perhaps: sums go on from line to line, and no longer fit then.
            self._start_again()
            self._anew = status.st_size
            self._read_rounds()

    def _take(self, data: bytes) -> None:
        texts = data.splitlines(keepends=True)
        lines, wrong = read_all(texts, self._last)
        read = sum(map(len, texts[: len(lines)]))
        if wrong:
            number = len(self.columns) + len(lines) + 1
            self.damaged = f"{self.run_dir / ROUNDS}, line {number} is damaged: it {wrong}."
        if lines:
            self._last = lines[-1]
            self.columns.extend(of_lines(self.run_dir, self.config, lines))
        self._offset += read
