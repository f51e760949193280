"""Work that moves within the round: the same model and the same samples, whoever claims what and when."""

from __future__ import annotations

from itertools import chain

import pytest

from support.ranks import run_ranks
from support.torch_jobs import exact, indices_used

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

PULLED = {"policy": "factoring", "batch": 48, "count": 230, "jitter": 4e-4, "limits": None}
EXACT = {
    "factoring": {},
    "half at once": {"policy": "factoring:portion=0.5"},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=3"},
    "guided": {"policy": "factoring:scheme=guided"},
    "auto": {"policy": "auto"},
    "micro-batches": {"micro_batch": 5},
    "quantum": {"quantum": 4},
    "hook": {"weigh": "hook"},
    "hook, unused parameters": {"weigh": "hook", "sometimes": True},
    "unused parameters": {"sometimes": True},
    "sum loss": {"reduction": "sum"},
    "a rank without a plan": {
        "policy": "factoring:scheme=self,piece=2",
        "limits": [(0, None)] * 3,
        "batch": 2,
    },
    "limits": {"limits": [(1, 20), (1, 20), (1, 20)]},
    "prefetching": {"loader_workers": 1},
}
ONCE = {
    "in the main process": {},
    "prefetching by 1": {"loader_workers": 1, "micro_batch": 7, "count": 120},
    "prefetching by 4": {"loader_workers": 4, "count": 120},
    "batch norm": {"count": 97, "norm": True},
    "batch norm, micro-batches": {"norm": True, "micro_batch": 5},
    "fewer samples than a batch": {"count": 31},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=4"},
}


def test_parameters_equal_those_of_one_process() -> None:
    differences = run_ranks(3, exact, [PULLED | {"steps": 12} | case for case in EXACT.values()])
    assert differences[0] == differences[1] == differences[2], "the ranks' parameters differ"
    for name, difference in zip(EXACT, differences[0], strict=True):
        assert difference < 1e-12, f"{name}: relative difference {difference:.1e}"


def test_each_sample_once_an_epoch() -> None:
    ranks = run_ranks(3, indices_used, [PULLED | case for case in ONCE.values()])
    for number, (name, case) in enumerate(ONCE.items()):
        count = case.get("count", PULLED["count"])
        for epoch in range(2):
            used = list(chain.from_iterable(rank[number][epoch] for rank in ranks))
            assert sorted(used) == list(range(count)), name
