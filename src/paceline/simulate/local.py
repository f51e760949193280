"""``paceline simulate --learn --every``: local steps of each worker between merges, on a virtual clock.

Gradients are real. As with ``paceline.torch.LocalSGD``, the policy divides the samples of an interval between
two merges, each worker runs its samples in plain SGD steps of about B/n samples from the parameters of the last
merge, and the mean of the workers' changes, weighted by samples, is a step of the outer optimizer. Only merges use
the links.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.paramserver.aggregate import Parameters, WorkerGradient, aggregate, axpy
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Task, Update
from paceline.paramserver.samples import SampleSource
from paceline.rounds import Array, Vector
from paceline.simulate.server import Learner, RoundTrips
from paceline.simulate.whatif import BULK
from paceline.sync import intervals


class SimulatedLocalSteps:
    """One run; ``run`` plays it, and ``parameters`` then holds the shared model.

    by: lr, policy and the batch B of one step of all workers; its gate and backup policy belong to a server and must
        be the defaults. trips: seconds of each step, without links. links: seconds that each worker's link takes
        for a merge, by the merge's index; the longest counts. members: the workers present in an interval, and those
        of them that stop without notice before its end, each (n,). give_up: seconds until the others stop waiting.
    """

    def __init__(
        self,
        learner: Learner,
        by: ServerConfig,
        trips: RoundTrips,
        pool: SampleSource,
        every: str,
        outer: str = "mean",
        links: Callable[[int], Array] = lambda index: np.zeros(1),
        members: Callable[[int], tuple[NDArray[np.bool_], NDArray[np.bool_]]] | None = None,
        give_up: float = 0.0,
    ) -> None:
        for name, usual in (BULK | {"rate": "fixed"}).items():
            if (given := getattr(by, name)) != usual:
                raise PacelineError(
                    f"--{name} {given} is for a parameter server, which --every does not use; leave one of them out"
                )
        self._every, self._outer = intervals.interval(every), intervals.outer(outer)
        everyone = np.ones(by.workers, bool)
        self._members = members or (lambda index: (everyone, ~everyone))
        self._learner, self._by, self._trips, self._pool = learner, by, trips, pool
        self._links, self._give_up = links, give_up
        self._step = -(-by.global_batch // by.workers)  # samples of a worker's step
        fixed = isinstance(self._every, int)
        self._size = by.global_batch * (int(self._every) if fixed else 1)
        most = self._size if fixed else by.global_batch * intervals.MOST_STEPS
        self._balancer = dataclasses.replace(by, global_batch=most, limits=None).balancer(by.machines)
        self._most = [
            most if limit is None else limit for _, limit in by.limits or ((None, None),) * by.workers
        ]
        self.parameters = Parameters(learner.start())
        self.now, self.linked = 0.0, 0.0  # seconds: total, and of links
        self.steps = np.zeros(by.workers, np.int64)  # steps taken by each worker
        self._velocity: Vector | float = 0.0

    def run(self, merges: int, stop: Callable[[Update], bool]) -> list[Update]:
        """Play until ``merges`` merges are made, or ``stop`` returns True."""
        updates: list[Update] = []
        while len(updates) < merges and not (updates and stop(updates[-1])):
            updates.append(self._interval(len(updates)))
        return updates

    def _interval(self, index: int) -> Update:
        present, stopped = self._members(index)
        loads = self._balancer.loads(index, self._size, present)
        seconds = np.full(len(loads), np.nan)
        parts, tasks, lost = list[WorkerGradient](), list[Task](), 0
        for worker in np.flatnonzero(present & (loads > 0)).tolist():
            load, most = int(loads[worker]), self._most[worker]
            # Steps of about the usual number of samples, and no more than fit into the worker's memory.
            count = max(round(load / min(self._step, most)), -(-load // most), 1)
            cuts = [load // count + (each < load % count) for each in range(count)]
            took = 0.0
            values, losses = self.parameters.values.copy(), list[float]()
            for number, size in enumerate(cuts, int(self.steps[worker])):
                took += self._trips.seconds(worker, number, size, self.now + took)
                if stopped[worker]:
                    continue
                taken = self._pool.take(worker, size)
                gradient, loss = self._learner.gradient(values, taken)
                axpy(values, gradient, -self._by.lr)
                losses.append(loss)
                tasks.append(Task(number, worker, index, index, taken, size, self.now))
            self.steps[worker] += len(cuts)
            if stopped[worker]:
                lost += len(cuts)
                continue
            seconds[worker] = took
            loss = float(np.average(losses, weights=cuts))
            parts.append(WorkerGradient(self.parameters.values - values, loss, int(loads[worker])))
        found, outer = aggregate(parts), self._outer
        change = found.step
        if outer.nesterov:  # as in torch.optim.SGD
            self._velocity = outer.momentum * self._velocity + change
            change = change + outer.momentum * self._velocity
        self.parameters.move(change, outer.lr)
        here = present & ~stopped
        link = float(np.broadcast_to(self._links(index), here.shape)[here].max())
        longest = max(float(np.nanmax(seconds)), self._give_up if lost else 0.0)
        loads = np.where(np.isnan(seconds), 0, loads)
        # Workers without samples report 0 seconds: the balancer takes NaN for absence.
        _, shares = self._balancer.report(index, loads, np.where(here & np.isnan(seconds), 0.0, seconds))
        samples = int(loads.sum())
        if not isinstance(self._every, int) and longest > 0:
            self._size = intervals.next_size(
                self._every, self._by.global_batch, self._size, samples, longest, link
            )
        self.now += longest + link
        self.linked += link
        return Update(
            step=index,
            batch=samples,
            ended=self.now,
            seconds=longest + link,
            quorum=len(parts),
            wanted=int(present.sum()),
            present=int(present.sum()),
            loss=found.loss,
            rate=self._by.lr,
            norm2=found.norm2,
            variance=found.variance,
            loads=loads,
            compute=seconds,
            overhead=np.full(len(loads), np.nan),
            staleness=[0] * len(tasks),
            dropped=Counter({"died": lost} if lost else {}),
            dropped_samples=0,
            shares=shares,
            moved=tasks,
        )
