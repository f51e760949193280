"""The ranks of a run as one company: who takes part in a round, and how all of them learn that it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paceline.torch import exchange, peers
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.local import Merging
from paceline.torch.plan import Piece, Source


class Members:
    """Ranks that all take part until the end: each runs what it is given, and their rows travel beside the gradients.
    ``elastic.member.Member`` is the other kind, whose ranks may be lost, leave and join.

    ``connect`` and ``begin`` first. For each iteration ``micro_steps``; ``drop`` if a round is left, ``together``
    when a loop or its epoch ends, ``close`` at the end.
    """

    # The ranks' rows are carried by the sums of the gradients, and so are the counts that losses are means over.
    carries_rows = False
    counter: Any = None  # a ``Counter`` for claims; by default one that suits the process group
    late = False  # the round was handed over to this rank with its step taken, so that this rank takes none
    retrying = False  # the sums of the running round have failed
    _exchange: exchange.Exchange

    @property
    def chief(self) -> bool:
        """Whether this rank does what only one rank must do."""
        return peers.rank() == 0

    def connect(self, layout: Any) -> exchange.Exchange | None:
        """Rows will have this dtype. Returns what they travel through; None if the sums of gradients carry them.
        Collective."""
        self._exchange = exchange.connect(layout)
        return self._exchange

    def begin(self, loop: Any) -> None:
        """``loop``, a ``Loop``, is constructed, and its first round has not begun."""

    @property
    def handed_over(self) -> Sequence[Any]:
        """The optimizers whose states a joining rank receives, in the same order on all ranks."""
        return ()

    def check_handed_over(self, things: Sequence[Any]) -> None:
        """Raises PacelineError for an optimizer or a scaler whose state a joining rank would not receive."""

    def micro_steps(self, loop: Any, source: Source) -> Iterator[tuple[Any, Piece]]:
        """The micro-steps of this rank in one iteration over ``source``: each one's batch and piece."""
        return loop.planned(source)

    def drop(self) -> None:
        """The running round was left."""

    def together(self) -> None:
        """The loop, or its epoch, is over on this rank: wait until the other ranks do not need it for any round."""

    def close(self, failed: bool) -> None:
        """No more rounds. failed: do not wait for other ranks."""
        self._exchange.close()


class Ranks(NamedTuple):
    """How the ranks of a run work together.

    Attributes:
        reducer: Sums the gradients of the model.
        members: The ranks that take part.
        merging: Sums the changes of local steps; None without them, and if the members' own sums do that.
    """

    reducer: Reducer
    members: Members
    merging: Merging | None = None
