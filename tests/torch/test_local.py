"""Ranks that step by themselves between merges: what the model comes to, against one process that plays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.torch import Merge
from support.local_jobs import COUNT, SINGLE, replayed, together, trained
from support.ranks import run_ranks
from support.torch_jobs import UNEVEN

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("torch")]

ANY = {"limits": [(0, None)] * 3}
CASES: dict[str, dict[str, Any]] = {
    "loads of any kind": {"policy": UNEVEN, "every": 3, "momentum": 0.9, **ANY},
    "claimed": {"policy": "factoring", "every": 4, "momentum": 0.9, "jitter": 0.002},
    "auto": {"policy": "auto", "every": 3, "jitter": 0.02, "adam": True},
    "by the clock": {"every": "0.01 s", "jitter": 0.002},
    "as often as the link allows": {"every": "auto", "jitter": 0.001},
    "prefetched": {"policy": UNEVEN, "every": 2, "loader_workers": 1, **ANY},
    "prefetched by the clock": {"every": 0.01, "loader_workers": 1, "jitter": 0.002},
    "tokens": {"policy": UNEVEN, "every": 3, "counted": True, **ANY},
    "by steps": {"policy": UNEVEN, "every": 3, "merge": Merge(by="steps"), **ANY},
    "by ranks": {"policy": UNEVEN, "every": 3, "merge": Merge(by="ranks"), **ANY},
    "Nesterov": {"policy": UNEVEN, "every": 2, "merge": Merge(outer="nesterov:lr=0.7,momentum=0.9"), **ANY},
    "clipped": {"policy": UNEVEN, "every": 2, "clip": 0.05, "adam": True, **ANY},
    "scaled": {"policy": UNEVEN, "every": 2, "scaled": True, **ANY},
    "sums": {"policy": UNEVEN, "every": 2, "reduction": "sum", **ANY},
    "statistics": {"policy": UNEVEN, "every": 3, "norm": True, **ANY},
    "costs": {"policy": "level", "every": 3, "cost": True, "jitter": 0.002},
    "costs, claimed": {"policy": "factoring", "every": 3, "cost": True, "jitter": 0.002},
    "quantum": {"policy": UNEVEN, "every": 3, "quantum": 3, "count": 84, **ANY},
    "single precision": {"policy": UNEVEN, "every": 3, "dtype": "float32", "adam": True, **ANY},
}


def apart(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a part of the largest number of its kind."""
    most = 0.0
    for name, value in expected.items():
        now = torch.tensor(found[name], dtype=value.dtype)
        assert (now.isinf() == value.isinf()).all(), name
        now, value = now.double().nan_to_num(neginf=0), value.double().nan_to_num(neginf=0)
        most = max(most, float((now - value).abs().max() / value.abs().max().clamp_min(1e-30)))
    return most


def test_the_model_is_that_of_a_replay_and_each_sample_counts_once() -> None:
    runs = run_ranks(3, trained, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        own = [each[number] for each in runs]
        assert own[0]["state"] == own[1]["state"] == own[2]["state"], name
        assert own[0]["loss"] == own[1]["loss"]
        steps = [step for run in own for step in run["steps"]]
        rounds, count = own[0]["rounds"], case.get("count", COUNT)
        used = sorted(index for _, indices, _ in steps for index in indices)
        assert used == sorted([*range(count)] * 2), name
        half = sorted(index for at, indices, _ in steps for index in indices if at < rounds / 2)
        assert case["every"] not in (2, 3) or half == [*range(count)], name  # each once an epoch
        assert all(len(indices) <= 1.5 * own[0]["most"] for _, indices, _ in steps), name
        difference = apart(own[0]["state"], replayed(own, **case))
        assert difference < (1e-4 if case.get("dtype") else 1e-12), f"{name}: {difference:.1e}"


def test_one_step_each_is_one_process() -> None:
    """Under unlike loads, weighted by samples; under equal loads with momentum, too, which stays on its rank."""
    cases = [
        {"policy": SINGLE, "every": 1, "epochs": 4, **ANY},
        {"policy": "equal", "every": 1, "epochs": 4, "count": 84, "momentum": 0.9},
    ]
    runs = run_ranks(3, trained, cases)
    for number, case in enumerate(cases):
        steps = 4 * 7
        assert [len({at for at, _, _ in run[number]["steps"]}) for run in runs] == [steps] * 3  # one each
        assert all(len(run[number]["steps"]) == steps for run in runs)
        expected = together(steps, case.get("count", COUNT), case.get("momentum", 0.0))
        assert apart(runs[0][number]["state"], expected) < 1e-12
    (only,) = run_ranks(1, trained, [{"every": 1, "epochs": 2, "adam": True}])
    assert apart(only[0]["state"], together(2 * 7, COUNT, 0.0, adam=True)) < 1e-12
