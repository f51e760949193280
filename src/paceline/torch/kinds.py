"""What each option of ``Pace`` may be, whatever the others are: said in a sentence before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.stored import short

MANY = 2**31 - 1


def check(
    model: Any,
    global_batch: Any,
    policy: Any,
    *,
    limits: Any = None,
    micro_batch: Any = None,
    turns: Any = None,
    quantum: Any = 1,
    record: Any = None,
    on_round: Any = None,
) -> None:
    """Raises PacelineError for the first that is of another kind than ``Pace`` says, or out of range."""
    if not isinstance(model, torch.nn.Module):
        raise PacelineError(
            f"model is {_kind(model)}; expected a torch.nn.Module, as DistributedDataParallel is"
        )
    whole("global_batch", global_batch)
    if not isinstance(policy, str) and not callable(policy):
        raise PacelineError(
            f"policy={short(policy)}: expected the name of a policy, or a function that makes one"
        )
    for name, value in (("micro_batch", micro_batch), ("turns", turns)):
        if value is not None:
            whole(name, value)
    whole("quantum", quantum)
    if limits is not None:
        _pairs(limits)
    if record is not None and not isinstance(record, str | os.PathLike):
        raise PacelineError(f"record={short(record)}: expected the path of a new directory")
    if on_round is not None and not callable(on_round):
        raise PacelineError(f"on_round={short(on_round)}: expected a function that takes a RoundResult")


def whole(name: str, value: Any, least: int = 1, most: int = MANY) -> None:
    """Raises PacelineError where this is no whole number in this range."""
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise PacelineError(f"{name}={short(value)}: expected a whole number, {least} to {most:,}")


def _pairs(limits: Any) -> None:
    wrong = f"limits={short(limits)}: expected a pair (least, most) for each rank, None for the default"
    if isinstance(limits, str) or not isinstance(limits, Sequence | np.ndarray):
        raise PacelineError(wrong)
    for rank, pair in enumerate(limits):
        if isinstance(pair, str) or not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise PacelineError(wrong)
        for end in pair:
            if end is not None:
                whole(f"limits of rank {rank}, least or most", end, 0)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
