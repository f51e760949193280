"""Streams: each rank draws from its own stream as many samples as the plan gives it.

A rank keeps samples drawn ahead, and reports to the others before each round how many it holds: no plan gives it
more. So a stream may end at any time: its rank runs what is left of it, and the others take over the rest of the
batch. The reports travel while the round before is computed, and no rank waits for them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.errors import PacelineError, refuse, switches
from paceline.rounds import Indices
from paceline.torch import exchange, peers, timing
from paceline.torch.batches import has_rows, joined, length, part, two_readings
from paceline.torch.feed.loader import check_options
from paceline.torch.feed.pieces import pieces
from paceline.torch.feed.prefetch import as_it_is, draws
from paceline.torch.feed.rounds import check_unchanging, iterate
from paceline.torch.feed.shared_reads import CommonNumbers, checksum
from paceline.torch.loop import Loop
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.round import COMPLETE


class StreamBuffer:
    """Samples drawn ahead, in the order in which they were drawn.

    collate: makes batches of a stream of samples; None for a stream of batches of any size, whose first dimension
    counts samples. held: the drawn lists of samples, or batches. count: the samples in all of them.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate
        self._size: Callable[[Any], int] = length if collate is None else len
        # The samples from one number to another of what was taken.
        self.cut: Callable[[Any, int, int], Any] = (
            part if collate is None else lambda held, start, end: held[start:end]
        )
        # A batch has shown that the stream's lists do not have an entry for each sample.
        self._by_rows = collate is not None
        self.restart([])

    def restart(self, held: list[Any]) -> None:
        """Hold these lists or batches instead, as after a checkpoint."""
        self.held, self.count = deque(held), sum(map(self._size, held))
        self._read(held)

    def add(self, item: Any) -> None:
        """Hold one more item of the stream."""
        if self._collate is None:
            if not has_rows(item, samples := length(item)):
                raise PacelineError(
                    f"batches=True: the stream gave a {type(item).__name__} whose first tensor has {samples} rows, "
                    "and another part of it has not; expected tensors, or tuples, lists or dicts of them, each with "
                    "a row for each sample, and single numbers or texts"
                )
            self._read([item])
        self.held.append(item if self._collate is None else [item])
        self.count += self._size(self.held[-1])

    def take(self, count: int) -> Any:
        """Take out the first ``count`` samples, as a list or batch; None if ``count`` is 0."""
        if count and not self._by_rows:
            raise PacelineError(
                "batches=True: each batch holds a list or tuple with as many entries as samples, all alike, which "
                "can be cut in two ways. If an entry is a sample, stack them into a tensor; if it has a row for "
                "each, use a dict"
            )
        self.count -= count
        parts = []
        while count:
            first = self.held.popleft()
            size = self._size(first)
            if size > count:
                self.held.appendleft(self.cut(first, count, size))
                first, size = self.cut(first, 0, count), count
            parts.append(first)
            count -= size
        if not parts:
            return None
        return joined(parts) if self._collate is None else [sample for each in parts for sample in each]

    def back(self, taken: Any) -> None:
        """Put back what was taken last."""
        if taken is not None:
            self.held.appendleft(taken)
            self.count += self._size(taken)

    def _read(self, batches: list[Any]) -> None:
        """Learn from these batches how lists are meant. An empty one does not tell."""
        self._by_rows = self._by_rows or any(
            (samples := length(batch)) and not two_readings(batch, samples) for batch in batches
        )

    def batch(self, taken: Any, start: int = 0, end: int | None = None) -> Any:
        """The loop's batch of what was taken, or of its samples from ``start`` to ``end``."""
        some = taken if end is None else self.cut(taken, start, end)
        return some if self._collate is None else self._collate(some)


AHEAD = 2  # a rank draws ahead this many times its load, and its equal share among the streams that continue
# A rank's report of its stream: the samples drawn ahead, whether they are the last, and a checksum if ranks share it.
ROW = np.dtype([("held", "f8"), ("ended", "f8"), ("checksum", "f8")])


def available(held: Indices, most: Indices, quantum: int, min_samples: int) -> Indices:
    """The samples that each rank may be given in the next round, (n,): what it holds, up to ``most``, in quanta.

    min_samples: loads below it are moved to one rank, which must hold enough samples for all of them.
    """
    spare = (min_samples - 1) * len(held)
    return np.minimum(np.maximum(held - spare, 0), most) // quantum * quantum


def wanted(load: int, batch: int, ended: int, ranks: int) -> int:
    """The samples that a rank holds ahead after it ran ``load`` of ``batch`` in a round. ended: number of streams."""
    share = -(-batch // max(ranks - ended, 1))
    return min(AHEAD * max(load, share), AHEAD * batch)


class StreamLoader:
    """Iterates over the streams until those of all ranks have ended. Made by ``Pace.stream``.

    dataset: this rank's stream. number: of this loader among those of its Pace. batches: its items are whole batches.
    """

    samples: int | None = None  # of an epoch; unknown
    order = (None, None)  # the stream's own
    claimed = None  # rounds run as planned
    _checksum = 0  # of the items read in this iteration, if ranks share the stream

    def __init__(
        self,
        loop: Loop,
        dataset: Iterable[Any],
        number: int,
        drop_last: bool,
        batches: bool,
        options: dict[str, Any],
    ) -> None:
        terms = loop.terms
        if not hasattr(dataset, "__iter__") or isinstance(dataset, str | bytes | torch.Tensor):
            raise PacelineError(
                f"the data set is a {type(dataset).__name__}; expected one with a length and indexed items, or a "
                "stream that can be iterated"
            )
        switches(drop_last=drop_last, batches=batches)
        check_options(options, terms.batch, loop.ranks, streamed=True)
        check_unchanging(loop, "pace.stream()")
        peers.agree({"drop_last": drop_last, "batches": batches})
        reasons = {
            "with LocalSGD, ranks report ahead how many samples they hold, which fixes the size of an interval; "
            "set every= to a number of steps": not terms.every.fixed,
            f"a stream may end on no multiple of quantum={terms.quantum}; use drop_last=True, which leaves out what "
            "is too little for a round": terms.quantum > 1 and not drop_last,
        }
        refuse("pace.stream()", reasons)
        self.dataset, self.number = dataset, number
        self._loop, self._drop_last = loop, drop_last
        collate = options.pop("collate_fn", None) or default_collate
        self._buffer = StreamBuffer(None if batches else collate)
        self._stream: Any = dataset
        if isinstance(dataset, IterableDataset):
            self._stream = DataLoader(dataset, batch_size=None, collate_fn=as_it_is, **options)
            if hasattr(dataset, "set_epoch") and options.get("persistent_workers"):
                warnings.warn(
                    "persistent_workers=True: the processes keep their first copy of the stream, so set_epoch() does "
                    "not reach them and each epoch has the first one's order; leave the option out",
                    RuntimeWarning,
                    stacklevel=timing.level(),
                )
        elif options:
            raise PacelineError(
                f"{', '.join(f'{name}=' for name in options)}: such options are for an IterableDataset, and the "
                f"stream is a {type(dataset).__name__}; leave them out"
            )
        self._seeded, self._iterations = options.get("generator") is not None, 0
        self._exchange = exchange.connect(ROW)
        loop.drawn_ahead()
        self._sent = -1  # number of the newest report
        self._source: Iterator[Any] | None = None
        self._skipped = 0  # samples that the next iteration reads over
        self._ended = self._resumed = False
        self._over = False  # the newest iteration came to the end of all streams
        self._empty = False  # this iteration has had no round, and should have one
        self._supply = np.zeros(loop.ranks, ROW)  # of all ranks
        self._known = False  # ``_supply`` is that for the next round
        self._loads: Indices | None = None  # of the next round
        self._planned: Iterator[tuple[Indices, Piece]] = iter(())
        self._taken: Any = None  # this rank's samples of the running round
        self._some: Any = None  # samples that count for nothing, for a micro-step that needs some

    def __iter__(self) -> Iterator[Any]:
        return iterate(self._loop, self)

    def __len__(self) -> int:
        raise TypeError("a stream has no length: its loader ends when the streams of all ranks have ended")

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's stream between two rounds: its position, and the samples drawn ahead."""
        elsewhere = isinstance(self._stream, DataLoader) and self._stream.num_workers > 0
        if elsewhere or not hasattr(self.dataset, "state_dict"):
            raise PacelineError(
                f"the position of a {type(self.dataset).__name__} is unknown (it has no state_dict(), or is read by "
                "processes of its own); expected a stream such as torchdata's StatefulDataLoader"
            )
        return {
            "stream": self.dataset.state_dict(),
            "held": list(self._buffer.held),
            "ended": self._ended,
            "some": self._some,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the next iteration from the state that ``state_dict`` gave."""
        self.dataset.load_state_dict(state["stream"])  # type: ignore[attr-defined]
        self._buffer.restart(state["held"])
        self._ended, self._resumed, self._source = bool(state["ended"]), True, None
        self._some = state["some"]

    def skip(self, samples: int) -> None:
        """Read over this rank's first ``samples`` in the next iteration, which continues an epoch."""
        self._skipped, self._resumed = samples, True

    def close(self) -> None:
        """Close the exchange of reports, and end the processes that read the stream."""
        self._exchange.close()
        self._source = None  # its processes end here, see ``BalancedLoader.end``

    # -- the methods of a Source, for ``Loop`` -----------------------------------------------------------------

    def open(self) -> None:
        loader = isinstance(self._stream, DataLoader)
        if loader and not self._seeded:
            self._stream.generator = draws(*self._seeds(), self.number, self._iterations)
        self._iterations += 1
        with self._reading():
            source = iter(self._stream)
        # An iterator continues from where it was left. With persistent processes a DataLoader returns the same object
        # again, too, but begins the stream again.
        continues = self._resumed or (source is self._source and not loader)
        if not continues:
            self._buffer.restart([])
            self._ended = False
        self._empty = not continues or self._over
        self._source, self._resumed, self._over = source, False, False
        while self._skipped:
            with self._reading():
                while self._buffer.count < self._loop.terms.min_samples and self._draw():
                    pass
            if not self._buffer.count:
                break
            self._keep_some()
            some = min(self._skipped, self._buffer.count)
            self._buffer.take(some)
            self._skipped -= some
        self._skipped = 0
        self._report(self._aim(0))

    def end(self) -> None:
        round = self._loop.round
        if self._taken is not None and round.piece is not None and round.phase != COMPLETE:
            self._put_back()  # the round was left
        self._taken, self._loads = None, None

    def more(self) -> bool:
        self._loads = self._plan()
        return self._loads is not None

    def planned(self) -> tuple[Any, Piece]:
        loop, terms = self._loop, self._loop.terms
        if not loop.in_round:
            loads = self._loads
            assert loads is not None
            own, self._loads = int(loads[loop.rank]), None
            self._taken = self._take(loads)
            self._report(self._aim(own))
            filler = np.full(terms.min_samples, -1) if terms.filled else None
            plan = RoundPlan(loop.progress.rounds, loads, int(loads.sum()))
            self._planned = iter(pieces(terms, plan, np.arange(own), filler=filler))
        chosen, piece = next(self._planned)
        return self._batch(chosen), piece

    # -- internal --------------------------------------------------------------------------------------------

    def _batch(self, chosen: Indices) -> Any:
        if len(chosen) and chosen[0] >= 0:
            return self._buffer.batch(self._taken, int(chosen[0]), int(chosen[-1]) + 1)
        if self._some is None:
            raise PacelineError(
                f"the stream of rank {self._loop.rank} gave no sample at all; expected at least one on every rank"
            )
        batch = self._buffer.batch(self._some)
        return batch if len(chosen) else part(batch, 0, 0)

    def _plan(self) -> Indices | None:
        """The loads of the next round, (n,), the same on every rank; None if the epoch is over."""
        loop, terms = self._loop, self._loop.terms
        loop.settle()  # the plan depends on the round before
        self._receive()
        for attempt in range(2):
            held = self._supply["held"].astype(np.int64)
            can = available(held, terms.most, terms.quantum, terms.min_samples)
            if can.sum() >= terms.global_batch or self._supply["ended"].all():
                break
            if not attempt:
                # Several streams have ended at once: the others draw a whole batch each.
                self._report(self._aim(terms.global_batch))
                self._receive()
        batch = int(min(can.sum(), terms.global_batch))
        if not batch or (self._drop_last and batch < terms.global_batch):
            self._finish(batch)
            return None
        self._empty = False
        return terms.balancer.loads(loop.progress.rounds, batch, can > 0, can)

    def _finish(self, left: int) -> None:
        """The epoch is over. left: samples that are too few for a round. Raises PacelineError if it had no round."""
        if self._empty:
            raise PacelineError(
                f"the streams of all ranks give {left} samples in this epoch, too few for a round; expected "
                "streams that begin again in each epoch, as an IterableDataset does and an iterator does not"
            )
        self._over = True

    def _draw(self) -> bool:
        """Draw one item ahead; False if the stream has ended."""
        assert self._source is not None
        if not self._ended:
            try:
                self._buffer.add(next(self._source))
            except StopIteration:
                self._ended = True
        return not self._ended

    def _reading(self) -> AbstractContextManager[None]:
        """The stream is read within, in this process."""
        return nullcontext()

    def _seeds(self) -> tuple[int, ...]:
        """Seeds for the loading processes: others on each rank."""
        return torch.initial_seed(), self._loop.rank

    def _take(self, loads: Indices) -> Any:
        """Take this rank's samples of a round out of those drawn ahead."""
        return self._buffer.take(int(loads[self._loop.rank]))

    def _put_back(self) -> None:
        """Put back what ``_take`` took."""
        self._buffer.back(self._taken)

    def _aim(self, load: int) -> int:
        """The samples to hold ahead after a round in which this rank ran ``load`` samples."""
        terms, ranks = self._loop.terms, self._loop.ranks
        aim = wanted(load, terms.global_batch, int(self._supply["ended"].sum()), ranks)
        return aim + (terms.min_samples - 1) * ranks

    def _report(self, aim: int) -> None:
        """Draw ahead until this rank holds ``aim`` samples, and send how many it holds."""
        with self._reading():
            while self._buffer.count < aim and self._draw():
                pass
        self._keep_some()
        self._sent += 1
        self._known = False
        self._exchange.send(self._sent, np.array((self._buffer.count, self._ended, self._checksum), ROW))

    def _keep_some(self) -> None:
        """Keep the first samples, which stay in the buffer, for a micro-step without work."""
        if self._some is None and self._buffer.count:
            self._some = self._buffer.take(min(self._loop.terms.min_samples, self._buffer.count))
            self._buffer.back(self._some)

    def _receive(self) -> None:
        if not self._known:
            self._supply, self._known = self._exchange.receive(self._sent, self._loop.lost), True


class SharedStreamLoader(StreamLoader):
    """Iterates over one stream, which gives every rank the same samples in the same order. Every rank reads it whole,
    and keeps of each round the slice that the plan gives it.

    So a faster rank gets more samples of the stream. All ranks read and prepare all samples, which is work that
    balancing does not divide.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first_seed: int = peers.gather(torch.initial_seed())[0]
        self._whole: Any = None  # samples of the running round, of all ranks
        self._numbers = CommonNumbers()

    def open(self) -> None:
        self._numbers.restart(draws(*self._seeds(), self.number, self._iterations))
        self._checksum = 0
        super().open()

    def _reading(self) -> AbstractContextManager[None]:
        return self._numbers.drawn()

    def _draw(self) -> bool:
        drawn = super()._draw()
        if drawn:
            self._checksum = checksum(self._buffer.held[-1], self._checksum)
        return drawn

    def _seeds(self) -> tuple[int, ...]:
        return (self._first_seed,)

    def _take(self, loads: Indices) -> Any:
        end = int(loads[: self._loop.rank + 1].sum())
        self._whole = self._buffer.take(int(loads.sum()))
        return self._buffer.cut(self._whole, end - int(loads[self._loop.rank]), end)

    def _put_back(self) -> None:
        self._buffer.back(self._whole)

    def _aim(self, load: int) -> int:
        return self._loop.terms.global_batch

    def _plan(self) -> Indices | None:
        loop, terms = self._loop, self._loop.terms
        loop.settle()  # the plan depends on the round before
        self._receive()
        held = self._supply["held"].astype(np.int64)
        if (held != held[0]).any():
            raise PacelineError(
                f"the ranks read {', '.join(map(str, held))} samples of a stream that they share; expected the same "
                "samples in the same order on every rank"
            )
        sums = self._supply["checksum"]
        if (sums != sums[0]).any():
            raise PacelineError(
                f"rank {int((sums != sums[0]).argmax())} has read other samples than rank 0 from a stream that they "
                "share; expected the same in the same order on every rank: seed its random numbers alike, for "
                "instance those of a shuffle buffer"
            )
        batch = int(min(held[0], terms.global_batch))
        if batch < (terms.global_batch if self._drop_last else terms.min_samples):
            self._finish(batch)
            return None
        self._empty = False
        return terms.balancer.loads(loop.progress.rounds, batch)
