"""Streams under the real Hugging Face Trainer: every sample once, the model of one process, and continuing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from paceline.errors import PacelineError
from paceline.torch import peers
from support.guarantees import guarantee
from support.hosts import COUNT, FREE, UNEVEN, Found, Together, difference, run_bodies
from support.skips import skip_without
from support.trainers import BATCH, Classifier, Lengthy, Named, filled, language_model, sgd, trainer_of

skip_without("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()

EPOCH = [24, 24, 24, 11]
STEPS = 9  # two epochs and a round


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


def one_process(
    model: nn.Module, batches: list[list[int]], data: Any, collate: Any = None
) -> list[torch.Tensor]:
    """The parameters of a plain process that takes these batches of samples."""
    from transformers import default_data_collator

    optimizer, _ = sgd(model)
    for batch in batches:
        model(**(collate or default_data_collator)([data[i] for i in batch]))["loss"].backward()
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


Trained = tuple[float, list[list[int]], int, float]


def trained(folder: str, ranks: int, before: Any = (), **options: Any) -> Trained:
    """How far the parameters are from those of one process, the samples of each round, steps and epochs.

    before: the rounds that a resumed run does not run again.
    """
    model, batches, trainer = streamed(folder, ranks=ranks, **options)
    every = [*before, *batches]
    off = difference(model.parameters(), one_process(Classifier(), every, Named()))
    return off, every, trainer.state.global_step, trainer.state.epoch


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def check(batches: list[list[int]]) -> None:
    """Two epochs with every sample once, in different orders, and a round of the third."""
    assert [len(batch) for batch in batches] == [*EPOCH, *EPOCH, 24]
    first, second = flat(batches[:4]), flat(batches[4:8])
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert len(set(batches[8])) == 24


@together
def streams(ranks: int, folder: str) -> dict[str, Trained]:
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "parts": {"balance": {"policy": UNEVEN, "limits": FREE[:ranks], "shared": False}},
        "generator": {"kind": Drawn},
        "processes": {"dataloader_num_workers": 2},
        "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "by round": {"balance": {"policy": "level", "loop": "round", "micro_batch": 3}},
        "split batches": {
            "per_device_train_batch_size": BATCH,
            "accelerator_config": {"split_batches": True},
        },
    }
    return {name: trained(folder, ranks, **options) for name, options in cases.items()}


@guarantee("A stream under the Hugging Face Trainer uses each sample once per epoch, also in a resumed run.")
@pytest.mark.parametrize(
    "name", ["plain", "parts", "generator", "processes", "accumulated", "by round", "split batches"]
)
def test_stream_trains_model_of_one_process(found: Found, name: str) -> None:
    for apart, batches, steps, epoch in (rank[name] for rank in found[streams]):
        assert apart < 1e-12
        assert (steps, epoch) == (9, pytest.approx(2 + 1 / 9))
        check(batches)


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


@guarantee(
    "A stream that the ranks of a Hugging Face Trainer share has the same rounds for any number of ranks."
)
def test_shared_stream_is_divided_in_its_order(found: Found) -> None:
    for rank in found[streams]:
        assert rank["plain"][1] == in_order(rank["plain"][1])
        assert rank["parts"][1] != in_order(rank["plain"][1])


@together
def dropped(ranks: int, folder: str) -> Trained:
    return trained(folder, ranks, dataloader_drop_last=True)


def test_last_samples_of_stream_are_dropped(found: Found) -> None:
    for apart, batches, *_ in found[dropped]:
        assert apart < 1e-12
        assert [len(batch) for batch in batches] == [24] * 9
        assert len(set(flat(batches[:3]))) == 72


LEVEL = {"save_strategy": "steps", "balance": {"policy": "level"}}


@together
def resumed(ranks: int, folder: str) -> dict[str, Trained]:
    """Stopped within the second epoch, and at the end of the first."""
    parts = LEVEL | {"balance": {"policy": "level", "shared": False}}
    found = {}
    for name, stop, options in (("after 6", 6, LEVEL), ("after 4", 4, LEVEL), ("parts after 6", 6, parts)):
        place = f"{folder}/{name}"
        _, before, *_ = trained(place, ranks, save_steps=stop, steps=stop, **options)
        again = options | {"resume": f"{place}/checkpoint-{stop}", "save_steps": 99}
        found[name] = trained(place, ranks, before, **again)
    return found


@guarantee("A stream under the Hugging Face Trainer uses each sample once per epoch, also in a resumed run.")
@pytest.mark.parametrize("case", ["after 4", "after 6", "parts after 6"])
def test_resumed_stream_continues(found: Found, case: str) -> None:
    for apart, batches, steps, epoch in (rank[case] for rank in found[resumed]):
        assert apart < 1e-12
        assert (steps, epoch) == (9, pytest.approx(2 + 1 / 9))
        check(batches)


def continued(ranks: int, folder: str) -> list[list[int]]:
    """From the three ranks' checkpoint after step 6."""
    return streamed(
        folder,
        ranks=ranks,
        resume=f"{folder}/after 6/checkpoint-6",
        save_steps=99,
        balance={"policy": "level"},
    )[1]


def plain(ranks: int, folder: str) -> Trained:
    return trained(folder, ranks)


def test_stream_on_two_ranks_has_the_rounds_of_three(folder: str, found: Found) -> None:
    two = run_bodies(2, [plain, continued], folder)
    for (apart, batches, *_), after in zip(two[plain], two[continued], strict=True):
        assert apart < 1e-12
        check(batches)
        assert after == found[resumed][0]["after 6"][1][6:]
        assert batches == in_order(batches) == found[streams][0]["plain"][1]


@together
def begun_again(ranks: int, folder: str) -> list[list[int]]:
    place = f"{folder}/after 4"
    again = LEVEL | {"resume": f"{place}/checkpoint-4", "save_steps": 99}
    return streamed(place, ranks=ranks, ignore_data_skip=True, **again)[1]


def test_ignore_data_skip_begins_stream_again(found: Found) -> None:
    for batches in found[begun_again]:
        assert [len(batch) for batch in batches] == [*EPOCH, 24]
        assert sorted(flat(batches[:4])) == list(range(COUNT))


@together
def over_labels(ranks: int, folder: str) -> float:
    speaker, data, rounds = language_model(), Lengthy(), [list(range(COUNT))] * 2
    trainer_of(
        folder, speaker, Stream(data), max_steps=2, collate=filled,
        balance={"policy": UNEVEN, "limits": FREE[:ranks], "global_batch": COUNT},
    ).train()  # fmt: skip
    return difference(speaker.parameters(), one_process(language_model(), rounds, data, filled))


def test_mean_over_labels_of_stream_is_that_of_one_process(found: Found) -> None:
    assert max(found[over_labels]) < 1e-6  # the model's loss is float32


class Sized(Stream):
    """A stream with a length, for which the Trainer itself does not ask for max_steps."""

    def __len__(self) -> int:
        return COUNT


@together
def refused(ranks: int, folder: str) -> dict[str, str]:
    """The error message of each mistake."""
    saved, says = f"{folder}/after 6/checkpoint-6", {}
    mistakes: dict[str, dict[str, Any]] = {
        "dispatched": {"accelerator_config": {"dispatch_batches": True}},
        "cost": {"balance": {"cost": "labels"}},
        "other processes": {"resume": saved, "dataloader_num_workers": 1},
        "other parts": {"resume": saved, "balance": {"shared": False}},
        "endless": {"kind": Sized, "steps": -1},
    }
    for name, options in mistakes.items():
        try:
            streamed(folder, ranks=ranks, **options)
            says[name] = "nothing was wrong"
        except (PacelineError, ValueError) as error:
            says[name] = str(error)
    return says


def test_stream_that_cannot_be_balanced_raises(found: Found) -> None:
    for says in found[refused]:
        assert "dispatch_batches=True" in says["dispatched"]
        assert "balance={'cost'}" in says["cost"]
        assert "by 0 loading processes with 'shared': True, and this run has 1" in says["other processes"]
        assert "'shared': True, and this run has 0 with False" in says["other parts"]
        assert "max_steps=-1 with a stream" in says["endless"]


def test_parts_of_a_stream_have_each_sample_once() -> None:
    part_of = pytest.importorskip("paceline.hosts.trainer_streams").part_of
    for ranks in (1, 2, 3, 7):
        parts = [list(part_of(range(20), rank, ranks)) for rank in range(ranks)]
        assert sorted(flat(parts)) == list(range(20))


@pytest.mark.parametrize("shards", [1, 6])
def test_parts_of_a_hugging_face_stream_have_each_sample_once(shards: int) -> None:
    streams = pytest.importorskip("paceline.hosts.trainer_streams")
    part_of = streams.part_of
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"index": list(range(20))}).to_iterable_dataset(num_shards=shards)
    parts = [part_of(stream, rank, 3) for rank in range(3)]
    assert sorted(row["index"] for part in parts for row in part) == list(range(20))
    assert part_of(parts[1], 1, 3) is parts[1]
    assert streams.shares(stream, 3, None) == (shards == 1)  # else each rank has its own shards
    assert not streams.shares(parts[1], 3, None)
    with pytest.raises(PacelineError, match="expected the whole stream"):
        streams.shares(parts[1], 3, True)
    with pytest.raises(PacelineError, match="split for rank 1 of 3"):
        part_of(parts[1], 2, 3)
