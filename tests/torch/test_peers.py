"""Ranks that meet: the store that rank 0 hosts beside the process group's, and how their reports travel."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from support.commands import python
from support.guarantees import guarantee
from support.peers_jobs import counted, hindered, left_early, out_of_reach
from support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm")]


def test_rank_0_may_leave_at_once_and_the_others_are_connected_all_the_same() -> None:
    assert run_ranks(2, left_early, 0.5) == ["connected"] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_reach_the_store_is_named_on_every_rank(who: int) -> None:
    for sentence in run_ranks(3, out_of_reach, who):
        assert sentence.startswith(f"rank {who} cannot reach rank 0 at 127.0.0.1")


@guarantee(
    "Each round has its own rows, in shared memory or over the network, if a report is early, half written "
    "or missing."
)
@pytest.mark.parametrize("apart", [None, 0, 1])
def test_rounds_keep_apart_whatever_becomes_of_their_messages(apart: int | None) -> None:
    for rank, found in enumerate(run_ranks(3, hindered, apart)):
        assert found["kind"] == ("MemoryExchange" if apart is None else "GroupExchange")
        assert found["left"] == [40.0, 41.0, 42.0], "the round before was left, and its message is no other's"
        assert found["early"] == [[50.0, 51.0, 52.0], [60.0, 61.0, 62.0]]
        assert found["half"] == [70.0, 71.0, 72.0]
        assert found["gone"] == [80.0, 81.0, 82.0], "a rank may go as soon as it has sent"
        if rank != 2:
            who = "rank 2" if apart is None else "another rank"
            assert f"{who} has left the run" in found["missing"]


@guarantee(
    "Each sample is claimed once, also if ranks claim at the same instant or one is killed within a claim."
)
@pytest.mark.parametrize(
    ("apart", "name"), [(None, "NearbyCounter"), (2, "StoreCounter"), (0, "StoreCounter")]
)
def test_each_sample_is_claimed_once_whatever_the_ranks_share(apart: int | None, name: str) -> None:
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
def test_ranks_meet_again_though_each_launcher_counts_other_restarts() -> None:
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


def test_a_forked_child_never_ends_what_its_rank_has_let_go_of() -> None:
    done = python(FORKS)
    assert done.returncode == 0, done.stderr
