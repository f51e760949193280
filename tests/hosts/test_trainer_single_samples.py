"""Losses under the Hugging Face Trainer in micro-batches of a single sample: judged as in those with several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.guarantees import guarantee
from support.hosts import Found, Script, Together, difference
from support.skips import skip_without
from support.trainers import (
    VOCABULARY,
    Sentences,
    language_model,
    one_process,
    trainer_of,
    warned,
)

skip_without("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()

COUNT = 36
ASKED = {  # the labels of a sentence; with True, each has one at least
    True: lambda index: 2 + index % 7,
    False: lambda index: 2 + index % 7 if index % 5 else 0,
}
SAID = "a sum of means over different numbers"
SUMS = "balance={'over': 'sum'}"
EXACT = (
    *("penalty", "mean penalty", "distance", "weights", "means of weights", "samples", "rows", "masked"),
    *("classes", "normalised", "smoothed", "smoothed speaker"),
)
WARNED = {"logits": SAID, "heads": SAID, "router": SAID, "sum": SUMS, "tenth of a sum": SUMS}
DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {  # global batches, and what leads to them
    "single": (
        6,
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "balance": {"policy": "equal"}},
    ),
    "uneven": (12, {"balance": {"global_batch": 12, "policy": Script(((10, 1, 1), (1, 6, 5), (4, 1, 7)))}}),
}


class Net(nn.Module):
    """A user's model of tokens, which leaves the loss to the Trainer."""

    config = SimpleNamespace(
        to_json_string=lambda: "", to_dict=dict
    )  # the Trainer's label smoothing reads it

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8).double(), nn.Linear(8, VOCABULARY).double()

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


def loss_of(loss: str, model: Any, logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """The loss of a batch, as a user writes it."""
    labels = batch["labels"]
    flat = logits.flatten(0, 1), labels.flatten()
    if loss.startswith("smoothed"):
        return nn.functional.cross_entropy(*flat, label_smoothing=0.1)
    if loss == "classes":
        weight = torch.linspace(0.1, 3.0, VOCABULARY, dtype=torch.float64)
        return nn.functional.cross_entropy(*flat, weight=weight)
    each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    weights, asked = 0.1 + batch["input_ids"][:, 0].double() % 5, labels.ne(-100)
    if loss == "weights":
        return (each.sum(1) * weights).sum() / weights.sum()
    if loss == "means of weights":
        return (each.sum(1) * weights).mean() / weights.mean()
    if loss == "samples":
        return each.sum() / len(labels)
    if loss == "rows":
        return (each.sum(1) / asked.sum(1).clamp(min=1)).mean()
    if loss == "masked":
        return -(logits.log_softmax(-1).mean(-1) * asked).sum() / asked.sum()
    if loss == "sum":
        return each.sum()
    if loss == "tenth of a sum":
        return each.sum() / 10
    mean = nn.functional.cross_entropy(*flat)
    parts = {
        "normalised": 0.0,
        "penalty": 1e-3 * sum(p.pow(2).sum() for p in model.parameters()),
        "mean penalty": sum(p.pow(2).mean() for p in model.parameters()),
        "distance": 1e-3 * sum((p - 1).abs().sum() for p in model.parameters()),
        "logits": 0.01 * logits.pow(2).mean(),
        "heads": logits.mean((1, 2)).pow(2).mean(),
        "router": 0.01 * logits.pow(2).sum(),
    }
    return mean + parts[loss]


def kind_of(loss: str) -> Any:
    """A Trainer with this loss."""
    from paceline.hosts.transformers import BalancedTrainer

    if loss.startswith("smoothed"):
        return BalancedTrainer

    class Own(BalancedTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            logits = model(**inputs)["logits"]
            if loss == "normalised":
                return (
                    nn.functional.cross_entropy(
                        logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum"
                    )
                    / inputs["labels"].ne(-100).sum()
                )
            return loss_of(loss, model, logits, inputs)

    return Own


def speaker(loss: str) -> Any:
    return language_model() if loss == "smoothed speaker" else Net()


def whole(loss: str, data: Any, batch: int) -> list[torch.Tensor]:
    """The parameters of a plain process that takes each whole batch at once."""
    model = speaker(loss)

    def computed(rows: Any) -> torch.Tensor:
        logits = model(input_ids=rows["input_ids"])["logits"]
        if loss == "smoothed speaker":
            logits, rows["labels"] = logits[:, :-1], rows["labels"][:, 1:]
        return loss_of(loss, model, logits, rows)

    return one_process(model, data, batch, computed)


@together
def judged(_: int, folder: str) -> dict[str, Any]:
    """By the loss, the division, and whether each sample has a label: the distance from one process, and warnings."""
    found = {}
    for loss in (*EXACT, *WARNED):
        for division, (batch, options) in DIVISIONS.items():
            for asks in (True, False):
                data, model = Sentences(ASKED[asks], count=COUNT), speaker(loss)
                smoothing = 0.1 * loss.startswith("smoothed")
                trainer = trainer_of(
                    folder, model, data, kind_of(loss), num_train_epochs=1, label_smoothing_factor=smoothing,
                    **options,
                )  # fmt: skip
                with warned() as says:
                    trainer.train()
                # A plain Trainer's gradient of a sum is the mean over micro-batches, here of one sample each.
                expected = whole("samples" if loss == "sum" else loss, data, batch)
                found[f"{loss}, {division}, {asks}"] = difference(model.parameters(), expected), says
    return found


@guarantee("Under the Trainer, a micro-batch of one sample counts as those of several do.")
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("loss", EXACT)
def test_loss_of_single_samples_trains_model_of_one_process(
    found: Found, loss: str, division: str, asks: bool
) -> None:
    for off, says in (rank[f"{loss}, {division}, {asks}"] for rank in found[judged]):
        assert off < (1e-6 if loss.startswith("smoothed") else 1e-12)  # label smoothing sums in float32
        assert says == []


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("loss", WARNED)
def test_loss_of_single_samples_that_depends_on_the_division_warns_once(
    found: Found, loss: str, division: str, asks: bool
) -> None:
    each = [rank[f"{loss}, {division}, {asks}"][1] for rank in found[judged]]
    assert all(len(says) <= 1 for says in each), each
    for said in (assertive := [said for says in each for said in says]):
        assert said.startswith("test_trainer_single_samples.py: ")
        assert WARNED[loss] in said
    # A sum in single samples counts as in a plain Trainer, also if a number divides it.
    assert assertive or (loss, division) == ("tenth of a sum", "single")


def test_sum_of_single_samples_trains_model_of_plain_trainer(found: Found) -> None:
    for asks in (True, False):
        assert max(rank[f"sum, single, {asks}"][0] for rank in found[judged]) < 1e-12
