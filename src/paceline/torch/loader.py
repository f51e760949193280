"""The user's loader: this rank's micro-batches, round by round, cut by the plan in force.

A prefetching DataLoader draws its indices ahead of the rounds that use them, so a plan takes effect only as
many rounds later as the loader may draw ahead (its lag): then every rank cuts a round by the same plan, however
far its own loader happens to be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from paceline.errors import PacelineError
from paceline.torch.batches import Indices, Order, Piece, pieces

if TYPE_CHECKING:
    from paceline.torch.pace import Pace


def draws_ahead(options: Mapping[str, Any]) -> int:
    """Micro-batches that a DataLoader with these options draws before they are used."""
    workers = int(options.get("num_workers") or 0)
    factor = options.get("prefetch_factor")
    return workers * (2 if factor is None else int(factor))


class BalancedLoader:
    """Iterate it once an epoch; each turn is one micro-batch. Made by ``Pace.loader``.

    Each full iteration is one epoch and moves on to the next one's order; ``set_epoch`` chooses another.
    """

    def __init__(self, pace: Pace, dataset: Any, order: Order, options: dict[str, Any]) -> None:
        for owned in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if owned in options:
                raise PacelineError(f"{owned}= belongs to the balancing; leave it out of pace.loader(...)")
        self._pace, self._order = pace, order
        self._sampler = _Sampler(pace, order)
        self._dataset, self._pins = dataset, bool(options.get("pin_memory"))
        self._collate = _EmptyToo(dataset, options.pop("collate_fn", None) or default_collate)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, collate_fn=self._collate, **options)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch in the next iteration, from its beginning."""
        if epoch != self._pace.epoch:
            self._pace.begin_epoch(epoch)

    def __len__(self) -> int:
        """Rounds left in this epoch; a round may take several turns."""
        return sum(1 for _ in self._pace.remaining())

    def __iter__(self) -> Iterator[Any]:
        pace = self._pace
        pace.open_epoch()
        self._sampler.queue.clear()
        source = iter(self._loader)
        while pace.samples_done < self._order.samples:
            pace.before_piece()
            batch = next(source)
            piece = self._sampler.queue.popleft()
            while (claimed := pace.claim(piece)) is not None:
                start, end = claimed[0], sum(claimed)
                for at in range(start, end, pace.cell or claimed[1]):
                    chosen = self._sampler.indices[at : min(at + (pace.cell or end), end)]
                    more = self._fetch(chosen.tolist())
                    pace.begin_piece(piece._replace(samples=len(chosen), last=False, division=None))
                    yield pace.place(more)
                    pace.end_piece()
            pace.begin_piece(piece)
            yield pace.place(batch)
            pace.end_piece()
        pace.close_epoch()

    def _fetch(self, indices: list[int]) -> Any:
        """A claimed piece, as the DataLoader would make it; nobody knew of it in time to prefetch it."""
        dataset = self._dataset
        whole = getattr(dataset, "__getitems__", None)
        batch = self._collate(whole(indices) if whole else [dataset[index] for index in indices])
        return _pinned(batch) if self._pins and torch.cuda.is_available() else batch


class _Sampler:
    """Yields the indices of this rank's micro-batches, and keeps beside them what each one is."""

    def __init__(self, pace: Pace, order: Order) -> None:
        self._pace, self._order = pace, order
        self.queue: deque[Piece] = deque()
        self.indices: Indices = np.empty(0, np.int64)  # this epoch's order

    def __iter__(self) -> Iterator[list[int]]:
        pace = self._pace
        self.indices = indices = self._order.epoch(pace.epoch)
        step = pace.rounds
        for first, size in pace.remaining():
            loads = pace.loads(step, size)
            division = pace.divide(step, loads, first)
            own = loads if division is None else division.first + division.kept
            start = first + int(own[: pace.rank].sum())
            mine = indices[start : start + int(own[pace.rank])]
            filler = indices[: pace.floor] if pace.fills else None
            kept = 0 if division is None else int(division.kept[pace.rank])
            for cut, piece in pieces(
                mine, step, loads, pace.micro_batch, filler, division, kept, pace.turns(loads), pace.floor
            ):
                self.queue.append(piece)
                yield cut.tolist()
            step += 1


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)


class _EmptyToo:
    """A collate function that can also make an empty batch, with the shapes of a real one."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else _nothing_of(self._collate([self._dataset[0]]))


def _nothing_of(batch: Any) -> Any:
    """The same structure with no samples in it."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({key: _nothing_of(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_nothing_of(value) for value in batch))
    if (
        isinstance(batch, list | tuple)
        and batch
        and isinstance(batch[0], torch.Tensor | Mapping | list | tuple)
    ):
        return type(batch)(_nothing_of(value) for value in batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return batch[:0]
    return batch
