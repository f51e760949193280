"""A member of a run that continues when ranks are lost or join: its rounds, and its sums, which may fail.

The gradients are summed beside DistributedDataParallel, not by it. A round ends when its gradient has all samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.callbacks import Callback, overriding
from paceline.torch.counter import Count, count_of, packed
from paceline.torch.elastic import commit
from paceline.torch.elastic.buckets import Buckets, ExactBuckets
from paceline.torch.elastic.commit import CommitRecord
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.link import LauncherLink, company
from paceline.torch.elastic.recovery import FRESH, MissingSamples, Rendezvous, Running
from paceline.torch.exchange import Rows
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.weighing import put
from paceline.torch.members import Members
from paceline.torch.plan import Piece
from paceline.torch.terms import Terms
from paceline.torch.whole_state import load_whole_state, whole_state

LOOK = 0.001  # seconds between two looks at the ranks that have come to the end of a loop
TOGETHER_SECONDS = 10.0  # that a rank at the end of a loop waits for the others, at most


class Mended(NamedTuple):
    """A change of members that this rank took part in.

    Attributes:
        step: The round that was running, or was to begin.
        membership: Number of the membership epoch that begins.
        members: Places of the members.
        seconds: Until this rank could continue.
        within: Whether the round was running.
    """

    step: int
    membership: int
    members: tuple[int, ...]
    seconds: float
    within: bool


class LauncherCounter:
    """The counter for claims within a round, in the launcher's store with a key for each round. ``open`` for each
    round; then ``add`` from any thread, see ``counter.Counter``.

    A lost rank's claims are not given back: they are found missing when the round's sums fail."""

    keeper = "the launcher"
    quick = False

    def __init__(self, link: LauncherLink) -> None:
        self._link = link
        self._key = self._before = ""

    def open(self, key: str, first: bool) -> None:
        """A round begins. key: of this round with these members; first: whether this rank is the first member."""
        if first and self._before:  # all have left that round: its sums, and those of the next, are complete
            self._link.forget(self._before)
        self._before, self._key = self._key, f"pool/{key}"

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        """Add to the counts of the round that is open."""
        return count_of(self._link.add(self._key, packed(samples, reported, speed)), samples)

    def close(self) -> None:
        """Nothing to do: the link stays open."""


class Summing(Reducer):
    """The reducer of a member, which sums beside DistributedDataParallel.

    ddp: a DistributedDataParallel of one rank in the model, which sums nothing. begins: called before each backward
    pass, with whether it is of a round's last planned piece."""

    sums = carries_counts = True

    def __init__(self, ddp: DistributedDataParallel | None, begins: Callable[[bool], None]) -> None:
        self.ddp, self._begins = ddp, begins
        if ddp is not None:
            ddp.require_backward_grad_sync = False

    def check_sync(self, last: bool) -> None:
        self._begins(last)


class Member(Members):
    """A member of an elastic run. See ``Members``; call ``join`` before the first iteration.

    model: a plain module, or one in a DistributedDataParallel of one rank, which sums nothing. callbacks: called
    with each change of members that this rank takes part in. Raises PacelineError for a model that cannot continue
    without a rank, or if no launcher of Paceline has started this process.
    """

    carries_rows = True

    def __init__(self, model: nn.Module, callbacks: Sequence[Callback]) -> None:
        self.reducer = Summing(check_model(model), self._pass_begins)
        self._model, self._on_members = model, overriding(callbacks, "on_members")
        self._link = company()
        self.counter = LauncherCounter(self._link)
        self._round = Running()
        self._joined = self._closed = False
        self._switch = False  # the members change before the next round
        self._together = ""  # the key of this rank's newest report in ``_arrive``
        self._cut: Callable[[MissingSamples], list[Piece]] = lambda missing: []
        self._parts: list[Piece] | None = None  # the missing parts of the round, for the members to claim
        self._claimed: Piece | None = None  # by this rank
        # The state that was handed over within a round that others had completed.
        self._late: torch.Tensor | None = None

    def connect(self, layout: Any) -> None:
        self._layout = layout

    def begin(self, loop: Any) -> None:
        self._terms: Terms = loop.terms
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._sums = (ExactBuckets if self._terms.chunk else Buckets)(self._parameters)
        model = partial(whole_state, self._model), partial(load_whole_state, self._model)
        if loop.merges is not None:  # with local steps, changes of the model are summed and handed over
            self._sums.close()
            self._sums = loop.merges.flats
            model = loop.merges.state_dict, loop.merges.load_state_dict
        self._given = Handover(*model, loop.stands, loop.load_state_dict)
        self._rendezvous = Rendezvous(self._link, self._given)

    # -- called by Pace -------------------------------------------------------------------------------------------

    def join(self, *things: Any) -> None:
        """Take part, with these things to hand over; returns when this rank has the state of the other members."""
        if self._joined:
            raise PacelineError("pace.register() was called twice; expected once, with all that has a state")
        self._given.register(things)
        self._joined = True
        self._link.join()
        self._enter()

    @property
    def handed_over(self) -> Sequence[Any]:
        return [thing for thing in self._given.registered if hasattr(thing, "param_groups")]

    def check_handed_over(self, things: Sequence[Any]) -> None:
        for thing in things:
            if not self._given.holds(thing):
                raise PacelineError(
                    f"the {type(thing).__name__} that steps the model was not given to pace.register(), so that a "
                    "joining rank would begin with another state of it; expected each optimizer and scaler there"
                )

    def leave(self) -> None:
        self._link.leave()

    @property
    def chief(self) -> bool:
        """Whether this rank is the first of the members, which does what only one of them must do."""
        epoch = self._rendezvous.epoch
        return epoch is not None and epoch.members[0].ident == self._link.ident

    # -- called by the loop -----------------------------------------------------------------------------------------

    @property
    def late(self) -> bool:  # type: ignore[override]
        """Whether the others took the running round's step before this rank had its gradients: the state after it was
        handed over, and this rank must not take the step itself."""
        return self._late is not None

    @property
    def retrying(self) -> bool:  # type: ignore[override]
        return self._round.missing is not None

    @property
    def among(self) -> NDArray[np.bool_]:
        """For each place, whether it was given a part of the running round, (places,)."""
        mask = np.zeros(self._link.places, bool)
        mask[list(self._round.among)] = True
        return mask

    def micro_steps(self, loop: Any, source: Any) -> Iterator[tuple[Any, Piece]]:
        """See ``Members``; the source is a ``BalancedLoader``. May raise Left, a SystemExit, after ``leave``."""
        if not self._joined:
            raise PacelineError(
                "the loop began before pace.register(optimizer, ...), which lists the state to hand "
                "over to a joining rank; call it just before the loop"
            )
        while True:
            loop.settle()  # may decide the number of samples of the round
            if (coming := next(loop.progress.remaining(), None)) is None:
                return
            step, (first, size) = loop.progress.rounds, coming
            self._begin_round(step, first, size)
            plan = source.divided(step, first, size, self.among)
            loop.round_begins(int(self.among.sum()))
            if loop.terms.moves_work:
                self.counter.open(self._key, self.chief)
            self._cut = partial(source.parts, plan, first)
            if not self.retrying:
                for piece in source.pieces(plan, first, self.among):
                    if piece.claims:
                        yield from loop.claimed(source, piece)
                    yield source.load(piece.start, piece.samples), piece
            elif not self.claim():
                yield source.load(first, 0), Piece(plan, 0, True, True)
            while self._round.within:
                assert self._claimed is not None
                yield source.load(self._claimed.start, self._claimed.samples), self._claimed

    def _pass_begins(self, last: bool) -> None:
        """A backward pass begins, of a round's last planned piece if ``last``."""
        if last and not self.retrying and not self._rendezvous.lost():
            self._sums.begin(self._rendezvous.group.sum)

    def ran(self, piece: Piece) -> None:
        """The backward pass of a piece is done."""
        self._sums.add()
        if piece.samples:
            self._round.ran.append((int(piece.start), int(piece.samples)))

    def claim(self) -> bool:
        """Claim another part of a round whose sums have failed; False if none is left for this rank."""
        if self._parts is None:
            assert self._round.missing is not None
            self._parts = self._cut(self._round.missing)
        number = self._link.add(f"claim/{self._key}", 1) - 1 if self._parts else 0
        self._claimed = self._parts[number] if number < len(self._parts) else None
        return self._claimed is not None

    def commit(self, row: Rows, counted: float | None) -> Rows | None:
        """This rank's gradients are ready: sum them, and its ``row``, with those of all others.

        counted: the count that this rank's losses are means over, if that is not the samples. Returns all ranks'
        rows, (n,); None if the sums have failed: nothing has changed on this rank, and the ranks claim and run what
        is missing of the round before the sums are tried again."""
        group, running, number = self._rendezvous.group, self._round, self._rendezvous.number
        changes, used = self._link.newer(number), self._sums.used()
        mine = commit.write(running, changes, counted, used, row, self._link.place, self._link.places)
        works = [*self._sums.finish(group.sum), group.sum(mine)]
        if not group.all_done(works, self._rendezvous.lost):
            if not self._link.newer(number):
                self._link.broken(number)
            self._enter()
            self._check_goes_on()
            return None if self._round.within else self._rows  # others may have completed the round
        found = self._read(mine)
        factor = 1.0
        if found.counted is not None:
            factor = running.size / found.counted if found.counted else 0.0
        self._sums.apply(found.used.tolist(), factor)
        self._over(found, mine)
        return self._rows

    def drop(self) -> None:
        if self._round.within:
            self._round.drop()
            self._sums.drop()

    def together(self) -> None:
        """Wait at the end of a loop or epoch: a round of the others whose sums fail may need this rank."""
        self._take_late()
        if self._rendezvous.epoch is None or self._round.within or self._round.dropped:
            return
        until = time.monotonic() + TOGETHER_SECONDS
        while time.monotonic() < until:
            self._arrive()
            if self._link.add(self._together) >= len(self._places):
                return
            if self._rendezvous.lost():
                self._enter()
                self._take_late()
            time.sleep(LOOK)

    def close(self, failed: bool) -> None:
        if not (failed or self._closed):
            self.together()
            left = self._round.dropped or self._link.posted(f"leave/{self._link.ident}")
            if self._rendezvous.epoch is not None and not left:
                self._link.post(f"ended/{self._round.step}")
        self._closed = True
        self._sums.close()

    # -- a round ------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        """The key in the store for the running round with these members."""
        return f"{self._rendezvous.number}/{self._round.step}"

    def _begin_round(self, step: int, first: int, size: int) -> None:
        """Round ``step`` of ``size`` samples from ``first`` on begins."""
        self._take_late()
        running = self._round
        running.begin(step, first, size)
        if running.picks_up():  # this epoch's sums and parts count on gradients that this rank has dropped
            self._link.broken(self._rendezvous.number)
            self._enter()
        elif self._switch or self._rendezvous.lost():
            self._enter()
        running.enter(self._places)
        self._check_goes_on()

    def _check_goes_on(self) -> None:
        """Raises PacelineError if the run ended before this epoch for all who were there when this rank joined."""
        running, begins = self._round, self._round.within and not self._round.first
        if begins and self._rendezvous.outlives and self._link.posted(f"ended/{running.step}"):
            raise PacelineError(
                f"round {running.step}: this rank joined, and begins an epoch though the loops of all who were there "
                "before have ended; expected for epoch in range(pace.epoch, epochs) behind pace.register(), which "
                "also gets what ends the loop earlier, such as a count for early stopping"
            )

    def _read(self, total: torch.Tensor) -> CommitRecord:
        running = self._round
        return commit.read(total.numpy(), self._link.places, self._layout, running.size, running.step)

    def _over(self, found: CommitRecord, total: torch.Tensor) -> None:
        """The round is complete."""
        self._rows, self._switch = found.rows, found.switch
        self._given.committed(total)
        self._parts = self._claimed = None
        self._round.over()

    def _take_late(self) -> None:
        """Load the state that was handed over within a round again: the loop may have stepped a scheduler since."""
        if self._late is not None:
            self._given.take(self._late, run=False)
            self._late = None

    # -- membership epochs ----------------------------------------------------------------------------------------

    @property
    def _places(self) -> tuple[int, ...]:
        assert self._rendezvous.epoch is not None
        return self._rendezvous.epoch.places

    def _enter(self) -> None:
        """Enter the newest membership epoch, and agree with its members on the running round."""
        began, fits = time.perf_counter(), self._terms.micro_batch or self._terms.global_batch
        met = self._rendezvous.enter({**self._round.word(), "fits": fits})
        if met.packed is not None:
            self._catch_up(met.packed)
        epoch = self._rendezvous.epoch
        assert epoch is not None
        self._link.entered(epoch)
        self._round.agree(met.up, len(epoch.members), met.fits)
        self._parts = self._claimed = None
        self._switch = False
        self._arrive()  # a rank that is not at the end of its loop does not call ``together``
        took = time.perf_counter() - began
        change = Mended(self._round.step, epoch.number, epoch.places, took, self._round.within)
        for on_members in self._on_members:
            on_members(change)

    def _arrive(self) -> None:
        """Report to the members that this rank has completed the round before, once for each round."""
        key = f"together/{self._key}"
        if self._together != key:
            self._together = key
            self._link.add(key, 1)

    def _catch_up(self, packed: torch.Tensor) -> None:
        """Take over the state of a rank that has completed more rounds."""
        if self._round.step == FRESH:
            self._given.take(packed, run=True)
            return
        total = self._given.take(packed, run=False)
        put(self._parameters)
        self._sums.drop()
        self._over(self._read(total), total)
        self._late = packed


def check_model(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel of one rank in the model, if there is one. Raises PacelineError for a model that
    cannot continue without a rank."""
    modules = list(model.modules())
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wrong = (
        "gradients are summed by gloo on the CPU, and the model is on " + str(device)
        if device.type != "cpu"
        else "the model was given to fully_shard, and a rank's part of it would be lost with the rank"
        if any(hasattr(module, "set_requires_gradient_sync") for module in modules)
        else "the DistributedDataParallel module is in a group of several ranks, which one lost rank ends: start the "
        "script with python -m paceline.torch.launcher, under which each rank is in its own group"
        if any(module.process_group.size() > 1 for module in wrapped)
        else "an embedding has sparse gradients, which are not summed yet; use sparse=False"
        if any(getattr(module, "sparse", False) is True for module in modules)
        else ""
    )
    if wrong:
        raise PacelineError(f"ElasticPace: {wrong}")
    return wrapped[0] if wrapped else None
