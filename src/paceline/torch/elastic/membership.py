"""Membership epochs, and the settings and store keys by which a launcher and its workers exchange them.

The launcher outlives all workers, and hosts the store through which they meet."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from paceline.errors import PacelineError

WHERE = "PACELINE_WHERE"  # the environment variable with a ``Where``


class Worker(NamedTuple):
    """A process that may take part. ident: unique among all processes of the run; place: its index in all arrays,
    which the process that replaces it takes over."""

    ident: int
    place: int


class MembershipEpoch(NamedTuple):
    """The members between two changes, by place. hard: a member was lost, so that no one waits for the sums of the
    epoch before; otherwise the change waits for the end of a round."""

    number: int
    members: tuple[Worker, ...]
    hard: bool

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(member.place for member in self.members)

    @classmethod
    def of(cls, words: Any) -> MembershipEpoch:
        """The membership epoch that was serialized to these words by JSON."""
        number, members, hard = words
        return cls(number, tuple(Worker(*member) for member in members), hard)


class Where(NamedTuple):
    """A launcher's settings for a worker: the address of the store, the worker's ident and place, the number of
    places, and the run's secret (``Seal``)."""

    host: str
    port: int
    ident: int
    place: int
    places: int
    secret: str = ""

    def environment(self) -> dict[str, str]:
        """The variable that ``settings`` reads."""
        return {WHERE: json.dumps(self)}


def settings() -> Where:
    """The launcher's settings for this process. Raises PacelineError if no launcher of Paceline has started it."""
    try:
        return Where(*json.loads(os.environ[WHERE]))
    except (KeyError, ValueError, TypeError):
        raise PacelineError(
            "a run that loses and gains ranks needs a launcher that outlives the ranks; start the script with "
            "python -m paceline.torch.launcher, or use paceline train"
        ) from None


# Keys in the store for the worker with an ident: its signs of life; that its program ends, so that it gives no more
# of them; that it has the model.
BEAT, ENDING, HAS = "life/{}".format, "ending/{}".format, "has/{}".format
# The notice that the membership epoch of a number exists, for one worker, which may set it itself to wake up.
COMES = "notice/{}/{}".format
