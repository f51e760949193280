"""The bodies of the API's requests and answers as pydantic models, from which its OpenAPI description is made."""

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


def _field(text: str, default: Any = ..., **limits: Any) -> Any:
    """A field with its description."""
    return Field(default, description=text, **limits)


class Strict(BaseModel):
    """A model that converts no values and refuses unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Settings(Strict):
    """The settings of a job, which do not change: policy, batch, workers, and how long to wait for silent workers."""

    batch: int = _field("Samples of a round, over all workers.", ge=1, le=MOST_BATCH)
    workers: int = _field("Number of places, the most workers at once.", ge=1, le=MOST_WORKERS)
    policy: str = _field("NAME or NAME:key=value,...", "level", max_length=200)
    start: int | None = _field(
        "Workers that the first round waits for; by default all.", None, ge=1, le=MOST_WORKERS
    )
    limits: list[Pair] | None = _field(
        "Least and most samples of each place; null for no limit.", None, max_length=MOST_WORKERS
    )
    quantum: int = _field("Loads are multiples of this number.", 1, ge=1, le=MOST_BATCH)
    ahead: int = _field(
        "Rounds handed out before earlier ones close; 0: a plan waits for all reports.", 0, ge=0, le=8
    )
    give_up: float = _field(
        "A worker may be silent for this many times the longest recent round, plus grace.", 4.0, ge=1, le=1e3
    )
    grace: float = _field(
        "A silent worker is dropped after give_up times the longest recent round plus these seconds.",
        10.0,
        ge=0,
        le=1e5,
    )
    first: float = _field("Seconds of allowed silence until a round is measured.", 300.0, ge=1e-3, le=1e6)
    cost: Literal["sum", "padded"] | None = _field(
        "How a worker's samples add up, if they cost differently; left out if all cost the same.", None
    )

    @model_validator(mode="after")
    def _fits(self) -> Settings:
        """Raise PacelineError for settings that do not fit together."""
        if self.to_start > self.workers:
            raise PacelineError(f"start={self.start}: expected 1 to {self.workers:,}, the number of workers")
        if self.cost is not None and self.quantum > 1:
            raise PacelineError(
                f"quantum={self.quantum} counts samples, and cost={self.cost!r} divides by cost; leave one out"
            )
        if self.limits is not None and len(self.limits) != self.workers:
            raise PacelineError(
                f"limits for {len(self.limits)} of {self.workers} workers: expected one pair per worker"
            )
        self.balancer()
        return self

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Settings from values. Raises PacelineError for values that are unknown, out of range or do not fit."""
        try:
            return cls.model_validate(values, strict=False)
        except ValidationError as error:
            raise PacelineError(mistake(error.errors()[0], given=True)) from error

    @classmethod
    def stored(cls, values: Any) -> Settings:
        """Settings from what ``model_dump`` returned. Raises PacelineError for anything else."""
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
        """Number of workers that must have joined before the first round."""
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
                f"policy {self.policy!r} moves work within a round, which a service cannot do; choose another"
            )
        return balancer

    def learner(self, lengths: Sequence[float]) -> CostLearner:
        """A cost learner for a job whose first round has samples of these lengths. Raises PacelineError."""
        costs = SampleCosts.checked(lengths, self.batch, "lengths")
        return CostLearner(costs, self.workers, self.batch, padded=self.cost == "padded")


class Join(Strict):
    """A request of a worker to join."""

    name: str = _field("The worker's name, unique in the job.", pattern=NAME)
    place: int | None = _field("The place to take; by default any free place.", None, ge=0, lt=MOST_WORKERS)
    secret: str | None = _field(
        "A secret that the worker chose, with which it can repeat the join; by default the service makes one.",
        None,
        pattern=SECRET,
    )


class Joined(BaseModel):
    """The answer to a join. Keep the secret: all further calls need it in the header X-Worker-Secret."""

    name: str = _field("The worker's name.")
    place: int = _field("Its place, counted from 0.")
    secret: str = _field("Its secret: the one that it chose, or a new one.")


class WorkerReport(Strict):
    """A worker's report on a round."""

    round: int = _field("The round's number, as its part had it.", ge=0, le=2**53)
    samples: Count = _field("Samples that the worker ran.")
    seconds: Seconds = _field("Seconds of the worker's own work, without its wait for others.")
    overhead: Seconds = _field("The part of seconds that does not grow with samples.", 0.0)
    cpu: Portion | None = _field("Portion of its machine's processors that is available to it.", None)
    memory: Portion | None = _field("Portion of its machine's memory that is free.", None)


class Lengths(Strict):
    """The lengths of a round's samples."""

    round: int = _field("The round's number.", ge=0, le=2**53)
    lengths: list[Annotated[float, Field(gt=0, le=1e100)]] = _field(
        "The length of each sample of the round, in the same order from every worker.", min_length=1
    )


class Waiting(BaseModel):
    """The worker has no part yet and should ask again."""

    waiting: str = _field("What the worker waits for, in a sentence.")
    round: int | None = _field("The round whose samples' lengths are needed, in a job with a cost.", None)


class Reported(BaseModel):
    """The report is stored. next: the worker's next part, if it was requested and planned within the wait."""

    round: int = _field("The round that was reported.")
    next: Part | None = _field("The next part; null if it was not requested, or is not planned yet.")
    waiting: str = _field("What the requested part waits for, in a sentence; empty if for nothing.")


class WorkerState(BaseModel):
    """The state of one worker."""

    name: str = _field("The worker's name.")
    place: int = _field("Its place, counted from 0.")
    present: bool = _field("Whether it takes part now.")
    gone: str = _field("Why it takes part no more; empty if it does.")
    round: int | None = _field("The round of its newest report.")
    samples: int | None = _field("Samples of that report.")
    seconds: float | None = _field("Seconds of that report.")


class JobState(BaseModel):
    """The state of one job."""

    name: str = _field("The job's name.")
    settings: Settings = _field("Its settings, as it was created.")
    rounds: int = _field("Number of completed rounds.")
    reports: int = _field("Number of reports of all workers.")
    samples: int = _field("Samples reported by all workers.")
    dropped: int = _field("Number of workers dropped because of silence.")
    present: int = _field("Number of workers that take part now.")
    waiting: str = _field("What the job waits for, in a sentence; empty if for nothing.")
    deadline: float = _field("Seconds of silence after which a worker is dropped at present.")
    record: str = _field("The run directory, or why there is none.")
    workers: list[WorkerState] = _field("Its workers, also those that have gone.")


class Jobs(BaseModel):
    """All jobs, by name."""

    jobs: list[str] = _field("The names of the jobs that run.")
    set_aside: dict[str, str] = _field("Jobs that cannot continue, and why.")
    storing: str = _field("Why nothing can be stored at present; empty if storing works.")


class Error(BaseModel):
    """A sentence on what was wrong."""

    error: str = _field("What was given, what was expected, and what to do.")


# The service's words for mistakes that pydantic describes in its own, by their kind.
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
    """A sentence on what is wrong. error: one of pydantic's ``errors()``. given: repeat the given value."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, PacelineError):
        return str(cause)
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    where = (".".join(parts) or "the body") + (f"={error['input']}" if given else "")
    if (expected := EXPECTED.get(error["type"])) is not None:
        return f"{where}: {expected.format_map(error.get('ctx', {}))}"
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}"
