"""Balanced batches in an Accelerate loop.

    accelerator = Accelerator()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)   # not the loader
    pace = Balanced(accelerator, model, global_batch=256)    # 1
    loader = pace.loader(dataset, seed=0)                    # 2, instead of DataLoader and prepare
    for epoch in range(epochs):
        for x, y in loader:
            pace.backward(criterion(model(x), y))            # 3, instead of accelerator.backward
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()                                 # as before: Accelerate passes over these
            scheduler.step()                                 # until the round is complete
            optimizer.zero_grad()
    pace.close()                                             # 4, ends without gloo's abort at exit

``accelerator.save_state()`` and ``load_state()`` take the pace along; ``accelerator.accumulate(model)`` may stay.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import PacelineError
from paceline.torch.batches import Piece
from paceline.torch.limits import has_batch_norm
from paceline.torch.pace import Pace

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
except ModuleNotFoundError as error:  # pragma: no cover - where the extra is not installed
    raise PacelineError("Accelerate is not installed; install paceline[hosts]") from error

REPLICATED = ("NO", "MULTI_")  # kinds of Accelerate's distribution whose gradients DDP averages


class Balanced(Pace):
    """``paceline.torch.Pace`` for a model that ``accelerator.prepare`` wrapped; takes Pace's options.

    global_batch: B, samples per optimizer step over all ranks, accumulation included.
    micro_batch: samples that this rank's memory holds; where the Accelerator accumulates over k steps, by default as
        many as an even split would have there, B / (n k).

    Batches come on the Accelerator's device. Raises PacelineError for DeepSpeed, Megatron-LM, XLA and FSDP.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        global_batch: int,
        policy: Any = "auto",
        *,
        micro_batch: int | None = None,
        **options: Any,
    ) -> None:
        kind = accelerator.distributed_type.value
        if not kind.startswith(REPLICATED):
            raise PacelineError(
                f"Accelerate distributes this model by {kind}; expected DistributedDataParallel: use it, or "
                "fully_shard with paceline.torch.Pace"
            )
        if options.get("weigh", "loss") != "loss":
            raise PacelineError(
                "weigh='hook': accelerator.backward would divide by its accumulation steps; use weigh='loss' "
                "and pace.backward(loss)"
            )
        steps = accelerator.gradient_accumulation_steps
        if micro_batch is None and steps > 1:
            least = 3 if has_batch_norm(model) else 1
            micro_batch = max(least, -(-int(global_batch) // (accelerator.num_processes * steps)))
        super().__init__(model, global_batch, policy, micro_batch=micro_batch, **options)
        self._accelerator = accelerator
        # With one step, accumulate() would take every turn for a complete round.
        accelerator.gradient_accumulation_steps = max(2, steps)
        accelerator.register_for_checkpointing(self)
        self._ours = {id(parameter) for parameter in self._parameters}
        self._began_step = 0.0
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def backward(self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None) -> None:
        """Instead of ``accelerator.backward``: weighted so that the round's gradient is exact; see Pace."""
        if scaler is not None:
            raise PacelineError("scaler= is for plain loops; the Accelerator scales by itself: leave it out")
        accelerator = self._accelerator
        divided = accelerator.gradient_accumulation_steps  # by accelerator.backward
        weighted = loss * (self.weight(loss, reduction) * divided)
        if accelerator.sync_gradients != self.last:
            raise PacelineError(
                "accelerator.sync_gradients was changed within a turn; expected it to stay as the balancing sets it: "
                "leave accelerator.no_sync and an accumulation of your own out of this loop"
            )
        accelerator.backward(weighted)
        self.backward_done()

    def begin_piece(self, piece: Piece) -> None:
        super().begin_piece(piece)
        # The prepared optimizer and scheduler pass over a step() unless gradients are said to be in sync ...
        self._accelerator.sync_gradients = piece.last
        # ... which accumulate() says when its own count of turns comes to a multiple of the steps.
        self._accelerator.step = self._accelerator.gradient_accumulation_steps - 1 if piece.last else 0

    def place(self, batch: Any) -> Any:
        return send_to_device(batch, self._accelerator.device, non_blocking=self._accelerator.non_blocking)

    def state_dict(self) -> dict[str, Any]:
        if self.complete and self._accelerator.optimizer_step_was_skipped:  # by the scaler, on an overflow
            self.stepped()
        return super().state_dict()

    def detach(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        super().detach()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._began_step = time.perf_counter()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if self.complete and any(id(p) in self._ours for p in stepped):
            self.stepped(time.perf_counter() - self._began_step)
