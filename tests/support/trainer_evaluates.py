"""Evaluation under a balanced Trainer, and by a plain Trainer that is given the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from support.trainer_jobs import Classifier, Named, Sentences, language_model, trainer_of


class Normed(Classifier):
    """A classifier whose evaluation depends on what batch norm saw in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels, index)


class Keeps(TrainerCallback):
    """Takes down each evaluation's loss, and the model that it was made with."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, dict[str, torch.Tensor]]] = []

    def on_evaluate(self, *_: Any, model: Any = None, metrics: Any = None, **__: Any) -> None:
        self.kept.append((metrics["eval_loss"], copy.deepcopy(model.state_dict())))


def evaluated(folder: str, ranks: int) -> list[tuple[float, float]]:
    """(the balanced Trainer's eval_loss, a plain Trainer's) before, during and after training, for three kinds
    of loss; at last the sum of what ``predict`` gave each."""
    pairs = []
    for model, data, options in (
        (language_model(), Sentences(), {}),
        (language_model(), Sentences(), {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
        (Normed(), Named(), {}),
    ):
        keeps = Keeps()
        settings: dict[str, Any] = {"per_device_eval_batch_size": 5, "ranks": ranks, **options}
        trainer = trainer_of(
            folder, model, data, balance={"policy": "level"}, num_train_epochs=1,
            eval_strategy="steps", eval_steps=1, eval_on_start=True, **settings,
        )  # fmt: skip
        trainer.add_callback(keeps)
        trainer.train()
        host = trainer_of(folder, copy.deepcopy(model), data, kind=Trainer, **settings)
        for loss, state in keeps.kept:
            host.model.load_state_dict(state)
            pairs.append((loss, host.evaluate()["eval_loss"]))
        ours, theirs = trainer.predict(data), host.predict(data)
        pairs.append((float(ours.predictions.sum()), float(theirs.predictions.sum())))
    return pairs
