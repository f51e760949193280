"""``adasync``: more gradients as the loss falls (Dutta, Wang and Joshi, arXiv 2003.10579)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.backup.protocol import Backup, Iteration
from paceline.errors import number, whole


class AdasyncState(NamedTuple):
    first_loss: float  # F(w_0), NaN before the first update
    k: int
    decided: float  # time of the last decision, seconds


@dataclass(frozen=True)
class Adasync(Backup[AdasyncState]):
    """Waits for few gradients at first and for more as the loss falls, by the loss alone (DBW, baseline AdaSync).

    The rule's bound takes 0 for the least possible loss. It waits for all while the loss is 0 or less, and always if
    the first one is.

    Args:
        workers: Number of workers, n.
        first: K_0, gradients of the first update, from 1 to n.
        window: Seconds between decisions; 0 decides after each update.
        kind: "sync" for K-sync SGD (with bsp), "async" for K-async SGD (with lsp:barrier=0,scale=mean).
    """

    workers: int
    first: int = 1
    window: float = 0.0
    kind: Literal["sync", "async"] = "sync"

    def __post_init__(self) -> None:
        whole("adasync: first", self.first, 1, self.workers)
        number("adasync: window", self.window, "0 or more", lambda window: window >= 0)

    def init(self) -> tuple[int, AdasyncState]:
        return self.first, AdasyncState(math.nan, self.first, 0.0)

    def step(self, state: AdasyncState, happened: Iteration) -> tuple[int, AdasyncState]:
        if math.isnan(state.first_loss):
            state = state._replace(first_loss=happened.loss)
        if happened.now - state.decided >= self.window:
            state = state._replace(k=self._k(state.first_loss, happened.loss), decided=happened.now)
        return max(1, min(state.k, happened.present)), state

    def _k(self, first_loss: float, loss: float) -> int:
        """K^2 + cK - cP = 0 with c = K_0^2 F(w_0) / ((P - K_0) F(w_t)); async K_0 sqrt(F(w_0) / F(w_t))."""
        n, first = self.workers, self.first
        if not (first_loss > 0 and loss > 0) or first == n:
            return n
        part = loss / first_loss
        if self.kind == "async":
            wanted = first / math.sqrt(part) if part else n
        else:  # the root 2P / (1 + sqrt(1 + 4P / c)), in which nothing overflows as c grows
            wanted = 2 * n / (1 + math.sqrt(1 + 4 * n * (n - first) * part / first**2))
        return max(1, min(n, math.floor(wanted + 0.5))) if math.isfinite(wanted) else n
