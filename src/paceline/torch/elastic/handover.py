"""The state that a joining rank needs: the model, the states of what was registered with it, and the run's progress.

Also a rank that was late for a round's end receives it, with the record of that round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch.elastic.group import Group
from paceline.torch.elastic.messages import Unread, pack, unpack

CHUNK = 32 << 20  # bytes that are sent at once


class Handover:
    """Packs the state that a joining rank needs, and loads it. model: gives the model's state; take_model: loads
    that. run: gives the run's progress; go_on: loads that."""

    def __init__(
        self,
        model: Callable[[], dict[str, Any]],
        take_model: Callable[[Any], None],
        run: Callable[[], dict[str, Any]],
        go_on: Callable[[Any], None],
    ) -> None:
        self._model, self._take_model, self._run, self._go_on = model, take_model, run, go_on
        self.registered: list[Any] = []
        self.record: torch.Tensor | None = None  # of this rank's last commit, for a rank that missed it

    def register(self, things: Sequence[Any]) -> None:
        """Take optimizers, schedulers, scalers and the like. Raises PacelineError if one has no readable state."""
        for thing in things:
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")):
                raise PacelineError(
                    f"pace.register() was given a {type(thing).__name__}; expected things with state_dict() and "
                    "load_state_dict(), such as optimizers, schedulers and scalers"
                )
            try:
                unpack(bytes(pack(thing.state_dict())), f"the state of a {type(thing).__name__}")
            except Unread as error:  # raised now, and not when a rank joins
                raise PacelineError(f"pace.register(): {error}") from error
        self.registered = list(things)

    def holds(self, thing: Any) -> bool:
        """Whether this thing is registered, or is an optimizer in a registered wrapper, whose state has its own."""
        return any(thing is one or _within(thing, one) for one in self.registered)

    def pack(self) -> torch.Tensor:
        """The whole state, as bytes in a tensor."""
        parts = {
            "model": self._model(),
            "registered": [thing.state_dict() for thing in self.registered],
            "kinds": self._kinds(),
            "run": self._run(),
            "record": self.record,
        }
        return torch.frombuffer(pack(parts), dtype=torch.uint8)

    def _kinds(self) -> list[str]:
        return [type(thing).__name__ for thing in self.registered]

    def committed(self, record: torch.Tensor) -> None:
        """This rank has committed a round with this record."""
        self.record = record

    def take(self, packed: torch.Tensor, run: bool) -> Any:
        """Load what ``pack`` gave. run: also the progress of the run. Returns the ``record`` of the packing rank."""
        parts = unpack(packed.numpy().tobytes(), "the state that another worker hands over")
        self._take_model(parts["model"])
        if parts["kinds"] != (own := self._kinds()):
            here, there = (", ".join(kinds) or "nothing" for kinds in (own, parts["kinds"]))
            raise PacelineError(
                f"pace.register() was given {here} on this rank, and {there} on the rank that hands over; expected "
                "the same on every rank, in the same order"
            )
        for thing, state in zip(self.registered, parts["registered"], strict=True):
            thing.load_state_dict(state)
        if run:
            self._go_on(parts["run"])
            self.record = parts["record"]  # this rank may be the next to hand over
        return parts["record"]


def _within(optimizer: Any, one: Any) -> bool:
    if not hasattr(one, "param_groups"):  # a scheduler has the optimizer, and not its state
        return False
    values = getattr(one, "__dict__", {}).values()
    parts = (part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,)))
    return any(part is optimizer for part in parts)


def send(
    group: Group, packed: torch.Tensor | None, root: int, lost: Callable[[], bool]
) -> torch.Tensor | None:
    """Send ``packed`` from the member with index ``root`` to all; returns what arrived, None if that failed."""
    length = torch.tensor([0 if packed is None else packed.numel()])
    if not group.all_done([group.broadcast(length, root)], lost):
        return None
    whole = torch.empty(int(length), dtype=torch.uint8) if packed is None else packed
    for start in range(0, int(length), CHUNK):
        if not group.all_done([group.broadcast(whole[start : start + CHUNK], root)], lost):
            return None
    return whole
