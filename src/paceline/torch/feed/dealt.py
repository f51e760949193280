"""Rounds of samples that cost differently: the same samples in each round as otherwise, dealt to the ranks by cost.

A round takes the next B samples of the epoch's order. They are put into the order in which they are dealt, rank after
rank, so that a rank's part is a slice of the epoch's order here, too, and all that knows of slices stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.rounds import Indices
from paceline.samples import CostLearner, Room, SampleCosts
from paceline.torch import options, peers
from paceline.torch.feed import lengths
from paceline.torch.plan import Division, RoundPlan
from paceline.torch.terms import Terms


class Dealer:
    """Divides the rounds of one loader; the same on every rank.

    padded: a micro-batch costs its size times its longest sample. budget: of a micro-batch, in the unit of the
    lengths: the sum of its lengths, or its size times the longest where it is padded; None for no limit.
    Raises PacelineError for what does not go together.
    """

    def __init__(self, terms: Terms, costs: SampleCosts, padded: bool, budget: float | None) -> None:
        options.check_dealt(
            budget,
            float(costs.lengths.max()),
            quantum=terms.quantum,
            cell=terms.cell,
            turns=terms.fixed_turns,
            floor=terms.floor,
        )
        self._terms, self._costs, self._padded = terms, costs, padded
        self._room = Room(
            micro_batch=terms.largest,
            budget=budget,
            turns=terms.fixed_turns,
            in_step=terms.in_step,
            floor=terms.floor,
        )

    def learn(self, step: int) -> None:
        """From round ``step`` on, learn what the samples cost; the first loader's unit is that of a run's others.

        Raises PacelineError where another loader of the run pads, and this one does not."""
        balancer, ranks = self._terms.balancer, len(self._terms.most)
        if balancer.learner is None:
            learner = CostLearner(self._costs, ranks, self._terms.global_batch, padded=self._padded)
            balancer.learn(learner, step)
        elif balancer.learner.padded != self._padded:
            raise PacelineError(
                f"padded={self._padded} here and padded={not self._padded} for another loader of this Pace; expected "
                "the same for both: make a Pace for each"
            )

    @property
    def budget(self) -> float:
        """Length of a micro-batch at most."""
        return np.inf if self._room.budget is None else self._room.budget

    def divided(
        self, step: int, order: Indices, first: int, size: int, present: NDArray[np.bool_] | None = None
    ) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` of the epoch's ``order``, put there in the order in
        which they are dealt: rank after rank, and then what is claimed.

        present: who takes part, (n,); by default all."""
        part = order[first : first + size]
        lengths, balancer = self._costs.lengths[part], self._terms.balancer
        pieces = balancer.in_pieces(step, lengths, present, self._room) if self._terms.moves_work else None
        dealt = balancer.deal(step, lengths, present, self._room) if pieces is None else pieces.own
        part[:] = part[dealt.order]
        piece_plan, division = self._terms.piece_plan(step, present), None
        if pieces is not None and piece_plan is not None:
            division = Division(
                pieces.first,
                pieces.kept,
                first + int(dealt.loads.sum()),
                len(pieces.pool.lengths),
                piece_plan,
                pieces.pool,
                pieces.kept_costs,
                pieces.whole,
            )
        return RoundPlan(step, dealt.loads, size, division, dealt)


def agreed_dealer(
    terms: Terms,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    cost: Any,
    padded: bool | None,
    budget: float | None,
    step: int,
) -> Dealer:
    """The dealer that a user asked for, see ``Pace.loader``, from round ``step`` on. Collective.

    Raises PacelineError, on every rank, for what cannot be, or differs.
    """

    def made() -> tuple[Dealer, dict[str, Any]]:
        costs = lengths.read(cost, dataset)
        pads = lengths.pads(dataset, collate, costs) if padded is None else bool(padded)
        facts = {"cost": lengths.digest(costs), "padded": pads, "micro_batch_cost": budget}
        return Dealer(terms, costs, pads, budget), facts

    dealer, facts = peers.together(made)
    peers.agree(facts)
    dealer.learn(step)
    return dealer
