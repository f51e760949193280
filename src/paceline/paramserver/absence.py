"""What a parameter server does while none of its workers takes part, for instance because all of them are frozen."""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """What to do now."""

    NOTHING = 0
    WARN = 1
    END = 2


class Absence:
    """Judges for how long no worker has taken part; times are seconds of the caller's clock.

    patience: seconds after which the run ends, but not before it has warned. A worker that is started in the meantime
    gets them anew.

    Attributes:
        warns: Seconds after which it warns. Workers that were only late, as on a busy machine, are back before.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self.warns = patience, patience / 12
        self._since: float | None = None
        self._warned = False

    def began(self, now: float) -> None:
        """A worker is being started."""
        self._since = None if self._since is None else now

    def look(self, now: float, present: bool, starting: bool) -> Step:
        """What to do now. present, starting: whether any worker takes part, and whether one is being started."""
        if present:
            self._since, self._warned = None, False
            return Step.NOTHING
        if self._since is None:
            self._since = now
        absent = now - self._since
        # Never at the first look: if this process itself stood still, workers may answer a moment later.
        if absent > self._patience and (self._warned or starting):
            return Step.END
        if starting or self._warned or absent < self.warns:
            return Step.NOTHING
        self._warned = True
        return Step.WARN
