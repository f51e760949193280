"""A round between its plan and its last report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.client import Part
from paceline.rounds import Array
from paceline.samples.cost import batch_parts
from paceline.serve.effects import Report
from paceline.serve.events import Dealt

READINGS = ("seconds", "overhead", "cpu", "memory")


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
            "dealt": None if self.dealt is None else list(self.dealt),
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
            dealt=None if values.get("dealt") is None else Dealt(*values["dealt"]),
        )
        round.samples = np.array(values["samples"], np.int64)
        round.readings = {name: np.array(values["readings"][name], float) for name in READINGS}
        return round
