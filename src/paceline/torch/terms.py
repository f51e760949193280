"""The agreement of a run's ranks before it begins: how a round may be divided between them, and by which policy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import policies
from paceline.balance import factoring
from paceline.balance.protocol import Policy
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.rounds import Cluster, Indices, PiecePlan
from paceline.sync import intervals
from paceline.torch import options, peers, plan, timing
from paceline.torch.gradients import same_bits
from paceline.torch.local import Every, Merge
from paceline.torch.options import (
    Options,
    has_batch_norm,
    has_synced_norm,
    least_and_most,
    warn_of_max_norm,
)
from paceline.torch.plan import RoundPlan

CHUNKS = 32  # default number of chunks of a round, if results must have the same bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The agreed settings, the same on every rank except ``micro_batch``; see ``Pace`` for a user's options."""

    global_batch: int  # samples of a full round over all ranks; the largest, if their sizes vary
    batch: int  # samples of an optimizer step on every rank, which is a round unless each steps by itself
    policy: str  # its name
    balancer: Balancer
    moves_work: bool  # work may move within the round
    micro_batch: int | None  # samples of a micro-step at most, on this rank
    min_samples: int  # least samples of a rank that works
    full: int  # least samples of a round in which each rank works; 0 if one without work does no harm
    filled: bool  # a micro-step without work gets samples that count for nothing
    most: Indices  # samples that each rank may take in a round, (n,)
    largest: Indices  # samples that fit into each rank's memory at once, (n,)
    unit: int  # claimed pieces are multiples of this many samples
    quantum: int  # every micro-step is a multiple of this many samples
    chunk: int  # samples of every micro-step, if results must have the same bits; else 0
    fixed_micro_steps: int | None  # micro-steps of every rank in every round; None if they may vary
    lockstep: bool  # all ranks must take the same number of micro-steps in a round
    loop: str  # how the training loop takes a round
    weigh: str  # where gradients get their weights: "loss" or "hook"
    memory: bool  # training finds what fits into each rank's memory
    every: Every  # the numbers of samples of rounds
    drop: float | None  # seconds after which no micro-batch begins; NaN if training finds them
    merge: Merge | None  # None unless each rank steps by itself

    def divided(
        self, step: int, size: int, start: int, present: NDArray[np.bool_] | None = None
    ) -> RoundPlan:
        """The plan of round ``step`` of ``size`` samples, which begin at ``start``, with what may be claimed.

        present: which ranks take part, (n,); by default all."""
        loads = self.balancer.loads(step, size, present)
        if self.full and not loads.all():
            warnings.warn(
                "a rank without work in a round runs filler samples, which SyncBatchNorm counts like others; choose "
                "a policy that gives each rank work, and end streams with their last full round",
                RuntimeWarning,
                stacklevel=timing.level(),
            )
        piece_plan = self.piece_plan(step, present)
        division = None
        if piece_plan is not None:
            most = self.most if present is None else np.where(present, self.most, 0)
            division = plan.divide(piece_plan, loads, start, most, self.largest, self.unit, self.chunk)
        return RoundPlan(step, loads, size, division)

    def piece_plan(self, step: int, present: NDArray[np.bool_] | None = None) -> PiecePlan | None:
        """How the ranks ``present``, (n,), run round ``step`` in pieces; None if they run it as planned."""
        found = self.balancer.piece_plan(step) if self.moves_work else None
        if found is None or present is None:
            return found
        return found._replace(speeds=np.where(present, found.speeds, 0.0))

    def micro_steps(self, loads: Indices) -> int | None:
        """Micro-steps of every rank in a round of these loads; None if their number may differ from rank to rank."""
        if self.fixed_micro_steps is None and self.lockstep:
            return int(np.max(-(-loads // self.largest)))
        return self.fixed_micro_steps


def agree(model: torch.nn.Module, given: Options, lockstep: bool) -> Terms:
    """Check a user's options, on this rank and against the other ranks. Collective.

    lockstep: all ranks must take the same number of micro-steps in a round.
    Raises PacelineError for options that cannot work, or differ between the ranks.
    """
    given.check_together()
    norms, ranks = has_batch_norm(model), peers.ranks()
    if ranks > 1:
        warn_of_max_norm(model)
    own, min_samples = given.loop == "local", options.min_samples_of(model)
    batch, fixed = int(given.global_batch), given.fixed_micro_steps
    merge: Merge | None = given.merge
    every = Every(intervals.interval(given.every) if own else 1, batch, merge.delay if merge else 0)
    global_batch, quantum = every.most, given.quantum
    # Samples of a micro-step, which is a rank's own step if each steps by itself.
    wanted = max(-(-batch // ranks // quantum) * quantum, 2 * min_samples - 1) if own else given.micro_batch
    micro_batch = _micro_batch(wanted, quantum, min_samples)
    limits = None if isinstance(given.limits, str) else given.limits
    if memory := isinstance(given.limits, str):
        given.check_memory(lockstep)
    least, most = least_and_most(limits, ranks, global_batch, min_samples)
    if synced := ranks > 1 and has_synced_norm(model):
        given.check_synced(least, min_samples * (fixed or 1), lockstep)
    if fixed is not None:
        most = [min(m, fixed * (own or m)) for m, own in zip(most, peers.gather(micro_batch), strict=True)]
        if given.loop == "whole" and sum(most) < global_batch:
            raise PacelineError(
                f"micro_batch and limits leave room for {sum(most)} samples on {ranks} ranks; expected at least "
                f"{global_batch}, the global batch: use loop='round' and pace.round(), which accumulates"
            )
    cluster = Cluster(ranks, global_batch, np.array(least, float), np.array(most, float), peers.machines())
    drop = options.threshold(given.drop)
    whole = not (fixed is None is drop) or lockstep or norms or (given.filled and given.weigh == "hook")
    name, chosen = _policy(given, cluster, whole)
    balancer = Balancer(chosen, quantum=quantum, min_samples=min_samples)
    facts = _facts(given, batch, name, given.limits if memory else (least, most))
    largest = peers.agree(facts, global_batch if micro_batch is None else micro_batch)
    moves_work, filled = balancer.piece_plan(0) is not None, given.filled or norms
    given.check_drop(lockstep, moves_work, next((p.device for p in model.parameters()), torch.device("cpu")))
    given.check_pieces(name, moves_work, lockstep, filled, global_batch, ranks)
    if given.elastic and balancer.policy.trains:
        raise PacelineError(
            f"policy {name} decides in its own thread, and a rank that joins cannot take part in "
            "that yet; use auto, level or another that does not train"
        )
    unit, chunk = max(quantum, min_samples), 0
    if own and micro_batch:
        unit = micro_batch
    if given.deterministic:
        unit = chunk = quantum if quantum > 1 else max(1, global_batch // CHUNKS)
        given.check_deterministic(name, moves_work, norms, chunk)
        peers.together(lambda: same_bits.check_model(model))
        same_bits.check_ranks()
        micro_batch = chunk
    return Terms(
        global_batch=global_batch,
        batch=batch,
        policy=name,
        balancer=balancer,
        moves_work=moves_work,
        micro_batch=micro_batch,
        min_samples=min_samples,
        full=sum(least) if synced else 0,
        filled=filled,
        most=np.array(most),
        largest=np.array(largest),
        unit=unit,
        quantum=1 if chunk else quantum,  # with chunks, the last claimed micro-step may be short
        chunk=chunk,
        fixed_micro_steps=fixed,
        lockstep=lockstep,
        loop=given.loop,
        weigh=given.weigh,
        memory=memory,
        every=every,
        drop=drop,
        merge=merge,
    )


def _micro_batch(wanted: int | None, quantum: int, min_samples: int) -> int | None:
    """A micro-step's largest number of samples: a multiple of ``quantum``, of which none leaves fewer than
    ``min_samples`` behind; None for any. Raises PacelineError if it is too small."""
    if wanted is None:
        return None
    if wanted < 2 * min_samples - 1:
        raise PacelineError(f"micro_batch={wanted}: expected at least {2 * min_samples - 1} samples")
    if wanted < quantum:
        raise PacelineError(f"micro_batch={wanted}: expected at least quantum={quantum} samples")
    return wanted // quantum * quantum


def _policy(given: Options, cluster: Cluster, whole: bool) -> tuple[str, Policy[Any]]:
    """The policy's name, and the policy. whole: each rank runs its part of a round as planned, so that auto's pieces
    are impossible, or leave batch norm only few samples."""
    wanted: Any = given.policy
    chosen = policies.create(wanted, cluster) if isinstance(wanted, str) else wanted(cluster)
    if isinstance(chosen, factoring.Auto) and (whole or cluster.workers == 1) and not given.deterministic:
        return "level", chosen.planner
    return wanted if isinstance(wanted, str) else type(chosen).__name__, chosen


def _facts(given: Options, batch: int, policy: str, limits: Any) -> dict[str, Any]:
    """The options that must be the same on all ranks, by name."""
    facts = {"global_batch": batch, "policy": policy, "limits": limits}
    for name in ("quantum", "micro_steps", "loop", "weigh", "deterministic", "every", "drop"):
        facts[name] = getattr(given, name)
    if given.merge is not None:
        facts["merge"] = str(given.merge)
    facts["callbacks"] = [type(each).__name__ for each in given.callbacks if each.only_rank_0]
    return facts
