"""The worker actors of a run: started, replaced, told to leave, each in one of its places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.errors import PacelineError, WorkerError
from paceline.ray.worker import Delay, Program, Worker


class Crew:
    """Workers by place, 0 to ``places`` - 1.

    program, delay, pieces: as for ``Worker``. cpus: that Ray sets aside for each.
    actors: by place, also those that are still starting, whose first words ``starting`` has: place and actor by
    ref. processes: of all that were ever up, by place.
    """

    def __init__(self, places: int, program: Program, pieces: int, delay: Delay | None, cpus: float) -> None:
        self._places, self._pieces, self._delay, self._cpus = places, pieces, delay, cpus
        self._program = ray.put(program)
        self.actors: dict[int, Any] = {}
        self.starting: dict[Any, tuple[int, Any]] = {}
        self.processes: dict[int, int] = {}

    def start(self, seconds: float) -> int:
        """Start all and wait for them; how many parameters their model has.

        Raises WorkerError where one fails, PacelineError where some do not come up in time.
        """
        first = {self._actor(place): place for place in range(self._places)}
        ready, late = ray.wait(list(first), num_returns=len(first), timeout=seconds)
        up = [self._up(first[ref], ref) for ref in ready]
        if late:
            raise PacelineError(
                f"{len(late)} of {self._places} workers did not start in {seconds:g} s; look at the Ray cluster's "
                "free CPUs and memory"
            )
        return up[0]

    def ask(self, method: str, places: Iterable[int]) -> list[Any]:
        """What these workers answer to a question before their first task."""
        return _told([getattr(self.actors[place], method).remote() for place in places])

    def add(self) -> bool:
        """Start a worker in the first free place; False where there is none."""
        free = [place for place in range(self._places) if place not in self.actors]
        if free:
            ref = self._actor(free[0])
            self.starting[ref] = free[0], self.actors[free[0]]
        return bool(free)

    def welcome(self, ref: Any) -> int | None:
        """A starting worker's first word is here: its place; None where it died, or was told to leave meanwhile."""
        place, actor = self.starting.pop(ref)
        if self.actors.get(place) is not actor:
            return None
        try:
            self._up(place, ref)
        except WorkerError:
            del self.actors[place]
            return None
        return place

    def remove(self, place: int) -> None:
        """End a worker."""
        with contextlib.suppress(RayError):
            ray.kill(self.actors.pop(place))

    def close(self) -> None:
        """End all."""
        for place in list(self.actors):
            self.remove(place)

    def _actor(self, place: int) -> Any:
        """Start a worker; the ref of its first word."""
        remote: Any = ray.remote(concurrency_groups={"control": 1})(_controlled())  # type: ignore[call-overload]
        self.actors[place] = remote.options(
            num_cpus=self._cpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote(place, self._program, self._pieces, self._delay)
        return self.actors[place].process.remote()

    def _up(self, place: int, ref: Any) -> int:
        """Note a worker's process; the size of its model."""
        size, self.processes[place] = _told([ref])[0]
        return int(size)


def said(error: Exception) -> str:
    """The innermost sentence of one of Ray's many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _told(refs: list[Any]) -> list[Any]:
    try:
        return list(ray.get(refs))
    except RayError as error:
        raise WorkerError(f"a worker could not start: {said(error)}") from error


def _controlled() -> type[Worker]:
    """The worker with ``cancel`` and ``process`` on a thread of their own, so that they pass a computation."""

    class Controlled(Worker):
        pass

    for name in ("cancel", "process"):
        setattr(Controlled, name, ray.method(concurrency_group="control")(getattr(Worker, name)))
    Controlled.__name__ = Worker.__name__
    return Controlled
