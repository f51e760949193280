"""The indices of this rank's batches, for a DataLoader of the user's own.

A micro-step begins where the DataLoader asks for indices: without worker processes those of the micro-step itself.
With them the DataLoader has drawn ``num_workers * prefetch_factor`` batches ahead, and asks for other indices with
each batch that it gives to the loop. After an epoch's last batch it asks for no more, so the end of such an epoch is
noticed later: when the state is saved, the next epoch begins, or the handle is closed.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

from paceline.errors import PacelineError, switches, whole
from paceline.torch.feed import same_data
from paceline.torch.feed.loader import OUT_OF_ORDER, check_indexed, check_sizes
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.hooks_of_torch import dataloader_iterator, each_batch
from paceline.torch.loop import Loop
from paceline.torch.plan import Piece
from paceline.torch.round import COMPLETE


class BalancedSampler:
    """A batch sampler for torch's DataLoader, to be iterated once an epoch. Made by ``Pace.batch_sampler``.

    Each full iteration is one epoch and moves on to the next one's order; ``set_epoch`` chooses another. If an
    iteration is left early, the next one begins a new round of the next epoch (of the same one if no round was done).

    number: of this sampler among the loaders of its Pace. samples: that an epoch uses. For the others see
    ``Pace.batch_sampler``. Constructing it is collective.
    """

    claimed = None  # rounds run as planned

    def __init__(
        self, loop: Loop, dataset: Any, number: int, seed: int, shuffle: bool, drop_last: bool, ahead: int
    ) -> None:
        terms = loop.terms
        if terms.loop != "whole":
            raise PacelineError(
                f"pace.batch_sampler() with loop={terms.loop!r}: a batch of a DataLoader is a whole round of this "
                "rank; use loop='whole', or pace.loader(dataset)"
            )
        check_indexed(dataset)
        switches(shuffle=shuffle, drop_last=drop_last)
        whole("seed", seed, 0, 2**63 - 1)
        whole("ahead", ahead, 0)
        self.dataset, self.number, self.order, self.more = dataset, number, (seed, shuffle), None
        self._loop, self._order, self._ahead = loop, Order(len(dataset), seed, shuffle), ahead
        facts = {"samples": len(dataset), "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        loop.drawn_ahead(max(same_data.agree(dataset, facts, ahead)))
        self.samples = len(dataset) - (len(dataset) % terms.batch if drop_last else 0)
        check_sizes(len(dataset), self.samples, terms)
        self._length: int | None = None  # rounds of the running iteration
        self._newest: weakref.ref[_Batches] | None = None
        self._cuts: Iterator[tuple[list[int], Piece]] = iter(())
        # What is drawn: indices that the DataLoader has not got yet, and pieces whose micro-steps have not begun.
        self._indices, self._pieces = deque[list[int]](), deque[Piece]()
        self._last: int | None = None  # the newest iteration's last round, once all is drawn
        self._over: int | None = None  # an epoch that is over, which the callbacks do not know yet

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration, from its beginning."""
        self.finish()
        self._loop.progress.choose(epoch)

    def __len__(self) -> int:
        """Batches of the running iteration, or of the next one."""
        self.finish()
        rounds = self._loop.progress.ahead(self.samples) if self._length is None else self._length
        return rounds * (self._loop.terms.fixed_micro_steps or 1)

    def __iter__(self) -> Iterator[list[int]]:
        each_batch(sys._getframe(1).f_locals.get("self"), self._loop.passes.received)
        return _Batches(self)

    def finish(self) -> None:
        """Begin the next epoch if the step of this one's last round has been taken. Not collective."""
        loop, progress, last = self._loop, self._loop.progress, self._last
        if last is None:
            return
        stepped = loop.round.phase == COMPLETE and loop.round.taken  # by the program itself
        if stepped and loop.round.running.step == last:
            loop.end_micro_step()
        if progress.rounds == last + 1 and progress.samples_done >= self.samples and not loop.in_round:
            self._over, self._last, self._length = progress.epoch, None, None
            progress.begin(progress.epoch + 1)

    def close(self) -> None:
        """End the newest iteration, and report an epoch that is over to the callbacks."""
        self._leave()
        if self._over is not None:
            self._loop.settle_last()
            self._loop.epoch_over(self._over)
            self._over = None

    # -- called by an iteration --------------------------------------------------------------------------------

    def enter(self, batches: _Batches, ahead: int) -> Generator[Any]:
        """An iteration begins, for a DataLoader that draws so many batches ahead: its micro-steps. Collective."""
        if ahead > self._ahead:
            raise PacelineError(
                f"the DataLoader draws {ahead} batches ahead (num_workers * prefetch_factor), and "
                f"pace.batch_sampler() was given ahead={self._ahead}; expected ahead={ahead}"
            )
        self._leave()
        if self._over is not None:
            over, self._over = self._over, None
            self._loop.flush()
            self._loop.epoch_over(over)
        self._newest = weakref.ref(batches)
        return self._loop.over(self)

    def begun(self) -> None:
        """A micro-step has begun. It does nothing; ``paceline verify`` puts its own function in its place."""

    def next(self) -> list[int]:
        """The indices of the next batch. Raises StopIteration after the last one."""
        if not self._indices:
            self._draw()
        if not self._indices:
            raise StopIteration
        return self._indices.popleft()

    # -- the methods of a Source, for ``Loop`` -----------------------------------------------------------------

    def open(self) -> None:
        if (now := len(self.dataset)) != self._order.samples:
            raise PacelineError(
                f"the data set has {now} samples, and had {self._order.samples} when pace.batch_sampler() was "
                "called; expected the same: make a new sampler for the changed data set"
            )
        self._length = self._loop.progress.left
        self._cuts, self._last = self._planned(), None
        self._indices.clear()
        self._pieces.clear()

    def end(self) -> None:
        self._length = None

    def planned(self) -> tuple[None, Piece]:
        if not self._pieces:
            self._draw()
        return None, self._pieces.popleft()

    # -- internal ----------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw one more batch, if the epoch has one."""
        for indices, piece in self._cuts:
            self._indices.append(indices)
            self._pieces.append(piece)
            return

    def _planned(self) -> Iterator[tuple[list[int], Piece]]:
        """This rank's indices of each micro-step of the epoch, by the plan in force when they are drawn."""
        loop, terms, progress = self._loop, self._loop.terms, self._loop.progress
        indices, step = self._order.epoch(progress.epoch), progress.rounds
        for first, size in progress.remaining():
            plan = terms.divided(step, size, first)
            for chosen, piece in planned_pieces(terms, loop.rank, plan, first, indices, terms.filled):
                yield chosen.tolist(), piece
            step += 1
        self._last = step - 1

    def _leave(self) -> None:
        """End the newest iteration."""
        self.finish()
        newest = None if self._newest is None else self._newest()
        if newest is not None:
            newest.micro_steps.close()


class _Batches:
    """One iteration over a sampler. ``micro_steps``: those of the loop; each is begun by a ``next``."""

    micro_steps: Generator[Any]

    def __init__(self, sampler: BalancedSampler) -> None:
        self._sampler = sampler
        self._asked = 0  # how often the DataLoader has asked for a batch
        self._ahead = 0  # batches that it draws before it gives the first one to the loop

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        asked, self._asked = self._asked, self._asked + 1
        if not asked:
            self._ahead = drawn_ahead(sys._getframe(1))
            self.micro_steps = self._sampler.enter(self, self._ahead)
        # The first micro-step begins with the first batch that is drawn, any other when the DataLoader gives its
        # batch to the loop: then the micro-step before it is over.
        if (not asked or asked > self._ahead) and next(self.micro_steps, self) is None:
            self._sampler.begun()
        return self._sampler.next()


def drawn_ahead(frame: FrameType) -> int:
    """The number of batches that the iterator of a DataLoader, in whose method this frame is, draws ahead. Raises
    PacelineError if it gives batches in another order than they were drawn in."""
    iterator: Any = frame.f_locals.get("self")
    in_order, ahead = dataloader_iterator(iterator)
    if not in_order:
        raise PacelineError(OUT_OF_ORDER)
    return ahead
