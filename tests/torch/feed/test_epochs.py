"""Every sample is used exactly once an epoch, whatever the split, the loader and the stops."""

from __future__ import annotations

import io
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.torch.progress import Progress
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.scripted import Script
from support.torch_jobs import indices_used, part_of_an_epoch

pytestmark = pytest.mark.processes

CASES = {
    "uneven": {},
    "micro-batches": {"micro_batch": 2},
    "prefetching by 1": {"loader_workers": 1, "micro_batch": 4},
    "prefetching by 4": {"loader_workers": 4},
    "in order": {"shuffle": False},
    "quantum": {"quantum": 4, "count": 84},
    "last batch smaller than the ranks": {"count": 34},
    "batch norm": {"count": 33, "norm": True},
    "equal micro-steps": {"micro_steps": 4},
    "equal micro-steps, batch norm": {"micro_steps": 3, "norm": True, "fill": True},
    "measured": {"policy": "level", "limits": None},
}


def test_each_sample_once_an_epoch() -> None:
    ranks = run_ranks(3, indices_used, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        count = case.get("count", 83)
        epochs = [list(chain.from_iterable(rank[number][epoch] for rank in ranks)) for epoch in range(2)]
        for used in epochs:
            assert sorted(used) == list(range(count)), name
        if case.get("shuffle", True):
            assert ranks[0][number][0] != ranks[0][number][1], f"{name}: the order repeats"
            assert epochs[0] != sorted(epochs[0]), name


@given(
    samples=st.integers(1, 200), size=st.integers(1, 20), floor=st.integers(1, 3), done=st.integers(0, 200)
)
def test_an_epoch_has_as_many_rounds_as_its_length_says(
    samples: int, size: int, floor: int, done: int
) -> None:
    progress = Progress(size, floor, size)
    progress.samples, progress.samples_done = samples, min(done, samples)
    rounds = list(progress.remaining())
    assert len(rounds) == progress.left
    assert sum(size for _, size in rounds) == samples - progress.samples_done


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("then", [3, 2])
def test_stopped_and_resumed_in_mid_epoch(loader_workers: int, then: int) -> None:
    before = run_ranks(3, part_of_an_epoch, 2, None, loader_workers)
    after = run_ranks(then, part_of_an_epoch, 99, before[0]["saved"], loader_workers)
    used = list(chain.from_iterable(part["used"] for part in before + after))
    assert sorted(used) == list(range(83))
    assert {part["rounds"] for part in after} == {6}


@guarantee(
    "A resumed run continues with the same plans and samples; a state that does not fit raises and changes "
    "nothing."
)
def test_a_resumed_run_divides_as_an_unbroken_one() -> None:
    policy = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9), (7, 1, 4), (2, 1, 1)))
    whole = run_ranks(3, part_of_an_epoch, 99, None, 0, policy)
    before = run_ranks(3, part_of_an_epoch, 3, None, 0, policy)
    after = run_ranks(3, part_of_an_epoch, 99, before[0]["saved"], 0, policy)
    assert before[0]["loads"] + after[0]["loads"] == whole[0]["loads"]
    expected, found = (
        torch.load(io.BytesIO(part[0]["saved"]), weights_only=True)["model"] for part in (whole, after)
    )
    # Within rounding: DDP orders its buckets by the first round that it sees, and so the sums of all later ones.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
