"""What a user may choose for ``Pace``: each option by itself, the loads that ranks can take, what goes together.

All is said in a sentence before anything is made of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError, meant, short
from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.sync import intervals

LOOPS = ("whole", "round", "pieces", "local")
MANY = 2**31 - 1
MEMORY = "memory"  # for limits: what fits is found while training
Limits = Sequence[tuple[int | None, int | None]]  # (least, most) of each rank


@dataclass(kw_only=True)
class Options:
    """What was chosen for one Pace, whose docstring says what each option is.

    ``check_kinds`` first, then ``check_together``; ``terms.agree`` makes of it what the ranks go by.
    """

    global_batch: int
    policy: str | Callable[[Cluster], Policy[Any]]
    limits: Limits | str | None
    micro_batch: int | None
    micro_steps: int | None
    loop: str
    fill: bool | None
    quantum: int
    weigh: str
    deterministic: bool
    record: str | os.PathLike[str] | None
    report_to: str | Sequence[str]
    metrics_port: int | str | None
    on_round: Callable[..., None] | None
    elastic: bool
    collect_every: int | None
    every: int | float | str | None
    merge: Any
    drop: float | str | None

    @classmethod
    def of(cls, chosen: Mapping[str, Any]) -> Options:
        """From all that was given to ``Pace``, by name."""
        return cls(**{each.name: chosen[each.name] for each in fields(cls)})

    @property
    def fills(self) -> bool:
        """Whether a micro-step with nothing to do gets samples that count for nothing."""
        return self.loop != "pieces" if self.fill is None else bool(self.fill)

    @property
    def fixed_micro_steps(self) -> int | None:
        """Micro-steps of every rank in every round; None if that is a rank's own affair."""
        return 1 if self.micro_steps is None and self.loop == "whole" else self.micro_steps

    def check_kinds(self, model: Any) -> None:
        """Raises PacelineError for the first that is of another kind than ``Pace`` says, or out of range."""
        if self.collect_every is not None:
            whole("collect_every", self.collect_every, 1, 2**31)
        if not isinstance(model, torch.nn.Module):
            raise PacelineError(
                f"model is {_kind(model)}; expected a torch.nn.Module, as DistributedDataParallel is"
            )
        whole("global_batch", self.global_batch)
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise PacelineError(
                f"policy={short(self.policy)}: expected the name of a policy, or a function that makes one"
            )
        for name in ("micro_batch", "micro_steps"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        whole("quantum", self.quantum)
        if self.limits is not None and not (isinstance(self.limits, str) and self.limits == MEMORY):
            _pairs(self.limits)
        if self.record is not None and not isinstance(self.record, str | os.PathLike):
            raise PacelineError(f"record={short(self.record)}: expected the path of a new directory")
        if self.on_round is not None and not callable(self.on_round):
            raise PacelineError(
                f"on_round={short(self.on_round)}: expected a function that takes a RoundResult"
            )
        switches(fill=self.fill, deterministic=self.deterministic, elastic=self.elastic)

    def check_together(self) -> None:
        """Raises PacelineError for a form of the loop, or a way of weighing, that is none, or where they do not go
        together."""
        loop, weigh, micro_steps = self.loop, self.weigh, self.micro_steps
        check_weigh(weigh)
        if micro_steps is not None and (micro_steps < 1 or weigh == "hook"):
            raise PacelineError(
                f"micro_steps={micro_steps}, weigh={weigh!r}: expected at least one micro-step, and weigh='loss'"
            )
        if loop not in LOOPS:
            raise PacelineError(
                f"loop={loop!r}: expected one of {', '.join(map(repr, LOOPS))}{meant(loop, LOOPS)}"
            )
        if self.deterministic and loop == "whole":
            raise PacelineError(
                "deterministic=True runs each round in many small pieces, and loop='whole' takes it in one "
                "micro-step; use loop='round' and pace.round(batch, function), or loop='pieces'"
            )

    def check_memory(self, in_step: bool) -> None:
        """Raises PacelineError for loops in which what fits into memory cannot be found while training."""
        wrong = (
            "loop='pieces' runs its passes itself; use loop='round' and pace.round(batch, function)"
            if self.loop == "pieces"
            else "weigh='hook' weighs what DDP has summed, and a pass that does not fit is to be dropped before; "
            "use weigh='loss'"
            if self.weigh == "hook" and self.loop == "round"
            else "deterministic=True fixes the size of every pass; set quantum= to what fits"
            if self.deterministic
            else "under fully_shard all ranks take as many passes; set micro_batch= to what fits"
            if in_step
            else ""
        )
        if wrong:
            raise PacelineError(f"limits='memory': {wrong}")

    def check_elastic(self) -> None:
        """Raises PacelineError for what does not go together with ranks that may be lost or join."""
        wrong = (
            "a round whose rank is lost takes more micro-steps than one on the others; use loop='round' and "
            "pace.round(batch, function), or loop='pieces'"
            if self.loop == "whole"
            else "weigh='hook' leaves the sum to DDP, which ends with a lost rank; use weigh='loss'"
            if self.weigh == "hook"
            else f"micro_steps={self.micro_steps} fixes what the loss of a rank changes; leave it out"
            if self.micro_steps is not None
            else "record= would end with the rank that writes it; take the rounds from on_round, or use "
            "paceline train, whose launcher writes the record"
            if self.record is not None
            else "report_to= and metrics_port= would end with rank 0; use on_round"
            if self.report_to or self.metrics_port is not None
            else "drop= leaves out samples, and what is missing of a round is run by others here; leave it out"
            if self.drop is not None
            else ""
        )
        if wrong:
            raise PacelineError(f"elastic=True: {wrong}")

    def check_drop(self, in_step: bool, moves_work: bool, device: torch.device) -> None:
        """Raises PacelineError for loops in which no micro-batches can be left out behind a threshold."""
        if self.drop is None:
            return
        wrong = (
            f"loop={self.loop!r} runs all that it is given; use loop='round' and pace.round(batch, function)"
            if self.loop != "round"
            else "all ranks take as many passes under fully_shard or with micro_steps=; leave it out"
            if in_step or self.micro_steps is not None
            else "micro-batches are left out, and each rank's part is one; set micro_batch= to an eighth of it, say"
            if self.micro_batch is None
            else "weigh='hook' weighs gradients before it is known what was run; use weigh='loss'"
            if self.weigh == "hook"
            else "limits='memory' cuts passes while they run; set micro_batch= to what fits"
            if self.limits == MEMORY
            else "deterministic=True keeps the bits of the whole batch; leave one of them out"
            if self.deterministic
            else "the policy moves what a late rank has not begun to others; use level or equal, which do not"
            if moves_work
            else f"the host's clock, which tells the last micro-batch, runs ahead of {device.type}; leave it out"
            if device.type != "cpu"
            else ""
        )
        if wrong:
            raise PacelineError(f"drop={short(self.drop)}: {wrong}")

    def check_pieces(self, policy: str, moves_work: bool, in_step: bool, fills: bool) -> None:
        """Raises PacelineError if rounds cannot be run in pieces, as ``policy`` would have it (``moves_work``).

        in_step: every rank must run as many micro-steps. fills: a micro-step with nothing to do gets samples all the
            same.
        """
        if not moves_work:
            return
        fixed = self.micro_steps is not None
        if not fixed and not in_step and self.loop == "whole":
            raise PacelineError(
                f"policy {policy} moves work within the round, and loop='whole' takes each round in one micro-step; "
                "use loop='round' and pace.round(batch, function), or a policy that plans whole rounds, such as level"
            )
        if fixed or in_step:
            raise PacelineError(
                f"policy {policy} moves work within the round, so ranks take unlike numbers of micro-steps, and "
                f"{'micro_steps=' + str(self.micro_steps) if fixed else 'FSDP'} needs as many on each; "
                "use a policy that plans whole rounds, such as level"
            )
        if fills and self.weigh == "hook":
            raise PacelineError(
                f"policy {policy} with weigh='hook': a rank's last micro-step in a round may be one that counts for "
                "nothing, and the hook cannot leave its gradient out of what it claimed before; use weigh='loss'"
            )

    def check_deterministic(self, policy: str, moves_work: bool, norms: bool, cell: int) -> None:
        """Raises PacelineError if results cannot have the same bits whoever runs what.

        norms: the model has batch norm. cell: samples of every micro-step.
        """
        wrong = (
            f"policy {policy} does not move work within the round; use factoring or auto"
            if not moves_work
            else "weigh='hook' leaves the sum to DDP; use weigh='loss'"
            if self.weigh == "hook"
            else "the model has batch norm, whose running statistics depend on who runs what; use another norm"
            if norms
            else f"micro_batch={self.micro_batch} holds no cell of {cell} samples; set a smaller quantum"
            if self.micro_batch is not None and self.micro_batch < cell
            else ""
        )
        if wrong:
            raise PacelineError(f"deterministic=True: {wrong}")


def whole(name: str, value: Any, least: int = 1, most: int = MANY) -> None:
    """Raises PacelineError if this is no whole number in this range."""
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise PacelineError(f"{name}={short(value)}: expected a whole number, {least} to {most:,}")


def switches(**given: Any) -> None:
    """Raises PacelineError for the first that is neither True nor False: any text, also "no", would count as True."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, int | np.bool_) and value in (0, 1)):
            raise PacelineError(f"{name}={short(value)}: expected True or False")


def threshold(drop: float | str | None) -> float | None:
    """``drop`` in seconds, NaN for "auto". Raises PacelineError for anything else."""
    if drop is None or (isinstance(drop, str) and drop.strip() == intervals.AUTO):
        return None if drop is None else math.nan
    found = intervals.SECONDS.fullmatch(drop.strip()) if isinstance(drop, str) else None
    seconds: Any = float(found[1]) if found else drop
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PacelineError(f"drop={short(drop)}: expected seconds such as '0.5 s' or 0.5, or 'auto'")
    return float(seconds)


def check_weigh(weigh: str) -> None:
    """Raises PacelineError for a way of weighing that is none."""
    if weigh not in ("loss", "hook"):
        raise PacelineError(f"weigh={weigh!r}: expected 'loss' or 'hook'{meant(weigh, ('loss', 'hook'))}")


def has_batch_norm(model: torch.nn.Module) -> bool:
    """True if a rank with anything to do needs two samples: a variance takes as many."""
    return any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())


def least_and_most(limits: Limits | None, ranks: int, batch: int, floor: int) -> tuple[list[int], list[int]]:
    """Least and most samples of each rank, defaults filled in. Raises PacelineError if they cannot work."""
    if limits is None:
        limits = [(None, None)] * ranks
    if len(limits) != ranks:
        raise PacelineError(
            f"limits for {len(limits)} ranks, but {ranks} take part; expected one pair for each"
        )
    least = [floor if low is None else int(low) for low, _ in limits]
    most = [batch if high is None else int(high) for _, high in limits]
    for rank, low in enumerate(least):
        if 0 < low < floor:
            raise PacelineError(
                f"limits of rank {rank}: least {low}; the model has batch norm, which needs 0 or at least {floor}"
            )
    return least, most


def check_dealt(
    budget: Any, longest: float, *, quantum: int, cell: int, micro_steps: int | None, floor: int = 1
) -> None:
    """Raises PacelineError if rounds cannot be divided by cost, or not with this budget of a micro-batch.

    longest: length of the longest sample. micro-steps: of every rank in every round, None if that is its own
        affair.
    floor: samples that a micro-batch needs.
    """
    if cell or quantum > 1:
        wrong = "deterministic=True" if cell else f"quantum={quantum}"
        raise PacelineError(
            f"{wrong} counts samples, and cost= divides by what they cost; leave one of them out"
        )
    if budget is None:
        return
    number = isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool)
    if not number or not longest <= budget < np.inf:
        raise PacelineError(
            f"micro_batch_cost={short(budget)}: expected a number of at least {longest:g}, the cost of the "
            "longest sample"
        )
    if budget < (2 * floor - 1) * longest:
        raise PacelineError(
            f"micro_batch_cost={short(budget)}: the model has batch norm, which needs {floor} samples in every "
            f"micro-batch; expected at least {(2 * floor - 1) * longest:g}, {2 * floor - 1} times the longest sample"
        )
    if micro_steps is not None:
        raise PacelineError(
            f"micro_batch_cost={short(budget)} cuts a rank's part into as many micro-batches as it takes, and this "
            f"loop takes {micro_steps} a round; use loop='round' and pace.round(batch, function), or leave it out"
        )


def check_room(most: Sequence[int], global_batch: int, loop: str) -> None:
    """Raises PacelineError if one iteration of the loop on each rank cannot hold the batch.

    most: samples that each rank may take in a round.
    """
    if loop == "whole" and sum(most) < global_batch:
        raise PacelineError(
            f"micro_batch and limits leave room for {sum(most)} samples on {len(most)} ranks, and the global batch "
            f"has {global_batch}; in this loop each rank runs its part of a round at once: use loop='round' and "
            "pace.round(batch, function), which accumulates, or a smaller global_batch"
        )


def check_joins(policy: str, trains: bool) -> None:
    """Raises PacelineError for a policy of which a rank that joins cannot be handed over what it knows."""
    if trains:
        raise PacelineError(
            f"elastic=True: policy {policy} decides beside the training, which a rank that joins cannot take part "
            "in yet; use auto, level or another that does not train"
        )


def _pairs(limits: Any) -> None:
    wrong = f"limits={short(limits)}: expected 'memory', or a pair (least, most) for each rank, None for the default"
    if isinstance(limits, str) or not isinstance(limits, Sequence | np.ndarray):
        raise PacelineError(wrong)
    for rank, pair in enumerate(limits):
        if isinstance(pair, str) or not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise PacelineError(wrong)
        for end in pair:
            if end is not None:
                whole(f"limits of rank {rank}, least or most", end, 0)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
