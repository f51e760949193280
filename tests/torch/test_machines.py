"""Ranks find their machines as the parameter server's workers do."""

import pytest

from paceline.machines import measure
from paceline.torch import peers
from support.ranks import run_ranks

pytestmark = pytest.mark.processes


def machines(rank: int, ranks: int) -> tuple[list[float], list[float], list[float]]:
    """CPUs, cores and memory of all ranks, as this rank knows them."""
    found = peers.machines()
    return found.cpus.tolist(), found.cores.tolist(), found.memory.tolist()


def test_ranks_of_one_machine_share_it():
    found = run_ranks(3, machines)
    here = measure()
    for cpus, cores, memory in found:
        assert cpus == pytest.approx([len(here.processors) / 3] * 3)
        assert memory == pytest.approx([here.memory / 3] * 3)
        assert all(core > 0 for core in cores)
    assert found[0] == found[1] == found[2], "the ranks must plan alike"
