"""``lsp``: limited synchronous parallel (Zhu, Xue, Xu, Zhang and Sun 2022): groups of l workers, and sometimes all.

The gradients of the first l workers to push are aggregated, and these get the new model; the others continue (a
limited barrier). After m limited barriers all workers wait for each other once. The paper also calls l a difference
of iterations; its formulas count workers, and so does this class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from paceline.errors import whole
from paceline.sync.protocol import GONE, IDLE, Apply, Effects, Gate, Gradient, Release, replaced, weight_of


class LspState(NamedTuple):
    version: int
    group: int
    limited: int  # limited barriers since the last global one
    assigned: tuple[int, ...]
    pending: tuple[Gradient, ...]  # the limited list


@dataclass(frozen=True)
class Lsp(Gate[LspState]):
    """Updates from groups of ``group`` workers; after ``barrier`` of them one that waits for all.

    WLBS, eq. (4), section 3.1.

    Args:
        workers: Number of workers, n.
        mode: "push-wait".
        group: l, from 1 (asp, without barrier) to n (bsp); 0 takes half of the workers, at least 1.
        barrier: m, 1 or more; 0 never waits for all.
        scale: With "batch" a sample counts as much as under BSP; "mean" averages over each group (K-async SGD).
        stale: "full" or "inverse", which scales a gradient of staleness d - 1 by 1 / d.
    """

    workers: int
    mode: str = "push-wait"
    group: int = 0
    barrier: int = 5
    scale: Literal["batch", "mean"] = "batch"
    stale: Literal["full", "inverse"] = "full"
    takes_quorum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("lsp: group", self.group, 0, self.workers)
        whole("lsp: barrier", self.barrier, 0)

    def init(self) -> tuple[Effects, LspState]:
        n = self.workers
        group = self.group or max(1, n // 2)
        return (Release(tuple(range(n)), 0, 0),), LspState(0, group, 0, (0,) * n, ())

    def arrive(self, state: LspState, worker: int, now: float) -> tuple[Effects, LspState]:
        base = state.assigned[worker]
        gradient = Gradient(worker, base, weight_of(state.version - base, self.stale))
        assigned, pending = replaced(state.assigned, worker, IDLE), (*state.pending, gradient)
        return self._go_on(state._replace(assigned=assigned, pending=pending))

    def leave(self, state: LspState, worker: int, now: float) -> tuple[Effects, LspState]:
        return self._go_on(state._replace(assigned=replaced(state.assigned, worker, GONE)))

    def join(self, state: LspState, worker: int, now: float) -> tuple[Effects, LspState]:
        assigned = replaced(state.assigned, worker, state.version)
        return (Release((worker,), state.version, state.version),), state._replace(assigned=assigned)

    def expect(self, state: LspState, quorum: int, now: float) -> tuple[Effects, LspState]:
        return self._go_on(state._replace(group=quorum))

    def _go_on(self, state: LspState) -> tuple[Effects, LspState]:
        may_come = sum(assigned not in (IDLE, GONE) for assigned in state.assigned)
        everybody = bool(self.barrier) and state.limited >= self.barrier
        have = len(state.pending)
        wanted = have + may_come if everybody else min(state.group, have + may_come)
        if not have or have < wanted:
            return (), state
        version = state.version + 1
        free = tuple(worker for worker, assigned in enumerate(state.assigned) if assigned == IDLE)
        assigned = tuple(version if d == IDLE else d for d in state.assigned)
        effects: Effects = (Apply(state.pending, self.scale),)
        if free:
            effects += (Release(free, version, version),)
        limited = 0 if everybody else state.limited + 1
        return effects, state._replace(version=version, limited=limited, assigned=assigned, pending=())
