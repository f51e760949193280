"""Groups of gloo that are over."""

from __future__ import annotations

import threading

import pytest

from paceline.torch.elastic import group
from support.guarantees import guarantee


@guarantee("A lost member's connections are closed beside the training, which does not wait for that.")
def test_groups_that_are_over_are_destroyed_by_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A destructor waits for threads that a lost member may block."""
    destroyed_by: list[tuple[str, str]] = []

    class Made:
        def __init__(self, name: str, idle: bool = True) -> None:
            self.name, self.idle = name, idle

        def __del__(self) -> None:
            destroyed_by.append((self.name, threading.current_thread().name))

    class AtOnce(threading.Thread):
        """Is through before its starter goes on, which must hold nothing then."""

        def start(self) -> None:
            super().start()
            self.join()

    monkeypatch.setattr(group.threading, "Thread", AtOnce)
    monkeypatch.setattr(group, "_made", [Made("first"), Made("busy", idle=False), Made("used"), Made("last")])
    used = group._made[2]
    group.let_go(None, used)
    assert sorted(destroyed_by) == [("first", "closing a group"), ("last", "closing a group")]
    assert [each.name for each in group._made] == ["busy", "used"]
