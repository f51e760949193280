"""Uneven training gives the model of one process with the whole batch."""

from __future__ import annotations

import pytest

from support.guarantees import guarantee
from support.ranks import run_ranks
from support.torch_jobs import differences_from_one_process

pytestmark = pytest.mark.processes

GUARANTEES = ("Results agree within rounding for all kernels of torch and MKL and all orders of DDP's sums.",)

CASES = {
    "weighted loss": {},
    "sum loss": {"reduction": "sum"},
    "unused parameters": {"sometimes": True},
    "micro-batches": {"micro_batch": 3},
    "hook": {"weigh": "hook"},
    "hook, micro-batches": {"weigh": "hook", "micro_batch": 3},
    "hook, unused parameters": {"weigh": "hook", "sometimes": True},
    "quantum": {"quantum": 4, "count": 84},
    "batch larger than the data": {"count": 11},
    "prefetching": {"loader_workers": 1},
    "scaled": {"scaled": True, "micro_batch": 5},
    "equal micro-steps": {"micro_steps": 3, "fill": True, "micro_batch": 8},
    "single precision": {"dtype": "float32"},
}


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
def test_parameters_equal_those_of_one_process() -> None:
    differences = run_ranks(3, differences_from_one_process, list(CASES.values()))
    assert differences[0] == differences[1] == differences[2], "the ranks' parameters differ"
    for (name, case), difference in zip(CASES.items(), differences[0], strict=True):
        limit = 1e-5 if case.get("dtype") == "float32" else 1e-12
        assert difference < limit, f"{name}: relative difference {difference:.1e}"
