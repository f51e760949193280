"""What a job is: the policy, the batch, who may take part and how long the silent are waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from paceline import policies
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.rounds import Cluster
from paceline.samples import CostLearner, SampleCosts

MOST_WORKERS = 10_000
MOST_BATCH = 2**31 - 1
MOST_AHEAD = 8
COSTS = (None, "sum", "padded")
Limits = tuple[tuple[int | None, int | None], ...]


@dataclass(frozen=True)
class Settings:
    """A job's settings, fixed for its life.

    batch: B, samples of a round over all workers. workers: places, the most that take part at once.
    policy, forecast: as ``paceline.policies`` and ``paceline.forecast`` name them.
    start: how many must have joined before the first round; all places where not given.
    limits: (least, most) samples of each place. quantum: loads are multiples of this.
    cost: how a worker's samples add up where they cost differently, so that each round's lengths are asked for:
        "sum", or "padded", where a micro-batch costs its size times its longest sample. None: all cost the same.
    ahead: rounds that may be open when another is handed out: 0 waits for everybody's report (the blocking way
        of LB-BSP's CPU clusters), 1 hands out the newest plan at once (its GPU clusters).
    give_up, floor: a silent worker is dropped after ``give_up`` times the longest of the recent turnarounds
        and ``floor`` seconds more; first: after so many seconds while nothing has been measured.

    Raises PacelineError for whatever is unknown, out of range or does not fit together.
    """

    batch: int
    workers: int
    _: KW_ONLY
    policy: str = "level"
    forecast: str | None = None
    start: int | None = None
    limits: Limits | None = None
    quantum: int = 1
    ahead: int = 0
    give_up: float = 4.0
    floor: float = 10.0
    first: float = 300.0
    cost: str | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("workers", self.workers, 1, MOST_WORKERS),
            ("batch", self.batch, 1, MOST_BATCH),
            ("start", self.to_start, 1, self.workers),
            ("ahead", self.ahead, 0, MOST_AHEAD),
            ("give_up", self.give_up, 1.0, 1e3),
            ("floor", self.floor, 0.0, 1e5),
            ("first", self.first, 1e-3, 1e6),
        ):
            if not low <= value <= high:
                given, least, most = (
                    f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (value, low, high)
                )
                raise PacelineError(f"{name}={given}: expected {least} to {most}")
        if self.cost not in COSTS:
            raise PacelineError(
                f"cost={self.cost!r}: expected 'sum' or 'padded', or nothing where all cost the same"
            )
        if self.cost is not None and self.quantum > 1:
            raise PacelineError(
                f"quantum={self.quantum} counts samples, and cost={self.cost!r} divides by cost; leave one out"
            )
        if self.limits is not None:
            if len(self.limits) != self.workers:
                raise PacelineError(
                    f"limits for {len(self.limits)} of {self.workers} workers: expected one pair each"
                )
            object.__setattr__(self, "limits", tuple((low, high) for low, high in self.limits))
        self.balancer()

    @property
    def to_start(self) -> int:
        """How many must have joined before the first round."""
        return self.workers if self.start is None else self.start

    @property
    def asked_policy(self) -> str:
        """The policy's text with the forecast in it."""
        if self.forecast is None:
            return self.policy
        joint = "," if ":" in self.policy else ":"
        return f"{self.policy}{joint}forecast={self.forecast.replace(',', ';')}"

    def balancer(self) -> Balancer:
        """A balancer at its first round."""
        pairs = self.limits or ((None, None),) * self.workers
        least = np.array([float(low or 0) for low, _ in pairs])
        most = np.array([float(self.batch if high is None else high) for _, high in pairs])
        cluster = Cluster(self.workers, self.batch, least, most)
        balancer = Balancer(policies.create(self.asked_policy, cluster), quantum=self.quantum)
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """What ``to_dict`` gave. Raises PacelineError where it is anything else."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise PacelineError(
                f"its settings are a {type(values).__name__}: expected {len(fields)} settings by name"
            )
        if "cost" not in values:
            values = dict(values, cost=None)  # services of earlier versions did not ask for it
        for word, names in (("unknown", values.keys() - fields), ("missing", fields - values.keys())):
            if names:
                raise PacelineError(
                    f"its settings are not this version's ({word}: {', '.join(sorted(names))})"
                )
        try:
            limits = values["limits"]
            return cls(**values | {"limits": None if limits is None else tuple((a, b) for a, b in limits)})
        except (TypeError, ValueError, AttributeError) as error:
            raise PacelineError(f"its settings cannot be used: {error}") from error
