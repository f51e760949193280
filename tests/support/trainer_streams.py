"""What the ranks of the tests of streams under the Hugging Face Trainer run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from paceline.errors import PacelineError
from paceline.torch import peers
from support import hosts
from support.hosts import COUNT, FREE, UNEVEN
from support.trainer_jobs import BATCH, Classifier, Lengthy, Named, filled, language_model, sgd, trainer_of

STEPS = 9  # COUNT samples make three whole rounds and a short one, so this is two epochs and a round


class Stream(IterableDataset[Any]):
    """The samples of a data set, in another order in each epoch, divided among the processes that read it."""

    def __init__(self, data: Any) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (self.data[index] for index in order[first::every])


class Drawn(IterableDataset[Any]):
    """The same from a generator, which the Trainer is to seed in each epoch."""

    def __init__(self, data: Any) -> None:
        self.data, self.generator = data, torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in torch.randperm(COUNT, generator=self.generator).tolist())


class Sized(Stream):
    """A stream with a length, for which the Trainer itself does not ask for max_steps."""

    def __len__(self) -> int:
        return COUNT


def one_process(
    model: nn.Module, batches: list[list[int]], data: Any, collate: Any = default_data_collator
) -> list[torch.Tensor]:
    """The parameters of a plain process that takes these batches of samples."""
    optimizer, _ = sgd(model)
    for batch in batches:
        model(**collate([data[i] for i in batch]))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def streamed(
    folder: str, kind: Any = Stream, resume: Any = None, steps: int = STEPS, **options: Any
) -> tuple[Classifier, list[list[int]], Any]:
    """Train a classifier on a stream; it, the samples of each round over all ranks, and the trainer."""
    model = Classifier()
    trainer = trainer_of(folder, model, kind(Named()), max_steps=steps, **options)
    used: dict[int, list[int]] = {}

    def note(indices: list[int]) -> None:
        if trainer.pace.counts:
            used.setdefault(trainer.pace.rounds, []).extend(indices)

    model.note = note
    trainer.train(resume_from_checkpoint=resume)
    every: dict[int, list[int]] = {}
    for each in peers.gather(used) if peers.ranks() > 1 else [used]:
        for number, indices in each.items():
            every.setdefault(number, []).extend(indices)
    return model, [every[number] for number in sorted(every)], trainer


def plain(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """One case, for another number of ranks."""
    hosts.as_torchrun(rank, ranks)
    model, batches, _ = streamed(folder, ranks=ranks)
    expected = one_process(Classifier(), batches, Named())
    after = {"resume": f"{folder}/stopped-6/checkpoint-6", "balance": {"policy": "level"}}
    return {
        "plain": (hosts.difference(model.parameters(), expected), batches),
        "continued": streamed(folder, ranks=ranks, save_steps=99, **after)[1],
        "whole": in_order(batches),
    }


def in_order(batches: list[list[int]]) -> list[list[int]]:
    """The batches of these sizes that one reader of the stream would have."""
    sizes = iter(map(len, batches))
    stream, found = Stream(Named()), []
    for epoch in range(3):
        stream.set_epoch(epoch)
        order = [int(sample["index"]) for sample in stream]
        while order and (size := next(sizes, 0)):
            found.append(order[:size])
            del order[:size]
    return found


def cases(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """What every case came to on this rank."""
    hosts.as_torchrun(rank, ranks)
    found: dict[str, Any] = {}

    def trained(name: str, folder: str = folder, before: Any = (), **options: Any) -> list[list[int]]:
        model, batches, trainer = streamed(folder, ranks=ranks, **options)
        expected = one_process(Classifier(), [*before, *batches], Named())
        apart = hosts.difference(model.parameters(), expected)
        found[name] = apart, [*before, *batches], trainer.state.global_step, trainer.state.epoch
        return batches

    trained("plain")
    found["whole"] = in_order(found["plain"][1])
    trained("parts", balance={"policy": UNEVEN, "limits": FREE[:ranks], "shared": False})
    trained("generator", kind=Drawn)
    trained("processes", dataloader_num_workers=2)
    trained("accumulated", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trained("by round", balance={"policy": "level", "loop": "round", "micro_batch": 3})
    trained("dropped", dataloader_drop_last=True)
    trained(
        "split batches", per_device_train_batch_size=BATCH, accelerator_config={"split_batches": True},
    )  # fmt: skip

    level = {"save_strategy": "steps", "balance": {"policy": "level"}}
    for stop in (6, 4):  # within the second epoch, and at the end of the first
        saved = f"{folder}/stopped-{stop}"
        batches = trained(f"until {stop}", saved, save_steps=stop, steps=stop, **level)
        again = level | {"resume": f"{saved}/checkpoint-{stop}", "save_steps": 99}
        trained(f"after {stop}", saved, before=batches, **again)
    parts = level | {"balance": {"policy": "level", "shared": False}}
    saved = f"{folder}/parts-6"
    batches = trained("parts until 6", saved, save_steps=6, steps=6, **parts)
    trained("parts after 6", saved, before=batches, resume=f"{saved}/checkpoint-6", save_steps=99, **parts)
    _, begun, _ = streamed(folder, ranks=ranks, ignore_data_skip=True, **again)
    found["begun again"] = begun

    speaker, data, whole = language_model(), Lengthy(), [list(range(COUNT))] * 2
    trainer_of(
        folder, speaker, Stream(data), max_steps=2, collate=filled,
        balance={"policy": UNEVEN, "limits": FREE[:ranks], "global_batch": COUNT},
    ).train()  # fmt: skip
    expected = one_process(language_model(), whole, data, filled)
    found["tokens"] = hosts.difference(speaker.parameters(), expected)
    found["refused"] = refusals(folder, ranks, f"{folder}/stopped-6/checkpoint-6")
    return found


def refusals(folder: str, ranks: int, saved: str) -> dict[str, str]:
    says: dict[str, str] = {}

    def attempt(name: str, **options: Any) -> None:
        try:
            streamed(folder, ranks=ranks, **options)
            says[name] = "nothing was wrong"
        except (PacelineError, ValueError) as error:
            says[name] = str(error)

    attempt("dispatched", accelerator_config={"dispatch_batches": True})
    attempt("cost", balance={"cost": "labels"})
    attempt("other processes", resume=saved, dataloader_num_workers=1)
    attempt("other parts", resume=saved, balance={"shared": False})
    attempt("endless", kind=Sized, steps=-1)
    return says
