"""The course of a round on one rank, as a state: events in, instructions out.

The engine reports each event by calling a method of ``RoundState``, and does what the method returns. Nothing here
runs a model, reads a clock, sends or waits. Which event may follow which is the order of the phases:

    BETWEEN  -> drawn     -> DRAWN      a batch is with the training loop
    DRAWN    -> weighed   -> WEIGHED    its loss has its weight, so its backward pass runs
    WEIGHED  -> ended     -> RAN        the pass has ended, and another micro-step follows (-> drawn),
                                        or another pass of the same one (-> cut -> DRAWN)
                          -> COMPLETE   or it was the round's last: an optimizer step is due
                          -> RAN        or rows travel with the gradients (-> committed -> COMPLETE, or RAN: to retry)
                          -> DUE        or this rank steps by itself (-> steps_alone -> RAN, and -> committed)
    COMPLETE -> stepped   -> BETWEEN    the round is over
    BETWEEN  -> weighed_later           a further loss of the round that is over gets its weight
    any      -> left      -> BETWEEN    the round was left unfinished

Under the hook (``weigh="hook"``) the loop calls ``loss.backward()`` itself: ``began`` and ``noticed_end`` take the
place of ``weighed`` and ``ended``, and a second backward pass in a micro-step adds to its gradient.

What a program can bring out of order raises PacelineError with a sentence of ``REFUSED``, and changes nothing. Events
that only the engine causes, such as ``drawn`` and ``stepped``, are not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from paceline.errors import PacelineError
from paceline.torch.plan import Piece

BETWEEN, DRAWN, WEIGHED, RAN, DUE, COMPLETE = range(6)  # phases

# Instructions: after a backward pass,
AGAIN = "again"  # another pass of the same micro-step follows
KEEP = "keep"  # keep its gradients: another micro-step follows
COMMIT = "commit"  # sum gradients and rows over the ranks, and report whether that went through
STEP = "step"  # the round's gradients are complete
ALONE = "alone"  # this rank's own step is due
# and when the loop asks for its next batch:
NEXT = "next"  # the running round has further micro-steps
END = "end"  # end the round, whose step was not reported

# What is known of the running pass, besides its phase, as bits.
MORE = 1  # further passes of its micro-step follow
NOTICED = 2  # the beginning of its backward pass was noticed, under the hook
PREPARED = 4  # the next backward pass, of any loss, sums its gradients over the ranks

NO_ROUND = "no round is running; expected this within `for ... in pace.loader(...)`"
REFUSED = {
    "backward outside": "pace.backward() was called outside of `for ... in pace.loader(...)`",
    "backward after": "pace.backward() was called after the step of round {step}; expected it once a round, before "
    "pace.step(optimizer): for the loss of a second model, pace.weighted(loss).backward()",
    "backward twice": "round {step}: pace.backward() was called twice in one micro-step of the loop; expected one "
    "call with the sum of the losses, or with Pace also pace.weighted(loss).backward() for a second forward pass",
    "not weighed": "round {step}: pace.host.backward_done() was called before pace.host.weight(loss); expected the "
    "loss to be multiplied by that weight first",
    "left out": "round {step}: the loop went on without {how}; call it once for each micro-batch that the loader "
    "yields",
    "nothing ran": "round {step}: the loop went on without a backward pass",
    "no own step": "interval {step}: the loop went on without pace.step(optimizer); with LocalSGD it is expected "
    "after each pace.backward(loss), since the last one of an interval merges",
    "undivided": "round {step}: pace.weighted(loss, count=...).backward() under weigh='hook' leaves a gradient that "
    "is not divided by the count of all ranks; call pace.backward(loss, count=...) in its place",
    "foreign backward": "round {step}: optimizer.step() was called after a backward pass that is not Paceline's, "
    "whose gradient is not weighted; call pace.backward(loss) in its place, or under a framework its own, such as "
    "Lightning's manual_backward(loss)",
    "weighed first": "round {step}: optimizer.step() was called after pace.weighted(loss).backward() alone; expected "
    "pace.backward(loss) and pace.step(optimizer) first, once a round, and pace.weighted for the passes after them",
    "step within": "optimizer.step() was called within round {step}, before all its gradients were there; expected "
    "pace.step(optimizer), which steps when the round is complete",
    "stepped twice": "an optimizer was stepped twice for one round; expected once: leave optimizer.step() out where "
    "pace.step(optimizer) is called, and add a second loss of the same optimizer to the first",
    "own step twice": "pace.step() was called twice for one batch, or outside of the loop; with LocalSGD "
    "expected one call after each pace.backward(loss), with all optimizers in a list: pace.step([first, second])",
    "own step early": "interval {step}: pace.step() was called before pace.backward(loss); expected it after",
    "other count": "round {step}: two losses of one micro-step have different counts, or one has none; expected the "
    "same count= with each, since the round's gradient is divided by one number",
    "rows": "round {step}: the batch has {rows} rows; expected the {samples} planned samples, or "
    "pace.backward(loss, count=...) with the number that the loss is a mean over",
    "weight outside": "pace.host.weight() or pace.weighted() was called outside of `for ... in pace.loader(...)`",
    "loss_now": "pace.loss_now() was called while no round is complete; expected it after a round's last backward "
    "pass, on all ranks: if pace.step(optimizer): ... pace.loss_now()",
    "checkpoint": "a checkpoint within round {step}; expected one between rounds: make it after the round's "
    "optimizer step, taken by pace.step(optimizer) or reported by pace.host.stepped()",
}
"""The sentence for each event that a phase does not allow."""


class LeftWithin(NamedTuple):
    """The micro-step in whose middle a loop was left. done: its backward pass had ended."""

    piece: Piece
    done: bool


class RoundState:
    """A rank's running round, or the state between two. Only its methods change it.

    own: what follows each backward pass instead of KEEP and STEP: COMMIT if rows travel with the gradients, whose
    sums may fail; ALONE if this rank steps by itself. pass_name: how the loop runs a backward pass, for messages.

    Attributes:
        phase: One of this module's phases.
        piece: The samples of the running pass; None between rounds.
        whole: The samples of all passes of the running micro-step; they are several if it was cut.
        over: The last piece of the newest round that is over; None if one was left since.
        rows: Rows of the batch, if some of its planned samples are missing; else None.
        ran: Samples that count, of the round's micro-steps so far.
        ready: The last gradient of the round is there.
        taken: The optimizers that were stepped for the newest round.
        further: A loss was weighed after the step of the newest round, for another backward pass.
    """

    __slots__ = (
        *("phase", "piece", "whole", "over", "rows", "ran", "ready", "taken", "asked"),
        *("_count", "_known", "_own", "_pass_name", "further"),
    )

    def __init__(self, own: str | None = None, pass_name: str = "pace.backward(loss)") -> None:
        self._own, self._pass_name = own, pass_name
        self.phase = BETWEEN
        self.piece: Piece | None = None
        self.whole: Piece | None = None
        self.over: Piece | None = None
        self.rows: int | None = None
        self.ran = 0
        self.ready = True
        self.taken: list[Any] = []
        self.asked = False  # the loop knows whether its samples count
        self._known = 0
        self.further = False
        self._count: float | None = None  # that of the pass's first loss

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Piece:
        """The piece of the running pass. Raises PacelineError between rounds."""
        if self.piece is None:
            raise PacelineError(NO_ROUND)
        return self.piece

    @property
    def entire(self) -> Piece:
        """The piece of all passes of the running micro-step. Raises PacelineError between rounds."""
        if self.whole is None:
            raise PacelineError(NO_ROUND)
        return self.whole

    @property
    def newest(self) -> Piece | None:
        """A piece of the running round, or of the one that is over; None before the first."""
        return self.over if self.piece is None else self.piece

    @property
    def computing(self) -> int | None:
        """The number of the round while its last gradient is not there on this rank; else None."""
        return None if self.piece is None or self.ready else self.piece.step

    @property
    def passing(self) -> bool:
        """Whether a micro-step is running whose backward pass has not ended."""
        return self.phase == DRAWN or self.phase == WEIGHED

    @property
    def unstepped(self) -> int | None:
        """The number of the running round before its step is due; else None."""
        waits = self.piece is not None and self.phase != COMPLETE and not self.taken
        return self.piece.step if waits and self.piece is not None else None

    def unlike(self, whole: bool) -> int | None:
        """The number of the round while ranks may run different numbers of backward passes in it; else None. whole:
        only those of ``pace.round`` are, whose losses are all weighed, since the loop itself has one turn a round."""
        if whole:
            return self.piece.step if self.phase == WEIGHED and self.piece is not None else None
        return self.unstepped

    @property
    def more(self) -> bool:
        """Whether further passes of the micro-step follow the running one."""
        return self._known & MORE > 0

    @property
    def sends(self) -> bool:
        """Whether the other ranks have begun to receive, or will receive, this pass's gradients: it is the round's
        last one."""
        sent = self.phase != DRAWN or self._known & PREPARED > 0
        return sent and self.piece is not None and self.piece.last

    @property
    def left_behind(self) -> LeftWithin | None:
        """The running micro-step as that in which the loop is left; None between rounds."""
        return None if self.piece is None else LeftWithin(self.piece, self.phase > WEIGHED)

    def samples(self, fixed: bool) -> int | None:
        """The samples that this rank has run: of a micro-step if all ranks run as many of them (``fixed``), else of
        the whole round; None outside of a round and, if not ``fixed``, before all of it has run."""
        piece = self.over if self.piece is None else self.whole
        if piece is None or not (fixed or self.piece is None or self.phase == COMPLETE):
            return None
        return piece.samples if fixed or (piece.first and piece.last) else self.ran

    def stepped_piece(self) -> Piece:
        """The piece of a round that is complete, or over, for its mean loss. Raises PacelineError for others."""
        there = self.piece if self.phase == COMPLETE and self._own is not COMMIT else None
        piece = self.over if self.piece is None else there
        return self.refuse("loss_now") if piece is None else piece

    # -- events ----------------------------------------------------------------------------------------------

    def drawn(self, piece: Piece, rows: int | None = None, asked: bool = False) -> None:
        """A micro-step begins: its batch goes to the loop. rows: see the attributes. asked: an empty batch adds
        nothing, so the loop need not ask whether it counts."""
        if piece.first:
            self.taken, self.ran = [], piece.samples
            self.further = self.ready = False
        else:
            self.ran += piece.samples
        self.phase, self._known, self.rows, self.asked = DRAWN, 0, rows, asked
        self.piece = self.whole = piece

    def holds(self, rows: int | None) -> None:
        """The batch of the micro-step that has begun is there. rows: see the attributes."""
        if self.phase == DRAWN:
            self.rows = rows

    def cut(self, samples: int, first: bool, more: bool) -> Piece:
        """The next pass runs this many of the micro-step's samples. first: it is the micro-step's first pass. more:
        further ones follow it. Returns its piece."""
        whole = self.whole
        assert whole is not None
        self.piece = piece = whole._replace(
            samples=samples, first=whole.first and first, last=whole.last and not more
        )
        self.phase, self.rows, self._known = DRAWN, None, MORE if more else 0
        return piece

    def asks(self) -> bool:
        """The loop asks whether its samples count, in a micro-step or after the round's step. False before the first
        round and after one that was left."""
        self.asked = True
        return (piece := self.newest) is not None and piece.samples > 0

    def prepared(self) -> None:
        """A forward pass has made the next backward pass sum its gradients."""
        self._known |= PREPARED

    def passes(self) -> None:
        """``pace.backward`` is called."""
        if not BETWEEN < self.phase < RAN:
            rule = "backward outside" if self.over is None else "backward after"
            self.refuse("backward twice" if self.piece is not None else rule)

    def weighed(self, count: float | None = None) -> bool:
        """A loss of the running pass gets its weight. count: what it is a mean over, if not the samples. Returns
        whether it is the pass's first."""
        if self.phase != DRAWN:
            if self.piece is not None and count != self._count:
                self.refuse("other count")
            return False
        self.phase, self._count = WEIGHED, count
        return True

    def began(self) -> bool:
        """Under the hook, a backward pass begins. Returns whether it is the micro-step's first."""
        if self.piece is None or self._known & NOTICED:
            return False
        if self.rows is not None and self.phase == DRAWN:
            self.refuse("rows")
        self._known |= NOTICED
        return True

    def noticed_end(self, counted: bool) -> Piece | None:
        """Under the hook, a backward pass has ended. ``counted``: its gradient is still to be divided by a count of
        all ranks, which ``ended`` reports. Returns the piece; None between rounds."""
        if (piece := self.piece) is not None:
            self.phase = COMPLETE if self.ready and piece.last and not counted else RAN
        return piece

    def gradients_ready(self) -> Piece | None:
        """The last gradient of the running pass is there. Returns the micro-step's piece for the first time in the
        round's last one, else None."""
        if self.ready or (piece := self.piece) is None or not piece.last:
            return None
        self.ready = True
        return self.whole

    def ended(self) -> tuple[str, Piece]:
        """A backward pass has ended. Returns AGAIN, KEEP, COMMIT, STEP or ALONE, and the piece that has run."""
        if (whole := self.whole) is None:
            raise PacelineError(NO_ROUND)
        if self.phase == DRAWN and not self._known & NOTICED:
            self.refuse("not weighed")
        if self._known & MORE:
            self.phase = RAN
            return AGAIN, self.running
        self.piece = whole
        if (own := self._own) is not None:
            self.phase = DUE if own is ALONE else RAN
            return own, whole
        if whole.last:
            self.phase = COMPLETE
            return STEP, whole
        self.phase = RAN
        return KEEP, whole

    def committed(self, complete: bool) -> Piece:
        """The answer to COMMIT, or of a merge: whether the round is complete on all ranks. If not, samples of it are
        still to be run. Returns the piece, marked last if it is."""
        piece = self.running
        if piece.last is not complete:
            self.piece = self.whole = piece = piece._replace(last=complete)
        self.phase, self.ready = (COMPLETE, True) if complete else (RAN, self.ready)
        return piece

    def goes_on(self) -> str:
        """The loop asks for its next batch. Returns NEXT or END while a round is running, else ""."""
        piece = self.piece
        if piece is None:
            return ""
        if self.phase <= WEIGHED:
            self.refuse("left out")
        if self.phase == DUE:
            self.refuse("no own step")
        if not piece.last:
            return NEXT
        if self.phase != COMPLETE:
            self.refuse("undivided" if self.ready else "nothing ran")
        return END

    def steps(self, closure: bool, foreign: Callable[[], bool]) -> None:
        """An optimizer is about to step. closure: it runs the backward pass within its step. foreign: whether the
        model has gradients that no weighed pass has left."""
        if not (closure or self.piece is None or self.phase == COMPLETE):
            self._refuse_step(foreign)

    def _refuse_step(self, foreign: Callable[[], bool]) -> NoReturn:
        piece = self.running
        if self.phase == RAN and piece.last and self.ready:
            self.refuse("undivided")
        if piece.last and self.phase <= WEIGHED and (self.ready or (self.phase == DRAWN and foreign())):
            self.refuse("weighed first" if self.phase == WEIGHED else "foreign backward")
        self.refuse("step within")

    def once(self, optimizers: Sequence[Any]) -> None:
        """These optimizers are about to step for the newest round."""
        if any(one in self.taken for one in optimizers) or len({*map(id, optimizers)}) < len(optimizers):
            self.refuse("stepped twice")

    def took(self, optimizers: list[Any]) -> None:
        """These optimizers have stepped for the newest round."""
        self.taken += optimizers

    def weighed_later(self) -> Piece:
        """A loss is weighed after the round's step, for a further backward pass. Returns the piece that is over."""
        if (piece := self.over) is None:
            self.refuse("weight outside")
        self.further = True
        return piece

    def stepped(self, by: Sequence[Any] = ()) -> Piece:
        """The round's step has ended, or was left out on purpose. by: optimizers that have stepped, besides those
        that are known. Returns the round's last piece."""
        if (piece := self.piece) is None:
            raise PacelineError(NO_ROUND)
        self.taken += by
        self.phase, self.piece, self.whole, self.over = BETWEEN, None, None, piece
        return piece

    def steps_alone(self) -> Piece:
        """This rank's own step begins. Returns the piece that it is over."""
        if self.phase == DRAWN or self.phase == WEIGHED:
            self.refuse("own step early")
        if self.phase != DUE:
            self.refuse("own step twice")
        self.phase, self.taken = RAN, []
        return self.running

    def left(self) -> Piece | None:
        """The round is left unfinished. Returns its piece; None between rounds."""
        piece = self.piece
        self.phase, self.piece, self.whole, self.over = BETWEEN, None, None, None
        return piece

    def forget(self) -> None:
        """The loop was left: the optimizers that it stepped may step again."""
        self.taken = []

    def checkpoint(self) -> None:
        """The state of the run is asked for."""
        if self.piece is not None:
            self.refuse("checkpoint")

    # -- errors ----------------------------------------------------------------------------------------------

    def refuse(self, rule: str) -> NoReturn:
        """Raises PacelineError with the sentence of a rule of ``REFUSED``."""
        piece = self.newest
        facts = {"rows": self.rows, "how": self._pass_name}
        if piece is not None:
            facts |= {"step": piece.step, "samples": piece.samples}
        raise PacelineError(REFUSED[rule].format(**facts))
