"""The user's handle: balanced batches and exact gradients in a training loop of one's own.

    ddp = DistributedDataParallel(model)
    pace = paceline.torch.Pace(ddp, global_batch=256)
    loader = pace.loader(dataset, seed=0)
    for epoch in range(epochs):
        for x, y in loader:                          # this rank's part of the round, in one or more micro-batches
            pace.backward(criterion(ddp(x), y))
            pace.step(optimizer)                     # steps, and zeroes, when the round is complete

The gradient is that of one process with the whole batch: DDP averages over n ranks, so a micro-batch of m
samples with a mean loss is weighted by n m / B (LB-BSP, weighted aggregation: g = (1/X) sum_i |B_i| g_i).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch import book, patience, peers
from paceline.torch.batches import Order, Piece
from paceline.torch.claims import Claims
from paceline.torch.exactsum import ExactSum
from paceline.torch.ledger import Ledger, RoundResult
from paceline.torch.limits import Limits
from paceline.torch.loader import BalancedLoader, check_indexed, draws_ahead
from paceline.torch.meter import Meter
from paceline.torch.parallel import parallel
from paceline.torch.patience import Missed, Patience
from paceline.torch.progress import Progress
from paceline.torch.rates import Rates
from paceline.torch.record import RoundRecorder, record_run
from paceline.torch.shutdown import leave
from paceline.torch.terms import agree
from paceline.torch.weighting import rescale, weigh_in_hook


class Pace:
    """Balances one data-parallel model over its ranks.

    model: the DistributedDataParallel module, or one that was given to ``fully_shard``, or a module that wraps either
        (or a plain module in a single process).
    global_batch: B, samples per optimizer step over all ranks; constant, whatever the split.
    policy: a name from ``paceline.policies.names()``, with options as ``name:key=value,...``, or a function
        that makes a policy of your own for a cluster.
    limits: (least, most) samples of a round for each rank, None for the default: at least 1 (2 with batch
        norm, which needs a variance), at most B.
    micro_batch: samples that fit into this rank's memory at once; a larger load is accumulated.
    turns: every round takes exactly so many turns on every rank, for hosts that step on every so manyth batch.
    fill: a turn with nothing to do gets a sample that counts for nothing, instead of an empty batch.
    quantum: loads are multiples of this many samples, where captured graphs want few shapes.
    weigh: "loss" (default) or "hook", a DDP communication hook for loops whose loss can't be touched:
        there call ``loss.backward()`` as before.
    deterministic: the same bits whoever runs what, for policies that move work within the round: every turn is
        one cell of a fixed grid (of ``quantum`` samples; by default a 32nd of B), and gradients are summed without
        rounding. Costs a micro-batch a cell, 16 bytes a parameter, and an all-reduce that overlaps with nothing.
    record: a new directory for the run's record (see ``paceline report``), written by rank 0.
    on_round: called on every rank with each finished RoundResult.
    on_missed: where work moves within the round: called from a thread with (round, ranks, seconds) when this rank
        has waited for these ranks ten times as long as rounds take, and at least ``patience`` seconds; by default
        a warning names them.

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
        fill: bool = False,
        quantum: int = 1,
        weigh: str = "loss",
        deterministic: bool = False,
        record: str | Path | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
        on_missed: Missed = patience.warn,
        patience: float = patience.LEAST_SECONDS,
    ) -> None:
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
            fill=fill,
            quantum=quantum,
            weigh=weigh,
            deterministic=deterministic,
            in_step=self._parallel.in_step,
        )
        self.policy = terms.policy
        if weigh == "hook":
            self._parallel.register_comm_hook(self._hook_weight, weigh_in_hook)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._sum = ExactSum(self._parameters) if terms.cell else None
        most = int(terms.most[self.rank])
        largest = None if terms.cell else terms.micro_batch
        self._claims = Claims(device, terms.unit, largest, most) if terms.pulls else None
        further = book.width() if terms.pulls else 0
        self._meter = Meter(device, terms.balancer.needs_readings, further, self._parallel.waited)
        self._patience = Patience(self._meter.missing, on_missed, patience) if terms.pulls else None
        self._hook = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients_ready)
        self._any_hook = (
            torch.autograd.graph.register_multi_grad_hook(self._parameters, self._halfway, mode="any")
            if weigh == "hook" and terms.pulls
            else None
        )

        self._progress = Progress(self.global_batch, terms.floor)
        self._order: Order | None = None
        self._loaders: list[BalancedLoader] = []
        self._piece: Piece | None = None
        self._piece_done = False
        self._at_once = 1.0  # portion of the plan that this round ran before anything was claimed
        self._weighed = 0  # samples of which the gathered gradients are a mean, under the hook
        self._began = 0.0
        self._carry = 0.0  # seconds of the last optimizer step: part of the next round's overhead
        self._no_sync = ExitStack()
        self._rates = Rates()
        listeners = [on_round] if on_round else []
        self._ledger = Ledger(terms.balancer, self._meter, terms.pulls, listeners)
        self._recorder: RoundRecorder | None = None
        if record is not None:
            self._recorder = peers.on_rank_0(
                lambda: record_run(
                    record, policy=self.policy, workers=self.ranks, global_batch=self.global_batch
                )
            )
        if self._recorder is not None:
            self._ledger.listeners.append(self._recorder.round)

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

    def loader(self, dataset: Any, *, seed: int = 0, shuffle: bool = True, **options: Any) -> BalancedLoader:
        """This rank's loader over ``dataset`` (anything with ``__len__`` and ``__getitem__``).

        Every sample is used exactly once an epoch over all ranks; the order depends on (seed, epoch) alone.
        Further options go to torch's DataLoader (num_workers, collate_fn, pin_memory, ...).
        """
        check_indexed(dataset)
        if len(dataset) == 0:
            raise PacelineError("the dataset is empty; expected at least one sample")
        self._order = Order(len(dataset), seed, shuffle)
        lags = peers.agree({"samples": len(dataset), "seed": seed, "shuffle": shuffle}, draws_ahead(options))
        self.terms.balancer.lag = max(lags) + self._meter.lag
        loader = BalancedLoader(self, dataset, self._order, options)
        self._loaders.append(loader)
        return loader

    def backward(self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None) -> None:
        """Backward through the loss of this micro-batch, weighted so that the round's gradient is exact.

        reduction: what the loss is over this micro-batch's samples, "mean" or "sum".
        scaler: a torch GradScaler, by which the loss is scaled first; hand it to ``step``, too.
        """
        loss = loss * self.weight(loss, reduction)
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.backward_done()

    def weight(self, loss: torch.Tensor | None = None, reduction: str = "mean") -> float:
        """What this micro-batch's gradient counts; takes the loss, where given, down for the record. For hosts that
        run the backward pass themselves: multiply the loss by it, and call ``backward_done`` afterwards."""
        piece = self._piece
        if piece is None:
            raise PacelineError("pace.backward() was called outside of `for ... in pace.loader(...)`")
        if reduction not in ("mean", "sum"):
            raise PacelineError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
        if loss is not None and piece.samples:
            total = loss.detach() * (piece.samples if reduction == "mean" else 1)
            self._meter.add_loss(piece.step, total.double())
        elif loss is not None:
            self._meter.add_loss(piece.step, torch.zeros((), dtype=torch.float64))
        self._halfway()
        if self.weigh != "loss":
            return 1.0
        count = piece.samples if reduction == "mean" else min(piece.samples, 1)
        averaged = self.ranks if self._sum is None else 1  # DDP divides by them
        return averaged * count / piece.batch

    def backward_done(self) -> None:
        """The backward pass of this micro-batch is through."""
        piece = self._piece
        assert piece is not None
        self._piece_done = True
        if piece.last:  # for a graph in which no hooked parameter took part
            self._stop(piece)
        if self._sum is not None:
            self._sum.add()
            if piece.last:
                self._sum.finish()

    def place(self, batch: Any) -> Any:
        """A batch on its way to the user; hosts that move it to their device override this."""
        return batch

    def loads(self, step: int, batch: int) -> NDArray[np.int64]:
        """Samples of each rank in round ``step`` of ``batch`` samples as planned, shape (n,)."""
        return self.terms.balancer.loads(step, batch)

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
        return self._piece is not None and self._piece.last and self._meter.stopped(self._piece.step)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> bool:
        """Step and zero the optimizer when the round is complete; otherwise do nothing. True when it stepped.

        scaler: a torch GradScaler, stepped and updated where given.
        """
        if self._piece is not None:
            self._rates.watch(optimizer, self.rounds, self.complete)
        if not self.complete:
            return False
        began = time.perf_counter()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        self.stepped(time.perf_counter() - began)
        return True

    def stepped(self, seconds: float = 0.0) -> None:
        """The round's optimizer step is done and took so long; for hosts that step by themselves."""
        self._carry = seconds
        self._finish_round()

    def settle(self) -> None:
        """Take in what the ranks reported of the round just finished, and plan from it; the loader does so
        before the next round, a loop that is left early may do it then."""
        self._ledger.settle(self.rounds)

    def flush(self) -> None:
        """``settle``, and on a GPU also wait for the last round's reading. Call it on all ranks, or on none;
        the loader does so at the end of each epoch."""
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
            "version": 1,
            **self._progress.state(),
            "policy": self.policy,
            "balancer": self.terms.balancer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` left off, before iterating the loader; the number of ranks may differ
        (then the policy starts afresh, and each remaining sample is still used exactly once)."""
        self._progress.load(state)
        self._ledger.restart(self.rounds)
        if state["policy"] == self.policy:
            self.terms.balancer.load_state_dict(state["balancer"], self.rounds)
        else:
            self.terms.balancer.restart(self.rounds)

    def abandon(self) -> None:
        """Leave the running round unfinished, as after an exception; the state is the last finished one's."""
        self._no_sync.close()
        self._piece = None

    def detach(self) -> None:
        """Finish the record and let go of the model; the process group stays."""
        self._no_sync.close()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._hook.remove()
        if self._any_hook is not None:
            self._any_hook.remove()
        self._meter.close()
        for loader in self._loaders:
            loader.close()
        if self._patience is not None:
            self._patience.close()
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

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the loader calls, in this order:
    # open_epoch, (before_piece, (claim, begin_piece, end_piece)*, begin_piece, end_piece)*, close_epoch

    def claim(self, piece: Piece) -> tuple[int, int] | None:
        """(start, size) of this rank's next claim before ``piece``, None when there is none (left)."""
        if piece.division is None or not piece.last or self._claims is None:
            return None
        self._at_once = float(piece.division.pull.first)
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
        """(first sample, size) of each round left in this epoch."""
        assert self._order is not None
        return self._progress.remaining(self._order.samples)

    def begin_epoch(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self._progress.begin(epoch)

    def open_epoch(self) -> None:
        """An iteration begins: within its epoch after ``load_state_dict``, else with a whole one."""
        self.settle()
        self._piece = None
        self._progress.open()

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
        if self.weigh == "hook" and self._piece is not None and piece.samples:
            rescale(self._parameters, self._weighed, piece.samples)
        piece = piece._replace(first=self._piece is None)
        self._weighed = piece.samples or (0 if piece.first else self._weighed)
        if piece.first:
            self._ledger.open(piece, self.epoch, self._at_once)
        self._piece, self._piece_done = piece, False
        if self._claims is not None and not piece.last:
            self._claims.begin(piece.division, piece.samples)

    def end_piece(self) -> None:
        """The user's turn is over."""
        piece = self._piece
        if piece is None:
            return  # the round was finished by step()
        if not (self._piece_done or self.weigh == "hook"):
            raise PacelineError(
                f"round {piece.step}: the loop went on without pace.backward(loss); call it once for each "
                "micro-batch that the loader yields"
            )
        if self._claims is not None and not piece.last:
            self._claims.done(piece.samples)
        if piece.last:
            if not self._meter.stopped(piece.step):
                raise PacelineError(f"round {piece.step}: the loop went on without a backward pass")
            self._finish_round()  # the user stepped the optimizer alone

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used."""
        self.flush()
        self.begin_epoch(self.epoch + 1)

    # -- within ----------------------------------------------------------------------------------------------

    def _halfway(self, _: object = None) -> None:
        """The backward pass begins: behind it there is time to ask for what comes next."""
        piece = self._piece
        if self._claims is not None and piece is not None and not piece.last:
            self._claims.halfway(piece.division, piece.samples)

    def _gradients_ready(self, _: object) -> None:
        if self._piece is not None and self._piece.last:
            self._stop(self._piece)

    def _stop(self, piece: Piece) -> None:
        """This rank's last gradient of the round is ready."""
        if self._claims is None:
            self._meter.stop(piece.step, self.terms.balancer.digest)
        elif not self._meter.stopped(piece.step):
            self._claims.done(piece.samples, last=True)
            if self._patience is not None:
                self._patience.begin(piece.step)
            self._meter.stop(piece.step, self.terms.balancer.digest, self._claims.report)

    def _hook_weight(self) -> float:
        assert self._piece is not None
        return self._weighed / self._piece.batch

    def _finish_round(self) -> None:
        assert self._piece is not None
        seconds = time.perf_counter() - self._began
        self._ledger.finish(self._piece.step, seconds)
        if self._patience is not None:
            self._patience.end(seconds)
        self._progress.finish(self._piece.batch)
        self._piece = None
