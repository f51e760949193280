"""Which loads a rank can take: the user's limits, and what the model asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import PacelineError

Limits = Sequence[tuple[int | None, int | None]]


def has_batch_norm(model: torch.nn.Module) -> bool:
    """True where a rank with anything to do needs two samples: a variance takes as many."""
    return any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())


def least_and_most(limits: Limits | None, ranks: int, batch: int, floor: int) -> tuple[list[int], list[int]]:
    """Least and most samples of each rank, defaults filled in. Raises PacelineError where they cannot work."""
    if limits is None:
        limits = [(None, None)] * ranks
    if len(limits) != ranks:
        raise PacelineError(
            f"limits for {len(limits)} ranks, but {ranks} take part; expected one pair for each"
        )
    least = [floor if low is None else int(low) for low, _ in limits]
    most = [batch if high is None else int(high) for _, high in limits]
    for rank, low in enumerate(least):
        if 0 < low < floor:
            raise PacelineError(
                f"limits of rank {rank}: least {low}; the model has batch norm, which needs 0 or at least {floor}"
            )
    return least, most
