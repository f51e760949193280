"""Metrics over the samples of a round on all ranks, in which samples that count for nothing do not appear."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import PacelineError, short
from paceline.torch import peers
from paceline.torch.loop import Loop


def samples(loop: Loop, called: str) -> int:
    """The samples that this rank has run: in the running micro-step, or with loop="round" in the round. Raises
    PacelineError, with the name of the function that was ``called``, if the ranks take other numbers of steps."""
    terms = loop.terms
    if terms.fixed_micro_steps is None and terms.loop != "round":
        raise PacelineError(
            f"pace.{called}() with loop={terms.loop!r}: ranks run different numbers of micro-steps, so that some "
            "would wait for ever; use loop='whole' or loop='round'"
        )
    own = loop.round.samples(terms.fixed_micro_steps is not None)
    if own is None:
        raise PacelineError(
            f"pace.{called}() was called outside of a round; expected it on all ranks within `for ... in "
            "pace.loader(...)`" + (", after pace.round()" if terms.loop == "round" else "")
        )
    return own


def mean(value: Any, own: int) -> torch.Tensor:
    """The mean over the samples of all ranks of ``value``, a mean over ``own`` samples of this rank: detached, of the
    same shape, NaN if no rank has a sample. Collective."""
    try:
        given = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise PacelineError(
            f"pace.mean({short(value)}): expected a number or a tensor, the mean over this rank's batch"
        ) from error
    kept = given if given.is_floating_point() or given.is_complex() else given.double()
    parts = peers.gather((own, kept.cpu() if own else None))
    total = sum(many for many, _ in parts)
    if not total:
        return torch.full_like(kept, torch.nan)
    result: torch.Tensor = sum(many * part for many, part in parts if many) / total
    return result.to(kept)


def gather(tensor: Any, own: int) -> torch.Tensor:
    """The rows of ``tensor``, which belong to the ``own`` samples of this rank, and those of all others, rank after
    rank, detached. Ranks may have different numbers of rows. Collective."""
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
        raise PacelineError(
            f"pace.gather({short(tensor)}): expected a tensor with a row for each sample of this rank's batch"
        )
    rows = tensor.detach() if own else tensor.detach()[:0]
    parts = [part for part in peers.gather(rows.cpu()) if len(part)]
    return torch.cat(parts).to(rows.device) if parts else rows
