"""Stopwatches of a round, on the host and on a device."""

from __future__ import annotations

import pytest
import torch

from paceline.torch.meter import CudaStopwatch


class FakeEvent:
    """A CUDA event on a stream whose clock the test sets."""

    now = 0.0
    synchronized = 0

    def record(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


def test_events_are_read_a_round_later_without_synchronizing() -> None:
    watch = CudaStopwatch(FakeEvent)
    assert watch.lag == 1
    FakeEvent.now = 1.0
    mark = watch.start()
    FakeEvent.now = 1.25
    reading = watch.stop(mark)
    watch.start()
    assert watch.seconds(reading) == 0.25
    assert FakeEvent.synchronized == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run on a machine with a GPU")
def test_cuda_events_time_the_device() -> None:
    watch = CudaStopwatch()
    x = torch.randn(4096, 4096, device="cuda")
    mark = watch.start()
    for _ in range(20):
        x = x @ x / 64
    assert 0 < watch.seconds(watch.stop(mark)) < 10
