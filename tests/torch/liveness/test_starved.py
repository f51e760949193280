"""Which silent workers have work, by made-up counters and by those of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.torch.liveness import detector
from paceline.torch.liveness.detector import EVERY, LOOKS, Starved, Threads, threads

IDLE, READY = Threads(False, False, {1: 0}), Threads(True, False, {1: 0})


def found(seen: Iterable[Threads | None], dead: float = 8 * EVERY) -> list[bool]:
    """Whether a worker counts as one that has work, after each look at what is seen of it."""
    all_seen, now = iter(seen), 100.0
    judge = Starved(dead, lambda _: next(all_seen))
    answers = []
    while True:
        now += EVERY
        try:
            answers.append(7 in judge.look(now, {7: 1}))
        except StopIteration:
            return answers


def growing(share: float, looks: int) -> list[Threads]:
    """Two threads that are never seen ready, and together run and wait for a share of the time."""
    each = share * EVERY * 1e9 / 2
    return [Threads(False, False, {1: int(look * each), 2: int(look * each)}) for look in range(looks)]


def test_a_thread_that_is_ready_has_work_and_threads_that_sleep_have_none() -> None:
    assert found([READY] * 6) == [True] * 6
    assert found([IDLE] * 6) == [False] * 6


def test_a_sleeping_worker_that_is_ready_for_an_instant_is_frozen() -> None:
    assert not any(found([IDLE, IDLE, READY, IDLE, IDLE, IDLE]))


def test_a_starved_worker_that_sleeps_for_an_instant_is_not_frozen() -> None:
    assert all(found([READY, READY, IDLE, READY, READY, READY]))


def test_time_that_was_run_and_waited_between_two_looks_is_work() -> None:
    assert found(growing(0.9, 8))[3:] == [True] * 5
    assert found(growing(0.1, 8)) == [False] * 8


def test_time_of_a_thread_that_ended_takes_none_from_the_others() -> None:
    both = [Threads(False, False, {1: 10**12, 2: round(look * EVERY * 1e9)}) for look in range(3)]
    rest = [Threads(False, False, {2: round(look * EVERY * 1e9)}) for look in range(3, 8)]
    assert found(both + rest)[3:] == [True] * 5


def test_who_had_work_once_and_sleeps_since_is_frozen_within_half_of_the_time() -> None:
    assert found([READY] * 100 + [IDLE] * LOOKS)[-1] is False


def test_who_is_stopped_or_cannot_be_seen_is_frozen_at_once() -> None:
    stopped = Threads(False, True, {1: 0})
    assert found([READY] * 9 + [stopped])[-1] is False
    assert found([READY] * 9 + [None])[-1] is False


def test_who_gave_a_sign_meanwhile_starts_at_nothing() -> None:
    seen = iter([READY] * 9 + [IDLE])
    judge, now = Starved(8 * EVERY, lambda _: next(seen)), 100.0
    for _ in range(9):
        assert judge.look(now, {7: 1}) == {7}
    assert judge.look(now, {}) == set()
    assert judge.look(now, {7: 1}) == set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux shows threads so")
@pytest.mark.parametrize(
    ("code", "stop", "works"),
    [
        ("while True: pass", False, True),
        ("next(filter(float('inf').__lt__, iter(int, None)))", False, True),  # holds Python's lock for ever
        ("time.sleep(1000)", False, False),
        ("ctypes.PyDLL(None).sleep(1000)", False, False),  # sleeps with the lock in its hands
        ("while True: pass", True, False),
    ],
)
def test_processes(code: str, stop: bool, works: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, time; print(flush=True)\n{code}"], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if stop:
                os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.5)
            judge = Starved(1.0)
            for _ in range(10):
                answer = judge.look(time.monotonic(), {0: process.pid})
                time.sleep(EVERY)
            assert process.poll() is None
            assert answer == ({0} if works else set())
        finally:
            process.kill()


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "PROCESSES", tmp_path)
    assert threads(os.getpid()) is None
    assert Starved(1.0).look(100.0, {0: os.getpid()}) == set()


def test_a_kernel_without_schedstat_shows_who_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "PROCESSES", tmp_path)
    for number, state in ((5, "S"), (6, "R")):
        (task := tmp_path / "5" / "task" / str(number)).mkdir(parents=True)
        (task / "stat").write_text(f"{number} (a name) with T in it) {state} 1 2 3")
    assert threads(5) == Threads(True, False, {})
    assert Starved(1.0).look(100.0, {0: 5}) == {0}
