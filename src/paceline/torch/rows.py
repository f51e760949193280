"""The rows in which ranks report their rounds to each other: their layout, and whether what they report agrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.torch import piece_reports
from paceline.torch.exchange import Rows
from paceline.torch.liveness.stall import named

MOST_ROUNDS = 64  # of an interval
OPTIONS_DIFFER = 1e-4  # numbers made from many options, each of which may be rounded
RATES_DIFFER = 1e-6  # different processors may round a schedule's cosine differently
OUTSIDE_DIFFER = 1e-5  # squares of parameters that each rank trains by itself: processors round differently
SAME = ["rounds", "first", "digest", "epoch", "left", "rate", "options", "outside"]  # on all ranks


def fields(rounds: int) -> list[Any]:
    """The fields of a rank's report of an interval of at most ``rounds`` rounds, in the order of ``Meter._row``."""
    return [
        ("first", "f8"),  # round of the interval
        ("rounds", "f8"),  # in the interval; 0 if there is no reading yet
        ("digest", "f8"),  # of the plan in force
        ("epoch", "f8"),  # of the newest round; -1 if there is no reading yet
        ("left", "f8"),  # rounds so far whose optimizer step was left out on purpose
        ("deciding", "f8"),  # processor seconds that the newest decision took
        ("overhead", "f8"),  # mean seconds of the optimizer step before each round, measured apart
        ("rate", "f8"),  # learning rate of the rank's optimizer; NaN before the first step
        ("options", "f8"),  # a number made from all options of its optimizers; NaN before the first step
        ("outside", "f8"),  # a number made from parameters of the loss outside of the model; 0 for none
        ("model", "f8"),  # a number made from the model's parameters; NaN if unknown
        ("has_loss", "f8"),  # 1 if the rank reported its losses, else 0
        ("fits", "f8"),  # samples that fit into the rank's memory; NaN if unknown
        ("ran_out", "f8"),  # passes so far that ran out of memory
        ("cpu", "f8"),  # portion of the machine's processors left by other processes; NaN if not requested
        ("memory", "f8"),  # portion of memory that is free; NaN if not requested
        ("link", "f8"),  # seconds of the newest merge, or of a round beyond the rank's own; NaN if unknown
        ("seconds", "f8", (rounds,)),  # of each round
        ("loss", "f8", (rounds,)),  # summed over the rank's samples; NaN if the rank did not report its loss
        # What the loss is a sum over, if that is something other than samples; else NaN.
        ("count", "f8", (rounds,)),
    ]


def layout(pieces: bool, by_itself: bool = False) -> np.dtype[np.void]:
    """The dtype of a rank's row. pieces: work may move within a round. by_itself: the row reports one round, in which
    other ranks may run the part of a lost rank, or a late rank may drop some of its own."""
    if pieces:
        tail: list[Any] = [("pieces", piece_reports.ROW)]
    else:
        tail = [("samples", "f8"), ("parts", "f8", (3,))] if by_itself else []
    return np.dtype([*fields(1 if by_itself else MOST_ROUNDS), *tail])


def check_same(step: int, rows: Rows) -> None:
    """Raises PacelineError if the ranks' ``rows``, (n,), which report rounds up to ``step``, do not agree."""
    for name, wrong in (
        ("digest", "decided another plan than the other ranks"),
        ("first", "reports other rounds than the other ranks"),
        ("rounds", "reports another number of rounds than the other ranks"),
        ("epoch", "is in another epoch than the other ranks"),
        ("left", "has left out another number of optimizer steps than the other ranks"),
    ):
        values = rows[name]
        if (values != values[0]).any():
            odd = np.flatnonzero(values != np.median(values))
            ranks = odd if odd.size else np.flatnonzero(values != values[0])
            raise PacelineError(
                f"rank {', '.join(map(str, ranks))} {wrong} before round {step + 1}; expected the same "
                "everywhere: check that all ranks run the same version and options, and the same rounds"
            )
    check_rates(step, rows["rate"].tolist())


def check_counts(step: int, counts: list[float]) -> None:
    """Raises PacelineError if some ranks gave a count in a round and others, whose count is NaN, did not."""
    without = [rank for rank, count in enumerate(counts) if math.isnan(count)]
    if 0 < len(without) < len(counts):
        given = [rank for rank in range(len(counts)) if rank not in without]
        raise PacelineError(
            f"round {step}: {named(given)} gave a count with the loss, and {named(without)} did not; expected count= "
            "on all ranks or on none"
        )


def check_options(step: int, values: list[float], described: Callable[[], str]) -> None:
    """Raises PacelineError if the options of the ranks' optimizers differ by more than rounding; NaN for one that is
    unknown. described: gives this rank's options."""
    known = sorted((value, rank) for rank, value in enumerate(values) if not math.isnan(value))
    if known and known[-1][0] - known[0][0] > OPTIONS_DIFFER:
        raise PacelineError(
            f"the optimizer of rank {known[0][1]} has other options in round {step} than that of rank "
            f"{known[-1][1]}; expected the same weight decay, momentum and others in each group on every rank "
            f"(here {described()})"
        )


def differ(values: list[float]) -> bool:
    """Whether the numbers of the ranks' parameters outside of the model differ by more than rounding; no if one is 0,
    on a rank whose samples have not used these parameters yet."""
    return min(values) > 0 and max(values) - min(values) > OUTSIDE_DIFFER * abs(max(values))


def check_rates(step: int, rates: list[float]) -> None:
    """Raises PacelineError if the ranks' learning rates differ by more than rounding; NaN for one that is unknown."""
    known = sorted((rate, rank) for rank, rate in enumerate(rates) if not math.isnan(rate))
    if known and known[-1][0] - known[0][0] > RATES_DIFFER * abs(known[-1][0]):
        (low, rank), (high, other) = known[0], known[-1]
        raise PacelineError(
            f"the learning rate of rank {rank} is {low:g} in round {step} and that of rank {other} {high:g}; "
            "expected the same: let the schedule count the samples, tokens or losses of all ranks, and with "
            "ElasticPace give the scheduler to pace.register()"
        )
