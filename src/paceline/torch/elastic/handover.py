"""What a rank that joins is given: the model, what was registered with it, and where the run stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch.elastic import messages
from paceline.torch.elastic.group import Group

CHUNK = 32 << 20  # bytes that are sent at once


class Handover:
    """Packs all that a joiner needs, and takes it over. run: gives where the run stands; go_on: takes that in."""

    def __init__(
        self, model: torch.nn.Module, run: Callable[[], dict[str, Any]], go_on: Callable[[Any], None]
    ) -> None:
        self._model, self._run, self._go_on = model, run, go_on
        self._registered: list[Any] = []

    def register(self, things: Sequence[Any]) -> None:
        """Optimizers, schedulers, scalers and the like. Raises PacelineError for what has no state."""
        for thing in things:
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise PacelineError(
                    f"pace.register() was given a {type(thing).__name__}; expected what has state_dict() and "
                    "load_state_dict(), as optimizers, schedulers and scalers do"
                )
            try:
                messages.unpack(
                    bytes(messages.pack(thing.state_dict())), f"the state of a {type(thing).__name__}"
                )
            except messages.Unread as error:  # now, and not when a rank joins
                raise PacelineError(f"pace.register(): {error}") from error
        self._registered = list(things)

    def pack(self) -> torch.Tensor:
        """All of it, as bytes in a tensor."""
        parts = {
            "model": self._model.state_dict(),
            "registered": [thing.state_dict() for thing in self._registered],
            "run": self._run(),
        }
        return torch.frombuffer(messages.pack(parts), dtype=torch.uint8)

    def take(self, packed: torch.Tensor, run: bool) -> None:
        """Take over what ``pack`` gave; ``run``: also where the run stands."""
        parts = messages.unpack(packed.numpy().tobytes(), "what another worker hands over")
        self._model.load_state_dict(parts["model"])
        if len(parts["registered"]) != len(self._registered):
            raise PacelineError(
                f"pace.register() was given {len(self._registered)} things here, and {len(parts['registered'])} on "
                "the rank that hands over; expected the same on every rank"
            )
        for thing, state in zip(self._registered, parts["registered"], strict=True):
            thing.load_state_dict(state)
        if run:
            self._go_on(parts["run"])


def send(
    group: Group, packed: torch.Tensor | None, root: int, lost: Callable[[], bool]
) -> torch.Tensor | None:
    """Send ``packed`` from the member ``root``, where it is given, to all; what arrived, None where it did not."""
    length = torch.tensor([0 if packed is None else packed.numel()])
    if not group.all_done([group.broadcast(length, root)], lost):
        return None
    whole = torch.empty(int(length), dtype=torch.uint8) if packed is None else packed
    for start in range(0, int(length), CHUNK):
        if not group.all_done([group.broadcast(whole[start : start + CHUNK], root)], lost):
            return None
    return whole
