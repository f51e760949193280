"""FSDP2 with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.hosts.accumulating import HostedPace
from support import fsdp_jobs
from support.fsdp_jobs import measured, misuse, trained
from support.guarantees import guarantee
from support.hosts import (
    BATCH,
    COUNT,
    SEED,
    Samples,
    difference,
    every_sample_once,
    fresh,
    optimizer_of,
    whole_batch,
)
from support.ranks import run_ranks
from support.sharding import BALANCED

pytestmark = pytest.mark.processes

balanced = pytest.mark.skipif(not BALANCED, reason="PyTorch before 2.9: pip install 'torch>=2.9'")

CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "accumulated and clipped": {"clip": 0.05, "micro_batch": 4},
    "stopped and resumed": {"steps": 4},
    "bfloat16": {"dtype": "float32", "mixed": True},
}


@balanced
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_one_process_with_the_whole_batch(ranks: int, tmp_path: Path) -> None:
    names = list(CASES) if ranks == 3 else ["accumulated and clipped"]
    found = run_ranks(ranks, trained, str(tmp_path), [CASES[name] for name in names])
    for number, name in enumerate(names):
        results = [rank[number] for rank in found]
        every_sample_once([result["used"] for result in results])
        assert len(results[0]["loads"]) == 12
        assert any(len(set(loads)) > 1 for loads in results[0]["loads"]), f"{name}: the loads are even"
        mixed = name == "bfloat16"
        assert results[0]["kind"] == ("torch.bfloat16" if mixed else "torch.float64")
        expected = whole_batch(clip=CASES[name].get("clip"))
        far = difference(results[0]["parameters"], expected)
        assert far < (2e-2 if mixed else 1e-12), f"{name}: relative difference {far:.1e}"


@balanced
def test_seconds_are_a_ranks_own_in_spite_of_the_collectives_in_each_layer() -> None:
    milliseconds = [1.0, 1.0, 4.0]
    rounds = run_ranks(3, measured, milliseconds, 6)[0]
    slept = np.array(milliseconds) * 20 / 1e3  # each rank has 20 of the 60 samples
    best = np.min([round.compute for round in rounds], axis=0)  # the machine may be busy
    assert (best >= slept).all()
    assert (best[:2] < 0.7 * best[2]).all(), f"{best}: the wait for the slowest is not theirs"
    assert max(round.seconds for round in rounds) >= slept[2]


@guarantee(
    "A model that was given to `fully_shard` under PyTorch 2.6 to 2.8 "
    "is refused with the version that it needs, 2.9."
)
def test_what_cannot_be_balanced_is_refused() -> None:
    for partly, moving, hook, old in run_ranks(2, misuse):
        assert "second.weight is not sharded" in partly
        assert "is untested; expected 2.9 or newer" in old
        assert "FSDP needs the same on each" in moving or not BALANCED
        assert "use weigh='loss'" in hook or not BALANCED


def left(rank: int, ranks: int, leaves: bool) -> list[np.ndarray]:
    """The parameters after an epoch whose second round is left after its first micro-step, if it ``leaves``."""
    model = fsdp_jobs.shard(ranks, fresh(torch.float64))
    optimizer, loss_of = optimizer_of(model), torch.nn.CrossEntropyLoss()
    pace = HostedPace(model, BATCH, "equal", loop="pieces", micro_steps=2)
    loader = pace.loader(Samples(COUNT), seed=SEED)
    while pace.epoch < 1:
        for x, y, _ in loader:
            pace.backward(loss_of(model(x), y))
            if leaves and pace.rounds == 1 and not pace.complete:
                leaves = False
                break
            pace.step(optimizer)
        else:
            continue
        pace.load_state_dict(pace.state_dict())
    pace.host.detach()
    return [p.full_tensor().detach().numpy() for p in model.parameters()]  # type: ignore[attr-defined]


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@balanced
def test_round_that_is_left_leaves_no_gradient_in_the_next() -> None:
    for whole, again in zip(run_ranks(3, left, False), run_ranks(3, left, True), strict=True):
        for expected, found in zip(whole, again, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
