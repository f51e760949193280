"""The user's handle: balanced batches and exact gradients in a training loop of one's own.

    ddp = DistributedDataParallel(model)
    pace = paceline.torch.Pace(ddp, global_batch=256)
    loader = pace.loader(dataset, seed=0)
    for epoch in range(epochs):
        for x, y in loader:                          # this rank's part of the round
            pace.backward(criterion(ddp(x), y))
            pace.step(optimizer)                     # steps, and zeroes

With loop="round" a rank's part may be run in several pieces, and work moves between the ranks within the round:

        for batch in loader:
            loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))
            pace.step(optimizer)

The gradient is that of one process with the whole batch: DDP averages over n ranks, so a micro-batch of m
samples with a mean loss is weighted by n m / B (LB-BSP, weighted aggregation: g = (1/X) sum_i |B_i| g_i).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch import kinds, peers
from paceline.torch.claiming.claims import Claims
from paceline.torch.feed.batches import Order, Piece
from paceline.torch.feed.loader import BalancedLoader, check_indexed, check_options, draws_ahead
from paceline.torch.feed.sizes import Sizes
from paceline.torch.feed.streams import StreamLoader, check_stream
from paceline.torch.gradients.counts import Counts, number
from paceline.torch.gradients.exactsum import ExactSum
from paceline.torch.gradients.finite import OnNan
from paceline.torch.gradients.parallel import parallel
from paceline.torch.gradients.put_aside import Gradients
from paceline.torch.gradients.steps import Steps
from paceline.torch.limits import Limits
from paceline.torch.liveness import patience
from paceline.torch.liveness.lookout import lookout
from paceline.torch.liveness.patience import OnMissed
from paceline.torch.liveness.shutdown import leave
from paceline.torch.measuring import piece_reports
from paceline.torch.measuring.meter import Meter
from paceline.torch.measuring.open_rounds import OpenRounds, RoundResult
from paceline.torch.measuring.record import RoundRecorder, record_run
from paceline.torch.progress import Progress
from paceline.torch.rates import LearningRateWatch
from paceline.torch.terms import agree
from paceline.torch.turns import RoundBatch, Source, by_round, turns
from paceline.torch.weighting import weigh_in_hook

STEPPED_TWICE = (
    "an optimizer was stepped twice for one round; expected once: leave optimizer.step() out where "
    "pace.step(optimizer) is called"
)


class Pace:
    """Balances one data-parallel model over its ranks.

    model: the DistributedDataParallel module, or one that was given to ``fully_shard``, or a module that wraps either
        (or a plain module in a single process).
    global_batch: B, samples per optimizer step over all ranks; constant, whatever the split.
    policy: a name from ``paceline.policies.names()``, with options as ``name:key=value,...``, or a function
        that makes a policy of your own for a cluster.
    loop: what one turn of the training loop is. "whole" (default): a round, which this rank runs at once; every turn
        is an optimizer step, on every rank. "round": a round, which ``pace.round(batch, function)`` runs in one or
        more pieces. "pieces": one piece of a round, so that turns differ from rank to rank and ``pace.step`` does
        nothing until the round is complete. Policies that move work within the round need one of the last two;
        under "whole", "auto" plans as "level" does.
    limits: (least, most) samples of a round for each rank, None for the default: at least 1 (2 with batch
        norm, which needs a variance), at most B.
    micro_batch: samples that fit into this rank's memory at once. A larger load is accumulated, piece by piece; where
        the loop takes whole rounds, loads stay below it.
    turns: every round takes exactly so many turns on every rank, for hosts that step on every so manyth batch.
    fill: a turn with nothing to do gets a sample that counts for nothing, instead of an empty batch; by default so
        unless the loop takes pieces.
    quantum: every batch that the loop sees is a multiple of this many samples, where captured graphs want few shapes
        or an augmentation pairs samples.
    weigh: "loss" (default) or "hook", a DDP communication hook for loops whose loss can't be touched:
        there call ``loss.backward()`` as before.
    deterministic: the same bits whoever runs what, for policies that move work within the round: every turn is
        one cell of a fixed grid (of ``quantum`` samples; by default a 32nd of B), and gradients are summed without
        rounding. Costs a micro-batch a cell, 16 bytes a parameter, and an all-reduce that overlaps with nothing.
    record: a new directory for the run's record (see ``paceline report``), written by rank 0.
    on_round: called on every rank with each finished RoundResult.
    on_missed: what to do when ranks keep this one waiting: "warn" (default) names them in a warning, again after
        twice the time; "end" names them on standard error and ends the process with status 1, so that a launcher can
        start the ranks again; or a function, called from a thread with a ``patience.Missing``.
    patience: seconds without a sign of life after which a rank is missed. One that lives and is only late is missed
        after ten times that, and ten times as long as rounds take: it may compile, evaluate or write a checkpoint.
    on_nan: what to do when a loss is no number: "warn" (default), once; "raise" a PacelineError on every rank; or a
        function, called on every rank with (round, ranks). Losses that a loop under ``weigh="hook"`` keeps to itself
        are not seen.

    Construct and use it alike on all ranks; a rank that differs is named in a PacelineError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        limits: Limits | None = None,
        micro_batch: int | None = None,
        turns: int | None = None,
        loop: str = "whole",
        fill: bool | None = None,
        quantum: int = 1,
        weigh: str = "loss",
        deterministic: bool = False,
        record: str | Path | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
        on_missed: OnMissed = "warn",
        patience: float = patience.SECONDS,
        on_nan: OnNan = "warn",
    ) -> None:
        kinds.check(
            model,
            global_batch,
            policy,
            limits=limits,
            micro_batch=micro_batch,
            turns=turns,
            quantum=quantum,
            record=record,
            on_round=on_round,
        )
        self.rank, self.ranks = peers.rank(), peers.ranks()
        self._parallel = parallel(model, self.ranks)
        self.global_batch, self.weigh = int(global_batch), weigh
        self.terms = terms = agree(
            model,
            self.global_batch,
            policy,
            limits=limits,
            micro_batch=micro_batch,
            turns=turns,
            fill=loop != "pieces" if fill is None else fill,
            quantum=quantum,
            weigh=weigh,
            deterministic=deterministic,
            in_step=self._parallel.in_step,
            loop=loop,
        )
        self.policy = terms.policy
        if weigh == "hook":
            self._parallel.register_comm_hook(self._hook_weight, weigh_in_hook)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._sum = ExactSum(self._parameters) if terms.cell else None
        most = int(terms.most[self.rank])
        largest = None if terms.cell else terms.micro_batch
        self._claims = Claims(device, terms.unit, largest, most) if terms.moves_work else None
        further = piece_reports.width() if terms.moves_work else 0
        self._meter = Meter(device, terms.balancer.needs_readings, further, self._parallel.waited)
        self._hook = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients_ready)
        self._any_hook = (
            torch.autograd.graph.register_multi_grad_hook(self._parameters, self._backward_begins, mode="any")
            if weigh == "hook"
            else None
        )
        self._gradients = Gradients(self._parameters)
        self._counts = Counts(device)
        self._steps = Steps(self._parameters, self._step_begins, self._step_ended)
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, in this turn of the loop
        self._ever_stepped = False
        self._began_step = 0.0

        self._progress = Progress(self.global_batch, terms.floor)
        self._loaders: list[BalancedLoader | StreamLoader] = []
        self._samples = 0  # of an epoch of the loader that is in use
        self._running: object = None  # the iteration that is
        self._piece: Piece | None = None
        self._piece_done = False
        self._begun = False  # the backward pass of the running turn
        self._counts_epochs = True  # the running iteration is over a loader
        self._own_end = (
            False  # the last turn of a loop that draws its own samples is over, and its step to come
        )
        self._learning_rate = float("nan")
        self._carry_own = 0.0  # seconds of a step that the user took alone
        self._at_once = 1.0  # portion of the plan that this round ran before anything was claimed
        self._weighed = 0  # samples of which the gathered gradients are a mean, under the hook
        self._scale = 1.0  # of the gradients gathered so far, before the coming piece's are added
        self._began = 0.0
        self._carry = 0.0  # seconds of the last optimizer step: part of the next round's overhead
        self._no_sync = ExitStack()
        self._rates = LearningRateWatch()
        self._loss = float("nan")
        listeners = [self._note_loss, *([on_round] if on_round else [])]
        self._ledger = OpenRounds(terms.balancer, self._meter, terms.moves_work, listeners, on_nan)
        self._recorder: RoundRecorder | None = None
        if record is not None:
            self._recorder = peers.on_rank_0(
                lambda: record_run(
                    record, policy=self.policy, workers=self.ranks, global_batch=self.global_batch
                )
            )
        if self._recorder is not None:
            self._ledger.listeners.append(self._recorder.round)
        self._lookout = lookout(on_missed, patience)  # last, since its threads run until it is closed
        self._meter.lost = self._lookout.known

    # -- what the user calls -------------------------------------------------------------------------------

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
    def loss(self) -> float:
        """The mean loss of the newest round that all ranks have reported, over all its samples: usually the one
        before the running one; NaN before there is one."""
        return self._loss

    def loader(
        self, dataset: Any, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False, **options: Any
    ) -> BalancedLoader:
        """This rank's loader over ``dataset`` (anything with ``__len__`` and ``__getitem__``).

        Every sample is used exactly once an epoch over all ranks; the order depends on (seed, epoch) alone.
        drop_last: leave out the last round of an epoch where it would be short.
        Further options go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...). Several loaders may be
        iterated in turn.
        """
        check_indexed(dataset)
        kinds.whole("seed", seed, 0, 2**63 - 1)
        if len(dataset) == 0:
            raise PacelineError("the dataset is empty; expected at least one sample")
        order, number = Order(len(dataset), seed, shuffle), len(self._loaders)
        facts = {"samples": len(dataset), "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        lags = peers.agree(facts, draws_ahead(options))
        loader = BalancedLoader(self, dataset, order, number, drop_last, options)
        self.terms.balancer.lag = max(self.terms.balancer.lag, max(lags) + self._meter.lag)
        self._loaders.append(loader)
        self._samples = loader.samples
        return loader

    def stream(
        self, stream: Any, *, drop_last: bool = False, batches: bool = False, **options: Any
    ) -> StreamLoader:
        """This rank's loader over a stream of its own: an IterableDataset, or anything that can be iterated.

        Each rank draws as many samples as the plan gives it, from its own stream: see to it that the streams of the
        ranks hold different samples. An epoch ends when all streams have ended; the others take over from a rank
        whose stream ends before. Rounds are run as planned: no work moves within them.

        drop_last: leave out what is too little for a whole round at the end. batches: the stream gives batches of any
            size instead of samples; they are cut and joined along their first dimension.
        Further options: collate_fn, and for an IterableDataset those of torch's DataLoader (num_workers, ...).
        """
        check_stream(stream)
        check_options(options, self.global_batch, self.ranks)
        peers.agree({"drop_last": drop_last, "batches": batches})
        loader = StreamLoader(self, stream, len(self._loaders), drop_last, batches, options)
        self.terms.balancer.lag = max(self.terms.balancer.lag, self._meter.lag)
        self._loaders.append(loader)
        return loader

    def sizes(self, rounds: int | None = None) -> Iterator[Any]:
        """For loops that make their own batches: how many samples this rank is to run in each turn.

            for size in pace.sizes(1000):
                x, y = draw(size)
                pace.backward(criterion(ddp(x), y))
                pace.step(optimizer)

        rounds: how many; None for no end. Each has ``global_batch`` samples over all ranks, and its gradient is their
        mean. A size is never 0: a rank with nothing to do gets a turn whose samples count for nothing. With
        loop="pieces" a round may take several turns, so that ``pace.sizes(1)`` is one step's; with loop="round" each
        item is handed to ``pace.round``, whose function is called with the size of each piece.
        """
        if rounds is not None and rounds < 1:
            raise PacelineError(f"pace.sizes({rounds}): expected at least one round, or None for no end")
        if self.terms.cell:
            raise PacelineError(
                "deterministic=True fixes who runs which sample, and a loop that draws its own cannot; leave it out"
            )
        if self.terms.moves_work and self.weigh == "hook":
            raise PacelineError(
                f"policy {self.policy} moves work within the round, and with weigh='hook' a loop that draws its own "
                "samples cannot have a turn that counts for nothing; use weigh='loss', or policy='level'"
            )
        self.terms.balancer.lag = max(self.terms.balancer.lag, self._meter.lag)
        each = turns(self, Sizes(self, rounds))
        return by_round(self, each) if self.terms.loop == "round" else each

    def round(
        self, batch: Any, function: Callable[..., torch.Tensor], reduction: str = "mean", scaler: Any = None
    ) -> torch.Tensor:
        """Run this rank's part of a round: ``function`` gives the loss of each piece, and its backward pass follows.

        batch: what the loader yields with loop="round" (a plain batch of another loop is one piece). A tuple or list
            is spread over the function's arguments, anything else is its one argument.
        function: returns the loss of a piece, or (loss, count) where the loss is a mean over ``count`` tokens or the
            like instead of over samples.
        reduction, scaler: as for ``backward``.
        Returns the loss of this rank's part, detached: the mean over its samples, or the sum where that is the
        reduction.
        """
        pieces = batch.pieces() if isinstance(batch, RoundBatch) else iter([batch])
        total: torch.Tensor | None = None
        count, last = 0.0, None
        for part in pieces:
            returned = function(*part) if isinstance(part, list | tuple) else function(part)
            loss, own = returned if isinstance(returned, tuple) else (returned, None)
            own = None if own is None else number(own)
            self.backward(loss, reduction, scaler, own)
            last = loss.detach()
            samples = self.piece.samples
            many = samples if own is None else own * (samples > 0)
            if many:
                counted = last * many if reduction == "mean" else last
                total = counted if total is None else total + counted
                count += many
        assert last is not None
        if total is None:
            return last
        return total / count if reduction == "mean" else total

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        """Backward through the loss of this turn's batch, weighted so that the round's gradient is exact.

        reduction: what the loss is over this batch's samples, "mean" or "sum".
        count: how many tokens, nodes or the like the loss is a mean (or sum) over, where that is not the samples: the
            round's gradient is then that of the mean over all of them, on all ranks. A batch of 0 counts for nothing.
        scaler: a torch GradScaler, by which the loss is scaled first; hand it to ``step``, too.
        """
        if self._piece is not None and self._piece_done:
            raise PacelineError(
                f"round {self._piece.step}: pace.backward() was called twice in one turn of the loop; expected once: "
                "add the losses, and call it with the sum"
            )
        loss = self.weighted(loss, reduction, count)
        with self._lookout.named():
            (loss if scaler is None else scaler.scale(loss)).backward()
        self.backward_done()

    def weighted(self, loss: torch.Tensor, reduction: str = "mean", count: Any = None) -> torch.Tensor:
        """``loss`` times its ``weight``; zero where it counts for nothing, though a mean over nothing is NaN."""
        weight = self.weight(loss, reduction, None if count is None else number(count))
        return loss * weight if weight else torch.nan_to_num(loss) * 0.0

    def weight(
        self, loss: torch.Tensor | None = None, reduction: str = "mean", count: float | None = None
    ) -> float:
        """What this micro-batch's gradient counts; takes the loss, where given, down for the record. For hosts that
        run the backward pass themselves: multiply the loss by it, and call ``backward_done`` afterwards."""
        piece = self._piece
        if piece is None:
            raise PacelineError("pace.backward() was called outside of `for ... in pace.loader(...)`")
        if reduction not in ("mean", "sum"):
            raise PacelineError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
        many = piece.samples if count is None else count * (piece.samples > 0)
        if count is not None:
            if self.weigh != "loss":
                raise PacelineError(
                    "count= needs weigh='loss': the hook knows samples only; use it with pace.backward"
                )
            if not self._begun:
                self._meter.add_count(piece.step, many)
        if loss is not None and many:
            total = loss.detach() * (many if reduction == "mean" else 1)
            self._meter.add_loss(piece.step, total.double())
        elif loss is not None:
            self._meter.add_loss(piece.step, torch.zeros((), dtype=torch.float64))
        self._halfway()
        if self.weigh != "loss":
            return 1.0
        self._parallel.check_sync(piece.last and self._sum is None)
        if not self._begun:
            self._begun = True
            self._gradients.begin(piece.step)
            self._counts.add(piece.step, None if count is None else many, piece.last)
        part = many if reduction == "mean" else float(many > 0)
        averaged = self.ranks if self._sum is None else 1  # DDP divides by them
        return averaged * part / piece.batch

    def backward_done(self) -> None:
        """The backward pass of this micro-batch is through."""
        piece = self.piece
        if self.weigh == "loss" and not self._begun:
            raise PacelineError(
                f"round {piece.step}: pace.backward_done() was called before pace.weight(loss); expected the loss to "
                "be multiplied by that weight first"
            )
        self._piece_done = True
        if piece.last:  # for a graph in which no hooked parameter took part
            self._stop(piece)
        if self._sum is not None:
            self._sum.add()
            if piece.last:
                self._sum.finish()
        if piece.last:
            factor = self._counts.factor(piece.batch)
            if factor is not None:
                self._gradients.scale(factor)
            self._gradients.ready()
        elif self._sum is None and self.weigh == "loss":
            self._gradients.put_aside()

    def place(self, batch: Any) -> Any:
        """A batch on its way to the user; hosts that move it to their device override this."""
        return batch

    def loads(self, step: int, batch: int) -> NDArray[np.int64]:
        """Samples of each rank in round ``step`` of ``batch`` samples as planned, shape (n,)."""
        return self.terms.balancer.loads(step, batch)

    @property
    def piece(self) -> Piece:
        """What the running turn is given. Raises PacelineError between rounds."""
        if self._piece is None:
            raise PacelineError("no round is running; expected this within `for ... in pace.loader(...)`")
        return self._piece

    @property
    def in_round(self) -> bool:
        """True from a round's first turn to its optimizer step."""
        return self._piece is not None

    @property
    def first(self) -> bool:
        """True in a round's first micro-batch."""
        return self._piece is not None and self._piece.first

    @property
    def last(self) -> bool:
        """True in a round's last micro-batch, whose backward pass reduces the gradients."""
        return self._piece is not None and self._piece.last

    @property
    def counts(self) -> bool:
        """False in the turn of a rank that has nothing to do in this round, and only joins the others."""
        return self._piece is not None and self._piece.samples > 0

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all in, and an optimizer step is due."""
        piece = self._piece
        return piece is not None and piece.last and self._piece_done and self._meter.stopped(piece.step)

    def step(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], scaler: Any = None
    ) -> bool:
        """Step and zero the optimizer when the round is complete; otherwise do nothing. True when it stepped.

        optimizer: one, or several in a list; or call it once for each of them.
        scaler: a torch GradScaler, stepped and updated where given; several optimizers then go in one call.
        """
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
        for one in optimizers:
            if hasattr(one, "param_groups") and not self._steps.concern(one):
                raise PacelineError(
                    f"pace.step() was given a {type(one).__name__} without any parameter of this Pace's model; "
                    "expected one made with the model's own parameters"
                )
            if self._piece is not None:
                self._rates.watch(one, self.rounds, self.complete)
        if (self._piece is None or self.complete) and any(one in self._stepped for one in optimizers):
            raise PacelineError(STEPPED_TWICE)
        if self._piece is None:  # the round's step was taken in this turn; another optimizer's may follow
            optimizers = optimizers if self._stepped else []
            if optimizers and scaler is not None:
                raise PacelineError(
                    "with a GradScaler, several optimizers are stepped together: pace.step([first, second], scaler)"
                )
        elif self.complete:
            self._gradients.check_there(self._piece.step, optimizers)
        else:
            return False
        began = time.perf_counter()
        for one in optimizers:
            if scaler is None:
                one.step()
            else:
                scaler.step(one)
            self._stepped.add(one)
        if scaler is not None and optimizers:
            scaler.update()
        for one in optimizers:
            one.zero_grad()
        seconds = time.perf_counter() - began
        if self._piece is not None:
            self._learning_rate = _learning_rate(optimizers[0]) if optimizers else float("nan")
            self.stepped(seconds)
            return True
        self._carry += seconds
        self._gradients.used()
        return bool(optimizers)

    def stepped(self, seconds: float = 0.0) -> None:
        """The round's optimizer step is done and took so long; for hosts that step by themselves."""
        self._carry = seconds
        self._ever_stepped = True
        self._finish_round()

    def settle(self) -> None:
        """Take in what the ranks reported of the round just finished, and plan from it; the loader does so
        before the next round, a loop that is left early may do it then."""
        with self._lookout.named():
            self._ledger.settle(self.rounds)

    def flush(self) -> None:
        """``settle``, and on a GPU also wait for the last round's reading. Call it on all ranks, or on none;
        the loader does so at the end of each epoch."""
        with self._lookout.named():
            self._ledger.flush(self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on from here, after a finished round: plain numbers."""
        if self._piece is not None:
            raise PacelineError(
                f"a checkpoint within round {self._piece.step}; expected one between rounds: make it after the "
                "round's optimizer step, taken by pace.step(optimizer) or told of by pace.stepped()"
            )
        self.settle()
        return {
            **self._progress.state(),
            "policy": self.policy,
            "balancer": self.terms.balancer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` left off, before iterating the loader; the number of ranks may differ
        (then the policy starts afresh, and each remaining sample is still used exactly once).

        Raises PacelineError for what is no such state, of another version, or of another global batch; nothing is
        changed then."""
        step = self._progress.check(state)  # all is checked before anything changes
        if state["policy"] == self.policy:
            self.terms.balancer.load_state_dict(state["balancer"], step)
        else:
            self.terms.balancer.restart(step)
        self._progress.load(state)
        self._ledger.restart(step)

    def abandon(self) -> None:
        """Leave the running round unfinished, as after an exception; the state is the last finished one's. Its
        gradients are dropped, and its samples are used again where the epoch goes on."""
        self._no_sync.close()
        if self._piece is not None:
            self._gradients.drop()
            self._meter.drop(self._piece.step)
            self._lookout.dropped()
        self._piece = None

    def detach(self) -> None:
        """Finish the record and let go of the model; the process group stays."""
        self._no_sync.close()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._hook.remove()
        self._steps.close()
        if self._any_hook is not None:
            self._any_hook.remove()
        self._meter.close()
        for loader in self._loaders:
            loader.close()
        self._lookout.close()
        if self._claims is not None:
            self._claims.close()

    def release(self) -> None:
        """Let go of DDP, whose last work may else abort the process at its end; no more backward passes."""
        self._parallel.release()

    def close(self) -> None:
        """End cleanly: ``detach`` and ``release``, then leave the process group. Safe to call twice."""
        self.detach()
        self.release()
        leave()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.failed(error)
        finally:
            self.close()

    def failed(self, error: BaseException) -> None:
        """The loop ends with this error: tell the other ranks, which cannot go on without this one.

        Raises a WorkerError that names the rank where the error only says that another one is lost.
        """
        self._meter.abandon()
        if (reason := self._lookout.reason(error)) is not None:
            raise reason from error
        self._lookout.fail(error)

    # -- what the turns of a loop call, in this order:
    # open_epoch, (before_piece, (claim, begin_piece, end_piece)*, begin_piece, end_piece)*, close_epoch, leave_epoch

    def claim(self, piece: Piece) -> tuple[int, int] | None:
        """(start, size) of this rank's next claim before ``piece``, None when there is none (left)."""
        if piece.division is None or not piece.last or self._claims is None:
            return None
        self._at_once = float(piece.division.piece_plan.at_once)
        self._ledger.divided(piece.step, self._at_once)
        return self._claims.take(piece.division)

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

    def remaining(self) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round left in this epoch of the loader in use."""
        return self._progress.remaining(self._samples)

    def rounds_ahead(self, loader: BalancedLoader) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round of the loader's next iteration."""
        return self._progress.ahead(loader.samples)

    def begin_epoch(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self._progress.begin(epoch)

    def open_epoch(self, source: Source) -> object:
        """An iteration begins: within its epoch after ``load_state_dict``, else with a whole one. Returns what tells
        it from other iterations."""
        if self._own_end and self._piece is not None:
            self._end_round()  # a loop that draws its own samples goes on
        self.abandon()
        self.settle()
        self._own_end = False
        if source.number is not None:
            self._samples = source.samples or 0  # of a stream nobody knows
            self._progress.open(source.number, self._samples)
        self._counts_epochs = source.number is not None
        self._running = object()
        source.open()
        return self._running

    def before_piece(self) -> None:
        """A micro-batch is about to be loaded; the round's clock starts with its first."""
        if self._piece is None:
            self._began = time.perf_counter()
            self.settle()
            self._meter.start(self.rounds, self._carry)
            self._at_once = 1.0
            if self._claims is not None:
                self._claims.open(self._began)
            self._carry = 0.0

    def begin_piece(self, piece: Piece) -> None:
        """A micro-batch goes to the user; gradients are only reduced over the ranks in a round's last."""
        self._no_sync.close()
        if not piece.last or self._sum is not None:
            self._no_sync.enter_context(self._parallel.no_sync())
        piece = piece._replace(first=self._piece is None)
        if self.weigh == "hook" and not piece.first and piece.samples:
            # With mean losses g_1, g_2 over m_1, m_2 samples the round needs (m_1 g_1 + m_2 g_2) / B. Gathered as
            # g_1 (m_1 / m_2) + g_2, the hook's m_2 / B gives just that.
            self._scale *= self._weighed / piece.samples
        self._weighed = piece.samples or (0 if piece.first else self._weighed)
        if piece.first:
            self._scale = 1.0
            self._counts.begin()
            self._stepped.clear()
            self._ledger.open(piece, self.epoch, self._at_once)
        self._piece, self._piece_done, self._begun = piece, False, False
        if self._claims is not None and not piece.last:
            self._claims.begin(piece.division, piece.samples)

    def check_piece(self, running: object = None) -> None:
        """The user's turn is over: raises PacelineError where it left something out."""
        if running is not None and self._running is not running:
            raise PacelineError(
                "another loop over a loader of this Pace was begun within this one; expected one to end before the "
                "next begins: draw both batches from one loader, or make a Pace for each model"
            )
        piece = self._piece
        if piece is None:
            return  # the round was finished by step()
        if not self._piece_done:
            how = "loss.backward()" if self.weigh == "hook" else "pace.backward(loss)"
            raise PacelineError(
                f"round {piece.step}: the loop went on without {how}; call it once for each micro-batch that the "
                "loader yields"
            )
        if piece.last and not self._meter.stopped(piece.step):
            raise PacelineError(f"round {piece.step}: the loop went on without a backward pass")
        self._own_end = not self._counts_epochs and piece.last

    def end_piece(self, running: object = None) -> None:
        """The user's turn is over, and another may follow."""
        self.check_piece(running)
        piece = self._piece
        if piece is None:
            return
        if piece.last:
            self._end_round()
        elif self._claims is not None:
            self._claims.done(piece.samples)

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used."""
        self.flush()
        self.begin_epoch(self.epoch + 1)

    def leave_epoch(self, running: object) -> None:
        """The iteration is over, or was left: what is unfinished is dropped, but a step may still follow a complete
        round."""
        if self._running is running:
            self._running = None
            if not self.complete:
                self.abandon()
                self._stepped.clear()

    # -- within ----------------------------------------------------------------------------------------------

    def _halfway(self) -> None:
        """The backward pass begins: behind it there is time to ask for what comes next."""
        piece = self._piece
        if self._claims is not None and piece is not None and not piece.last:
            self._claims.halfway(piece.division, piece.samples)

    def _backward_begins(self, _: object) -> None:
        """Under the hook, nothing else tells of a backward pass."""
        piece = self._piece
        if piece is None or self._begun:
            return
        self._begun = True
        self._halfway()
        self._parallel.check_sync(piece.last)
        self._gradients.begin(piece.step, self._scale)
        self._scale = 1.0
        # as soon as the whole pass is through, and with it DDP's reduction
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        piece = self._piece
        if piece is None:
            return
        self._piece_done = True
        if not piece.last:
            self._gradients.put_aside()

    def _gradients_ready(self, _: object) -> None:
        if self._piece is not None and self._piece.last:
            self._stop(self._piece)

    def _stop(self, piece: Piece) -> None:
        """This rank's last gradient of the round is ready."""
        self._lookout.ended(piece.step)
        if self._claims is None:
            self._meter.stop(piece.step, self.terms.balancer.digest)
        elif not self._meter.stopped(piece.step):
            self._claims.done(piece.samples, last=True)
            self._meter.stop(piece.step, self.terms.balancer.digest, self._claims.report)

    def _hook_weight(self) -> float:
        return self._weighed / self.piece.batch

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Before any step of an optimizer that holds the model's parameters, whoever takes it."""
        self._began_step = time.perf_counter()
        if not closure:
            self._check_complete()
        in_loop = self._running is not None or self._piece is not None
        if in_loop and optimizer in self._stepped:
            raise PacelineError(STEPPED_TWICE)

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_complete()  # for a closure, which has only now run its backward pass
        if self._running is not None or self._piece is not None:
            self._stepped.add(optimizer)
            self._carry_own = time.perf_counter() - self._began_step

    def _check_complete(self) -> None:
        piece = self._piece
        if piece is not None and piece.last and not self._piece_done and self._meter.stopped(piece.step):
            raise PacelineError(
                f"round {piece.step}: optimizer.step() was called after a backward pass that is not Paceline's, "
                "whose gradient is not weighed; call pace.backward(loss) in its place"
            )
        if piece is not None and not self.complete:
            raise PacelineError(
                f"optimizer.step() was called within round {piece.step}, before all its gradients were there; "
                "expected pace.step(optimizer), which steps when the round is complete"
            )

    def _end_round(self) -> None:
        """The turn of a complete round is over, and pace.step() did not end it."""
        piece = self.piece
        if self._stepped:  # by the user alone
            self.stepped(self._carry_own)
        elif self._ever_stepped or not self._gradients.finite():  # left out on purpose, or by a scaler
            self._finish_round()
        else:
            raise PacelineError(
                f"round {piece.step}: the loop went on without an optimizer step; expected pace.step(optimizer) "
                "once a round, behind pace.backward(loss)"
            )

    def _finish_round(self) -> None:
        piece = self.piece
        seconds = time.perf_counter() - self._began
        self._ledger.finish(piece.step, seconds, self._learning_rate)
        self._learning_rate = float("nan")  # the next round's step may be taken by others
        self._lookout.over(seconds)
        self._gradients.used()
        self._progress.finish(piece.batch if self._counts_epochs else 0)
        self._piece = None

    def _note_loss(self, result: RoundResult) -> None:
        self._loss = result.loss


def _learning_rate(optimizer: Any) -> float:
    """Of the optimizer's first group; NaN where it has none."""
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0].get("lr", float("nan"))) if groups else float("nan")
