"""The decision loop that every engine runs: from the workers' reports to whole samples for each worker.

Every rank runs the same loop on the same reports and so makes the same plans. A plan made from round t takes
effect in round t + 1 + lag; lag is the number of rounds that loaders prefetch or that measurements arrive late.
A policy whose forecast trains does that in a background thread at low priority, while the next round runs. The model
that it has then decides after that round, on every rank alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline import policies, shares
from paceline.balance.factoring import Auto
from paceline.balance.protocol import Policy, complete
from paceline.costs import Linear
from paceline.errors import PacelineError, short, whole
from paceline.forecast import overheads
from paceline.rounds import Array, Gradients, PiecePlan, PieceTimes, Plan, Round, measurable
from paceline.samples import CostLearner, CostModel, Deal, InPieces, Room, deal, in_pieces

T = TypeVar("T")

_log = logging.getLogger(__name__)
NICE = 10  # of 19: the thread that decides in the background yields the processor to all others
WORTH = 50.0  # times what a piece costs beyond its samples: shorter rounds are not run in pieces
FADE = 0.995  # factor on the measured cost of a piece, for each round since that ran as planned


class Balancer:
    """Feeds one policy with one run's rounds (LB-BSP, Alg. 1, manager, lines 1 to 3).

    policy: from ``policies.create``, for a single run (no leading axes).
    quantum: loads are multiples of this many samples; the remainder of a short batch goes to one worker.
    min_samples: a load is 0 or at least this many samples (batch norm needs 2).
    learner: learns what samples cost, if they cost differently; the engine then divides rounds with ``deal``.

    Attributes:
        latest: The plan in force from the latest round on, and this round; a new object whenever plans change.
    """

    def __init__(
        self,
        policy: Policy[Any],
        *,
        quantum: int = 1,
        min_samples: int = 1,
        learner: CostLearner | None = None,
    ) -> None:
        if not hasattr(policy, "cluster"):
            raise PacelineError(
                f"policy={short(policy)}: expected a policy, as paceline.policies.create makes one"
            )
        complete(policy)
        cluster = policy.cluster
        whole("quantum", quantum)
        whole("min_samples", min_samples)
        if cluster.global_batch % quantum:
            raise PacelineError(
                f"quantum={quantum}: expected a positive divisor of the global batch of {cluster.global_batch}"
            )
        if (held := (cluster.most // quantum * quantum).sum()) < cluster.global_batch:
            raise PacelineError(
                f"quantum={quantum}: the most loads hold {held:g} samples in multiples of it; expected at least "
                f"{cluster.global_batch}, the global batch: raise the limits, or set a smaller quantum"
            )
        if (needed := (np.ceil(cluster.least / quantum) * quantum).sum()) > cluster.global_batch:
            raise PacelineError(
                f"quantum={quantum}: the least loads take {needed:g} samples in multiples of it; expected at most "
                f"{cluster.global_batch}, the global batch: set least loads of 0, or a smaller quantum"
            )
        if policy.needs_upcoming:
            raise PacelineError(
                f"{type(policy).__name__.lower()} needs the next round's costs and only runs in simulations; "
                "choose another policy"
            )
        self.policy, self.lag = policy, 0
        self._quantum, self._min_samples = quantum, min_samples
        self.learner: CostLearner | None = None
        self.needs_readings = policy.needs_readings
        self._aside = thread_aside() if policy.trains else None
        self._most: dict[int, Array] = {}  # samples of each worker at most, by the first round they hold for
        self.restart(0)
        if learner is not None:
            self.learn(learner, 0)

    def restart(self, step: int) -> None:
        """Begin again at round ``step``, with nothing learned."""
        plan = self._forget()
        self._plans: dict[int, Plan] = {}  # by the first round that each holds for
        self._holds(step, plan)
        self._models: dict[int, CostModel] = {}  # the same, if samples cost differently
        if self.learner is not None:
            self.learner.restart()
            self._models = {step: self.learner.model()}
        self._newest = plan
        if self._most:  # what fits does not depend on the policy
            self._most = {step: policies.in_force(self._most, max(self._most))}
        self._training: Future[Any] | None = None  # the state that the background thread makes

    def _holds(self, step: int, plan: Plan) -> None:
        """Put the plan in force from round ``step`` on; no plan may hold from a later round."""
        self._plans[step], self.latest = plan, (step, plan)

    def _forget(self) -> Plan:
        """Forget all rounds; returns the policy's first plan."""
        plan, self._state = self.policy.init()
        self._fit, self._warm, self._cost = overheads.start(self.policy.cluster.shape), False, 0.0
        return plan

    def learn(self, learner: CostLearner, step: int) -> None:
        """From round ``step`` on, divide rounds by the costs that this learner finds, with ``deal``.

        Raises PacelineError if loads have to be multiples of a number of samples."""
        if self._quantum > 1:
            raise PacelineError(
                f"quantum={self._quantum} counts samples, and a division by cost does not; leave one of them out"
            )
        self.learner, self._models = learner, {step: learner.model()}

    def limit(self, step: int, most: Array) -> None:
        """From round ``step`` on, limit each worker to this many samples, (n,), within the cluster's limits; NaN sets
        no further limit. If the limits cannot hold a batch and what an epoch's last round takes beyond it (less than
        that minimum), all are exceeded by the same factor."""
        cluster, unit = self.policy.cluster, self._quantum
        needed = min(cluster.global_batch + self._min_samples - 1, cluster.most.sum())
        most = np.minimum(np.where(np.isnan(most), np.inf, most), cluster.most)
        most = np.maximum(np.floor(most / unit) * unit, np.maximum(cluster.least, self._min_samples))
        if (room := most.sum()) < needed:
            most = np.minimum(np.ceil(most * (needed / room / unit)) * unit, cluster.most)
        self._most[step] = most if most.sum() >= needed else cluster.most
        self._holds(step, self.plan(step))  # callers that keep divisions divide again

    def _limits(self, step: int) -> tuple[Array, Array]:
        """Least and most samples of each worker in a full round."""
        cluster = self.policy.cluster
        return cluster.least, policies.in_force(self._most, step) if self._most else cluster.most

    @property
    def digest(self) -> int:
        """A number that is equal on two ranks only if they made the same newest plan."""
        return policies.digest(self._newest)

    def loads(
        self,
        step: int,
        batch: int,
        present: NDArray[np.bool_] | None = None,
        room: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Whole samples of each worker in round ``step`` of ``batch`` samples, shape (n,); sums to ``batch``.

        present: which workers take part, shape (n,), if the engine knows more than the last report; the others get
            nothing. room: samples that each worker can be given in this round, (n,), if that is less than its
            limit. Raises PacelineError if the limits of the workers present cannot hold the batch.
        """
        plan = self.plan(step)
        least, most = self._limits(step)
        if present is not None and not present.all():
            plan = plan.among(present)
            least, most = np.where(present, least, 0.0), np.where(present, most, 0.0)
        if room is not None:
            most = np.minimum(most, room)
            least = np.minimum(least, most)
        return shares.whole_samples(plan, batch, least, most, self._quantum, self._min_samples)

    def deal(
        self,
        step: int,
        lengths: Array,
        present: NDArray[np.bool_] | None = None,
        room: Room = Room(),  # noqa: B008  # immutable
    ) -> Deal:
        """Round ``step`` of samples of these lengths, (B,), divided by cost: which worker runs which samples.

        The counterpart of ``loads`` if samples cost differently: the plan's shares are parts of the round's cost.
        present: which workers take part, (n,). room: what a round and a micro-batch may hold; its least and most
        default to the cluster's. Report this round with ``parts=deal.parts``.
        """
        plan, room = self._here(step, self.plan(step), present, room)
        costs = plan.costs if isinstance(plan.costs, Linear) else plan.by_shares()
        return deal(lengths, self.cost_model(step), costs.seconds_per_sample, costs.overhead, room)

    def in_pieces(
        self,
        step: int,
        lengths: Array,
        present: NDArray[np.bool_] | None = None,
        room: Room = Room(),  # noqa: B008  # immutable
    ) -> InPieces | None:
        """Like ``deal``, if workers claim a part of round ``step`` while it runs; None if all of it runs as planned.

        Report this round with ``parts`` of the samples that were really run, and ``first``.
        """
        planned = self.plan(step)
        if (pieces := planned.piece_plan) is None or not _moves_work(planned):
            return None
        plan, room = self._here(step, planned, present, room)
        at_once, least = float(pieces.at_once), np.broadcast_to(pieces.least, plan.shares.shape)
        room = room._replace(least=None)
        return in_pieces(lengths, self.cost_model(step), plan.shares, at_once, least, room)

    def _here(
        self, step: int, plan: Plan, present: NDArray[np.bool_] | None, room: Room
    ) -> tuple[Plan, Room]:
        """The plan and the room for the workers present; the cluster's limits fill in what the room leaves open."""
        least, most = self._limits(step)
        least = least if room.least is None else np.asarray(room.least, float)
        most = most if room.most is None else np.asarray(room.most, float)
        if present is not None and not present.all():
            plan = plan.among(present)
            least, most = np.where(present, least, 0.0), np.where(present, most, 0.0)
        least = np.where(plan.shares > 0, least, 0.0)
        return plan, room._replace(
            least=least, most=most, min_samples=max(room.min_samples, self._min_samples)
        )

    def cost_model(self, step: int) -> CostModel:
        """The cost model of round ``step``; there must be a learner."""
        return policies.in_force(self._models, step)

    def piece_plan(self, step: int) -> PiecePlan | None:
        """How round ``step`` runs in pieces; None if it runs as planned."""
        return self.plan(step).piece_plan

    def plan_ahead(self, rounds: int) -> None:
        """Loaders draw this many rounds ahead, or measurements are that late: plans take effect that much later."""
        self.lag = max(self.lag, rounds)

    def report(
        self,
        step: int,
        loads: NDArray[np.int64],
        seconds: Array,
        known_overhead: Array | None = None,
        cpu: Array | None = None,
        memory: Array | None = None,
        pieces: PieceTimes | None = None,
        parts: Array | None = None,
        first: tuple[Array, Array] | None = None,
        short: float = 0.0,
        gradients: Gradients | None = None,
    ) -> tuple[Array, Array]:
        """Record round ``step``, or the mean of several rounds up to it, and plan from it; arrays of shape (n,), the
        seconds of an absent worker NaN.

        parts: of each worker's cost, (n, 3), if the round was dealt by cost (``Deal.parts``, or what was really
            run): the policy and the fitted overheads then see costs as loads, and the learner learns from them.
        first: parts of what each worker ran before its first claim, (n, 3), and the seconds of these, (n,), if work
            moved within the round: the learner then learns from these alone, since workers claim until the round
            ends, so that the seconds of claims say nothing of their cost.
        short: a round of fewer seconds, or in which workers take fewer than ``WORTH`` times the cost of a piece, is
            too short for claims: "auto" plans it whole, as "level" does. 0 if no round of this engine is too short.
        gradients: what is known of them, if the engine can leave some of them out.
        Returns (the overhead fitted to each worker, the shares planned), each of shape (n,). Errors of the policy
        are raised here, those of its training by the next call; the plans then stay as before, and the next round
        can be reported.
        """
        known = np.zeros(seconds.shape) if known_overhead is None else known_overhead
        seconds, known = measurable(np.array([seconds, known]))
        ran = loads.astype(float)
        if self.learner is not None and parts is not None:
            if first is None:
                replay = self.learner.take(parts, seconds, np.nan_to_num(known))
            else:
                replay = self.learner.take(first[0], measurable(first[1]))
            self._models[step + 1 + self.lag] = self.learner.model()
            if replay and self._aside is None and not self.needs_readings and pieces is None:
                self._replay(self.learner)
            ran = self.learner.cost(parts)
        moved = _moves_work(self.plan(step))
        if pieces is not None:  # without pieces the known cost fades, so that pieces are tried again
            self._cost = float(np.nanmean(pieces.cost)) if moved else FADE * self._cost
        least = WORTH * self._cost if short else 0.0
        brief = bool(np.fmax.reduce(seconds) < short or (least and np.nanmean(seconds) < least))
        more = {"cpu": cpu, "memory": memory, "pieces": pieces, "gradients": gradients}
        happened = self._happened(ran, seconds, known, moved, **more)
        self._state, failed = self._trained()
        self._training = None
        self._newest, self._state = self._step(self._state, happened, brief)
        self._holds(step + 1 + self.lag, self._newest)
        if self._aside is not None:
            self._training = self._aside.submit(self.policy.train, self._state)
        kept = self._plans, self._models, self._most
        self._plans, self._models, self._most = (_since(each, step + 1) for each in kept)
        if failed is not None:
            raise failed
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", _sentence(step, loads, seconds, self._newest))
        return happened.overhead, self._newest.shares

    def _trained(self) -> tuple[Any, BaseException | None]:
        """The state after the training in the background, for which it waits; or as before, and why it failed."""
        if self._training is None:
            return self._state, None
        failed = self._training.exception()
        return (self._training.result() if failed is None else self._state), failed

    @property
    def steady(self) -> bool:
        """Whether several rounds may be reported as one: they run as planned, and neither the policy nor a model of
        sample costs has to see each of them."""
        learning = self.learner is not None and not self.learner.settled
        return not (self._aside or learning or any(map(_moves_work, self._plans.values())))

    def _happened(self, ran: Array, seconds: Array, known: Array, moved: bool = False, **more: Any) -> Round:
        """A round as policies see it, with the overheads fitted so far; moved: work moved within it."""
        # If work moves within the round, all workers end together: their seconds stay the same while their loads
        # vary, which looks like overhead. For these rounds only the overhead that the engine measured counts.
        gradients = more.get("gradients")
        newly = seconds if gradients is None else np.where(gradients.late, np.nan, seconds)
        fit = self._fit if moved else overheads.update(self._fit, ran, newly, known)
        overhead, batch = known + overheads.certain(fit), float(ran.sum())
        # The first round includes warm-up. Compared with it, a later round with more samples in fewer seconds would
        # look like overhead alone; a worker whose load seems to cost nothing would get all samples from then on.
        self._fit, self._warm = fit if self._warm else self._fit, True
        return Round(ran / batch, seconds, batch, overhead, **more)

    def _replay(self, learner: CostLearner) -> None:
        """Pass the rounds before the newest to the policy again: their costs are better known now."""
        self._forget()
        for each in learner.seen[:-1]:
            happened = self._happened(learner.cost(each.parts), each.seconds, each.known)
            _, self._state = self._step(self._state, happened)

    def _step(self, state: Any, happened: Round, brief: bool = False) -> tuple[Plan, Any]:
        """The policy's next plan and state. Raises PacelineError if the shares do not sum to 1: a bug of the policy
        that rounding to whole samples would hide.
        """
        policy, pieces = self.policy, self._newest.piece_plan
        if brief and pieces is not None and isinstance(policy, Auto):  # it learns nothing of pieces now
            plan, inner = policy.planner.step(state.plan, happened)
            plan = Plan(plan.shares, costs=plan.costs, piece_plan=pieces._replace(at_once=np.ones(())))
            after = state._replace(plan=inner, planned=plan.shares)
        else:
            plan, after = policy.step(state, happened)
        _check(plan, type(policy).__name__)
        return plan, after

    def plan(self, step: int) -> Plan:
        """The plan of round ``step``."""
        first, plan = self.latest
        return plan if first <= step else policies.in_force(self._plans, step)

    def state_dict(self) -> dict[str, Any]:
        """Policy state, fitted costs and the plans not yet in force, as plain lists and numbers."""
        state, _ = self._trained()  # ``report`` raises an error of the training
        kept = {
            "workers": self.policy.cluster.workers,
            "lag": self.lag,
            "policy": [leaf.tolist() for leaf in policies.leaves(state)],
            "fit": [leaf.tolist() for leaf in policies.leaves(self._fit)],
            "warm": self._warm,
            "cost": self._cost,
            "plans": {step: policies.plan_as_lists(plan) for step, plan in self._plans.items()},
            "newest": policies.plan_as_lists(self._newest),
        }
        if self.learner is not None:
            kept["costs"] = self.learner.state_dict(self._models)
        return kept

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue at round ``step``; begin again, with nothing learned, if the number of workers has changed.

        Raises PacelineError for a state that ``state_dict`` cannot have returned; nothing is changed then.
        """
        cluster = self.policy.cluster
        names = "workers", "policy", "fit", "plans", "newest", "warm"
        workers, policy, fit, plans, newest, warm = (policies.stored_entry(state, name) for name in names)
        if policies.stored_whole(workers, "workers") != cluster.workers:
            _log.info(
                "the policy starts again at round %d: its state is of %d workers, and %d take part now",
                *(step, workers, cluster.workers),
            )
            self.restart(step)
            return
        if not isinstance(warm, bool):
            raise PacelineError(f"warm is {short(warm)} in the state; expected true or false")
        (cost,) = policies.restore((np.zeros(()),), [state.get("cost", 0.0)])
        restored = policies.restore(self.policy.init()[1], policy)
        fitted = policies.restore(overheads.start(cluster.shape), fit)
        revived = dict(sorted(policies.stored_plans(plans, cluster.workers, step).items()))
        last = policies.stored_plan(newest, cluster.workers)
        costs = state.get("costs") if self.learner is not None else None
        learned = None if costs is None or self.learner is None else self.learner.stored(costs, step)
        self.restart(step)
        self._state, self._fit, self._plans, self._newest, self._warm = restored, fitted, revived, last, warm
        self.latest, self._cost = next(reversed(revived.items())), float(cost)
        if learned is not None:
            self.learner, self._models = learned


def thread_aside() -> ThreadPoolExecutor:
    """One background thread at low priority, which runs one call after another while the training continues."""
    return ThreadPoolExecutor(1, thread_name_prefix="paceline-aside", initializer=_step_back)


def _step_back() -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux, the thread's own


def _since(by_step: dict[int, T], step: int) -> dict[int, T]:
    """The entries that hold at ``step`` or later."""
    if not by_step:
        return by_step
    running = max((first for first in by_step if first <= step), default=step)
    return {first: each for first, each in by_step.items() if first >= running}


def _check(plan: Plan, name: str) -> None:
    """Raise PacelineError if the shares of a plan of this policy are negative or do not sum to 1."""
    least, together = float(plan.shares.min()), float(plan.shares.sum())
    if not (abs(together - 1.0) <= 1e-6 and least >= 0):
        raise PacelineError(
            f"policy {name} planned shares of {least:g} to {plan.shares.max():g} that sum to {together:g}: expected "
            "none below 0, and a sum of 1"
        )


def _moves_work(plan: Plan) -> bool:
    """Whether workers claim a part of the round while it runs."""
    return plan.piece_plan is not None and not plan.piece_plan.at_once >= 1


def _sentence(step: int, loads: NDArray[np.int64], seconds: Array, plan: Plan) -> str:
    """A round's loads and seconds and the shares planned from it, for the log."""
    slowest = ""
    if not np.isnan(seconds).all():
        last = int(np.nanargmax(seconds))
        slowest = f", worker {last} was last after {seconds[last]:.4g} s (mean {np.nanmean(seconds):.4g} s)"
    shares = ", ".join(f"{share:.3f}" for share in plan.shares)
    return f"round {step}: {', '.join(map(str, loads))} samples{slowest}; planned shares {shares}"
