"""How much does each worker do? One file a policy; the names by which people ask for them."""

from __future__ import annotations

from typing import Any

from paceline.balance.dolbie import Dolbie
from paceline.balance.equal import Equal
from paceline.balance.level import Level

POLICIES: dict[str, type[Any]] = {
    "dolbie": Dolbie,
    "equal": Equal,
    "level": Level,
}
