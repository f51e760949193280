"""Other machines on which workers run, as the launcher that keeps the store sees them: each has a guard of its own
there, which starts and kills as it is told (``station``)."""

from __future__ import annotations

import time
from typing import Any

from paceline.torch.elastic.generation import Where
from paceline.torch.elastic.messages import OPEN, Seal
from paceline.torch.liveness.detector import EVERY, FailureDetector

COUNT, OVER = "machines", "over"
FIRST = 2  # number of the machine that joins first: that of the store is machine 1
GONE = -1000  # the status of a worker on a machine that gave no sign of life
BYE_SECONDS = 3.0  # that the other guards have to hear of the end, at most


class Keys:
    """What the guard of one machine and the launcher tell each other in the store."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.room, self.life, self.orders, self.order, self.lost, self.left, self.bye = (
            f"machine/{number}/{what}" for what in ("room", "life", "orders", "order", "lost", "left", "bye")
        )


def ended(ident: int) -> str:
    """The key of the status with which a worker has ended."""
    return f"ended/{ident}"


class Remote:
    """A worker on another machine, or one that waits for a machine with room."""

    def __init__(self, machines: Machines, where: Where) -> None:
        self.where, self._machines = where, machines
        self.machine: Machine | None = None
        self.over: int | None = None
        self.pid = None

    def status(self) -> int | None:
        return self.over

    def kill(self) -> None:
        self._machines.tell(self, "kill")

    def leave(self) -> None:
        self._machines.tell(self, "leave")


class Machine:
    """One that has a guard."""

    def __init__(self, number: int, room: int) -> None:
        self.keys = Keys(number)
        self.room, self.workers = room, list[Remote]()
        self.orders = 0


class Machines:
    """All others. store: a TCPStore that this process holds. dead: seconds without a sign of life after which a
    machine counts as lost. seal: of the run."""

    def __init__(self, store: Any, dead: float, seal: Seal = OPEN) -> None:
        self._store, self._dead, self._seal, self._signs = store, dead, seal, FailureDetector(dead)
        self._machines: list[Machine] = []  # that live
        self._known = FIRST
        self._waiting: list[Remote] = []

    def start(self, where: Where) -> Remote:
        """A worker that starts as soon as a machine has room for it."""
        self._waiting.append(remote := Remote(self, where))
        return remote

    @property
    def free(self) -> int:
        """So many more workers have room."""
        return sum(machine.room - len(machine.workers) for machine in self._machines) - len(self._waiting)

    def look(self) -> list[str]:
        """See to all of them, and return at once. What is worth telling."""
        found = []
        for number in range(self._known, FIRST + self._store.add(COUNT, 0)):
            keys = Keys(number)
            if not self._store.check([keys.room]):
                break  # it is about to tell
            self._known += 1
            self._machines.append(Machine(number, self._told(keys.room, number)))
            found.append(f"machine {number} has joined")
        now = time.monotonic()
        if self._signs.due(now):
            found += [self._lose(machine) for machine in self._silent(now)]
        for machine in list(self._machines):
            for remote in list(machine.workers):
                if self._store.check([ended(remote.where.ident)]):
                    remote.over = self._told(ended(remote.where.ident), machine.keys.number)
                    machine.workers.remove(remote)
            if not machine.workers and self._store.check([machine.keys.left]):
                self._machines.remove(machine)
                found.append(f"machine {machine.keys.number} has left")
                continue
            while self._waiting and len(machine.workers) < machine.room:
                remote = self._waiting.pop(0)
                remote.machine = machine
                machine.workers.append(remote)
                self._order(machine, "start", remote)
        return found

    def tell(self, remote: Remote, what: str) -> None:
        """Have a worker killed, or told to leave."""
        if remote in self._waiting:
            self._waiting.remove(remote)
            remote.over = 0
        elif remote.machine in self._machines and remote.over is None:
            self._order(remote.machine, what, remote)

    def close(self, status: int) -> None:
        """The run is over; returns when the guards that live know."""
        self._tell(OVER, status)
        until = time.monotonic() + BYE_SECONDS
        keys = [machine.keys.bye for machine in self._machines]
        while keys and not self._store.check(keys) and time.monotonic() < until:
            time.sleep(EVERY)

    def _order(self, machine: Machine | None, what: str, remote: Remote) -> None:
        assert machine is not None
        where = remote.where._replace(secret="")  # which the guard there has of its own
        self._tell(f"{machine.keys.order}/{machine.orders}", [what, where])
        machine.orders += 1
        self._tell(machine.keys.orders, machine.orders)

    def _tell(self, key: str, words: Any) -> None:
        self._store.set(key, self._seal.closed(key, words))

    def _told(self, key: str, machine: int) -> int:
        return int(self._seal.opened(key, self._store.get(key), f"the guard of machine {machine}"))

    def _lose(self, machine: Machine) -> str:
        self._machines.remove(machine)
        self._store.set(machine.keys.lost, "1")  # where it lives, it ends its workers
        for remote in machine.workers:
            remote.over = GONE
        return f"machine {machine.keys.number} gave no sign of life for {self._dead:g} s"

    def _silent(self, now: float) -> list[Machine]:
        lives = {each.keys.number: bytes(self._store.get(each.keys.life)) for each in self._machines}
        silent = self._signs.silent(now, lives)
        return [machine for machine in self._machines if machine.keys.number in silent]
