"""Every reducer goes through the same script, and comes to the same: one process, DDP, FSDP2, members of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.elastic_jobs import BATCH, Rows, alone
from support.ranks import run_ranks
from support.reducer_jobs import ROUNDS, SAMPLES, members, ranked

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop.",
)


def ran(kind: str, out: Path) -> list[dict[str, Any]]:
    if kind == "elastic":
        return members(out, 2)
    found: list[dict[str, Any]] = run_ranks(1 if kind == "one process" else 2, ranked, kind)
    return found


@pytest.mark.parametrize("kind", ["one process", "ddp", "fsdp", "elastic"])
def test_each_reducer_trains_the_model_of_one_process_and_tells_its_rounds(kind: str, tmp_path: Path) -> None:
    found = ran(kind, tmp_path)
    expected = alone(ROUNDS, samples=SAMPLES)
    inputs = Rows(SAMPLES).x[:, 0]
    for rank in found:
        parameters = torch.tensor(rank["parameters"], dtype=torch.float64)
        assert (parameters - expected).abs().max() < 1e-12
        assert rank["stands"] == [2, 2 * BATCH, ROUNDS], "two epochs of five rounds, and two rounds"
        assert rank["rounds"] == found[0]["rounds"], "all ranks are told the same"
    rounds = found[0]["rounds"]
    assert [each["step"] for each in rounds] == list(range(ROUNDS))
    assert all(sum(each["loads"]) == BATCH and each["loss"] > 0 for each in rounds)
    seen = np.sort(np.concatenate([np.concatenate(rank["seen"]) for rank in found]))
    orders = [np.random.default_rng((3, epoch)).permutation(SAMPLES) for epoch in range(3)]
    used = np.concatenate([orders[0], orders[1], orders[2][: 2 * BATCH]])
    np.testing.assert_array_equal(seen, np.sort(inputs[used].numpy()))
