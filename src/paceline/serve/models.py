"""What the API takes and gives, as pydantic models: its OpenAPI description is made from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.serve import jobs
from paceline.serve import settings as asked
from paceline.serve.effects import Report
from paceline.serve.jobs import Job
from paceline.tokens import LEAST

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MOST_SECONDS = 1e9
Count = Annotated[int, Field(ge=0, le=asked.MOST_BATCH)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Portion = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Nothing is converted, nothing unknown passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class JobSettings(Strict):
    """A job: who decides, how many samples, how many workers."""

    batch: Annotated[
        int, Field(ge=1, le=asked.MOST_BATCH, description="Samples of a round, all workers together.")
    ]
    workers: Annotated[
        int, Field(ge=1, le=asked.MOST_WORKERS, description="Places: the most workers at once.")
    ]
    policy: Annotated[str, Field(max_length=200, description="NAME or NAME:key=value,...")] = "level"
    forecast: Annotated[
        str | None,
        Field(max_length=200, description="For policies that take one: NAME or NAME:key=value,..."),
    ] = None
    start: Annotated[
        int | None,
        Field(ge=1, le=asked.MOST_WORKERS, description="Workers that the first round waits for; all."),
    ] = None
    limits: Annotated[
        list[Annotated[list[Count | None], Field(min_length=2, max_length=2)]] | None,
        Field(max_length=asked.MOST_WORKERS, description="[least, most] samples of each place; null: none."),
    ] = None
    quantum: Annotated[int, Field(ge=1, le=asked.MOST_BATCH, description="Loads are multiples of it.")] = 1
    ahead: Annotated[
        int,
        Field(
            ge=0,
            le=asked.MOST_AHEAD,
            description="0: a plan waits for all reports; 1: the newest plan is handed out at once.",
        ),
    ] = 0
    give_up: Annotated[
        float,
        Field(ge=1, le=1e3, description="A worker may be silent this many times the longest recent round"),
    ] = 4.0
    floor: Annotated[float, Field(ge=0, le=1e5, description="and this many seconds more.")] = 10.0
    first: Annotated[
        float, Field(ge=1e-3, le=1e6, description="Seconds of silence while nothing has been measured.")
    ] = 300.0

    cost: Annotated[
        Literal["sum", "padded"] | None,
        Field(
            description="How a worker's samples add up, where they cost differently; null: all cost the same."
        ),
    ] = None

    def settings(self) -> asked.Settings:
        """Checked together. Raises PacelineError."""
        return asked.Settings.from_dict(self.model_dump())


class Join(Strict):
    """A worker that wants to take part."""

    name: Annotated[str, Field(pattern=NAME)]
    place: Annotated[
        int | None,
        Field(ge=0, lt=asked.MOST_WORKERS, description="A place of its own, for limits; any free one."),
    ] = None
    secret: Annotated[
        str | None,
        Field(
            pattern=rf"^[!-~]{{{LEAST},200}}$",
            description="Of its own choice, so that a join can be repeated; else the service makes one.",
        ),
    ] = None


class Joined(BaseModel):
    """Keep the secret: each further call needs it in the header X-Worker-Secret."""

    name: str
    place: int
    secret: str


class WorkerReport(Strict):
    """What a worker did in a round."""

    round: Annotated[int, Field(ge=0, le=2**53)]
    samples: Count
    seconds: Annotated[
        float, Field(ge=0, le=MOST_SECONDS, description="Its own, its wait for others left out.")
    ]
    overhead: Annotated[
        Seconds, Field(description="The part of seconds that does not grow with samples.")
    ] = 0.0
    cpu: Annotated[
        Portion | None, Field(description="Portion of its machine's processors that it can have.")
    ] = None
    memory: Annotated[Portion | None, Field(description="Portion of its machine's memory that is free.")] = (
        None
    )

    def report(self) -> Report:
        """As the job takes it."""
        return Report(self.round, self.samples, self.seconds, self.overhead, self.cpu, self.memory)


class Lengths(Strict):
    """How long the samples of a round are."""

    round: Annotated[int, Field(ge=0, le=2**53)]
    lengths: Annotated[
        list[Annotated[float, Field(gt=0, le=1e100)]],
        Field(min_length=1, description="Of each sample of the round, in the same order from every worker."),
    ]

    def given(self) -> jobs.Lengths:
        """As the job takes it."""
        return jobs.Lengths(self.round, self.lengths)


class Part(BaseModel):
    """A worker's part of a round."""

    round: int
    samples: int
    offset: Annotated[int, Field(description="Its first sample among the round's.")]
    batch: Annotated[int, Field(description="The round's samples.")]
    present: Annotated[int, Field(description="Workers in the round, n.")]
    weight: Annotated[float, Field(description="b_i / B: what its mean gradient counts in a sum.")]
    weight_in_mean: Annotated[
        float, Field(description="n b_i / B: what it counts in a mean over the workers.")
    ]
    indices: Annotated[
        list[int] | None, Field(description="In a job with a cost: its samples, as places among the round's.")
    ] = None
    sizes: Annotated[
        list[int] | None,
        Field(description="There: how many of these make up each micro-batch, one after the other."),
    ] = None


class Waiting(BaseModel):
    """No part yet: ask again."""

    waiting: Annotated[str, Field(description="What for, in a sentence.")]
    round: Annotated[
        int | None, Field(description="Whose samples' lengths are wanted, in a job with a cost.")
    ] = None


class Reported(BaseModel):
    """The report is stored. next: the worker's next part, where it was asked for and planned within the wait."""

    round: int
    next: Part | None
    waiting: str


class WorkerState(BaseModel):
    """One worker as the service sees it."""

    name: str
    place: int
    present: bool
    gone: str
    round: Annotated[int | None, Field(description="Of its newest report.")]
    samples: int | None
    seconds: float | None


class JobState(BaseModel):
    """One job."""

    name: str
    settings: JobSettings
    rounds: Annotated[int, Field(description="Closed ones.")]
    reports: int
    samples: int
    dropped: Annotated[int, Field(description="Workers dropped for their silence.")]
    present: int
    waiting: str
    deadline: Annotated[float, Field(description="Seconds of silence after which a worker is dropped now.")]
    record: Annotated[str, Field(description="The run directory, or why there is none.")]
    workers: list[WorkerState]


class Jobs(BaseModel):
    """All jobs, by name."""

    jobs: list[str]
    set_aside: Annotated[dict[str, str], Field(description="Jobs that cannot go on, and why.")]


class Health(BaseModel):
    """How the service is doing."""

    well: bool
    set_aside: Annotated[dict[str, str], Field(description="Jobs that cannot go on, and why.")]
    storing: Annotated[str, Field(description="Why nothing can be stored just now; empty where it can.")]


class Error(BaseModel):
    """What was wrong, in a sentence."""

    error: str


def state_of(name: str, job: Job, record: str) -> JobState:
    """For the answer."""
    workers = [
        WorkerState(
            name=member.name,
            place=member.place,
            present=member.present,
            gone=member.gone,
            round=None if member.last is None else member.last.round,
            samples=None if member.last is None else member.last.samples,
            seconds=None if member.last is None else member.last.seconds,
        )
        for member in sorted(job.members.by_name.values(), key=lambda member: member.place)
    ]
    settings = job.settings.to_dict()
    if settings["limits"] is not None:
        settings["limits"] = [list(pair) for pair in settings["limits"]]
    return JobState(
        name=name,
        settings=JobSettings(**settings),
        rounds=job.closed,
        reports=job.reports,
        samples=job.samples,
        dropped=job.drops,
        present=job.members.count,
        waiting=job.waiting_for(),
        deadline=job.limit(),
        record=record,
        workers=workers,
    )
