"""The user's loader: this rank's micro-batches, round by round, cut by the plan in force.

A prefetching DataLoader draws its indices ahead of the rounds that use them, so a plan takes effect only as
many rounds later as the loader may draw ahead (its lag): then every rank cuts a round by the same plan, however
far its own loader happens to be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from paceline.errors import PacelineError
from paceline.torch.batches import Order, Piece, pieces

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
        collate = options.pop("collate_fn", None) or default_collate
        self._loader = DataLoader(
            dataset, batch_sampler=self._sampler, collate_fn=_EmptyToo(dataset, collate), **options
        )

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
            pace.begin_piece(self._sampler.queue.popleft())
            yield batch
            pace.end_piece()
        pace.close_epoch()


class _Sampler:
    """Yields the indices of this rank's micro-batches, and keeps beside them what each one is."""

    def __init__(self, pace: Pace, order: Order) -> None:
        self._pace, self._order = pace, order
        self.queue: deque[Piece] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        pace = self._pace
        indices = self._order.epoch(pace.epoch)
        step = pace.rounds
        for first, size in pace.remaining():
            loads = pace.loads(step, size)
            start = first + int(loads[: pace.rank].sum())
            mine = indices[start : start + int(loads[pace.rank])]
            filler = indices[: pace.floor] if pace.floor > 1 else None
            for cut, piece in pieces(mine, step, loads, pace.micro_batch, filler):
                self.queue.append(piece)
                yield cut.tolist()
            step += 1


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
