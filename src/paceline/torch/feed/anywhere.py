"""A loader whose rank may be given any samples of a round: those of a rank that was lost, too."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from paceline.rounds import Indices
from paceline.samples.cost import batch_parts
from paceline.torch.elastic import recovery
from paceline.torch.elastic.loop import ElasticLoop
from paceline.torch.elastic.recovery import MicroStep, Missing, Span
from paceline.torch.feed.costs import Dealer
from paceline.torch.feed.loader import BalancedLoader, _EmptyToo, _pinned
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.feed.prefetch import Here, Prefetch, fetcher
from paceline.torch.plan import Claim, Piece, RoundPlan


class ElasticLoader(BalancedLoader):
    """As its base. Where processes load, they load the next round's part of this rank while a round runs, as it will
    be if the members stay the same; what is loaded for nothing is thrown away."""

    def __init__(
        self,
        loop: ElasticLoop,
        dataset: Any,
        order: Order,
        number: int,
        drop_last: bool,
        options: dict[str, Any],
        dealer: Dealer | None = None,
    ) -> None:
        given = dict(options)
        super().__init__(loop, dataset, order, number, drop_last, options)
        collate = given.pop("collate_fn", None) or default_collate
        self._here = Here(dataset, _EmptyToo(dataset, collate))
        # Where processes load: what is planned, in this round and the next; and what is claimed.
        self._planned = Prefetch(fetcher(dataset, collate, given))
        self._others = Prefetch(self._fetcher or self._here)
        self._dealer = dealer
        # The epoch's order, and the same with the running round's samples as they are dealt.
        self._drawn, self._indices = np.empty(0, np.int64), np.empty(0, np.int64)

    def open(self) -> None:
        self._check_length()
        loop = self._loop
        self._length = loop.progress.left
        self._drawn = self._order.epoch(loop.progress.epoch)
        self._indices = self._drawn.copy()
        if self._early and loop.terms.moves_work:
            loop.claims_ahead(self._claimed, True)
        for each in (self._planned, self._others):
            each.reset()

    def close(self) -> None:
        """No more samples."""
        for each in (self._planned, self._others):
            each.close()

    def divided(self, step: int, first: int, size: int, among: NDArray[np.bool_]) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` of the epoch's order on; among: places, (places,)."""
        terms = self._loop.terms
        if self._dealer is None:
            return terms.divided(step, terms.balancer.loads(step, size, among), first, among)
        self._indices[first : first + size] = self._drawn[first : first + size]
        return self._dealer.divided(step, self._indices, first, size, among)

    def pieces(self, plan: RoundPlan, first: int, among: NDArray[np.bool_]) -> list[MicroStep]:
        """This rank's micro-steps of a round as planned, whose samples begin at ``first``."""
        micro_steps = self._cut_as_planned(plan, first)
        if self._early:
            wanted = [self._of(span) for span, _ in micro_steps if span is not None]
            self._planned.expect(wanted)
            for ahead, (start, size) in enumerate(islice(self._loop.progress.remaining(), 1, 2), 1):
                following = self._cut_as_planned(self.divided(plan.step + ahead, start, size, among), start)
                self._planned.begin([self._of(span) for span, _ in following if span is not None])
        return micro_steps

    def parts(self, plan: RoundPlan, first: int, missing: Missing) -> list[MicroStep]:
        """What is missing of a round whose samples begin at ``first``, as micro-steps: the same on all members."""
        terms, deal = self._loop.terms, plan.deal
        spans, members, fits = missing
        if deal is None or self._dealer is None:
            cut = recovery.parts(spans, members, fits, terms.cell or terms.quantum, terms.floor)
            return [(span, Piece(plan, span[1], False, False)) for span in cut]
        each = [deal.lengths[start - first :][:size] for start, size in spans]
        micro_steps: list[MicroStep] = []
        for span in recovery.parts_by_cost(
            spans, each, deal.model, members, fits, self._dealer.budget, terms.floor
        ):
            lengths = deal.lengths[span[0] - first :][: span[1]]
            parts = batch_parts(lengths, np.array([span[1]]), deal.model.padded)
            micro_steps.append((span, Piece(plan, span[1], False, False, parts=parts)))
        return micro_steps

    def load(self, span: Span | None) -> Any:
        """A batch of these samples of the epoch's order; for None one that counts for nothing."""
        terms = self._loop.terms
        if span is None or not self._early:
            filler: Indices = self._indices[: terms.floor if terms.fills else 0]
            batch = self._here.next(filler if span is None else self._of(span))
        elif self._planned.comes(chosen := self._of(span)):
            batch = self._planned.next(chosen)
        else:
            began = time.perf_counter()
            batch = self._others.next(chosen)
            self._loop.waited(time.perf_counter() - began)
        batch = self._laid(batch)
        return _pinned(batch) if self._pins else batch

    # -- within ----------------------------------------------------------------------------------------------

    def _of(self, span: Span) -> Indices:
        return self._indices[span[0] : span[0] + span[1]].copy()

    def _cut_as_planned(self, plan: RoundPlan, first: int) -> list[MicroStep]:
        terms, rank, division = self._loop.terms, self._loop.rank, plan.division
        own = plan.loads if division is None else division.first + division.kept
        start, micro_steps = first + int(own[:rank].sum()), []
        for _, piece in planned_pieces(terms, rank, plan, 0, np.arange(plan.batch), False):
            micro_steps.append(((start, piece.samples) if piece.samples else None, piece))
            start += piece.samples
        return micro_steps

    def _claimed(self, claim: Claim) -> None:
        """Called from the thread that claims."""
        at = claim.start
        for size in claim.sizes:
            self._others.begin([self._of((at, size))])
            at += size
