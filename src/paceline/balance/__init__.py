"""The policies, which decide how much each worker does, one in each file; and their names."""

from __future__ import annotations

from typing import Any

from paceline.balance.abs import Abs
from paceline.balance.ata import Ata
from paceline.balance.dolbie import Dolbie
from paceline.balance.equal import Equal
from paceline.balance.factoring import Auto, Factoring
from paceline.balance.joint import Joint
from paceline.balance.lbbsp import Lbbsp
from paceline.balance.lbbsp_predictive import LbbspCpu, LbbspGpu
from paceline.balance.level import Level
from paceline.balance.ogd import Ogd
from paceline.balance.optimum import Optimum
from paceline.balance.protocol import Policy
from paceline.balance.wlbs import Wlbs

POLICIES: dict[str, type[Policy[Any]]] = {
    "abs": Abs,
    "ata": Ata,
    "auto": Auto,
    "dolbie": Dolbie,
    "equal": Equal,
    "factoring": Factoring,
    "joint": Joint,
    "lbbsp": Lbbsp,
    "lbbsp-cpu": LbbspCpu,
    "lbbsp-gpu": LbbspGpu,
    "level": Level,
    "ogd": Ogd,
    "optimum": Optimum,
    "wlbs": Wlbs,
}
"""Every policy's class, by its name for ``policies.create``."""

__all__ = ["POLICIES"]
