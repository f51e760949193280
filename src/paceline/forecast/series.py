"""Series of speed, processor and memory readings to compare forecasts on: recorded, semi-synthetic and synthetic; and
ratings of forecasts: their errors, and the time per round that the errors cost.

Benchmarks, simulations and the reproduction of LB-BSP's Table 3 use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.commands import pip
from paceline.errors import PacelineError
from paceline.forecast.protocol import AnyForecast, Reading, seen
from paceline.rounds import Array


class Series(NamedTuple):
    """The speeds and readings of workers; all of shape (rounds, n).

    speed: samples/s in each round.
    cpu, memory: portion in [0, 1] that the worker can have, as read at the start of each round.
    expected: speed without the unpredictable noise and spikes, the best possible forecast; None if unknown.
    """

    speed: Array
    cpu: Array
    memory: Array
    expected: Array | None = None


def bursty(
    rng: np.random.Generator, rounds: int = 2000, workers: int = 9, stay: float = 40, spikes: float = 0.03
) -> Series:
    """Synthetic: processor shares that hold for a while and then jump; spikes that no reading explains.

    Each worker's share of its processors is uniform in [0.25, 1] and is drawn again after ``stay`` rounds on
    average (geometric), and so is its memory. v = base x share x (1 if at least 0.3 of the memory is free,
    else falling to 0.7) x lognormal noise of 4 %; with probability ``spikes`` a round runs at 0.4 to 0.8 of
    that. The readings have an error of 0.02.
    """
    base = rng.uniform(60, 140, workers)

    def regimes() -> Array:
        values = rng.uniform(0.25, 1.0, (rounds, workers))
        jump = rng.random((rounds, workers)) < 1 / stay
        jump[0] = True
        latest = np.maximum.accumulate(np.where(jump, np.arange(rounds)[:, None], 0), axis=0)
        return np.take_along_axis(values, latest, axis=0)

    return _contend(rng, base, regimes(), regimes(), spikes)


def recorded(folder: Path, same_step: bool = False) -> Series:
    """The recorded series of two workers that trained on one shared machine.

    cpu is 1 less the portion that others kept busy, memory 1 less the used portion. The readings were averaged
    over each step, so by default round k gets that of round k-1, the newest one known when it begins. ``same_step``
    takes round k's own: no real forecast can have it, and it shows what a perfect reading would be worth.
    """
    path = folder / "traces" / "recorded_worker_speed_cpu_mem.csv"
    table = np.genfromtxt(_found(path), delimiter=",", names=True)
    columns = []
    for worker in np.unique(table["worker"]):
        rows = table[table["worker"] == worker]
        rows = rows[np.argsort(rows["iter"])]
        columns.append([rows["speed_samples_s"], 1 - rows["other_busy_frac"], 1 - rows["mem_used_frac"]])
    length = min(len(c[0]) for c in columns)
    speed, cpu, memory = (np.stack([c[j][:length] for c in columns], axis=1) for j in range(3))
    if not same_step:
        cpu, memory = (np.concatenate([x[:1], x[:-1]]) for x in (cpu, memory))
    return Series(speed, cpu, memory)


def google2011(folder: Path, rng: np.random.Generator, workers: int = 32, hold: int = 10) -> Series:
    """Semi-synthetic: the load of machines of the Google cluster of 2011 under a stated contention model.

    ``workers`` machines drawn at random, 288 five-minute samples each, every sample held for ``hold``
    rounds. A worker has what the others leave: c = 1 - cpu, m = 1 - memory (at least 0.05 each). Its speed
    is that of ``bursty`` with these c and m, so the contention model, its noise and its spikes are assumed,
    not measured. Sizes are those of LB-BSP, Table 2: of 32 workers one has 4 cores, 29 have 8 (10 of them of a
    faster kind), two have 16.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise PacelineError(
            f"the Google trace is a parquet file, which needs pyarrow; run: {pip()} install pyarrow"
        ) from None
    table = parquet.read_table(_found(folder / "traces" / "google2011_vm_cpu_mem.parquet"))
    machine = np.array(table["vm"].to_pylist())
    order = np.lexsort((table["t"].to_numpy(), machine))
    machines = len(np.unique(machine))
    columns = (table[name].to_numpy().astype(float)[order] for name in ("cpu_pct", "mem_pct"))
    cpu, memory = (each.reshape(machines, -1).T for each in columns)
    chosen = rng.choice(cpu.shape[1], workers, replace=False)
    free = (np.clip(1 - x[:, chosen] / 100, 0.05, 1) for x in (cpu, memory))
    free_cpu, free_memory = (np.repeat(each, hold, axis=0) for each in free)
    sizes = rng.permutation(np.resize([80.0] * 19 + [110.0] * 10 + [160.0] * 2 + [40.0], workers))
    return _contend(rng, sizes, free_cpu, free_memory, spikes=0.03)


def _contend(rng: np.random.Generator, base: Array, cpu: Array, memory: Array, spikes: float) -> Series:
    """A series from the contention model of ``bursty``."""
    swapping = np.interp(memory, [0, 0.3], [0.7, 1.0])
    noise = np.exp(rng.normal(0, 0.04, cpu.shape))
    spike = np.where(rng.random(cpu.shape) < spikes, rng.uniform(0.4, 0.8, cpu.shape), 1.0)
    steady = base * cpu * swapping
    chance = 1 - spikes + spikes * 0.6  # a spike leaves 0.4 to 0.8
    speed = steady * noise * spike

    def read(x: Array) -> Array:
        return np.clip(x + rng.normal(0, 0.02, x.shape), 0.01, 1.0)

    return Series(speed, read(cpu), read(memory), steady * chance)


def _found(path: Path) -> Path:
    if not path.is_file():
        raise PacelineError(f"{path} is missing; set PACELINE_DATA to the folder that holds traces/")
    return path


class Rating(NamedTuple):
    """The columns of LB-BSP's Table 3, and the distance to the best possible; averages over the rounds rated.

    rmse: root mean square error in samples/s, mean over workers.
    time: seconds per round with loads in proportion to the forecast, over those of the equal split (BSP).
    over_oracle: the same seconds over those with loads in proportion to the true speeds; at least 1.
    """

    rmse: float
    time: float
    over_oracle: float


def walk(forecast: AnyForecast, speed: Array, cpu: Array | None = None, memory: Array | None = None) -> Array:
    """The prediction for every round of a series, shape (rounds, ..., n); NaN in round 0, which has no past.

    speed: v^k of each round, shape (rounds, ..., n); cpu, memory: c^k and m^k as read when round k began.
    The prediction for round k is made from speeds up to k-1 and readings up to k.
    """
    predicted = np.full(speed.shape, np.nan)
    state = forecast.init(speed.shape[1:])
    for k in range(1, len(speed)):
        offered = (None if each is None else each[k] for each in (cpu, memory))
        predicted[k], state = forecast.step(state, Reading(speed[k - 1], *offered))
        state = forecast.train(state)
    return predicted


def rmse(predicted: Array, speed: Array) -> Array:
    """Root mean square error of each worker over the leading axis; rounds without either are left out."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.nanmean((predicted - speed) ** 2, axis=0))


def seconds(weights: Array, speed: Array) -> Array:
    """Seconds until the last worker has finished its part of one sample; parts are in proportion to the weights.

    Both of shape (..., n); the result has shape (...). A worker without a speed is absent and gets
    nothing; one without a weight gets the mean weight of the others.
    """
    here = seen(speed)
    known = here & np.isfinite(weights)
    number = np.maximum(known.sum(axis=-1, keepdims=True), 1)
    mean = np.where(known, weights, 0).sum(axis=-1, keepdims=True) / number
    mean = np.where(mean > 0, mean, 1.0)  # the equal split if no weight is known
    weights = np.where(here, np.where(known, weights, mean), 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = weights / weights.sum(axis=-1, keepdims=True)
        return np.where(here, parts / speed, 0).max(axis=-1)


def rate(predicted: Array, speed: Array, skip: int = 500) -> Rating:
    """Rate predictions of shape (rounds, ..., n) without the first ``skip`` rounds, in which forecasts learn."""
    predicted, speed = predicted[skip:], speed[skip:]
    spent = seconds(predicted, speed).mean()
    equal = seconds(np.ones_like(speed), speed).mean()
    oracle = seconds(speed, speed).mean()
    return Rating(float(rmse(predicted, speed).mean()), float(spent / equal), float(spent / oracle))
