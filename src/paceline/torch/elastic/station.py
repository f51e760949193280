"""A machine's part in a run whose store another machine keeps: starts and ends workers here as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.gateway import LOOPBACK, Tunnel, check_open
from paceline.torch.elastic.generation import Where
from paceline.torch.elastic.keeper import Worker
from paceline.torch.elastic.machines import COUNT, FIRST, OVER, Keys, ended
from paceline.torch.elastic.messages import OPEN, Seal
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.detector import BEAT_SECONDS

LOOK = 0.01  # seconds between two looks
FIRST_SECONDS = 5.0  # that a call may take by which a machine joins; it is tried again


class Lost(Exception):
    """The store does not answer."""


class Station:
    """start: starts a worker. room: for so many. dead: seconds without an answer of the store after which the workers
    here are killed, since the others go on without them. patience: seconds for which the store may be away.

    tell: takes sentences about what happens. token: of the run; None where the first guard is on this machine, too.

    Raises PacelineError, from ``run``, where the first has another token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        room: int,
        start: Callable[[Where], Worker],
        dead: float,
        patience: float,
        tell: Callable[[str], None],
        token: str | None = None,
    ) -> None:
        self._host, self._port, self._room = host, port, room
        self._start, self._dead, self._patience, self._tell = start, dead, patience, tell
        self._workers: dict[int, Worker] = {}
        self._leaving, self._seal = False, OPEN
        self._tunnel = None if token is None else Tunnel(host, port, token)

    def run(self) -> int:
        """Until the run is over, once: its exit status. Raises WorkerError where the store stays away."""
        away = time.monotonic()
        told = False
        try:
            while True:
                try:
                    with closing(_Store(self._host, self._port, self._dead, self._tunnel)) as store:
                        keys = self._join(store)
                        self._tell(f"machine {keys.number} of the run at {self._host}:{self._port}")
                        told = False
                        return self._serve(store, keys)
                except Lost as lost:
                    if self._workers or not told:
                        away, told = time.monotonic(), True
                        what = (
                            "the workers here end, and this machine joins again"
                            if self._workers
                            else "this machine joins"
                        )
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
        keys = Keys(store.first("add", COUNT, 1) - 1 + FIRST)
        store.first("set", keys.life, "1")
        store.first("set", keys.orders, self._seal.closed(keys.orders, 0))
        store.first("set", keys.room, self._seal.closed(keys.room, self._room))
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
        return self._seal.opened(key, store.ask("get", key), "the guard of the first machine")

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
    """A connection on which no call waits for longer than ``dead`` seconds. tunnel: through it. Raises Lost."""

    def __init__(self, host: str, port: int, dead: float, tunnel: Tunnel | None) -> None:
        self._host, self._port, self._dead, self._tunnel = host, port, dead, tunnel
        self._calls = Calls("store")
        self.secret = ""  # of the run
        self._store: Any = None
        try:
            self._store = self._within(FIRST_SECONDS, self._connect)
        except BaseException:
            self.close()
            raise

    def first(self, name: str, *arguments: Any) -> Any:
        """A call by which a machine joins: the store may be busy with many."""
        return self._within(FIRST_SECONDS, getattr(self._store, name), *arguments)

    def ask(self, name: str, *arguments: Any) -> Any:
        """A call."""
        return self._within(self._dead, getattr(self._store, name), *arguments)

    def last(self, key: str) -> None:
        """Tell something, and nothing after it: unlike ``set``, this call returns when it is there."""
        with suppress(Lost):  # who has heard it may be gone
            self.ask("compare_set", key, "", "1")

    def close(self) -> None:
        """Let go of the connection."""
        self._calls.close(0.0)  # a call that hangs keeps its thread
        self._store = None

    def _connect(self) -> dist.TCPStore:
        # First, since torch prints a page of its own calls where nobody listens.
        host, port = self._host, self._port
        if self._tunnel is None:
            check_open(host, port, FIRST_SECONDS)
        else:
            self.secret = self._tunnel.knock()
            host, port = LOOPBACK, self._tunnel.port
        wait = timedelta(seconds=FIRST_SECONDS)
        return dist.TCPStore(host, port, None, False, wait, wait_for_workers=False)

    def _within(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._calls.within(seconds, call, *arguments)
        except TimeoutError as error:
            raise Lost(f"{self._host}:{self._port} has not answered for {seconds:g} s") from error
        except PacelineError:
            raise
        except (RuntimeError, OSError, EOFError) as error:  # torch's own are RuntimeErrors
            raise Lost(f"nobody answers at {self._host}:{self._port}") from error
