"""The configuration of a parameter server: the gate, the backup policy, the balancer and the learning rate."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from paceline import backup, policies, sync
from paceline.backup import Backup
from paceline.balancer import Balancer
from paceline.errors import PacelineError, number, whole
from paceline.paramserver import rates
from paceline.paramserver.rates import Rate
from paceline.rounds import Cluster, Machines
from paceline.sync import Gate

__all__ = ["ServerConfig"]


class ServerParts(NamedTuple):
    """The rules of one run. backup: None if only the gate decides. shares_rounds: whether work moves within one."""

    gate: Gate[Any]
    backup: Backup[Any] | None
    rate: Rate
    balancer: Balancer
    shares_rounds: bool


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a run's rules, as people write it.

    Args:
        workers: Number of workers, n.
        global_batch: B, samples in a full round of all workers.
        sync: The gate's name, as for ``sync.create``.
        mode: How parameters reach the workers: "push-wait", "push-interrupt" or "pull".
        backup: How many gradients to wait for, as for ``backup.create``.
        policy: The division of the batch, as for ``policies.create``.
        rate: The rule for the learning rate, as for ``rates.create``.
        lr: Its full value.
        momentum: 0 or more, and less than 1.
        limits: (least, most) samples of each worker; None for 1 and for no limit. A least of 0 is refused: a worker
            without samples has no gradient to send, so nothing could wait for it.
        machines: Sizes of the workers' machines, for policies that begin with them.

    Raises:
        PacelineError: For an option that is unknown, out of range or excludes another one.
    """

    workers: int
    global_batch: int
    _: KW_ONLY
    sync: str = "bsp"
    mode: str = "push-wait"
    backup: str = "everyone"
    policy: str = "equal"
    rate: str = "fixed"
    lr: float = 0.1
    momentum: float = 0.0
    limits: tuple[tuple[int | None, int | None], ...] | None = None
    machines: Machines | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.build()

    def build(self, shared: bool = False) -> ServerParts:
        """Make the rules for one run.

        Args:
            shared: Whether the engine can run rounds in pieces, for policies that do so.

        Returns:
            The gate, the rule whom to wait for, the rate and the balancer.

        Raises:
            PacelineError: For an option that is unknown, out of range or excludes another one.
        """
        whole("workers", self.workers)
        whole("global_batch", self.global_batch, self.workers)
        number("momentum", self.momentum, "0 or more, and less than 1", lambda momentum: 0 <= momentum < 1)
        gate = sync.create(self.sync, self.workers, self.mode)
        waits: Backup[Any] | None = backup.create(self.backup, self.workers, self.mode)
        if isinstance(waits, backup.Everyone):
            waits = None
        elif not gate.takes_quorum:
            raise PacelineError(
                f"{self.sync} has its own rule on how many gradients to wait for, and {self.backup} another; leave "
                "out --backup, or use bsp or lsp"
            )
        if waits is not None and waits.pieces and (shared or not isinstance(gate, sync.Bsp)):
            raise PacelineError(
                f"{self.backup} cuts tasks short, which only paceline simulate --learn can simulate, with sync bsp"
            )
        pairs = self.limits or ()
        if pairs and len(pairs) != self.workers:
            raise PacelineError(f"limits for {len(pairs)} of {self.workers} workers: expected one pair each")
        for worker, (low, _) in enumerate(pairs):
            if low is not None and low < 1:
                raise PacelineError(
                    f"limits of worker {worker}: least {low}; expected 1 sample or more, because a worker without "
                    "samples has no gradient to send"
                )
        rate = rates.create(self.rate, self.workers, self.lr)
        balancer = self.balancer(self.machines)
        shares_rounds = shared and balancer.piece_plan(0) is not None
        if shares_rounds and not (isinstance(gate, sync.Bsp) and self.mode == "push-wait" and waits is None):
            raise PacelineError(
                f"{self.policy} moves work within a round that all workers share; use it with sync bsp, mode "
                "push-wait and backup everyone, or choose another policy"
            )
        return ServerParts(gate, waits, rate, balancer, shares_rounds)

    def pairs(self) -> bool:
        """Whether every worker's least load is 2 samples or more, as batch norm needs it.

        Returns:
            Whether ``Epochs`` should leave no single sample for the last task, either.
        """
        return bool(self.limits) and all((low or 1) > 1 for low, _ in self.limits or ())

    def balancer(self, machines: Machines | None) -> Balancer:
        """Make the balancer for workers on these machines.

        Args:
            machines: Size of each worker's machine, for policies that start from it.

        Returns:
            A balancer at its first round.

        Raises:
            PacelineError: For limits that cannot hold the batch.
        """
        pairs = self.limits or ((None, None),) * self.workers
        least = np.array([1 if low is None else low for low, _ in pairs], float)
        most = np.array([self.global_batch if high is None else high for _, high in pairs], float)
        cluster = Cluster(self.workers, self.global_batch, least, most, machines)
        policy: Any = policies.create(self.policy, cluster)
        return Balancer(replace(policy, mode=self.mode) if policy.needs_noise else policy)
