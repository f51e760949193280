"""This rank's part in the rounds of a run that goes on when others are lost or join."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.torch.elastic import commit
from paceline.torch.elastic.buckets import Buckets, ExactBuckets
from paceline.torch.elastic.commit import CommitRecord, ElasticMeter
from paceline.torch.elastic.link import Link
from paceline.torch.elastic.recovery import FRESH, MicroStep, Missing, Running, Span
from paceline.torch.elastic.rendezvous import Handover, Rendezvous
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.terms import Terms

LOOK = 0.001  # seconds between two looks at who has come to the end of a loop
TOGETHER_SECONDS = 10.0  # how long one that has is held up by others that go on, at most


class Mended(NamedTuple):
    """A change of members that this rank took part in."""

    step: int  # the round that was running, or was to begin
    membership: int  # number of the membership epoch that begins
    members: tuple[int, ...]  # places
    seconds: float  # until this rank could go on
    within: bool  # the round was running


class Member:
    """For each round ``begin``; then each micro-step of ``micro_steps``, and after its backward pass ``ended``.

    told: called with each change of members that this rank takes part in.
    """

    def __init__(
        self,
        link: Link,
        parameters: list[torch.nn.Parameter],
        sums: Buckets | ExactBuckets,
        terms: Terms,
        meter: ElasticMeter,
        given: Handover,
        told: Callable[[Mended], None],
    ) -> None:
        self._link, self._parameters, self._terms = link, parameters, terms
        self._meter, self._given, self._told, self._sums = meter, given, told, sums
        self._rendezvous = Rendezvous(link, given)
        self._round = Running()
        self._switch = False  # the members change before the next round
        self._together = ""  # the key under which this rank has told which round it has completed
        self._cut: Callable[[Missing], list[MicroStep]] = lambda missing: []
        self._parts: list[MicroStep] | None = None  # of what is missing of the round, for whoever claims them
        self._claimed: MicroStep | None = None  # by this rank
        self._span: Span | None = None  # that the running micro-step is
        self._record: torch.Tensor | None = None  # of the last commit
        # What was handed over within a round that others had completed.
        self._late: torch.Tensor | None = None

    # -- what the micro-steps ask ------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """The others took the running round's step before this rank had its gradients: all of it was handed over, and
        its own step is not to be taken."""
        return self._late is not None

    @property
    def mending(self) -> bool:
        """Whether the running round is mended: what nobody had run of it is run by whoever claims it."""
        return self._round.missing is not None

    @property
    def chief(self) -> bool:
        """Whether this rank is the first of the members, which does what one of them is to do."""
        epoch = self._rendezvous.epoch
        return epoch is not None and epoch.members[0].ident == self._link.ident

    @property
    def among(self) -> NDArray[np.bool_]:
        """The places that the running round was divided among, (places,)."""
        mask = np.zeros(self._link.places, bool)
        mask[list(self._round.among)] = True
        return mask

    @property
    def key(self) -> str:
        """Of the running round, as these members run it."""
        return f"{self._rendezvous.number}/{self._round.step}"

    def join(self) -> None:
        """Take part; returns when this rank has all that the others have."""
        self._link.join()
        self._enter()

    def leave(self) -> None:
        """Take part until the end of the running round."""
        self._link.leave()

    def begin(self, step: int, first: int, size: int) -> None:
        """Round ``step`` of ``size`` samples from ``first`` on begins. May raise Left."""
        self._take_late()
        running = self._round
        running.begin(step, first, size)
        if running.dropped:  # the sums of this epoch, and the parts, go on with what is not there any more
            running.dropped = False
            self._link.broken(self._rendezvous.number)
            self._enter()
        elif self._switch or self._rendezvous.lost():
            self._enter()
        running.within = True
        if running.missing is None:
            running.among = self._places

    def micro_steps(
        self, plan: RoundPlan, planned: Iterator[MicroStep], cut: Callable[[Missing], list[MicroStep]]
    ) -> Iterator[MicroStep]:
        """This rank's micro-steps of the round: those that are planned, and then those that it claims of what is
        missing.

        cut: what is missing as micro-steps, the same on all members."""
        self._cut = cut
        if not self.mending:
            for self._span, piece in planned:
                yield self._span, piece
        elif not self._claim():
            self._span = None
            yield None, Piece(plan, 0, True, True)
        while self._round.within:
            assert self._claimed is not None
            self._span = self._claimed[0]
            yield self._claimed

    def backward_begins(self, last: bool) -> None:
        """A backward pass begins, of a round's last planned piece if ``last``."""
        if last and not self.mending and not self._rendezvous.lost():
            self._sums.begin(self._rendezvous.group.sum)

    def ended(self, piece: Piece) -> Piece:
        """The backward pass of a piece is through. The piece, which is the last one if the round is complete."""
        self._sums.add()
        self._meter.ran(piece)
        if self._span is not None:
            start, size = self._span
            self._round.ran.append((int(start), int(size)))
        if not self.mending and (not piece.last or self._commit()):
            return piece
        while self._round.within:
            if self._claim():
                return piece._replace(last=False)
            self._commit()
        return piece._replace(last=True)

    def drop(self) -> None:
        """The running round, if there is one, was left: nothing that this rank has run of it counts."""
        if self._round.within:
            self._round.drop()
            self._sums.drop()

    def together(self) -> None:
        """The loop, or its epoch, is over: wait until the round before is complete on all members.

        One in which its sums have failed needs this rank, which may have no other round."""
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

    def close(self) -> None:
        """Let go of the model."""
        self._sums.close()

    # -- a round ------------------------------------------------------------------------------------------------

    def _commit(self) -> bool:
        """Sum the gradients over the members. True if it has worked, and the round is complete; if not, nothing has
        changed on this rank, which goes on with those who are there."""
        began, group, running = time.perf_counter(), self._rendezvous.group, self._round
        number = self._rendezvous.number
        mine = commit.write(
            switch=self._link.newer(number),
            ran=running.ran,
            first=running.first,
            counted=self._meter.counted,
            used=self._sums.used(),
            row=self._meter.row(self.mending),
            place=self._link.place,
            places=self._link.places,
        )
        works = [*self._sums.finish(group.sum), group.sum(mine)]
        if not group.all_done(works, self._rendezvous.lost):
            if not self._link.newer(number):
                self._link.broken(number)
            self._enter()
            self._meter.waited(time.perf_counter() - began)
            return False
        found = self._read(mine)
        factor = 1.0
        if found.counted is not None:
            factor = running.size / found.counted if found.counted else 0.0
        self._sums.apply(found.used.tolist(), factor)
        self._over(found, mine)
        return True

    def _read(self, total: torch.Tensor) -> CommitRecord:
        running = self._round
        return commit.read(total.numpy(), self._link.places, self._meter.dtype, running.size, running.step)

    def _over(self, found: CommitRecord, total: torch.Tensor) -> None:
        """The round is complete."""
        self._meter.complete(self._round.step, found.rows, found.present)
        self._switch, self._record = found.switch, total
        self._parts = self._claimed = None
        self._round.over()

    def _take_late(self) -> None:
        """Once more what was handed over within a round: the loop may have stepped a scheduler meanwhile."""
        if self._late is not None:
            self._given.take(self._late, run=False)
            self._late = None

    def _claim(self) -> bool:
        """Whether there is another part of a mended round for this rank."""
        if self._parts is None:
            assert self._round.missing is not None
            self._parts = self._cut(self._round.missing)
        number = self._link.claim(self.key) if self._parts else 0
        self._claimed = self._parts[number] if number < len(self._parts) else None
        return self._claimed is not None

    # -- membership epochs ----------------------------------------------------------------------------------------

    @property
    def _places(self) -> tuple[int, ...]:
        """Of the members."""
        assert self._rendezvous.epoch is not None
        return self._rendezvous.epoch.places

    def _enter(self) -> None:
        """Into the newest membership epoch, with those who are there."""
        began, last = time.perf_counter(), self._record
        said = None if last is None else base64.b64encode(last.numpy().tobytes()).decode()
        fits = self._terms.micro_batch or self._terms.global_batch
        met = self._rendezvous.enter({**self._round.word(), "fits": fits, "record": said})
        if met.packed is not None:
            self._catch_up(met.packed, met.up[0]["record"])
        epoch = self._rendezvous.epoch
        assert epoch is not None
        self._link.entered(epoch)
        self._round.agree(met.up, len(epoch.members), met.fits)
        self._parts = self._claimed = None
        self._switch = False
        self._arrive()  # whoever is not at the end of its loop does not come to ``together``
        took = time.perf_counter() - began
        self._told(Mended(self._round.step, epoch.number, epoch.places, took, self._round.within))

    def _arrive(self) -> None:
        """Tell the members that this rank has completed the round before, once for each."""
        key = f"together/{self.key}"
        if self._together != key:
            self._together = key
            self._link.add(key, 1)

    def _catch_up(self, packed: torch.Tensor, last: str | None) -> None:
        """Take over what a rank has that has completed more rounds."""
        if self._round.step == FRESH:
            self._given.take(packed, run=True)
            return
        self._given.take(packed, run=False)
        for parameter in self._parameters:
            parameter.grad = None
        self._sums.drop()
        assert last is not None
        total = torch.frombuffer(bytearray(base64.b64decode(last)), dtype=torch.float64)
        self._over(self._read(total), total)
        self._late = packed
