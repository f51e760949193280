"""Collectives of a program's own that would hang, fail or return wrong values where loads differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import timing
from paceline.torch.mistakes import Check
from paceline.torch.plan import Piece

GATHERS = "allgather", "_allgather_base", "all_gather_single"
ROUNDS = 2  # of an epoch, in which the sizes that ranks give to a gather are compared


class Listening(Check):
    """Is notified of the collectives of the training thread, from the first iteration on."""

    _stop: Callable[[], None] | None = None

    def iteration(self, step: int) -> None:
        if self._stop is None:
            self._stop = timing.listen(self.called, lambda: None)

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def called(self, name: str) -> None:
        """The collective of this name is about to begin; an error refuses it."""
        raise NotImplementedError


class CallsWithin(Listening):
    """Refuses each collective of the program within a round that ranks run in different numbers of pieces, since some
    would wait in it for ever.

    running: gives the round's number while that is so, else None. how: what takes the round in pieces. instead: what
    the program is to do, for the message.
    """

    def __init__(self, running: Callable[[], int | None], how: str, instead: str) -> None:
        self._running, self._how, self._instead = running, how, instead

    def called(self, name: str) -> None:
        if name == timing.BUFFERS or (step := self._running()) is None or (found := timing.caller()) is None:
            return
        raise PacelineError(
            f"round {step}: {at(found[1])} calls a collective ({name}) within the round, which {self._how} runs in "
            f"different numbers of pieces; call it {self._instead}"
        )


class GatherSizes(Listening):
    """Compares the sizes of the tensors that ranks give to the program's gathers, in the first rounds of an epoch and
    while loads differ. gloo ends the process if they differ, NCCL returns wrong values.

    All ranks make these comparisons in the same calls: which ones follows from the plan and the calls' order alone.
    newest: the piece of the running or the newest round, None before the first.
    """

    def __init__(self, newest: Callable[[], Piece | None]) -> None:
        self._newest = newest
        self._until = 0  # the first round in which nothing is compared

    def iteration(self, step: int) -> None:
        self._until = step + ROUNDS
        super().iteration(step)

    def called(self, name: str) -> None:
        if (piece := self._newest()) is None:
            return
        if piece.step >= self._until:
            self.close()
            return
        group, *tensors = (*timing.arguments(), None, None)[:3]
        if name not in GATHERS or not isinstance(group, dist.ProcessGroup) or not piece.plan.uneven:
            return
        if (found := timing.caller(itself=True)) is None:
            return
        taken, given = ([one.numel() for one in tensors_of(each)] for each in tensors)
        sizes: list[Any] = [None] * group.size()
        dist.all_gather_object(sizes, given, group)
        fits = name == "allgather" and taken == [size for (size, *_) in sizes]
        if all(size == sizes[0] for size in sizes) or (fits and dist.get_backend(group) != "gloo"):
            return
        *most, last = [str(sum(size)) for size in sizes]
        raise PacelineError(
            f"round {piece.step}: {at(found[1])} gathers tensors of {', '.join(most)} and {last} elements, and all "
            "ranks must give as many; loads differ under Paceline, so write pace.gather(tensor), which takes any "
            "number of rows"
        )


def at(where: tuple[str, int]) -> str:
    """A file and line in a message."""
    return f"{where[0]}:{where[1]}"


def tensors_of(given: Any) -> list[torch.Tensor]:
    """The tensors of a collective's argument."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [one for part in given for one in tensors_of(part)] if isinstance(given, list | tuple) else []
