"""How the workers judge the trained model together: the loss of one costs no more than what it had claimed."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from paceline.data.datasets import Data
from paceline.torch.elastic.link import Link
from paceline.train import torch_engine

LOOK = 0.02  # seconds between two looks at what the others have come to
KEPT, JUDGED, CLAIM = "kept", "judged", "judging"


def judge(
    link: Link, model: nn.Module, data: Data, keep: Callable[[], None], take: Callable[[], None]
) -> float | None:
    """Portion of the test set that the model gets right, on the worker that is to tell of it, and calls ``told``
    then. None on the others, which stay until it has.

    keep: writes the checkpoint, on the first of the members. take: makes a worker's model that of the checkpoint:
    each has running statistics of its own.
    """
    chunks, ready = torch_engine.chunks(data), False

    def run(number: int) -> None:
        link.post(_key(number), torch_engine.right(model, data, number))

    model.eval()
    while not link.posted(JUDGED):
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
        if (number := link.claim(CLAIM)) < chunks:
            run(number)
            continue
        missing = [number for number in range(chunks) if not link.posted(_key(number))]
        if first and not missing:
            return sum(int(link.read(_key(number))) for number in range(chunks)) / len(data.x_test)
        if first and link.changed:
            run(missing[0])  # whoever claimed it may be lost
        else:
            time.sleep(LOOK)
    return None


def told(link: Link) -> None:
    """All may end."""
    link.post(JUDGED)


def _key(number: int) -> str:
    return f"right/{number}"
