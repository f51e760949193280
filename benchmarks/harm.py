"""Does balancing ever do harm? Rounds of a policy over those of equal shares, and over the best fixed division's.

    python benchmarks/harm.py [--policy level] [--held-out | --further | --last | --unseen]
                              [--seeds 16] [--rounds 300] [--worst 5]

Workers take overhead + seconds per sample * load, times noise that nobody can know: log-normal, and spikes of 1.5 to
4 times. The grid: 3, 6 or 12 workers, 0 to 95 % of the seconds of an equal share independent of the load, a scatter
of 0.1 or 0.3, spikes in none or a tenth of a worker's rounds, all workers equal or one 1.2 or 3 times slower (its
overhead, too, in every other run). Other kinds, and other draws: --held-out and --further, which were looked at when
`auto` was mended, and with --last when `level` was; --unseen, which were played once, when all was chosen. Policies
see whole samples and seconds, as in training, and overheads are fitted. Rounds in pieces are played in pieces, each
of which costs 1 % of an equal round. The first third of the rounds is not counted. All divisions are timed on the
same draws.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from scaffold import command_line, count, policy_name

from paceline import policies
from paceline.costs import Linear
from paceline.forecast import overheads
from paceline.rounds import Array, Cluster, PieceTimes, Round
from paceline.shares import water_level, whole_samples
from paceline.simulate.pieces import play

ROUND = 0.01  # seconds of an equal share
PIECE = 0.01 * ROUND
POLICIES = ("level", "auto", "level:forecast=last", "lbbsp-gpu", "dolbie:tight=true")


class Cases(NamedTuple):
    """All combinations are played."""

    seed: int
    samples: int  # for each worker
    workers: tuple[int, ...]
    flat: tuple[float, ...]
    scatter: tuple[float, ...]
    spikes: tuple[float, ...]
    slow: tuple[float, ...]


GRID = Cases(0, 16, (3, 6, 12), (0.0, 0.2, 0.7, 0.95), (0.1, 0.3), (0.0, 0.1), (1.0, 1.2, 3.0))
OTHERS = {
    "held-out": Cases(11, 20, (2, 4, 8), (0.35, 0.6, 0.8), (0.07, 0.25), (0.0, 0.07), (1.0, 1.3, 2.5)),
    "further": Cases(23, 24, (3, 5, 10), (0.1, 0.5, 0.75, 0.9), (0.05, 0.15), (0.0, 0.05), (1.0, 1.5, 2.0)),
    "last": Cases(
        31, 16, (2, 6, 9), (0.25, 0.45, 0.7, 0.85, 0.95), (0.06, 0.2), (0.0, 0.08), (1.0, 1.15, 1.8)
    ),
    "unseen": Cases(
        47, 20, (3, 4, 7), (0.15, 0.4, 0.65, 0.78, 0.92), (0.08, 0.18), (0.0, 0.06), (1.0, 1.25, 2.2)
    ),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policy", type=policy_name, action="append")
    others = parser.add_mutually_exclusive_group()
    for name, kinds in OTHERS.items():
        others.add_argument(f"--{name}", action="store_const", dest="cases", const=kinds, default=GRID)
    parser.add_argument("--seeds", type=count, default=16)
    parser.add_argument("--rounds", type=count, default=300)
    parser.add_argument("--worst", type=int, default=0, help="so many of the worst cases of each policy")
    options = parser.parse_args()
    cases = options.cases
    heads = ("worst", "over 1.02", "mean", "all equal", "worst", "mean")
    print(f"{'':22}{'over equal shares':>32}{'over the best fixed division':>38}")
    print(f"{'':22}" + "".join(f"{head:>12}" for head in heads))
    for name in options.policy or POLICIES:
        rows = np.array(
            [row for n in cases.workers for row in ratios(name, n, cases, options.seeds, options.rounds)]
        )
        equal, best, slow = rows[:, 0], rows[:, 1], rows[:, -1]
        over = f"{(equal > 1.02).sum()} of {len(rows)}"
        print(
            f"{name:22}{equal.max():12.3f}{over:>12}{equal.mean():12.3f}{equal[slow == 1].mean():12.3f}"
            f"{best.max():12.3f}{best.mean():12.4f}",
            flush=True,
        )
        for row in rows[np.argsort(-equal)][: options.worst]:
            told = (
                "  %.3f over equal, %.3f over the best, sd of a run %.3f: %d workers, flat %g, scatter %g, "
                "spikes %g, slow %g"
            )
            print(told % tuple(row))


def ratios(name: str, workers: int, cases: Cases, seeds: int, rounds: int) -> list[tuple[float, ...]]:
    """(over equal shares, over the best fixed division, standard deviation of the first over the seeds, *case) for
    each case of so many workers."""
    rng = np.random.default_rng((cases.seed, workers))
    combined = list(itertools.product(cases.flat, cases.scatter, cases.spikes, cases.slow))
    flat, scatter, spikes, slow = np.repeat(np.array(combined), seeds, axis=0).T[..., None]
    shape, batch = (len(flat), workers), cases.samples * workers
    factor = np.ones(shape)
    factor[:, :1] = slow
    slope = (1 - flat) * ROUND / cases.samples * factor
    alike = np.arange(len(flat))[:, None] % 2 == 0
    overhead = flat * ROUND * np.where(alike, 1.0, factor)
    cost = Linear(slope, overhead)
    fixed = water_level(cost, batch, np.ones(workers), np.full(workers, batch)).loads
    totals = np.zeros((3, len(flat)))
    played = _Played(name, shape, batch)
    for t in range(rounds):
        noise = np.exp(scatter * rng.standard_normal(shape) - scatter**2 / 2)
        noise *= np.where(rng.random(shape) < spikes, rng.uniform(1.5, 4, shape), 1.0)
        took = played.round(slope * noise, overhead * noise)
        if t >= rounds // 3:
            others = (
                (noise * cost.seconds(loads)).max(-1) for loads in (np.full(shape, cases.samples), fixed)
            )
            totals += np.stack([took, *others])
    ours, equal, best = totals.reshape(3, -1, seeds)
    over = ours / equal
    found = over.mean(-1), np.mean(ours / best, axis=-1), over.std(-1, ddof=min(seeds - 1, 1))
    return [(*three, workers, *case) for *three, case in zip(*found, combined, strict=True)]


class _Played:
    """A policy in many runs at once, which hears what ``Balancer`` would tell it."""

    def __init__(self, name: str, shape: tuple[int, int], batch: int) -> None:
        self._cluster = Cluster(shape[1], batch, least=np.ones(shape[1]), realizations=shape[:1])
        self._policy = policies.create(name, self._cluster)
        self._plan, self._state = self._policy.init()
        self._fit, self._warm = overheads.start(shape), False

    def round(self, slope: Array, overhead: Array) -> Array:
        """Seconds that the round took, (runs,)."""
        cluster, batch = self._cluster, self._cluster.global_batch
        loads = whole_samples(self._plan, batch, cluster.least, cluster.most)
        seconds, known = overhead + slope * loads, np.zeros(slope.shape)
        pieces, parts = None, self._plan.piece_plan
        moved = np.zeros((len(slope), 1), bool) if parts is None else parts.at_once[:, None] < 1
        if parts is not None and moved.any():
            ran = play(parts, loads, slope, overhead, PIECE)
            further = PIECE * np.maximum(ran.pieces - 1.0, 0.0)
            loads, seconds = np.where(moved, ran.loads, loads), np.where(moved, ran.seconds - PIECE, seconds)
            known = np.where(moved, further, 0.0)
            expected, strayed = (np.where(moved, each, 0.0) for each in (ran.expected, ran.strayed))
            pace = np.where(moved, ran.pace, np.nan)
            pieces = PieceTimes(np.full(slope.shape, PIECE), expected, strayed, pace)
        fit = overheads.update(self._fit, loads.astype(float), seconds, known)
        fit = type(fit)(*(np.where(moved, old, new) for old, new in zip(self._fit, fit, strict=True)))
        happened = Round(loads / batch, seconds, batch, known + overheads.certain(fit), pieces=pieces)
        self._fit, self._warm = fit if self._warm else self._fit, True
        self._plan, self._state = self._policy.step(self._state, happened)
        return np.asarray(seconds.max(-1))


if __name__ == "__main__":
    main()
