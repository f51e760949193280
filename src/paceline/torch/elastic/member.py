"""This rank's part in the rounds of a run that goes on when others are lost or join."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import WorkerError
from paceline.torch.elastic import group as transport
from paceline.torch.elastic import handover, note
from paceline.torch.elastic.buckets import Buckets
from paceline.torch.elastic.generation import Generation
from paceline.torch.elastic.group import Group
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.link import Link
from paceline.torch.elastic.meter import ROW, ElasticMeter
from paceline.torch.elastic.note import Note
from paceline.torch.elastic.orphans import Span, missing, parts
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.terms import Terms

_log = logging.getLogger(__name__)
FRESH = -1  # rounds behind a rank that has nothing yet
LOOK = 0.001  # seconds between two looks at who has come to the end of a loop
TOGETHER_SECONDS = 10.0  # how long one that has is held up by others that go on, at most


class Mended(NamedTuple):
    """A change of members that this rank took part in."""

    step: int  # the round that was running, or was to begin
    generation: int
    members: tuple[int, ...]  # places
    seconds: float  # until this rank could go on
    within: bool  # the round was running


class Member:
    """For each round ``begin``; then each piece of ``pieces``, and after its backward pass ``ended``.

    told: called with each change of members that this rank takes part in.
    """

    def __init__(
        self,
        link: Link,
        parameters: list[torch.nn.Parameter],
        terms: Terms,
        meter: ElasticMeter,
        given: Handover,
        told: Callable[[Mended], None],
    ) -> None:
        self._link, self._parameters, self._terms = link, parameters, terms
        self._meter, self._given, self._told = meter, given, told
        self._buckets = Buckets(parameters)
        self._generation: Generation | None = None
        self._group: Group | None = None
        self._has = False  # what the others have: the model and all that goes with it
        self._switch = False  # the members change before the next round
        self._step = FRESH  # running round, or the next to begin; so many are complete
        self._within = False  # a round is running, and not complete
        self._dropped = False  # its gradients were, on this rank
        self._together = ""  # where all members were seen to be at the end of the loop
        self._first = self._size = 0
        self._ran: list[Span] = []  # of the running round, whose gradients this rank has
        self._parts: list[Span] | None = None  # of a round that is mended, for whoever claims them
        self._claimed: Span | None = None  # the next that this rank runs
        self._planned: Span | None = None  # that the running piece is
        self._last_note: torch.Tensor | None = None
        self._late: torch.Tensor | None = (
            None  # what was handed over within a round that others had completed
        )

    # -- what the turns ask ------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """The others took the running round's step before this rank had its gradients: all of it was handed over, and
        its own step is not to be taken."""
        return self._late is not None

    @property
    def chief(self) -> bool:
        """Whether this rank is the first of the members, which does what one of them is to do."""
        generation = self._generation
        return generation is not None and generation.members[0].ident == self._link.ident

    @property
    def present(self) -> NDArray[np.bool_]:
        """Whose places are taken, (places,)."""
        mask = np.zeros(self._link.places, bool)
        mask[list(self._members.places)] = True
        return mask

    def join(self) -> None:
        """Take part; returns when this rank has all that the others have."""
        self._link.join()
        self._enter()

    def leave(self) -> None:
        """Take part until the end of the running round."""
        self._link.leave()

    def begin(self, step: int, first: int, size: int) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` on begins; how it is divided. May raise Left."""
        self._take_late()
        if step != self._step:
            self._step, self._ran, self._parts = step, [], None
        self._first, self._size = first, size
        if self._dropped:  # the sums of this generation, and the parts, go on with what is not there any more
            self._dropped = False
            self._link.broken(self._members.number)
            self._enter()
        elif self._switch or self._lost():
            self._enter()
        self._within = True
        loads = self._terms.balancer.loads(step, size, self.present)
        return RoundPlan(step, loads, size, None)

    def pieces(self, plan: RoundPlan, planned: Iterator[Piece]) -> Iterator[tuple[Span | None, Piece]]:
        """This rank's turns of the round: the samples of each (None for one that counts for nothing)."""
        if self._parts is None:
            start = self._first + int(plan.loads[: self._link.place].sum())
            for piece in planned:
                self._planned = (start, piece.samples) if piece.samples else None
                start += piece.samples
                yield self._planned, piece
        elif not self._claim():
            self._planned = None
            yield None, Piece(plan, 0, True, True)
        while self._within:
            self._planned = self._claimed
            assert self._claimed is not None
            yield self._claimed, Piece(plan, self._claimed[1], not self._ran, False)

    def backward_begins(self, last: bool) -> None:
        """A backward pass begins, of a round's last planned piece where ``last``."""
        if last and self._parts is None and not self._lost():
            self._buckets.begin(self._sum)

    def ended(self, piece: Piece) -> Piece:
        """The backward pass of a piece is through. The piece, which is the last one if the round is complete."""
        if self._planned is not None:
            self._ran.append(self._planned)
        if self._parts is None:
            if not piece.last:
                return piece
            began = time.perf_counter()
            if self._complete():
                return piece
            self._mend(began)
        while self._within:
            if self._claim():
                return piece._replace(last=False)
            began = time.perf_counter()
            if not self._complete():
                self._mend(began)
        return piece._replace(last=True)

    def drop(self) -> None:
        """The running round, if there is one, was left: nothing that this rank has run of it counts."""
        if self._within:
            self._within, self._dropped, self._ran = False, True, []
            self._buckets.drop()

    def together(self) -> None:
        """The loop, or its epoch, is over: wait until the round before is complete on all members.

        One in which its sums have failed needs this rank, which may have no other round."""
        self._take_late()
        if self._group is None or self._within or self._dropped:
            return
        until = time.monotonic() + TOGETHER_SECONDS
        while time.monotonic() < until:
            key = f"together/{self._members.number}/{self._step}"
            if self._together != key:
                self._together = key
                self._link.arrive(key)
            if self._link.arrived(key) >= len(self._members.members):
                return
            if self._lost():
                self._enter()
                self._take_late()
            time.sleep(LOOK)

    def close(self) -> None:
        """Let go of the model."""
        self._buckets.close()

    # -- a round ------------------------------------------------------------------------------------------------

    @property
    def _members(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _sum(self, tensor: torch.Tensor) -> Any:
        assert self._group is not None
        return self._group.sum(tensor)

    def _lost(self) -> bool:
        return self._link.lost_since(self._members.number)

    def _complete(self) -> bool:
        """Sum the gradients over the members: all of it has worked, or nothing has changed on this rank."""
        assert self._group is not None
        number = self._members.number
        mine = note.write(
            switch=self._link.newer(number),
            ran=self._ran,
            first=self._first,
            counted=self._meter.counted,
            used=self._buckets.used(),
            row=self._meter.row(self._terms.balancer.digest, sum(size for _, size in self._ran)),
            place=self._link.place,
            places=self._link.places,
        )
        works = [*self._buckets.finish(self._sum), self._sum(mine)]
        if not self._group.all_done(works, self._lost):
            return False
        found = self._read(mine)
        factor = 1.0
        if found.counted is not None:
            factor = self._size / found.counted if found.counted else 0.0
        self._buckets.apply(found.used.tolist(), factor)
        self._over(found, mine)
        return True

    def _read(self, total: torch.Tensor) -> Note:
        return note.read(total.numpy(), self._link.places, ROW, self._size, self._step)

    def _over(self, found: Note, total: torch.Tensor) -> None:
        """The round is complete."""
        self._meter.complete(self._step, found.rows, found.present)
        self._switch, self._last_note = found.switch, total
        self._within, self._parts, self._claimed, self._ran = False, None, None, []
        self._step += 1

    def _take_late(self) -> None:
        """Once more what was handed over within a round: the loop may have stepped a scheduler meanwhile."""
        if self._late is not None:
            self._given.take(self._late, run=False)
            self._late = None

    def _claim(self) -> bool:
        """Whether there is another part of a mended round for this rank."""
        assert self._parts is not None
        self._claimed = None
        if self._parts:
            number = self._link.claim(f"{self._members.number}/{self._step}")
            if number < len(self._parts):
                self._claimed = self._parts[number]
        return self._claimed is not None

    def _mend(self, began: float) -> None:
        """A sum has failed: go on with those who are there."""
        number = self._members.number
        if not self._link.newer(number):
            self._link.broken(number)
        self._enter()
        self._meter.waited(time.perf_counter() - began)

    # -- generations ----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Into the newest generation: meet its members, connect, bring all to the newest round that is complete."""
        began, number = time.perf_counter(), -1 if self._generation is None else self._generation.number
        while True:
            coming = self._link.next(number)
            number = coming.number
            words = self._link.meet(coming, self._word())
            if words is None:
                continue

            def lost(number: int = number) -> bool:
                return self._link.lost_since(number)

            idents = [member.ident for member in coming.members]
            index = idents.index(self._link.ident)
            group = transport.connect(self._link.spares, f"group/{number}", index, len(idents), lost)
            if group is not None and self._take_over(group, idents, words, lost):
                break
            self._link.broken(number)
        transport.let_go(group, self._group)
        self._generation, self._group, self._switch = coming, group, False
        self._has = True
        self._link.entered(coming)
        took = time.perf_counter() - began
        _log.info("generation %d of places %s after %.3f s", number, coming.places, took)
        self._told(Mended(self._step, number, coming.places, took, self._within))

    def _word(self) -> dict[str, Any]:
        last = self._last_note
        return {
            "has": self._has,
            "done": self._step,
            "ran": self._ran,
            "within": self._within,
            "fits": self._terms.micro_batch or self._terms.global_batch,
            "round": [self._first, self._size],
            "note": None if last is None else base64.b64encode(last.numpy().tobytes()).decode(),
        }

    def _take_over(
        self, group: Group, idents: list[int], words: dict[int, dict[str, Any]], lost: Callable[[], bool]
    ) -> bool:
        """Bring all members to the newest round, and divide what of it nobody has run; False where one is lost.

        Raises WorkerError where nobody is left of those who had the model."""
        having = [ident for ident in idents if words[ident]["has"]]
        if not having:
            if self._link.begun:
                raise WorkerError(
                    "every rank that had the model was lost before another had taken it over; start the run again "
                    "from its checkpoint"
                )
            having = idents[:1]  # the run begins with what the first of them has
        done = max(words[ident]["done"] for ident in having)
        up = [ident for ident in having if words[ident]["done"] == done]
        packed = None
        if len(up) < len(idents):
            mine = self._given.pack() if self._link.ident == up[0] else None
            packed = handover.send(group, mine, idents.index(up[0]), lost)
            if packed is None:
                return False
        if packed is not None and self._link.ident not in up:
            self._catch_up(packed, done, words[up[0]]["note"])
        running = [words[ident] for ident in up if words[ident]["within"]]
        self._parts = None
        if running:
            ran = [span for word in running for span in word["ran"]]
            first, size = running[0]["round"]
            fits = min(word["fits"] for word in words.values())
            whole = missing(ran, first, size)
            self._parts = parts(whole, len(idents), fits, self._terms.quantum, self._terms.floor)
        self._step = done
        return True

    def _catch_up(self, packed: torch.Tensor, done: int, last: str | None) -> None:
        """Take over what a rank has that has completed more rounds."""
        fresh = self._step == FRESH
        if fresh:
            self._given.take(packed, run=True)
            return
        self._given.take(packed, run=False)
        for parameter in self._parameters:
            parameter.grad = None
        assert last is not None
        total = torch.frombuffer(bytearray(base64.b64decode(last)), dtype=torch.float64)
        self._over(self._read(total), total)
        self._late = packed
