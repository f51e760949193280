"""Ranks that meet: the store that rank 0 hosts beside the process group's, and how their reports travel."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from paceline.errors import WorkerError
from paceline.torch import counter as claiming
from paceline.torch import exchange, peers, shared_memory
from support.commands import python
from support.guarantees import guarantee
from support.ranks import errors_of, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm")]


def left_early(rank: int, ranks: int, seconds: float) -> None:
    """Rank 0 goes as soon as it has the store that it hosts, and rank 1 connects ``seconds`` late."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def late(*arguments: Any, **options: Any) -> dist.TCPStore:
        time.sleep(seconds)
        return connect(*arguments, **options)

    if rank == 1:
        dist.TCPStore = late  # type: ignore[misc,assignment]
    peers.own_store(5.0)


def test_rank_0_may_leave_before_others_connect() -> None:
    assert errors_of(2, left_early, 0.5) == ["", ""]


def out_of_reach(rank: int, ranks: int, who: int) -> None:
    """Rank ``who`` cannot reach the store."""
    connect = dist.TCPStore

    @functools.wraps(connect)
    def elsewhere(host: str, port: int, *arguments: Any, **options: Any) -> dist.TCPStore:
        return connect("192.0.2.1", port, *arguments, **options)  # kept for documentation: nobody is there

    if rank == who:
        dist.TCPStore = elsewhere  # type: ignore[misc,assignment]
    peers.own_store(0.5)


@pytest.mark.parametrize("who", [0, 1])
def test_unreachable_store_is_named_on_every_rank(who: int) -> None:
    for sentence in errors_of(3, out_of_reach, who):
        assert sentence.startswith(f"rank {who} cannot reach rank 0 at 127.0.0.1")


PAIR = np.dtype([("told", "f8"), ("more", "f8")])


def hindered(rank: int, ranks: int, apart: int | None) -> None:
    """Messages of 3 ranks are left out, early, half written or missing.

    apart: the rank that shares no memory with the others, as if on another machine; None where all share it."""
    if rank == apart:
        shared_memory.find = lambda *arguments, **named: None  # type: ignore[assignment]
    kind = exchange.connect(PAIR)
    assert type(kind).__name__ == ("MemoryExchange" if apart is None else "GroupExchange")

    def send(step: int) -> None:
        kind.send(step, np.array((10.0 * step + rank, 0.0), PAIR))

    def check(step: int) -> None:
        assert kind.receive(step)["told"].tolist() == [10.0 * step + each for each in range(ranks)]

    send(3)  # a round that all leave
    send(4)
    check(4)
    dist.barrier()
    send(5)
    if rank == 1:
        send(6)  # before the others ask for round 5
    dist.barrier()
    check(5)
    if rank != 1:
        send(6)
    check(6)
    dist.barrier()
    if rank == 1 and isinstance(kind, exchange.MemoryExchange):
        kind._check = lambda message: bytes(4)  # type: ignore[method-assign]
        kind.send(7, np.array((99.0, 9.0), PAIR))
        time.sleep(0.2)
        del kind._check
    send(7)
    check(7)
    if (child := os.fork()) == 0:  # a loader's process that ends
        kind.close()
        os._exit(0)
    os.waitpid(child, 0)
    send(8)
    if rank == 2:  # a rank may go as soon as it has sent
        check(8)
        kind.close()
        dist.barrier()
        return
    dist.barrier()  # the other has closed, and what it sent is still there
    check(8)
    send(9)
    who = "rank 2" if apart is None else "another rank"
    with pytest.raises(WorkerError, match=f"{who} has left the run"):
        kind.receive(9)


@guarantee(
    "Each round has its own rows, in shared memory or over the network, if a report is early, half written "
    "or missing."
)
@pytest.mark.parametrize("apart", [None, 0, 1])
def test_early_lost_or_damaged_messages_keep_rounds_apart(apart: int | None) -> None:
    run_ranks(3, hindered, apart)


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


@guarantee(
    "Each sample is claimed once, also if ranks claim at the same instant or one is killed within a claim."
)
@pytest.mark.parametrize(
    ("apart", "name"), [(None, "NearbyCounter"), (2, "StoreCounter"), (0, "StoreCounter")]
)
def test_each_sample_is_claimed_once(apart: int | None, name: str) -> None:
    found = run_ranks(3, counted, apart)
    assert {kind for kind, _, _ in found} == {name}
    assert sorted(start for _, starts, _ in found for start in starts) == list(range(900))
    assert all(after == [(3, 0), (30, 0)] for _, _, after in found)


MEETS = """
import sys
import torch
import paceline.torch

paceline.torch.join("gloo", 20.0)
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(int(total), flush=True)
sys.stdin.read()
"""


@guarantee(
    "After a worker of one of several torchruns is killed, all ranks meet again at once and waste no restart."
)
def test_ranks_of_launchers_with_different_restarts_meet_again() -> None:
    """Under several torchruns, which keep the store: only the one whose worker was killed counts the restart."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    told |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for counts in (0, 0), (0, 1):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", MEETS],
                env=os.environ | told | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank, count in enumerate(counts)
        ]  # fmt: skip
        try:
            assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["2\n", "2\n"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


FORKS = """
import gc, os, sys

def others():
    "What other modules do in a child before our own function is called: enough for a collection."
    [[] for _ in range(5000)]

os.register_at_fork(after_in_child=others)
from paceline.torch import peers
peers.let_forks_alone()

class Store:
    def __del__(self):
        if os.getpid() != rank:
            os._exit(3)

rank = os.getpid()
gc.collect()
store = Store()
store.itself = store
del store  # garbage, which nobody has collected yet
child = os.fork()
if not child:
    others()
    gc.collect()
    os._exit(0 if gc.isenabled() else 4)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status if gc.isenabled() else 5)
"""


def test_forked_child_leaves_garbage_of_its_rank_alone() -> None:
    done = python(FORKS)
    assert done.returncode == 0, done.stderr
