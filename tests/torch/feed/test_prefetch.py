"""Samples that are loaded beside the DataLoader, by real processes. Linux keeps 64 KiB of a pipe that nobody reads;
an index takes 5 bytes of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from paceline.torch.feed.prefetch import Prefetch, draws

FORK = multiprocessing.get_context("fork")

GUARANTEES = (
    "Loader processes take parts and rounds of any size; if a round is left, only the parts that they have begun are "
    "waited for.",
)


class Numbers(Dataset[torch.Tensor]):
    """Each sample is its index. gate: samples can be read once it is set. read: counts those that were."""

    def __init__(self, gate: Any = None, read: Any = None) -> None:
        self._gate, self._read = gate, read

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if self._gate is not None and len(indices) > 1:  # ``Prefetch`` itself looks at one sample
            self._gate.wait()
        if self._read is not None:
            with self._read.get_lock():
                self._read.value += len(indices)
        return list(torch.tensor(indices))


def prefetch(dataset: Numbers, workers: int, **options: Any) -> Prefetch:
    return Prefetch(
        dataset,
        default_collate,
        {"num_workers": workers, "multiprocessing_context": "fork", **options},
        draws(1),
    )


def rounds(count: int, size: int, micro_batch: int) -> list[list[np.ndarray[Any, Any]]]:
    """The micro-steps of so many rounds of ``size`` samples, with large indices."""
    samples = 10**6 - 1 - np.arange(count * size)
    each = samples.reshape(count, -1, micro_batch)
    return [list(one) for one in each]


def check_next(prefetch: Prefetch, micro_steps: list[np.ndarray[Any, Any]]) -> None:
    for micro_step in micro_steps:
        assert prefetch.next(micro_step).tolist() == micro_step.tolist()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("factor", [None, 1, 5])
def test_rounds_of_many_parts_beyond_a_pipe_load_in_order(workers: int, factor: int | None) -> None:
    """Each process receives more bytes of indices than a pipe holds, in parts that it takes when they are due."""
    now, following = rounds(2, 128 * 512, 512)
    loads = prefetch(Numbers(), workers, prefetch_factor=factor)
    loads.expect(now)
    loads.begin(following)
    check_next(loads, now)
    loads.expect(following)
    check_next(loads, following)
    loads.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_part_beyond_a_pipe_does_not_wait_for_its_process(workers: int) -> None:
    """``begin`` returns while each process still loads its first part, and the lists after it fill the pipe."""
    gate, (micro_steps,) = FORK.Event(), rounds(1, 6 * 50_000, 50_000)
    loads = prefetch(Numbers(gate), workers)
    loads.begin(micro_steps)
    gate.set()
    check_next(loads, micro_steps)
    loads.close()


def test_reset_waits_only_for_parts_that_a_process_has_begun() -> None:
    read, (left, taken) = FORK.Value("q", 0), rounds(2, 40 * 100, 100)
    loads = prefetch(Numbers(read=read), 2)
    before = read.value
    loads.begin(left)
    check_next(loads, left[:1])
    loads.expect(taken)
    check_next(loads, taken)
    assert read.value - before <= 4000 + 6 * 50, "taken, and of the others 2 parts of 50 and 4 ahead"
    loads.close()


@pytest.mark.parametrize("taken", [0, 1])
def test_close_amid_parts_beyond_a_pipe_leaves_no_process(taken: int) -> None:
    (micro_steps,) = rounds(1, 6 * 50_000, 50_000)
    before = set(multiprocessing.active_children())
    loads = prefetch(Numbers(), 2)
    loads.begin(micro_steps)
    check_next(loads, micro_steps[:taken])
    loads.close()
    assert set(multiprocessing.active_children()) <= before


def test_killed_loader_process_with_parts_beyond_a_pipe_raises() -> None:
    gate, (micro_steps,) = FORK.Event(), rounds(1, 6 * 50_000, 50_000)
    before = set(multiprocessing.active_children())
    loads = prefetch(Numbers(gate), 1)
    (process,) = set(multiprocessing.active_children()) - before
    loads.begin(micro_steps)

    def kill_and_load() -> None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        loads.next(micro_steps[0])

    with pytest.raises(
        RuntimeError, match="DataLoader worker"
    ):  # in either call: the kernel's signal raises it
        kill_and_load()
    loads.close()
