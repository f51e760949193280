"""How well is each worker's next speed forecast, what does that do to the time per round, and what does it cost?

    python benchmarks/forecasts.py [--quick]

Error and time are taken from round 500 on (learned forecasts start there). "time" is seconds per round with loads
in proportion to the forecast, over those of the equal split (BSP): LB-BSP's Table 3. "oracle" is the same over
loads in proportion to the true speeds. "noise-free" knows the speed but for noise and spikes that nothing
announces: no forecast has a smaller error. The recorded series is real; the Google series has real machines' load
under an assumed contention model (semi-synthetic); the bursty series are synthetic.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from scaffold import command_line, progress

from paceline import forecast
from paceline.balancer import thread_aside
from paceline.forecast import Reading
from paceline.forecast.series import Rating, Series, bursty, google2011, rate, recorded, walk
from paceline.papers import data_folder
from paceline.papers.lbbsp import PRINTED

METHODS = [
    "last",
    "ema",
    "ema:of=seconds",
    "arima",
    "recurrent",
    "recurrent:cell=lstm",
    "narx",
    "narx:fallback=no",
    "narx:inputs=8",
    "narx:pooled=no",
    "narx:inputs=8,pooled=no",
    "narx:pooled=no,fallback=no",
    "ratio",
    "tracking",
]


def stack(made: list[Series]) -> Series:
    """Realizations side by side: arrays of shape (rounds, realizations, n)."""
    columns: list[Any] = [None if x[0] is None else np.stack(x, axis=1) for x in zip(*made, strict=True)]
    return Series(*columns)


def scenarios(quick: bool) -> dict[str, Series]:
    folder, draws = data_folder(), 1 if quick else 3
    made: dict[str, Series] = {}
    if (folder / "traces").is_dir():
        made["recorded: 2 workers on one shared machine; readings of the round before"] = recorded(folder)
        made["recorded, with the round's own readings (nobody has them in time)"] = recorded(
            folder, same_step=True
        )
        hold, parts = (4, 1) if quick else (10, 1)
        load = [google2011(folder, np.random.default_rng(k), hold=hold) for k in range(parts)]
        made[f"Google 2011, semi-synthetic: 32 machines, samples held for {hold} rounds, {parts} draws"] = (
            stack(load)
        )
    else:
        print(f"no traces in {folder}: set PACELINE_DATA; the synthetic series alone\n")
    for label, stay in (("fast", 40), ("slow", 200)):
        made[f"bursty, synthetic, {label}: 9 workers, regimes of {stay} rounds, {draws} draws"] = stack(
            [
                bursty(np.random.default_rng([stay, k]), rounds=1000 if quick else 2000, stay=stay)
                for k in range(draws)
            ]
        )
    return made


def accuracy(quick: bool) -> None:
    for label, series in scenarios(quick).items():
        print(label)
        print(
            f"  {'forecast':28}{'RMSE':>9}{'/ema':>7}{'time':>8}{'oracle':>8}     paper: RMSE   /ema   time"
        )
        found: dict[str, Rating] = {
            m: rate(walk(forecast.create(m), *series[:3]), series.speed)
            for m in progress(METHODS, "forecasts")
        }
        if series.expected is not None:
            found["(noise-free speed)"] = rate(series.expected, series.speed)
        for method, rating in found.items():
            line = f"  {method:28}{rating.rmse:9.2f}{rating.rmse / found['ema'].rmse:7.2f}"
            line += f"{rating.time:8.3f}{rating.over_oracle:8.3f}"
            if method in PRINTED:
                error, seconds = PRINTED[method]
                line += f"{error:16.2f}{error / PRINTED['ema'][0]:7.2f}{seconds:7.3f}"
            print(line)
        best = min(METHODS, key=lambda m: found[m].time)
        print(
            f"  least time: {best}, {100 * (1 - found[best].time / found['ema'].time):.1f} % less than ema\n"
        )


def cost(workers: int, rounds: int) -> None:
    series = bursty(np.random.default_rng(0), rounds=rounds, workers=workers)
    print(f"{workers} workers: milliseconds of processor time a round, from round 150 on")
    print(f"  {'forecast':40}{'median':>9}{'mean':>9}{'99 %':>9}{'worst':>9}")
    for method in METHODS:
        made = forecast.create(method)
        state, spent = made.init((workers,)), []
        for k in progress(range(1, rounds), f"{method}, rounds"):
            reading = Reading(series.speed[k - 1], series.cpu[k], series.memory[k])
            start = time.thread_time()
            _, state = made.step(state, reading)
            predicted = time.thread_time()
            state = made.train(state)
            spent.append([1e3 * (predicted - start), 1e3 * (time.thread_time() - predicted)])
        for what, late in zip(("", " (training)"), np.array(spent[150:]).T, strict=True):
            if not what or made.trains:
                row = (np.median(late), late.mean(), np.quantile(late, 0.99), late.max())
                print(f"  {method + what:40}" + "".join(f"{x:9.2f}" for x in row))
    print()


def beside(workers: int, rounds: int) -> None:
    """A training step of 20 ms of matrix products, alone and with NARX beside it, in turns."""
    series = bursty(np.random.default_rng(0), rounds=rounds + 200, workers=workers)
    a = np.random.default_rng(0).normal(size=(512, 512))
    repeats = 1
    while True:
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        if time.perf_counter() - start > 0.02:
            break
        repeats += 1

    def step() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            a @ a
        return time.perf_counter() - start

    alone, inline, behind, handed = [], [], [], []
    made, aside = forecast.create("narx"), thread_aside()
    state = made.init((workers,))
    for k in progress(range(1, rounds + 200), "rounds with NARX"):
        reading = Reading(series.speed[k - 1], series.cpu[k], series.memory[k])
        start = time.perf_counter()
        _, predicted = made.step(state, reading)
        training = aside.submit(made.train, predicted)
        handed.append(time.perf_counter() - start)
        behind.append(step() + handed[-1])
        training.result()  # let it finish, so that the next steps run alone
        alone.append(step())
        start = time.perf_counter()
        _, state = made.step(state, reading)
        state = made.train(state)
        inline.append(time.perf_counter() - start + step())
    base = np.median(alone[200:])
    print(
        f"a training step of {1e3 * base:.1f} ms with NARX of {workers} workers: medians of {rounds} rounds in turns"
    )
    for label, spent in (("in the step", inline), ("trained aside", behind)):
        print(f"  {label:20}{np.median(spent[200:]) / base:8.3f} x the step alone")
    print(
        f"  predicting, handing over{1e3 * np.median(handed[200:]):8.3f} ms; threads alive: "
        f"{threading.active_count()}"
    )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer draws and rounds")
    quick = parser.parse_args().quick
    accuracy(quick)
    cost(1000, 250 if quick else 600)
    beside(1000, 50 if quick else 200)
