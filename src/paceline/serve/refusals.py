"""What a job refuses, by what is wrong; each in one sentence."""

from __future__ import annotations

from paceline.errors import PacelineError


class NotFound(PacelineError):
    """There is no such job or worker."""


class Forbidden(PacelineError):
    """The secret is not the worker's."""


class Conflict(PacelineError):
    """It does not fit the state that the job is in."""


class Gone(PacelineError):
    """The worker was there, and is no longer."""


class NotStored(PacelineError):
    """The state cannot be stored: nothing has been changed."""


class SetAside(PacelineError):
    """The job cannot go on: what was stored of it is kept as it is, and no other job is concerned."""


STATUS = {NotFound: 404, Forbidden: 403, Conflict: 409, SetAside: 409, Gone: 410, NotStored: 507}


def status_of(error: PacelineError) -> int:
    """The HTTP status of an answer that refuses."""
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
