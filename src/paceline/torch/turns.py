"""What happens turn by turn, in a loop over any source: rounds are planned, claimed, measured, reduced and settled.

One iteration is an epoch of a loader, or some rounds whose samples the loop draws itself; a ``Source`` says what a
turn is given: a round's planned pieces, and between them those that this rank claims.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.claiming.claims import Claims
from paceline.torch.gradients.backward import Backward
from paceline.torch.gradients.finite import OnNan
from paceline.torch.gradients.parallel import Alone as Parallel
from paceline.torch.gradients.parallel import weigh_in_hook
from paceline.torch.gradients.steps import LearningRateWatch, Steps, learning_rate
from paceline.torch.host import Host
from paceline.torch.liveness.lookout import Alone
from paceline.torch.measuring.meter import Meter
from paceline.torch.measuring.open_rounds import OpenRounds, RoundResult
from paceline.torch.plan import Piece
from paceline.torch.progress import Progress
from paceline.torch.terms import Terms


class Source(Protocol):
    """What the turns of one kind of loop are given."""

    @property
    def number(self) -> int | None:
        """Of the loader whose epochs are counted; None where a loop draws its own samples."""
        ...

    @property
    def samples(self) -> int | None:
        """That an epoch uses over all ranks; None where nobody knows."""
        ...

    def open(self) -> None:
        """An iteration begins."""
        ...

    def end(self) -> None:
        """The iteration is over, or was left."""
        ...

    def more(self) -> bool:
        """Whether another round follows."""
        ...

    def planned(self) -> tuple[Any, Piece]:
        """What the next planned turn is given, and the piece of a round that it is."""
        ...

    def claimed(self, start: int, size: int) -> Iterator[tuple[Any, int]]:
        """What the turns of a claim are given, and the samples of each."""
        ...


@dataclass(slots=True)
class Turn:
    """One turn of the loop, from what it is given to the end of its round or the next turn."""

    piece: Piece
    begun: bool = False  # its backward pass
    done: bool = False


class Turns:
    """The running turn of one model's loop, and all that goes on around it.

    A loader iterates ``over`` its source. The loop tells of its backward passes (``weight`` and ``backward_done``, or
    DDP's hook) and of its optimizer's step (``step``, or the step itself with ``stepped``).

    listeners: called in turn with each settled round. host: see ``Host``; set it before the first turn.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parallel: Parallel,
        terms: Terms,
        listeners: list[Callable[[RoundResult], None]],
        on_nan: OnNan,
    ) -> None:
        self.terms, self.host = terms, Host()
        self.rank, self.ranks = peers.rank(), peers.ranks()
        self.samples = 0  # of an epoch of the loader that is in use
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        by_hook, most = terms.weigh == "hook", int(terms.most[self.rank])
        largest = None if terms.cell else terms.micro_batch
        self._claims = Claims(device, terms.unit, largest, most) if terms.moves_work else None
        self._meter = Meter(device, terms.balancer.needs_readings, terms.moves_work, parallel.waited)
        self._backward = Backward(
            parameters, device, parallel, self.ranks, by_hook=by_hook, exact=bool(terms.cell)
        )
        hook = torch.autograd.graph.register_multi_grad_hook
        self._hooks = [hook(parameters, self._gradients_ready)]
        if by_hook:
            parallel.register_comm_hook(self._hook_weight, weigh_in_hook)
            self._hooks.append(hook(parameters, self._backward_begins, mode="any"))
        self._steps, self._rates = (
            Steps(parameters, self._step_begins, self._step_ended),
            LearningRateWatch(),
        )
        self._progress = Progress(terms.global_batch, terms.floor)
        self._rounds = OpenRounds(terms.balancer, self._meter, terms.moves_work, listeners, on_nan)
        self._lookout = Alone()

        self._turn: Turn | None = None
        self._running: object = None  # the iteration that is
        self._counts_epochs = True  # it is over a loader
        # The last turn of a loop that draws its own samples is over, and its step to come.
        self._own_end = False
        self._began = 0.0  # the running round
        self._carry = 0.0  # seconds of the last optimizer step: part of the next round's overhead
        self._learning_rate = float("nan")

    def watch_over(self, lookout: Alone) -> None:
        """Let ``lookout`` know of the rounds, and name the ranks that are lost."""
        self._lookout = lookout
        self._meter.lost = lookout.known

    def close(self) -> None:
        """Let go of the model; no more turns."""
        self._backward.release()
        for hook in self._hooks:
            hook.remove()
        self._steps.close()
        self._meter.close()
        self._lookout.close()
        if self._claims is not None:
            self._claims.close()

    # -- where the loop stands -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the next or running iteration of the loader."""
        return self._progress.epoch

    @property
    def samples_done(self) -> int:
        """Of this epoch, over all ranks."""
        return self._progress.samples_done

    @property
    def rounds(self) -> int:
        """Finished since the beginning, over all epochs."""
        return self._progress.rounds

    @property
    def piece(self) -> Piece:
        """What the running turn is given. Raises PacelineError between rounds."""
        if self._turn is None:
            raise PacelineError("no round is running; expected this within `for ... in pace.loader(...)`")
        return self._turn.piece

    @property
    def in_round(self) -> bool:
        """True from a round's first turn to its optimizer step."""
        return self._turn is not None

    @property
    def last(self) -> bool:
        """True in a round's last turn."""
        return self._turn is not None and self._turn.piece.last

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all in, and an optimizer step is due."""
        turn = self._turn
        return turn is not None and turn.piece.last and turn.done and self._meter.stopped(turn.piece.step)

    def remaining(self) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round left in this epoch of the loader in use."""
        return self._progress.remaining(self.samples)

    def ahead(self, samples: int) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round of the next iteration over so many samples."""
        return self._progress.ahead(samples)

    def begin_epoch(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self._progress.begin(epoch)

    def drawn_ahead(self, turns: int = 0) -> None:
        """A loader draws so many turns ahead: plans take effect that much later."""
        balancer = self.terms.balancer
        balancer.lag = max(balancer.lag, turns + self._meter.lag)

    def named(self) -> AbstractContextManager[None]:
        """In here an error that only says that another rank is lost becomes a WorkerError that names it."""
        return self._lookout.named()

    # -- one iteration ---------------------------------------------------------------------------------------

    def over(self, source: Source) -> Generator[Any]:
        """One iteration over ``source``, turn by turn."""
        running = self._open(source)
        try:
            while source.more():
                self._before_turn()
                batch, piece = source.planned()
                while (claimed := self._claim(piece)) is not None:
                    left = claimed[1]
                    for more, samples in source.claimed(*claimed):
                        left -= samples
                        self._begin(piece._replace(samples=samples, last=False, claims=not left))
                        yield self.host.place(more)
                        self.end_turn(running)
                self._begin(piece)
                yield self.host.place(batch)
                if source.number is None and piece.last and not source.more():
                    self._check_turn(running)
                    return  # the loop steps the optimizer after its last turn
                self.end_turn(running)
            self.close_epoch()
        finally:
            source.end()
            self._leave(running)

    def end_turn(self, running: object = None) -> None:
        """The loop's turn is over, and another may follow. Raises PacelineError where it left something out."""
        self._check_turn(running)
        if self._turn is None:
            return
        if self._turn.piece.last:
            self._end_round()
        elif self._claims is not None:
            self._claims.done(self._turn.piece.samples)

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used."""
        self.flush()
        self.begin_epoch(self.epoch + 1)

    def claims_ahead(self, told: Callable[[int, int], object], early: bool) -> None:
        """From now on ``told`` hears of each claim (start, size), from a thread: at the beginning of the piece
        before it where it is wanted ``early``."""
        assert self._claims is not None
        self._claims.forget()
        self._claims.claimed, self._claims.early = told, early

    def waited(self, seconds: float) -> None:
        """The next piece was held up by so much, since it was only just claimed."""
        if self._claims is not None:
            self._claims.waited(seconds)

    def settle(self) -> None:
        """Take in what the ranks reported of the round just finished, and plan from it."""
        with self._lookout.named():
            self._rounds.settle(self.rounds)

    def flush(self) -> None:
        """``settle``, and on a GPU also wait for the last round's reading. Collective."""
        with self._lookout.named():
            self._rounds.flush(self.rounds)

    def abandon(self) -> None:
        """Leave the running round unfinished; the state is the last finished one's. Its gradients are dropped."""
        self._backward.release()
        if self._turn is not None:
            self._backward.drop()
            self._meter.drop(self._turn.piece.step)
            self._lookout.dropped()
        self._turn = None

    def failed(self, error: BaseException) -> None:
        """The loop ends with this error: tell the other ranks.

        Raises a WorkerError that names the rank where the error only says that another one is lost.
        """
        self._meter.abandon()
        if (reason := self._lookout.reason(error)) is not None:
            raise reason from error
        self._lookout.fail(error)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on from here, after a finished round: plain numbers."""
        if self._turn is not None:
            raise PacelineError(
                f"a checkpoint within round {self._turn.piece.step}; expected one between rounds: make it after the "
                "round's optimizer step, taken by pace.step(optimizer) or told of by pace.stepped()"
            )
        self.settle()
        balancer, policy = self.terms.balancer, self.terms.policy
        return {**self._progress.state(), "policy": policy, "balancer": balancer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` left off. Raises PacelineError for another state, and changes nothing then."""
        step = self._progress.check(state)  # all is checked before anything changes
        if state["policy"] == self.terms.policy:
            self.terms.balancer.load_state_dict(state["balancer"], step)
        else:
            self.terms.balancer.restart(step)
        self._progress.load(state)
        self._rounds.restart(step)

    # -- backward passes -------------------------------------------------------------------------------------

    def check_backward(self) -> None:
        """Raises PacelineError where this turn's backward pass has been taken already."""
        if self._turn is not None and self._turn.done:
            raise PacelineError(
                f"round {self._turn.piece.step}: pace.backward() was called twice in one turn of the loop; expected "
                "once: add the losses, and call it with the sum"
            )

    def weight(self, loss: torch.Tensor | None, reduction: str, count: float | None) -> float:
        """What this turn's gradient counts; takes the loss, where given, down for the record."""
        turn, by_hook = self._turn, self.terms.weigh != "loss"
        if turn is None:
            raise PacelineError("pace.backward() was called outside of `for ... in pace.loader(...)`")
        if reduction not in ("mean", "sum"):
            raise PacelineError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
        piece = turn.piece
        many = piece.samples if count is None else count * (piece.samples > 0)
        if count is not None:
            if by_hook:
                raise PacelineError(
                    "count= needs weigh='loss': the hook knows samples only; use it with pace.backward"
                )
            if not turn.begun:
                self._meter.add_count(piece.step, many)
        if loss is not None and many:
            total = loss.detach() * (many if reduction == "mean" else 1)
            self._meter.add_loss(piece.step, total.double())
        elif loss is not None:
            self._meter.add_loss(piece.step, torch.zeros((), dtype=torch.float64))
        self._halfway(piece)
        if by_hook:
            return 1.0
        self._backward.check_sync(piece)
        if not turn.begun:
            turn.begun = True
            self._backward.weigh(piece, None if count is None else many)
        return self._backward.weight(piece, many if reduction == "mean" else float(many > 0))

    def backward_done(self) -> None:
        """The backward pass of this turn is through."""
        piece, turn = self.piece, self._turn
        assert turn is not None
        if self.terms.weigh == "loss" and not turn.begun:
            raise PacelineError(
                f"round {piece.step}: pace.backward_done() was called before pace.weight(loss); expected the loss to "
                "be multiplied by that weight first"
            )
        turn.done = True
        if piece.last:  # for a graph in which no hooked parameter took part
            self._stop(piece)
        self._backward.done(piece)

    # -- optimizer steps -------------------------------------------------------------------------------------

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """Step and zero the optimizers when the round is complete; otherwise do nothing. True when they stepped."""
        turn, complete = self._turn, self.complete
        self._steps.check_ours(optimizers)
        if turn is not None:
            self._rates.watch(optimizers, turn.piece.step, complete)
        if turn is None or complete:
            self._steps.check_once(optimizers)
        if turn is None:  # the round's step was taken in this turn; another optimizer's may follow
            optimizers = optimizers if self._steps.taken else []
            if optimizers and scaler is not None:
                raise PacelineError(
                    "with a GradScaler, several optimizers are stepped together: pace.step([first, second], scaler)"
                )
        elif complete:
            self._backward.check_there(turn.piece.step, optimizers)
        else:
            return False
        seconds = self._steps.take(optimizers, scaler)
        if self._turn is not None:
            self._learning_rate = learning_rate(optimizers)
            self.stepped(seconds)
            return True
        self._carry += seconds
        self._backward.used()
        return bool(optimizers)

    def stepped(self, seconds: float) -> None:
        """The round's optimizer step is done and took so long."""
        self._carry = seconds
        self._steps.ever = True
        self._finish_round()

    # -- within ----------------------------------------------------------------------------------------------

    def _open(self, source: Source) -> object:
        """An iteration begins: within its epoch after ``load_state_dict``, else with a whole one. Returns what tells
        it from other iterations."""
        if self._own_end and self._turn is not None:
            self._end_round()  # a loop that draws its own samples goes on
        self.abandon()
        self.settle()
        self._own_end = False
        if source.number is not None:
            self.samples = source.samples or 0  # of a stream nobody knows
            self._progress.open(source.number, self.samples)
        self._counts_epochs = source.number is not None
        self._running = object()
        source.open()
        return self._running

    def _before_turn(self) -> None:
        """A batch is about to be loaded; the round's clock starts with its first."""
        if self._turn is None:
            self._began = time.perf_counter()
            self.settle()
            self._meter.start(self.rounds, self._carry)
            if self._claims is not None:
                self._claims.open(self._began)
            self._carry = 0.0

    def _claim(self, piece: Piece) -> tuple[int, int] | None:
        """(start, size) of this rank's next claim before ``piece``, None when there is none (left)."""
        if piece.division is None or not piece.last or self._claims is None:
            return None
        return self._claims.take(piece.division)

    def _begin(self, piece: Piece) -> None:
        """A batch goes to the loop."""
        piece = piece._replace(first=self._turn is None)
        self._backward.begin(piece)
        if piece.first:
            self._steps.taken.clear()
            self._rounds.open(piece.plan, self.epoch)
        self._turn = Turn(piece)
        if self._claims is not None and not piece.last:
            self._claims.begin(piece.division, piece.samples)
        self.host.turn_begins(piece)

    def _check_turn(self, running: object) -> None:
        """The loop's turn is over: raises PacelineError where it left something out."""
        if running is not None and self._running is not running:
            raise PacelineError(
                "another loop over a loader of this Pace was begun within this one; expected one to end before the "
                "next begins: draw both batches from one loader, or make a Pace for each model"
            )
        if self._turn is None:
            return  # the round was finished by step()
        piece = self._turn.piece
        if not self._turn.done:
            how = "loss.backward()" if self.terms.weigh == "hook" else "pace.backward(loss)"
            raise PacelineError(
                f"round {piece.step}: the loop went on without {how}; call it once for each micro-batch that the "
                "loader yields"
            )
        if piece.last and not self._meter.stopped(piece.step):
            raise PacelineError(f"round {piece.step}: the loop went on without a backward pass")
        self._own_end = not self._counts_epochs and piece.last

    def _end_round(self) -> None:
        """The turn of a complete round is over, and pace.step() did not end it."""
        if self._steps.taken:  # by the user alone
            self.stepped(self._steps.seconds)
            return
        if wrong := self.host.without_step(self.piece.step, self._steps.ever, self._backward.finite):
            raise PacelineError(wrong)
        self._finish_round()

    def _finish_round(self) -> None:
        piece, seconds = self.piece, time.perf_counter() - self._began
        self._rounds.finish(piece.step, seconds, self._learning_rate)
        self._learning_rate = float("nan")  # the next round's step may be taken by others
        self._lookout.over(seconds)
        self._backward.used()
        self._progress.finish(piece.batch if self._counts_epochs else 0)
        self._turn = None

    def _leave(self, running: object) -> None:
        """The iteration is over, or was left: what is unfinished is dropped, but a step may still follow a complete
        round."""
        if self._running is running:
            self._running = None
            if not self.complete:
                self.abandon()
                self._steps.taken.clear()
        self.host.iteration_over()

    # -- what torch calls ------------------------------------------------------------------------------------

    def _hook_weight(self) -> float:
        return self._backward.share(self.piece)

    def _backward_begins(self, _: object) -> None:
        """Under the hook, nothing else tells of a backward pass."""
        turn = self._turn
        if turn is None or turn.begun:
            return
        turn.begun = True
        self._halfway(turn.piece)
        self._backward.check_sync(turn.piece)
        self._backward.gather(turn.piece)
        # as soon as the whole pass is through, and with it DDP's reduction
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self._turn is not None:
            self._turn.done = True
            self._backward.gathered(self._turn.piece)

    def _gradients_ready(self, _: object) -> None:
        if self._turn is not None and self._turn.piece.last:
            self._stop(self._turn.piece)

    def _halfway(self, piece: Piece) -> None:
        """The backward pass begins: behind it there is time to ask for what comes next."""
        if self._claims is not None and not piece.last:
            self._claims.halfway(piece.division, piece.samples)

    def _stop(self, piece: Piece) -> None:
        """This rank's last gradient of the round is ready."""
        self._lookout.ended(piece.step)
        if self._claims is None:
            self._meter.stop(piece.step, self.terms.balancer.digest)
        elif not self._meter.stopped(piece.step):
            self._claims.done(piece.samples, last=True)
            self._meter.stop(piece.step, self.terms.balancer.digest, self._claims.report)

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Before any step of an optimizer that holds the model's parameters, whoever takes it."""
        self.host.step_begins(None if self._turn is None else self._turn.piece)
        self._steps.begin()
        if not closure:
            self._check_complete()
        if self._running is not None or self._turn is not None:
            self._steps.check_once([optimizer])

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_complete()  # for a closure, which has only now run its backward pass
        seconds = self._steps.end()
        if self._running is not None or self._turn is not None:
            self._steps.taken.add(optimizer)
        self.host.step_ended(seconds)

    def _check_complete(self) -> None:
        """Raises PacelineError where a step is taken that is not due."""
        turn = self._turn
        if turn is None or self.complete:
            return
        step = turn.piece.step
        if turn.piece.last and not turn.done and self._meter.stopped(step):
            raise PacelineError(
                f"round {step}: optimizer.step() was called after a backward pass that is not Paceline's, "
                "whose gradient is not weighed; call pace.backward(loss) in its place"
            )
        raise PacelineError(
            f"optimizer.step() was called within round {step}, before all its gradients were there; "
            "expected pace.step(optimizer), which steps when the round is complete"
        )
