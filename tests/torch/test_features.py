"""What people have in their loops beside the loss: each with the results of one process."""

from __future__ import annotations

import pytest

from support.feature_jobs import features
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Autocast, `torch.compile`, activation checkpointing, averaged parameters and mixup give one "
    "process's results (bfloat16: to its rounding).",
)


@pytest.mark.parametrize("loop", ["whole", pytest.param("round", marks=pytest.mark.nightly)])
def test_as_in_one_process(loop: str) -> None:
    for found in run_ranks(3, features, loop):
        for way, (difference, sizes) in found.items():
            # bfloat16 holds 8 bits, and rounds another sum in each division of the batch
            limit = 0.05 if way == "autocast" else 1e-12
            assert difference < limit, f"{way}: relative difference {difference:.1e}"
            assert sizes <= 10, "quantum keeps the sizes few"
