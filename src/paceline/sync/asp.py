"""``asp``: every gradient moves the parameters as it comes; nobody waits, and all are stale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from paceline.errors import PacelineError
from paceline.sync.protocol import GONE, Apply, Effects, Gradient, Release, replaced


class AspState(NamedTuple):
    version: int
    doing: tuple[int, ...]


def weight_of(staleness: int, stale: str) -> float:
    """1, or with "inverse" 1 / (staleness + 1) (DynSGD, in which d is the staleness plus 1)."""
    return 1.0 if stale == "full" else 1.0 / (staleness + 1)


@dataclass(frozen=True)
class Asp:
    """Every gradient is applied on arrival, a sample counting as much as under BSP (LB-BSP, baseline ASP).

    stale: "full" or "inverse": scale a gradient of staleness d - 1 by 1 / d (LB-BSP, baseline DynSSP).
    """

    workers: int
    mode: str = "push-wait"
    stale: Literal["full", "inverse"] = "full"
    modes: ClassVar[tuple[str, ...]] = ("push-wait",)
    takes_quorum: ClassVar[bool] = False

    def init(self) -> tuple[Effects, AspState]:
        return (Release(tuple(range(self.workers)), 0, 0),), AspState(0, (0,) * self.workers)

    def arrive(self, state: AspState, worker: int, now: float) -> tuple[Effects, AspState]:
        base = state.doing[worker]
        gradient = Gradient(worker, base, weight_of(state.version - base, self.stale))
        version = state.version + 1
        effects = (Apply((gradient,), "batch"), Release((worker,), version, version))
        return effects, AspState(version, replaced(state.doing, worker, version))

    def leave(self, state: AspState, worker: int, now: float) -> tuple[Effects, AspState]:
        return (), state._replace(doing=replaced(state.doing, worker, GONE))

    def join(self, state: AspState, worker: int, now: float) -> tuple[Effects, AspState]:
        return (Release((worker,), state.version, state.version),), state._replace(
            doing=replaced(state.doing, worker, state.version)
        )

    def expect(self, state: AspState, quorum: int, now: float) -> tuple[Effects, AspState]:
        raise PacelineError("asp waits for nobody; leave out the backup policy, or use bsp or lsp")
