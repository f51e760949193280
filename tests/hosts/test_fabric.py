"""A Fabric loop with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.guarantees import guarantee
from support.hosts import COSTS, COUNT, difference, every_sample_once, whole_batch
from support.later import later
from support.ranks import run_ranks
from support.sharding import possible

jobs = later("support.fabric_jobs", needs="lightning")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]

CASES: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 0.05},
    "accumulated and clipped": {"clip": 0.05, "micro_batch": 3, "loop": "pieces"},
    "accumulated by the loop": {"clip": 0.05, "accumulate": 2},
    "moved within the round": {"policy": "factoring", "limits": None, "jitter": 2e-3, "loop": "pieces"},
    "a round each micro-step": {
        "policy": "factoring",
        "limits": None,
        "jitter": 2e-3,
        "clip": 0.05,
        "loop": "round",
    },
    "by cost": {"clip": 0.05, "loading": {"cost": COSTS, "padded": True}},
    "by cost, moved within the round": {
        "policy": "factoring",
        "limits": None,
        "jitter": 2e-3,
        "loop": "round",
        "loading": {"cost": COSTS, "padded": False},
    },
    "by cost, sharded": {
        "sharding": True,
        "loop": "round",
        "loading": {"cost": COSTS, "padded": True, "micro_batch_cost": 200},
        "dtype": "float32",
        "precision": "32-true",
    },
    "bfloat16": {"dtype": "float32", "precision": "bf16-mixed"},
    "stopped and resumed": {"steps": 4},
    "sharded": {
        "sharding": True,
        "micro_batch": 4,
        "loop": "pieces",
        "dtype": "float32",
        "precision": "32-true",
    },
}
CASES = possible(CASES)


EVALUATED = -1  # what follows the cases' results


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return run_ranks(3, jobs.trained, str(tmp_path_factory.mktemp("fabric")), list(CASES.values()))


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_one_process_with_the_whole_batch(ranks: int, three: list[list[Any]], tmp_path: Path) -> None:
    names = list(CASES) if ranks == 3 else ["accumulated and clipped"]
    found = (
        three
        if ranks == 3
        else run_ranks(ranks, jobs.trained, str(tmp_path), [CASES[name] for name in names])
    )
    for number, name in enumerate(names):
        results = [rank[number] for rank in found]
        every_sample_once([result["used"] for result in results])
        assert len({str(result["parameters"]) for result in results}) == 1, f"{name}: the ranks differ"
        assert len(results[0]["loads"]) == 12
        assert any(len(set(loads)) > 1 for loads in results[0]["loads"]), f"{name}: the loads are even"
        mixed, kind = name == "bfloat16", CASES[name].get("dtype", "float64")
        assert results[0]["kind"] == f"torch.{kind}"
        expected = whole_batch(getattr(torch, kind), clip=CASES[name].get("clip"))
        far = difference(results[0]["parameters"], expected)
        limit = 2e-2 if mixed else 1e-12 if kind == "float64" else 2e-6
        assert far < limit, f"{name}: relative difference {far:.1e}"
        assert far > 1e-5 or not mixed, "bfloat16 was not used"


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluates_as_without_it(three: list[list[Any]]) -> None:
    for ours, theirs in (rank[EVALUATED] for rank in three):
        assert sum(map(len, ours)) >= 3 * COUNT
        assert ours == theirs


def test_what_cannot_be_balanced_is_refused() -> None:
    assert "expected what fabric.setup" in jobs.refusal("plain module")
    assert "does not leave the plain mean" in jobs.refusal("strategy")
    assert "set its precision" in jobs.refusal("scaler")
