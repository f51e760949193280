"""A scenario to simulate: a cluster, how its workers' times vary, events, and the number of rounds.

It is usually read from a TOML file (``toml.read``), which has the same fields as the classes below.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from paceline import costs, files
from paceline.data.traces import Trace
from paceline.errors import PacelineError, among, saying
from paceline.rounds import Array, Cluster, Machines
from paceline.samples import SampleCosts
from paceline.simulate.timing import Checked, Constant, Replay, TimingModel

SAMPLES = 10**9  # most samples of a round
SIZES = 1e15  # the largest size of a machine or of a link, in any unit; the least is 1 over it
SPREAD = 1e3  # the largest standard deviation of a logarithm: beyond it, values do not fit into a float
ROUNDS = 10**8  # most rounds times realizations: 8 bytes each per policy
CELLS = 10**7  # most workers times realizations: the size of a round's arrays
SHARES = 10**8  # most rounds times workers: 24 bytes each per policy
LENGTH = 1e12  # the largest length of a sample


# The ranges of fields of several classes, as in ``timing``.
Rounds = Annotated[int, 1, ROUNDS, f"1 to {ROUNDS:,}"]
Size = Annotated[float, 1 / SIZES, SIZES, f"{1 / SIZES:g} to {SIZES:g}"]

PIECE_SECONDS = 1e-3  # about the seconds that a piece takes beyond its samples in the torch engine
LOGNORMAL, UNIFORM = DISTRIBUTIONS = ("lognormal", "uniform")
LEAVE, DIE, FREEZE, JOIN = KINDS = ("leave", "die", "freeze", "join")


@dataclass(frozen=True)
class BandwidthChange(Checked):
    """A change of a link's bandwidth.

    round: the first round with it, counted from 1. mbps: megabits per second.
    """

    round: Rounds
    mbps: Size


@dataclass(frozen=True)
class Link(Checked):
    """A worker's own link, whose time is added to its overhead.

    Attributes:
        megabytes: Moved in each round, both ways together.
        mbps: Megabits per second at the start.
        changes: Other bandwidths from given rounds on.
    """

    megabytes: Annotated[float, 0, SIZES, f"0 to {SIZES:g}"]
    mbps: Size
    changes: tuple[BandwidthChange, ...] = ()

    def seconds(self, index: int) -> float:
        """Seconds of the transfer in one round.

        Args:
            index: The round, from 0.

        Returns:
            Seconds.
        """
        changes = sorted(self.changes, key=lambda change: change.round)
        mbps = [self.mbps, *(change.mbps for change in changes if change.round <= index + 1)]
        return 8 * self.megabytes / mbps[-1]


@dataclass(frozen=True)
class WorkerClass(Checked):
    """Workers of one kind.

    Attributes:
        seconds_per_sample: Their pace: a number, or a table with the name of a timing model.
        overhead: Seconds per round that do not grow with the load, in the same form.
        name: Their name in reports.
        count: Number of workers.
        weight: If workers are drawn at random (the scenario's ``draw``), the relative frequency of this class.
        noise: Additional random variation of the pace in each round: standard deviation of its logarithm.
        knee: Samples below which a round takes as long as with that many (a GPU's saturation, x^s).
        least: Whole samples that each must and can take in a round; above ``most`` (x^o) memory is exceeded.
        most: Whole samples that each must and can take in a round; above ``most`` (x^o) memory is exceeded.
        link: A link with its own bandwidth.
        cpus: Sizes of the machine, for policies that start from them (WLBS).
        cores: Sizes of the machine, for policies that start from them (WLBS).
        memory: Sizes of the machine, for policies that start from them (WLBS).
    """

    seconds_per_sample: TimingModel
    overhead: TimingModel = field(default_factory=lambda: Constant(0.0))
    name: str = "worker"
    _: KW_ONLY
    count: Annotated[int, 1, CELLS, f"1 to {CELLS:,}"] = 1
    weight: Size = 1.0
    noise: Annotated[float, 0, SPREAD, f"0 to {SPREAD:g}"] = 0.0
    knee: Annotated[float, 0, SAMPLES, f"0 to {SAMPLES:,}"] = 0.0
    least: Annotated[int, 0, SAMPLES, f"0 to {SAMPLES:,}"] = 0
    most: int | None = None
    link: Link | None = None
    cpus: Size = 1.0
    cores: Size = 1.0
    memory: Size = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        source = self.seconds_per_sample
        if isinstance(source, Constant) and (wrong := costs.outside(source.seconds)).any():
            worst = np.asarray(source.seconds, float)[wrong].ravel()[0]
            raise PacelineError(f"seconds_per_sample={worst:g}: expected {costs.SPAN} seconds")
        for name in ("seconds_per_sample", "overhead"):
            source = getattr(self, name)
            if isinstance(source, Replay) and source.table.shape[1] != self.count:
                raise PacelineError(
                    f"count={self.count}: the trace for {name} has {source.table.shape[1]} workers; expected the "
                    "same number (choose some with its field workers)"
                )
        if self.most is not None and not max(self.least, self.knee) <= self.most:
            raise PacelineError(
                f"most={self.most}: expected no fewer samples than least={self.least} and knee={self.knee:g}"
            )


@dataclass(frozen=True)
class Event(Checked):
    """A change of one worker's membership at the start of a round.

    Args:
        round: The round at whose start it happens, from 1.
        worker: The worker's rank, from 0, in the order of the classes.
        kind: "leave" is known before the round is divided; "die" is not: the others wait ``give_up_seconds`` for the
            worker, and its samples of that round are lost; "freeze" is the same, but the worker returns after
            ``rounds`` rounds; "join" adds a worker that was absent before.
        rounds: Number of rounds that a freeze lasts.
    """

    round: Rounds
    worker: Annotated[int, 0, CELLS, f"0 to {CELLS:,}"]
    kind: str
    rounds: Rounds = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise PacelineError(f"kind={self.kind!r}: expected one of {among(self.kind, KINDS)}")


@dataclass(frozen=True)
class Samples(Checked):
    """Samples of different lengths; a worker's ``seconds_per_sample`` is then that of a mean sample.

    distribution: "lognormal", with the logarithm's mean ``mu`` and standard deviation ``sigma``, or "uniform".
    least, most: lengths are whole numbers clipped to these. file: a text file with a length on each line instead.
    alpha: a sample of length L costs in proportion to L + alpha L^2; policies do not know alpha.
    padded: a micro-batch costs its size times its longest sample. launch: the cost of a micro-batch beyond that, in
    mean samples. micro_batch, micro_batch_cost: most samples of a micro-batch, and most length (padded if so).
    """

    distribution: str = LOGNORMAL
    _: KW_ONLY
    mu: Annotated[float, -25, 25, "-25 to 25"] = 5.0
    sigma: Annotated[float, 0, 10, "0 to 10"] = 1.0
    least: float = 1.0
    most: float = 1e6
    file: Path | None = None
    alpha: Annotated[float, 0, 1e6, "0 to 1e+06"] = 0.0
    padded: bool = False
    launch: Annotated[float, 0, 1e6, "0 to 1e+06"] = 0.0
    micro_batch: Annotated[int | None, 1, SAMPLES, f"1 to {SAMPLES:,}"] = None
    micro_batch_cost: Annotated[float | None, 5e-324, math.inf, "a positive length"] = None
    micro_steps: Annotated[int | None, 1, SAMPLES, f"1 to {SAMPLES:,}"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in DISTRIBUTIONS:
            raise PacelineError(
                f"distribution={self.distribution!r}: expected one of {', '.join(DISTRIBUTIONS)}, or a file"
            )
        if not 0 < self.least <= self.most <= LENGTH:
            raise PacelineError(
                f"least={self.least:g}, most={self.most:g}: expected 0 < least <= most <= {LENGTH:g}"
            )

    def costs(self, samples: int, rng: Generator) -> SampleCosts:
        """The lengths of the data set: those of the file, or ``samples`` drawn ones."""
        if self.file is not None:
            with saying(f"cannot read the lengths {self.file}"):
                written = files.read(self.file)
            try:
                lines = written.decode().splitlines()
                if not any(line.partition("#")[0].strip() for line in lines):
                    raise ValueError("it is empty")
                lengths = np.loadtxt(lines, ndmin=1)
            except ValueError as error:
                raise PacelineError(
                    f"{self.file} holds no lengths: {error}; expected a number on each line"
                ) from None
            return SampleCosts.checked(lengths, len(lengths), str(self.file))
        if self.distribution == UNIFORM:
            drawn = rng.uniform(self.least, self.most, samples)
        else:
            drawn = rng.lognormal(self.mu, self.sigma, samples)
        return SampleCosts.checked(np.clip(np.rint(drawn), self.least, self.most), samples)


@dataclass(frozen=True)
class Scenario(Checked):
    """A simulation of bulk-synchronous rounds.

    Args:
        workers: The classes of workers.
        global_batch: B, samples in each round.
        rounds: Number of rounds.
        realizations: Number of repetitions with other random draws.
        seed: Seed of all draws.
        draw: Number of workers, each of a class drawn at random for each realization; 0 takes each class's count.
        fractional: Divide the batch into fractions of samples instead of whole samples.
        decision_delay: Rounds by which a plan takes effect later than in the next round.
        known_overhead: Whether workers know their overhead (they time their communication); otherwise it is fitted
            from seconds and loads, as in real training.
        give_up_seconds: How long the others wait for a worker that stopped without notice.
        piece_seconds: Seconds of a piece beyond its samples, for policies that run a round in pieces; the policies
            have to estimate it.
        batches: Samples of each round, if they differ (an epoch's last is often smaller); each at most
            ``global_batch``.
        events: Workers that leave, die, freeze or join.
        samples: The samples' costs, if they differ.
        policies: Policies to simulate if none are named.
        name: For titles.

    Raises:
        PacelineError: For a value out of range, and parts that exclude each other.
    """

    workers: tuple[WorkerClass, ...]
    _: KW_ONLY
    global_batch: Annotated[int, 1, SAMPLES, f"1 to {SAMPLES:,}"] = 256
    rounds: Rounds = 100
    realizations: Rounds = 1
    seed: Annotated[int, 0, math.inf, "0 or more"] = 0
    draw: Annotated[int, 0, CELLS, f"0 to {CELLS:,}"] = 0
    fractional: bool = False
    decision_delay: Annotated[int, 0, ROUNDS, f"0 to {ROUNDS:,}"] = 0
    known_overhead: bool = True
    give_up_seconds: Annotated[float, 0, costs.MOST, f"{costs.SPAN_0} seconds"] = 10.0
    piece_seconds: Annotated[float, costs.LEAST, costs.MOST, f"{costs.SPAN} seconds"] = PIECE_SECONDS
    batches: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    samples: Samples | None = None
    policies: tuple[str, ...] = ()
    name: str = "scenario"

    def __post_init__(self) -> None:
        if not self.workers:
            raise PacelineError("no workers: expected at least one [[workers]] table")
        super().__post_init__()
        for what, cells, most in (
            ("rounds of realizations", self.rounds * self.realizations, ROUNDS),
            ("workers of realizations", self.size * self.realizations, CELLS),
            ("rounds of workers", self.rounds * self.size, SHARES),
        ):
            if cells > most:
                raise PacelineError(
                    f"rounds={self.rounds:,}, realizations={self.realizations:,} and {self.size:,} workers: "
                    f"{cells:,} {what} together, which would need too much memory; expected at most {most:,}"
                )
        if self.draw:
            for each in self.workers:
                if each.least or each.most is not None or isinstance(each.seconds_per_sample, Replay):
                    raise PacelineError(
                        f"workers {each.name!r}: least, most and traces belong to certain workers, but "
                        f"draw={self.draw} takes the workers at random; give counts instead"
                    )
        for each in self.workers:
            for source in (each.seconds_per_sample, each.overhead):
                if isinstance(source, Replay) and len(source.table) < self.rounds:
                    raise PacelineError(
                        f"rounds={self.rounds}: the trace has {len(source.table)}; expected at most as many"
                    )
        if self.batches and len(self.batches) < self.rounds:
            raise PacelineError(
                f"batches has {len(self.batches)} entries for {self.rounds} rounds; expected one for each"
            )
        for size in self.batches:
            if not 1 <= size <= self.global_batch:
                raise PacelineError(
                    f"batches has the entry {size}; expected 1 to the global batch, {self.global_batch}"
                )
        for event in self.events:
            if event.worker >= self.size:
                raise PacelineError(
                    f"event in round {event.round}: there is no worker {event.worker}; expected 0 to "
                    f"{self.size - 1}"
                )
        self.cluster()  # raises now if the limits cannot hold the batch
        for index in sorted({event.round - 1 for event in self.events if event.round <= self.rounds}):
            here, stopped = self.members(index)
            if not (here & ~stopped).any():
                raise PacelineError(
                    f"round {index + 1}: no worker is left; leave at least one in every round"
                )

    def batch(self, index: int) -> int:
        """Samples in one round.

        Args:
            index: The round, from 0.

        Returns:
            Samples.
        """
        return self.batches[index] if self.batches else self.global_batch

    @property
    def size(self) -> int:
        """Number of workers, n."""
        return self.draw or sum(each.count for each in self.workers)

    def cluster(self) -> Cluster:
        """The workers and their limits, for the policies.

        Returns:
            A cluster with the scenario's realizations.
        """
        if self.draw:
            return Cluster(self.draw, self.global_batch, realizations=(self.realizations,))
        counts = [each.count for each in self.workers]

        def of(name: str, otherwise: float = 0.0) -> Array:
            values = [getattr(each, name) for each in self.workers]
            return np.repeat([otherwise if value is None else float(value) for value in values], counts)

        machines = Machines(of("cpus"), of("cores"), of("memory"))
        uniform = len({(each.cpus, each.cores, each.memory) for each in self.workers}) == 1
        return Cluster(
            self.size,
            self.global_batch,
            of("least"),
            of("most", self.global_batch),
            None if uniform else machines,
            (self.realizations,),
        )

    def classes(self) -> NDArray[np.int64]:
        """Each worker's class, an index into ``workers``.

        Returns:
            Shape (n,), or (R, n) if classes are drawn.
        """
        if not self.draw:
            return np.repeat(np.arange(len(self.workers)), [each.count for each in self.workers])
        weights = np.array([each.weight for each in self.workers])
        rng = np.random.default_rng(self.seed).spawn(1)[0]
        return rng.choice(len(weights), (self.realizations, self.draw), p=weights / weights.sum())

    def members(self, index: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """The membership in one round.

        Args:
            index: The round, from 0.

        Returns:
            Masks of the workers in the round, and of those that stop without notice, each of shape (n,).
        """
        here = np.ones(self.size, bool)
        stopped = np.zeros(self.size, bool)
        known: set[int] = set()  # workers with an earlier event
        for event in sorted(self.events, key=lambda event: event.round):
            begins = event.round - 1
            if event.kind == JOIN:
                if begins <= index or event.worker not in known:
                    here[event.worker] = begins <= index
            elif begins <= index:
                back = event.kind == FREEZE and index >= begins + event.rounds
                sudden = event.kind in (DIE, FREEZE) and index == begins
                here[event.worker] = back or sudden
                stopped[event.worker] = sudden
            known.add(event.worker)
        return here, stopped


def from_trace(trace: Trace, **fields: object) -> Scenario:
    """The scenario that plays a trace, with all its rounds unless ``rounds`` is given.

    Args:
        trace: Recorded speeds.
        fields: Of ``Scenario``.

    Returns:
        The scenario.

    Raises:
        PacelineError: If the trace has only one worker, or a round without any.
    """
    rounds, workers = trace.seconds_per_sample.shape
    if workers < 2:
        raise PacelineError("the trace has only 1 worker; expected at least 2 to divide a batch between")
    empty = np.isnan(trace.seconds_per_sample).all(-1)
    if empty.any():
        raise PacelineError(
            f"round {int(np.argmax(empty))} of the trace has no worker; leave at least one in every round"
        )
    played = WorkerClass(Replay(trace.seconds_per_sample), Replay(trace.overhead), count=workers)
    return dataclasses.replace(Scenario((played,), rounds=rounds), **fields)  # type: ignore[arg-type]
