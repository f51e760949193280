"""Ranks with streams of their own: every sample once, whole batches to the end, the model of one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError, WorkerError
from paceline.torch import Pace
from paceline.torch.feed.shared_reads import checksum
from paceline.torch.feed.streams import StreamBuffer, available
from support.guarantees import guarantee
from support.ranks import errors_of, gathered, run_cases, run_ranks
from support.small_net import UNEVEN, Samples, difference, fresh, optimizer_of, replayed

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Streams of different lengths use every sample once per epoch and train the model of one process.",
)

CASES: dict[str, dict[str, Any]] = {
    "alike": {},
    "one is short": {"ends": (5, 140, 290)},
    "one has most": {"ends": (3, 6, 200)},
    "uneven": {"policy": UNEVEN, "limits": ((1, None),) * 3},
    "batches": {"batches": True, "ends": (20, 100, 160)},
    "by round, accumulated": {"loop": "round", "micro_batch": 5, "ends": (70, 80, 170)},
    "the last left out": {"drop_last": True, "ends": (50, 90, 130)},
    "read by processes": {"workers": 1, "ends": (60, 100, 190)},
    "goes on in the middle": {"stop": 2},
    "left within a round": {"leave": 3, "ends": (100, 110, 150)},
    "in pairs": {"quantum": 2, "drop_last": True, "ends": (40, 90, 150)},
    "shared": {"shared": True},
    "shared, uneven": {"shared": True, "policy": UNEVEN, "limits": ((1, None),) * 3},
    "shared, batches": {"shared": True, "batches": True},
    "shared, by round": {"shared": True, "loop": "round", "micro_batch": 5},
    "shared, the last left out": {"shared": True, "drop_last": True, "quantum": 2},
    "shared, read by processes": {"shared": True, "workers": 1},
    "shared, goes on in the middle": {"shared": True, "stop": 2},
    "shared, left within a round": {"shared": True, "leave": 3},
}

COUNT, BATCH = 300, 24


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Some of the samples, one after the other; it can tell where it stands."""

    def __init__(self, start: int, end: int) -> None:
        self.data, self.start, self.end, self.at = Samples(COUNT), start, end, start
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resumed = self.at if self.resumed else self.start, False
        while self.at < self.end:
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


class InBatches:
    """The same, in batches of unlike sizes."""

    def __init__(self, start: int, end: int) -> None:
        self.data, self.start, self.end = Samples(COUNT), start, end

    def __iter__(self) -> Iterator[Any]:
        at, size = self.start, 1
        while at < self.end:
            chosen = slice(at, min(at + size, self.end))
            yield self.data.x[chosen], {"y": self.data.y[chosen]}, torch.arange(COUNT)[chosen]
            at, size = at + size, size % 7 + 3


def trained(
    rank: int, ranks: int, ends: tuple[int, ...] = (100, 110, 150), batches: bool = False, workers: int = 0,
    drop_last: bool = False, loop: str = "whole", stop: int | None = None, leave: int | None = None,
    shared: bool = False, **options: Any,
) -> tuple[float, list[int], list[int]]:  # fmt: skip
    """The difference from one process, the samples used, and the sizes of the rounds."""
    start, end = (0, ends[-1]) if shared else ((0, *ends)[rank], ends[rank])
    kind = InBatches if batches else Stream
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    used: list[list[int]] = []

    def function(x: torch.Tensor, y: Any, index: torch.Tensor) -> torch.Tensor:
        if pace.host.first:
            used.append([])
        if pace.counts:
            used[-1] += index.tolist()
        return loss_of(ddp(x), y["y"] if batches else y)

    def run(until: int | None, leave: int | None = None) -> None:
        for micro_step, batch in enumerate(loader, 1):
            if micro_step == leave:
                return
            if loop == "round":
                pace.round(batch, function)
            else:
                pace.backward(function(*batch))
            pace.step(optimizer)
            if pace.rounds == until:
                return

    pace = Pace(ddp, BATCH, loop=loop, **options)
    own, processes = kind(start, end), {"num_workers": workers} if workers else {}
    loader = pace.stream(own, batches=batches, drop_last=drop_last, shared=shared, **processes)
    if stop is not None:
        run(stop)
        kept, held = loader.state_dict(), pace.state_dict()
        pace.host.detach()
        pace = Pace(ddp, BATCH, loop=loop, **options)
        loader = pace.stream(Stream(start, end), shared=shared)
        pace.load_state_dict(held)
        loader.load_state_dict(kept)
    if leave is not None:
        run(None, leave)
    run(None)
    pace.host.detach()
    rounds = [[*chain(*parts)] for parts in zip(*gathered(used), strict=True)]
    far = difference(model.parameters(), replayed(rounds, Samples(COUNT)))
    return far, [*chain(*used)], [*map(len, rounds)]


def test_streams_of_ranks_train_the_model_of_one_process() -> None:
    for name, ranks in run_cases(3, trained, CASES).items():
        case = CASES[name]
        count = case.get("ends", (0, 0, 150))[-1]
        used = sorted(chain(*(own for _, own, _ in ranks)))
        sizes = ranks[0][2]
        assert all(far < 1e-12 for far, _, _ in ranks), name
        assert sizes[:-1] == [24] * (len(sizes) - 1), f"{name}: {sizes}"
        if case.get("drop_last"):
            assert set(sizes) == {24}
            assert len(set(used)) == len(used) == count // 24 * 24, name
        elif "leave" in case:
            assert set(used) == set(range(count)), name
        else:
            assert used == list(range(count)), f"{name}: {len(used)} of {count}"


@guarantee("A stream that all ranks share is divided by the plan in every round, in the order of the stream.")
def test_shared_stream_is_sliced_by_the_plan() -> None:
    case: dict[str, Any] = {"shared": True, "policy": UNEVEN, "limits": ((1, None),) * 3}
    parts = [used for _, used, _ in run_ranks(3, partial(trained, **case))]
    for start in range(0, 150, 24):
        slices = [[index for index in used if start <= index < start + 24] for used in parts]
        assert [index for each in slices for index in each] == list(range(start, min(start + 24, 150)))
    assert len({*map(len, parts)}) > 1


def shares_unlike(rank: int, ranks: int) -> None:
    """A shared stream that is longer on each rank."""
    pace = Pace(DistributedDataParallel(fresh(torch.float64)), BATCH)
    for _ in pace.stream(Stream(0, 20 + rank), shared=True):
        pass


def test_shared_stream_of_unequal_lengths_raises() -> None:
    for said in errors_of(3, shares_unlike):
        assert "the ranks read 20, 21, 22 samples of a stream that they share" in said


class Shuffled(torch.utils.data.IterableDataset[Any]):
    """Samples from a shuffle buffer, chosen by the numbers of ``how``; "own" is seeded differently on each rank."""

    def __init__(self, how: str, rank: int) -> None:
        self.data, own = Samples(COUNT), np.random.default_rng(rank)
        self.choose: Callable[[int], int] = {
            "torch": lambda many: int(torch.randint(many, ())),
            "numpy": lambda many: int(np.random.randint(many)),  # noqa: NPY002
            "random": random.randrange,
            "own": lambda many: int(own.integers(many)),
        }[how]

    def __iter__(self) -> Iterator[Any]:
        held = list(range(20))
        for new in range(20, 100):
            held.append(new)
            yield self.data[held.pop(self.choose(len(held)))]
        while held:
            yield self.data[held.pop(self.choose(len(held)))]


def shuffled(rank: int, ranks: int, how: str) -> list[list[int]]:
    """The samples that this rank ran in each of two epochs, with random numbers of its own beside the stream's."""
    ddp, found = DistributedDataParallel(fresh(torch.float64)), []
    optimizer = optimizer_of(ddp)
    with Pace(ddp, BATCH, UNEVEN, limits=[(1, None)] * ranks) as pace:
        loader = pace.stream(Shuffled(how, rank), shared=True)
        for _ in range(2):
            found.append(list[int]())
            for x, y, index in loader:
                found[-1] += index.tolist() if pace.counts else []
                pace.backward(nn.functional.cross_entropy(ddp(nn.functional.dropout(x, 0.1)), y))
                pace.step(optimizer)
                random.random(), np.random.random(1 + rank)  # noqa: NPY002
    return found


@guarantee("A stream that all ranks share is divided by the plan in every round, in the order of the stream.")
@pytest.mark.parametrize("how", ["torch", "numpy", "random"])
def test_shared_stream_shuffled_by_global_random_numbers_has_each_sample_once(how: str) -> None:
    epochs = list(zip(*run_ranks(3, shuffled, how), strict=True))
    assert [sorted(chain(*parts)) for parts in epochs] == [list(range(100))] * 2
    assert epochs[0] != epochs[1]


@guarantee("A stream that all ranks share is divided by the plan in every round, in the order of the stream.")
def test_shared_stream_shuffled_differently_on_each_rank_raises() -> None:
    for said in errors_of(2, shuffled, "own"):
        assert "rank 1 has read other samples than rank 0 from a stream that they share" in said
        assert "seed its random numbers alike" in said


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"x": torch.ones(2), "y": 3}, {"x": torch.zeros(2), "y": 3}, True),  # augmented
        ({"x": torch.ones(2), "y": 3}, {"x": torch.ones(2), "y": 4}, False),
        (["a", b"b", True], ["a", b"b", True], True),
        (["a", b"b", True], ["a", b"b", False], False),
        ((torch.arange(4),), (torch.arange(4)[[0, 1, 3, 2]],), False),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy(), True),
        (np.int64(3), np.int64(4), False),
        (np.float32(3), np.float32(4), True),
        (torch.zeros(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8), True),  # pixels
        (object(), None, True),
    ],
)
def test_checksum_tells_samples_apart_by_whole_numbers_and_text(one: Any, other: Any, same: bool) -> None:
    assert (checksum(one, 5) == checksum(other, 5)) == same


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_rank_receives_at_most_what_it_holds(
    held: list[int], most: int, quantum: int, min_samples: int
) -> None:
    can = available(np.array(held), np.full(len(held), most), quantum, min_samples)
    assert (can <= held).all()
    assert (can <= most).all()
    assert (can % quantum == 0).all()
    assert (can >= 0).all()
    if min_samples == quantum == 1:
        assert (can == np.minimum(held, most)).all()


def test_unsupported_stream_options_raise() -> None:
    model = fresh(torch.float64)
    pace = Pace(model, 10, "equal")
    for call, words in (
        (lambda: pace.stream(5), "the data set is a int"),
        (lambda: pace.stream(Stream(0, 9), batch_size=4), "batch_size=4 is what Paceline decides"),
        (lambda: pace.stream([1, 2], num_workers=2), "such options are for an IterableDataset"),
        (lambda: pace.loader(Stream(0, 9)), r"use pace\.stream"),
        (lambda: pace.stream(iter([1])).state_dict(), r"the position of a list_iterator is unknown"),
        (lambda: Pace(model, 10, "equal", quantum=2).stream(Stream(0, 9)), "use drop_last=True"),
    ):
        with pytest.raises(PacelineError, match=words):
            call()
    with pytest.raises(TypeError, match="has no length"):
        len(pace.stream(Stream(0, 9)))
    pace.host.detach()


def fails_while_drawing(rank: int, ranks: int) -> str:
    """The last rank's stream raises after 30 samples: what each rank is told."""

    def stream() -> Iterator[Any]:
        data = Samples(COUNT)
        for at in range(100):
            if rank == ranks - 1 and at == 30:
                raise ValueError("a torn page")
            yield data[at]

    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer = optimizer_of(ddp)
    try:
        with Pace(ddp, BATCH, "level") as pace:
            for x, y, _ in pace.stream(stream()):
                pace.backward(nn.functional.cross_entropy(ddp(x), y))
                pace.step(optimizer)
    except (ValueError, WorkerError) as error:
        return str(error)
    return "nothing"


def test_failed_stream_is_named_on_the_other_ranks() -> None:
    *others, own = run_ranks(3, fails_while_drawing)
    assert own == "a torn page"
    assert all("rank 2 failed" in said and "a torn page" in said for said in others), others


class Counted(torch.utils.data.IterableDataset[torch.Tensor]):
    """The numbers of a rank's shard, in as many processes as read it."""

    def __init__(self, first: int, end: int) -> None:
        self._numbers = range(first, end)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        each = self._numbers if info is None else self._numbers[info.id :: info.num_workers]
        return (torch.tensor([float(number)]) for number in each)


def epochs(rank: int, ranks: int, persistent: bool) -> list[list[float]]:
    """What this rank ran in each of three epochs."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stream = Counted(*((0, 47) if rank == 0 else (47, 50)))
    found = []
    with Pace(model, 8) as pace:
        loader = pace.stream(stream, num_workers=2, persistent_workers=persistent)
        for _ in range(3):
            found.append(list[float]())
            for x in loader:
                found[-1] += x.flatten().tolist() if pace.counts else []
                pace.backward(model(x).square().mean())
                pace.step(optimizer)
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_of_a_stream_has_all_samples(persistent: bool) -> None:
    found = run_ranks(2, epochs, persistent)
    for parts in zip(*found, strict=True):
        assert sorted(chain(*parts)) == list(range(50))


@guarantee("An epoch of streams without a round, as with an exhausted iterator, raises on all ranks.")
@pytest.mark.parametrize(
    ("stream", "options", "words"),
    [
        (iter([torch.ones(1)] * 20), {}, "the streams of all ranks give 0 samples in this epoch"),
        ([torch.ones(1)] * 5, {"drop_last": True}, "the streams of all ranks give 5 samples in this epoch"),
        ([], {}, "the streams of all ranks give 0 samples in this epoch"),
    ],
)
def test_epoch_of_a_stream_without_a_round_raises(stream: Any, options: dict[str, Any], words: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Pace(model, 8) as pace:
        loader = pace.stream(stream, **options)

        def train() -> None:
            for _ in range(2):
                for x in loader:
                    pace.backward(model(x).square().mean())
                    pace.step(optimizer)

        with pytest.raises(PacelineError, match=words):
            train()


def test_persistent_processes_that_miss_set_epoch_are_warned_of() -> None:
    class Reordered(Counted):
        def set_epoch(self, epoch: int) -> None: ...

    with (
        Pace(nn.Linear(1, 1), 8) as pace,
        pytest.warns(RuntimeWarning, match=r"set_epoch\(\) does not reach them"),
    ):
        pace.stream(Reordered(0, 8), num_workers=1, persistent_workers=True)


def continued(rank: int, ranks: int) -> list[float]:
    """The samples of an epoch that is continued after rank 1 has run all of its stream."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, 8, limits=[(1, None), (1, None)])
    loader = pace.stream(
        [torch.tensor([float(100 * rank + sample)]) for sample in range(24 if rank == 0 else 8)]
    )
    loader.skip(0 if rank == 0 else 8)
    seen = []
    for x in loader:
        if pace.counts:
            seen += x.flatten().tolist()
        pace.backward(model(x).mean())
        pace.step(optimizer)
    pace.close()
    return seen


def test_rank_without_samples_after_a_resume_runs_fillers() -> None:
    first, second = run_ranks(2, continued)
    assert first == [float(sample) for sample in range(24)]
    assert second == []


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 2), [{"boxes": torch.ones(3, 4)} for _ in range(4)]),
        {"x": torch.ones(4, 2), "sizes": [224, 224]},
        (torch.ones(4, 2), np.arange(4)),
        [torch.ones(4, 2), torch.ones(2)],
    ],
    ids=["boxes of each", "two sizes", "array", "fewer labels"],
)
def test_batch_that_cannot_be_cut_raises(batch: Any) -> None:
    with pytest.raises(PacelineError, match="whose first tensor has 4 rows, and another part of it has not"):
        StreamBuffer(None).add(batch)


def test_batches_keep_the_numbers_and_texts_of_all_and_of_each_sample() -> None:
    buffer = StreamBuffer(None)
    for start, end in ((0, 3), (3, 8)):
        names = [str(number) for number in range(start, end)]
        ids = list(range(start, end))
        buffer.add(
            {"x": torch.arange(start, end), "split": "train", "n": 7, "names": names, "ids": (ids, None)}
        )
    first, rest = buffer.take(4), buffer.take(4)
    for batch, numbers in ((first, [0, 1, 2, 3]), (rest, [4, 5, 6, 7])):
        assert batch["x"].tolist() == numbers
        assert batch["names"] == [str(number) for number in numbers]
        assert batch["ids"] == (numbers, None)
        assert (batch["split"], batch["n"]) == ("train", 7)


def test_batches_whose_text_differs_are_not_joined() -> None:
    buffer = StreamBuffer(None)
    for split in ("train", "other"):
        buffer.add({"x": torch.ones(2), "split": split})
    with pytest.raises(PacelineError, match="batches with 'train' and with 'other' are to be joined"):
        buffer.take(3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"x": rows(2)}, {"x": rows(2), "z": rows(2)}, "with the key 'z' and without it"),
        ({"x": rows(2), "z": rows(2)}, {"x": rows(2)}, "with the key 'z' and without it"),
        (({"x": rows(2)}, rows(2)), ({}, rows(2)), "with the key 'x' and without it"),
        ((rows(2), rows(2)), (rows(2),), "with a list or tuple of 2 and with a list or tuple of 1"),
        ((rows(2), {"x": rows(2)}), (rows(2), rows(2)), "with a dict and with a tensor"),
        ((rows(2), rows(2)), rows(2), "with a list or tuple of 2 and with a tensor"),
        (rows(2, 3, 6), rows(2, 4, 6), r"rows of shape \(3, 6\) and \(4, 6\) .*pad"),
        ((rows(2, 3), rows(2, 5)), (rows(2, 3), rows(2, 7)), r"rows of shape \(5,\) and \(7,\) .*pad"),
        (rows(2, 3), rows(2), r"rows of shape \(3,\) and \(\) .*pad"),
    ],
)
def test_batches_of_different_structure_are_not_joined(first: Any, second: Any, words: str) -> None:
    buffer = StreamBuffer(None)
    buffer.add(first)
    buffer.add(second)
    with pytest.raises(PacelineError, match=words):
        buffer.take(3)


def of_each(count: int) -> dict[str, Any]:
    """A batch with a dict for each sample, which happens to have as many boxes as the batch has samples."""
    return {"x": rows(count, 2), "targets": [{"boxes": rows(count, 4)} for _ in range(count)]}


def pair(count: int) -> tuple[Any, ...]:
    """A batch with two inputs for each sample."""
    return (rows(count, 2), rows(count, 2)), rows(count)


@pytest.mark.parametrize(
    "batches",
    [
        [of_each(4)],
        [of_each(4), of_each(2), of_each(0), of_each(3)],
        [pair(2), pair(2)],
        [(rows(3), [torch.ones(()) for _ in range(3)])],
        [{"x": rows(1, 2), "targets": ({"box": rows(1, 4)},)}],
    ],
)
def test_list_that_may_hold_samples_or_parts_with_rows_raises(batches: list[Any]) -> None:
    buffer = StreamBuffer(None)
    for batch in batches:
        buffer.add(batch)
    with pytest.raises(PacelineError, match=r"as many entries as samples, all alike, .* stack .* use a dict"):
        buffer.take(1)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 2, 2), (5, 1, 2)])
def test_pair_within_a_batch_is_cut_by_rows_if_some_batch_has_other_than_two_samples(
    sizes: tuple[int, ...],
) -> None:
    buffer = StreamBuffer(None)
    for size in sizes:
        buffer.add(pair(size))
    for count in (1, sum(sizes) - 1):
        (left, right), labels = buffer.take(count)
        assert (len(left), len(right), len(labels)) == (count,) * 3
    buffer.restart([])
    buffer.add(pair(2))
    assert len(buffer.take(1)[1]) == 1


@pytest.mark.parametrize(
    "batch",
    [
        *([rows(2, 3), rows(2)], {"x": {"a": rows(2), "b": rows(2)}}, (["a", "b"], rows(2)), rows(2)),
        ((rows(2, 3), rows(2, 4)), rows(2)),  # not alike, so not those of two samples
    ],
)
def test_tensors_and_dicts_are_cut_whatever_their_number(batch: Any) -> None:
    buffer = StreamBuffer(None)
    buffer.add(batch)
    buffer.take(1)
    assert buffer.count == 1
