"""Which lines of the script a rank's own time goes into, found by sampling.

A thread looks about fifty times a second at where the training thread is, and counts the innermost line that is in
one of the user's files. It never stops the training thread, and it uses its own random generator.
"""

from __future__ import annotations

import functools
import linecache
import os
import random
import site
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType

import paceline
from paceline.doctor.phases import Phase

PAUSE = 0.02  # mean seconds between two looks; the pauses vary, so that they do not fall in step with the training
ENOUGH = 5  # a phase with fewer looks is left out
MOST = 0.5  # portion of a phase's looks that a line needs to be named
WIDTH = 60  # characters of a line that are shown
NEVER = (Phase.REDUCE,)  # there the rank waits for others
WITHIN = {  # the line that makes the call says nothing; only lines that run inside the call count
    Phase.FETCH: os.path.join("torch", "utils", "data", "dataloader.py"),
    Phase.FORWARD: os.path.join("torch", "nn", "parallel", "distributed.py"),
    Phase.BACKWARD: os.path.join("torch", "autograd", "__init__.py"),
}


class Lines:
    """Samples the thread that made it until ``stop``; ``found`` gives what it saw."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase, self._watched = phase, threading.get_ident()
        self._seen: dict[Phase, Counter[tuple[str, int]]] = {}
        self._looks: Counter[Phase] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; safe to call twice."""
        self._ended.set()

    def found(self) -> dict[str, str]:
        """The line that most of a phase's time goes into, by the phase's name; phases without one are left out."""
        lines = {}
        for phase, seen in list(self._seen.items()):
            looks = self._looks[phase]
            (file, number), count = seen.most_common(1)[0]
            if looks >= ENOUGH and count >= MOST * looks:
                text = linecache.getline(file, number).strip()
                text = text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
                lines[phase.name] = f"{os.path.basename(file)}, line {number}" + (f": {text}" if text else "")
        return lines

    def _run(self) -> None:
        vary = random.Random(os.getpid())
        while not self._ended.wait(PAUSE * vary.uniform(0.5, 1.5)):
            phase = self._phase()
            if phase in NEVER:
                continue
            frame = sys._current_frames().get(self._watched)
            where = place(frame, WITHIN.get(phase))
            del frame  # it holds the training's variables
            self._looks[phase] += 1
            if where is not None:
                self._seen.setdefault(phase, Counter())[where] += 1


def place(frame: FrameType | None, within: str | None = None) -> tuple[str, int] | None:
    """The innermost line that is in one of the user's files; None if none is within this file's call."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_foreign_places()):
            return name, frame.f_lineno
        if within is not None and name.endswith(within):
            return None
        frame = frame.f_back
    return None


@functools.cache
def _foreign_places() -> tuple[str, ...]:
    """Where files are that are not the user's: Python's own, installed packages, Paceline."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places = [*installed, *site.getsitepackages(), site.getusersitepackages(), *paceline.__path__]
    unique = {form for place in places if place for form in (place, os.path.realpath(place))}
    return (*(os.path.join(place, "") for place in sorted(unique)), "<")
