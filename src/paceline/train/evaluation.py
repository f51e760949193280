"""How the workers evaluate the trained model together, a part of the test set at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.data import datasets
from paceline.data.datasets import Data
from paceline.torch.elastic.link import Link

TEST_CHUNK = 250
LOOK = 0.02  # seconds between two looks at what the others have come to
KEPT, DONE, CLAIM, RIGHT = "kept", "evaluated", "evaluation", "right/{}"


def divided(model: nn.Module, data: Data, rank: int, ranks: int) -> float:
    """Portion of the test set that the model gets right, each rank taking every n-th part. Collective."""
    model.eval()
    if ranks > 1:  # rank 0's running statistics are the model's, as in its checkpoint
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    count = torch.zeros(1, dtype=torch.float64)
    for number in range(chunks(data))[rank::ranks]:
        count += right(model, data, number)
    if ranks > 1:
        dist.all_reduce(count)
    return float(count) / len(data.x_test)


def claimed(
    link: Link, model: nn.Module, data: Data, keep: Callable[[], None], take: Callable[[], None]
) -> float | None:
    """Portion of the test set that the model gets right, where workers may be lost: the loss of one costs no more
    than the part that it had claimed.

    The worker that is to tell of it gets the figure, and calls ``release`` then; the others get None, and stay until
    it has. keep: writes the checkpoint, on the first of the members. take: makes a worker's model that of the
    checkpoint.
    """
    count, ready = chunks(data), False

    def run(number: int) -> None:
        link.post(RIGHT.format(number), right(model, data, number))

    model.eval()
    while not link.posted(DONE):
        first = link.first  # also where the one that was has been lost since
        if first and not link.posted(KEPT):
            keep()
            ready = True
            link.post(KEPT)
        if not link.posted(KEPT):
            time.sleep(LOOK)
            continue
        if not ready:
            take()
            ready = True
        if (number := link.claim(CLAIM)) < count:
            run(number)
            continue
        missing = [number for number in range(count) if not link.posted(RIGHT.format(number))]
        if first and not missing:
            return sum(int(link.read(RIGHT.format(number))) for number in range(count)) / len(data.x_test)
        if first and link.changed:
            run(missing[0])  # whoever claimed it may be lost
        else:
            time.sleep(LOOK)
    return None


def release(link: Link) -> None:
    """All may end."""
    link.post(DONE)


def chunks(data: Data) -> int:
    """In how many parts the test set is evaluated."""
    return -(-len(data.x_test) // TEST_CHUNK)


@torch.no_grad()
def right(model: nn.Module, data: Data, number: int) -> int:
    """How many of a part of the test set the model gets right."""
    part = slice(number * TEST_CHUNK, (number + 1) * TEST_CHUNK)
    guess = model(torch.from_numpy(datasets.floats(data.x_test[part]))).argmax(dim=1).numpy()
    return int(np.sum(guess == data.y_test[part]))
