"""Where a command's figures go (``--json FILE|-``), and where people read beside them."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.errors import PacelineError
from paceline.files import check_place, write_whole


def console_for(target: str | None) -> Console:
    """Where people read, beside figures that go to ``target``: wide enough for the table in a file or pipe."""
    console = Console(stderr=target == "-", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110
    return console


class _Output(io.FileIO):
    """Standard output, until nobody reads it any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            print("paceline: nobody reads the output any more; the run goes on without it", file=sys.stderr)
            return len(data)


def outlive_reader() -> None:
    """Let a command go on when whoever reads its output has gone, as ``head`` does: what it makes is files."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        buffer = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, out.errors, line_buffering=True)


def check_json(target: str | None) -> None:
    """Raises PacelineError where figures cannot be written, before the work is done."""
    if target is not None and target != "-":
        if not Path(target).absolute().parent.is_dir():
            raise PacelineError(f"cannot write {target}: its directory does not exist; make it first")
        check_place(target)


def write_json(target: str | None, content: Any, indent: int | None = None) -> None:
    """To a file, to standard output for "-", or nowhere; null for what is infinite or no number."""
    if target is not None:
        write_text(target, json.dumps(_finite(content), indent=indent, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_text(target: str | None, text: str) -> None:
    """The same for figures that are text already."""
    if target == "-":
        sys.stdout.write(text + "\n")
    elif target is not None:
        write_whole(target, text + "\n")
