"""The user's handle: balanced batches and exact gradients in your own training loop.

    ddp = DistributedDataParallel(model)
    pace = paceline.torch.Pace(ddp, global_batch=256)
    loader = pace.loader(dataset, seed=0)
    for epoch in range(epochs):
        for x, y in loader:                          # this rank's part of the round
            pace.backward(criterion(ddp(x), y))
            pace.step(optimizer)                     # steps, and zeroes the gradients

With loop="round" a rank may run its part in several pieces, and work moves between the ranks within the round:

        for batch in loader:
            loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))
            pace.step(optimizer)

The gradient equals that of one process with the whole batch: DDP averages over n ranks, so a micro-batch of m
samples with a mean loss is weighted by n m / B (LB-BSP, weighted aggregation: g = (1/X) sum_i |B_i| g_i).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch import metrics, peers
from paceline.torch.balanced import Drawing, Exact
from paceline.torch.callbacks import Callback
from paceline.torch.feed.sampler import BalancedSampler
from paceline.torch.gradients.reducers import reducer_of
from paceline.torch.liveness.monitor import monitor
from paceline.torch.liveness.stall import Reaction, Stall
from paceline.torch.members import Members, Ranks
from paceline.torch.options import Limits, Options


class Pace(Exact, Drawing):
    """Balances one data-parallel model over its ranks.

    Args:
        model: The DistributedDataParallel module, one that ``fully_shard`` has sharded, or a module that wraps
            either. In a single process, a plain module.
        global_batch: Samples per optimizer step over all ranks (B); constant, however they are divided.
        policy: How the batch is divided: a name of ``paceline.policies.names()`` with options,
            ``name:key=value,...``. Or a function that makes a policy of your own for a cluster.
        limits: The fewest and the most samples of a round for each rank, or "memory" to find what fits. Given as
            [(least, most), ...], None for the default: at least 1 (2 with batch norm, which needs a variance), at
            most B. "memory" with loop="round" cuts parts that do not fit at once, and the run survives an
            out-of-memory error; with "whole" loads stay below what fits. See docs/two-cards.md.
        micro_batch: Samples that fit into this rank's memory at once. A larger load is accumulated, piece by piece;
            if the loop takes whole rounds, loads stay below it.
        loop: What one iteration of the training loop is: "whole", "round" or "pieces". "whole": a round, which this
            rank runs at once; every micro-step is an optimizer step, on every rank. "round": a round, which
            ``pace.round(batch, function)`` runs in one or more pieces. "pieces": one piece of a round, so that
            micro-steps differ from rank to rank and ``pace.step`` does nothing until the round is complete. Policies
            that move work within the round need one of the last two; under "whole", "auto" plans as "level" does.
        quantum: Every batch size is a multiple of this number. For captured graphs that need few shapes, and
            augmentations that pair samples.
        weigh: Where gradients are weighted: in the "loss", or in DDP's communication "hook". The hook is for loops
            whose loss cannot be changed: there call ``loss.backward()`` as before.
        deterministic: Give the same bits whichever rank runs which samples. For policies that move work within the
            round: every micro-step is one of the batch's fixed chunks (of ``quantum`` samples; by default B / 32),
            and gradients are summed without rounding. Costs a micro-batch for each chunk, 16 bytes for each
            parameter, and an all-reduce that overlaps with nothing.
        callbacks: Records, trackers and callbacks of your own that take part in the run; the same on every rank.
            ``paceline.torch.callbacks`` has ``Record``, ``Wandb``, ``MLflow``, ``Prometheus``, ``OnRound``,
            ``StopOnNan`` and others.
        stall: The reaction to a silent rank: "warn", "end", a function, or a ``Stall`` that also has the patience.
            "warn" names it in a warning after 30 s without a heartbeat; "end" ends this process with status 1, so
            that a launcher can start the ranks again; ``Stall("end", patience=60)`` does so after 60 s.
        drop: With loop="round" and micro_batch=, the seconds of a round after which a rank runs no further
            micro-batch. This is DropCompute: "0.5 s", a number, or "auto", which finds them from the first 20 rounds.
            The gradient is the mean over the samples that ran, so batches vary, and this epoch does not train the
            rest. See docs/backup.md.

    Construct and use it with the same arguments on all ranks; a PacelineError names a rank that differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        limits: Limits | str | None = None,
        micro_batch: int | None = None,
        loop: str = "whole",
        quantum: int = 1,
        weigh: str = "loss",
        deterministic: bool = False,
        callbacks: Sequence[Callback] = (),
        stall: Reaction = "warn",
        drop: float | str | None = None,
    ) -> None:
        given = Options(
            global_batch,
            policy,
            limits=limits,
            micro_batch=micro_batch,
            loop=loop,
            quantum=quantum,
            weigh=weigh,
            deterministic=deterministic,
            callbacks=callbacks,
            drop=drop,
        )
        reaction = Stall.of(stall)
        super().__init__(
            model,
            given,
            lambda: Ranks(reducer_of(model, peers.ranks()), Members()),
            lambda: monitor(reaction),
        )

    @property
    def epoch(self) -> int:
        self._finish()
        return super().epoch

    def batch_sampler(
        self, dataset: Any, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False, ahead: int = 0
    ) -> BalancedSampler:
        """The batches of this rank for a DataLoader of your own, with loop="whole":

            sampler = pace.batch_sampler(dataset, seed=0, ahead=4)
            loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)

        All ranks together use every sample exactly once an epoch. Each batch takes one ``pace.backward`` and one
        step.

        Args:
            dataset: That of the DataLoader.
            seed: The order of an epoch depends on (seed, epoch) alone.
            shuffle: Whether the order is drawn anew in each epoch.
            drop_last: Leave out the last round of an epoch if it would be short.
            ahead: Batches that the DataLoader draws ahead: ``num_workers * prefetch_factor``, where prefetch_factor
                is 2 by default; 0 without workers. Plans take effect that many rounds later.

        Raises:
            PacelineError: The loop is not "whole"; or in the loop, if the DataLoader draws further ahead.
        """
        sampler = BalancedSampler(self._loop, dataset, len(self._loaders), seed, shuffle, drop_last, ahead)
        self._loaders.append(sampler)
        self._loop.progress.over_samples(sampler.samples)
        return sampler

    def state_dict(self) -> dict[str, Any]:
        self._finish()
        return super().state_dict()

    def _samplers(self) -> list[BalancedSampler]:
        return [each for each in self._loaders if isinstance(each, BalancedSampler)]

    def _finish(self) -> None:
        """Notice the end of an epoch after which no DataLoader has asked for a batch."""
        for sampler in self._samplers():
            sampler.finish()

    def _detach(self) -> None:
        with ExitStack() as last:
            last.callback(super()._detach)
            for sampler in self._samplers():
                sampler.close()

    def weighted(self, loss: torch.Tensor, reduction: str = "mean", count: Any = None) -> torch.Tensor:
        """``loss`` times its weight; zero if it counts for nothing, though a mean over nothing is NaN.

        Before ``pace.step`` it weights the loss of a further forward pass through the model, whose gradients add to
        those of ``pace.backward``: ``pace.weighted(loss).backward()``. The loss of the round, as ``pace.loss`` and
        ``pace.loss_now()`` give it, is the sum of all losses that were weighted in it. With sharpness-aware
        minimization (SAM) it is the sum of both passes.

        After ``pace.step`` it weights the loss of a second model, on the same batch, whose gradients are averaged by
        its own DistributedDataParallel: ``pace.weighted(loss).backward()``, then its optimizer's step.
        """
        return self._loop.passes.weighted(loss, reduction, count)

    def mean(self, value: Any) -> torch.Tensor:
        """The mean of a metric over all samples of the round, for the loop's own log. Collective: call it on all
        ranks.

        Args:
            value: The mean over this rank's batch, a number or a tensor; with loop="round" over this rank's part of
                the round, after ``pace.round``.

        Returns:
            The mean over the samples of all ranks, detached. Samples that count for nothing do not appear in it.

        Raises:
            PacelineError: The loop is outside of a round, or its ranks run different numbers of micro-steps.
        """
        return metrics.mean(value, metrics.samples(self._loop, "mean"))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks' tensors, rank after rank, for metrics. Collective: call it on all ranks.

        Args:
            tensor: A row for each sample of this rank's batch, shape (m, ...); m may differ between the ranks.

        Returns:
            A row for each sample of the round, detached, on this rank's device. Samples that count for nothing have
            none.

        Raises:
            PacelineError: As for ``mean``.
        """
        return metrics.gather(tensor, metrics.samples(self._loop, "gather"))
