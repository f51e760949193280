"""What happens when a rank is lost, leaves or joins, from top to bottom.

A round is committed within its last backward pass (``Member.commit``), before the optimizer steps. If all sums end,
the members step, and only the next round begins with step 1.

1. A member notices that a sum has failed or that the members change, and calls ``Rendezvous.enter``. The launcher has
   listed the members of the next membership epoch. They tell each other how far they are, and connect.
2. The first member with the newest complete round hands its state to those that do not have it. If their sums of this
   round had failed, they are ``late``: they have the state after the step, and take none.
3. ``Running.agree``: every member takes over the same knowledge of the round that is running.
4. ``missing``: the samples that no member has run. The round's gradients that members still have are not lost.
5. ``parts``: these samples are cut, and the members claim and run the parts (``Member.claim``). Then the sums are
   tried again. If no sample is missing, only the sums are.

Samples are identified by their position in the epoch's order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.errors import WorkerError
from paceline.rounds import Array
from paceline.samples.cost import CostModel
from paceline.samples.deal import at_least
from paceline.torch.elastic import group as transport
from paceline.torch.elastic.group import Group
from paceline.torch.elastic.handover import Handover, send
from paceline.torch.elastic.link import LauncherLink
from paceline.torch.elastic.messages import MembershipEpoch

_log = logging.getLogger(__name__)
UNREACHED = 20  # attempts in a row in which members cannot connect although none of them is lost
FRESH = -1  # complete rounds of a rank that does not have the model yet
Span = tuple[int, int]  # position of the first sample in the epoch's order, and number of samples
Word = dict[str, Any]


class Met(NamedTuple):
    """The result of a rendezvous. up: the words of the members with the newest complete round, by place; packed: the
    state that the first of them handed over to this rank, if this rank's own was older."""

    up: list[Word]
    fits: int  # samples that fit into each member's memory at once
    packed: torch.Tensor | None


class Rendezvous:
    """Takes this rank into membership epochs: after ``enter``, ``epoch`` and ``group`` are those in force. Call
    ``link.entered`` once the state that was handed over is loaded.

    given: packs the state to hand over.
    """

    def __init__(self, link: LauncherLink, given: Handover) -> None:
        self._link, self._given = link, given
        self.epoch: MembershipEpoch | None = None  # in which this rank takes part
        self._group: Group | None = None
        self._has = False  # whether this rank has the run's state: the model and what was registered with it
        self._before = set[int]()  # members that had the state when this rank joined
        self.outlives = False  # none of these is a member any more

    @property
    def number(self) -> int:
        """The epoch's number; -1 before this rank has entered one."""
        return -1 if self.epoch is None else self.epoch.number

    @property
    def group(self) -> Group:
        """The group of the epoch's members."""
        assert self._group is not None
        return self._group

    def lost(self) -> bool:
        """Whether a member of the epoch was lost."""
        return self._link.lost_since(self.number)

    def enter(self, word: Word) -> Met:
        """Enter the newest epoch, or a later one if it changes meanwhile. word: this rank's report of itself.

        Raises WorkerError if no member with the model is left, or the members cannot reach one another."""
        began, number = time.perf_counter(), self.number
        word, unreached = {**word, "has": self._has}, 0
        running = "the running round" if word["done"] == FRESH else f"round {word['done']}"
        while True:
            coming = self._link.next(number)
            number = coming.number
            words = self._link.meet(coming, word, running)
            if words is None:
                continue
            idents = [member.ident for member in coming.members]
            up = self._up(idents, words)
            lost = partial(self._link.lost_since, number)
            group = self._connect(f"group/{number}", idents, lost)
            if group is not None:
                through, packed = self._hand_over(group, number, idents, up, lost)
                if through:
                    break
            unreached = 0 if group is not None or lost() else unreached + 1
            if unreached >= UNREACHED:
                raise WorkerError(
                    f"worker {self._link.place} and the others cannot reach one another, although all of them live; "
                    "set GLOO_SOCKET_IFNAME on each machine to the network that they share, and keep other programs "
                    "away from it"
                )
            self._link.broken(number)
        assert group is not None
        transport.let_go(group, self._group)
        if not self._has:
            self._before = {ident for ident in idents if words[ident]["has"]}
        self.outlives = bool(self._before) and self._before.isdisjoint(idents)
        self.epoch, self._group, self._has = coming, group, True
        _log.info("members %s in epoch %d after %.3f s", coming.places, number, time.perf_counter() - began)
        fits = min(one["fits"] for one in words.values())
        return Met([words[ident] for ident in up], fits, packed)

    def _connect(self, key: str, idents: list[int], lost: Callable[[], bool]) -> Group | None:
        """The group of these members; None as ``group.connect``."""
        link = self._link
        index, size = idents.index(link.ident), len(idents)
        return transport.connect(link.connections, key, index, size, lost, link.signer)

    def _up(self, idents: list[int], words: dict[int, Word]) -> list[int]:
        """The idents of the members that have the newest complete round."""
        having = [ident for ident in idents if words[ident]["has"]]
        if not having:
            if self._link.posted("begun"):
                raise WorkerError(
                    "every rank that had the model was lost before another had taken it over; start the run again "
                    "from its checkpoint"
                )
            having = idents[:1]  # the run begins with the state of the first one
        done = max(words[ident]["done"] for ident in having)
        return [ident for ident in having if words[ident]["done"] == done]

    def _hand_over(
        self, group: Group, number: int, idents: list[int], up: list[int], lost: Callable[[], bool]
    ) -> tuple[bool, torch.Tensor | None]:
        """Hand over the state from the first member in ``up`` to those not in it; the others continue at once.

        Returns whether that worked, and the state that this rank received."""
        mine = self._link.ident
        part = [ident for ident in idents if ident == up[0] or ident not in up]
        if len(part) == 1 or mine not in part:
            return True, None
        among: Group | None = group
        if len(part) < len(idents):
            among = self._connect(f"handover/{number}", part, lost)
        if among is None:
            return False, None
        packed = self._given.pack() if mine == up[0] else None
        received = send(among, packed, part.index(up[0]), lost)
        return received is not None, received if packed is None else None


class MissingSamples(NamedTuple):
    """The samples of a round that no member has run. members: number of ranks that may run them; fits: samples that
    fit into each member's memory at once."""

    spans: list[Span]
    members: int
    fits: int


@dataclass
class Running:
    """The running round. All ranks that have begun it have the same but for ``ran``, ``within`` and ``dropped``."""

    step: int = FRESH  # its number, which is that of complete rounds
    first: int = 0  # position of its first sample in the epoch's order
    size: int = 0
    among: tuple[int, ...] = ()  # the places that it was divided among, including those lost since
    within: bool = False  # this rank has begun it, and it is not complete
    dropped: bool = False  # this rank has dropped its gradients
    ran: list[Span] = field(default_factory=list)  # the samples whose gradients this rank has
    missing: MissingSamples | None = None  # the samples to recover, if its sums have failed

    def begin(self, step: int, first: int, size: int) -> None:
        """This round comes next; if it was running already, keep what is known of it."""
        if step != self.step:
            self.step, self.ran, self.missing = step, [], None
        self.first, self.size = first, size

    def picks_up(self) -> bool:
        """Whether this rank had dropped the gradients of a round, and takes part again."""
        dropped, self.dropped = self.dropped, False
        return dropped

    def enter(self, places: tuple[int, ...]) -> None:
        """This rank begins the round, which is divided among these places unless it is recovered."""
        self.within = True
        if self.missing is None:
            self.among = places

    def over(self) -> None:
        """The round is complete."""
        self.within, self.missing, self.ran = False, None, []
        self.step += 1

    def drop(self) -> None:
        """The round was left: forget what this rank has run of it."""
        self.within, self.dropped, self.ran = False, True, []

    def word(self) -> dict[str, Any]:
        """This rank's report of the round in a rendezvous."""
        return {
            "done": self.step,
            "ran": self.ran,
            "within": self.within,
            "round": [self.first, self.size, self.among],
        }

    def agree(self, words: list[dict[str, Any]], members: int, fits: int) -> None:
        """Take over what the words of the members with the most complete rounds imply; the same on all members."""
        self.step, self.missing = words[0]["done"], None
        running = [word for word in words if word["within"]]
        if running:
            self.first, self.size, among = running[0]["round"]
            self.among = tuple(among)
            ran = [span for word in running for span in word["ran"]]
            self.missing = MissingSamples(missing(ran, self.first, self.size), members, fits)


def missing(ran: Iterable[Span], first: int, size: int) -> list[Span]:
    """The spans of the ``size`` samples from ``first`` on that are in none of ``ran``."""
    found, at, end = [], first, first + size
    for start, count in sorted(tuple(span) for span in ran):
        if start > at:
            found.append((at, start - at))
        at = max(at, start + count)
    if at < end:
        found.append((at, end - at))
    return found


def parts_by_cost(
    spans: Iterable[Span],
    lengths: Sequence[Array],
    model: CostModel,
    members: int,
    most: int,
    budget: float,
    min_samples: int = 1,
) -> list[Span]:
    """Like ``parts``, for samples that cost differently: about two parts of equal cost for each member.

    lengths: of the samples of each span. budget: the largest length of a part, see ``samples.Room.budget``."""
    found = []
    costs = [model.of(each) for each in lengths]
    aim = sum(float(each.sum()) for each in costs) / (2 * members)
    for (start, _), each, cost in zip(spans, lengths, costs, strict=True):
        sizes: list[int] = []
        size, longest, tokens, dearest, together = 0, 0.0, 0.0, 0.0, 0.0
        for length, own in zip(each.tolist(), cost.tolist(), strict=True):
            longest, dearest = max(longest, length), max(dearest, own)
            tokens, together = tokens + length, together + own
            if model.padded:
                tokens, together = (size + 1) * longest, (size + 1) * dearest
            if size and (size >= most or tokens > budget or together > aim + own / 2):
                sizes.append(size)
                size, longest, tokens, dearest, together = 0, length, length, own, own
            size += 1
        for part in at_least(np.array([*sizes, size], np.int64), min_samples).tolist():
            found.append((start, part))
            start += part
    return found


def parts(spans: Iterable[Span], members: int, most: int, unit: int = 1, min_samples: int = 1) -> list[Span]:
    """Cut spans into parts of at most ``most`` samples, about two for each member.

    unit: parts of a span are multiples of this number of samples if the span is. min_samples: each part has at least
    this number of samples if the span has; ``most`` must be at least 2 min_samples - 1."""
    spans = list(spans)
    each = max(-(-sum(size for _, size in spans) // (2 * members)), 2 * min_samples - 1)
    each = max(min(each, most) // unit, 1) * unit
    found = []
    for start, size in spans:
        count = -(-size // each)
        units, rest = divmod(size, unit)
        low, larger = divmod(units, count)
        sizes = [(low + (number < larger)) * unit for number in range(count)]
        sizes[-1] += rest  # less than a unit, and the last parts are the smaller ones
        for part in sizes:
            if part:
                found.append((start, part))
            start += part
    return found
