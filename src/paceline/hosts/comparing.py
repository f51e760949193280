"""Losses of the Hugging Face Trainer's subclasses that compare the samples of a batch with each other.

Many of them choose samples, or use a statistic without a gradient, so that no second derivative shows it
(``torch/mistakes/comparing.py``). They are known by their names, also before the first step.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from paceline.torch import peers, timing
from paceline.torch.mistakes.suspects import COMPARES

# Parts of the names of sentence-transformers' losses that compare a sample with others of the batch.
IN_BATCH = (
    "NegativesRanking", "GISTEmbed", "BatchAll", "BatchHard", "BatchSemiHard", "MegaBatch", "CoSENT", "AnglE",
    "OnlineContrastive", "ContrastiveTension", "GlobalOrthogonal", "DistillKLDiv",
)  # fmt: skip
# Losses of trl that compare the samples of a batch: of trainers that estimate a divergence or a mean reward from
# the batch, and those of any trainer that sort the batch.
TRL_ESTIMATES, TRL_SORTS = ("KTOTrainer", "BCOTrainer"), ("aot", "aot_pair", "aot_unpaired")


def warn_of_comparisons(trainer: Any) -> None:
    """Warn, once, about a loss that compares the samples of a batch with each other. Such a loss gets no second
    warning in the training."""
    losses = getattr(trainer, "loss", None)
    made = losses.values() if isinstance(losses, dict) else [losses]
    found = [each for each in (*made, trainer.model) if isinstance(each, torch.nn.Module)]
    modules = torch.nn.ModuleList(found)
    name = next((kind for each in modules.modules() if (kind := comparing(each))), None) or of_trl(trainer)
    if name is None:
        return
    trainer.pace.host.known(COMPARES)
    if peers.rank() == 0:
        warnings.warn(
            f"{name} compares the samples of a micro-batch with each other, so that its value depends on how the "
            "batch is divided; balance={'policy': 'equal'} divides it as plain DDP does",
            RuntimeWarning,
            stacklevel=timing.level(),
        )


def comparing(module: torch.nn.Module) -> str | None:
    """The name of a loss that is not a mean of losses of single samples; None if it is not known as one."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    known = package == "sentence_transformers" and any(part in kind.__name__ for part in IN_BATCH)
    return kind.__name__ if known or kind.__module__.startswith("pytorch_metric_learning.losses") else None


def of_trl(trainer: Any) -> str | None:
    """The name of a loss of trl's trainers that compares the samples of a batch; None if it is not known as one."""
    kinds = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    if not kinds:
        return None
    given = getattr(trainer.args, "loss_type", None)
    sorting = [name for name in (given if isinstance(given, list) else [given]) if name in TRL_SORTS]
    if sorting:
        return f"the loss {sorting[0]!r} of {kinds[0]}"
    estimates = kinds[0] in TRL_ESTIMATES and getattr(trainer, "calculate_KL", True)
    return f"the loss of {kinds[0]}" if estimates else None
