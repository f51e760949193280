"""Clocks, phases and watches by themselves, with stand-ins for what this machine has not."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.attach import places
from paceline.doctor import watches
from paceline.doctor.phases import HostClock, Phase, Phases, StreamClock
from paceline.doctor.watches import Watch


class Clock:
    """One that the test sets."""

    lag = 0

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def between(self, first: float, second: float) -> float:
        return second - first


def test_a_step_ends_with_its_all_reduce() -> None:
    """Seconds 0 to 7: prepare 1, forward 2, backward 1, reduce 3; then 5 up to the optimizer's end, and the next."""
    clock = Clock()
    phases = Phases(clock)
    for at, phase in ((1, Phase.FORWARD), (3, Phase.BACKWARD), (4, Phase.REDUCE)):
        clock.now = float(at)
        phases.enter(phase)
    clock.now = 7.0
    phases.reduced()
    clock.now = 12.0
    first = phases.close()
    phases.enter(Phase.PREPARE)
    clock.now = 14.0
    phases.enter(Phase.REDUCE)
    clock.now = 15.0
    phases.reduced()
    assert phases.seconds(first) == [0, 1, 0, 2, 0, 1, 3, 0]
    assert phases.seconds(phases.close()) == [0, 2, 0, 0, 0, 0, 1, 5]


def test_what_follows_an_exchange_without_a_step_is_the_next_micro_batch_s() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.enter(Phase.REDUCE)
    clock.now = 1.0
    phases.reduced()
    clock.now = 3.0
    phases.go_on()
    phases.enter(Phase.REDUCE)
    clock.now = 4.0
    phases.reduced()
    assert phases.seconds(phases.close()) == [0, 2, 0, 0, 0, 0, 2, 0]


class Event:
    """A CUDA event on a stream whose clock the test sets."""

    now, waited = 0.0, 0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= 1.0

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def test_events_of_a_stream_are_read_when_they_have_passed() -> None:
    clock = StreamClock(Event)
    first = clock.mark()
    Event.now = 0.25
    second = clock.mark()
    assert clock.between(first, second) == 0.25
    assert Event.waited == 0
    Event.now = 2.0
    assert clock.between(first, clock.mark()) == 2.0
    assert Event.waited == 1
    assert (clock.lag, HostClock().lag) == (1, 0)


def test_only_copies_to_a_device_are_moves() -> None:
    told: list[str] = []
    kept = torch.Tensor.to
    made = watches.moves(lambda _: told.append("begins"), lambda _: told.append("ends"))
    x = torch.ones(2)
    for same in (torch.float64, "cpu", torch.device("cpu"), x.double()):
        x.to(same)
    assert told == []
    for elsewhere in ("meta", torch.device("meta"), torch.ones(1, device="meta")):
        x.to(elsewhere)
    x.to(device="meta", dtype=torch.float64)
    assert told == ["begins", "ends"] * 4
    for watch in made:
        watch.remove()
        watch.remove()
    assert torch.Tensor.to is kept
    assert "to" not in vars(torch.Tensor), "nothing is left on the class"


def test_fetches_of_this_thread_count_and_no_other_s() -> None:
    told: list[dict[str, Any]] = []
    made = watches.fetches(lambda iterator: told.append(watches.loader_of(iterator)), lambda _: None)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)  # type: ignore[arg-type]  # indexed, too
    thread = threading.Thread(target=lambda: list(loader))
    thread.start()
    thread.join()
    assert told == []
    assert len(list(loader)) == 3
    assert told == [{"processes": 0, "stream": False, "whole": True, "options": ["shuffle=False"]}] * 4, (
        "the last call finds the end"
    )
    stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
    next(iter(stream))
    assert told[-1] == {"processes": 0, "stream": True, "whole": False, "options": None}
    seeded = torch.utils.data.DataLoader(range(6), num_workers=1, worker_init_fn=_seed)  # type: ignore[arg-type]
    next(iter(seeded))
    kept = ["shuffle=False", "num_workers={loader}.num_workers", "worker_init_fn={loader}.worker_init_fn"]
    assert told[-1] == {"processes": 1, "stream": False, "whole": True, "options": kept}
    batches = Upwards(torch.utils.data.SequentialSampler(range(6)), 2, False)
    next(iter(torch.utils.data.DataLoader(range(6), batch_sampler=batches)))  # type: ignore[arg-type]
    assert told[-1]["options"] is None, "it chooses by itself which samples are in a batch"
    for watch in made:
        watch.remove()
    next(iter(loader))
    assert len(told) == 7


class Upwards(torch.utils.data.BatchSampler):
    """Of one's own."""


def _seed(worker: int) -> None: ...


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_a_call_that_fails_ends_and_nested_calls_are_one() -> None:
    class Owner:
        def work(self, depth: int) -> int:
            if depth == 0:
                raise ZeroDivisionError
            return depth if depth == 1 else self.work(depth - 1)

    told: list[str] = []
    watch = Watch(Owner, "work", lambda _: told.append("begins"), lambda _: told.append("ends"))
    assert Owner().work(3) == 1
    with pytest.raises(ZeroDivisionError):
        Owner().work(0)
    assert told == ["begins", "ends"] * 2
    watch.remove()
    assert "watched" not in Owner.work.__qualname__


def test_a_method_that_somebody_else_replaced_since_is_left_as_it_is() -> None:
    class Owner:
        def work(self) -> int:
            return 1

    told: list[object] = []
    watch = Watch(Owner, "work", told.append)
    between = Owner.work
    setattr(Owner, "work", lambda self: between(self) + 1)  # noqa: B010  # as another tool would
    watch.remove()
    assert Owner().work() == 2
    assert told == []


def test_lines_may_be_asked_for_while_a_look_is_being_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks may be between making a phase's counter and counting: the training asks, and must not fail."""

    class Asked(Counter[Any]):
        def __missing__(self, key: Any) -> int:
            found.append(lines.found())
            return 0

    monkeypatch.setattr(watches, "Counter", Asked)
    phases, found = iter([Phase.FORWARD]), list[dict[str, str]]()
    monkeypatch.setattr(watches, "PAUSE", 0.0)
    lines = watches.Lines(lambda: next(phases, Phase.REDUCE))
    time.sleep(0.1)
    alive = lines._thread.is_alive()
    lines.stop()
    assert alive
    assert found == []


def test_packages_on_another_path_are_not_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a module system, which sets PYTHONPATH."""
    packages = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages)])
    places._foreign_places.cache_clear()
    try:
        for folder, user in ((packages, False), (tmp_path, True)):
            found: dict[str, Any] = {"sys": sys, "place": places.place}
            exec(compile("found = place(sys._getframe())", str(folder / "a.py"), "exec"), found)
            assert (found["found"] == (str(folder / "a.py"), 1)) == user
    finally:
        monkeypatch.undo()
        places._foreign_places.cache_clear()
