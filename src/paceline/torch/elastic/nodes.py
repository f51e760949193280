"""The other machines of a run: each has a node agent, which starts and kills workers there by the orders of the
supervisor on the first machine, which hosts the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.gateway import LOOPBACK, Forwarder
from paceline.torch.elastic.messages import Signer, Where
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.detector import BEAT_SECONDS, EVERY, FailureDetector

COUNT = "machines"  # the key that counts the machines that have joined
START, LEAVE, KILL = "start", "leave", "kill"  # orders for a worker
FIRST = 2  # number of the machine that joins first: that of the store is machine 1
GONE = -1000  # the status of a worker on a machine that gave no heartbeat
BEGIN_SECONDS = 30.0  # least patience until the run has begun: no rank waits for a sum before
BYE_SECONDS = 3.0  # that the other machines have to acknowledge the end, at most
LOOK = 0.01  # seconds between two looks of a node agent
FIRST_SECONDS = 5.0  # that a call may take while a machine joins: the store may be busy with many


def patience(dead: float, begun: bool) -> float:
    """Seconds without a heartbeat after which a worker or machine counts as lost. begun: whether the run has."""
    return dead if begun else max(dead, BEGIN_SECONDS)


class WorkerProcess(Protocol):
    """A worker from the side of the process that has started it: a ``subprocess.Popen`` or the like."""

    @property
    def pid(self) -> int | None: ...  # None if it is on another machine

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...  # it takes part until the end of the round


class NodeReport(NamedTuple):
    """The report of a machine's node agent in the store. ended: idents of workers, and the status of each."""

    beat: int  # grows with each heartbeat
    room: int  # the number of workers that the machine can run
    ended: tuple[tuple[int, int], ...] = ()
    gone: bool = False  # this is the agent's last report


class Orders(NamedTuple):
    """The supervisor's orders for a machine. workers: those that are to run there, and the newest order for each."""

    workers: tuple[tuple[str, Where], ...] = ()
    over: int | None = None  # the status with which the run has ended
    lost: bool = False  # the others have gone on without this machine
    begun: bool = False  # the run has begun


# Keys in the store: the report of the machine with a number, and the orders for it.
REPORT, ORDERS = "machine/{}/report".format, "machine/{}/orders".format


class Remote:
    """A worker on another machine, or one that waits for a machine with room."""

    def __init__(self, where: Where) -> None:
        self.where = where._replace(secret="")  # the agent there has the secret already
        self.order, self.placed = START, False
        self.over: int | None = None
        self.pid = None

    def poll(self) -> int | None:
        return self.over

    def kill(self) -> None:
        self._set(KILL)

    def terminate(self) -> None:
        self._set(LEAVE)

    def place(self) -> None:
        """A machine has room for it."""
        self.placed = True

    def end(self, status: int | None) -> None:
        """It has ended with this status; None if it still runs."""
        self.over = status

    def _set(self, order: str) -> None:
        self.order = order
        if not self.placed:
            self.over = 0


class OtherMachine:
    """A machine that has a node agent. room: the number of workers that it can run."""

    def __init__(self, room: int) -> None:
        self.room, self.workers = room, list[Remote]()
        self._orders = Orders()

    def ended(self, statuses: dict[int, int]) -> None:
        """Some of its workers have ended with these statuses, by their names."""
        for remote in self.workers:
            remote.end(statuses.get(remote.where.ident))
        self.workers = [remote for remote in self.workers if remote.over is None]

    def ordered(self, orders: Orders) -> bool:
        """Whether these orders differ from the newest ones, which they replace."""
        before, self._orders = self._orders, orders
        return orders != before


class OtherMachines:
    """All other machines of the run. store: a TCPStore that this process holds. dead: seconds without a heartbeat
    after which a machine counts as lost. signer: of the run."""

    def __init__(self, store: Any, dead: float, signer: Signer) -> None:
        self._store, self._dead, self._signer, self._detector = store, dead, signer, FailureDetector(dead)
        self._machines: dict[int, OtherMachine] = {}  # that live, by number
        self._counted, self._begun = FIRST, False
        self._coming: set[int] = set()  # numbers without a report: it is on its way, or its agent has ended
        self._waiting: list[Remote] = []

    def start(self, where: Where) -> Remote:
        """Start a worker as soon as a machine has room for it."""
        self._waiting.append(remote := Remote(where))
        return remote

    @property
    def free(self) -> int:
        """The number of further workers that the machines can run."""
        rooms = sum(machine.room - len(machine.workers) for machine in self._machines.values())
        return rooms - len(self._waiting)

    def look(self, begun: bool = True) -> list[str]:
        """Read all machines' reports, send orders, and return at once. Returns sentences about machines that have
        joined, left or been lost. begun: whether the run has begun."""
        found, self._begun = [], begun
        dead = patience(self._dead, begun)
        counted = FIRST + self._store.add(COUNT, 0)
        self._coming.update(range(self._counted, counted))
        self._counted = counted
        for number in [number for number in sorted(self._coming) if self._store.check([REPORT(number)])]:
            self._coming.remove(number)
            self._machines[number] = OtherMachine(self._report(number).room)
            found.append(f"machine {number} has joined")
        reports = {number: self._report(number) for number in self._machines}
        now = time.monotonic()
        if self._detector.due(now):
            beats = {number: each.beat for number, each in reports.items()}
            for number in self._detector.silent(now, beats, dead):
                self._order(number, Orders(lost=True))  # if the machine lives, it ends its workers
                for remote in self._machines.pop(number).workers:
                    remote.end(GONE)
                found.append(f"machine {number} gave no heartbeat for {dead:g} s")
        self._waiting = [remote for remote in self._waiting if remote.over is None]
        for number, machine in list(self._machines.items()):
            machine.ended(dict(reports[number].ended))
            if reports[number].gone and not machine.workers:
                del self._machines[number]
                found.append(f"machine {number} has left")
                continue
            while self._waiting and len(machine.workers) < machine.room:
                machine.workers.append(remote := self._waiting.pop(0))
                remote.place()
            self._update(number, machine)
        return found

    def close(self, status: int) -> None:
        """The run is over with this status; returns when the agents that live know it."""
        for number, machine in self._machines.items():
            self._update(number, machine, status)
        until = time.monotonic() + BYE_SECONDS
        while not all(self._report(number).gone for number in self._machines) and time.monotonic() < until:
            time.sleep(EVERY)

    def _update(self, number: int, machine: OtherMachine, over: int | None = None) -> None:
        workers = tuple((remote.order, remote.where) for remote in machine.workers)
        wanted = Orders(workers, over, begun=self._begun)
        if machine.ordered(wanted):
            self._order(number, wanted)

    def _order(self, number: int, wanted: Orders) -> None:
        self._store.set(ORDERS(number), self._signer.signed(ORDERS(number), wanted))

    def _report(self, number: int) -> NodeReport:
        key = REPORT(number)
        return NodeReport(
            *self._signer.verified(key, self._store.get(key), f"the launcher of machine {number}")
        )


class Lost(Exception):
    """The store does not answer."""


class NodeAgent:
    """Starts and kills the workers of this machine by the supervisor's orders.

    host, port: address of the first launcher. room: the number of workers that this machine can run. start: starts
    one. dead: seconds without an answer of the store after which the workers here are killed, as the others continue
    without them. patience: seconds for which the store may be away. notify: called with sentences about what happens.
    token: of the run, empty if all launchers are on this machine.

    Raises PacelineError, from ``run``, if the first launcher has another token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        room: int,
        start: Callable[[Where], WorkerProcess],
        dead: float,
        patience: float,
        notify: Callable[[str], None],
        token: str = "",
    ) -> None:
        self._there, self._room = f"{host}:{port}", room
        self._start, self._dead, self._patience, self._notify = start, dead, patience, notify
        self._workers: dict[int, WorkerProcess] = {}
        self._orders: dict[int, str] = {}  # the newest that was carried out, by worker
        self._leaving, self._signer = False, Signer()
        self._forwarder = Forwarder(host, port, token)
        self._calls, self._seconds = Calls("store"), FIRST_SECONDS
        self._store: Any = None

    def run(self) -> int:
        """Serve until the run is over, and return its exit status; call it once. Raises WorkerError if the store does
        not answer for ``patience`` seconds."""
        away = time.monotonic()
        notified = False  # of the store that does not answer
        try:
            while True:
                try:
                    number = self._join()
                    self._notify(f"machine {number} of the run at {self._there}")
                    notified, self._seconds = False, patience(self._dead, False)
                    return self._serve(number)
                except Lost as lost:
                    if self._workers or not notified:
                        away, notified = time.monotonic(), True
                        ends = "the workers here end, and this machine joins again"
                        what = ends if self._workers else "this machine joins"
                        self._notify(f"{lost}; {what} when it answers")
                    self._end()
                if self._leaving:
                    return 0  # all workers here have ended
                if time.monotonic() - away > self._patience:
                    raise WorkerError(
                        f"the machine at {self._there}, which keeps the run together, has not answered for "
                        f"{self._patience:g} s; start the script again from its checkpoint"
                    )
                time.sleep(0.2)
        finally:
            self._end()
            self._forwarder.close()

    def leave(self) -> None:
        """Let all workers here leave, then end; may be called from a signal handler."""
        self._leaving = True
        for worker in list(self._workers.values()):
            worker.terminate()

    def _join(self) -> int:
        """Join over a new connection; returns the number of this machine."""
        self._seconds = FIRST_SECONDS
        self._signer, self._store = self._within(self._connected)
        number = int(self._ask("add", COUNT, 1)) - 1 + FIRST
        # A join that fails takes another number. This one counts for a machine from its first report on, which is
        # written once these orders can be read.
        self._ask("set", ORDERS(number), self._signer.signed(ORDERS(number), Orders()))
        return number

    def _serve(self, number: int) -> int:
        report, beaten = NodeReport(0, self._room), 0.0
        ended: dict[int, int] = {}
        while True:
            raw = self._ask("get", ORDERS(number))
            wanted = Orders(*self._signer.verified(ORDERS(number), raw, "the launcher of the first machine"))
            self._seconds = patience(self._dead, wanted.begun)
            if wanted.lost:
                raise Lost("the others have gone on without this machine")
            for order, words in wanted.workers:
                self._carry_out(order, Where(*words))
            for ident, worker in list(self._workers.items()):
                if (status := worker.poll()) is not None:
                    del self._workers[ident]
                    ended[ident] = status
            gone = wanted.over is not None or (self._leaving and not self._workers)
            now = report._replace(ended=tuple(ended.items()), gone=gone)
            if now != report or time.monotonic() - beaten >= BEAT_SECONDS:
                report, beaten = now._replace(beat=report.beat + 1), time.monotonic()
                self._ask("set", REPORT(number), self._signer.signed(REPORT(number), report))
            if gone:
                with suppress(Lost):  # the supervisor may have read the report and ended
                    self._ask(
                        "check", [REPORT(number)]
                    )  # returns when the report has arrived; ``set`` does not
                if wanted.over:
                    self._notify(f"the first machine has ended the run with status {wanted.over}")
                return wanted.over or 0
            time.sleep(LOOK)

    def _carry_out(self, order: str, where: Where) -> None:
        if where.ident not in self._orders and not self._leaving:
            here = where._replace(secret=self._signer.secret, host=LOOPBACK, port=self._forwarder.port)
            self._workers[where.ident] = self._start(here)
            self._orders[where.ident] = START
            if self._leaving:  # since it was started: ``leave`` did not know it yet
                self._workers[where.ident].terminate()
        if order == self._orders.get(where.ident):
            return
        self._orders[where.ident] = order
        if (worker := self._workers.get(where.ident)) is not None:
            worker.kill() if order == KILL else worker.terminate()

    def _end(self) -> None:
        """Kill the workers here, and drop the connection."""
        for worker in self._workers.values():
            worker.kill()
        # Another run at the same address numbers its workers from 0 again.
        self._workers, self._orders = {}, {}
        self._calls.close(0.0)  # a call that hangs keeps its thread
        self._calls, self._store = Calls("store"), None

    def _connected(self) -> tuple[Signer, dist.TCPStore]:
        # First, since torch prints a long traceback if no process listens.
        secret = self._forwarder.authenticate()
        wait = timedelta(seconds=FIRST_SECONDS)
        return Signer(secret), dist.TCPStore(
            LOOPBACK, self._forwarder.port, None, False, wait, wait_for_workers=False
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """A call to the store."""
        return self._within(getattr(self._store, name), *arguments)

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns. Raises Lost if it does not return within ``_seconds``."""
        try:
            return self._calls.within(self._seconds, call, *arguments)
        except TimeoutError as error:
            raise Lost(f"{self._there} has not answered for {self._seconds:g} s") from error
        except PacelineError:
            raise
        except (RuntimeError, OSError, EOFError) as error:  # torch raises RuntimeError
            raise Lost(f"no answer at {self._there}") from error
