"""What ranks do that meet with hindrances."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch import counter as claiming
from paceline.torch import exchange, peers, piece_reports, shared_memory
from paceline.torch.rows import layout


def left_early(rank: int, ranks: int, seconds: float) -> str:
    """Rank 0 goes as soon as it has the store that it hosts, and rank 1 connects ``seconds`` late; how that ended."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def late(*arguments: Any, **options: Any) -> dist.TCPStore:
        time.sleep(seconds)
        return connect(*arguments, **options)

    if rank == 1:
        dist.TCPStore = late  # type: ignore[misc,assignment]
    return own_store(5.0)


def out_of_reach(rank: int, ranks: int, who: int) -> str:
    """The sentence that a rank gets when rank ``who`` cannot reach the store."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def elsewhere(host: str, port: int, *arguments: Any, **options: Any) -> dist.TCPStore:
        return connect("192.0.2.1", port, *arguments, **options)  # kept for documentation: nobody is there

    if rank == who:
        dist.TCPStore = elsewhere  # type: ignore[misc,assignment]
    return own_store(0.5)


def own_store(timeout: float) -> str:
    """Connect and let go again; the sentence where that fails."""
    try:
        peers.own_store(timeout)
    except PacelineError as error:
        return str(error)
    return "connected"


def exchanged(rank: int, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What this rank receives of all ranks' reports by either exchange; rank r has run r + 1 pieces."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in (exchange.MemoryExchange.of_all(layout(True)), exchange.GroupExchange(layout(True))):
        assert kind is not None
        row = np.zeros((), layout(True))
        row["first"], row["overhead"] = 7, rank / 2
        numbers = piece_reports.report(range(1, rank + 2), [1.0] * (rank + 1), 1e-3)
        row["pieces"] = np.array(numbers).view(piece_reports.ROW)[0]
        kind.send(7, row)
        rows = kind.receive(7)
        sizes = piece_reports.PieceReports.of(rows["pieces"]).pieces
        found[type(kind).__name__] = [
            {"first": one["first"], "overhead": one["overhead"], "sizes": size}
            for one, size in zip(rows, sizes, strict=True)
        ]
        kind.close()
    return found


PAIR = np.dtype([("told", "f8"), ("more", "f8")])


def hindered(rank: int, ranks: int, apart: int | None) -> dict[str, Any]:
    """What 3 ranks receive where messages are left out, early, half written or missing.

    apart: the rank that shares no memory with the others, as if on another machine; None where all share it."""
    if rank == apart:
        shared_memory.find = lambda *arguments, **named: None  # type: ignore[assignment]
    kind = exchange.connect(PAIR)
    found: dict[str, Any] = {"kind": type(kind).__name__}

    def told(step: int) -> list[float]:
        return kind.receive(step)["told"].tolist()

    def send(step: int) -> None:
        kind.send(step, np.array((10.0 * step + rank, 0.0), PAIR))

    send(3)  # a round that all leave
    send(4)
    found["left"] = told(4)
    dist.barrier()
    send(5)
    if rank == 1:
        send(6)  # before the others ask for round 5
    dist.barrier()
    found["early"] = [told(5)]
    if rank != 1:
        send(6)
    found["early"].append(told(6))
    dist.barrier()
    if rank == 1 and isinstance(kind, exchange.MemoryExchange):
        kind._check = lambda message: bytes(4)  # type: ignore[method-assign]
        kind.send(7, np.array((99.0, 9.0), PAIR))
        time.sleep(0.2)
        del kind._check
    send(7)
    found["half"] = told(7)
    if (child := os.fork()) == 0:  # a loader's process that ends
        kind.close()
        os._exit(0)
    os.waitpid(child, 0)
    send(8)
    if rank == 2:
        found["gone"] = told(8)
        kind.close()
        dist.barrier()
        return found
    dist.barrier()  # the other has closed, and what it sent is still there
    found["gone"] = told(8)
    send(9)
    try:
        told(9)
    except WorkerError as error:
        found["missing"] = str(error)
    return found


def counted(rank: int, ranks: int, apart: int | None) -> tuple[str, list[int], list[tuple[int, int]]]:
    """Of ranks that share memory but for rank ``apart``: the name of their counter, where this rank's 300 claims of
    round 7 began, and what is counted after that, and after a process was killed in the middle of an addition.
    """
    if rank == apart:
        make = shared_memory.make
        shared_memory.make = lambda length: (make(length)[0], None)  # type: ignore[assignment]
        shared_memory.find = lambda *arguments, **named: None  # type: ignore[assignment]
    kind = claiming.counter()
    kind.add(6, 5)
    dist.barrier()
    starts = [kind.add(7, 1, reported=int(each == 0), speed=rank - 1).samples for each in range(300)]
    dist.barrier()
    after = [kind.add(7)[1:]]
    if isinstance(kind, claiming.NearbyCounter) and rank == 0:
        heard, tell = os.pipe()
        if (child := os.fork()) == 0:
            kind._lock()
            os.write(tell, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(heard, 1)
        with pytest.raises(WorkerError, match=r"could not claim work for \d+ s"):
            claiming.NearbyCounter(kind._memory, 0.2).add(8, 1)
        os.kill(child, signal.SIGKILL)
        kind.add(8, 0)
        os.waitpid(child, 0)
    dist.barrier()
    kind.add(8, 10)
    dist.barrier()
    after.append(kind.add(8)[:2])
    dist.barrier()
    kind.close()
    return type(kind).__name__, starts, after
