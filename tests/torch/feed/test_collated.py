"""Collate functions that leave out samples, or make other batches than one row for each sample."""

from __future__ import annotations

from collections import UserDict, namedtuple
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.passes import RowCheck
from support.guarantees import guarantee
from support.ranks import gathered, run_ranks
from support.small_net import TWO, Samples, difference, fresh, optimizer_of, replayed

Fields = namedtuple("Fields", ["x", "y"])


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    "batch",
    [
        [rows(15, 64), rows(15)],
        (rows(15, 3, 8, 8), rows(15, 4)),
        {"x": rows(15, 7), "y": rows(15), "scale": torch.tensor(2.0)},
        UserDict({"x": rows(15, 7), "y": rows(15)}),
        Fields(rows(15, 7), rows(15)),
        [rows(15, 7), ["name"] * 15],
        [{"left": rows(15, 2), "right": rows(15, 2)}, rows(15)],
        rows(15, 9),
        [rows(0, 7), rows(0)],
        [rows(5, 9, 2), rows(5, 9)],
    ],
)
def test_batch_with_missing_rows_is_recognized(batch: Any) -> None:
    assert RowCheck().missing(batch, 16) in (0, 5, 15)


@pytest.mark.parametrize(
    "batch",
    [
        [rows(16, 64), rows(16)],
        [rows(32, 3, 8, 8), rows(32)],  # two rows for each sample
        [rows(21, 7), rows(21)],  # tokens, or the rows of documents
        [rows(40, 3), rows(2, 90), rows(16)],  # a graph's nodes and edges
        [rows(10, 16, 4), rows(10, 16)],  # time comes first
        [rows(10, 32, 4), rows(10, 32)],  # so it does, with two rows for each sample
        [rows(8, 64), rows(8)],  # pairs that were mixed to one
        [rows(3, 8, 8)] * 16,  # one picture for each sample
        [rows(3, 8, 8)] * 32,  # two of them
        [[rows(3, 8, 8)] * 15, [{"boxes": rows(2, 4)}] * 15],  # what has rows of its own
        [rows(15, 7), object()],
        [],
        {},
        object(),
        16,
        None,
        torch.tensor(3.0),
        "text",
    ],
)
def test_complete_or_unclear_batch_is_accepted(batch: Any) -> None:
    assert RowCheck().missing(batch, 16) is None


def test_batches_of_merged_samples_are_accepted() -> None:
    check = RowCheck()
    for samples in (16, 10, 2):
        assert check.missing([rows(samples // 2, 3), rows(samples // 2)], samples) is None
    assert check.missing([rows(16, 3), rows(16)], 16) is None
    assert check.missing([rows(8, 3), rows(8)], 16) == 8, "a row stood for one sample before"


FEATURES = [rows(8, 16), rows(8, 4)]
PICTURES = [rows(8, 3, 16, 16), rows(8, 16, 16)]


@pytest.mark.parametrize(
    ("full", "samples", "batch"),
    [
        (FEATURES, 8, [rows(7, 16), rows(7, 4)]),
        (FEATURES, 8, [rows(4, 16), rows(4, 4)]),
        (dict(zip("xy", FEATURES, strict=True)), 8, {"x": rows(7, 16), "y": rows(7, 4)}),
        (PICTURES, 8, [rows(7, 3, 16, 16), rows(7, 16, 16)]),
        ([rows(9, 16)], 9, [rows(7, 16)]),
        ([rows(16, 16), rows(16)], 16, [rows(7, 16), rows(7, 16)]),
        (rows(9, 16), 9, rows(7, 16)),
    ],
)
def test_missing_rows_are_recognized_beside_a_multiple_once_a_batch_was_full(
    full: Any, samples: int, batch: Any
) -> None:
    check = RowCheck()
    assert check.missing(batch, 8) is None, "time may come first"
    assert check.missing(full, samples) is None
    assert check.missing(batch, 8) in (4, 7)


@pytest.mark.parametrize(
    ("samples", "first", "later"),
    [
        (8, [rows(8, 8, 6)], [rows(7, 8, 6)]),
        (8, [rows(8, 8, 6), rows(8, 8)], [rows(7, 8, 6), rows(7, 8)]),
        (8, [rows(8, 16, 6), rows(8, 16)], [rows(7, 16, 6), rows(7, 16)]),  # two rows for each sample
        (8, [rows(8, 8, 6), rows(8, 5)], [rows(7, 8, 6), rows(7, 5)]),  # and features of each time
        (8, [rows(8, 8, 6), rows(8)], [rows(7, 8, 6), rows(8)]),
        (8, {"x": rows(8, 8, 6), "mask": rows(8, 8)}, {"x": rows(7, 8, 6), "mask": rows(7, 7)}),
        (2, [rows(2, 2, 6), rows(2, 2)], [rows(2, 8, 6), rows(2, 8)]),  # two views of all samples
    ],
)
def test_time_first_batches_with_as_many_times_as_samples_are_accepted(
    samples: int, first: Any, later: Any
) -> None:
    check = RowCheck()
    assert check.missing(first, samples) is None
    for _ in range(2):
        assert check.missing(later, 8) is None


def each(*lengths: int) -> tuple[Any, ...]:
    """A list for each of these lengths: of pictures, and of what has rows of its own."""
    return tuple(
        [rows(3, 8, 8), {"boxes": rows(2, 4)}][at % 2 : at % 2 + 1] * n for at, n in enumerate(lengths)
    )


@pytest.mark.parametrize(
    ("batches", "batch"),
    [
        ((each(16, 16), each(9, 9)), each(15, 15)),
        (((rows(16, 3), *each(16)), (rows(9, 3), *each(9))), (rows(15, 3), *each(15))),
        (
            tuple({"images": one, "targets": two, "scale": 2.0} for one, two in (each(16, 16), each(9, 9))),
            {"images": each(15)[0], "targets": each(15)[0]},
        ),
    ],
)
def test_lists_shorter_than_the_samples_are_recognized_once_two_lengths_were_full(
    batches: Any, batch: Any
) -> None:
    check = RowCheck()
    for full, samples in zip(batches, (16, 9), strict=True):
        assert check.missing(batch, 16) is None
        assert check.missing(full, samples) is None
        assert check.missing(full, samples) is None
    assert check.missing(batch, 16) == 15


@pytest.mark.parametrize(
    "batches",
    [
        [([rows(n, 3)] * 2, [rows(n)] * 2) for n in (2, 5, 16)],  # two views of all samples
        [(rows(n, 3), [rows(n)] * 2) for n in (2, 5, 16)],
        [(rows(7, n, 3), *each(n, 2)) for n in (2, 5, 7, 9, 16)],
    ],
)
def test_lists_of_a_constant_length_are_accepted(batches: list[Any]) -> None:
    check = RowCheck()
    for batch, samples in zip(batches, (2, 5, 16), strict=False):
        assert check.missing(batch, samples) is None


def dropping(samples: list[Any]) -> Any:
    """Leaves out the samples whose first feature is large."""
    return default_collate([sample for sample in samples if sample[0][0] < 1.0] or samples[:1])


def collated(rank: int, ranks: int, counts: bool, weigh: str, loop: str) -> tuple[float, str]:
    """Batches of which some samples are left out: the difference from one process that leaves out the same, and the
    sentence where that is refused."""
    model, data = fresh(torch.float64), Samples(80)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[list[int]] = []
    with Pace(ddp, 16, TWO, loop=loop, limits=[(2, None)] * 2, weigh=weigh) as pace:
        try:
            for batch in pace.loader(data, seed=5, collate_fn=dropping):
                if loop == "round":
                    pace.round(
                        batch,
                        lambda x, y, index: counted(loss_of(ddp(x), y), pace.counts, index, counts, used),
                    )
                elif weigh == "hook":
                    loss_of(ddp(batch[0]), batch[1]).backward()
                else:
                    loss, count = counted(loss_of(ddp(batch[0]), batch[1]), pace.counts, batch[2], True, used)
                    pace.backward(loss, count=count if counts else None)
                pace.step(optimizer)
        except PacelineError as error:
            pace.host.abandon()
            return 0.0, str(error)
    rounds = [[*chain(*parts)] for parts in zip(*gathered(used), strict=True)]
    return difference(model.parameters(), replayed(rounds, data)), ""


def counted(loss: torch.Tensor, ran: bool, index: torch.Tensor, counts: bool, used: list[list[int]]) -> Any:
    used.append(index.tolist() if ran else [])
    return (loss, len(index)) if counts else loss


@guarantee(
    "Losses with class weights, ignored targets or left-out samples are exact with `count=`; without it, "
    "Paceline raises or warns once."
)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("weigh", "loop"), [("loss", "whole"), ("loss", "pieces"), ("loss", "round"), ("hook", "pieces")]
)
def test_missing_samples_raise_and_are_exact_with_their_count(weigh: str, loop: str) -> None:
    for _, sentence in run_ranks(2, collated, False, weigh, loop):
        assert "planned samples, or pace.backward" in sentence
        assert "pace.backward(loss, count=...)" in sentence
    if weigh == "loss":
        for difference, sentence in run_ranks(2, collated, True, weigh, loop):
            assert (sentence, difference < 1e-12) == ("", True)


def test_sum_loss_is_over_the_samples_that_are_there() -> None:
    model = fresh(torch.float64)
    optimizer = optimizer_of(model)
    with Pace(model, 16) as pace:
        for x, y, _ in pace.loader(Samples(16), collate_fn=lambda all: _default(all[:-1])):
            pace.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), "sum")
            pace.step(optimizer)
        assert pace.rounds == 1


class Rows:
    """A data set whose batches come as one tensor."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.arange(samples, dtype=torch.float64)[:, None]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.rows[indices]


def test_a_data_set_may_give_a_batch_as_one_tensor() -> None:
    model = nn.Linear(1, 1, dtype=torch.float64)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), list[float]()
    with Pace(model, 16) as pace:
        for batch in pace.loader(Rows(40), collate_fn=lambda rows: rows):
            seen += batch[:, 0].tolist()
            pace.backward(model(batch).square().mean())
            pace.step(optimizer)
    assert sorted(seen) == list(range(40))


def _default(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


@guarantee("A data set that has grown, or an assignment to `pace.global_batch`, raises.")
def test_grown_data_set_raises_when_an_epoch_begins() -> None:
    model, data = fresh(torch.float64), Samples(32)
    with Pace(model, 16) as pace:
        loader = pace.loader(data)
        data.x, data.y = data.x.repeat(2, 1), data.y.repeat(2)
        with pytest.raises(PacelineError, match="has 64 samples, and had 32 when"):
            next(iter(loader))


@guarantee("A data set that has grown, or an assignment to `pace.global_batch`, raises.")
@pytest.mark.parametrize("option", ["global_batch", "micro_batch", "policy", "stall"])
def test_option_that_is_set_later_raises(option: str) -> None:
    with Pace(fresh(torch.float64), 16) as pace:
        with pytest.raises(
            PacelineError, match=f"{option} was set on a Pace, whose loaders and plans depend"
        ):
            setattr(pace, option, 24)
        assert pace.host.terms.batch == 16
