"""The course of a loop, micro-step by micro-step: rounds are planned, claimed, measured, reduced and settled.

One iteration is an epoch of a loader, or some rounds whose samples the loop draws itself. A ``Source`` gives each
micro-step its batch: a round's planned pieces, and between them those that this rank claims. A ``Reducer`` sets the
sequence of rounds and commits each of them; if its sums fail, the loop runs the missing samples and tries again.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError
from paceline.torch import peers, waits
from paceline.torch.callbacks import Callback, overriding
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.steps import Steps, forget_unscaled, learning_rate, refuse_averages
from paceline.torch.host import Host
from paceline.torch.liveness.monitor import Alone
from paceline.torch.measuring.open_rounds import OpenRounds
from paceline.torch.memory_limits import MemoryLimit, explain
from paceline.torch.passes import NO_ROUND, MicroStep, Passes
from paceline.torch.plan import Piece, Source
from paceline.torch.progress import Progress
from paceline.torch.suspects import GatherSizes
from paceline.torch.terms import Terms
from paceline.torch.work import Work

LOST = RuntimeError, WorkerError  # types of errors that may only mean that another rank is lost
LAST_SECONDS = 1.0  # longest wait at the end for the other ranks' reports on the last rounds


class Loop:
    """The running micro-step of one model's loop, and the state around it.

    A loader iterates ``over`` its source. The training loop reports its backward passes to ``passes``, and its
    optimizer's step here (``step``, or ``stepped`` after its own step).

    host: see ``Host``; set it before the first micro-step.
    """

    PASSES: type[Passes] = Passes
    local: Any = None  # the ``Merges`` of loop="local"
    merged = False  # the newest step has merged the parameters of all ranks
    behind = False  # a round begins before all ranks have reported the one before

    def __init__(
        self, model: torch.nn.Module, reducer: Reducer, terms: Terms, callbacks: Sequence[Callback]
    ) -> None:
        self.terms, self.host, self._reducer = terms, Host(), reducer
        # The running iteration. It is set first, since hooks of a loop whose construction failed read it.
        self._running: object = None
        self.changes = reducer.travels  # the members may change, so a round is planned when it begins
        self.rank, self.ranks = peers.rank(), peers.ranks()
        # With one rank nothing is summed, and parameters may begin to require gradients later.
        alone = self.ranks == 1 and not (self.changes or terms.merge or terms.cell)
        parameters = [p for p in model.parameters() if p.requires_grad or alone]
        device = parameters[0].device if parameters else torch.device("cpu")
        self.work = work = Work(device, reducer, terms)
        self._meter = work.meter
        self.passes = self.PASSES(parameters, device, reducer, terms, self._meter, work.halfway, work.commit)
        self._gradients = self.passes.gradients
        whole = self.changes or bool(terms.merge)
        self._steps = Steps(model, whole, self._step_begins, self._step_ended, alone)
        self._meter.rate, self._meter.described = self._steps.rate, self._steps.described
        if not self.changes:  # a rank that joins or was late reports a schedule that is a step behind
            self._meter.options = self._steps.options
        self.progress = Progress(terms.batch, terms.floor, terms.every.size)
        self.rounds = OpenRounds(terms.balancer, self._meter, terms.moves_work, callbacks)
        self._epoch_over = overriding(callbacks, "on_epoch")
        if reducer.averages and not reducer.in_step and device.type == "cpu":
            self.rounds.beyond = []
        self.memory: MemoryLimit | None = None
        self._counts_epochs = True  # the iteration is over a loader
        # The last micro-step of a loop that draws its own samples is over, and its optimizer step is still to come.
        self._own_end = self._failed = False
        self._closing = ExitStack()
        self._gathers: GatherSizes | None = None
        self._left: MicroStep | None = None  # the micro-step in whose middle the newest iteration was left
        self._carry = 0.0  # seconds of the last optimizer step, part of the next round's overhead

    def watch_over(self, lookout: Alone) -> None:
        """Connect ``lookout``, which follows the rounds and names lost ranks. Refuse the program's collectives in
        rounds that ranks run in different numbers of pieces, since some would hang in them. Then rounds may begin."""
        # The known reason why waiting for the other ranks is useless, or None; it returns at once.
        self.lost = self._meter.lost = lookout.known
        self._lookout = lookout
        lookout.explain = lambda error: explain(error, self.passes, self._left, self.rounds.fits)
        lookout.where = lambda: self._meter.where(self.progress.rounds)
        alike = self.ranks == 1 or self.terms.in_step or self.terms.fixed_micro_steps
        if not (alike or self.changes):
            self._closing.callback(waits.refuse(self._within, self.terms.loop))
        if not (alike or self.terms.loop == "local"):  # there each micro-step is a step
            self._closing.callback(refuse_averages(self._unstepped))
        if self.ranks > 1 and not (self.changes or self.terms.loop == "local"):
            self._gathers = GatherSizes(self._newest)
            self._closing.callback(self._gathers.close)
        self._reducer.begin(self)

    def limited_by(self, memory: MemoryLimit) -> None:
        """Let ``memory`` limit the samples of this rank's passes."""
        self.memory, self._meter.memory = memory, memory.report
        self._reducer.runs_again(self.passes.prepared)

    def close(self) -> None:
        """Remove all hooks from the model; no micro-steps may follow."""
        self._closing.close()
        self.work.close(self._failed)
        self.passes.close()
        self._steps.close()
        self._lookout.close()

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def in_round(self) -> bool:
        """True from a round's first micro-step to its optimizer step."""
        return self.passes.micro_step is not None

    @property
    def due(self) -> bool:
        """Whether a step of the optimizer is due."""
        return self.passes.complete

    @property
    def last(self) -> bool:
        """True in a round's last micro-step."""
        return self.in_round and self.passes.piece.last

    def loss_now(self) -> float:
        """The mean loss over all samples of the round that is complete, or has just been stepped. Collective."""
        piece = self.passes.piece if self.passes.complete and not self._reducer.travels else self.passes.over
        if piece is None:
            raise PacelineError(
                "pace.loss_now() was called while no round is complete; expected it after a round's last backward "
                "pass, on all ranks: if pace.step(optimizer): ... pace.loss_now()"
            )
        if self._reducer.travels:  # the loss has travelled with the gradients, so all ranks know it
            self.settle()
            return self.rounds.loss
        with self.named():
            return self._meter.loss_now(piece.batch)

    def drawn_ahead(self, micro_steps: int = 0) -> None:
        """A loader draws this many micro-steps ahead: plans take effect that much later."""
        balancer = self.terms.balancer
        balancer.lag = max(balancer.lag, micro_steps + self._meter.lag)

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
        running, passes, own = self._open(source), self.passes, source.number is None
        plain = self.host.__class__ is Host  # its methods do nothing
        try:
            for batch, piece in self._reducer.micro_steps(self, source):
                self._begin(piece, batch)
                if plain:
                    yield batch
                else:
                    self.host.micro_step_begins(passes.piece)
                    yield self.host.place(batch)
                if own and piece.last and not source.more():
                    passes.check_taken()  # the loop steps the optimizer after its last micro-step
                    self._own_end = True
                    return
                if self._running is not running:
                    raise PacelineError(
                        "another loop over a loader of this Pace was begun within this one; expected one to end "
                        "before the next begins: draw both batches from one loader, or make a Pace for each model"
                    )
                if passes.micro_step is not None:  # else step() has ended the round
                    self.end_micro_step()
            self.close_epoch()
        finally:
            source.end()
            self._leave(running)

    def round_begins(self, workers: int | None = None) -> None:
        """Start a round's clock; its first batch is about to be loaded. workers: number of ranks that take part."""
        began, meter, progress = time.perf_counter(), self._meter, self.progress
        if meter.reported and not self.behind:
            self.settle()
        if self.rounds.links_due:  # also on a rank that has already settled, for a checkpoint
            with self.named():
                self.rounds.measure_links()
        meter.start(progress.rounds, progress.epoch, began, self._carry)
        self._carry = 0.0
        if self.work.claims is not None and not meter.light:
            self.work.begins(workers)

    def end_micro_step(self) -> None:
        """End the loop's micro-step; another may follow. Raises PacelineError if the loop left something out."""
        self.passes.check_taken()
        if self.last:
            self._end_round()
        elif self.in_round:
            self.work.over(self.passes.piece)

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used."""
        self.flush()
        for on_epoch in self._epoch_over:
            on_epoch(self.progress.epoch)
        self.progress.begin(self.progress.epoch + 1)

    def settle(self) -> None:
        """Collect the ranks' reports on the round just finished, and plan from them."""
        with self.named():
            self.rounds.settle()

    def settle_last(self) -> None:
        """``settle`` before the end, without a long wait, since another rank may already have left."""
        until = time.monotonic() + LAST_SECONDS
        self._meter.lost = lambda: WorkerError("the wait is over") if time.monotonic() > until else None
        if self._failed:
            return
        if self.in_round:
            # A loop that draws its own samples has stepped after its last micro-step; other rounds are unfinished.
            self._end_round() if self._own_end and self._steps.taken else self.abandon()
            self._meter.report_rest()
        with suppress(WorkerError):
            self.rounds.settle()

    def flush(self) -> None:
        """``settle``, also the rounds that ranks have not reported yet. Collective."""
        with self.named():
            self.rounds.flush()
        self._reducer.together()

    def abandon(self) -> None:
        """Leave the running round unfinished and drop its gradients; the state is that of the last finished round."""
        self._gradients.release()
        if self.in_round:
            self._gradients.drop()
            self._meter.drop(self.passes.piece.step)
        self.passes.micro_step = self.passes.over = None
        self._reducer.drop()

    def failed(self, error: BaseException) -> None:
        """The loop ends with this error: notify the other ranks. Raises WorkerError as ``name`` does."""
        self._failed = True
        self._meter.close()
        self._reducer.close(failed=True)
        self.name(error)
        self._lookout.fail(error)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from after a finished round, in plain numbers."""
        if self.in_round:
            raise PacelineError(
                f"a checkpoint within round {self.passes.piece.step}; expected one between rounds: make it after the "
                "round's optimizer step, taken by pace.step(optimizer) or reported by pace.host.stepped()"
            )
        self.settle()
        return self.stands()

    def stands(self) -> dict[str, Any]:
        """The state of the run at the beginning of the running round, or of the next one."""
        balancer, policy = self.terms.balancer, self.terms.policy
        return {**self.progress.state(), "policy": policy, "balancer": balancer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``. Raises PacelineError for an unsuitable state, and changes nothing then."""
        step, balancer = self.progress.check(state), self.terms.balancer  # before anything changes
        if state["policy"] == self.terms.policy:
            balancer.load_state_dict(state["balancer"], step)
        else:
            balancer.restart(step)
        self.progress.load(state)
        self._meter.restart(step)

    # -- optimizer steps -------------------------------------------------------------------------------------

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """Step and zero the optimizers when the round is complete; otherwise do nothing. True when they stepped."""
        passes, steps = self.passes, self._steps
        micro_step = passes.micro_step
        steps.check_ours(optimizers)
        if self.changes:
            self._reducer.check_handed_over([*optimizers, *([] if scaler is None else [scaler])])
        if steps.taken:
            steps.check_once(optimizers)
        if micro_step is not None:
            piece = micro_step.piece
            if not (micro_step.complete and piece.first):
                steps.rates.watch(optimizers, piece.step, micro_step.complete)
                if not micro_step.complete:
                    return False
            if self._reducer.late:
                steps.taken.extend(optimizers)
                forget_unscaled(scaler)
                self.stepped(0.0)  # this rank has received the state after the step
                return True
            self._gradients.check_there(piece, optimizers)
        elif not steps.taken:
            optimizers = []
        elif scaler is not None:  # the round's step was taken in this micro-step
            raise PacelineError(
                "with a GradScaler, several optimizers are stepped together: pace.step([first, second], scaler)"
            )
        # The checks before a step have been made above, and a plain host needs no notice of it.
        seconds = steps.take(optimizers, scaler, heard=self.host.__class__ is not Host)
        if passes.micro_step is None:  # a host may have reported the step
            self._carry += seconds
            self._gradients.used()
            return bool(optimizers)
        if self.rounds.listeners:
            self._meter.running.learning_rate = learning_rate(optimizers)
        self.stepped(seconds)
        return True

    def stepped(self, seconds: float | None) -> None:
        """The round's optimizer step has ended after ``seconds``, or was left out on purpose (None)."""
        passes = self.passes
        if (micro_step := passes.micro_step) is None:
            raise PacelineError(NO_ROUND)
        piece, self._meter.running.ended = micro_step.piece, time.perf_counter()
        if seconds is not None:
            self._carry, self._steps.ever = seconds, True
            self._meter.running.stepping = seconds
        elif not self.changes:  # a rank that joins would not know the number of earlier ones
            self._meter.left_out += 1
        self._gradients.used()
        progress = self.progress
        progress.rounds += 1
        if self._counts_epochs:
            progress.samples_done += piece.plan.batch
        passes.micro_step, passes.over = None, piece

    # -- within ----------------------------------------------------------------------------------------------

    def _open(self, source: Source) -> object:
        """Begin an iteration: within its epoch after ``load_state_dict``, else with a whole epoch. Returns an object
        that identifies the iteration."""
        if self._own_end and self.in_round:
            self._end_round()  # the loop that draws its own samples continues
        left = self.passes.piece.step if self.passes.complete else None
        self.abandon()
        self.settle()
        if left is not None:
            with self.named():
                self._meter.dropped(left)
        self._own_end = False
        if source.number is not None:
            self.progress.open(source.number, source.samples or 0)  # a stream's samples are unknown
        self._counts_epochs = source.number is not None
        self._running, self._left = object(), None
        self.passes.watch.again()
        if self._gathers is not None:
            self._gathers.again(self.progress.rounds)
        source.open()
        return self._running

    def _begin(self, piece: Piece, batch: Any) -> None:
        """Begin a micro-step: its batch is about to go to the loop."""
        passes, work = self.passes, self.work
        first = passes.micro_step is None
        if piece.first is not first:
            piece = piece._replace(first=first)
        if work.drops is not None:
            piece = work.drops.begins(piece)
        if first:
            self._steps.taken, self._meter.running.plan = [], piece.plan
        passes.begin(piece, batch)
        if work.claims is not None and not (piece.last or self._meter.light):
            work.claims.begin(piece)

    def _end_round(self) -> None:
        """End a complete round at the end of its last micro-step, since pace.step() has not ended it."""
        steps, step = self._steps, self.passes.piece.step
        if not steps.taken and (wrong := self.host.without_step(step, steps.ever, self._gradients.finite)):
            raise PacelineError(wrong)
        self.stepped(steps.seconds if steps.taken else None)  # the user has stepped the optimizer

    def _leave(self, running: object) -> None:
        """The iteration has ended, or was left: drop an unfinished round. A step may still follow a complete one."""
        if self._running is running:
            self._running = None
            self.progress.close()
            if not self.passes.complete:
                self._left = self.passes.micro_step
                self.abandon()
                self._steps.taken = []
            if self._counts_epochs and not self.in_round:
                self._meter.report_rest()
        self.host.iteration_over()

    def _newest(self) -> Piece | None:
        """A piece of the running round, or of the newest one; None before the first."""
        return self.passes.piece if self.in_round else self.passes.over

    def _within(self) -> int | None:
        """The round that this rank is still running; None between rounds and after its last gradient."""
        return self.passes.piece.step if self.in_round and not self._meter.stopped else None

    def _unstepped(self) -> int | None:
        """The round that this rank is running, before its step is due; else None."""
        due = self.passes.complete or self._steps.taken
        return self.passes.piece.step if self.in_round and not due else None

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Called before each step of an optimizer with the model's parameters, by Pace, a framework or the user."""
        self.host.step_begins(self.passes.piece if self.in_round else None)
        self._steps.begin()
        if not closure:
            self.passes.check_complete()
        if self._steps.taken and (self._running is not None or self.in_round):
            self._steps.check_once([optimizer])

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self.passes.check_complete()  # a closure has only now run its backward pass
        seconds = self._steps.end()
        if self._running is not None or self.in_round:
            self._steps.taken.append(optimizer)
        self.host.step_ended(seconds)
