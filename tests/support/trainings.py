"""A ``paceline train`` in a process of its own: its processes, and the rounds that it has recorded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from support.forks import Program, below


def rounds(run_dir: Path) -> int:
    record = run_dir / "rounds.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def workers_of(process: Program) -> list[psutil.Process]:
    """The training processes below the command, by the time of their start: those that the server has forked."""
    there = [(each, each.ppid()) for each in below(process.pid)]
    servers = [each.pid for each, parent in there if parent == process.pid]
    return sorted(
        (each for each, parent in there if parent in servers), key=lambda each: (each.create_time(), each.pid)
    )


def session_of(process: Program) -> list[psutil.Process]:
    """All processes that the command started, also those whose parent has ended; zombies left out."""
    found = []
    for each in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(each.pid) == process.pid and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found
