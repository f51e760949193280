"""``recurrent``: a simple recurrent network or an LSTM on past speeds alone (LB-BSP's Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import PacelineError
from paceline.forecast.learned import SPEED, Learned
from paceline.forecast.networks import Recurrent as Layer


@dataclass(frozen=True, slots=True)
class Recurrent(Learned):
    """v^k from v^{k-look}, ..., v^{k-1}; trained online as ``narx`` is, but blind to processors and memory.

    cell: "simple" or "lstm". look: the look-back window, 2 in the paper. hidden: units; the paper does not
    say. LB-BSP, Table 3 (SimpleRNN, LSTM).
    """

    fallback: bool = False
    cell: Literal["simple", "lstm"] = "simple"
    look: int = 2
    hidden: int = 4
    name: ClassVar[str] = "recurrent"

    def __post_init__(self) -> None:
        Learned.__post_init__(self)
        if self.cell not in ("simple", "lstm"):
            raise PacelineError(f"forecast 'recurrent': cell={self.cell}: expected simple or lstm")
        if self.look < 1 or self.hidden < 1:
            raise PacelineError(
                f"forecast 'recurrent': look={self.look}, hidden={self.hidden}: expected at least 1 of each"
            )

    @property
    def network(self) -> Layer:
        return Layer(self.look, self.hidden, self.cell == "lstm")

    @property
    def lags(self) -> list[tuple[int, int]]:
        return [(lag, SPEED) for lag in range(self.look, 0, -1)]
