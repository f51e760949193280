"""Sums on GPUs, with stand-ins for NCCL and tensors without values in place of a device: none was at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.torch.elastic.nccl import NcclGroup
from paceline.torch.elastic.parallel import elastic


class Work:
    """A sum that is complete after so many looks, perhaps with an error, or never."""

    def __init__(self, looks: float, wrong: bool = False) -> None:
        self.looks, self.wrong, self.waited = looks, wrong, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True
        if self.wrong:
            raise RuntimeError("NCCL error: remote process exited")


class Nccl:
    """torch's class."""

    made: list[Nccl]

    class Options:
        _timeout = None

    def __init__(self, *_: Any) -> None:
        self.coming: list[Work] = []
        self.aborted = 0
        type(self).made.append(self)

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        return self.coming.pop(0)

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> tuple[NcclGroup, Nccl]:
    monkeypatch.setattr(Nccl, "made", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"):
        monkeypatch.setenv(name, "")
    return NcclGroup(dist.HashStore(), 0, 1), Nccl.made[0]


GPU = torch.empty(3, device="meta")


def test_sums_of_both_kinds_are_waited_for(group: tuple[NcclGroup, Nccl]) -> None:
    summed, nccl = group
    works = [Work(3), Work(0)]
    nccl.coming = list(works)
    note = torch.tensor([1.0, 2.0])
    started = [summed.sum(GPU), summed.sum(GPU), summed.sum(note)]
    assert not nccl.coming  # what is on processors went by gloo
    assert summed.all_done(started, lambda: False)
    assert all(work.waited for work in works)
    assert not nccl.aborted


@pytest.mark.parametrize(("work", "lost"), [(Work(float("inf")), True), (Work(0, wrong=True), False)])
def test_where_a_member_is_lost_the_communicator_is_aborted_and_nothing_of_it_counts(
    group: tuple[NcclGroup, Nccl], work: Work, lost: bool
) -> None:
    summed, nccl = group
    nccl.coming = [work, Work(0), Work(0)]
    looks = iter(range(1000))
    assert not summed.all_done([summed.sum(GPU), summed.sum(GPU)], lambda: lost and next(looks) > 5)
    assert nccl.aborted == 1
    after = summed.sum(GPU)  # an aborted sum looks as if it had worked
    assert after is None
    assert not summed.all_done([after], lambda: False)
    assert not summed.all_done([], lambda: False)
    assert nccl.aborted == 1


def test_a_model_on_a_gpu_is_refused_until_that_has_run_on_one() -> None:
    with pytest.raises(PacelineError, match="by gloo, on processors; the model is on meta"):
        elastic(nn.Linear(2, 2, device="meta"))
