"""The course of a loop, micro-step by micro-step: rounds are planned, claimed, measured, reduced and settled.

One iteration is an epoch of a loader, or some rounds whose samples the loop draws itself. A ``Source`` gives each
micro-step its batch: a round's planned pieces, and between them those that this rank claims. The ``Members`` set the
sequence of rounds and commit each of them; if their sums fail, the loop runs the missing samples and tries again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, perf_counter
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.torch import batches, peers, timing
from paceline.torch.callbacks import Callback, overriding
from paceline.torch.claims import Claims
from paceline.torch.decisions import Decisions
from paceline.torch.drops import Drops
from paceline.torch.gradients.weighing import LocalWeighing
from paceline.torch.host import Host
from paceline.torch.liveness.monitor import Alone
from paceline.torch.local_merge import Merges
from paceline.torch.local_steps import LocalSteps
from paceline.torch.members import Ranks
from paceline.torch.memory_limits import MemoryLimit, explain
from paceline.torch.meter import Meter, Reports
from paceline.torch.mistakes.checks import checks_of
from paceline.torch.mistakes.diverged import Fingerprint
from paceline.torch.passes import LOST, Passes, weighing_of
from paceline.torch.plan import Claim, Piece, Source
from paceline.torch.progress import Opened, Progress
from paceline.torch.round import ALONE, COMMIT, COMPLETE, DUE, END, NEXT, LeftWithin, RoundState
from paceline.torch.steps import RoundEnd, RoundSteps, digest
from paceline.torch.terms import Terms

LAST_SECONDS = 1.0  # longest wait at the end for the other ranks' reports on the last rounds


def nothing() -> float:
    """NaN, for a number that the ranks need not have in common."""
    return math.nan


class Loop:
    """The running iteration of one model's loop, and the state around it.

    A loader iterates ``over`` its source. The training loop reports its backward passes to ``passes`` and its
    optimizer steps to ``steps``.

    host: see ``Host``; ``hosted_by`` sets it before the first micro-step.
    """

    def __init__(
        self, model: torch.nn.Module, ranks: Ranks, terms: Terms, callbacks: Sequence[Callback]
    ) -> None:
        reducer, members, _ = ranks
        self.terms, self.host, self._reducer, self._members = terms, Host(), reducer, members
        self.rank, self.ranks = peers.rank(), peers.ranks()
        self.changes = members.carries_rows  # the members may change, so a round is planned when it begins
        own_steps = terms.merge is not None  # each rank steps by itself
        # A round may begin before all ranks have reported the one before.
        self._overlaps = terms.merge is not None and terms.merge.delay > 0
        # With one rank nothing is summed, and parameters may begin to require gradients later.
        single = self.ranks == 1 and not (self.changes or own_steps or terms.chunk)
        parameters = [p for p in model.parameters() if p.requires_grad or single]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._lookout = Alone()
        self._iteration: object = None  # identifies the running one
        # The last micro-step of a loop that draws its own samples is over, and its optimizer step is still to come.
        self._own_end = self._failed = False
        self._left: LeftWithin | None = None  # the micro-step in whose middle the newest iteration was left

        # The course of a round, and what is measured of it.
        follows = ALONE if own_steps else COMMIT if self.changes else None
        self.round = RoundState(
            follows, "loss.backward()" if terms.weigh == "hook" else "pace.backward(loss)"
        )
        self._claims = Claims.of(device, terms, members.counter) if terms.moves_work else None
        readings, reports = terms.balancer.needs_readings, self._reports(parameters)
        self._meter = Meter(device, members, readings, terms.moves_work, terms.drop is not None, reports)
        self.drops = None if terms.drop is None else Drops(terms.drop, self._meter)

        # Gradients: how they are weighed, and what the ranks merge if each steps by itself.
        self.merges = None if terms.merge is None else Merges(model, terms.merge, ranks)
        local: LocalWeighing | None = None
        if self.merges is not None:
            local = LocalWeighing(parameters, device, reducer, self.merges.begin)
        counts = self._meter.counted_by_all, lambda: self.decisions.per_sample
        self._gradients = local or weighing_of(parameters, device, reducer, terms, *counts)

        # Backward passes.
        self.checks = checks_of(
            model, parameters, reducer, terms, self.round, lambda: self.host.words, self.changes
        )
        seen = self._gradients, self.round, self.checks, self._meter
        self.passes = Passes(device, reducer, terms, *seen, self._halfway, self._commit, self.name)
        self.memory: Any = MemoryLimit(self.round, self.passes, terms, batches.part) if terms.memory else None
        if terms.memory:
            reducer.runs_again(self.round.prepared)

        # Decisions, and the end of a round.
        every, fixed = terms.every, terms.every.fixed
        self.progress = Progress(terms.batch, terms.min_samples, terms.global_batch if fixed else every.size)
        self.decisions: Decisions = Decisions(
            terms.balancer,
            self._meter,
            terms.moves_work,
            callbacks,
            every=None if fixed else every,
            one_by_one=self._overlaps,
            looks=reducer.averages and not reducer.lockstep and device.type == "cpu",
        )
        self._round_end = RoundEnd(self.round, self._gradients, self._meter, self.progress)
        self._epoch_over = overriding(callbacks, "on_epoch")
        parts = self._meter, members, self.progress, self._round_end
        self.steps: RoundSteps | LocalSteps
        if self.merges is None or local is None:
            rates = bool(self.decisions.listeners)
            self.steps = RoundSteps(
                model, self.round, self._gradients, self.checks, *parts, single=single, rates=rates
            )
        else:
            self.steps = LocalSteps(
                model,
                self.round,
                local,
                *parts,
                merges=self.merges,
                every=every,
                overlaps=self._overlaps,
                commit=self._commit,
                named=self.named,
                abandon=self.abandon,
            )

    def _reports(self, parameters: Sequence[torch.nn.Parameter]) -> Reports:
        """What the parts of the loop add to this rank's reports. They are asked when a round is reported: by then all
        of them exist."""
        terms, reducer, own_steps = self.terms, self._reducer, self.terms.merge is not None
        # Under FSDP2 each rank has its own part of the parameters; local steps compare them when they merge.
        whole = reducer.sums and not (own_steps or reducer.lockstep)
        fingerprint = Fingerprint(parameters if whole else (), joins=self.changes)
        return Reports(
            digest=lambda: terms.balancer.digest,
            # Each rank that steps by itself has its own schedule.
            rate=nothing if own_steps else lambda: self.steps.watch.rate(),
            options=nothing if own_steps else self._options,
            outside=lambda: self.steps.watch.others(),
            differ=lambda step: self.steps.watch.outside.differ(step),
            model=fingerprint.take,
            compare=fingerprint.compare,
            left_out=lambda: self._round_end.left_out,
            described=lambda: self.steps.watch.described(),
            memory=(lambda: self.memory.report()) if terms.memory else None,
            pieces=self._reported,
            lost=self.lost,
            settle=lambda: self.settle() if self._overlaps else None,
        )

    def watch_over(self, lookout: Alone) -> None:
        """Connect ``lookout``, which follows the rounds and names lost ranks. Then rounds may begin."""
        self._lookout = lookout
        lookout.follow(
            explain=lambda error: explain(
                error, self.passes.device, self.round.left_behind or self._left, self.decisions.fits
            ),
            where=lambda: self._meter.where(self.progress.rounds),
        )
        self._members.begin(self)

    def hosted_by(self, host: Host) -> None:
        """A framework runs the loop. Raises PacelineError if it cannot."""
        self.steps.hosted_by(host)
        self.host = host

    def lost(self) -> WorkerError | None:
        """The known reason why waiting for the other ranks is useless, or None; returns at once."""
        return self._lookout.known()

    def close(self) -> None:
        """Remove all hooks from the model; no micro-steps may follow."""
        self.steps.close(self._failed)
        self.checks.close()
        self._members.close(self._failed)
        self._meter.close()
        if self._claims is not None:
            self._claims.close()
        self.passes.close()
        self._reducer.close()
        self._lookout.close()

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def in_round(self) -> bool:
        """True from a round's first micro-step to its optimizer step."""
        return self.round.piece is not None

    @property
    def due(self) -> bool:
        """Whether a step of the optimizer is due."""
        return self.round.phase >= DUE

    @property
    def last(self) -> bool:
        """True in a round's last micro-step."""
        return self.round.piece is not None and self.round.piece.last

    def loss_now(self) -> float:
        """The mean loss over all samples of the round that is complete, or has just been stepped. Collective."""
        piece = self.round.stepped_piece()
        if self.changes:  # the loss has travelled with the gradients, so all ranks know it
            self.settle()
            return self.decisions.loss
        with self.named():
            return self._meter.loss_now(piece.batch)

    def drawn_ahead(self, micro_steps: int = 0) -> None:
        """A loader draws this many micro-steps ahead: plans take effect that much later."""
        self.terms.balancer.plan_ahead(micro_steps + self._overlaps + self._meter.lag)

    def name(self, error: BaseException) -> None:
        """Raises a WorkerError that names the rank, if the error only means that another rank is lost."""
        if (reason := self._lookout.reason(error)) is not None:
            raise reason from error

    @contextmanager
    def named(self) -> Iterator[None]:
        """Pass the errors raised within to ``name``."""
        try:
            yield
        except LOST as error:
            self.name(error)
            raise

    # -- one iteration ---------------------------------------------------------------------------------------

    def over(self, source: Source) -> Generator[Any]:
        """One iteration over ``source``, micro-step by micro-step."""
        iteration, round, own = self._open(source), self.round, source.number is None
        begin = self.passes.begin
        plain = self.host.__class__ is Host  # its methods do nothing
        try:
            for batch, piece in self._members.micro_steps(self, source):
                if piece.first is not (round.piece is None):
                    piece = piece._replace(first=not piece.first)
                if self.drops is not None:
                    piece = self.drops.begins(piece)
                begin(piece, batch)
                if self._claims is not None and not (piece.last or self._meter.light):
                    self._claims.begin(piece)
                if plain:
                    yield batch
                else:
                    self.host.micro_step_begins(round.running)
                    yield self.host.place(batch)
                if own and piece.last and source.more is not None and not source.more():
                    round.goes_on()  # the loop steps the optimizer after its last micro-step
                    self._own_end = True
                    return
                if self._iteration is not iteration:
                    raise PacelineError(
                        "another loop over a loader of this Pace was begun within this one; expected one to end "
                        "before the next begins: draw both batches from one loader, or make a Pace for each model"
                    )
                if round.piece is not None:  # else step() has ended the round
                    self.end_micro_step()
            self.close_epoch()
        finally:
            source.end()
            self._leave(iteration)

    def planned(self, source: Source) -> Iterator[tuple[Any, Piece]]:
        """The micro-steps of one iteration over ``source`` if all ranks stay: each one's batch and piece."""
        progress, round, samples, more = self.progress, self.round, source.samples, source.more
        while samples is None or progress.samples_done < samples:
            if round.piece is None:
                if more is not None and not more():
                    return
                self.round_begins()
            planned = source.planned()
            if planned[1].claims:
                yield from self.claimed(source, planned[1])
            yield planned

    def round_begins(self, workers: int | None = None) -> None:
        """Start a round's clock; its first batch is about to be loaded. workers: number of ranks that take part."""
        began, meter, progress = perf_counter(), self._meter, self.progress
        if meter.reported and not self._overlaps:
            self.settle()
        if self.decisions.links_due:  # also on a rank that has already settled, for a checkpoint
            with self.named():
                self.decisions.measure_links()
        meter.start(progress.rounds, progress.epoch, began)
        if self._claims is not None and not meter.light:
            self._claims.open(perf_counter(), workers)  # planning is not part of the first piece's time

    def claimed(self, source: Source, piece: Piece) -> Iterator[tuple[Any, Piece]]:
        """The micro-steps of this rank's claims before ``piece``, if it is the round's last planned one."""
        if self._claims is not None:
            yield from self._claims.micro_steps(source, piece)

    def claims_ahead(self, notify: Callable[[Claim], object] | None, early: bool) -> None:
        """See ``Claims.ahead``."""
        if self._claims is not None:
            self._claims.ahead(notify, early)

    def waited(self, seconds: float) -> None:
        """The next piece was held up by this much, since it had only just been claimed."""
        if self._claims is not None:
            self._claims.waited(seconds)

    def end_micro_step(self) -> None:
        """End the loop's micro-step; another may follow. Raises PacelineError if the loop left something out."""
        do = self.round.goes_on()
        if do is END:
            self._end_round()
        elif do is NEXT and self._claims is not None and not (self._meter.light or self.changes):
            self._claims.done(self.round.running)

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used."""
        self.flush()
        self.epoch_over(self.progress.epoch)
        self.progress.begin(self.progress.epoch + 1)

    def epoch_over(self, epoch: int) -> None:
        """Call the callbacks at the end of this epoch."""
        for on_epoch in self._epoch_over:
            on_epoch(epoch)

    def settle(self) -> None:
        """Collect the ranks' reports on the round just finished, and plan from them."""
        with self.named():
            self.decisions.settle()

    def settle_last(self) -> None:
        """``settle`` before the end, without a long wait, since another rank may already have left."""
        self._meter.wait_until(monotonic() + LAST_SECONDS)
        if self._failed:
            return
        if self.in_round:
            # A loop that draws its own samples has stepped after its last micro-step; other rounds are unfinished.
            self._end_round() if self._own_end and self.round.taken else self.abandon()
            self._meter.report_rest()
        with suppress(WorkerError):
            self.decisions.settle()

    def flush(self) -> None:
        """``settle``, also the rounds that ranks have not reported yet. Collective."""
        with self.named():
            self.decisions.flush()
        self._members.together()
        self.steps.flush()

    def abandon(self) -> None:
        """Leave the running round unfinished and drop its gradients; the state is that of the last finished round."""
        if self.in_round:
            self.steps.left()
        self._gradients.release()
        if (piece := self.round.left()) is not None:
            self._gradients.drop()
            self._meter.drop(piece.step)
        self._reducer.drop()
        self._members.drop()

    def failed(self, error: BaseException) -> None:
        """The loop ends with this error: notify the other ranks. Raises WorkerError as ``name`` does."""
        self._failed = True
        self._meter.close()
        self._members.close(failed=True)
        self.name(error)
        self._lookout.fail(error)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from after a finished round, in plain numbers."""
        self.steps.check_state()
        self.round.checkpoint()
        self.settle()
        return self.stands()

    def stands(self) -> dict[str, Any]:
        """The state of the run at the beginning of the running round, or of the next one."""
        balancer, policy = self.terms.balancer, self.terms.policy
        own = {"policy": policy, "balancer": balancer.state_dict()}
        return {**self.progress.state(), **own, **self.steps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``. Raises PacelineError for an unsuitable state, and changes nothing then."""
        step, balancer = self.progress.check(state), self.terms.balancer
        self.steps.check(state)  # before anything changes
        if state["policy"] == self.terms.policy:
            balancer.load_state_dict(state["balancer"], step)
        else:
            balancer.restart(step)
        self.progress.load(state)
        self._meter.restart(step)
        self.steps.load(state)

    # -- within ----------------------------------------------------------------------------------------------

    def _open(self, source: Source) -> object:
        """Begin an iteration: within its epoch after ``load_state_dict``, else with a whole epoch. Returns an object
        that identifies the iteration."""
        if self._own_end and self.in_round:
            self._end_round()  # the loop that draws its own samples continues
        left = self.round.piece if self.round.phase == COMPLETE else None
        self.abandon()
        self.settle()
        if left is not None:
            with self.named():
                self._meter.dropped(left.step)
        self._own_end = False
        if source.number is None:
            self.progress.draws()
        else:
            samples = source.samples or 0  # those of a stream are unknown
            self.progress.open(Opened(source.number, samples, *source.order))
        self.steps.open(source)
        self._iteration, self._left = object(), None
        self.checks.iteration(self.progress.rounds)
        source.open()
        return self._iteration

    def _halfway(self, piece: Piece) -> None:
        """The backward pass of a piece begins; the next piece may be claimed and loaded meanwhile."""
        if self._claims is not None and not (piece.last or self._meter.light):
            self._claims.halfway(piece)

    def _reported(self, piece: Piece) -> list[float] | None:
        """The report on a round's pieces, made when the last gradient of its last piece is there."""
        if self._claims is None:
            return None
        self._claims.done(piece, last=True)
        return self._claims.report()

    def _options(self) -> float:
        """The number of all options that must be the same on every rank, see ``steps.digest``. A rank that joins has
        stepped fewer optimizers than the others, so there it is made from those that are handed over."""
        return digest(self._members.handed_over) if self.changes else self.steps.watch.options()

    def _commit(self, piece: Piece) -> bool:
        """The backward pass of a piece has ended, and rows travel with the gradients: sum them if it is the round's
        last. Returns whether the round is complete on all ranks."""
        meter, claims = self._meter, self._claims
        members: Any = self._members  # an ``elastic.member.Member``
        members.ran(piece)
        if claims is not None:
            claims.done(piece, last=True)
        meter.running.ran(piece)
        if not (piece.last or members.retrying):
            return False
        while not (members.retrying and members.claim()):
            began, own = perf_counter(), timing.now()
            pieces = None if claims is None else claims.report(as_one=members.retrying)
            row = meter.row(piece.plan, pieces)
            rows = members.commit(row, None if self.terms.merge is not None else meter.counted)
            if rows is not None:
                meter.committed(rows)
                return True
            meter.running.waited(timing.now() - own)
            self.waited(perf_counter() - began)
        return False

    def _end_round(self) -> None:
        """End a complete round at the end of its last micro-step, since pace.step() has not ended it."""
        step, taken = self.round.running.step, self.round.taken
        ever = self._round_end.stepped
        if not taken and (wrong := self.host.without_step(step, ever, self._gradients.finite)):
            raise PacelineError(wrong)
        self._round_end.after(
            self.steps.watch.seconds if taken else None
        )  # the user has stepped the optimizer

    def _leave(self, iteration: object) -> None:
        """The iteration has ended, or was left: drop an unfinished round. A step may still follow a complete one."""
        if self._iteration is iteration:
            self._iteration = None
            self.progress.close()
            if self.round.phase != COMPLETE:
                self._left = self.round.left_behind
                self.abandon()
                self.round.forget()
            if self.progress.counts and not self.in_round:
                self._meter.report_rest()
        self.host.iteration_over()
