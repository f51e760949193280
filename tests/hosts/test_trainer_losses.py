"""Losses under the Hugging Face Trainer that are means over other numbers than its labels: exact, or a warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from support.guarantees import guarantee
from support.hosts import FREE, UNEVEN, Found, Together, difference
from support.skips import skip_without
from support.trainers import BATCH, VOCABULARY, Sentences, one_process, trainer_of, warned

skip_without("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()


def asked(index: int) -> int:
    """The tokens of a sentence that have a label."""
    return 2 + index % 7


class Followed(Sentences):
    """Sentences, and whether each follows the one before."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"follows": torch.tensor(index % 2)}


class Speaker(nn.Module):
    """A user's own model, which knows nothing of ``num_items_in_batch``."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.loss = loss
        self.embed, self.head = nn.Embedding(VOCABULARY, 8).double(), nn.Linear(8, VOCABULARY).double()
        self.follows = nn.Linear(8, 2).double()

    def forward(self, input_ids: Any, labels: Any, follows: Any) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        logits = self.head(x)
        if self.loss == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.loss == "sentences":
            each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            loss = (each.sum(1) / labels.ne(-100).sum(1)).mean()
        else:
            ignored = 255 if self.loss == "ignored" else -100
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)
        if self.loss == "heads":
            loss = loss + nn.functional.cross_entropy(self.follows(x[:, 0]), follows)
        if self.loss == "distilled":
            soft = (logits.log_softmax(-1).mean(-1) * labels.ne(-100)).sum() / labels.ne(-100).sum()
            loss = loss - 0.5 * soft + 0.1 * (logits[:, :1].softmax(-1) * logits[:, :1]).sum()
        if self.loss == "penalised":
            loss = loss + sum(p.square().sum() for p in self.parameters()) / 97 + 0.0 * logits.sum()
        return {"loss": loss, "logits": logits}


@together
def spoken(_: int, folder: str) -> dict[str, Any]:
    """By the loss and the micro-steps of each rank: the distance from one process, and the warnings."""
    found = {}
    for loss in ("shifted", "ignored", "sentences", "penalised", "heads", "distilled"):
        data = Followed(asked, 255 if loss == "ignored" else -100)
        plain = Speaker(loss)
        expected = one_process(plain, data, BATCH, lambda rows, plain=plain: plain(**rows)["loss"])
        for steps in (1, 2):
            model = Speaker(loss)
            trainer = trainer_of(
                folder, model, data, num_train_epochs=1, gradient_accumulation_steps=steps,
                balance={"global_batch": BATCH, "policy": UNEVEN, "limits": FREE},
            )  # fmt: skip
            with warned() as says:
                trainer.train()
            found[loss, steps] = difference(model.parameters(), expected), says
    return found


@guarantee(
    "Under the Trainer, a loss that is one mean counts for what it is a mean over: labels, samples or others."
)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loss", ["shifted", "ignored", "sentences", "penalised"])
def test_mean_over_other_numbers_than_labels_trains_model_of_one_process(
    found: Found, loss: str, steps: int
) -> None:
    for off, says in (rank[loss, steps] for rank in found[spoken]):
        assert off < 1e-12
        assert says == []


@pytest.mark.parametrize("loss", ["heads", "distilled"])
def test_sum_of_different_means_warns(found: Found, loss: str) -> None:
    says = [said for rank in found[spoken] for said in rank[loss, 1][1]]
    assert says
    assert all(said.startswith("test_trainer_losses.py: ") for said in says), says
    assert all(
        "a sum of means over different numbers" in said and "'over': 'samples'" in said for said in says
    )


@together
def summed(ranks: int, folder: str) -> dict[int, tuple[float, float]]:
    """By gradient_accumulation_steps: how far a sum and its first loss are from a plain Trainer's."""
    from transformers import Trainer

    class Sums(Speaker):
        config = SimpleNamespace(ctc_loss_reduction="sum", to_json_string=lambda: "", to_dict=dict)

        def forward(self, input_ids: Any, labels: Any, follows: Any, **_: Any) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(input_ids, labels, follows)["loss"] * 0.1 * len(labels)}

    found = {}
    for steps in (1, 2):
        results = []
        for kind in (Trainer, None):
            model = Sums("sentences")
            trainer = trainer_of(
                folder, model, torch.utils.data.Subset(Followed(asked), range(72)), kind=kind, ranks=ranks,
                num_train_epochs=1, train_sampling_strategy="sequential", gradient_accumulation_steps=steps,
                per_device_train_batch_size=4, balance={"policy": "equal"}, logging_strategy="epoch",
            )  # fmt: skip
            trainer.train()
            results.append(([p.detach() for p in model.parameters()], trainer.state.log_history[0]["loss"]))
        (theirs, their_loss), (ours, our_loss) = results
        found[steps] = difference(ours, theirs), abs(our_loss / their_loss - 1)
    return found


@pytest.mark.parametrize("steps", [1, 2])
def test_sum_of_ctc_losses_trains_model_of_plain_trainer(found: Found, steps: int) -> None:
    for off, loss_off in (rank[steps] for rank in found[summed]):
        assert off < 1e-9
        assert loss_off < 1e-5


def over(
    found: list[tuple[float, bool]], labels: int = 20, samples: int = 6, items: bool = False
) -> tuple[float, bool]:
    losses = pytest.importorskip("paceline.hosts.trainer_losses")
    parts = [losses.Part(number, mean) for number, mean in found]
    result: tuple[float, bool] = losses.mean_over(parts, losses.Micro(labels, samples, items))
    return result


def test_mean_over_is_what_its_parts_agree_in() -> None:
    assert over([(13.0, True)]) == (13.0, True)
    # label smoothing: over labels, and over classes too
    assert over([(20.0, False), (200.0, False)]) == (20, True)
    assert over([(6.0, True), (24.0, True)]) == (6, True)
    assert over([(20.0, True), (6.0, True)]) == (6, False)
    assert over([(20.0, True), (33.0, True)]) == (20, False)
    assert over([(14.0, False)]) == (14.0, True)  # a sum over what a mask leaves
    assert over([(0.25, False)]) == (0.25, True)  # a sum over weights
    assert over([(14.0, False), (19.0, True)]) == (19, False)
    assert over([(float("nan"), False), (20.0, True)]) == (20, False)


def test_labels_count_where_a_loss_is_unknown() -> None:
    assert over([]) == (20, True)
    assert over([(float("nan"), False)]) == (20, True)
    assert over([(1.0, False)]) == (20, True)  # a training step divides a sum by 1


def test_mean_over_no_labels_counts_nothing() -> None:
    assert over([(0.0, True), (66.0, True)], labels=0) == (0, True)
    assert over([(1.0, False)], labels=0, samples=1, items=True) == (0, True)  # the Trainer passes 1
    assert over([(1.0, False), (20.0, False)], labels=0, items=True) == (0, True)
    assert over([(1.0, False)], labels=0, samples=1) == (1, True)


def test_unknown_over_raises() -> None:
    losses = pytest.importorskip("paceline.hosts.trainer_losses")
    with pytest.raises(PacelineError, match="expected 'labels', 'samples' or 'sum'"):
        losses.Counting("tokens")
