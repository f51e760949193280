"""Coded blocks on their way to the workers: placed and dropped as a layout asks, or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from paceline.coded.codes import Code
from paceline.coded.delay import Array
from paceline.coded.layout import Moves
from paceline.errors import WorkerError

Actors = Sequence[Any]


def move(
    actors: Actors,
    names: Sequence[str],
    key: str,
    code: Code,
    a: Array,
    moves: Moves,
    gone: set[int],
    patience: float,
) -> None:
    """Place the new blocks of matrix ``a``, then drop the old ones.

    actors, names: by worker; gone: workers known to be dead, to which those found dead are added; patience:
    seconds to wait for a worker. On failure what was placed is dropped again. Raises WorkerError where a
    worker is lost.
    """
    placed: list[int] = []
    waiting: list[tuple[int, Any]] = []

    def settle(n: int, answer: Any) -> None:
        try:
            ray.get(answer, timeout=patience)
        except (RayActorError, GetTimeoutError) as error:
            gone.add(n)
            raise WorkerError(
                f"worker {names[n]!r} was lost while its blocks were placed: start it again or plan without "
                f"it"
            ) from error

    try:
        for n, indices in enumerate(moves.place):
            if indices:
                blocks = ray.put(np.stack(code.encode(a, indices)))
                placed.append(n)
                waiting.append((n, actors[n].place.remote(key, indices, blocks)))
                # one set of blocks under way beside the one being made bounds the memory
                if len(waiting) > 1:
                    settle(*waiting.pop(0))
        for n, answer in waiting:
            settle(n, answer)
    except BaseException:
        drop(actors, key, placed, moves.place, gone)
        raise
    drop(actors, key, range(len(moves.drop)), moves.drop, gone)


def drop(
    actors: Actors,
    key: str,
    workers: Iterable[int],
    blocks: tuple[tuple[int, ...], ...],
    gone: Collection[int],
) -> None:
    """Have workers forget blocks, without waiting."""
    for n in workers:
        if blocks[n] and n not in gone:
            actors[n].drop.remote(key, blocks[n])
