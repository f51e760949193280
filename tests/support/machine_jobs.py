"""What a rank tells of its machine; in a module of its own so that forked workers can import it."""

from __future__ import annotations

from paceline.torch import peers


def machines(rank: int, ranks: int) -> tuple[list[float], list[float], list[float]]:
    """CPUs, cores and memory of all ranks, as this rank knows them."""
    found = peers.machines()
    return found.cpus.tolist(), found.cores.tolist(), found.memory.tolist()
