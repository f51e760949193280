"""Other machines on which workers run: each has a node agent, which starts and kills workers there as it is told by
the supervisor of the first machine, which keeps the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.gateway import LOOPBACK, Tunnel, check_open
from paceline.torch.elastic.membership import Where
from paceline.torch.elastic.messages import OPEN, Seal
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.detector import BEAT_SECONDS, EVERY, FailureDetector

COUNT, OVER = "machines", "over"
FIRST = 2  # number of the machine that joins first: that of the store is machine 1
GONE = -1000  # the status of a worker on a machine that gave no sign of life
BYE_SECONDS = 3.0  # that the other machines have to hear of the end, at most
LOOK = 0.01  # seconds between two looks of a node agent
FIRST_SECONDS = 5.0  # that a call may take by which a machine joins: the store may be busy with many


class WorkerProcess(Protocol):
    """A worker, as whoever has started it sees it."""

    @property
    def pid(self) -> int | None:
        """Its number on this machine; None if it is on another."""
        ...

    def status(self) -> int | None:
        """With what it has ended, below 0 by that signal; None while it lives."""
        ...

    def kill(self) -> None:
        """By SIGKILL, also if it is stopped."""
        ...

    def leave(self) -> None:
        """By SIGTERM: it takes part until the end of the round."""
        ...


class Keys:
    """What the node agent of one machine and the supervisor tell each other in the store."""

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
    """One that has a node agent."""

    def __init__(self, number: int, room: int) -> None:
        self.keys = Keys(number)
        self.room, self.workers = room, list[Remote]()
        self.orders = 0


class Machines:
    """All others. store: a TCPStore that this process holds. dead: seconds without a sign of life after which a
    machine counts as lost. seal: of the run."""

    def __init__(self, store: Any, dead: float, seal: Seal = OPEN) -> None:
        self._store, self._dead, self._seal, self._detector = store, dead, seal, FailureDetector(dead)
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
        if self._detector.due(now):
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
        """The run is over; returns when the agents that live know."""
        self._tell(OVER, status)
        until = time.monotonic() + BYE_SECONDS
        keys = [machine.keys.bye for machine in self._machines]
        while keys and not self._store.check(keys) and time.monotonic() < until:
            time.sleep(EVERY)

    def _order(self, machine: Machine | None, what: str, remote: Remote) -> None:
        assert machine is not None
        where = remote.where._replace(secret="")  # which the agent there has of its own
        self._tell(f"{machine.keys.order}/{machine.orders}", [what, where])
        machine.orders += 1
        self._tell(machine.keys.orders, machine.orders)

    def _tell(self, key: str, words: Any) -> None:
        self._store.set(key, self._seal.closed(key, words))

    def _told(self, key: str, machine: int) -> int:
        return int(self._seal.opened(key, self._store.get(key), f"the launcher of machine {machine}"))

    def _lose(self, machine: Machine) -> str:
        self._machines.remove(machine)
        self._store.set(machine.keys.lost, "1")  # if it lives, it ends its workers
        for remote in machine.workers:
            remote.over = GONE
        return f"machine {machine.keys.number} gave no sign of life for {self._dead:g} s"

    def _silent(self, now: float) -> list[Machine]:
        lives = {each.keys.number: bytes(self._store.get(each.keys.life)) for each in self._machines}
        silent = self._detector.silent(now, lives)
        return [machine for machine in self._machines if machine.keys.number in silent]


class Lost(Exception):
    """The store does not answer."""


class NodeAgent:
    """start: starts a worker. room: for so many. dead: seconds without an answer of the store after which the workers
    here are killed, since the others go on without them. patience: seconds for which the store may be away.

    tell: takes sentences about what happens. token: of the run; None if the first launcher is on this machine, too.

    Raises PacelineError, from ``run``, if the first has another token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        room: int,
        start: Callable[[Where], WorkerProcess],
        dead: float,
        patience: float,
        tell: Callable[[str], None],
        token: str | None = None,
    ) -> None:
        self._host, self._port, self._room = host, port, room
        self._start, self._dead, self._patience, self._tell = start, dead, patience, tell
        self._workers: dict[int, WorkerProcess] = {}
        self._leaving, self._seal = False, OPEN
        self._tunnel = None if token is None else Tunnel(host, port, token)

    def run(self) -> int:
        """Until the run is over, once: its exit status. Raises WorkerError if the store stays away."""
        away = time.monotonic()
        told = False
        try:
            while True:
                try:
                    with closing(_Store(self._host, self._port, self._tunnel)) as store:
                        keys = self._join(store)
                        self._tell(f"machine {keys.number} of the run at {self._host}:{self._port}")
                        told, store.seconds = False, self._dead
                        return self._serve(store, keys)
                except Lost as lost:
                    if self._workers or not told:
                        away, told = time.monotonic(), True
                        ends = "the workers here end, and this machine joins again"
                        what = ends if self._workers else "this machine joins"
                        self._tell(f"{lost}; {what} when it answers")
                    self._end()
                if time.monotonic() - away > self._patience:
                    self._give_up()
                time.sleep(0.2)
        finally:
            self._end()
            if self._tunnel is not None:
                self._tunnel.close()

    def leave(self) -> None:
        """Have all workers here leave, and end; may be called from a signal handler."""
        self._leaving = True
        for worker in list(self._workers.values()):
            worker.leave()

    def _join(self, store: _Store) -> Keys:
        self._seal = Seal(store.secret)
        keys = Keys(store.ask("add", COUNT, 1) - 1 + FIRST)
        store.ask("set", keys.life, "1")
        store.ask("set", keys.orders, self._seal.closed(keys.orders, 0))
        store.ask("set", keys.room, self._seal.closed(keys.room, self._room))
        return keys

    def _serve(self, store: _Store, keys: Keys) -> int:
        beat, beaten, done = 1, 0.0, 0
        while True:
            if time.monotonic() - beaten >= BEAT_SECONDS:
                beat, beaten = beat + 1, time.monotonic()
                store.ask("set", keys.life, str(beat))
                if store.ask("check", [keys.lost]):
                    raise Lost("the others have gone on without this machine")
                if store.ask("check", [OVER]):
                    ends_with = int(self._told(store, OVER))
                    store.last(keys.bye)
                    return ends_with
            orders = int(self._told(store, keys.orders))
            for number in range(done, orders):
                self._carry_out(*self._told(store, f"{keys.order}/{number}"))
            done = orders
            for ident, worker in list(self._workers.items()):
                if (status := worker.status()) is not None:
                    del self._workers[ident]
                    store.ask("set", ended(ident), self._seal.closed(ended(ident), status))
            if self._leaving and not self._workers:
                store.last(keys.left)
                return 0
            time.sleep(LOOK)

    def _carry_out(self, what: str, words: list[Any]) -> None:
        where = Where(*words)._replace(secret=self._seal.secret)
        if self._tunnel is not None:
            where = where._replace(host=LOOPBACK, port=self._tunnel.port)
        if what == "start" and not self._leaving:
            self._workers[where.ident] = self._start(where)
        elif (worker := self._workers.get(where.ident)) is not None:
            worker.kill() if what == "kill" else worker.leave()

    def _told(self, store: _Store, key: str) -> Any:
        return self._seal.opened(key, store.ask("get", key), "the launcher of the first machine")

    def _end(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers = {}

    def _give_up(self) -> NoReturn:
        raise WorkerError(
            f"the machine at {self._host}:{self._port}, which keeps the run together, has not answered for "
            f"{self._patience:g} s; start the script again from its checkpoint"
        )


class _Store:
    """A connection on which no call waits for longer than ``seconds``. tunnel: through it. Raises Lost."""

    def __init__(self, host: str, port: int, tunnel: Tunnel | None) -> None:
        self._host, self._port, self._tunnel = host, port, tunnel
        self._calls, self.seconds = Calls("store"), FIRST_SECONDS  # until this machine has joined
        self.secret = ""  # of the run
        self._store: Any = None
        try:
            self._store = self._within(self._connect)
        except BaseException:
            self.close()
            raise

    def ask(self, name: str, *arguments: Any) -> Any:
        """A call."""
        return self._within(getattr(self._store, name), *arguments)

    def last(self, key: str) -> None:
        """Tell something, and nothing after it: unlike ``set``, this call returns when it is there."""
        with suppress(Lost):  # who has heard it may be gone
            self.ask("compare_set", key, "", "1")

    def close(self) -> None:
        """Let go of the connection."""
        self._calls.close(0.0)  # a call that hangs keeps its thread
        self._store = None

    def _connect(self) -> dist.TCPStore:
        # First, since torch prints a page of its own calls if nobody listens.
        host, port = self._host, self._port
        if self._tunnel is None:
            check_open(host, port, FIRST_SECONDS)
        else:
            self.secret = self._tunnel.knock()
            host, port = LOOPBACK, self._tunnel.port
        wait = timedelta(seconds=FIRST_SECONDS)
        return dist.TCPStore(host, port, None, False, wait, wait_for_workers=False)

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._calls.within(self.seconds, call, *arguments)
        except TimeoutError as error:
            raise Lost(f"{self._host}:{self._port} has not answered for {self.seconds:g} s") from error
        except PacelineError:
            raise
        except (RuntimeError, OSError, EOFError) as error:  # torch's own are RuntimeErrors
            raise Lost(f"nobody answers at {self._host}:{self._port}") from error
