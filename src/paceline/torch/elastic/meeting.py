"""From one generation into the next: its members meet, connect, and are brought to the newest complete round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.errors import WorkerError
from paceline.torch.elastic import group as transport
from paceline.torch.elastic import handover
from paceline.torch.elastic.generation import Generation
from paceline.torch.elastic.group import Group
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.link import Link

_log = logging.getLogger(__name__)
UNREACHED = 20  # times in a row that members cannot connect though none of them is lost
Word = dict[str, Any]


class Met(NamedTuple):
    """What came of a meeting. up: the words of the members with the newest complete round, by place; packed: what
    this rank was given by the first of them, because its own state was older."""

    up: list[Word]
    fits: int  # samples that each member has room for at once
    packed: torch.Tensor | None


class Meeting:
    """``enter`` a generation; then ``generation`` and ``group`` are those to go by. The link is to be told when what
    was handed over is taken.

    given: packs what is handed over.
    """

    def __init__(self, link: Link, given: Handover) -> None:
        self._link, self._given = link, given
        self._generation: Generation | None = None
        self._group: Group | None = None
        self._has = False  # what the others have: the model and all that goes with it

    @property
    def joined(self) -> bool:
        """Whether this rank has entered a generation."""
        return self._generation is not None

    @property
    def generation(self) -> Generation:
        """In which this rank takes part."""
        assert self._generation is not None
        return self._generation

    @property
    def group(self) -> Group:
        """Its members' sums."""
        assert self._group is not None
        return self._group

    def lost(self) -> bool:
        """Whether a member of the generation was lost."""
        return self._link.lost_since(self.generation.number)

    def enter(self, word: Word) -> Met:
        """Into the newest generation, which may follow at once by another. word: what this rank tells of itself.

        Raises WorkerError where no member with the model is left, or the members cannot reach one another."""
        began, number = time.perf_counter(), -1 if self._generation is None else self._generation.number
        word, unreached = {**word, "has": self._has}, 0
        while True:
            coming = self._link.next(number)
            number = coming.number
            words = self._link.meet(coming, word)
            if words is None:
                continue
            idents = [member.ident for member in coming.members]
            up = self._up(idents, words)

            def lost(number: int = number) -> bool:
                return self._link.lost_since(number)

            stores, seal = self._link.spares, self._link.seal
            index, size = idents.index(self._link.ident), len(idents)
            group = transport.connect(stores, f"group/{number}", index, size, lost, seal)
            if group is not None:
                through, packed = self._hand_over(group, number, idents, up, lost)
                if through:
                    break
            unreached = 0 if group is not None or lost() else unreached + 1
            if unreached >= UNREACHED:
                raise WorkerError(
                    f"worker {self._link.place} and the others cannot reach one another, though all of them live; "
                    "name the network that they share in GLOO_SOCKET_IFNAME on each machine, and keep others away "
                    "from it"
                )
            self._link.broken(number)
        assert group is not None
        transport.let_go(group, self._group)
        self._generation, self._group, self._has = coming, group, True
        _log.info(
            "generation %d of places %s after %.3f s", number, coming.places, time.perf_counter() - began
        )
        fits = min(one["fits"] for one in words.values())
        return Met([words[ident] for ident in up], fits, packed)

    def _up(self, idents: list[int], words: dict[int, Word]) -> list[int]:
        """Who has the newest complete round."""
        having = [ident for ident in idents if words[ident]["has"]]
        if not having:
            if self._link.begun:
                raise WorkerError(
                    "every rank that had the model was lost before another had taken it over; start the run again "
                    "from its checkpoint"
                )
            having = idents[:1]  # the run begins with what the first of them has
        done = max(words[ident]["done"] for ident in having)
        return [ident for ident in having if words[ident]["done"] == done]

    def _hand_over(
        self, group: Group, number: int, idents: list[int], up: list[int], lost: Callable[[], bool]
    ) -> tuple[bool, torch.Tensor | None]:
        """Between the first of those who are up and those who are not; the others go on at once.

        Whether it worked, and what this rank was handed over."""
        mine = self._link.ident
        part = [up[0], *(ident for ident in idents if ident not in up)]
        if len(part) == 1 or mine not in part:
            return True, None
        among: Group | None = group
        if len(part) < len(idents):
            stores, seal = self._link.spares, self._link.seal
            index, size = part.index(mine), len(part)
            among = transport.connect(stores, f"handover/{number}", index, size, lost, seal)
        else:
            part = idents
        if among is None:
            return False, None
        packed = self._given.pack() if mine == up[0] else None
        received = handover.send(among, packed, part.index(up[0]), lost)
        return received is not None, received if packed is None else None
