"""The server actors that hold the parameters: one, or several with a part of a large model each.

Gradients go from their worker's process through the object store to these actors, and new parameters the same way
back; the loop that decides gets neither. A large model's gradients are added as they arrive, while others are still
computed, so that an update only waits for the addition of the last one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.errors import WorkerError
from paceline.paramserver.aggregate import Parameters, Sum, WorkerGradient
from paceline.rounds import Vector

SHARD_PARAMETERS = 32 * 2**20  # parameters of a model from which on a second server actor helps
AHEAD_PARAMETERS = 2**20  # parameters from which on adding a gradient takes longer than one more message


class Arrived(NamedTuple):
    """A gradient in the object store: its task's number and samples, its weight, and a ref for each shard. loss: mean
    over its samples. kept: a reference that keeps it in this node's memory."""

    number: int
    samples: int
    weight: float
    refs: Sequence[Any]
    loss: float = 0.0
    kept: Any = None


class Shard:
    """A server actor: it holds a part of the parameters and moves it."""

    def __init__(self, momentum: float, statistics: bool) -> None:
        self._parameters = Parameters(np.zeros(0), momentum, in_place=True)
        self._sum = Sum(statistics)
        self._held: list[int] = []  # tasks whose gradients are already in the sum

    def set(self, values: Vector, velocity: Vector | None = None) -> Vector:
        """Set the first parameters; returns them."""
        self._parameters.values = values.copy()
        self._parameters.velocity = None if velocity is None else velocity.copy()
        return self._parameters.values

    def hold(self, number: int, samples: int, gradient: Vector) -> None:
        """Add this gradient before the update that will probably use it."""
        self._sum.add(WorkerGradient(gradient, 0.0, samples))
        self._held.append(number)

    def update(
        self,
        held: list[int],
        of: list[tuple[int, float]],
        batch: float | None,
        rate: float,
        *gradients: Vector,
    ) -> tuple[Vector | None, tuple[float, float] | None]:
        """Move by the held gradients and these; returns the new parameters and this part's norm2 and variance.

        held: the tasks whose gradients should be in the sum; with an empty list, a new sum begins. If the sum has
        others, nothing is done, and the result is (None, None). of: samples and weight of each of ``gradients``.
        """
        if self._held != held:
            if held:
                return None, None
            self._sum.clear()
        self._held = []
        for gradient, (count, weight) in zip(gradients, of, strict=True):
            self._sum.add(WorkerGradient(gradient, 0.0, count, weight))
        found = self._sum.take(batch)
        self._parameters.move(found.step, rate)
        return self._parameters.values, (found.norm2, found.variance)

    def velocity(self) -> Vector | None:
        """The momentum's state, for a checkpoint."""
        return self._parameters.velocity


class Shards:
    """All server actors of a run, on the node of this process, so that they only end with it.

    values, velocity: the first ones, of the whole model. version: of these values. statistics: as in
    ``aggregate.Sum``. count: the number of actors; 0 to choose it by the model's size.
    """

    def __init__(
        self,
        values: Vector,
        momentum: float,
        statistics: bool,
        *,
        velocity: Vector | None = None,
        version: int = 0,
        count: int = 0,
    ) -> None:
        self.version = version
        count = count or max(1, math.ceil(len(values) / SHARD_PARAMETERS))
        self._ahead = len(values) >= AHEAD_PARAMETERS
        self._held: list[int] = []
        self.actors = [self._actor(momentum, statistics) for _ in range(count)]
        parts = np.array_split(values, count)
        velocities = [None] * count if velocity is None else np.array_split(velocity, count)
        self.refs = [
            actor.set.remote(part, moving)
            for actor, part, moving in zip(self.actors, parts, velocities, strict=True)
        ]  # of the newest parameters, a part each
        ray.wait(self.refs, num_returns=count, fetch_local=False)

    def __len__(self) -> int:
        return len(self.actors)

    def values(self) -> Vector:
        """The newest parameters of the whole model."""
        return np.concatenate(self._get(self.refs))

    def velocity(self) -> Vector | None:
        """The momentum's state of the whole model; None if there is none (yet)."""
        parts = self._get([actor.velocity.remote() for actor in self.actors])
        return None if parts[0] is None else np.concatenate(parts)

    def hold(self, arrived: Arrived) -> None:
        """Add this gradient while others are awaited, if that saves time."""
        if self._ahead and arrived.weight == 1:
            self._held.append(arrived.number)
            for actor, ref in zip(self.actors, arrived.refs, strict=True):
                actor.hold.remote(arrived.number, arrived.samples, ref)

    def update(self, parts: Sequence[Arrived], batch: float | None, rate: float) -> tuple[float, float]:
        """Move the parameters; returns norm2 and variance. batch: as in ``aggregate``. Raises WorkerError if a server
        actor has died."""
        plain = {part.number for part in parts if part.weight == 1}
        held = self._held if plain.issuperset(self._held) else []
        self._held = []
        asked = [self._ask(index, held, parts, batch, rate) for index in range(len(self))]
        for index, statistics in enumerate(self._get([statistics for _, statistics in asked])):
            if statistics is None:  # a gradient was lost before it could be held
                asked[index] = self._ask(index, [], parts, batch, rate)
        found = self._get([statistics for _, statistics in asked])
        self.refs = [values for values, _ in asked]
        self.version += 1
        norm2, variance = np.sum(found, axis=0)
        return float(norm2), float(variance)

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def _actor(self, momentum: float, statistics: bool) -> Any:
        """Start a server actor."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote(Shard).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        return remote.remote(momentum, statistics)

    def _ask(
        self, index: int, held: list[int], parts: Sequence[Arrived], batch: float | None, rate: float
    ) -> Any:
        rest = [part for part in parts if part.number not in held]
        of, refs = [(part.samples, part.weight) for part in rest], [part.refs[index] for part in rest]
        return self.actors[index].update.options(num_returns=2).remote(held, of, batch, rate, *refs)

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        try:
            found: list[Any] = ray.get(list(refs))
        except RayActorError as error:
            raise WorkerError(
                f"the parameter server died after update {self.version}; continue its last checkpoint with --resume"
            ) from error
        return found
