"""The places of a job: the worker that holds each of them, and each place's part of a round between its plan and its
last report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, TypeAdapter

from paceline import tokens
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.samples.cost import batch_parts
from paceline.serve.events import Conflict, Forbidden, Gone, NotFound, Report, RoundDeal


@dataclass(kw_only=True)
class JobWorker:
    """One worker. secret: its secret's digest. heard: when it last joined or reported. gone: why it is absent."""

    name: str
    place: int
    secret: str
    heard: float
    gone: str = ""
    since: float = 0.0  # when it left
    last: Report | None = None

    @property
    def present(self) -> bool:
        return not self.gone


class JobWorkers:
    """All workers that hold or held a place; for each place at most one name is remembered."""

    def __init__(self, places: int, kept: Sequence[JobWorker] = ()) -> None:
        self.by_name: dict[str, JobWorker] = {}
        self.holders: list[JobWorker | None] = [None] * places
        self.mask: NDArray[np.bool_] = np.zeros(places, bool)  # places whose worker is present
        for member in kept:
            self.by_name[member.name] = self.holders[member.place] = member
            self.mask[member.place] = member.present
        self.count = int(self.mask.sum())

    def names(self) -> list[str | None]:
        """The name of the worker that holds, or held last, each place."""
        return [None if holder is None else holder.name for holder in self.holders]

    def known(self, name: str, secret: str) -> JobWorker:
        """The worker of this name, present or not. Raises Forbidden if the secret is not its own."""
        member = self.by_name.get(name)
        if member is None:
            raise NotFound(f"worker {name!r} is unknown here: join first")
        if not tokens.matches(secret, member.secret):
            raise Forbidden(f"this is not the secret of worker {name!r}: use the one that its join returned")
        return member

    def here(self, name: str) -> JobWorker:
        """The worker of this name. Raises NotFound or Gone if it is not present."""
        member = self.by_name.get(name)
        if member is None:
            raise NotFound(f"worker {name!r} is unknown here: join first")
        if member.gone:
            raise Gone(f"worker {name!r} {member.gone}: join again to take part from the next round on")
        return member

    def join(self, now: float, name: str, secret: str, place: int) -> None:
        """Take a place that ``place`` returned."""
        before = self.holders[place]
        if before is not None:
            del self.by_name[before.name]
        mine = self.by_name.get(name)
        if mine is not None:
            self.holders[mine.place] = None
        member = JobWorker(name=name, place=place, secret=secret, heard=now)
        self.by_name[name] = self.holders[place] = member
        self.mask[place] = True
        self.count += 1

    def leave(self, member: JobWorker, now: float, sentence: str) -> None:
        """Mark the worker as gone; its name and place are kept until another worker needs them."""
        member.gone, member.since = sentence, now
        self.mask[member.place] = False
        self.count -= 1

    def place(self, name: str, secret: str, asked: int | None = None) -> int:
        """A worker's place: the requested one, its former one, an unused one, or that of the worker gone longest.

        secret: its digest; the name of a present worker can be taken over only with that worker's secret.
        """
        mine = self.by_name.get(name)
        if mine is not None and mine.present and secret != mine.secret:
            raise Conflict(
                f"worker {name!r} is present already: choose another name; if that worker died, it will be dropped "
                "after its deadline"
            )
        if asked is not None:
            if not 0 <= asked < len(self.holders):
                raise Conflict(f"place={asked}: the job has places 0 to {len(self.holders) - 1}")
            holder = self.holders[asked]
            if holder is not None and holder.present and holder is not mine:
                raise Conflict(f"place {asked} is taken by worker {holder.name!r}: choose another or none")
            return asked
        if mine is not None:
            return mine.place
        if None in self.holders:
            return self.holders.index(None)
        gone = [each for each in self.holders if each is not None and each.gone]
        if not gone:
            raise Conflict(
                f"all {len(self.holders)} places are taken: wait until a worker leaves, or create a job with more"
            )
        return min(gone, key=lambda holder: (holder.since, holder.place)).place


@dataclass(kw_only=True)
class PendingRound:
    """A round's plan, the workers that it still waits for, and their reports.

    loads: samples by place. present: number of workers with a part. awaited: places that still have to report.
    longest: seconds of the longest turnaround, from the plan or the worker's last report to its report. dealt: which
    samples these are, if they cost differently. reports: by place.
    """

    number: int
    opened: float
    loads: list[int]
    present: int
    awaited: Annotated[set[int], PlainSerializer(sorted)]
    longest: float = 0.0
    dealt: RoundDeal | None = None
    reports: dict[int, Report] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = sum(self.loads)
        self.offsets = list(accumulate(self.loads, initial=0))

    def part(self, place: int) -> Part:
        """The part of the worker in this place."""
        samples, start = self.loads[place], self.offsets[place]
        weight = samples / self.batch
        indices = sizes = None
        if self.dealt is not None:
            indices, sizes = self.dealt.order[start : start + samples], self.dealt.sizes[place]
        mean = self.present * weight
        return Part(self.number, samples, start, self.batch, self.present, weight, mean, indices, sizes)

    def check(self, name: str, place: int, samples: int) -> None:
        """Raise PacelineError if the worker in this place cannot have run this many samples."""
        planned = self.loads[place]
        if samples > planned:
            raise PacelineError(
                f"samples={samples}: expected at most {planned}, the plan of round {self.number} for worker {name!r}"
            )
        if self.dealt is not None and samples not in (0, planned):
            raise PacelineError(
                f"samples={samples}: expected {planned}, the plan of round {self.number} for worker {name!r}, "
                "or 0: the samples cost differently, and it is unknown which of them were run"
            )

    def report(self, place: int, report: Report, turnaround: float) -> None:
        """Store the report of the worker in a place."""
        self.awaited.discard(place)
        self.longest = max(self.longest, turnaround)
        self.reports[place] = report

    def reported(self, name: str) -> Array:
        """One field of the reports by place; NaN if there is no report."""
        figures: Array = np.full(len(self.loads), np.nan)
        for place, report in self.reports.items():
            value = getattr(report, name)
            if value is not None:
                figures[place] = value
        return figures

    def parts(self, padded: bool) -> Array | None:
        """The sums over each worker's samples, (n, 3), see ``Deal.parts``; None if all samples cost the same."""
        if self.dealt is None:
            return None
        lengths = np.array(self.dealt.lengths)[self.dealt.order]
        parts = np.zeros((len(self.loads), 3))
        for place, report in self.reports.items():
            if report.samples:
                mine = lengths[self.offsets[place] : self.offsets[place + 1]]
                parts[place] = batch_parts(mine, np.array(self.dealt.sizes[place]), padded)
        return parts


# For the stored state: ``dump_python`` returns plain values for JSON, which ``validate_python`` reads again.
MEMBERS, ROUNDS = TypeAdapter(list[JobWorker]), TypeAdapter(list[PendingRound])
