"""What the API takes and gives, as pydantic models: its OpenAPI description is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline import policies
from paceline.balancer import Balancer
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.rounds import Cluster
from paceline.samples import CostLearner, SampleCosts
from paceline.tokens import LEAST

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SECRET = rf"^[!-~]{{{LEAST},200}}$"
MOST_WORKERS = 10_000
MOST_BATCH = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=MOST_BATCH)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Pair = Annotated[list[Count | None], Field(min_length=2, max_length=2)]
Portion = Annotated[float, Field(ge=0, le=1)]


def _told(text: str, default: Any = ..., **limits: Any) -> Any:
    """A field with its description."""
    return Field(default, description=text, **limits)


class Strict(BaseModel):
    """Nothing is converted, nothing unknown passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Settings(Strict):
    """A job, fixed for its life: who decides, how many samples, how many workers, how long to wait for the silent."""

    batch: int = _told("Samples of a round, all workers together.", ge=1, le=MOST_BATCH)
    workers: int = _told("Places: the most workers at once.", ge=1, le=MOST_WORKERS)
    policy: str = _told("NAME or NAME:key=value,...", "level", max_length=200)
    start: int | None = _told(
        "Workers that the first round waits for; by default all.", None, ge=1, le=MOST_WORKERS
    )
    limits: list[Pair] | None = _told(
        "Least and most samples of each place; null if it has none.", None, max_length=MOST_WORKERS
    )
    quantum: int = _told("Loads are multiples of it.", 1, ge=1, le=MOST_BATCH)
    ahead: int = _told(
        "0: a plan waits for all reports; 1: the newest plan is handed out at once.", 0, ge=0, le=8
    )
    give_up: float = _told(
        "A worker may be silent this many times the longest recent round, and floor.", 4.0, ge=1, le=1e3
    )
    floor: float = _told(
        "A silent worker is dropped after give_up times the longest recent round and these seconds.",
        10.0,
        ge=0,
        le=1e5,
    )
    first: float = _told("Seconds of silence while nothing has been measured.", 300.0, ge=1e-3, le=1e6)
    cost: Literal["sum", "padded"] | None = _told(
        "How a worker's samples add up, if they cost differently; left out if all cost the same.", None
    )

    @model_validator(mode="after")
    def _fits(self) -> Settings:
        """Raises PacelineError for what does not fit together."""
        if self.to_start > self.workers:
            raise PacelineError(f"start={self.start}: expected 1 to {self.workers:,}, the workers")
        if self.cost is not None and self.quantum > 1:
            raise PacelineError(
                f"quantum={self.quantum} counts samples, and cost={self.cost!r} divides by cost; leave one out"
            )
        if self.limits is not None and len(self.limits) != self.workers:
            raise PacelineError(
                f"limits for {len(self.limits)} of {self.workers} workers: expected one pair each"
            )
        self.balancer()
        return self

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """These settings. Raises PacelineError for whatever is unknown, out of range or does not fit together."""
        try:
            return cls.model_validate(values, strict=False)
        except ValidationError as error:
            raise PacelineError(mistake(error.errors()[0], given=True)) from error

    @classmethod
    def stored(cls, values: Any) -> Settings:
        """What ``model_dump`` gave. Raises PacelineError if it is anything else."""
        fields = cls.model_fields.keys()
        if not isinstance(values, dict):
            raise PacelineError(
                f"its settings are a {type(values).__name__}: expected {len(fields)} settings by name"
            )
        for word, names in (("unknown", values.keys() - fields), ("missing", fields - values.keys())):
            if names:
                raise PacelineError(
                    f"its settings are not this version's ({word}: {', '.join(sorted(names))})"
                )
        try:
            return cls.of(**values)
        except PacelineError as error:
            raise PacelineError(f"its settings cannot be used: {error}") from error

    @property
    def to_start(self) -> int:
        """How many must have joined before the first round."""
        return self.workers if self.start is None else self.start

    def balancer(self) -> Balancer:
        """A balancer at its first round."""
        pairs = self.limits or ((None, None),) * self.workers
        least = np.array([float(low or 0) for low, _ in pairs])
        most = np.array([float(self.batch if high is None else high) for _, high in pairs])
        cluster = Cluster(self.workers, self.batch, least, most)
        balancer = Balancer(policies.create(self.policy, cluster), quantum=self.quantum)
        if balancer.piece_plan(0) is not None:
            raise PacelineError(
                f"policy {self.policy!r} moves work within a round, which a service cannot; choose another"
            )
        try:
            balancer.loads(0, self.batch)
        except PacelineError as error:
            raise PacelineError(
                f"quantum={self.quantum} does not fit the limits: in whole multiples of it they hold less than the "
                f"batch of {self.batch}; raise them or lower it"
            ) from error
        return balancer

    def learner(self, lengths: Sequence[float]) -> CostLearner:
        """What learns the costs of a job whose first round has samples of these lengths. Raises PacelineError."""
        costs = SampleCosts.checked(lengths, self.batch, "lengths")
        return CostLearner(costs, self.workers, self.batch, padded=self.cost == "padded")


class Join(Strict):
    """A worker that wants to take part."""

    name: str = Field(pattern=NAME)
    place: int | None = _told("A place of its own, for limits; any free one.", None, ge=0, lt=MOST_WORKERS)
    secret: str | None = _told(
        "Of its own choice, so that a join can be repeated; else the service makes one.", None, pattern=SECRET
    )


class Joined(BaseModel):
    """Keep the secret: each further call needs it in the header X-Worker-Secret."""

    name: str
    place: int
    secret: str


class WorkerReport(Strict):
    """What a worker did in a round."""

    round: int = Field(ge=0, le=2**53)
    samples: Count
    seconds: Seconds = _told("Its own, its wait for others left out.")
    overhead: Seconds = _told("The part of seconds that does not grow with samples.", 0.0)
    cpu: Portion | None = _told("Portion of its machine's processors that it can have.", None)
    memory: Portion | None = _told("Portion of its machine's memory that is free.", None)


class Lengths(Strict):
    """How long the samples of a round are."""

    round: int = Field(ge=0, le=2**53)
    lengths: list[Annotated[float, Field(gt=0, le=1e100)]] = _told(
        "Of each sample of the round, in the same order from every worker.", min_length=1
    )


class Waiting(BaseModel):
    """No part yet: ask again."""

    waiting: str = _told("What for, in a sentence.")
    round: int | None = _told("Whose samples' lengths are wanted, in a job with a cost.", None)


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
    round: int | None = _told("Of its newest report.")
    samples: int | None
    seconds: float | None


class JobState(BaseModel):
    """One job."""

    name: str
    settings: Settings
    rounds: int = _told("Closed ones.")
    reports: int
    samples: int
    dropped: int = _told("Workers dropped for their silence.")
    present: int
    waiting: str
    deadline: float = _told("Seconds of silence after which a worker is dropped now.")
    record: str = _told("The run directory, or why there is none.")
    workers: list[WorkerState]


class Jobs(BaseModel):
    """All jobs, by name."""

    jobs: list[str]
    set_aside: dict[str, str] = _told("Jobs that cannot go on, and why.")
    storing: str = _told("Why nothing can be stored just now; empty if it can.")


class Error(BaseModel):
    """What was wrong, in a sentence."""

    error: str


# What pydantic says in words of its own, by the kind of mistake.
EXPECTED = {
    "missing": "it is missing",
    "extra_forbidden": "it is unknown; leave it out",
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt:,.16g}",
    "greater_than_equal": "expected {ge:,.16g} or more",
    "less_than_equal": "expected at most {le:,.16g}",
    "string_unicode": "expected text in UTF-8",
}


def mistake(error: Any, given: bool = False) -> str:
    """What is wrong, in a sentence. error: one of pydantic's ``errors()``. given: repeat what was given."""
    said = error.get("ctx", {}).get("error")
    if isinstance(said, PacelineError):
        return str(said)
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    where = (".".join(parts) or "the body") + (f"={error['input']}" if given else "")
    if (told := EXPECTED.get(error["type"])) is not None:
        return f"{where}: {told.format_map(error.get('ctx', {}))}"
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}"
