"""What the tests of the Hugging Face Trainer share: small models, their data, and a Trainer of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.torch.feed.pieces import Order
from support.hosts import COUNT, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh

BATCH = 24
VOCABULARY = 20


class Named(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """``Samples`` by the names that a model of the Trainer takes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._samples = Samples(COUNT, dtype)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y, _ = self._samples[index]
        return {"x": x, "labels": y, "index": index}


class Classifier(nn.Module):
    """``fresh`` with a loss, and a note of the samples that it is shown."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net, self.shown = fresh(dtype), []
        self.note: Callable[[list[int]], None] = self.shown.append
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.note(index.tolist())
        logits = self.net(x)
        self.dtypes.add(logits.dtype)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens, of which a varying number has a label; some sentences have none at all.

    asked: the number of labels, by a sentence's index. ignored: in the place of a label. count: of sentences.
    """

    def __init__(
        self, asked: Callable[[int], int] | None = None, ignored: int = -100, count: int = COUNT
    ) -> None:
        self._asked, self._ignored, self._count = asked, ignored, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (8,), generator=generator)
        if self._asked is None:
            asked = int(torch.randint(9, (1,), generator=generator)) if index % 5 else 0
        else:
            asked = self._asked(index)
        return {"input_ids": tokens, "labels": torch.where(torch.arange(8) < asked, tokens, self._ignored)}


class Lengthy(Sentences):
    """``Sentences`` of different lengths, each without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [1 + index * 5 % 8 for index in range(COUNT)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: row[: self.lengths[index]] for name, row in super().__getitem__(index).items()}


def filled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sentences of different lengths, filled up to the longest."""
    padding = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8, **shape)).double()


def one_process(model: nn.Module, data: Any, batch: int, loss_of: Callable[[Any], Any]) -> list[torch.Tensor]:
    """The parameters after an epoch of a plain process that takes each whole batch at once. loss_of: of its rows."""
    from transformers import default_data_collator

    optimizer, _ = sgd(model)
    indices = Order(len(data), SEED).epoch(0)
    for first in range(0, len(data), batch):
        loss_of(default_data_collator([data[int(i)] for i in indices[first : first + batch]])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings until the end, each after the name of the file that it names."""
    found = list[str]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield found
    mine = [one for one in said if issubclass(one.category, RuntimeWarning)]
    found += [f"{Path(one.filename).name}: {one.message}" for one in mine]


def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def trainer_of(
    folder: str,
    model: nn.Module,
    data: Any,
    kind: Any = None,
    ranks: int = 3,
    balance: dict[str, Any] | None = None,
    clip: float = 0.0,
    collate: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer on the CPU. kind: its class, by default BalancedTrainer."""
    from transformers import PrinterCallback, TrainingArguments

    from paceline.hosts.transformers import BalancedTrainer

    kind = kind or BalancedTrainer
    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // ranks, "num_train_epochs": EPOCHS, "seed": SEED,
        "max_grad_norm": clip, "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
        remove_unused_columns=False, **(given | arguments),
    )  # fmt: skip
    own: dict[str, Any] = {}
    if issubclass(kind, BalancedTrainer):
        own["balance"] = {"policy": UNEVEN, "limits": FREE[:ranks]} if balance is None else balance
    trainer = kind(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        optimizers=sgd(model),
        **own,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
