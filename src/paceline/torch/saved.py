"""What a checkpoint holds of a ``Pace``, checked before anything goes by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.stored import short

VERSION = 1  # of what ``Pace.state_dict`` gives
COUNTS = ("epoch", "samples_done", "rounds", "global_batch")
LATER = ("loader", "samples")  # not in the states of older versions, and None where no loader was iterated


def check(state: Any) -> None:
    """Raises PacelineError where this is no state of a ``Pace``, or one of another version."""
    if not isinstance(state, dict):
        raise PacelineError(
            f"the state of Pace is {short(state)}; expected a dict, as Pace.state_dict() gives it"
        )
    version = state.get("version")
    if not whole(version) or version != VERSION:
        raise PacelineError(
            f"the state of Pace has version={short(version)}; expected {VERSION}, which is what this version of "
            "Paceline reads and writes"
        )
    for name in (*COUNTS, *LATER):
        value: Any = state.get(name)
        if name in LATER and value is None:
            continue
        least = int(name == "global_batch")
        if not whole(value) or value < least:
            raise PacelineError(
                f"the state of Pace has {name}={short(value)}; expected a whole number of at least {least}"
            )
    if not isinstance(state.get("policy"), str):
        raise PacelineError(
            f"the state of Pace has policy={short(state.get('policy'))}; expected the name of a policy"
        )
    if not isinstance(state.get("balancer"), dict):
        raise PacelineError(
            f"the state of Pace has balancer={short(state.get('balancer'))}; expected a dict, as "
            "Balancer.state_dict() gives it"
        )


def whole(value: Any) -> bool:
    """Whether this is a whole number, True and False excepted."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
