"""``paceline serve --sync``: SQLite forces each commit to the disk; without it, a commit outlives the process."""

from __future__ import annotations

import gc
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
import uvicorn

from support.commands import paceline

GUARANTEES = ("With `--sync`, each commit is forced to the disk before it is answered.",)

FULL, NORMAL = 2, 1  # as SQLite's "pragma synchronous" says


@pytest.mark.parametrize(("options", "forced"), [(["--sync"], FULL), (["--no-sync"], NORMAL), ([], NORMAL)])
def test_commits_are_forced_to_the_disk_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], forced: int
) -> None:
    opened: list[sqlite3.Connection] = []
    connect, found = sqlite3.connect, []

    def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **named))
        return opened[-1]

    def run(self: uvicorn.Server, sockets: Any = None) -> None:
        found.append(opened[-1].execute("pragma synchronous").fetchone()[0])

    for module, name in ((gc, "freeze"), (gc, "set_threshold"), (sys, "setswitchinterval")):
        monkeypatch.setattr(module, name, lambda *_: None)  # what a service sets for its whole process
    monkeypatch.setattr(sqlite3, "connect", connected)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert paceline("serve", "--dir", tmp_path, "--port", 0, *options).stderr == ""
    assert found == [forced]
