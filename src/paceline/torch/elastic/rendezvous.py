"""The rendezvous for a membership epoch: its members meet, connect, and are brought to the newest complete round.

A joining rank receives the model, the states of what was registered with it, and the progress of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic import group as transport
from paceline.torch.elastic.group import Group
from paceline.torch.elastic.link import Link
from paceline.torch.elastic.membership import MembershipEpoch
from paceline.torch.elastic.messages import Unread, pack, unpack

_log = logging.getLogger(__name__)
CHUNK = 32 << 20  # bytes that are sent at once
UNREACHED = 20  # attempts in a row in which members cannot connect although none of them is lost
Word = dict[str, Any]


class Handover:
    """Packs the state that a joining rank needs, and loads it. run: gives the run's progress; go_on: loads that."""

    def __init__(
        self, model: torch.nn.Module, run: Callable[[], dict[str, Any]], go_on: Callable[[Any], None]
    ) -> None:
        self._model, self._run, self._go_on = model, run, go_on
        self.registered: list[Any] = []
        self.record: torch.Tensor | None = None  # of this rank's last commit, for a rank that missed it

    def register(self, things: Sequence[Any]) -> None:
        """Take optimizers, schedulers, scalers and the like. Raises PacelineError if one has no readable state."""
        for thing in things:
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")):
                raise PacelineError(
                    f"pace.register() was given a {type(thing).__name__}; expected things with state_dict() and "
                    "load_state_dict(), such as optimizers, schedulers and scalers"
                )
            try:
                unpack(bytes(pack(thing.state_dict())), f"the state of a {type(thing).__name__}")
            except Unread as error:  # raised now, and not when a rank joins
                raise PacelineError(f"pace.register(): {error}") from error
        self.registered = list(things)

    def pack(self) -> torch.Tensor:
        """The whole state, as bytes in a tensor."""
        parts = {
            "model": self._model.state_dict(),
            "registered": [thing.state_dict() for thing in self.registered],
            "run": self._run(),
            "record": self.record,
        }
        return torch.frombuffer(pack(parts), dtype=torch.uint8)

    def committed(self, record: torch.Tensor) -> None:
        """This rank has committed a round with this record."""
        self.record = record

    def take(self, packed: torch.Tensor, run: bool) -> Any:
        """Load what ``pack`` gave. run: also the progress of the run. Returns the ``record`` of the packing rank."""
        parts = unpack(packed.numpy().tobytes(), "the state that another worker hands over")
        self._model.load_state_dict(parts["model"])
        if len(parts["registered"]) != len(self.registered):
            raise PacelineError(
                f"pace.register() was given {len(self.registered)} things here, and {len(parts['registered'])} on "
                "the rank that hands over; expected the same on every rank"
            )
        for thing, state in zip(self.registered, parts["registered"], strict=True):
            thing.load_state_dict(state)
        if run:
            self._go_on(parts["run"])
            self.record = parts["record"]  # this rank may be the next to hand over
        return parts["record"]


def send(
    group: Group, packed: torch.Tensor | None, root: int, lost: Callable[[], bool]
) -> torch.Tensor | None:
    """Send ``packed`` from the member with index ``root`` to all; returns what arrived, None if that failed."""
    length = torch.tensor([0 if packed is None else packed.numel()])
    if not group.all_done([group.broadcast(length, root)], lost):
        return None
    whole = torch.empty(int(length), dtype=torch.uint8) if packed is None else packed
    for start in range(0, int(length), CHUNK):
        if not group.all_done([group.broadcast(whole[start : start + CHUNK], root)], lost):
            return None
    return whole


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

    def __init__(self, link: Link, given: Handover) -> None:
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
        while True:
            coming = self._link.next(number)
            number = coming.number
            words = self._link.meet(coming, word)
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
        return transport.connect(link.connections, key, index, size, lost, link.seal)

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
