"""How closely does `level` follow speeds that rest, scatter, drift, move and spike?

Total seconds over the oracle's, on a virtual clock (1 is the limit; all rounds count, the blind first one too),
for the default and for simpler ways to expect a worker's pace: the last one, moving averages of several gains.
"true" noise is in the speeds themselves, so that only the oracle can know it; "measured" noise is in the reports.

    python benchmarks/following.py [--runs 20]
"""

from __future__ import annotations

import numpy as np
from scaffold import command_line

from paceline import Cluster, Round, policies
from paceline.costs import Linear
from paceline.rounds import Array
from paceline.shares import water_level

WAYS = ("tracking", "last", "ema:gain=0.5;of=seconds", "ema:gain=0.2;of=seconds", "ema:gain=0.05;of=seconds")
CLASSES = np.array([3000, 1700, 1000, 90, 45.0])  # samples/s: V100, P100, T4 and two CPUs (profile A)

Stream = tuple[
    int, Array, Array, Array
]  # batch; slopes, overheads and measured slopes, (rounds, runs, workers)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print(f"{'':34s}" + "".join(f"{way.replace(';of=seconds', ''):>15s}" for way in WAYS))
    for name, stream in streams(runs, np.random.default_rng(0)).items():
        print(f"{name:34s}" + "".join(f"{ratio(way, *stream):15.3f}" for way in WAYS), flush=True)


def ratio(way: str, batch: int, slopes: Array, overheads: Array, measured: Array) -> float:
    rounds, runs, workers = slopes.shape
    policy = policies.create(f"level:forecast={way}", Cluster(workers, batch, realizations=(runs,)))
    plan, state = policy.init()
    total, best = np.zeros(runs), np.zeros(runs)
    for t in range(rounds):
        true, seen = Linear(slopes[t], overheads[t]), Linear(measured[t], overheads[t])
        loads = plan.shares * batch
        total, best = total + true.seconds(loads).max(-1), best + water_level(true, batch).seconds
        plan, state = policy.step(state, Round(plan.shares, seen.seconds(loads), batch, overheads[t]))
    return float(np.mean(total / best))


def streams(runs: int, rng: np.random.Generator) -> dict[str, Stream]:
    out: dict[str, Stream] = {}
    classes = np.broadcast_to(1 / rng.choice(CLASSES, (runs, 30)), (100, runs, 30))
    drift = np.exp(autoregressive(classes.shape, 0.05, rng))
    waits = 0.02 * np.exp(autoregressive(classes.shape, 0.1, rng))
    out["profile A, AR(1) sd .05/.1"] = (256, classes * drift, waits, classes * drift)
    still, noise = np.full(classes.shape, 0.02), np.exp(0.3 * rng.standard_normal(classes.shape))
    out["profile A, measured noise .3"] = (256, classes, still, classes * noise)
    out["profile A, true noise .3"] = (256, classes * noise, still, classes * noise)

    rest = np.broadcast_to(np.array([1, 1, 1, 4]) * 1e-3, (200, runs, 4))
    none = np.zeros(rest.shape)
    moves = np.full(rest.shape, 1e-3)
    for t in range(200):
        moves[t, :, (t // 40) % 4] = 4e-3
    out["1/1/1/4, constant"] = (512, rest, none, rest)
    out["1/1/1/4, role moves each 40"] = (512, moves, none, moves)
    for scatter in (0.03, 0.1, 0.3):
        noise = np.exp(scatter * rng.standard_normal(rest.shape))
        out[f"1/1/1/4, true noise {scatter:g}"] = (512, rest * noise, none, rest * noise)
        out[f"1/1/1/4, role moves, true noise {scatter:g}"] = (512, moves * noise, none, moves * noise)
    out["1/1/1/4, measured noise .3"] = (512, rest, none, rest * noise)
    spikes = np.where(rng.random(rest.shape) < 0.02, 5, 1) * np.exp(0.05 * rng.standard_normal(rest.shape))
    out["1/1/1/4, 2 % spikes of 5x"] = (512, rest * spikes, none, rest * spikes)
    return out


def autoregressive(shape: tuple[int, ...], sd: float, rng: np.random.Generator, rho: float = 0.9) -> Array:
    path = np.empty(shape)
    path[0] = sd * rng.standard_normal(shape[1:])
    for t in range(1, len(path)):
        path[t] = rho * path[t - 1] + sd * np.sqrt(1 - rho**2) * rng.standard_normal(shape[1:])
    return path


if __name__ == "__main__":
    main()
