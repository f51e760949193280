"""The timing models of a scenario: the seconds that workers take, round after round.

A model is a frozen set of parameters: numbers for one class of workers, or arrays (..., n) for all workers.
``stream`` yields one array of seconds per round, without end (a trace's stream ends with the trace), and keeps
only one round in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Annotated, Any, Protocol, get_type_hints

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from paceline import costs
from paceline.errors import PacelineError
from paceline.rounds import Array

Numbers = float | Array
MANY = float(np.finfo(float).max)
# The range of the models' fields: from, to, and in words.
Seconds = Annotated[Numbers, costs.LEAST, costs.MOST, f"{costs.SPAN} seconds"]
SecondsOrNone = Annotated[Numbers, 0.0, costs.MOST, f"{costs.SPAN_0} seconds"]
Chance = Annotated[Numbers, 0.0, 1.0, "a probability"]
Spread = Annotated[Numbers, 0.0, MANY, "0 or more"]
Positive = Annotated[Numbers, float(np.nextafter(0, 1)), MANY, "more than 0"]


class TimingModel(Protocol):
    """A source of the seconds of all workers, round after round."""

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        """Yield one array of ``shape`` (..., n) per round; NaN if a worker is absent."""
        ...


_hints: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))


class Checked:
    """Checks that numbers are in the range of their field's annotation (from, to, and in words).

    None is allowed if the field allows it. Raises PacelineError for the first number out of range, NaN included."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            if (span := getattr(hint, "__metadata__", None)) and (value := getattr(self, name)) is not None:
                numbers = np.asarray(value)
                self._require(name, (numbers >= span[0]) & (numbers <= span[1]), span[2])

    def _require(self, name: str, holds: Any, expected: str) -> None:
        if not np.all(holds):
            value = np.broadcast_to(getattr(self, name), np.shape(holds))[~holds].ravel()[0]
            kind = next((f"timing model {key}: " for key, each in MODELS.items() if each is type(self)), "")
            raise PacelineError(f"{kind}{name}={value:g}: expected {expected}")


@dataclass(frozen=True)
class Constant(Checked):
    """The same seconds in every round."""

    seconds: SecondsOrNone

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        return repeat(np.broadcast_to(np.asarray(self.seconds, float), shape))


@dataclass(frozen=True)
class Ar1(Checked):
    """Slow drift: an autoregression of order 1 of the logarithm, in its stationary state from the start.

    mean: the median, around which it drifts. rho: correlation of one round with the next.
    sd: standard deviation of the logarithm, which is about the relative spread over time.
    """

    mean: Seconds
    rho: Annotated[Numbers, -1 + 1e-16, 1 - 1e-16, "a number between -1 and 1"] = 0.9
    sd: Spread = 0.05

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        rho, mean = np.asarray(self.rho, float), np.asarray(self.mean, float)
        sd = np.asarray(self.sd, float)
        step = sd * np.sqrt(1 - rho**2)
        log = sd * rng.standard_normal(shape)
        while True:
            yield mean * np.exp(log)
            log *= rho
            log += step * rng.standard_normal(shape)


@dataclass(frozen=True)
class OnOff(Checked):
    """Competing load that comes and goes (a Markov chain of two states).

    seconds: without the load. factor: with it, this many times as long.
    on, off: probability that the load starts, and that it ends, between two rounds.
    """

    seconds: Seconds
    factor: Positive
    on: Chance = 0.05
    off: Chance = 0.05

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        on, off = np.asarray(self.on, float), np.asarray(self.off, float)
        both = on + off
        loaded = rng.random(shape) < on / np.where(both > 0, both, 1.0)
        while True:
            yield self.seconds * np.where(loaded, self.factor, 1.0)
            loaded = rng.random(shape) < np.where(loaded, 1 - off, on)


@dataclass(frozen=True)
class Exponential(Checked):
    """Exponentially distributed, drawn independently in each round.

    mean: the mean beyond the shift. shift: the least seconds.
    """

    mean: Seconds
    shift: SecondsOrNone = 0.0

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        while True:
            yield self.shift + self.mean * rng.standard_exponential(shape)


@dataclass(frozen=True)
class Uniform(Checked):
    """Uniformly distributed between ``low`` and ``high``, drawn independently in each round."""

    low: SecondsOrNone
    high: SecondsOrNone

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("high", np.greater_equal(self.high, self.low), "no less than low")

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        spread = np.subtract(self.high, self.low)
        while True:
            yield self.low + spread * rng.random(shape)


@dataclass(frozen=True)
class Pareto(Checked):
    """Heavy-tailed, drawn independently in each round: sometimes very long.

    least: the least seconds. shape: the smaller, the heavier the tail; the mean is infinite at 1 and below.
    """

    least: Seconds
    shape: Positive = 2.0

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        while True:
            yield self.least * (1.0 - rng.random(shape)) ** np.divide(-1.0, self.shape)


@dataclass(frozen=True)
class Lognormal(Checked):
    """Lognormally distributed, drawn independently in each round, and sometimes much longer.

    median: the median seconds. sd: standard deviation of the logarithm.
    tail: probability of a straggling round, which takes ``factor`` times as long.
    """

    median: Seconds
    sd: Spread = 0.4
    tail: Chance = 0.0
    factor: Positive = 3.0

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        while True:
            usual = self.median * np.exp(self.sd * rng.standard_normal(shape))
            yield usual * np.where(rng.random(shape) < self.tail, self.factor, 1.0)


@dataclass(frozen=True, eq=False)
class Replay:
    """Recorded seconds, played once.

    table: shape (T, n), NaN if a worker was absent.
    """

    table: Array

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        return (np.broadcast_to(row, shape) for row in self.table)


KINDS = (Constant, Ar1, OnOff, Exponential, Uniform, Pareto, Lognormal)
MODELS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in KINDS}


@dataclass(frozen=True, eq=False)
class Mixture:
    """Different models for different workers.

    parts: pairs of a model of all workers and a mask of the workers that use it, bool (..., n).
    """

    parts: tuple[tuple[TimingModel, NDArray[np.bool_]], ...]

    def stream(self, shape: tuple[int, ...], rng: Generator) -> Iterator[Array]:
        children = rng.spawn(len(self.parts))
        streams = [model.stream(shape, child) for (model, _), child in zip(self.parts, children, strict=True)]
        masks = [mask for _, mask in self.parts]
        for drawn in zip(*streams, strict=False):
            yield np.select(masks, list(drawn))


def assemble(models: Sequence[TimingModel], of: NDArray[np.int64]) -> TimingModel:
    """One model of all workers, from one model per class.

    of: each worker's class, shape (..., n). A class's Replay must have a column for each of its workers, in the
    order of their ranks.
    """
    kinds = list(dict.fromkeys(type(model) for model in models))
    parts: list[tuple[TimingModel, NDArray[np.bool_]]] = []
    for kind in kinds:
        here = [i for i, model in enumerate(models) if type(model) is kind]
        mask = np.isin(of, here)
        if kind is Replay:
            tables: list[Array] = [models[i].table for i in here]  # type: ignore[attr-defined]
            table = np.full((min(map(len, tables)), of.shape[-1]), np.nan)
            for index, each in zip(here, tables, strict=True):
                table[:, of == index] = each[: len(table)]
            parts.append((Replay(table), mask))
            continue
        typical = models[here[0]]
        values = {
            field.name: np.array(
                [getattr(m if type(m) is kind else typical, field.name) for m in models], float
            )[of]
            for field in dataclasses.fields(kind)  # type: ignore[arg-type]  # all models are dataclasses
        }
        parts.append((kind(**values), mask))
    return parts[0][0] if len(parts) == 1 else Mixture(tuple(parts))
