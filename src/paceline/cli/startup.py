"""What commands say first: that something is being loaded, which takes seconds; of a training, how to watch it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError
from paceline.files import check_directory


def place(out: str | None, data: str, model: str, chosen: list[str]) -> Path:
    """The directory that the run goes into, one of its own for each of several policies: ``out``, or runs/LABEL, or
    runs/LABEL-2 and so on if that exists.

    Raises PacelineError if it cannot be made or holds something already.
    """
    kind = chosen[0].split(":")[0] if len(chosen) == 1 else "compare"
    # Words that are no policy's name are told later; no directory is named after them.
    kind = kind if kind.replace("-", "").isalnum() else "train"
    label, number = f"{Path(data).stem}-{model}-{kind}", 1
    base = Path(out) if out is not None else Path("runs") / label
    while out is None and base.exists():
        number += 1
        base = base.with_name(f"{label}-{number}")
    check_directory(base)
    if base.exists() and any(base.iterdir()) and not restarted() and leads():
        raise PacelineError(
            f"run directory {base} exists; choose another with --out, or go on with --resume {base}"
        )
    return base


@contextmanager
def loading(words: str) -> Iterator[None]:
    """Say on a terminal what is being loaded, as long as the context lasts.

    Nobody waits before an empty screen then, and nothing of it stays: what is wrong with the options is told alone.
    """
    shown = leads() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print(words, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def announce(base: Path, target: str | None) -> None:
    """How to watch the run. target: where figures go (``--json``); people read beside them."""
    if leads():
        where = sys.stderr if target == "-" else sys.stdout
        print(f"Watch this run in a browser: paceline watch {shlex.quote(str(base))}", file=where, flush=True)


def launched() -> bool:
    """What ``paceline.torch.liveness.shutdown`` says of the same name, without PyTorch."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def leads() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not launched() or os.environ["RANK"] == "0"


def restarted() -> bool:
    """Whether torchrun started this process again after a failure: it goes on in the same directory."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return launched() and count.isdecimal() and int(count) > 0
