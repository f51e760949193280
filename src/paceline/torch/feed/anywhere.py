"""A loader whose rank may be given any samples of a round: those of a rank that was lost, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from paceline.rounds import Indices
from paceline.samples.cost import batch_parts
from paceline.torch.elastic import orphans
from paceline.torch.elastic.leftover import Turn
from paceline.torch.elastic.orphans import Span
from paceline.torch.elastic.running import Missing
from paceline.torch.elastic.turns import ElasticTurns
from paceline.torch.feed.dealt import Dealer
from paceline.torch.feed.fetching import fetcher
from paceline.torch.feed.loader import BalancedLoader, _EmptyToo, _pinned
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.plan import Piece, RoundPlan


class ElasticLoader(BalancedLoader):
    """As its base; what it loads is known when a round begins, and nothing is loaded ahead of that."""

    def __init__(
        self,
        turns: ElasticTurns,
        dataset: Any,
        order: Order,
        number: int,
        drop_last: bool,
        options: dict[str, Any],
        dealer: Dealer | None = None,
    ) -> None:
        given = dict(options)
        super().__init__(turns, dataset, order, number, drop_last, options)
        self._dealer = dealer
        collate = given.pop("collate_fn", None) or default_collate
        self._fetcher = fetcher(dataset, _EmptyToo(dataset, collate), given)
        # The epoch's order, and the same with the running round's samples as they are dealt.
        self._order, self._drawn, self._indices = order, np.empty(0, np.int64), np.empty(0, np.int64)

    def open(self) -> None:
        self._length = sum(1 for _ in self._turns.progress.remaining())
        self._drawn = self._order.epoch(self._turns.progress.epoch)
        self._indices = self._drawn.copy()

    def divided(self, step: int, first: int, size: int, among: NDArray[np.bool_]) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` of the epoch's order on; among: places, (places,)."""
        terms = self._turns.terms
        if self._dealer is None:
            return terms.divided(step, terms.balancer.loads(step, size, among), first, among)
        self._indices[first : first + size] = self._drawn[first : first + size]
        return self._dealer.divided(step, self._indices, first, size, among)

    def pieces(self, plan: RoundPlan) -> Iterator[Piece]:
        """This rank's turns of a round as planned."""
        turns = self._turns
        every = np.arange(plan.batch)
        return (piece for _, piece in planned_pieces(turns.terms, turns.rank, plan, 0, every, False))

    def parts(self, plan: RoundPlan, first: int, missing: Missing) -> list[Turn]:
        """What is missing of a round whose samples begin at ``first``, as turns: the same on all members."""
        terms, deal = self._turns.terms, plan.deal
        spans, members, fits = missing
        if deal is None or self._dealer is None:
            cut = orphans.parts(spans, members, fits, terms.cell or terms.quantum, terms.floor)
            return [(span, Piece(plan, span[1], False, False)) for span in cut]
        each = [deal.lengths[start - first :][:size] for start, size in spans]
        turns: list[Turn] = []
        for span in orphans.parts_by_cost(
            spans, each, deal.model, members, fits, self._dealer.budget, terms.floor
        ):
            lengths = deal.lengths[span[0] - first :][: span[1]]
            parts = batch_parts(lengths, np.array([span[1]]), deal.model.padded)
            turns.append((span, Piece(plan, span[1], False, False, parts=parts)))
        return turns

    def load(self, span: Span | None) -> Any:
        """A batch of these samples of the epoch's order; for None one that counts for nothing."""
        assert self._fetcher is not None
        terms = self._turns.terms
        filler: Indices = self._indices[: terms.floor if terms.fills else 0]
        chosen = filler if span is None else self._indices[span[0] : span[0] + span[1]]
        self._fetcher.begin([chosen])
        batch = self._laid(self._fetcher.next(chosen))
        return _pinned(batch) if self._pins else batch
