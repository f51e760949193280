"""The table of what other policies would have made of a recorded run, for a terminal. Needs ``paceline[cli]``."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from paceline import tables
from paceline.runs.words import percent, seconds, times
from paceline.simulate.whatif import Answer, Predicted


def table(answer: Answer) -> Table:
    """Every policy's figures, the quickest first."""
    shown = tables.begun("policy", figures=("time", "as fast", "waiting", "loads in the last round"))
    shown.add_row(
        f"{before(answer)} (recorded)", seconds(answer.seconds), times(1.0), percent(answer.idle), ""
    )
    for name, would in sorted(answer.policies.items(), key=lambda item: item[1].seconds):
        loads = [int(load) for load in np.nan_to_num(would.loads[_full(would)])]
        few = "/".join(map(str, loads)) if len(loads) <= 8 else f"{min(loads)} to {max(loads)}"
        shown.add_row(
            name, seconds(would.seconds), times(answer.seconds / would.seconds), percent(would.idle), few
        )
    return shown


def before(answer: Answer) -> str:
    """The policy that the rounds were run under; a trace's are compared with equal shares."""
    return answer.recorded or "equal"


def _full(would: Predicted) -> int:
    """The last round that was not a short one."""
    sizes = np.nansum(would.loads, axis=1)
    return int(np.flatnonzero(sizes == sizes.max())[-1])
