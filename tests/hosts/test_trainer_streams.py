"""Streams under the real Hugging Face Trainer: every sample once, the model of one process, and continuing."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from paceline.errors import PacelineError
from support.guarantees import guarantee
from support.hosts import COUNT
from support.later import later
from support.ranks import run_ranks

jobs = later("support.trainer_streams", needs="transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]

EPOCH = [24, 24, 24, 11]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def check(batches: list[list[int]]) -> None:
    """Two epochs with every sample once, in different orders, and a round of the third."""
    assert [len(batch) for batch in batches] == [*EPOCH, *EPOCH, 24]
    first, second = flat(batches[:4]), flat(batches[4:8])
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert len(set(batches[8])) == 24


@guarantee("A stream under the Hugging Face Trainer uses each sample once per epoch, also in a resumed run.")
@pytest.mark.parametrize(
    "name", ["plain", "parts", "generator", "processes", "accumulated", "by round", "split batches"]
)
def test_stream_trains_model_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    for apart, batches, steps, epoch in (rank[name] for rank in found):
        assert apart < 1e-12
        assert (steps, epoch) == (9, pytest.approx(2 + 1 / 9))
        check(batches)


def test_stream_on_two_ranks_trains_model_of_one_process(folder: str, found: list[dict[str, Any]]) -> None:
    for rank in run_ranks(2, jobs.plain, folder):
        apart, batches = rank["plain"]
        assert apart < 1e-12
        check(batches)
        # Continued from the three ranks' checkpoint after step 6.
        assert rank["continued"] == found[0]["after 6"][1][6:]
        assert found[0]["whole"] == rank["whole"] == batches


@guarantee(
    "A stream that the ranks of a Hugging Face Trainer share has the same rounds for any number of ranks."
)
def test_shared_stream_is_divided_in_its_order(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["plain"][1] == rank["whole"]
        assert rank["parts"][1] != rank["whole"]


def test_last_samples_of_stream_are_dropped(found: list[dict[str, Any]]) -> None:
    for apart, batches, *_ in (rank["dropped"] for rank in found):
        assert apart < 1e-12
        assert [len(batch) for batch in batches] == [24] * 9
        assert len(set(flat(batches[:3]))) == 72


@guarantee("A stream under the Hugging Face Trainer uses each sample once per epoch, also in a resumed run.")
@pytest.mark.parametrize("case", ["after 4", "after 6", "parts after 6"])
def test_resumed_stream_continues(found: list[dict[str, Any]], case: str) -> None:
    for apart, batches, steps, epoch in (rank[case] for rank in found):
        assert apart < 1e-12
        assert (steps, epoch) == (9, pytest.approx(2 + 1 / 9))
        check(batches)


def test_ignore_data_skip_begins_stream_again(found: list[dict[str, Any]]) -> None:
    for batches in (rank["begun again"] for rank in found):
        assert [len(batch) for batch in batches] == [*EPOCH, 24]
        assert sorted(flat(batches[:4])) == list(range(COUNT))


def test_mean_over_labels_of_stream(found: list[dict[str, Any]]) -> None:
    assert max(rank["tokens"] for rank in found) < 1e-6  # the model's loss is float32


def test_stream_that_cannot_be_balanced_raises(found: list[dict[str, Any]]) -> None:
    for says in (rank["refused"] for rank in found):
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
