"""The user's loader: this rank's micro-batches, round by round, cut by the plan in force.

A prefetching DataLoader draws its indices ahead of the rounds that use them, so a plan takes effect only as
many rounds later as the loader may draw ahead (its lag): then every rank cuts a round by the same plan, however
far its own loader happens to be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.errors import PacelineError
from paceline.torch.batches import Indices, Order, Piece, pieces
from paceline.torch.fetching import as_it_is, fetcher
from paceline.torch.same_bits import aligned

if TYPE_CHECKING:
    from paceline.torch.pace import Pace


def draws_ahead(options: Mapping[str, Any]) -> int:
    """Micro-batches that a DataLoader with these options draws before they are used."""
    workers = int(options.get("num_workers") or 0)
    factor = options.get("prefetch_factor")
    return workers * (2 if factor is None else int(factor))


def check_indexed(dataset: Any) -> None:
    """Raises PacelineError for a stream, whose samples can't be told apart beforehand."""
    indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")  # torch takes either
    if isinstance(dataset, IterableDataset) or not (indexed and hasattr(dataset, "__len__")):
        raise PacelineError(
            f"the data set is a {type(dataset).__name__}; expected one with a length and indexed items, of which "
            "each rank can be given its part anew in each round"
        )


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
        self._pins = bool(options.get("pin_memory")) and torch.cuda.is_available()
        collate = options.pop("collate_fn", None) or default_collate
        self._early = bool(options.get("num_workers"))
        self._fetcher = fetcher(dataset, collate, options) if pace.terms.pulls else None
        collate = _EmptyToo(dataset, collate)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, collate_fn=collate, **options)

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
        if self._fetcher is not None:
            pace.claims_ahead(self._claimed, self._early)
            self._fetcher.reset()
        laid = aligned if pace.terms.cell else as_it_is
        source = iter(self._loader)
        while pace.samples_done < self._order.samples:
            pace.before_piece()
            batch = next(source)
            piece = self._sampler.queue.popleft()
            while (claimed := pace.claim(piece)) is not None:
                turns = self._turns(*claimed)
                for left, turn in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
                    more = self._fetch(turn)
                    then = None if left else piece.division
                    pace.begin_piece(piece._replace(samples=len(turn), last=False, division=then))
                    yield pace.place(laid(more))
                    pace.end_piece()
            pace.begin_piece(piece)
            yield pace.place(laid(batch))
            pace.end_piece()
        pace.close_epoch()

    def close(self) -> None:
        """No more claims."""
        if self._fetcher is not None:
            self._fetcher.close()

    def _turns(self, start: int, size: int) -> list[Indices]:
        """What is claimed, cut into turns of the user's loop: one, or cells of a grid."""
        chosen, each = self._sampler.indices[start : start + size], self._pace.terms.cell or size
        return [chosen[at : at + each] for at in range(0, size, each)]

    def _claimed(self, start: int, size: int) -> None:
        """Called from the thread that claims."""
        assert self._fetcher is not None
        self._fetcher.begin(self._turns(start, size))

    def _fetch(self, turn: Indices) -> Any:
        assert self._fetcher is not None
        began = time.perf_counter()
        batch = self._fetcher.next(turn)
        if self._loader.num_workers:  # else loading is work like any other
            self._pace.waited(time.perf_counter() - began)
        return _pinned(batch) if self._pins else batch


class _Sampler:
    """Yields the indices of this rank's micro-batches, and keeps beside them what each one is."""

    def __init__(self, pace: Pace, order: Order) -> None:
        self._pace, self._order = pace, order
        self.queue: deque[Piece] = deque()
        self.indices: Indices = np.empty(0, np.int64)  # this epoch's order

    def __iter__(self) -> Iterator[list[int]]:
        pace, terms = self._pace, self._pace.terms
        self.indices = indices = self._order.epoch(pace.epoch)
        step = pace.rounds
        for first, size in pace.remaining():
            loads = pace.loads(step, size)
            division = terms.divide(step, loads, first)
            own = loads if division is None else division.first + division.kept
            start = first + int(own[: pace.rank].sum())
            mine = indices[start : start + int(own[pace.rank])]
            filler = indices[: terms.floor] if terms.fills else None
            kept = 0 if division is None else int(division.kept[pace.rank])
            turns = terms.turns(loads)
            for cut, piece in pieces(
                mine, step, loads, terms.micro_batch, filler, division, kept, turns, terms.floor
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
