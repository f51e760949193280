"""Xu, Neglia and Sebastianelli (2021), "Dynamic Backup Workers for Parallel Machine Learning": code shared by the
figures, and Figs. 1 to 3 on the quality of DBW's estimates.

MNIST with the paper's network (``learners.models.cnn``) in Figs. 1, 4, 6, 9 and 10, where a run takes minutes; a
perceptron elsewhere, also instead of ResNet-18, and under ``--quick``. The full rate on MNIST is the paper's 0.08.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.backup import arrival_times
from paceline.backup import dbw as rule
from paceline.backup.protocol import Iteration, Timings
from paceline.commands import pip
from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.papers import Found, data_folder, table
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Draws
from paceline.runs.words import percent
from paceline.simulate.plots import figure
from paceline.simulate.server import RoundTrips, SimulatedServer, SpeedChange
from paceline.simulate.timing import Exponential, TimingModel

WORKERS = 16
MNIST_RATE = 0.08
SMOOTHED = 5  # updates over which the loss is averaged before it is compared with the target
KEPT = 256 * 2**20  # bytes of gradients that are cached
NONE = Timings(*(np.zeros(0, np.int64),) * 2, np.zeros(0), np.zeros(0, np.int64), np.zeros(0))
PROBES = 20  # gradients from which the exact variance is computed
PART = 1000  # samples of the training set at a time: more would not fit into the processor's caches
NETWORKS = {
    "mlp": "perceptron of 64 hidden units",
    "cnn": "two 5 x 5 convolutions of 10 and 20 filters, dense layers of 50 and 10 units",
}


@functools.cache
def dataset(name: str) -> datasets.Data:
    """mnist or cifar10, from the shared folder. CIFAR-10 is stored there as pictures, which needs Pillow."""
    folder = data_folder() / name
    if name == "mnist":
        return datasets.load(str(folder))
    try:
        from PIL import Image
    except ImportError as error:
        raise PacelineError(
            f"reading the shared CIFAR-10 needs Pillow; run: {pip()} install pillow"
        ) from error
    if not folder.is_dir():
        raise PacelineError(f"{folder} does not exist; set PACELINE_DATA to the folder of the shared data")

    def images(split: str) -> np.ndarray:
        paths = sorted(folder.glob(f"{split}_*.webp"))  # sheets of 50 x 50 pictures
        sheets = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
        tiles = sheets.reshape(-1, 50, 32, 50, 32, 3).transpose(0, 1, 3, 5, 2, 4)
        return np.ascontiguousarray(tiles).reshape(-1, 3, 32, 32)

    labels = {split: np.load(folder / f"{split}_labels.npy").astype(np.int64) for split in ("train", "test")}
    return datasets.Data(images("train"), labels["train"], images("test"), labels["test"], 10, "cifar10")


def shifted(alpha: float) -> TimingModel:
    """The timing model of round trips of 1 - alpha + alpha Exp(1) seconds."""
    return Exponential(max(alpha, 1e-9), 1.0 - alpha)


def network(quick: bool) -> str:
    """The model of the figures on MNIST: the paper's, or the perceptron if quick."""
    return "mlp" if quick else "cnn"


@functools.lru_cache(maxsize=1)  # one seed's gradients at a time
def learner(name: str = "mnist", model: str = "mlp", seed: int = 0) -> Any:
    """The network, on one thread: the gradients are small, so more threads would only wait for each other."""
    import torch

    from paceline.learners.images import Images

    torch.set_num_threads(1)
    return Remembering(Images(dataset(name), model, seed))


def play(
    backup: str,
    delay: TimingModel,
    *,
    seed: int = 0,
    batch: int = 500,
    rate: str = "fixed",
    lr: float = MNIST_RATE,
    target: float | None = 0.2,
    mode: str = "push-wait",
    policy: str = "equal",
    name: str = "mnist",
    model: str = "mlp",
    shards: int = 1,
    updates: int = 3000,
    seconds: float | None = None,
    changes: Sequence[SpeedChange] = (),
    seconds_per_sample: TimingModel | None = None,
) -> tuple[list[Update], SimulatedServer]:
    """One run until the mean loss of the last updates is below the target, or a limit is reached (DBW, setting)."""
    learns = learner(name, model, seed)
    config = ServerConfig(WORKERS, WORKERS * batch, mode=mode, backup=backup, policy=policy, rate=rate, lr=lr)
    trips = RoundTrips(WORKERS, delay, seconds_per_sample, seed, changes)
    server = SimulatedServer(learns, config, trips, Draws(len(learns.data.x_train), seed, shards))
    losses: list[float] = []

    def stop(update: Update) -> bool:
        losses.append(update.loss)
        return target is not None and float(np.mean(losses[-SMOOTHED:])) < target

    return server.run(updates, seconds, stop), server


class Remembering:
    """A learner that caches gradients.

    The runs of a figure start with equal steps: runs that wait for all workers and use the same rate need the same
    gradients until their choices differ. The cache keeps the first ``KEPT`` bytes and nothing later, since runs share
    their first gradients. It is for learners whose gradients depend only on the parameters and the samples.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._known: dict[bytes, tuple[np.ndarray, float]] = {}
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
        """The learner's gradient and loss; the gradient's array is read-only."""
        key = hashlib.blake2b(values.tobytes() + samples.tobytes(), digest_size=16).digest()
        found = self._known.get(key)
        if found is None:
            found = self._learner.gradient(values, samples)
            found[0].setflags(write=False)
            if self._bytes + found[0].nbytes <= KEPT:
                self._known[key] = found
                self._bytes += found[0].nbytes
        return found


def fig1(quick: bool) -> Found:
    """MNIST: norm, variance and gain, estimated and exact (DBW, Fig. 1)."""
    return _estimates(quick, "mnist", network(quick), 500, 0.01, 15 if quick else 150)


def fig2(quick: bool) -> Found:
    """CIFAR-10: norm, variance and gain, estimated and exact (DBW, Fig. 2)."""
    return _estimates(quick, "cifar10", "mlp", 256, 0.05, 15 if quick else 150)


def _estimates(quick: bool, data: str, model: str, batch: int, rate: float, iterations: int) -> Found:
    learns, draws = learner(data, model), Draws(len(dataset(data).x_train), 0)
    rng = np.random.default_rng(7)
    everything = np.arange(0, len(dataset(data).x_train), 4 if quick else 1)
    values, state = learns.start(), rule.no_gain(5)
    rows: list[dict[str, Any]] = []
    for t in range(iterations):
        k = int(rng.integers(8, WORKERS + 1))  # k varies, as it does under DBW
        taken = (draws.take(worker, batch) for worker in range(k))
        gradients, losses = zip(*(learns.gradient(values, samples) for samples in taken), strict=True)
        mean = np.mean(gradients, 0)
        found = rule.estimate(state)
        if t % (3 if quick else 2) == 0 and np.isfinite(found.smoothness):
            full, loss = _whole(learns, values, everything)
            exact = float(np.dot(full, full))
            probes = [
                learns.gradient(values, rng.integers(len(dataset(data).x_train), size=batch))[0]
                for _ in range(PROBES)
            ]
            variance = float(np.mean([np.sum((probe - full) ** 2) for probe in probes]))
            after = _loss(learns, values - np.float32(rate) * mean, everything)
            rows.append(
                {
                    "iteration": t,
                    "norm2": found.norm2,
                    "norm2_exact": exact,
                    "variance": found.variance,
                    "variance_exact": variance,
                    "gain": float(found.of(np.array([float(k)]), rate)[0]),
                    "decrease": loss - after,
                }
            )
        variance = float(np.sum((np.array(gradients) - mean) ** 2)) / (k - 1)
        happened = Iteration(
            k, WORKERS, float(t), float(np.mean(losses)), float(np.dot(mean, mean)), variance, rate, NONE
        )
        state = rule.update_gain(state, happened)
        values = values - np.float32(rate) * mean
    instead = f"a {NETWORKS[model]} in place of the paper's network; " if model == "mlp" else ""
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    picture = figure(3)
    off = {}  # median relative error
    pairs = {"norm2": "norm2_exact", "variance": "variance_exact", "gain": "decrease"}
    for axes, (estimate, exact_name) in zip(picture.axes, pairs.items(), strict=True):
        axes.plot(columns["iteration"], columns[estimate], label="estimated")
        axes.plot(columns["iteration"], columns[exact_name], "--", label="exact")
        axes.set(xlabel="iteration", title=estimate)
        axes.legend()
        off[estimate] = float(np.median(np.abs(columns[estimate] / columns[exact_name] - 1)))
    correlation = float(np.corrcoef(columns["gain"], columns["decrease"])[0, 1])
    below = float(np.mean(columns["gain"] <= columns["decrease"]))
    return Found(
        picture,
        rows,
        claim="the estimates track the exact norm and variance; the gain is a lower bound, almost "
        "proportional to the decrease of the loss",
        ours=f"median error of the norm {percent(off['norm2'])}, of the variance "
        f"{percent(off['variance'])}; the gain is below the decrease in {percent(below)} of "
        f"the iterations, correlation {correlation:.2f}",
        why=instead + "the norm falls quickly at first, and an average over the last 5 iterations lags "
        "behind it; the paper's k are DBW's own choices",
        setting=f"{data}, {NETWORKS[model]}, n = 16, B = {batch}, rate {rate:g}, D = 5, "
        f"{iterations} iterations, k drawn from 8 to 16",
    )


def _whole(learns: Any, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
    """The gradient and the loss over all of these samples, computed in parts."""
    total, loss = np.zeros(len(values)), 0.0
    for start in range(0, len(samples), PART):
        part = samples[start : start + PART]
        gradient, mean = learns.gradient(values, part)
        total += gradient * (len(part) / len(samples))
        loss += mean * (len(part) / len(samples))
    return total, loss


def _loss(learns: Any, values: np.ndarray, samples: np.ndarray) -> float:
    """The loss over all of these samples, computed in parts."""
    parts = [samples[start : start + PART] for start in range(0, len(samples), PART)]
    return sum(learns.loss(values, part) * len(part) for part in parts) / len(samples)


def fig3(quick: bool) -> Found:
    """The time estimator of eq. (17) against plain means, n = 5 (DBW, Fig. 3)."""
    n, iterations, runs = 5, 60, 20 if quick else 200
    truth = _stationary(n, 4000 if quick else 20000)
    errors: dict[str, list[np.ndarray]] = {"constrained": [], "naive": []}
    missing = 0
    for seed in range(runs):
        state = arrival_times.start(n)
        rng = np.random.default_rng((seed, 3))
        ks = rng.choice([1, 2, 3, 4, 5], size=iterations, p=[0.3, 0.3, 0.05, 0.05, 0.3])
        for timings in _arrivals(n, ks, seed):
            state = arrival_times.update(state, timings)
        naive = arrival_times.naive(state)
        missing += int(np.isnan(naive).sum())
        errors["naive"].append(naive / truth - 1)
        errors["constrained"].append(arrival_times.constrained(state) / truth - 1)
    rows = []
    picture = figure(1)
    for name, found in errors.items():
        rms = np.sqrt(np.nanmean(np.square(found), axis=0))
        picture.axes[0].plot(np.arange(1, n + 1), rms, "o-", label=name)
        rows += table(estimator=name, k=range(1, n + 1), rms_error=rms)
    picture.axes[0].set(xlabel="k", ylabel="relative error (root mean square)", ylim=(0, None))
    picture.axes[0].legend()
    rare = {name: np.sqrt(np.nanmean(np.square(np.array(found)[:, 2:4]))) for name, found in errors.items()}
    return Found(
        picture,
        rows,
        claim="the constrained estimates are more precise than the naive ones, most of all for k = "
        "3 and 4, which are seldom tried",
        ours=f"for k = 3 and 4: constrained {percent(rare['constrained'], 1)}, naive {percent(rare['naive'], 1)} "
        f"off (root mean square); the naive one has no estimate in {percent(missing / runs / n, 1)} of the cases",
        why="as in the paper; true times from a long simulation of each k",
        setting=f"n = 5, round trips .3 + .7 Exp(1), push-wait, {iterations} iterations, {runs} runs",
    )


def _arrivals(n: int, ks: np.ndarray, seed: int) -> list[Timings]:
    """Time samples of a push-wait run that waits for these k, without training."""
    trips = RoundTrips(n, shifted(0.7), seed=seed)
    counts = [0] * n
    ready, found, h, now = np.zeros(n), [], n, 0.0

    def draw(worker: int) -> float:
        counts[worker] += 1
        return trips.seconds(worker, counts[worker] - 1, 1, 0.0)

    done = np.array([draw(w) for w in range(n)])
    for k in ks:
        order = np.argsort(done, kind="stable")
        update = float(done[order[k - 1]])
        fresh = [w for w in order if ready[w] < update or done[w] <= update]
        samples = [(h, place + 1, done[w] - now, w, done[w] - ready[w]) for place, w in enumerate(fresh)]
        before, places, seconds, workers, trip = np.array(samples, float).T
        found.append(Timings(before.astype(int), places.astype(int), seconds, workers.astype(int), trip))
        for w in fresh:
            ready[w] = max(update, done[w])
            done[w] = ready[w] + draw(w)
        h, now = int(k), update
    return found


def _stationary(n: int, iterations: int) -> np.ndarray:
    """Mean seconds of an iteration that always waits for k gradients, for k = 1..n."""
    means = []
    for k in range(1, n + 1):
        taken = _arrivals(n, np.full(iterations, k), 99)
        means.append(np.mean([t.seconds[k - 1] for t in taken[10:]]))
    return np.array(means)
