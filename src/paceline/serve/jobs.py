"""One job as a state machine: workers join, report and leave, and the job makes plans.

The job reads no clock and uses no network. ``handle`` takes an event with its time and returns the effects. The same
events in the same order give the same plans, so a restart needs only the log of events. All other public
methods only read: ``next``, for instance, returns what a worker that asks should do.

A round is settled when the first worker asks for it: it is planned, in whole samples that sum to the batch, for the
workers that are present then. Afterwards its plan does not change: the event that settles the round contains the
plan, so that a version with other rules replays the same one. The round closes when all its workers have
reported or left, and the balancer learns from it. A round that all workers left without a report is cancelled.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np

from paceline.client import Part
from paceline.errors import PacelineError
from paceline.rounds import Array, RoundResult
from paceline.samples import SampleCosts
from paceline.serve import events
from paceline.serve.events import Conflict, Effect, Report
from paceline.serve.models import Lengths, Settings, Waiting
from paceline.serve.places import MEMBERS, ROUNDS, JobWorker, JobWorkers, PendingRound

_log = logging.getLogger(__name__)
QUICKEST = 1e-9  # least seconds that a report with samples may have
RECENT = 8  # recent rounds from which deadlines are computed


class Job:
    """A job, which starts without workers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.members = JobWorkers(settings.workers)
        self.balancer = settings.balancer()
        self.settled = 0  # number of settled rounds, and so the number of the next round
        self.closed = 0
        self.samples = 0  # reported in all rounds
        self.reports = 0
        self.drops = 0
        self.open: dict[int, PendingRound] = {}  # settled rounds that are not closed, in their order
        self._recent: deque[float] = deque(maxlen=RECENT)  # longest turnarounds of recent rounds
        self._unit: list[float] | None = None  # lengths of the first round, which are the unit of costs
        self._mark: float | None = None  # when the last round closed; None if no worker was present since
        self._planned: tuple[Any, list[int] | str] = None, ""  # cache: the key, and the plan

    def handle(self, event: events.Event) -> list[Effect]:
        """Apply an event; returns its effects.

        Raises a PacelineError if the event is refused, and then changes nothing.
        """
        before = self.ready
        match event:
            case events.JoinEvent():
                effects = self._join(event)
            case events.LeaveEvent(now, name):
                effects = self._leave(now, self.members.here(name), "has left")
            case events.DropEvent(now, name):
                effects = self._drop(now, name)
            case events.Settle():
                effects = self._settle(event)
            case events.ReportEvent(now, name, report):
                effects = self._report(now, name, report)
            case events.Resume(now):
                effects = self._resume(now)
        return effects if before or not self.ready else [*effects, events.Ready(event.now, self.settled)]

    def _join(self, event: events.JoinEvent) -> list[Effect]:
        """Add the worker to all rounds settled from now on; if it has this place already, it keeps its part."""
        now, name, secret, place = event
        self.members.place(name, secret, place)
        effects: list[Effect] = []
        mine = self.members.by_name.get(name)
        if mine is not None and mine.present:
            if mine.place == place:
                return [event]
            effects += self._leave(now, mine, "has taken another place")
        self.members.join(now, name, secret, place)
        return [*effects, event]

    def _drop(self, now: float, name: str) -> list[Effect]:
        member = self.members.here(name)
        waits = [each for each in self.open.values() if member.place in each.awaited]
        silent = now - max([member.heard, *(each.opened for each in waits[:1])])
        where = f" in round {waits[0].number}" if waits else ""
        sentence = f"was dropped{where} after {silent:.1f} s of silence; the other workers take its share"
        self.drops += 1
        return self._leave(now, member, sentence)

    def next(self, now: float, name: str, lengths: Lengths | None = None) -> Part | events.Settle | Waiting:
        """The answer to a worker that asks: its part of a round, an event that hands out the next round (the worker
        asks again afterwards), or the reason why it must wait.

        lengths: of the requested round's samples, if they cost differently. Raises PacelineError for a refusal.
        """
        member = self.members.here(name)
        if lengths is not None:
            if self.settings.cost is None:
                raise PacelineError(
                    "the job has no cost, so it takes no lengths: create it with cost='sum' or 'padded'"
                )
            SampleCosts.checked(lengths.lengths, self.settings.batch, "lengths")
        if (current := self._current(member)) is not None:
            if lengths is not None and lengths.round != current.number:
                raise Conflict(
                    f"worker {name!r} has not reported round {current.number}: expected the lengths of that round"
                )
            if lengths is not None and current.dealt is not None and lengths.lengths != current.dealt.lengths:
                raise Conflict(
                    f"these lengths differ from those with which round {current.number} was handed out; "
                    "expected the same samples, in the same order, from every worker"
                )
            return current.part(member.place)
        if self._may_settle and self.settings.cost is not None:
            # Another round may have been handed out, or cancelled, since lengths were requested.
            if lengths is not None and lengths.round == self.settled:
                return self._deal(now, lengths.lengths)
            wanted = f"the lengths of round {self.settled}'s samples are needed"
            return Waiting(waiting=wanted, round=self.settled)
        if self._may_settle and not isinstance(loads := self._plan(), str):
            return events.Settle(now, self.settled, loads)
        return Waiting(waiting=self.waiting_for())

    def _deal(self, now: float, lengths: list[float]) -> events.Settle | Waiting:
        """The next round, of samples of these lengths, for the workers present; or why there is none."""
        balancer = self.balancer
        if balancer.learner is None:  # no round was handed out yet
            balancer = self.settings.balancer()
            balancer.learn(self.settings.learner(lengths), 0)
        try:
            found = balancer.deal(self.settled, np.array(lengths), self.members.mask)
        except PacelineError as error:
            return Waiting(waiting=f"the workers present cannot hold the batch: {error}")
        dealt = events.RoundDeal(lengths, found.order.tolist(), [sizes.tolist() for sizes in found.sizes])
        return events.Settle(now, self.settled, found.loads.tolist(), dealt)

    @property
    def ready(self) -> bool:
        """Whether the next worker that asks gets a new round."""
        return self._may_settle and not self._no_plan

    @property
    def _may_settle(self) -> bool:
        enough = self.members.count >= (self.settings.to_start if self.settled == 0 else 1)
        return enough and len(self.open) <= self.settings.ahead

    @property
    def _no_plan(self) -> str:
        """Why there is no plan for the workers present; "" if there is one, or no worker could get it yet."""
        asked = self._may_settle and self.settings.cost is None
        return planned if asked and isinstance(planned := self._plan(), str) else ""

    def _plan(self) -> list[int] | str:
        """The next round's samples by place for the workers present, or why there is no plan; cached."""
        key = self.settled, self.closed, self.members.mask.tobytes()  # all that the plan depends on
        if self._planned[0] == key:
            return self._planned[1]
        plan: list[int] | str
        try:
            plan = self.balancer.loads(self.settled, self.settings.batch, self.members.mask).tolist()
        except PacelineError as error:
            plan = f"the workers present cannot hold the batch: {error}"
        except Exception as error:
            _log.exception("the policy %s failed to make a plan", self.settings.policy)
            plan = f"the policy makes no plan for the workers present ({type(error).__name__}: {error})"
        self._planned = key, plan
        return plan

    def _settle(self, event: events.Settle) -> list[Effect]:
        now, round, loads, dealt = event
        if round != self.settled or not self._may_settle:
            raise Conflict(f"round {round} cannot be handed out now: expected {self.settled}")
        mask = self.members.mask
        planned = np.array(loads, np.int64)
        if planned.shape != mask.shape or planned.sum() != self.settings.batch or planned[~mask].any():
            raise Conflict(
                f"the plan of round {round} is not for {self.settings.batch} samples and the workers present"
            )
        if self.settings.cost is not None and dealt is not None and self.balancer.learner is None:
            self._unit = dealt.lengths
            self.balancer.learn(self.settings.learner(self._unit), round)
        awaited = set(np.flatnonzero(mask).tolist())
        self.open[round] = PendingRound(
            number=round, opened=now, loads=loads, present=len(awaited), awaited=awaited, dealt=dealt
        )
        self.settled += 1
        if self._mark is None:
            self._mark = now
        return [event]

    def check(self, name: str, report: Report) -> PendingRound | None:
        """The round that is reported; None if the worker has sent the same report already. Raises PacelineError for a
        report that is refused."""
        member = self.members.here(name)
        if report.samples > 0 and not report.seconds >= QUICKEST:
            raise PacelineError(
                f"seconds={report.seconds:g} for samples={report.samples}: expected {QUICKEST:g} or more"
            )
        if not 0 <= report.overhead <= report.seconds:
            raise PacelineError(
                f"overhead={report.overhead:g}: expected 0 to seconds={report.seconds:g}, since it is part of these"
            )
        if member.last is not None and report.round == member.last.round:
            if report == member.last:
                return None
            raise Conflict(f"worker {name!r} has reported round {report.round} already, with other figures")
        current = self._current(member)
        if current is None:
            raise Conflict(
                f"worker {name!r} reports round {report.round}, but has no part in a round: ask for the next part"
            )
        if report.round != current.number:
            past = "a past" if report.round < current.number else "a future"
            raise Conflict(
                f"worker {name!r} reports round {report.round}, {past} round: expected round {current.number}"
            )
        current.check(name, member.place, report.samples)
        return current

    def _report(self, now: float, name: str, report: Report) -> list[Effect]:
        if (current := self.check(name, report)) is None:
            return []
        member = self.members.here(name)
        current.report(member.place, report, now - max(current.opened, member.heard))
        member.heard, member.last = now, report
        self.reports += 1
        return self._close(now)

    def silent(self, now: float) -> list[str]:
        """The workers whose deadline has passed."""
        since, holders = now - self.limit(), self.members.holders
        late = [each for each in self.open.values() if each.opened < since]
        awaited = [holders[place] for each in late for place in sorted(each.awaited)]
        return list(dict.fromkeys(each.name for each in awaited if each is not None and each.heard < since))

    def limit(self) -> float:
        """Seconds that a worker may be silent while it runs its part of a round."""
        asked = self.settings
        return asked.grace + asked.give_up * max(self._recent) if self._recent else asked.first

    def _resume(self, now: float) -> list[Effect]:
        for each in self.open.values():
            each.opened = now
        self._mark = None if self._mark is None else now
        return []

    def waiting_for(self) -> str:
        """One sentence on what the next round waits for; "" if it waits for nothing."""
        if no_plan := self._no_plan:
            return no_plan
        missing = (self.settings.to_start if self.settled == 0 else 1) - self.members.count
        if missing > 0:
            return f"{missing} more worker{'s' * (missing > 1)} must join"
        if len(self.open) > self.settings.ahead:
            oldest = next(iter(self.open.values()))
            names = [self.members.holders[place].name for place in sorted(oldest.awaited)[:3]]  # type: ignore[union-attr]
            more = f" and {len(oldest.awaited) - 3} more" if len(oldest.awaited) > 3 else ""
            return f"round {oldest.number} waits for the report of {', '.join(names)}{more}"
        return ""

    @property
    def closing(self) -> bool:
        """Whether one more report closes a round."""
        return bool(self.open) and len(next(iter(self.open.values())).awaited) == 1

    def state_dict(self) -> dict[str, Any]:
        """The whole state but the settings, as plain values for JSON."""
        return {
            "balancer": self.balancer.state_dict(),
            "unit": self._unit,
            "members": MEMBERS.dump_python(list(self.members.by_name.values()), mode="json"),
            "open": ROUNDS.dump_python(list(self.open.values()), mode="json"),
            "recent": list(self._recent),
            "mark": self._mark,
            "counts": [self.settled, self.closed, self.samples, self.reports, self.drops],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.settled, self.closed, self.samples, self.reports, self.drops = state["counts"]
        self._unit = state["unit"]
        if self._unit is not None:
            self.balancer.learn(self.settings.learner(self._unit), self.settled)
        self.balancer.load_state_dict(state["balancer"], self.settled)
        self.members = JobWorkers(self.settings.workers, MEMBERS.validate_python(state["members"]))
        self.open = {each.number: each for each in ROUNDS.validate_python(state["open"])}
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._mark, self._planned = state["mark"], (None, "")

    def _current(self, member: JobWorker) -> PendingRound | None:
        """The first round that waits for the worker."""
        return next((each for each in self.open.values() if member.place in each.awaited), None)

    def _leave(self, now: float, member: JobWorker, why: str) -> list[Effect]:
        self.members.leave(member, now, why)
        for each in self.open.values():
            each.awaited.discard(member.place)
        effects = [events.Departure(now, member.name, why), *self._close(now)]
        if not self.members.count:
            self._mark = None
        return effects

    def _close(self, now: float) -> list[Effect]:
        """Close the rounds that wait for no worker, the oldest first; cancel newest rounds without any report."""
        effects: list[Effect] = []
        while self.open and not (last := self.open[self.settled - 1]).awaited and not last.reports:
            self.settled -= 1
            del self.open[self.settled]
        while self.open and not next(iter(self.open.values())).awaited:
            effects += self._learn(now, self.open.pop(next(iter(self.open))))
        return effects

    def _learn(self, now: float, round: PendingRound) -> list[Effect]:
        """Report a completed round to the balancer."""
        effects: list[Effect] = []
        loads, seconds = round.reported("samples"), round.reported("seconds")
        overhead: Array = np.nan_to_num(round.reported("overhead"))
        shares = np.full(len(seconds), np.nan)
        samples = np.nan_to_num(loads).astype(np.int64)
        if samples.any():
            # Workers that joined during the round had nothing to do; this differs from being absent.
            arrived = self.members.mask & np.isnan(seconds)
            reads = self.balancer.needs_readings
            try:
                overhead, shares = self.balancer.report(
                    round.number,
                    samples,
                    np.where(arrived, 0.0, seconds),
                    overhead,
                    round.reported("cpu") if reads else None,
                    round.reported("memory") if reads else None,
                    parts=round.parts(self.settings.cost == "padded"),
                )
            except Exception as error:  # a failure of the policy must not fail the workers' requests
                effects.append(events.Unlearned(error))
        if round.reports:
            self._recent.append(round.longest)
        began = round.opened if self._mark is None else self._mark
        self._mark = now
        self.closed += 1
        self.samples += int(samples.sum())
        result = RoundResult(
            step=round.number,
            batch=int(samples.sum()),
            loads=loads,
            compute=seconds,
            overhead=overhead,
            # A worker may count work that it began before the round's first request, or use another clock.
            seconds=float(np.fmax.reduce(seconds, initial=now - began)),
            shares=shares,
            ended=now,
        )
        return [result, *effects]
