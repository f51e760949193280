"""Moving work within the round, or not waiting for all? Seconds to the same loss, on a virtual clock.

    python benchmarks/stalls.py [--only paces] [--stalling 0.7] [--workers 16] [--slow 3] [--runs 5]

Softmax regression on the embedded digits, real gradients, equal workers that stall: a shifted exponential stretches
either each sample of a task ("paces") or its beginning ("starts"); a mean task takes 64 ms, and --slow times as long
on half of the workers. "recorded-SE" and "recorded-ST" have the speeds of real ranks instead (ByteDance). Backup
workers, DBW and joint wait for the first k of n gradients and drop what is unfinished (push-interrupt); dropcompute
drops what has not begun by a threshold; level, factoring and auto use every sample of every batch. "level + dbw" is a
policy beside a backup policy; joint chooses both as one. All at the same learning rate. Median over the runs of the
seconds until the loss over the training set falls to the target, of the updates that took, and of the samples
computed for nothing, or left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scaffold import command_line
from throughput import recorded

from paceline import Cluster, Round, policies
from paceline.data import datasets
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws
from paceline.rounds import PieceTimes
from paceline.shares import whole_samples
from paceline.simulate.pieces import play
from paceline.simulate.server import RoundTrips, SimulatedServer
from paceline.simulate.timing import Constant, Exponential, Replay, TimingModel

EACH, MEAN = 32, 2e-3  # samples a worker, seconds a sample on average
MOST_UPDATES = 4000
RECORDED = ("recorded-SE", "recorded-ST")
SERVED = {  # balancing and backup policies
    "everyone": ("equal", "everyone"),
    "dbw": ("equal", "dbw"),
    "dbw:worth=noise": ("equal", "dbw:worth=noise"),
    "level + dbw": ("level", "dbw"),
    "level + dbw:noise": ("level", "dbw:worth=noise"),
    "joint": ("joint", "everyone"),
    "dropcompute": ("equal", "dropcompute"),
}


class Softmax:
    """Softmax regression: the mean cross-entropy and its gradient."""

    def __init__(self) -> None:
        digits = datasets.load("digits")
        x = datasets.floats(digits.x_train).reshape(len(digits.x_train), -1)
        self.x, self.y = np.c_[x, np.ones(len(x))], digits.y_train
        self.classes = int(self.y.max()) + 1

    def start(self) -> np.ndarray:
        return np.zeros(self.x.shape[1] * self.classes)

    def gradient(self, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
        x, y = self.x[samples], self.y[samples]
        logits = x @ values.reshape(-1, self.classes)
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits)
        p /= p.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        loss = float(-np.log(p[rows, y]).mean())
        p[rows, y] -= 1
        return (x.T @ p / len(y)).ravel(), loss

    def loss(self, values: np.ndarray) -> float:
        return self.gradient(values, np.arange(len(self.y)))[1]


class Reached(NamedTuple):
    seconds: float
    updates: int
    wasted: float  # samples, of those used


def models(kind: str, stalling: float, workers: int, slow: float) -> tuple[TimingModel, TimingModel]:
    """(overhead, pace): the portion ``stalling`` of a mean task is exponential, the rest is certain."""
    mean = MEAN * np.where(np.arange(workers) < workers // 2, 1.0, slow)
    if kind in RECORDED:
        series = recorded(kind.removeprefix("recorded-"), MOST_UPDATES + 1, workers)
        assert series is not None
        return Constant(1e-9), Replay(series * mean)
    if kind == "paces":
        return Constant(1e-9), Exponential(stalling * mean, (1 - stalling) * mean)
    return Exponential(stalling * mean * EACH), Constant((1 - stalling) * mean)


def served(
    kind: str, stalling: float, workers: int, slow: float, name: str, lr: float, target: float, seed: int
) -> Reached:
    learner = Softmax()
    policy, backup = SERVED[name]
    config = ServerConfig(workers, EACH * workers, mode="push-interrupt", backup=backup, policy=policy, lr=lr)
    overhead, pace = models(kind, stalling, workers, slow)
    server = SimulatedServer(
        learner, config, RoundTrips(workers, overhead, pace, seed), Draws(len(learner.y), seed)
    )
    updates = server.run(
        updates=MOST_UPDATES, stop=lambda update: learner.loss(server.parameters.values) <= target
    )
    dropped = sum(u.dropped_samples for u in updates)
    return Reached(updates[-1].ended, len(updates), dropped / sum(float(np.sum(u.loads)) for u in updates))


def planned(
    kind: str, stalling: float, workers: int, slow: float, name: str, lr: float, target: float, seed: int
) -> Reached:
    learner, batch = Softmax(), EACH * workers
    values, rng = learner.start(), np.random.default_rng(seed)
    overheads, paces = (
        model.stream((1, workers), stream)
        for model, stream in zip(models(kind, stalling, workers, slow), rng.spawn(2), strict=True)
    )
    policy = policies.create(name, Cluster(workers, batch, realizations=(1,)))
    plan, state = policy.init()
    now = 0.0
    update = 0
    while update < MOST_UPDATES:
        update += 1
        overhead, pace = next(overheads), next(paces)
        loads = whole_samples(plan, batch)
        extra: np.ndarray = np.zeros(pace.shape)
        seconds, pieces = overhead + loads * pace, None
        if plan.piece_plan is not None:
            ran = play(plan.piece_plan, loads, pace, overhead, 1e-3)
            loads, seconds, extra = ran.loads, ran.seconds, ran.pieces * 1e-3
            pieces = PieceTimes(np.full(pace.shape, 1e-3), ran.expected, ran.strayed, ran.pace)
        now += float(seconds.max())
        values = values - lr * learner.gradient(values, rng.integers(len(learner.y), size=batch))[0]
        if learner.loss(values) <= target:
            break
        plan, state = policy.step(state, Round(loads / batch, seconds, batch, extra, pieces=pieces))
    return Reached(now, update, 0.0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.35)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--only", choices=("paces", "starts", *RECORDED))
    parser.add_argument("--stalling", type=float, action="append", metavar="PORTION")
    options = parser.parse_args()
    n = options.workers
    SERVED.update({f"static:{k}": ("equal", f"static:{k}") for k in (n // 2, 3 * n // 4, n - 1)})
    for kind in (options.only,) if options.only else ("paces", "starts"):
        for stalling in (0.0,) if kind in RECORDED else options.stalling or (0.3, 0.7):
            what = "recorded speeds" if kind in RECORDED else f"{stalling:.0%} of a mean task exponential"
            print(
                f"\n{kind}: {n} workers, {what}, half {options.slow:g}x slower, to a loss of {options.target}"
            )
            print(f"{'':18}{'seconds':>9}{'updates':>9}{'ms an update':>14}{'wasted':>9}")
            for name in [*SERVED, "level", "factoring", "auto"]:
                play_one = served if name in SERVED else planned
                runs = [
                    play_one(kind, stalling, n, options.slow, name, options.lr, options.target, seed)
                    for seed in range(options.runs)
                ]
                seconds, updates, wasted = np.median(np.array(runs, float), axis=0)
                print(
                    f"{name:18}{seconds:9.2f}{updates:9.0f}{1e3 * seconds / updates:14.1f}{wasted:9.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
