"""``ssp``: stale synchronous parallel (Ho et al. 2013): no worker is more than s clocks ahead of the slowest.

A worker that has finished c gradients may begin the next once all workers have finished c - s. Gradients are
applied in one update when a worker next reads the parameters, so s = 0 is BSP, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.errors import whole
from paceline.sync.protocol import GONE, IDLE, Apply, Effects, Gate, Gradient, Release, replaced, weight_of


class SspState(NamedTuple):
    version: int
    assigned: tuple[int, ...]
    clocks: tuple[int, ...]  # gradients finished
    pending: tuple[Gradient, ...]  # arrived and not yet applied


@dataclass(frozen=True)
class Ssp(Gate[SspState]):
    """No worker runs more than ``staleness`` clocks ahead; samples count as under BSP (LB-BSP, baseline SSP).

    Args:
        workers: Number of workers, n.
        mode: "push-wait".
        staleness: s, clocks, 0 or more; 0 is BSP.
        stale: "full" or "inverse", which scales a gradient of staleness d - 1 by 1 / d (DynSSP).
    """

    workers: int
    mode: str = "push-wait"
    staleness: int = 10
    stale: Literal["full", "inverse"] = "full"

    def __post_init__(self) -> None:
        whole("ssp: staleness", self.staleness, 0)

    def init(self) -> tuple[Effects, SspState]:
        n = self.workers
        return (Release(tuple(range(n)), 0, 0),), SspState(0, (0,) * n, (0,) * n, ())

    def arrive(self, state: SspState, worker: int, now: float) -> tuple[Effects, SspState]:
        base = state.assigned[worker]
        gradient = Gradient(worker, base, weight_of(state.version - base, self.stale))
        assigned, pending = replaced(state.assigned, worker, IDLE), (*state.pending, gradient)
        clocks = replaced(state.clocks, worker, state.clocks[worker] + 1)
        return self._go_on(state._replace(assigned=assigned, clocks=clocks, pending=pending))

    def leave(self, state: SspState, worker: int, now: float) -> tuple[Effects, SspState]:
        return self._go_on(state._replace(assigned=replaced(state.assigned, worker, GONE)))

    def join(self, state: SspState, worker: int, now: float) -> tuple[Effects, SspState]:
        others = [c for c, assigned in zip(state.clocks, state.assigned, strict=True) if assigned != GONE]
        clocks = replaced(state.clocks, worker, min(others, default=0))
        return self._go_on(state._replace(assigned=replaced(state.assigned, worker, IDLE), clocks=clocks))

    def _go_on(self, state: SspState) -> tuple[Effects, SspState]:
        """Release the workers that are close enough to the slowest, at parameters with all arrived gradients."""
        present = [c for c, assigned in zip(state.clocks, state.assigned, strict=True) if assigned != GONE]
        if not present:
            return (), state
        allowed = min(present) + self.staleness
        workers = enumerate(zip(state.clocks, state.assigned, strict=True))
        free = tuple(worker for worker, (clock, assigned) in workers if assigned == IDLE and clock <= allowed)
        if not free:
            return (), state
        effects: Effects = ()
        if state.pending:
            effects = (Apply(state.pending, "batch"),)
            state = state._replace(version=state.version + 1, pending=())
        assigned = tuple(state.version if worker in free else d for worker, d in enumerate(state.assigned))
        return (*effects, Release(free, state.version, state.version)), state._replace(assigned=assigned)
