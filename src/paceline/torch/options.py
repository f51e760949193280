"""The options of ``Pace``, and their checks: each by itself, the limits of the ranks' loads, and combinations.

A wrong option is reported in a sentence before anything is made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import numpy as np
import torch

from paceline.errors import MANY, PacelineError, meant, number, refuse, short, switches, whole
from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.sync import intervals
from paceline.torch import timing
from paceline.torch.callbacks import Callback
from paceline.torch.hooks_of_torch import is_batch_norm

LOOPS, LOCAL = ("whole", "round", "pieces"), "local"  # of the exact handles, and of local steps
# Bits of the counter of a round's claims: for the samples that were claimed, and for the ranks that have reported.
SAMPLES, RANKS = 28, 11
# Samples of a round that moves work, at most: ranks that claim at the same instant may count its last ones twice.
MOST_SAMPLES = 1 << SAMPLES - 1
MEMORY = "memory"  # value of limits: training finds what fits
Limits = Sequence[tuple[int | None, int | None]]  # (least, most) of each rank


@dataclass
class Options:
    """The options of all handles; the docstrings of ``Pace`` and the others explain them, that of ``balanced.Hosted``
    micro_steps and fill.

    Call ``check_kinds`` first, then ``check_together``; ``terms.agree`` turns them into the ranks' ``Terms``.
    """

    global_batch: int
    policy: str | Callable[[Cluster], Policy[Any]]
    _: KW_ONLY
    loop: str
    limits: Limits | str | None = None
    micro_batch: int | None = None
    micro_steps: int | None = None
    fill: bool | None = None
    quantum: int = 1
    weigh: str = "loss"
    deterministic: bool = False
    callbacks: Sequence[Callback] = ()
    elastic: bool = False  # ranks may be lost and join
    every: int | float | str | None = None  # None unless the loop is "local"
    merge: Any = None
    drop: float | str | None = None

    @property
    def filled(self) -> bool:
        """Whether a micro-step without work gets samples that count for nothing."""
        return self.loop != "pieces" if self.fill is None else bool(self.fill)

    @property
    def fixed_micro_steps(self) -> int | None:
        """Micro-steps of every rank in every round; None if their number may differ from rank to rank."""
        return 1 if self.micro_steps is None and self.loop == "whole" else self.micro_steps

    def check_kinds(self, model: Any) -> None:
        """Raises PacelineError for the first option of a wrong type, or out of range."""
        if not isinstance(model, torch.nn.Module):
            raise PacelineError(
                f"model={short(model)}: expected a torch.nn.Module, as DistributedDataParallel is"
            )
        whole("global_batch", self.global_batch)
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise PacelineError(
                f"policy={short(self.policy)}: expected the name of a policy, or a function that makes one"
            )
        for name in ("micro_batch", "micro_steps"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), most=MANY)
        whole("quantum", self.quantum)
        if self.limits is not None and not (isinstance(self.limits, str) and self.limits == MEMORY):
            _pairs(self.limits)
        given: Any = self.callbacks
        if not isinstance(given, Sequence) or not all(isinstance(each, Callback) for each in given):
            raise PacelineError(
                f"callbacks={short(given)}: expected a list of callbacks, such as [Record('runs/mine')], or "
                "[OnRound(function)] for a function that takes each RoundResult"
            )
        switches(fill=self.fill, deterministic=self.deterministic)

    def check_together(self) -> None:
        """Raises PacelineError for an unknown loop or way of weighing, or a combination that does not work."""
        loop, weigh, micro_steps = self.loop, self.weigh, self.micro_steps
        check_weigh(weigh)
        if micro_steps is not None and weigh == "hook":
            raise PacelineError(f"micro_steps={micro_steps}, weigh='hook': expected weigh='loss'")
        if loop not in (LOOPS if self.every is None else (LOCAL,)):
            raise PacelineError(
                f"loop={loop!r}: expected one of {', '.join(map(repr, LOOPS))}{meant(loop, LOOPS)}"
            )
        if self.deterministic and loop == "whole":
            raise PacelineError(
                "deterministic=True runs each round in many small pieces, and loop='whole' takes it in one "
                "micro-step; use loop='round' and pace.round(batch, function), or loop='pieces'"
            )

    def check_memory(self, lockstep: bool) -> None:
        """Raises PacelineError for loops in which training cannot find what fits into memory."""
        pieces, hook = self.loop == "pieces", self.weigh == "hook" and self.loop == "round"
        reasons = {
            "loop='pieces' runs its passes itself; use loop='round' and pace.round(batch, function)": pieces,
            "weigh='hook' weights what DDP has summed, and a pass that does not fit must be dropped before; use "
            "weigh='loss'": hook,
            "deterministic=True fixes the size of every pass; set quantum= to what fits": self.deterministic,
            "under fully_shard all ranks take the same number of passes; set micro_batch= to what fits": lockstep,
        }
        refuse("limits='memory'", reasons)

    def check_elastic(self) -> None:
        """Raises PacelineError for options that do not work if ranks may be lost or join."""
        alone = [type(each).__name__ for each in self.callbacks if each.only_rank_0]
        reasons = {
            "a round whose rank is lost takes more micro-steps than one on the others; use loop='round' and "
            "pace.round(batch, function), or loop='pieces'": self.loop == "whole",
            f"{' and '.join(alone)} would end with rank 0; use OnRound, which every rank calls, or paceline train, "
            "whose launcher writes the record": bool(alone),
        }
        refuse("ElasticPace", reasons)

    def check_drop(self, lockstep: bool, moves_work: bool, device: torch.device) -> None:
        """Raises PacelineError for loops in which no micro-batches can be dropped after a threshold."""
        if self.drop is None:
            return
        as_many, hook = lockstep or self.micro_steps is not None, self.weigh == "hook"
        whole, one, memory = self.loop != "round", self.micro_batch is None, isinstance(self.limits, str)
        reasons = {
            f"loop={self.loop!r} runs all that it is given; use loop='round' and pace.round(batch, function)": whole,
            "all ranks take the same number of passes under fully_shard or with micro_steps=; leave it out": as_many,
            "micro-batches are dropped, and each rank's part is one; set micro_batch= to an eighth of it, say": one,
            "weigh='hook' weights gradients before it is known which samples ran; use weigh='loss'": hook,
            "limits='memory' cuts passes while they run; set micro_batch= to what fits": memory,
            "deterministic=True keeps the bits of the whole batch; leave one of them out": self.deterministic,
            "the policy moves what a late rank has not begun to others; use level or equal, which do not": moves_work,
            f"the host's clock, which decides on the last micro-batch, runs ahead of {device.type}; leave it "
            "out": device.type != "cpu",
        }
        refuse(f"drop={short(self.drop)}", reasons)

    def check_pieces(
        self, policy: str, moves_work: bool, lockstep: bool, filled: bool, samples: int, ranks: int
    ) -> None:
        """Raises PacelineError if rounds cannot be run in pieces, as ``policy`` requires (``moves_work``).

        lockstep: every rank must run the same number of micro-steps. filled: a rank without work gets samples, too.
        samples: of a round, at most.
        """
        if not moves_work:
            return
        fixed = self.micro_steps is not None
        needs = f"micro_steps={self.micro_steps}" if fixed else "FSDP"
        reasons = {
            f"ranks then take different numbers of micro-steps, and {needs} needs the same on each; use a policy "
            "that plans whole rounds, such as level": fixed or lockstep,
            "loop='whole' takes each round in one micro-step; use loop='round' and pace.round(batch, function), or a "
            "policy that plans whole rounds, such as level": self.loop == "whole",
            "a rank's last micro-step in a round may count for nothing, and weigh='hook' cannot separate its "
            "gradient from those of earlier claims; use weigh='loss'": filled and self.weigh == "hook",
            f"a round may have {samples} samples, and claims are counted up to {MOST_SAMPLES}; use a smaller "
            "global_batch or every=, or a policy that plans whole rounds, such as level": samples
            > MOST_SAMPLES,
            f"{ranks} ranks take part, and claims are counted for {(1 << RANKS) - 1}; use a policy that plans whole "
            "rounds, such as level": ranks >= 1 << RANKS,
        }
        refuse(f"policy {policy} moves work within the round", reasons)

    def check_synced(self, least: Sequence[int], each: int, lockstep: bool) -> None:
        """Raises PacelineError if SyncBatchNorm would hang, or count the filler samples of a rank without work.

        least: each rank's least load. each: the least that gives it work in each micro-step."""
        local, varies = self.every is not None, self.fixed_micro_steps is None and not lockstep
        reasons = {
            "with local steps no layer can wait for the other ranks; use another norm": local,
            f"micro_batch={self.micro_batch} lets ranks take different numbers of passes, and each layer waits for "
            "all ranks; use loop='whole'": varies and self.micro_batch is not None,
            f"it would count the filler samples of a rank without work; set limits=[({each}, None)] * "
            f"{len(least)}": min(least) < each,
        }
        refuse("the model has SyncBatchNorm", reasons)

    def check_deterministic(self, policy: str, moves_work: bool, norms: bool, chunk: int) -> None:
        """Raises PacelineError if results cannot have the same bits whichever rank runs which samples.

        norms: the model has batch norm. chunk: samples of every micro-step.
        """
        small = self.micro_batch is not None and self.micro_batch < chunk
        reasons = {
            f"policy {policy} does not move work within the round; use factoring or auto": not moves_work,
            "weigh='hook' leaves the sum to DDP; use weigh='loss'": self.weigh == "hook",
            "the model has batch norm, whose statistics depend on how a round is divided; use another norm": norms,
            f"micro_batch={self.micro_batch} holds no chunk of {chunk} samples; set a smaller quantum": small,
        }
        refuse("deterministic=True", reasons)


# What cannot be set on a handle, since it would change nothing.
NAMES = frozenset(each.name for each in fields(Options)) | {"model", "stall"}


def threshold(drop: float | str | None) -> float | None:
    """``drop`` in seconds, NaN for "auto". Raises PacelineError for anything else."""
    if drop is None or (isinstance(drop, str) and drop.strip() == intervals.AUTO):
        return None if drop is None else math.nan
    found = intervals.SECONDS.fullmatch(drop.strip()) if isinstance(drop, str) else None
    seconds: Any = float(found[1]) if found else drop
    number("drop", seconds, "seconds such as '0.5 s' or 0.5, or 'auto'", lambda time: 0 < time < math.inf)
    return float(seconds)


def check_weigh(weigh: str) -> None:
    """Raises PacelineError for an unknown way of weighing."""
    if weigh not in ("loss", "hook"):
        raise PacelineError(f"weigh={weigh!r}: expected 'loss' or 'hook'{meant(weigh, ('loss', 'hook'))}")


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Whether the model has batch norm, whose variance needs two samples on each rank that works."""
    return any(is_batch_norm(m) for m in model.modules())


def min_samples_of(model: torch.nn.Module) -> int:
    """Fewest samples of a round, and of each rank and micro-batch that has any: batch norm needs two."""
    return 2 if has_batch_norm(model) else 1


def has_synced_norm(model: torch.nn.Module) -> bool:
    """Whether the model has batch norm with the statistics of all ranks, which count each rank's filler samples."""
    return any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())


def warn_of_max_norm(model: torch.nn.Module) -> None:
    """Warns of an embedding that changes its parameters in a forward pass, which no other rank does."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            warnings.warn(
                f"{type(module).__name__}(max_norm={module.max_norm:g}) rescales the rows that a rank reads on that "
                "rank alone, so that the ranks' models differ, also without Paceline; expected max_norm=None, and "
                "torch.renorm of the whole weight after the optimizer's step",
                RuntimeWarning,
                stacklevel=timing.level(),
            )
            return


def least_and_most(
    limits: Limits | None, ranks: int, batch: int, min_samples: int
) -> tuple[list[int], list[int]]:
    """The least and most samples of each rank, with defaults filled in. Raises PacelineError for wrong limits."""
    if limits is None:
        limits = [(None, None)] * ranks
    if len(limits) != ranks:
        raise PacelineError(
            f"limits for {len(limits)} ranks, but {ranks} take part; expected one pair for each"
        )
    least = [min_samples if low is None else int(low) for low, _ in limits]
    most = [batch if high is None else int(high) for _, high in limits]
    for rank, low in enumerate(least):
        if 0 < low < min_samples:
            raise PacelineError(
                f"limits of rank {rank}: least {low}; the model has batch norm, which needs 0 or at least "
                f"{min_samples}"
            )
    return least, most


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
