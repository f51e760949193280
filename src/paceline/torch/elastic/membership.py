"""Who takes part, from one change of members to the next, and what a launcher and its workers tell each other of it.

The launcher outlives all workers, and keeps the store that they meet in."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from paceline.errors import PacelineError

WHERE = "PACELINE_WHERE"  # the variable of the environment that has it


class Worker(NamedTuple):
    """A process that may take part. ident: no other process of the run has it; place: where its numbers stand in all
    arrays, which the process that comes in its stead takes over."""

    ident: int
    place: int


class MembershipEpoch(NamedTuple):
    """The members between two changes, by place. hard: somebody was lost, so that nobody waits for the sums of the
    epoch before; else the change waits for the end of a round."""

    number: int
    members: tuple[Worker, ...]
    hard: bool

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(member.place for member in self.members)

    @classmethod
    def of(cls, words: Any) -> MembershipEpoch:
        """The one that JSON has made these words of."""
        number, members, hard = words
        return cls(number, tuple(Worker(*member) for member in members), hard)


class Where(NamedTuple):
    """What a launcher tells a worker: the address of the store, who it is, how many places there are, and the run's
    secret (``Seal``)."""

    host: str
    port: int
    ident: int
    place: int
    places: int
    secret: str = ""

    def environment(self) -> dict[str, str]:
        """The variable that ``told`` reads."""
        return {WHERE: json.dumps(self)}


def told() -> Where:
    """What the launcher has told this process. Raises PacelineError if there is none of ours."""
    try:
        return Where(*json.loads(os.environ[WHERE]))
    except (KeyError, ValueError, TypeError):
        raise PacelineError(
            "elastic=True needs a launcher that outlives the ranks; start the script with "
            "python -m paceline.torch.launcher, or use paceline train"
        ) from None


# Keys of the store, of the worker with that ident: its signs of life; that its program ends, and gives no more of
# them; that it has the model.
BEAT, ENDING, HAS = "life/{}".format, "ending/{}".format, "has/{}".format
# And that there is a membership epoch of that number; the worker may set it itself, to wake up.
COMES = "told/{}/{}".format
