"""What the handles of all loops have in common: construction, the loader, steps, the state and the end.

``Pace``, ``ElasticPace``, ``LocalSGD`` and ``ElasticLocalSGD`` are made of the classes of this file, so that none has
a method that its loop does not allow.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self, cast

import torch

from paceline.errors import PacelineError, switches
from paceline.torch import callbacks as callback
from paceline.torch import peers
from paceline.torch.elastic.member import Member
from paceline.torch.feed.loader import BalancedLoader
from paceline.torch.feed.rounds import Sizes, iterate, run_round
from paceline.torch.feed.sampler import BalancedSampler
from paceline.torch.feed.streams import SharedStreamLoader, StreamLoader
from paceline.torch.host import Hosting
from paceline.torch.liveness.monitor import Alone
from paceline.torch.liveness.shutdown import leave, leave_in_time
from paceline.torch.loop import Loop
from paceline.torch.members import Ranks
from paceline.torch.options import NAMES, Options
from paceline.torch.terms import agree


class Balanced:
    """The part of a handle that does not depend on the loop.

    given: The options. ranks, lookout: make the parts that sum over the ranks, and then the monitor of the other
    ranks; both collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: Options,
        ranks: Callable[[], Ranks],
        lookout: Callable[[], Alone],
    ) -> None:
        given.check_kinds(model)
        self._ranks = ranks()
        self._terms = agree(model, given, self._ranks.reducer.lockstep)
        self._callbacks = list[callback.Callback]()
        self._loaders: list[BalancedLoader | StreamLoader | BalancedSampler] = []
        self._loop = Loop(model, self._ranks, self._terms, given.callbacks)
        # For frameworks that run the loop.
        self.host = Hosting(self._loop, self._ranks.reducer, self._terms, self._detach)
        facts = {
            "policy": self._terms.policy,
            "workers": peers.ranks(),
            "global_batch": self._terms.batch,
            "loop": given.loop,
        }
        if given.every is not None:
            facts["every"] = given.every
        callback.start(given.callbacks, facts)
        self._callbacks = list(given.callbacks)
        # This comes last, since its threads run until the loop is closed.
        self._loop.watch_over(lookout())
        _close_at_end(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES:
            raise PacelineError(
                f"{name} was set on a {type(self).__name__}, whose loaders and plans depend on it; expected no "
                f"change: make another {type(self).__name__}"
            )
        super().__setattr__(name, value)

    @property
    def epoch(self) -> int:
        """The epoch of the next or running iteration of the loader."""
        return self._loop.progress.epoch

    @property
    def rounds(self) -> int:
        """Rounds finished since the beginning of the run, over all epochs."""
        return self._loop.progress.rounds

    @property
    def loss(self) -> float:
        """The mean loss of the newest round that all ranks have reported, over all its samples: usually the round
        before the running one, in rounds of a few milliseconds one of the newest 64; NaN before the first report.
        With local steps a round is the interval between two merges."""
        return self._loop.decisions.loss

    @property
    def counts(self) -> bool:
        """False in the micro-step of a rank without work in this round, which only joins the others' collectives;
        also after the round's step, until the next micro-step begins."""
        return self._loop.round.asks()

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all there, and an optimizer step is due."""
        return self._loop.due

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
        Several loaders may be iterated one after the other.

        Args:
            drop_last: Leave out the last round of an epoch if it would be short.
            cost: The cost of each sample, in any unit, such as its tokens: an array of one number for each sample, a
                function of a sample's index, or the name of a column or field (the cost of an object with a length is
                its length). It is read once. Rounds keep their samples, so the model stays that of one process; they
                are divided by cost so that all ranks end together. See docs/samples.md.
            padded: Whether a micro-batch costs its size times its longest sample, since the collate function pads the
                others; by default a trial with two samples shows it.
            micro_batch_cost: The largest cost of a micro-batch, in the unit of ``cost``: the sum of its samples, or
                its size times its longest sample if it is padded. For loops that run a round in several pieces.
            seed: The order of an epoch depends on (seed, epoch) alone.
            shuffle: Whether the order is drawn anew in each epoch.
            **options: Those of torch's DataLoader (num_workers, collate_fn, pin_memory, ...).
        """
        costs, number = (cost, padded, micro_batch_cost), len(self._loaders)
        loader = BalancedLoader(self._loop, dataset, number, seed, shuffle, drop_last, costs, options)
        self._loaders.append(loader)
        self._loop.progress.over_samples(loader.samples)
        return loader

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        """Run the backward pass of this micro-step's loss, weighted so that the round's gradient is exact.

        Args:
            reduction: Whether the loss is the "mean" or the "sum" over this batch's samples (with both, the round's
                gradient is that of the mean over all its samples); or "global" if it is already normalised over the
                samples of all ranks, or a function of a statistic of them. Such a loss keeps the weight that it has
                under DDP alone: the round's gradient is the mean over the ranks of the sum over each rank's
                micro-steps, and ``pace.loss`` is that of the losses. See docs/porting.md.
            count: The number of tokens, nodes or the like that the loss is a mean (or sum) over, if not samples: the
                round's gradient is then that of the mean over all of them, on all ranks. A batch of 0 counts for
                nothing.
            scaler: A torch GradScaler, which scales the loss first; pass it to ``step``, too.
        """
        self._loop.passes.backward(loss, reduction, scaler, count)

    def step(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], scaler: Any = None
    ) -> bool:
        """Step and zero the optimizer when the round is complete; otherwise do nothing. True when it stepped.

        Args:
            optimizer: One, or several in a list. Optimizers that share no parameter may also have a call each.
            scaler: A torch GradScaler to step and update; several optimizers must then go into one call.

        Raises:
            PacelineError: The step is not due, or would use gradients that are not the round's.
        """
        return self._loop.steps.step(
            [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer], scaler
        )

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from after a finished round, in plain numbers."""
        return self._loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, before iterating the loader. The number of ranks may differ: the policy then
        starts afresh, and each remaining sample is still used exactly once.

        Raises PacelineError for anything else than such a state, and for one of another version or another global
        batch; nothing is changed then. A loop that continues within an epoch raises it for another loader, ``seed``
        or ``shuffle``."""
        self._loop.load_state_dict(state)

    def close(self) -> None:
        """End cleanly: close the callbacks, remove all hooks from the model, and leave the process group. A process
        group that the script has made stays usable, and so does the DistributedDataParallel module: the script may
        destroy the group, or leaves it at the program's end. Safe to call twice; the end of a ``with`` block and that
        of the program call it, too."""
        try:
            self._detach()
        finally:
            leave_in_time(self._ranks.reducer.ddp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._loop.failed(error)
        finally:
            self.close()

    def _detach(self) -> None:
        """Close the callbacks and remove all hooks from the model; the process group stays."""
        _open.pop(id(self), None)
        started, self._callbacks = self._callbacks, []
        with ExitStack() as last:  # each of these, also if another raises an error
            last.callback(self._loop.close)
            for loader in self._loaders:
                last.callback(loader.close)
            last.callback(callback.close, started)
            self._loop.settle_last()


class Exact(Balanced):
    """The part of a handle whose gradients are those of one process with the whole batch."""

    def round(
        self,
        batch: Any,
        function: Callable[..., torch.Tensor | tuple[torch.Tensor, Any]],
        reduction: str = "mean",
        scaler: Any = None,
    ) -> torch.Tensor:
        """Run this rank's part of a round: ``function`` gives the loss of each piece, and its backward pass follows.

        Args:
            batch: The item that the loader yields with loop="round" (a plain batch of another loop is one piece). A
                tuple or list is spread over the function's arguments, anything else is its one argument.
            function: Returns the loss of a piece, or (loss, count) if the loss is a mean over ``count`` tokens or the
                like instead of over samples. It must not call a collective, since ranks run different numbers of
                pieces; a PacelineError names the file and line of such a call.
            reduction: As for ``backward``.
            scaler: As for ``backward``.

        Returns:
            The loss of this rank's part, detached: the mean over its samples, or with another reduction the sum over
            its pieces.
        """
        return run_round(self._loop, self.backward, batch, function, reduction, scaler)

    def loss_now(self) -> float:
        """The mean loss of the round whose gradients are complete, or whose step has just been taken, over all its
        samples on all ranks. Call it on all ranks or on none, and not in every round: each waits for the others."""
        return self._loop.loss_now()


class Drawing(Balanced):
    """The part of a handle whose loop may draw samples that Paceline does not know."""

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

        Further options: collate_fn, and for an IterableDataset those of torch's DataLoader (num_workers, ...).

        Args:
            drop_last: Leave out the last samples if they do not fill a whole round.
            batches: The stream gives batches of any size instead of samples: tensors, or tuples, lists or dicts of
                them, each with a row for each sample, and single numbers or texts. They are cut and joined along
                their first dimension; another batch raises an error. So does a list or tuple within every batch
                that has as many entries, all alike, as the batch has samples.
            shared: All ranks are given the same stream, read it whole, and each keeps its slice of every round. Then
                a faster rank also runs more samples of an epoch; with streams of their own it comes to its end
                earlier.
        """
        switches(shared=shared)
        kind = SharedStreamLoader if shared else StreamLoader
        loader = kind(self._loop, stream, len(self._loaders), drop_last, batches, options)
        self._loaders.append(loader)
        return loader

    def sizes(self, rounds: int | None = None) -> Iterator[Any]:
        """For loops that make their own batches: the number of samples that this rank runs in each micro-step.

            for size in pace.sizes(1000):
                x, y = draw(size)
                pace.backward(criterion(ddp(x), y))
                pace.step(optimizer)

        A round has ``global_batch`` samples over all ranks, and its gradient is their mean. A size is never 0: a rank
        without work gets a micro-step whose samples count for nothing. With loop="pieces" a round may take several
        micro-steps, so ``pace.sizes(1)`` may give several sizes for one step; with loop="round" pass each item to
        ``pace.round``, which calls its function with the size of each piece.

        Args:
            rounds: The number of rounds; None for no end.

        Returns:
            The sizes, one for each micro-step.
        """
        return iterate(self._loop, Sizes(self._loop, rounds))


class Hosted(Balanced):
    """The part of a handle that an adapter of a framework makes: a subclass of a handle and of this class sets two
    more options before its own constructor."""

    # Micro-steps of every round on every rank, for frameworks that step on every k-th batch.
    _micro_steps: int | None = None
    # Whether a micro-step without work gets a sample of weight zero instead of an empty batch; by default it does
    # unless the loop takes pieces.
    _fill: bool | None = None

    def __init__(self, model: torch.nn.Module, given: Options, *others: Any) -> None:
        super().__init__(model, replace(given, micro_steps=self._micro_steps, fill=self._fill), *others)


class Membership(Balanced):
    """The part of a handle whose ranks may be lost, leave and join."""

    @staticmethod
    def _elastic(model: torch.nn.Module, given: Options) -> Ranks:
        """The ranks of such a handle."""
        given.check_elastic()
        member = Member(model, given.callbacks)
        return Ranks(member.reducer, member)

    @property
    def _member(self) -> Member:
        return cast(Member, self._ranks.members)

    def register(self, *things: Any) -> None:
        """Call it just before the loop, with the optimizers, schedulers, GradScaler and all other objects with
        ``state_dict`` and ``load_state_dict`` whose state must be the same on every rank. The model is always
        included.

        It returns when this rank takes part. A rank that joins a running job has by then received the model, the
        state of all that is registered, and the run's progress: loop over ``range(pace.epoch, epochs)``.
        """
        self._member.join(*things)

    def leave(self) -> None:
        """This rank takes part until the end of the running round, and the others continue without it: when its loop
        asks for the next batch, SystemExit(0) ends its program. Safe to call in a signal handler."""
        self._member.leave()

    @property
    def rank(self) -> int:
        """This process's slot, counted from 0; a replacement takes over the slot of a lost rank."""
        return peers.rank()

    @property
    def chief(self) -> bool:
        """Whether this rank is the first member, which does the work of a single rank, such as checkpoints.

        None is until the next round if the first has received the state after a step from the others: what its loop
        does after the step, such as a scheduler's step, is part of that state already, and would count twice.
        """
        return self._member.chief and not self._member.late


# -- the end of a program that does not close its handles -----------------------------------------------------------

_open: dict[int, Balanced] = {}  # handles that are not closed, by identity
os.register_at_fork(after_in_child=_open.clear)  # the end of a forked process does not concern the run


def _close_at_end(pace: Balanced) -> None:
    if not _open:
        # The newest of the functions that a program's end calls is the first, so this one comes before the monitor's.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open[id(pace)] = pace


def _close_all() -> None:
    """Close what is still open at the program's end, without a wait for the others after an uncaught exception."""
    error, paces = getattr(sys, "last_value", None), list(_open.values())
    for pace in paces:
        # The message of an uncaught exception has been printed.
        with suppress(PacelineError):
            pace.__exit__(type(error), error, None)
    if paces:
        leave()
