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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError, switches
from paceline.policies import Policy
from paceline.rounds import Cluster, Indices
from paceline.torch import callbacks as callback
from paceline.torch import local, metrics, peers
from paceline.torch.elastic.member import Member
from paceline.torch.feed.loader import BalancedLoader
from paceline.torch.feed.rounds import Sizes, iterate, run_round
from paceline.torch.feed.shared import SharedStreamLoader
from paceline.torch.feed.streams import StreamLoader
from paceline.torch.gradients.reducers import Reducer, reducer_of
from paceline.torch.host import Hosting
from paceline.torch.liveness.monitor import Alone, monitor
from paceline.torch.liveness.shutdown import leave_in_time
from paceline.torch.liveness.stall import Reaction, Stall
from paceline.torch.local_loop import LocalLoop
from paceline.torch.loop import Loop
from paceline.torch.options import Limits, Options
from paceline.torch.terms import agree


class Pace:
    """Balances one data-parallel model over its ranks.

    model: The DistributedDataParallel module, one that ``fully_shard`` has sharded, or a module that wraps either. In
        a single process, and with elastic=True or loop="local", a plain module.
    global_batch: Samples per optimizer step over all ranks (B); constant, however they are divided.
    policy: How the batch is divided: a name of ``paceline.policies.names()`` with options, ``name:key=value,...``. Or
        a function that makes a policy of your own for a cluster.
    limits: The fewest and the most samples of a round for each rank, or "memory" to find what fits. Given as
        [(least, most), ...], None for the default: at least 1 (2 with batch norm, which needs a variance), at most B.
        "memory" with loop="round" cuts parts that do not fit at once, and the run survives an out-of-memory error;
        with "whole" loads stay below what fits. See docs/two-cards.md.
    micro_batch: Samples that fit into this rank's memory at once. A larger load is accumulated, piece by piece; if
        the loop takes whole rounds, loads stay below it.
    micro_steps: Micro-steps of every round on every rank, for hosts that step on every k-th batch.
    loop: What one iteration of the training loop is: "whole", "round", "pieces" or "local". "whole": a round, which
        this rank runs at once; every micro-step is an optimizer step, on every rank. "round": a round, which
        ``pace.round(batch, function)`` runs in one or more pieces. "pieces": one piece of a round, so that
        micro-steps differ from rank to rank and ``pace.step`` does nothing until the round is complete. Policies that
        move work within the round need one of the last two; under "whole", "auto" plans as "level" does. "local": a
        step of this rank alone, on about global_batch / n samples; at intervals (see ``every``) ``pace.step`` merges
        the ranks' parameters. This trains a different model from that of one process, and is for slow networks.
    fill: Whether a micro-step without work gets a sample of weight zero instead of an empty batch. The default is
        True unless the loop takes pieces.
    quantum: Every batch size is a multiple of this number. For captured graphs that need few shapes, and
        augmentations that pair samples.
    weigh: Where gradients are weighted: in the "loss", or in DDP's communication "hook". The hook is for loops whose
        loss cannot be changed: there call ``loss.backward()`` as before.
    deterministic: Give the same bits whichever rank runs which samples. For policies that move work within the round:
        every micro-step is one cell of a fixed grid (of ``quantum`` samples; by default B / 32), and gradients are
        summed without rounding. Costs a micro-batch for each cell, 16 bytes for each parameter, and an all-reduce
        that overlaps with nothing.
    callbacks: Records, trackers and callbacks of your own that take part in the run; the same on every rank.
        ``paceline.torch.callbacks`` has ``Record``, ``Wandb``, ``MLflow``, ``Prometheus``, ``OnRound``, ``StopOnNan``
        and others.
    stall: The reaction to a silent rank: "warn", "end", a function, or a ``Stall`` that also has the patience. "warn"
        names it in a warning after 30 s without a heartbeat; "end" ends this process with status 1, so that a
        launcher can start the ranks again; ``Stall("end", patience=60)`` does so after 60 s.
    elastic: Continue when a rank is killed, freezes, leaves or joins. The model is a plain module; the script is
        started by ``python -m paceline.torch.launcher``. Call ``pace.register(optimizer, ...)`` before the loop. See
        docs/faults.md.
    every: With loop="local", the distance of two merges: steps, seconds, or "auto". A whole number of steps, k, is
        k global_batch samples on all ranks together, however they are divided; seconds are "2 s" or a float; "auto"
        (default) merges as often as takes the link at most 10 % of the time. A new value that training finds holds
        from the next interval on.
    merge: With loop="local", a ``Merge``: the weight of each rank's change, and how changes are applied. A merge
        leaves the state of a rank's own optimizer unchanged.
    drop: With loop="round" and micro_batch=, the seconds of a round after which a rank runs no further micro-batch.
        This is DropCompute: "0.5 s", a number, or "auto", which finds them from the first 20 rounds. The gradient is
        the mean over the samples that ran, so batches vary, and this epoch does not train the rest. See
        docs/backup.md.

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
        micro_steps: int | None = None,
        loop: str = "whole",
        fill: bool | None = None,
        quantum: int = 1,
        weigh: str = "loss",
        deterministic: bool = False,
        callbacks: Sequence[callback.Callback] = (),
        stall: Reaction = "warn",
        elastic: bool = False,
        every: int | float | str | None = None,
        merge: local.Merge | None = None,
        drop: float | str | None = None,
    ) -> None:
        given = Options.of(locals())
        given.check_kinds(model)
        reaction = Stall.of(stall)
        local.check(given, model, peers.ranks())
        if elastic:
            given.check_elastic()
            self._reducer: Reducer = Member(model, callbacks)
        else:
            self._reducer = (local.Merging if loop == "local" else reducer_of)(model, peers.ranks())
        self.rank, self.ranks = peers.rank(), peers.ranks()
        self.terms = agree(model, given, self._reducer.in_step)
        self.policy, self._callbacks = self.terms.policy, list[callback.Callback]()
        self._loaders: list[BalancedLoader | StreamLoader] = []
        kind = LocalLoop if loop == "local" else Loop
        self.loop = kind(model, self._reducer, self.terms, callbacks)
        self.host = Hosting(self.loop, self._reducer)  # for frameworks that run the loop
        facts = {
            "policy": self.policy,
            "workers": self.ranks,
            "global_batch": self.global_batch,
            "loop": loop,
        }
        if loop == "local":
            facts["every"] = every
        callback.start(callbacks, facts)
        self._callbacks = list(callbacks)
        # This comes last, since its threads run until the loop is closed.
        self.loop.watch_over(Alone() if elastic else monitor(reaction))

    @property
    def global_batch(self) -> int:
        """B, samples of a round over all ranks (with loop="local", of a step on every rank). Setting it raises a
        PacelineError: loaders and plans depend on it."""
        return self.terms.batch

    @global_batch.setter
    def global_batch(self, samples: int) -> None:
        raise PacelineError(
            f"global_batch={samples} was set on a Pace whose loaders and plans use {self.global_batch}; expected "
            "no change: make another Pace for another batch"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next or running iteration of the loader."""
        return self.loop.progress.epoch

    @property
    def samples_done(self) -> int:
        """Samples of this epoch that are done, over all ranks."""
        return self.loop.progress.samples_done

    @property
    def rounds(self) -> int:
        """Rounds finished since the beginning of the run, over all epochs."""
        return self.loop.progress.rounds

    @property
    def loss(self) -> float:
        """The mean loss of the newest round that all ranks have reported, over all its samples: usually the round
        before the running one, in rounds of a few milliseconds one of the newest 64; NaN before the first report.
        With loop="local" a round is the interval between two merges."""
        return self.loop.rounds.loss

    def loss_now(self) -> float:
        """The mean loss of the round whose gradients are complete, or whose step has just been taken, over all its
        samples on all ranks. Call it on all ranks or on none, and not in every round: each waits for the others."""
        return self.loop.loss_now()

    def loader(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        cost: Any = None,
        padded: bool | None = None,
        micro_batch_cost: float | None = None,
        **options: Any,
    ) -> BalancedLoader:
        """This rank's loader over ``dataset`` (anything with ``__len__`` and ``__getitem__``).

        All ranks together use every sample exactly once an epoch; the order depends on (seed, epoch) alone.
        drop_last: leave out the last round of an epoch if it would be short.
        cost: the cost of each sample, in any unit, such as its tokens: an array of one number for each sample, a
            function of a sample's index, or the name of a column or field (the cost of an object with a length is its
            length). It is read once. Rounds keep their samples, so the model stays that of one process; they are
            divided by cost so that all ranks end together. See docs/samples.md.
        padded: whether a micro-batch costs its size times its longest sample, since the collate function pads the
            others; by default a trial with two samples shows it.
        micro_batch_cost: the largest cost of a micro-batch, in the unit of ``cost``: the sum of its samples, or its
            size times its longest sample if it is padded. For loops that run a round in several pieces.
        Further options go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...). Several loaders may be
        iterated one after the other.
        """
        costs, number = (cost, padded, micro_batch_cost), len(self._loaders)
        loader = BalancedLoader(self.loop, dataset, number, seed, shuffle, drop_last, costs, options)
        self._loaders.append(loader)
        self.loop.progress.over_samples(loader.samples)
        return loader

    def stream(
        self,
        stream: Any,
        *,
        drop_last: bool = False,
        batches: bool = False,
        shared: bool = False,
        **options: Any,
    ) -> StreamLoader:
        """This rank's loader over its own stream: an IterableDataset, or anything that can be iterated.

        Each rank draws as many samples as the plan gives it, from its own stream: make sure that the streams of the
        ranks hold different samples. An epoch ends when all streams have ended; if a rank's stream ends earlier, the
        others take over its load. Rounds run as planned: no work moves within them.

        drop_last: leave out the last samples if they do not fill a whole round. batches: the stream gives batches of
            any size instead of samples; they are cut and joined along their first dimension.
        shared: all ranks are given the same stream, read it whole, and each keeps its slice of every round. Then a
            faster rank also runs more samples of an epoch; with streams of their own it comes to its end earlier.
        Further options: collate_fn, and for an IterableDataset those of torch's DataLoader (num_workers, ...).
        """
        switches(shared=shared)
        kind = SharedStreamLoader if shared else StreamLoader
        loader = kind(self.loop, stream, len(self._loaders), drop_last, batches, options)
        self._loaders.append(loader)
        return loader

    def sizes(self, rounds: int | None = None) -> Iterator[Any]:
        """For loops that make their own batches: the number of samples that this rank runs in each micro-step.

            for size in pace.sizes(1000):
                x, y = draw(size)
                pace.backward(criterion(ddp(x), y))
                pace.step(optimizer)

        rounds: their number; None for no end. Each has ``global_batch`` samples over all ranks, and its gradient is
        their mean. A size is never 0: a rank without work gets a micro-step whose samples count for nothing. With
        loop="pieces" a round may take several micro-steps, so ``pace.sizes(1)`` may give several sizes for one step;
        with loop="round" pass each item to ``pace.round``, which calls its function with the size of each piece.
        """
        return iterate(self.loop, Sizes(self.loop, rounds))

    def round(
        self,
        batch: Any,
        function: Callable[..., torch.Tensor | tuple[torch.Tensor, Any]],
        reduction: str = "mean",
        scaler: Any = None,
    ) -> torch.Tensor:
        """Run this rank's part of a round: ``function`` gives the loss of each piece, and its backward pass follows.

        batch: the item that the loader yields with loop="round" (a plain batch of another loop is one piece). A tuple
            or list is spread over the function's arguments, anything else is its one argument.
        function: returns the loss of a piece, or (loss, count) if the loss is a mean over ``count`` tokens or the
            like instead of over samples. It must not call a collective, since ranks run different numbers of pieces;
            a PacelineError names the file and line of such a call.
        reduction, scaler: as for ``backward``.
        Returns the loss of this rank's part, detached: the mean over its samples, or with another reduction the sum
        over its pieces.
        """
        return run_round(self.loop, self.backward, batch, function, reduction, scaler)

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        """Run the backward pass of this micro-step's loss, weighted so that the round's gradient is exact.

        reduction: whether the loss is the "mean" or the "sum" over this batch's samples; or "global" if it is already
            normalised over the samples of all ranks, or a function of a statistic of them. Such a loss keeps the
            weight that it has under DDP alone: the round's gradient is the mean over the ranks of the sum over each
            rank's micro-steps, and ``pace.loss`` is that of the losses. See docs/porting.md.
        count: the number of tokens, nodes or the like that the loss is a mean (or sum) over, if not samples: the
            round's gradient is then that of the mean over all of them, on all ranks. A batch of 0 counts for nothing.
        scaler: a torch GradScaler, which scales the loss first; pass it to ``step``, too.
        """
        self.loop.passes.backward(loss, reduction, scaler, count)

    def weighted(self, loss: torch.Tensor, reduction: str = "mean", count: Any = None) -> torch.Tensor:
        """``loss`` times its weight; zero if it counts for nothing, though a mean over nothing is NaN.

        After ``pace.step`` it weights the loss of a second model, on the same batch, whose gradients are averaged by
        its own DistributedDataParallel: ``pace.weighted(loss).backward()``, then its optimizer's step.
        """
        return self.loop.passes.weighted(loss, reduction, count)

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
        return metrics.mean(value, metrics.samples(self.loop, "mean"))

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
        return metrics.gather(tensor, metrics.samples(self.loop, "gather"))

    def loads(self, step: int, batch: int) -> Indices:
        """The planned samples of each rank in round ``step`` of ``batch`` samples, shape (n,)."""
        return self.terms.balancer.loads(step, batch)

    @property
    def counts(self) -> bool:
        """False in the micro-step of a rank without work in this round, which only joins the others' collectives."""
        return self.loop.round.asks()

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all there, and an optimizer step is due."""
        return self.loop.due

    @property
    def merged(self) -> bool:
        """With loop="local", whether the newest ``pace.step`` was this rank's last of an interval, so that the
        parameters are the same on all ranks: evaluate, write checkpoints and step schedulers there. With
        ``Merge(delay=1)`` that is so at the end of an epoch, and after ``pace.flush()``."""
        return self.loop.merged

    def step(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], scaler: Any = None
    ) -> bool:
        """Step and zero the optimizer when the round is complete; otherwise do nothing. True when it stepped.

        optimizer: one, or several in a list; or call it once for each of them.
        scaler: a torch GradScaler to step and update; several optimizers must then go into one call.
        """
        return self.loop.step([*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer], scaler)

    def register(self, *things: Any) -> None:
        """With elastic=True, call it just before the loop: with the optimizers, schedulers, GradScaler and all other
        objects with ``state_dict`` and ``load_state_dict`` whose state must be the same on every rank. The model is
        always included.

        It returns when this rank takes part. A rank that joins a running job has by then received the model, the
        state of all that is registered, and the run's progress: loop over ``range(pace.epoch, epochs)``.
        """
        self._reducer.join(*things)

    def leave(self) -> None:
        """This rank takes part until the end of the running round, and the others continue without it: when its loop
        asks for the next batch, SystemExit(0) ends its program. Safe to call in a signal handler."""
        self._reducer.leave()

    @property
    def chief(self) -> bool:
        """Whether this rank does the work of a single rank, such as writing checkpoints: rank 0, or with
        elastic=True the first member."""
        return self._reducer.chief

    def settle(self) -> None:
        """Collect the ranks' reports on the round just finished, and plan from them. The loader does so before the
        next round; call it after a loop that is left early."""
        self.loop.settle()

    def flush(self) -> None:
        """``settle``, and on a GPU (not yet run on one) also wait for the last round's timing. Call it on all
        ranks, or on none; the loader does so at the end of each epoch. Between two intervals of loop="local" it also
        merges the changes that are on their way."""
        self.loop.flush()

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from after a finished round, in plain numbers."""
        return self.loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, before iterating the loader. The number of ranks may differ: the policy then
        starts afresh, and each remaining sample is still used exactly once.

        Raises PacelineError for anything else than such a state, and for one of another version or another global
        batch; nothing is changed then."""
        self.loop.load_state_dict(state)

    def abandon(self) -> None:
        """Leave the running round unfinished, as after an exception; the state is that of the last finished round.
        Its gradients are dropped, and its samples are used again if the epoch continues."""
        self.loop.abandon()

    def detach(self) -> None:
        """Close the callbacks and remove all hooks from the model; the process group stays."""
        self.loop.settle_last()
        started, self._callbacks = self._callbacks, []
        callback.close(started)
        for loader in self._loaders:
            loader.close()
        self.loop.close()

    def close(self) -> None:
        """End cleanly: ``detach`` and ``release``, then leave the process group. A process group that the script has
        made stays usable: the script may destroy it, or leaves it at the program's end. Safe to call twice."""
        self.detach()
        self._reducer.release()
        leave_in_time()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.loop.failed(error)
        finally:
            self.close()
