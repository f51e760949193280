"""What the ranks of the tests of the Hugging Face Trainer run, and the answers of one plain process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from paceline.errors import PacelineError
from paceline.hosts.transformers import BalancedTrainer
from paceline.torch.feed.pieces import Order
from support import hosts
from support.hosts import COUNT, EPOCHS, FREE, SEED, UNEVEN, fresh
from support.torch_jobs import Samples

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
    """Random tokens, of which a varying number has a label; some sentences have none at all."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (8,), generator=generator)
        asked = int(torch.randint(9, (1,), generator=generator)) if index % 5 else 0
        return {"input_ids": tokens, "labels": torch.where(torch.arange(8) < asked, tokens, -100)}


class Lengthy(Sentences):
    """``Sentences`` of unlike lengths, each without its padding."""

    def __init__(self) -> None:
        self.lengths = [1 + index * 5 % 8 for index in range(COUNT)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: row[: self.lengths[index]] for name, row in super().__getitem__(index).items()}


class Columns(Lengthy):
    """As the data sets of the Hub, with a column that tells the lengths."""

    column_names = ("input_ids", "labels", "tokens")

    def __getitem__(self, index: Any) -> Any:
        return self.lengths if index == "tokens" else super().__getitem__(index)


def filled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sentences of unlike lengths, filled up to the longest."""
    padding = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8, **shape)).double()


def sgd(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def whole(
    model: nn.Module, data: Any, clip: float = 0.0, collate: Any = None
) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters of a plain process that takes each whole batch at once, and its losses."""
    optimizer, _ = sgd(model)
    losses = []
    for epoch in range(EPOCHS):
        indices = Order(COUNT, SEED).epoch(epoch)
        for first in range(0, COUNT, BATCH):
            rows = [data[int(i)] for i in indices[first : first + BATCH]]
            batch = (collate or default_data_collator)(rows)
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], losses


def trainer_of(
    folder: str,
    model: nn.Module,
    data: Any,
    kind: type[Trainer] = BalancedTrainer,
    ranks: int = 3,
    balance: dict[str, Any] | None = None,
    clip: float = 0.0,
    collate: Any = None,
    **arguments: Any,
) -> Any:
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


def classified(
    folder: str, stall: float = 0.0, resume: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Classifier, list[list[int]], BalancedTrainer]:
    """Train a classifier; it, and the samples used in each epoch."""
    model = Classifier(dtype)
    trainer = trainer_of(folder, model, Named(dtype), **options)
    used: dict[int, list[int]] = {}
    stalls = random.Random(trainer.args.process_index)

    def note(indices: list[int]) -> None:
        assert trainer.pace is not None
        time.sleep(stall * stalls.expovariate(1.0))
        if trainer.pace.counts:
            used.setdefault(trainer.pace.epoch, []).extend(indices)

    model.note = note
    trainer.train(resume_from_checkpoint=resume)
    return model, [used.get(epoch, []) for epoch in range(EPOCHS)], trainer


class OwnLoss(BalancedTrainer):
    """As users do it: a loss of their own, which knows nothing of balancing."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class GathersMetrics(BalancedTrainer):
    """As trl's trainers do: a metric of every micro-batch is gathered from all ranks within ``compute_loss``."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        counts = self.accelerator.gather_for_metrics(torch.tensor(len(inputs["x"])))
        assert len(counts) == self.args.world_size
        each = self.accelerator.gather_for_metrics(inputs["index"])
        assert len(each) == counts.sum()
        return super().compute_loss(model, inputs, *arguments, **named)


class OwnLoader(BalancedTrainer):
    def get_train_dataloader(self) -> Any:
        return Trainer.get_train_dataloader(self)


class OwnSampler(BalancedTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0, 2.0] * 9, 18)


def cases(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """What every case came to on this rank."""
    hosts.as_torchrun(rank, ranks)
    expected, _ = whole(Classifier(), Named())
    found: dict[str, Any] = {}

    model, used, trainer = classified(folder, ranks=ranks)
    found["plain"] = hosts.difference(model.parameters(), expected), used
    found["reported"] = trainer.state.global_step, trainer.state.epoch, trainer.state.max_steps
    if ranks == 2:
        before = folder + "/saved/checkpoint-6"  # by three
        model, after, _ = classified(folder, ranks=ranks, balance={"policy": "level"}, resume=before)
        found["fewer"] = hosts.difference(model.parameters(), expected), after
        return found

    model, _, _ = classified(
        folder, clip=0.3, kind=OwnLoss, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        dataloader_num_workers=1,
    )  # fmt: skip
    found["clipped"] = hosts.difference(model.parameters(), whole(Classifier(), Named(), clip=0.3)[0])

    for loop in ("whole", "round"):
        model, used, trainer = classified(
            folder, kind=GathersMetrics if loop == "whole" else BalancedTrainer, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, balance={"policy": UNEVEN, "limits": FREE, "loop": loop},
        )  # fmt: skip
        found[f"accumulated, {loop}"] = (
            hosts.difference(model.parameters(), expected),
            used,
            trainer.pace.host.terms.loop,
        )

    model, used, trainer = classified(
        folder, dataloader_drop_last=True, balance={"global_batch": 36, "policy": UNEVEN}
    )
    found["dropped"] = trainer.state.global_step, [len(each) for each in used]

    model, used, _ = classified(folder, stall=2e-3, balance={"policy": "factoring", "loop": "round"})
    found["moved"] = hosts.difference(model.parameters(), expected), used

    lengthy, losses = whole(language_model(), Lengthy(), collate=filled)
    for strategy, data in (("group_by_length", Lengthy()), ("batch_rebalance", Columns())):
        speaker = language_model()
        trainer = trainer_of(
            folder, speaker, data,
            balance={"policy": UNEVEN, "limits": FREE, "micro_batch_cost": 24, "loop": "round"}, collate=filled,
            train_sampling_strategy=strategy, length_column_name="tokens", logging_strategy="epoch",
        )  # fmt: skip
        trainer.train()
        found[f"by length, {strategy}"] = (
            hosts.difference(speaker.parameters(), lengthy),
            trainer.state.log_history[0]["loss"] - sum(losses[:4]) / 4,
            trainer.pace.host.terms.balancer.learner.costs.lengths.tolist() == data.lengths,
        )

    speakers, losses = whole(language_model(), Sentences())
    for steps in (1, 3):
        speaker = language_model()
        trainer = trainer_of(
            folder, speaker, Sentences(), per_device_train_batch_size=8 if steps == 1 else 3,
            gradient_accumulation_steps=steps, balance={"global_batch": BATCH, "policy": UNEVEN, "limits": FREE},
            logging_strategy="epoch", include_num_input_tokens_seen="all",
        )  # fmt: skip
        trainer.train()
        found[f"tokens, {steps}"] = (
            hosts.difference(speaker.parameters(), speakers),
            trainer.state.log_history[0]["loss"] - sum(losses[:4]) / 4,
            trainer.state.num_input_tokens_seen,
        )

    saves = {"save_strategy": "steps", "save_steps": 6, "balance": {"policy": "level"}}
    _, before, _ = classified(folder + "/saved", max_steps=6, **saves)
    for name, extra in (("resumed", {}), ("restored", {"restore_callback_states_from_checkpoint": True})):
        model, after, trainer = classified(
            folder + "/saved", resume=folder + "/saved/checkpoint-6",
            eval_strategy="steps", eval_steps=1, **saves, **extra,
        )  # fmt: skip
        found[name] = hosts.difference(model.parameters(), expected), before, after, trainer.state.epoch

    from support.ported import both
    from support.trainer_evaluates import evaluated

    found["evaluated"] = evaluated(folder, ranks)

    model, _, _ = classified(folder, dtype=torch.float32, bf16=True)
    found["bf16"] = hosts.difference(model.parameters(), expected), str(model.dtypes)

    found["refused"] = refusals(folder)
    found["ported"] = both(folder + "/ported")  # the last, since that script ends the process group
    return found


def refusals(folder: str) -> dict[str, str]:
    says: dict[str, str] = {}

    def attempt(name: str, **options: Any) -> None:
        try:
            classified(folder, **options)
            says[name] = "nothing was wrong"
        except PacelineError as error:
            says[name] = str(error)

    attempt("looped", balance={"loop": "pieces"})
    attempt("searched", auto_find_batch_size=True)
    attempt("loader", kind=OwnLoader)
    attempt("sampler", kind=OwnSampler)
    try:
        trainer_of(folder, Classifier(), iter([1, 2]), max_steps=3).train()
    except PacelineError as error:
        says["streamed"] = str(error)
    return says
