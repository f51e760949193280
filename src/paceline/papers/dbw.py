"""Xu, Neglia and Sebastianelli (2021), "Dynamic Backup Workers for Parallel Machine Learning": what figures share.

MNIST with the paper's network (``models/cnn.py``) in Figs. 1, 4, 6, 9 and 10, where it takes minutes a run; a
perceptron elsewhere, in place of ResNet-18 too, and under ``--quick``. The full rate on MNIST is the paper's 0.08.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.papers import data_folder
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Draws
from paceline.simulate.server import Change, RoundTrips, Server
from paceline.simulate.timing import Exponential, TimingModel

WORKERS = 16
MNIST_RATE = 0.08
SMOOTHED = 5  # updates that the loss is averaged over before it counts as reached
KEPT = 256 * 2**20  # bytes of gradients that are remembered
NETWORKS = {
    "mlp": "perceptron of 64 hidden units",
    "cnn": "two 5 x 5 convolutions of 10 and 20 filters, dense layers of 50 and 10 units",
}


@functools.cache
def dataset(name: str) -> datasets.Data:
    """mnist or cifar10, from the shared folder. CIFAR-10 is there as pictures, which needs Pillow."""
    folder = data_folder() / name
    if name == "mnist":
        return datasets.load(str(folder))
    try:
        from PIL import Image
    except ImportError as error:
        raise PacelineError("reading the shared CIFAR-10 needs pillow; install it") from error
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
    """Round trips of 1 - alpha + alpha Exp(1) seconds."""
    return Exponential(max(alpha, 1e-9), 1.0 - alpha)


def network(quick: bool) -> str:
    """The model of the figures on MNIST: the paper's, or the perceptron where it must be quick."""
    return "mlp" if quick else "cnn"


@functools.lru_cache(maxsize=1)  # one seed's gradients at a time
def learner(name: str = "mnist", model: str = "mlp", seed: int = 0) -> Any:
    """The network, on one thread: the gradients are small, and more threads only wait for each other."""
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
    changes: Sequence[Change] = (),
    seconds_per_sample: TimingModel | None = None,
) -> tuple[list[Update], Server]:
    """One run until the mean loss of the last updates is below the target, or a limit is reached (DBW, setting)."""
    learns = learner(name, model, seed)
    config = ServerConfig(WORKERS, WORKERS * batch, mode=mode, backup=backup, policy=policy, rate=rate, lr=lr)
    trips = RoundTrips(WORKERS, delay, seconds_per_sample, seed, changes)
    server = Server(learns, config, trips, Draws(len(learns.data.x_train), seed, shards))
    losses: list[float] = []

    def stop(update: Update) -> bool:
        losses.append(update.loss)
        return target is not None and float(np.mean(losses[-SMOOTHED:])) < target

    return server.run(updates, seconds, stop), server


class Remembering:
    """A learner that computes no gradient twice.

    Runs of one figure begin alike: those that wait for all and move by the same rate ask for the same gradients,
    until their choices differ. It remembers until ``KEPT`` bytes are full, and nothing new from then on, since what
    comes first is what runs share. For learners whose gradients depend on the parameters and the samples alone.
    """

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self._known: dict[bytes, tuple[np.ndarray, float]] = {}
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def gradient(self, values: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, float]:
        """As the learner's own; the gradient cannot be written to."""
        key = hashlib.blake2b(values.tobytes() + samples.tobytes(), digest_size=16).digest()
        found = self._known.get(key)
        if found is None:
            found = self._learner.gradient(values, samples)
            found[0].setflags(write=False)
            if self._bytes + found[0].nbytes <= KEPT:
                self._known[key] = found
                self._bytes += found[0].nbytes
        return found
