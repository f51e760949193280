"""How many cases a test has: all with ``PACELINE_THOROUGH=1``, as in the nightly job.

Else a third of those that are drawn at random, and of a table those that differ by more than a combination.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

THOROUGH = bool(os.environ.get("PACELINE_THOROUGH"))
FEW = 5  # cases that remain of any number


def times(full: int) -> int:
    """The number of cases to draw of ``full``."""
    return full if THOROUGH else max(min(full, FEW), full // 3)


def some(cases: Mapping[str, Any], *rare: str) -> dict[str, Any]:
    """All cases in the nightly job, else all but the rare ones, whose options other cases have one by one."""
    assert set(rare) <= set(cases), "a rare case is none of the cases"
    return {name: case for name, case in cases.items() if THOROUGH or name not in rare}
