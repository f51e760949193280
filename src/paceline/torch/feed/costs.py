"""Divides rounds whose samples cost differently: each round has the same samples as without costs, dealt by cost.

A round takes the next B samples of the epoch's order. They are put into the order in which they are dealt, rank after
rank, so that a rank's part is a slice of the epoch's order here, too, and code that works on slices needs no change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError, refuse, short
from paceline.rounds import Array, Indices
from paceline.samples import CostLearner, Room, SampleCosts
from paceline.torch import peers
from paceline.torch.batches import tensors
from paceline.torch.plan import Division, RoundPlan
from paceline.torch.terms import Terms

Asked = tuple[Any, bool | None, float | None]  # cost, padded and micro_batch_cost of ``Pace.loader``


def read(cost: Any, dataset: Any) -> SampleCosts:
    """Read the lengths of all samples, once.

    cost: N positive numbers; a function of a sample's index that gives one; or the name of a column, an attribute or
        an item's field, which holds for each sample a number, or an object whose length counts.
    Raises PacelineError for anything else.
    """
    samples = len(dataset)
    if isinstance(cost, str):
        return SampleCosts.checked(_named(cost, dataset, samples), samples, f"cost={cost!r}")
    if callable(cost):
        return SampleCosts.checked([_number(cost(index)) for index in range(samples)], samples, "cost")
    if isinstance(cost, torch.Tensor):
        cost = cost.detach().cpu().numpy()
    return SampleCosts.checked(cost, samples)


def pads(dataset: Any, collate: Callable[[list[Any]], Any], costs: SampleCosts) -> bool:
    """Whether ``collate`` pads a batch to its longest sample, found by trying the shortest and the longest one.

    False for a collate function that cannot take the two together, or whose batches have no tensors.
    """
    short_one, long_one = int(costs.lengths.argmin()), int(costs.lengths.argmax())
    if costs.lengths[short_one] == costs.lengths[long_one]:
        return False
    try:
        tried = [dataset[short_one]], [dataset[long_one]], [dataset[short_one], dataset[long_one]]
        short_alone, long_alone, both = (sum(one.numel() for one in tensors(collate(each))) for each in tried)
    except Exception:  # a user's function may raise anything if it is not made for different lengths
        return False
    return short_alone < long_alone and both >= 2 * long_alone


def _named(name: str, dataset: Any, samples: int) -> Array:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list | tuple):
        if name not in columns:
            raise PacelineError(
                f"cost={name!r}: the data set has the columns {', '.join(map(str, columns))}; expected one of them"
            )
        return np.array([_number(value) for value in dataset[name]])
    whole = getattr(dataset, name, None)
    if whole is not None and hasattr(whole, "__len__") and len(whole) == samples:
        return np.array([_number(value) for value in whole])
    found = []
    for index in range(samples):
        item = dataset[index]
        value = item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
        if value is None:
            raise PacelineError(
                f"cost={name!r}: sample {index} has no field of that name, nor has the data set; expected the "
                "name of a column or field, one number for each sample, or a function of its index"
            )
        found.append(_number(value))
    return np.array(found)


def _number(value: Any) -> float:
    """The value itself if it is a number, the length of anything that has one, else NaN."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        return float(value)
    if hasattr(value, "__len__") and not isinstance(value, str | bytes):
        return float(len(value))
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")  # which ``SampleCosts.checked`` refuses, with the sample's index


class Dealer:
    """Divides the rounds of one loader; the same on every rank.

    padded: a micro-batch costs its size times its longest sample. budget: the largest cost of a micro-batch, in the
    unit of the lengths: the sum of its lengths, or its size times the longest if it is padded; None for no limit.
    Raises PacelineError for options that cannot be combined.
    """

    def __init__(self, terms: Terms, costs: SampleCosts, padded: bool, budget: float | None) -> None:
        self._terms, self._costs, self._padded = terms, costs, padded
        self._check(budget)
        self._room = Room(
            micro_batch=terms.largest,
            budget=np.inf if budget is None else float(budget),
            micro_steps=terms.fixed_micro_steps,
            lockstep=terms.lockstep,
            min_samples=terms.min_samples,
        )
        self.budget = self._room.budget  # of a micro-batch, infinite for no limit

    def learn(self, step: int) -> None:
        """From round ``step`` on, learn what the samples cost. All loaders of a run use the unit of the first one.

        Raises PacelineError if another loader of the run pads, and this one does not."""
        balancer, ranks = self._terms.balancer, len(self._terms.most)
        if balancer.learner is None:
            learner = CostLearner(self._costs, ranks, self._terms.global_batch, padded=self._padded)
            balancer.learn(learner, step)
        elif balancer.learner.padded != self._padded:
            raise PacelineError(
                f"padded={self._padded} here and padded={not self._padded} for another loader of this Pace; expected "
                "the same for both: make a Pace for each"
            )

    def divided(
        self, step: int, order: Indices, first: int, size: int, present: NDArray[np.bool_] | None = None
    ) -> RoundPlan:
        """Divide round ``step``, which has ``size`` samples from ``first`` of the epoch's ``order`` on, and put them
        there in the order in which they are dealt: rank after rank, and then the samples to be claimed.

        present: whether each rank takes part, (n,); by default all."""
        part = order[first : first + size]
        lengths, balancer = self._costs.lengths[part], self._terms.balancer
        pieces = balancer.in_pieces(step, lengths, present, self._room) if self._terms.moves_work else None
        dealt = balancer.deal(step, lengths, present, self._room) if pieces is None else pieces.own
        part[:] = part[dealt.order]
        piece_plan, division = self._terms.piece_plan(step, present), None
        if pieces is not None and piece_plan is not None:
            _, at_once, kept, costs, pool, whole = pieces
            start = first + int(dealt.loads.sum())
            division = Division(at_once, kept, start, len(pool.lengths), piece_plan, pool, costs, whole)
        return RoundPlan(step, dealt.loads, size, division, dealt, first)

    def _check(self, budget: Any) -> None:
        """Raises PacelineError if rounds cannot be divided by cost, or not with this budget for a micro-batch."""
        terms, longest = self._terms, float(self._costs.lengths.max())
        if terms.chunk or terms.quantum > 1:
            wrong = "deterministic=True" if terms.chunk else f"quantum={terms.quantum}"
            raise PacelineError(
                f"{wrong} counts samples, and cost= divides by what they cost; leave one of them out"
            )
        if budget is None:
            return
        number = isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool)
        small = not number or not longest <= budget < np.inf
        micro_steps, least = terms.fixed_micro_steps, 2 * terms.min_samples - 1
        reasons = {
            f"expected a number of at least {longest:g}, the cost of the longest sample": small,
            f"the model has batch norm, which needs {terms.min_samples} samples in every micro-batch; expected at "
            f"least {least * longest:g}, {least} times the longest sample": not small
            and budget < least * longest,
            f"it cuts a rank's part into as many micro-batches as it takes, and this loop takes {micro_steps} a "
            "round; use loop='round' and pace.round(batch, function), or leave it out": micro_steps,
        }
        refuse(f"micro_batch_cost={short(budget)}", reasons)


def agreed_dealer(
    terms: Terms, dataset: Any, collate: Callable[[list[Any]], Any], asked: Asked, step: int
) -> Dealer | None:
    """The dealer that a user's options ask for, from round ``step`` on; None without costs. Collective.

    Raises PacelineError, on every rank, for options that are wrong, or differ between ranks.
    """
    cost, padded, budget = asked
    if cost is None:
        if padded is not None or budget is not None:
            raise PacelineError("padded= and micro_batch_cost= say how cost= counts; expected cost=, too")
        return None

    def made() -> tuple[Dealer, dict[str, Any]]:
        costs = read(cost, dataset)
        fills_up = pads(dataset, collate, costs) if padded is None else bool(padded)
        digest = hashlib.sha256(np.ascontiguousarray(costs.lengths).tobytes()).hexdigest()[:16]
        facts = {"cost": digest, "padded": fills_up, "micro_batch_cost": budget}
        return Dealer(terms, costs, fills_up, budget), facts

    dealer, facts = peers.together(made)
    peers.agree(facts)
    dealer.learn(step)
    return dealer
