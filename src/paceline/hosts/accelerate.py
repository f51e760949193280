"""Balanced batches in an Accelerate loop.

    accelerator = Accelerator()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)   # not the loader
    pace = AcceleratePace(accelerator, model, global_batch=256)    # 1
    loader = pace.loader(dataset, seed=0)                    # 2, instead of DataLoader and prepare
    for epoch in range(epochs):
        for x, y in loader:
            pace.backward(criterion(model(x), y))            # 3, instead of accelerator.backward
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    pace.close()                                             # 4, ends without gloo's abort at exit

``accelerator.save_state()`` and ``load_state()`` include the state of the pace. If the Accelerator accumulates over k
steps, an optimizer step takes k iterations of the loop on every rank, as without balancing, and
``accelerator.accumulate(model)`` stays in the loop.

Accelerate steps a prepared scheduler once for each rank, since ``len()`` of a DataLoader before ``prepare`` counts
the batches of all ranks. ``len(loader)`` of a balanced loader counts rounds, so a scheduler that is prepared after
AcceleratePace was made steps once for each optimizer step, as with ``split_batches=True``: count its steps as
``len(loader) * epochs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.commands import installation
from paceline.errors import PacelineError, refuse
from paceline.hosts.accumulating import AccumulatingPace
from paceline.torch.gradients.weighing import GLOBAL
from paceline.torch.host import Host
from paceline.torch.mistakes import Words
from paceline.torch.options import has_batch_norm
from paceline.torch.plan import Piece

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Accelerate is not installed; {installation('hosts')}") from error

__all__ = ["AcceleratePace"]

REPLICATED = ("NO", "MULTI_")  # Accelerate's kinds of distribution under which DDP averages gradients


class AcceleratePace(AccumulatingPace):
    """``paceline.torch.Pace`` for a model that ``accelerator.prepare`` wrapped; takes Pace's options.

    Batches are put on the Accelerator's device.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: What ``accelerator.prepare`` returned for the model.
        global_batch: B, samples per optimizer step over all ranks, including accumulation.
        policy: As for ``paceline.torch.Pace``.
        loop: "whole" (default): a micro-step is an optimizer step, or one of the k that the Accelerator accumulates;
            "round" for ``pace.round``; "pieces": rounds take as many micro-steps as they need, and the prepared
            optimizer and scheduler skip ``step()`` until a round is complete.
        micro_batch: Samples that fit into this rank's memory; for "round" and "pieces", if the Accelerator
            accumulates over k steps, by default those of an even split, B / (n k).
        accumulate: Micro-steps per step, for a loop that accumulates without the Accelerator (``loss / k``).
        options: As for ``paceline.torch.Pace``.

    Raises:
        PacelineError: For DeepSpeed, Megatron-LM, XLA and FSDP, and for a round whose optimizer step is left out or
            comes too early.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        global_batch: int,
        policy: Any = "auto",
        *,
        loop: str = "whole",
        micro_batch: int | None = None,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        kind, steps = accelerator.distributed_type.value, accelerator.gradient_accumulation_steps
        reasons = {
            f"Accelerate distributes this model by {kind}; expected DistributedDataParallel: use it, or fully_shard "
            "with paceline.torch.Pace": not kind.startswith(REPLICATED),
            "with weigh='hook', accelerator.backward would divide by its accumulation steps; use weigh='loss' and "
            "pace.backward(loss)": options.get("weigh", "loss") != "loss",
            f"accumulate={accumulate} and gradient_accumulation_steps={steps}: expected one of them, as either the "
            "loop or the Accelerator divides the loss": steps > 1 and accumulate > 1,
        }
        refuse("AcceleratePace", reasons)
        if steps > 1 and loop == "whole":
            options["micro_steps"] = steps
        elif steps > 1 and micro_batch is None:
            least = 3 if has_batch_norm(model) else 1
            micro_batch = max(least, -(-int(global_batch) // (accelerator.num_processes * steps)))
        super().__init__(
            model, global_batch, policy, loop=loop, micro_batch=micro_batch, accumulate=accumulate, **options
        )
        self._accelerator = accelerator
        each = max(steps if loop == "whole" else 1, accumulate)
        self.host.adapter = _UnderAccelerate(self, accelerator, each)
        if loop == "pieces":
            # With one step, accumulate() would treat every micro-step as a complete round.
            accelerator.gradient_accumulation_steps = max(2, steps)
        accelerator.register_for_checkpointing(self)
        _step_once(accelerator)

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        """Run the backward pass of a weighted loss, so that the round's gradient is exact.

        Use it instead of ``accelerator.backward``.

        Args:
            loss: A scalar tensor, as for ``Pace.backward``.
            reduction: "mean", "sum" or "global": the form of the loss.
            scaler: Refused: Accelerate scales by itself.
            count: The number of tokens that the loss is a mean over.

        Raises:
            PacelineError: With a ``scaler``, and if ``accelerator.sync_gradients`` was changed in the round.
        """
        if scaler is not None:
            raise PacelineError("scaler= is for plain loops; the Accelerator scales by itself: leave it out")
        accelerator = self._accelerator
        divided = accelerator.gradient_accumulation_steps  # accelerator.backward divides by it
        if reduction == GLOBAL:  # which keeps the weight that the Accelerator gives
            loss = loss / divided
        weighted = self.weighted(loss, reduction, count) * divided
        if self.host.terms.loop != "round" and accelerator.sync_gradients != self.host.last:
            raise PacelineError(
                f"accelerator.sync_gradients was changed to {accelerator.sync_gradients} in round {self.rounds}; "
                "leave no_sync, and accumulate with another count, out of this loop"
            )
        accelerator.backward(weighted)
        self.host.backward_done()

    def state_dict(self) -> dict[str, Any]:
        if self.complete and self._accelerator.optimizer_step_was_skipped:  # after an overflow of the scaler
            self.host.stepped()
        return super().state_dict()


def _step_once(accelerator: Accelerator) -> None:
    """Let the schedulers that are prepared from now on step once for each optimizer step."""
    plain = accelerator.prepare_scheduler

    def prepare_scheduler(scheduler: Any) -> Any:
        prepared = plain(scheduler)
        prepared.split_batches = True
        return prepared

    accelerator.prepare_scheduler = prepare_scheduler


class _UnderAccelerate(Host):
    """The host of an AcceleratePace. micro_steps: of the loop, for each optimizer step."""

    words = Words(added="use AcceleratePace(..., policy='equal'), which gives all ranks the same load")

    def __init__(self, pace: AcceleratePace, accelerator: Accelerator, micro_steps: int) -> None:
        self._pace, self._accelerator, self._micro_steps = pace, accelerator, micro_steps

    def place(self, batch: Any) -> Any:
        return send_to_device(batch, self._accelerator.device, non_blocking=self._accelerator.non_blocking)

    def micro_step_begins(self, piece: Piece) -> None:
        accelerator, steps = self._accelerator, self._accelerator.gradient_accumulation_steps
        # The prepared optimizer and scheduler skip a step() unless sync_gradients is set ...
        steps_now = piece.last or self._pace.host.terms.loop == "round"
        accelerator.sync_gradients = steps_now
        # ... which accumulate() does when its own count of micro-steps reaches a multiple of the steps.
        accelerator.step = steps - 1 if steps_now else 0
        for optimizer in accelerator._optimizers:
            optimizer._is_overflow = False  # the scaler's result of the previous round

    def iteration_over(self) -> None:
        self._accelerator.sync_gradients, self._accelerator.step = True, 0  # as before the iteration

    def step_begins(self, piece: Piece | None) -> None:
        if piece is not None and not piece.last:
            raise PacelineError(
                f"optimizer.step() was called before the last of the {self._micro_steps} micro-steps of a step; "
                f"expected it {self._when()}"
            )

    def step_ended(self, seconds: float) -> None:
        if self._pace.complete:
            self._pace.host.stepped(seconds)

    def without_step(self, step: int, ever: bool, finite: Callable[[], bool]) -> str:
        if self._accelerator.optimizer_step_was_skipped or not finite():
            return ""
        return (
            f"round {step} is complete, and the loop continued without optimizer.step(), so its gradient "
            f"would be lost; expected a step {self._when()}"
        )

    def _when(self) -> str:
        """The place in the loop where a step is due, for a sentence."""
        if self._micro_steps > 1:
            return (
                f"in the last of them: `if (i + 1) % {self._micro_steps} == 0`, or in every micro-step under "
                "accelerator.accumulate(model)"
            )
        return (
            "in every micro-step: if this loop accumulates, use gradient_accumulation_steps=k and "
            "accelerator.accumulate(model), or AcceleratePace(..., accumulate=k) if it divides its loss by k"
        )
