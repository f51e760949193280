"""A loader whose rank may be given any samples of a round: those of a rank that was lost, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from paceline.rounds import Indices
from paceline.torch.elastic.orphans import Span
from paceline.torch.elastic.turns import ElasticTurns
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
    ) -> None:
        given = dict(options)
        super().__init__(turns, dataset, order, number, drop_last, options)
        collate = given.pop("collate_fn", None) or default_collate
        self._fetcher = fetcher(dataset, _EmptyToo(dataset, collate), given)
        self._order, self._indices = order, np.empty(0, np.int64)

    def open(self) -> None:
        self._length = sum(1 for _ in self._turns.progress.remaining())
        self._indices = self._order.epoch(self._turns.progress.epoch)

    def pieces(self, plan: RoundPlan) -> Iterator[Piece]:
        """This rank's turns of a round as planned."""
        turns = self._turns
        every = np.arange(plan.batch)
        return (piece for _, piece in planned_pieces(turns.terms, turns.rank, plan, 0, every, False))

    def load(self, span: Span | None) -> Any:
        """A batch of these samples of the epoch's order; for None one that counts for nothing."""
        assert self._fetcher is not None
        terms = self._turns.terms
        filler: Indices = self._indices[: terms.floor if terms.fills else 0]
        chosen = filler if span is None else self._indices[span[0] : span[0] + span[1]]
        self._fetcher.begin([chosen])
        batch = self._fetcher.next(chosen)
        return _pinned(batch) if self._pins else batch
