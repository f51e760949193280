"""Who takes part, from one change of members to the next; and where a worker finds those who keep the list."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from paceline.errors import PacelineError

STORE, WORKER, PLACE, PLACES, SECRET = (
    "PACELINE_STORE",
    "PACELINE_WORKER",
    "PACELINE_PLACE",
    "PACELINE_PLACES",
    "PACELINE_SECRET",
)


class Member(NamedTuple):
    """A process that takes part. ident: no other process of the run has it; place: where its numbers stand in all
    arrays, which the process that comes in its stead takes over."""

    ident: int
    place: int


class Generation(NamedTuple):
    """The members between two changes, by place. hard: somebody was lost, so that nobody waits for the sums of the
    generation before; else the change waits for the end of a round."""

    number: int
    members: tuple[Member, ...]
    hard: bool

    @property
    def places(self) -> tuple[int, ...]:
        """Of the members, in order."""
        return tuple(member.place for member in self.members)

    def holds(self, ident: int) -> bool:
        """Whether this process takes part."""
        return any(member.ident == ident for member in self.members)

    @classmethod
    def of(cls, words: Any) -> Generation:
        """The one that JSON has made these words of."""
        number, members, hard = words
        return cls(number, tuple(Member(*member) for member in members), hard)


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
        """The variables that ``told`` reads."""
        return {
            STORE: f"{self.host}:{self.port}",
            WORKER: str(self.ident),
            PLACE: str(self.place),
            PLACES: str(self.places),
            SECRET: self.secret,
        }


def told() -> Where:
    """What the launcher has told this process. Raises PacelineError where there is none of ours."""
    try:
        host, port = os.environ[STORE].rsplit(":", 1)
        ident, place, places = (int(os.environ[name]) for name in (WORKER, PLACE, PLACES))
        return Where(host, int(port), ident, place, places, os.environ.get(SECRET, ""))
    except (KeyError, ValueError):
        raise PacelineError(
            "elastic=True needs a launcher that outlives the ranks; start the script with "
            "python -m paceline.torch.guard, or use paceline train"
        ) from None
