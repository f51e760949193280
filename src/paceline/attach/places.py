"""The lines of a user's program: of a stack, the innermost one outside of Python, installed packages and Paceline."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from types import FrameType

_PACELINE = os.path.dirname(os.path.dirname(__file__))


def place(frame: FrameType | None, within: str | None = None) -> tuple[str, int] | None:
    """The innermost line in a user's file, None if there is none. within: only lines called from this file count."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not foreign(name):
            return name, frame.f_lineno
        if within is not None and name.endswith(within):
            return None
        frame = frame.f_back
    return None


def foreign(file: str) -> bool:
    """Whether a file is not the user's: Python's own, of an installed package, or Paceline's."""
    return file.startswith(_foreign_places())


@functools.cache
def _foreign_places() -> tuple[str, ...]:
    """The directories of files that are not the user's: Python's own, installed packages, Paceline."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    added = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    places = [*installed, *site.getsitepackages(), site.getusersitepackages(), *added, _PACELINE]
    unique = {form for place in places if place for form in (place, os.path.realpath(place))}
    return (*(os.path.join(place, "") for place in sorted(unique)), "<")
