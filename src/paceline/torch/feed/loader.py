"""The user's loader: this rank's micro-batches, round by round, cut by the plan in force.

A prefetching DataLoader draws its indices ahead of the rounds that use them, so a plan takes effect only as
many rounds later as the loader may draw ahead (its lag): then every rank cuts a round by the same plan, however
far its own loader has drawn.

Samples that are not known ahead are loaded by spans of the epoch's order: those that a rank claims within a round,
and all of a round that is divided among the members that are present when it begins.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.errors import PacelineError, meant, number, short, switches, whole
from paceline.rounds import Indices
from paceline.samples.cost import batch_parts
from paceline.torch.batches import aligned, part
from paceline.torch.elastic import recovery
from paceline.torch.elastic.recovery import MissingSamples
from paceline.torch.feed import same_data
from paceline.torch.feed.costs import Asked, agreed_dealer
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.feed.prefetch import Prefetch, draws, loaded
from paceline.torch.feed.rounds import iterate
from paceline.torch.hooks_of_torch import pin_memory
from paceline.torch.loop import Loop
from paceline.torch.plan import Claim, Piece, RoundPlan
from paceline.torch.terms import Terms


def check_indexed(dataset: Any, stream: str = "for a stream use pace.stream(...)") -> None:
    """Raises PacelineError for a stream, whose samples have no indices, and for an empty data set. stream: what to do
    for a stream."""
    indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")  # torch takes either
    if type(dataset).__module__.startswith("ray.data"):
        stream = "Ray Data splits it before training begins; give every worker the same indexed data set"
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise PacelineError(
            f"the data set is a {type(dataset).__name__} with the keys {short(list(dataset))}; expected indexed "
            "samples: torch.utils.data.TensorDataset(*data.values()) makes them of tensors"
        )
    if not (indexed and hasattr(dataset, "__len__")) or isinstance(dataset, IterableDataset):
        raise PacelineError(
            f"the data set is a {type(dataset).__name__}; expected one with a length and indexed items, of which "
            f"each rank can be given another part in each round: {stream}"
        )
    if len(dataset) == 0:
        raise PacelineError("the dataset is empty; expected at least one sample")


# Options of torch's DataLoader, up to version 2.15: those passed on unchanged, and those decided by the balancing.
HANDED_ON = (
    *("num_workers", "collate_fn", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)
DECIDED = ("batch_size", "sampler", "batch_sampler", "shuffle", "drop_last")


OUT_OF_ORDER = (
    "in_order=False gives batches in another order than the planned one, so that one would count as another; "
    "leave it out"
)


def check_options(options: Mapping[str, Any], global_batch: int, ranks: int, streamed: bool = False) -> None:
    """Raises PacelineError for options of DataLoader that the balancing decides, or that are unknown or wrong."""
    for name in options:
        if name not in HANDED_ON + DECIDED:
            raise PacelineError(
                f"this version of Paceline does not know whether {name}= leaves the samples of a batch as they are "
                f"planned; expected one of {', '.join(HANDED_ON)}{meant(name, HANDED_ON)}"
            )
    whole("num_workers", options.get("num_workers", 0), 0)
    if options.get("prefetch_factor") is not None:
        whole("prefetch_factor", options["prefetch_factor"])
    number("timeout", options.get("timeout", 0), "seconds, 0 or more", lambda seconds: 0 <= seconds < np.inf)
    if (collate := options.get("collate_fn")) is not None and not callable(collate):
        raise PacelineError(f"collate_fn={short(collate)}: expected a function that takes a list of samples")
    switches(**{name: options[name] for name in ("pin_memory", "persistent_workers") if name in options})
    if not (streamed or options.get("in_order", True)):
        raise PacelineError(OUT_OF_ORDER)
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


def check_sizes(samples: int, used: int, terms: Terms) -> None:
    """Raises PacelineError if rounds cannot divide an epoch, which uses so many of all samples."""
    batch, quantum = terms.batch, terms.quantum
    if not used:
        raise PacelineError(
            f"drop_last=True leaves nothing of {samples} samples, fewer than global_batch={batch}; leave it out, or "
            "choose a smaller batch"
        )
    short = used % batch
    if short % quantum:
        raise PacelineError(
            f"the last round of an epoch has {short} samples, which is no multiple of quantum={quantum}; use "
            "drop_last=True, which leaves it out, or another quantum"
        )
    if terms.min_samples <= short < terms.full:
        raise PacelineError(
            f"the last round of an epoch has {short} samples, too few for all ranks, and SyncBatchNorm would count "
            "the filler samples of a rank without work; use drop_last=True, which leaves it out"
        )


class BalancedLoader:
    """A loader of indexed data, to be iterated once an epoch. Made by ``Pace.loader``.

    Each full iteration is one epoch and moves on to the next one's order; ``set_epoch`` chooses another. If an
    iteration is left early, the next one begins a new round of the next epoch (of the same one if no round was done).

    number: of this loader among those of its Pace. samples: that an epoch uses. costs: ``cost``, ``padded`` and
    ``micro_batch_cost``; for these and the others see ``Pace.loader``. Constructing it is collective.
    """

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        number: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        costs: Asked,
        options: dict[str, Any],
    ) -> None:
        terms = loop.terms
        check_indexed(dataset)
        check_options(options, terms.batch, loop.ranks)
        switches(shuffle=shuffle, drop_last=drop_last, padded=costs[1])
        whole("seed", seed, 0, 2**63 - 1)
        self.dataset, self.number, self.order, self.more = dataset, number, (seed, shuffle), None
        self._loop, self._order = loop, Order(len(dataset), seed, shuffle)
        facts = {"samples": len(dataset), "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        factor = options.get("prefetch_factor")
        drawn = int(options.get("num_workers") or 0) * (2 if factor is None else int(factor))  # ahead
        lags = same_data.agree(dataset, facts | {"cost": "none" if costs[0] is None else "some"}, drawn)
        collate = options.pop("collate_fn", None) or default_collate
        step = loop.progress.rounds
        self._dealer = agreed_dealer(terms, dataset, collate, costs, step)
        self.samples = len(dataset) - (len(dataset) % terms.batch if drop_last else 0)
        check_sizes(len(dataset), self.samples, terms)
        # If members change, processes load at most the next round's part ahead.
        loop.drawn_ahead(min(max(lags), 1) if loop.changes else max(lags))
        self._pins = bool(options.get("pin_memory")) and torch.cuda.is_available()
        self._early = bool(options.get("num_workers"))  # processes load
        # Loaded beside the DataLoader: samples that are claimed or missing; and, if the DataLoader draws nothing
        # ahead, those planned for this round and the next.
        self._seeds = seed, loop.rank, number
        self._others = Prefetch(dataset, collate, options if terms.moves_work else {}, draws(*self._seeds, 1))
        self._ahead = Prefetch(dataset, collate, options if loop.changes else {}, draws(*self._seeds, 2))
        sampler, self._collate = _Sampler(self._batches), partial(_collated, dataset, collate)
        self._loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=self._collate, **options)
        self._draws = options.get("generator") is None
        self._queue: deque[Piece] = deque()
        # This epoch's order, and the same with each round's samples in the order in which they are dealt.
        self._drawn = self._indices = np.empty(0, np.int64)
        self._aligned, self._drops = aligned if terms.chunk else None, loop.drops
        self._source: Iterator[Any] = iter(())
        self._length: int | None = None  # rounds of the running iteration

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration, from its beginning."""
        self._loop.progress.choose(epoch)

    @property
    def sampler(self) -> BalancedLoader:
        """The object with ``set_epoch``, for programs that are written for DistributedSampler."""
        return self

    if not TYPE_CHECKING:  # which knows the attributes

        def __getattr__(self, name: str) -> Any:
            """Frameworks look for attributes that only a DataLoader has. Raises AttributeError."""
            raise AttributeError(
                f"{name!r}: a loader of Paceline is no DataLoader, since its batches are planned while they are "
                "drawn. Leave out what prepares loaders, such as prepare_data_loader. To continue within an epoch, "
                "load the state of the pace, and leave skip_first_batches out"
            )

    def __len__(self) -> int:
        """Micro-steps of the running iteration, or of the next one; rounds, if micro-steps differ between ranks."""
        rounds = self._loop.progress.ahead(self.samples) if self._length is None else self._length
        return rounds * (self._loop.terms.fixed_micro_steps or 1)

    def __iter__(self) -> Iterator[Any]:
        return iterate(self._loop, self)

    def close(self) -> None:
        """End the processes that load beside the DataLoader."""
        for each in (self._others, self._ahead):
            each.close()

    # -- the methods of a Source, for ``Loop`` ---------------------------------------------------------------

    def open(self) -> None:
        if (now := len(self.dataset)) != self._order.samples:
            raise PacelineError(
                f"the data set has {now} samples, and had {self._order.samples} when pace.loader() was called; "
                "expected the same: make a new loader for the changed data set"
            )
        loop = self._loop
        self._length = loop.progress.left
        self._drawn = self._order.epoch(loop.progress.epoch)
        self._indices = self._drawn.copy()
        self._queue.clear()
        if self._drops is not None:
            self._drops.again()
        for each in (self._others, self._ahead):
            each.reset()
        loop.claims_ahead(self._claimed if self._early else None, self._early)
        if not loop.changes:
            if self._draws:
                progress = loop.progress
                self._loader.generator = draws(*self._seeds, 0, progress.epoch, progress.samples_done)
            batches = iter(self._loader)
            self._source = batches if self._aligned is None else map(self._aligned, batches)

    def end(self) -> None:
        self._length = None
        # The DataLoader's processes end here. If this were left to the garbage collector, it would wait seconds for
        # each of them, since the queue through which it ends them is collected first.
        self._source = iter(())

    def planned(self) -> tuple[Any, Piece]:
        planned = next(self._source), self._queue.popleft()
        while self._drops is not None and planned[1].step == self._drops.cut:  # dropped, but loaded already
            planned = next(self._source), self._queue.popleft()
        return planned

    def claimed(self, claim: Claim) -> Iterator[Any]:
        at = claim.start
        for size in claim.sizes:
            yield self.load(at, size)
            at += size

    # -- if ranks may be lost or join: rounds are planned when they begin, and any samples can be loaded -----------

    def divided(self, step: int, first: int, size: int, among: NDArray[np.bool_] | None = None) -> RoundPlan:
        """The plan of round ``step``, which has ``size`` samples from ``first`` of the epoch's order on. among:
        whether each place takes part, (places,); by default all."""
        if self._dealer is None:
            return self._loop.terms.divided(step, size, first, among)
        self._indices[first : first + size] = self._drawn[first : first + size]
        return self._dealer.divided(step, self._indices, first, size, among)

    def pieces(self, plan: RoundPlan, first: int, among: NDArray[np.bool_]) -> list[Piece]:
        """This rank's planned pieces of a round whose samples begin at ``first``.

        Processes load them, and also the next round's, as they will be if the members stay the same; otherwise those
        are discarded."""
        pieces, samples = self._as_planned(plan, first)
        if self._early:
            self._ahead.expect(samples)
            for ahead, (start, size) in enumerate(islice(self._loop.progress.remaining(), 1, 2), 1):
                following = self.divided(plan.step + ahead, start, size, among)
                self._ahead.begin(self._as_planned(following, start)[1])
        return pieces

    def parts(self, plan: RoundPlan, first: int, missing: MissingSamples) -> list[Piece]:
        """The pieces of what is missing of a round whose samples begin at ``first``; the same on all members."""
        terms, deal = self._loop.terms, plan.deal
        spans, members, fits = missing
        if deal is None or self._dealer is None:
            cut = recovery.parts(spans, members, fits, terms.chunk or terms.quantum, terms.min_samples)
            return [Piece(plan, size, False, False, start=start) for start, size in cut]
        each = [deal.lengths[start - first :][:size] for start, size in spans]
        budget, pieces = self._dealer.budget, []
        cut = recovery.parts_by_cost(spans, each, deal.model, members, fits, budget, terms.min_samples)
        for start, size in cut:
            lengths = deal.lengths[start - first :][:size]
            parts = batch_parts(lengths, np.array([size]), deal.model.padded)
            pieces.append(Piece(plan, size, False, False, parts=parts, start=start))
        return pieces

    def load(self, start: int, size: int) -> Any:
        """The batch of ``size`` samples from ``start`` of the epoch's order; for 0, one that counts for nothing."""
        chosen = self._indices[start : start + size].copy()
        if not size and self._loop.terms.filled:
            # Samples of this round, see ``planned_pieces``.
            chosen = self._indices[self._loop.progress.samples_done :][: self._loop.terms.min_samples]
        if not (size and self._early):
            batch = loaded(self.dataset, self._collate, chosen.tolist())
        elif self._ahead.comes(chosen):
            batch = self._ahead.next(chosen)
        else:
            began = time.perf_counter()
            batch = self._others.next(chosen)
            self._loop.waited(time.perf_counter() - began)  # in the other branches loading is work
        batch = batch if self._aligned is None else self._aligned(batch)
        return pin_memory(batch) if self._pins else batch

    # -- internal --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[int]]:
        """The indices of this rank's micro-batches of the epoch; adds the piece of each one to ``_queue``."""
        loop, terms, indices = self._loop, self._loop.terms, self._indices
        step, balancer, append = loop.progress.rounds, terms.balancer, self._queue.append
        # The balancer's latest plan, the size, loads and cuts of a round that it divided alone: while there is no
        # later plan, rounds of this size are cut in the same way.
        latest: Any = None
        same_size, loads, cuts = 0, np.empty(0, np.int64), list[tuple[int, int, bool, bool]]()
        new: Any = tuple.__new__  # a named tuple's own takes twice as long
        for first, size in loop.progress.remaining():
            if balancer.latest is latest and size == same_size:
                plan = new(RoundPlan, (step, loads, size, None, None, 0))
                for at, many, begins, ends in cuts:
                    at += first
                    append(new(Piece, (plan, many, begins, ends, False, None, at)))
                    yield indices[at : at + many].tolist()
                step += 1
                continue
            latest = balancer.latest
            plan = self.divided(step, first, size)
            same_size, loads, cuts = size, plan.loads, []
            for chosen, piece in planned_pieces(terms, loop.rank, plan, first, indices, terms.filled):
                if self._drops is not None and step == self._drops.cut:
                    break
                cuts.append((piece.start - first, piece.samples, piece.first, piece.last))
                append(piece)
                yield chosen.tolist()
            # An empty micro-step may be filled with other samples of the round, which ``cuts`` does not have.
            whole = plan.division is None and self._dealer is None and all(many for _, many, *_ in cuts)
            if not whole or self._drops is not None or latest[0] > step:
                latest = None
            step += 1

    def _as_planned(self, plan: RoundPlan, first: int) -> tuple[list[Piece], list[Indices]]:
        """This rank's pieces of a round whose samples begin at ``first``, and the samples of each non-empty one."""
        loop = self._loop
        planned = planned_pieces(loop.terms, loop.rank, plan, first, self._indices, False)
        return [piece for _, piece in planned], [chosen.copy() for chosen, piece in planned if piece.samples]

    def _claimed(self, claim: Claim) -> None:
        samples = self._indices[claim.start :][: sum(claim.sizes)].copy()
        self._others.begin(np.split(samples, np.cumsum(claim.sizes)[:-1]))


def _collated(dataset: Any, collate: Callable[[Any], Any], samples: Any) -> Any:
    """A batch of these samples; if there are none, an empty batch with the shapes of a real one. samples: a list, or
    what the data set's ``__getitems__`` has made of it, such as a tensor."""
    if isinstance(samples, (list, tuple)) and not samples:
        return part(collate([dataset[0]]), 0, 0)
    return collate(samples)


class _Sampler:
    """A batch sampler with the batches of a function."""

    def __init__(self, drawn: Callable[[], Iterator[list[int]]]) -> None:
        self._drawn = drawn

    def __iter__(self) -> Iterator[list[int]]:
        return self._drawn()
