"""The user's loader: this rank's micro-batches, round by round, cut by the plan in force.

A prefetching DataLoader draws its indices ahead of the rounds that use them, so a plan takes effect only as
many rounds later as the loader may draw ahead (its lag): then every rank cuts a round by the same plan, however
far its own loader happens to be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.errors import PacelineError, meant
from paceline.rounds import Indices
from paceline.torch.feed.costs import Dealer
from paceline.torch.feed.nested import aligned, nothing_of
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.feed.prefetch import as_it_is, fetcher
from paceline.torch.feed.rounds import iterate
from paceline.torch.loop import Loop
from paceline.torch.plan import Claim, Piece, RoundPlan


def draws_ahead(options: Mapping[str, Any]) -> int:
    """Micro-batches that a DataLoader with these options draws before they are used."""
    workers = int(options.get("num_workers") or 0)
    factor = options.get("prefetch_factor")
    return workers * (2 if factor is None else int(factor))


def is_indexed(dataset: Any) -> bool:
    """False for a stream, whose samples can't be told apart beforehand."""
    indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")  # torch takes either
    return indexed and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def check_indexed(dataset: Any) -> None:
    """Raises PacelineError for a stream."""
    if not is_indexed(dataset):
        raise PacelineError(
            f"the data set is a {type(dataset).__name__}; expected one with a length and indexed items, of which "
            "each rank can be given another part in each round: for a stream use pace.stream(...)"
        )


# Options of torch's DataLoader, up to its version 2.15: handed on as they are, and decided by the balancing.
HANDED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)
DECIDED = ("batch_size", "sampler", "batch_sampler", "shuffle", "drop_last")


def check_options(options: Mapping[str, Any], global_batch: int, ranks: int, streamed: bool = False) -> None:
    """Raises PacelineError for options of DataLoader that the balancing decides, or that nobody has tried."""
    for name in options:
        if name not in HANDED_ON + DECIDED:
            raise PacelineError(
                f"{name}= is no option that this version of Paceline knows to leave the samples of a batch as they "
                f"are planned; expected one of {', '.join(HANDED_ON)}{meant(name, HANDED_ON)}"
            )
    if not (streamed or options.get("in_order", True)):
        raise PacelineError(
            "in_order=False hands over batches in another order than they are planned in, so that each would count "
            "as another one; leave it out"
        )
    if "batch_size" in options:
        each = options["batch_size"]
        instead = (
            f"for {each} samples a rank on average write Pace(..., global_batch={each * ranks})"
            if isinstance(each, int)
            else f"global_batch={global_batch} says how many samples all ranks take together"
        )
        raise PacelineError(
            f"batch_size={each} is what Paceline decides for each rank; leave it out: {instead}"
        )
    for name in ("sampler", "batch_sampler"):
        if name in options:
            raise PacelineError(
                f"{name}= is what Paceline replaces, so that each rank's part can change; leave it out: shuffle= and "
                "seed= choose the order; torch.utils.data.Subset(dataset, indices) with shuffle=False takes your own"
            )
    if streamed and "shuffle" in options:
        raise PacelineError(
            "shuffle= is for indexed data; a stream comes in its own order: shuffle it at its source"
        )


class BalancedLoader:
    """Iterate it once an epoch. Made by ``Pace.loader``.

    Each full iteration is one epoch and moves on to the next one's order; ``set_epoch`` chooses another. Where an
    iteration is left early, the next one begins a fresh round of the next epoch (of the same one where no round of
    it was done).

    dataset: what it loads from. number: of this loader among those of its Pace. samples: that an epoch uses. dealer:
    divides its rounds by what the samples cost, where they cost differently.
    """

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        order: Order,
        number: int,
        drop_last: bool,
        options: dict[str, Any],
        dealer: Dealer | None = None,
    ) -> None:
        terms = loop.terms
        self.dataset, self.number = dataset, number
        self.samples = order.samples - (order.samples % terms.global_batch if drop_last else 0)
        self._check_sizes(terms.global_batch, terms.quantum)
        self._loop, self._order = loop, order
        self._sampler = _Sampler(loop, order, dealer)
        self._pins = bool(options.get("pin_memory")) and torch.cuda.is_available()
        collate = options.pop("collate_fn", None) or default_collate
        self._early = bool(options.get("num_workers"))
        self._fetcher = fetcher(dataset, collate, options) if terms.moves_work else None
        collate = _EmptyToo(dataset, collate)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, collate_fn=collate, **options)
        self._laid = aligned if terms.cell else as_it_is
        self._source: Iterator[Any] = iter(())
        self._length: int | None = None  # rounds of the running iteration

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch in the next iteration, from its beginning."""
        self._loop.progress.choose(epoch)

    @property
    def sampler(self) -> BalancedLoader:
        """Where programs written for DistributedSampler look for ``set_epoch``."""
        return self

    def __len__(self) -> int:
        """Micro-steps of the running iteration, or else of the next one; rounds, where those differ from rank to
        rank."""
        rounds = self._length
        if rounds is None:
            rounds = self._loop.progress.ahead(self.samples)
        return rounds * (self._loop.terms.fixed_micro_steps or 1)

    def __iter__(self) -> Iterator[Any]:
        return iterate(self._loop, self)

    def close(self) -> None:
        """No more claims."""
        if self._fetcher is not None:
            self._fetcher.close()

    # -- what Loop ask of a Source ----------------------------------------------------------------------------

    def open(self) -> None:
        self._check_length()
        self._length = self._loop.progress.left
        self._sampler.queue.clear()
        if self._fetcher is not None:
            self._loop.claims_ahead(self._claimed, self._early)
            self._fetcher.reset()
        self._source = iter(self._loader)

    def end(self) -> None:
        self._length = None
        # Its processes end here. Left to the garbage collector, each of them is waited for by seconds: the queue by
        # which it would be told is collected first.
        self._source = iter(())

    def more(self) -> bool:
        return self._loop.progress.samples_done < self.samples

    def planned(self) -> tuple[Any, Piece]:
        batch = next(self._source)
        return self._laid(batch), self._sampler.queue.popleft()

    def claimed(self, claim: Claim) -> Iterator[Any]:
        for micro_step in self._cut(claim):
            yield self._laid(self._fetch(micro_step))

    # -- within ----------------------------------------------------------------------------------------------

    def _check_length(self) -> None:
        if (now := len(self.dataset)) != self._order.samples:
            raise PacelineError(
                f"the data set has {now} samples, and had {self._order.samples} when pace.loader() was called; "
                "expected the same: make a loader of the data set as it is now"
            )

    def _check_sizes(self, batch: int, quantum: int) -> None:
        if not self.samples:
            raise PacelineError(
                f"drop_last=True leaves nothing of {len(self.dataset)} samples, fewer than global_batch="
                f"{batch}; leave it out, or choose a smaller batch"
            )
        short = self.samples % batch
        if short % quantum:
            raise PacelineError(
                f"the last round of an epoch has {short} samples, which is no multiple of quantum={quantum}; use "
                "drop_last=True, which leaves it out, or another quantum"
            )

    def _cut(self, claim: Claim) -> list[Indices]:
        """What is claimed, cut into micro-steps."""
        micro_steps, at = [], claim.start
        for size in claim.sizes:
            micro_steps.append(self._sampler.indices[at : at + size])
            at += size
        return micro_steps

    def _claimed(self, claim: Claim) -> None:
        """Called from the thread that claims."""
        assert self._fetcher is not None
        self._fetcher.begin(self._cut(claim))

    def _fetch(self, micro_step: Indices) -> Any:
        assert self._fetcher is not None
        began = time.perf_counter()
        batch = self._fetcher.next(micro_step)
        if self._loader.num_workers:  # else loading is work like any other
            self._loop.waited(time.perf_counter() - began)
        return _pinned(batch) if self._pins else batch


class _EmptyToo:
    """A collate function that can also make an empty batch, with the shapes of a real one."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else nothing_of(self._collate([self._dataset[0]]))


class _Sampler:
    """Yields the indices of this rank's micro-batches, and keeps beside them what each one is."""

    def __init__(self, loop: Loop, order: Order, dealer: Dealer | None) -> None:
        self._loop, self._order, self._dealer = loop, order, dealer
        self.queue: deque[Piece] = deque()
        self.indices: Indices = np.empty(0, np.int64)  # this epoch's order

    def __iter__(self) -> Iterator[list[int]]:
        loop, terms = self._loop, self._loop.terms
        self.indices = indices = self._order.epoch(loop.progress.epoch)
        step = loop.progress.rounds
        plan_of, append = terms.balancer.plan, self.queue.append
        # What the round before was cut by, its size, loads and cuts, if this one may be cut as it was.
        before: Any = None
        before_size, loads, cuts = 0, np.empty(0, np.int64), list[tuple[int, int, bool, bool]]()
        for first, size in loop.progress.remaining():
            by = plan_of(step)
            if before is by and before_size == size:
                plan = RoundPlan(step, loads, size)
                for at, many, begins, ends in cuts:
                    append(Piece(plan, many, begins, ends))
                    at += first
                    yield indices[at : at + many].tolist()
                step += 1
                continue
            if self._dealer is None:
                plan = terms.divided(step, terms.balancer.loads(step, size), first)
            else:
                plan = self._dealer.divided(step, indices, first, size)
            at, cuts = int(plan.loads[: loop.rank].sum()), []
            for chosen, piece in planned_pieces(terms, loop.rank, plan, first, indices, terms.fills):
                cuts.append((at, piece.samples, piece.first, piece.last))
                at += piece.samples
                append(piece)
                yield chosen.tolist()
            whole = plan.division is None and self._dealer is None and plan.loads[loop.rank] > 0
            before, before_size, loads = by if whole else None, size, plan.loads
            step += 1


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
