"""What a job knows of its places: who holds each of them, and what each has of a round between its plan and its last
report.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import tokens
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.samples.cost import batch_parts
from paceline.serve.events import Conflict, Dealt, Forbidden, Gone, NotFound, Report

READINGS = ("seconds", "overhead", "cpu", "memory")


@dataclass(kw_only=True)
class Member:
    """One worker. secret: the digest of it. heard: when it last joined or reported; gone: why it is not there."""

    name: str
    place: int
    secret: str
    heard: float
    gone: str = ""
    since: float = 0.0  # when it went
    last: Report | None = None

    @property
    def present(self) -> bool:
        return not self.gone


class Members:
    """All workers that hold or held a place; at most one name a place is remembered."""

    def __init__(self, places: int) -> None:
        self.by_name: dict[str, Member] = {}
        self.holders: list[Member | None] = [None] * places
        self.mask: NDArray[np.bool_] = np.zeros(places, bool)  # who is present
        self.count = 0

    def known(self, name: str, secret: str) -> Member:
        """The worker, if that is its secret; also one that is gone."""
        member = self.by_name.get(name)
        if member is None:
            raise NotFound(f"worker {name!r} is unknown here: join first")
        if not tokens.matches(secret, member.secret):
            raise Forbidden(f"this is not the secret of worker {name!r}: use the one that its join returned")
        return member

    def here(self, name: str) -> Member:
        """The worker, if it is present."""
        member = self.by_name.get(name)
        if member is None:
            raise NotFound(f"worker {name!r} is unknown here: join first")
        if member.gone:
            raise Gone(f"worker {name!r} {member.gone}: join again to take part from the next round on")
        return member

    def join(self, now: float, name: str, secret: str, place: int) -> Member:
        """Take a place that ``place`` gave."""
        member = Member(name=name, place=place, secret=secret, heard=now)
        before = self.holders[member.place]
        if before is not None:
            del self.by_name[before.name]
        mine = self.by_name.get(name)
        if mine is not None:
            self.holders[mine.place] = None
        self.by_name[name] = self.holders[member.place] = member
        self.mask[member.place] = True
        self.count += 1
        return member

    def leave(self, member: Member, now: float, sentence: str) -> None:
        """No longer there; the name and the place are kept until somebody needs them."""
        member.gone, member.since = sentence, now
        self.mask[member.place] = False
        self.count -= 1

    def place(self, name: str, secret: str, asked: int | None = None, promised: Collection[int] = ()) -> int:
        """A worker's place: the one asked for, its own of before, a new one, or that of whom is gone longest.

        secret: its digest; a name that is taken can be taken over with its own alone. promised: places that
        others are about to take.
        """
        mine = self.by_name.get(name)
        if mine is not None and mine.present and secret != mine.secret:
            raise Conflict(
                f"worker {name!r} is here already: choose another name; if it died, it will be dropped when it "
                "is missed"
            )
        if asked is not None:
            if not 0 <= asked < len(self.holders):
                raise Conflict(f"place={asked}: the job has places 0 to {len(self.holders) - 1}")
            holder = self.holders[asked]
            if holder is not None and holder.present and holder is not mine:
                raise Conflict(f"place {asked} is taken by worker {holder.name!r}: choose another or none")
            return asked
        if mine is not None and mine.place not in promised:
            return mine.place
        free = (i for i, holder in enumerate(self.holders) if holder is None and i not in promised)
        place = next(free, None)
        if place is not None:
            return place
        gone = [
            each for each in self.holders if each is not None and each.gone and each.place not in promised
        ]
        if not gone:
            raise Conflict(
                f"all {len(self.holders)} places are taken: wait until somebody leaves, or make a job with more"
            )
        return min(gone, key=lambda holder: (holder.since, holder.place)).place

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain values, for JSON."""
        return [asdict(member) for member in self.by_name.values()]

    @classmethod
    def from_dict(cls, places: int, values: list[dict[str, Any]]) -> Members:
        """What ``to_dict`` gave."""
        members = cls(places)
        for value in values:
            last = value["last"]
            member = Member(**value | {"last": None if last is None else Report(*last)})
            members.by_name[member.name] = members.holders[member.place] = member
            members.mask[member.place] = member.present
            members.count += member.present
        return members


@dataclass(kw_only=True)
class OpenRound:
    """What was planned, who is still awaited, and what was reported; arrays by place.

    longest: seconds of the longest turnaround, from the plan or the worker's last report to its report. dealt: which
    samples those are, where they cost differently.
    """

    number: int
    opened: float
    loads: NDArray[np.int64]
    members: NDArray[np.bool_]
    awaited: set[int]
    longest: float = 0.0
    dealt: Dealt | None = None
    samples: NDArray[np.int64] = field(init=False)
    readings: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.loads)
        self.offsets = np.cumsum(self.loads) - self.loads
        self.batch, self.present = int(self.loads.sum()), int(self.members.sum())
        self.samples = np.zeros(n, np.int64)
        self.readings = {name: np.full(n, np.nan) for name in READINGS}

    def assignment(self, place: int) -> Part:
        """The part of the worker in a place."""
        samples = int(self.loads[place])
        weight = samples / self.batch
        return Part(
            self.number,
            samples,
            int(self.offsets[place]),
            self.batch,
            self.present,
            weight,
            self.present * weight,
            *self._which(place),
        )

    def parts(self, padded: bool) -> Array | None:
        """What each worker ran adds up to, (n, 3), see ``Deal.parts``; None where all samples cost the same."""
        if self.dealt is None:
            return None
        lengths = np.array(self.dealt.lengths)[self.dealt.order]
        parts = np.zeros((len(self.loads), 3))
        for place in np.flatnonzero(self.samples).tolist():
            start = int(self.offsets[place])
            mine = lengths[start : start + int(self.loads[place])]
            parts[place] = batch_parts(mine, np.array(self.dealt.sizes[place]), padded)
        return parts

    def _which(self, place: int) -> tuple[list[int], list[int]] | tuple[()]:
        """The places of a worker's samples among the round's, and the sizes of its micro-batches."""
        if self.dealt is None:
            return ()
        start = int(self.offsets[place])
        return self.dealt.order[start : start + int(self.loads[place])], self.dealt.sizes[place]

    def check(self, name: str, place: int, samples: int) -> None:
        """Raises PacelineError where the worker in this place cannot have run so many samples."""
        planned = int(self.loads[place])
        if samples > planned:
            raise PacelineError(
                f"samples={samples}: expected at most {planned}, what round {self.number} planned for worker {name!r}"
            )
        if self.dealt is not None and samples not in (0, planned):
            raise PacelineError(
                f"samples={samples}: expected {planned}, all that round {self.number} planned for worker {name!r}, "
                "or 0: the samples cost differently, and nobody knows which of them were run"
            )

    @property
    def untouched(self) -> bool:
        """Whether nobody is awaited and nobody has reported."""
        return not self.awaited and bool(np.isnan(self.readings["seconds"]).all())

    def report(self, place: int, report: Report, turnaround: float) -> None:
        """Take in what was done in a place."""
        self.awaited.discard(place)
        self.longest = max(self.longest, turnaround)
        self.samples[place] = report.samples
        for name in READINGS:
            value = getattr(report, name)
            self.readings[name][place] = np.nan if value is None else value

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN as None."""
        return {
            "number": self.number,
            "opened": self.opened,
            "loads": self.loads.tolist(),
            "members": np.flatnonzero(self.members).tolist(),
            "awaited": sorted(self.awaited),
            "longest": self.longest,
            "dealt": self.dealt,
            "samples": self.samples.tolist(),
            "readings": {
                name: [None if value != value else value for value in values.tolist()]
                for name, values in self.readings.items()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> OpenRound:
        """What ``to_dict`` gave."""
        loads = np.array(values["loads"], np.int64)
        members = np.zeros(len(loads), bool)
        members[values["members"]] = True
        round = cls(
            number=values["number"],
            opened=values["opened"],
            loads=loads,
            members=members,
            awaited=set(values["awaited"]),
            longest=values["longest"],
            dealt=None if values["dealt"] is None else Dealt(*values["dealt"]),
        )
        round.samples = np.array(values["samples"], np.int64)
        round.readings = {name: np.array(values["readings"][name], float) for name in READINGS}
        return round
