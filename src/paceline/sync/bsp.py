"""``bsp``: each version is made from the first k gradients of the one before (backup workers; k = n is BSP).

Chen et al. 2016; the three ways to hand out parameters are those of Xu, Neglia and Sebastianelli (DBW), Sect. 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from paceline.errors import PacelineError, choice
from paceline.sync.protocol import (
    GONE,
    IDLE,
    Apply,
    Drop,
    Effect,
    Effects,
    Gate,
    Gradient,
    Interrupt,
    Release,
    replaced,
)


class BspState(NamedTuple):
    version: int
    quorum: int
    assigned: tuple[int, ...]  # the version for which each worker's gradient will count, or IDLE or GONE
    arrived: tuple[Gradient, ...]  # of the newest version, in the order of arrival
    late: tuple[Gradient, ...]  # of older versions, for the next update
    tokens: tuple[tuple[int, int], ...]  # in mode "pull": (version, number of tokens), the next ones first


@dataclass(frozen=True)
class Bsp(Gate[BspState]):
    """Every update takes the first k gradients of the newest parameters; k = n waits for all workers.

    LB-BSP, baseline BSP; DBW, section 2.

    Args:
        workers: Number of workers, n.
        mode: What a late worker does when the parameters move: "push-wait" ends its computation first,
            "push-interrupt" drops it at once, "pull" takes the next token of a queue with n tokens for each version.
        late: What happens to late gradients: "drop", or "use" in the next update, weighted by 1 / (staleness + 1).
    """

    workers: int
    mode: str = "push-wait"
    late: Literal["drop", "use"] = "drop"
    modes: ClassVar[tuple[str, ...]] = ("push-wait", "push-interrupt", "pull")
    takes_quorum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choice("bsp: late", self.late, "drop", "use")
        if self.late == "use" and self.mode == "push-interrupt":
            raise PacelineError(
                "late=use with push-interrupt: an interrupted gradient never arrives; use push-wait or pull"
            )

    def init(self) -> tuple[Effects, BspState]:
        n = self.workers
        return (Release(tuple(range(n)), 0, 0),), BspState(0, n, (0,) * n, (), (), ())

    def arrive(self, state: BspState, worker: int, now: float) -> tuple[Effects, BspState]:
        version = state.assigned[worker]
        state = state._replace(assigned=replaced(state.assigned, worker, IDLE))
        gradient = Gradient(worker, version)
        effects: tuple[Effect, ...] = ()
        if version == state.version:
            state = state._replace(arrived=(*state.arrived, gradient))
            fired, state = self._fire(state)
            if fired:
                return fired, state
        elif self.late == "use":
            weight = 1.0 / (state.version - version + 1)
            state = state._replace(late=(*state.late, gradient._replace(weight=weight)))
        else:
            effects = (Drop(gradient),)
        if version != state.version or self.mode == "pull":
            released, state = self._release(state, (worker,))
            effects += released
        if self.mode == "pull":  # all tokens may be used
            fired, state = self._fire(state)
            effects += fired
        return effects, state

    def leave(self, state: BspState, worker: int, now: float) -> tuple[Effects, BspState]:
        tag = state.assigned[worker]
        state = state._replace(assigned=replaced(state.assigned, worker, GONE))
        released: Effects = ()
        if self.mode == "pull" and tag == state.version:  # its token is free again
            state = state._replace(tokens=((tag, 1), *state.tokens))
            idle = tuple(other for other, assigned in enumerate(state.assigned) if assigned == IDLE)
            released, state = self._release(state, idle)
        fired, state = self._fire(state)
        return released + fired, state

    def join(self, state: BspState, worker: int, now: float) -> tuple[Effects, BspState]:
        return self._release(state._replace(assigned=replaced(state.assigned, worker, IDLE)), (worker,))

    def expect(self, state: BspState, quorum: int, now: float) -> tuple[Effects, BspState]:
        return self._fire(state._replace(quorum=quorum))

    def _fire(self, state: BspState) -> tuple[Effects, BspState]:
        """Update if enough gradients have arrived, or all that can still arrive."""
        may_come = sum(version != GONE and version != IDLE for version in state.assigned)
        have = len(state.arrived)
        late_alone = bool(state.late) and not may_come  # no later update could use them
        if not late_alone and (not have or have < min(state.quorum, have + may_come)):
            return (), state
        used = state.arrived + state.late
        version = state.version + 1
        state = state._replace(version=version, arrived=(), late=())
        effects: tuple[Effect, ...] = (Apply(used),)
        busy = tuple(worker for worker, assigned in enumerate(state.assigned) if assigned not in (IDLE, GONE))
        if self.mode == "push-interrupt" and busy:
            effects += (Interrupt(busy),)
            state = state._replace(assigned=tuple(min(assigned, IDLE) for assigned in state.assigned))
        if self.mode == "pull":
            # At least one: a worker with nothing to do counts as gone, and may come back before the next version.
            present = max(sum(assigned != GONE for assigned in state.assigned), 1)
            state = state._replace(tokens=(*state.tokens, (version, present)))
        idle = tuple(worker for worker, assigned in enumerate(state.assigned) if assigned == IDLE)
        released, state = self._release(state, idle)
        return effects + released, state

    def _release(self, state: BspState, workers: tuple[int, ...]) -> tuple[Effects, BspState]:
        """Release parameters to these idle workers; in pull mode one for each token left, oldest tokens first."""
        if self.mode != "pull":
            tags = [state.version] * len(workers)
        else:
            tags, tokens = [], list(state.tokens)
            while tokens and len(tags) < len(workers):
                version, count = tokens.pop(0)
                taken = min(count, len(workers) - len(tags))
                tags += [version] * taken
                if taken < count:
                    tokens.insert(0, (version, count - taken))
            state = state._replace(tokens=tuple(tokens))
        assigned = state.assigned
        effects: list[Effect] = []
        for worker, tag in zip(workers, tags, strict=False):
            assigned = replaced(assigned, worker, tag)
            if effects and isinstance(effects[-1], Release) and effects[-1].tag == tag:
                effects[-1] = effects[-1]._replace(workers=(*effects[-1].workers, worker))
            else:
                effects.append(Release((worker,), state.version, tag))
        return tuple(effects), state._replace(assigned=assigned)
