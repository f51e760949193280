"""The setting of DBW's experiments, and one run of it on the virtual clock.

MNIST with the paper's network (``models/cnn.py``) in Figs. 1, 4, 6, 9 and 10, where it takes minutes a run; a
perceptron elsewhere, in place of ResNet-18 too, and under ``--quick``. The full rate on MNIST is the paper's 0.08.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.papers.dbw_memory import Remembering
from paceline.papers.reference_data import data_folder
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Draws
from paceline.simulate.roundtrips import Change, RoundTrips
from paceline.simulate.server import Server
from paceline.simulate.timing import Exponential, TimingModel

WORKERS = 16
MNIST_RATE = 0.08
SMOOTHED = 5  # updates that the loss is averaged over before it counts as reached
CAP = 3000


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
    return _cifar10()


def _cifar10() -> datasets.Data:
    folder = data_folder() / "cifar10"
    try:
        from PIL import Image
    except ImportError as error:
        raise PacelineError("reading the shared CIFAR-10 needs pillow; install it") from error
    if not folder.is_dir():
        raise PacelineError(f"{folder} does not exist; set PACELINE_DATA to the folder of the shared data")

    def images(split: str) -> np.ndarray:
        sheets = [
            np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob(f"{split}_*.webp"))
        ]
        tiles = [
            sheet.reshape(50, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
            for sheet in sheets
        ]
        return np.ascontiguousarray(np.concatenate(tiles))

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
    sync: str = "bsp",
    policy: str = "equal",
    workers: int = WORKERS,
    name: str = "mnist",
    model: str = "mlp",
    shards: int = 1,
    updates: int = CAP,
    seconds: float | None = None,
    changes: Sequence[Change] = (),
    seconds_per_sample: TimingModel | None = None,
) -> tuple[list[Update], Server]:
    """One run until the mean loss of the last updates is below the target, or the limits are reached."""
    learns = learner(name, model, seed)
    config = ServerConfig(
        workers, workers * batch, sync=sync, mode=mode, backup=backup, policy=policy, rate=rate, lr=lr
    )
    trips = RoundTrips(workers, delay, seconds_per_sample, seed, changes)
    server = Server(learns, config, trips, Draws(len(learns.data.x_train), seed, shards))
    losses: list[float] = []

    def stop(update: Update) -> bool:
        losses.append(update.loss)
        return target is not None and float(np.mean(losses[-SMOOTHED:])) < target

    return server.run(updates, seconds, stop), server


def smoothed(updates: Sequence[Update]) -> np.ndarray:
    """The loss averaged over the last few updates, shape (T,)."""
    losses = np.array([update.loss for update in updates])
    total = np.cumsum(np.insert(losses, 0, 0.0))
    start = np.maximum(np.arange(len(losses)) + 1 - SMOOTHED, 0)
    return (total[1:] - total[start]) / (np.arange(len(losses)) + 1 - start)


def reached(updates: Sequence[Update], target: float) -> float:
    """Seconds until the smoothed loss fell below the target; infinite where it did not."""
    below = np.flatnonzero(smoothed(updates) < target)
    return updates[below[0]].now if len(below) else float("inf")


def waited(updates: Sequence[Update], quorum: int) -> float:
    """Seconds that the updates from so many gradients took."""
    ends = np.array([0.0] + [update.now for update in updates])
    return float(np.diff(ends)[[update.quorum == quorum for update in updates]].sum())


def said(seconds: Sequence[float]) -> str:
    """Mean and range."""
    return f"{np.mean(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f})"
