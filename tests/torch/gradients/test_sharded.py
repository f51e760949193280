"""FSDP2 with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from support import hosts
from support.guarantees import guarantee
from support.hosts import (
    BATCH,
    COUNT,
    EPOCHS,
    FREE,
    SEED,
    UNEVEN,
    Samples,
    difference,
    every_sample_once,
    fresh,
    optimizer_of,
    whole_batch,
)
from support.ranks import run_ranks
from support.sharding import BALANCED, NEEDED, sharded_over, whole

pytestmark = pytest.mark.processes

balanced = pytest.mark.skipif(not BALANCED, reason="PyTorch before 2.9: pip install 'torch>=2.9'")

CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "accumulated and clipped": {"clip": 0.05, "micro_batch": 4},
    "stopped and resumed": {"steps": 4},
    "bfloat16": {"dtype": "float32", "mixed": True},
}


def train(
    ranks: int,
    dtype: str = "float64",
    mixed: bool = False,
    clip: float | None = None,
    until: int = -1,
    save: str | None = None,
    load: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    lower = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    model = sharded_over(fresh(kind), ranks, **lower)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    pace = Pace(
        model,
        BATCH,
        **{"policy": UNEVEN, "limits": FREE[:ranks], "loop": "pieces", "callbacks": [OnRound(results.append)]}
        | options,
    )
    loader = pace.loader(Samples(COUNT, kind), seed=SEED)

    def parts() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "pace": json.dumps(pace.state_dict())}

    if load is not None:
        loaded = parts()
        dcp.load(loaded, checkpoint_id=load)
        pace.load_state_dict(json.loads(loaded["pace"]))
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
    used: list[list[int]] = []
    while pace.epoch < EPOCHS and pace.rounds != until:
        used.append([])
        for x, y, index in loader:
            if pace.counts:
                used[-1] += index.tolist()
            out = model(x)
            pace.backward(loss_of(out.float() if mixed else out, y))
            if pace.complete and clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if pace.step(optimizer) and pace.rounds == until:
                break
    if save is not None:
        dcp.save(parts(), checkpoint_id=save)
    pace.host.detach()
    found = [whole(p).tolist() for p in model.parameters()]
    loads = [result.loads.tolist() for result in results]
    return {"used": used, "parameters": found, "loads": loads, "kind": str(out.dtype)}


def trained(rank: int, ranks: int, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case, as ``hosts.stopped_and_resumed`` has it."""
    return hosts.stopped_and_resumed(train, ranks, folder, cases)


@balanced
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp_trains_the_model_of_one_process(ranks: int, tmp_path: Path) -> None:
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


def measured(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """Rounds of ranks that sleep for each sample, in the forward pass between the layers' collectives."""
    model = sharded_over(fresh(torch.float64), ranks)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()

    def slow(_: Any, inputs: tuple[torch.Tensor]) -> None:
        time.sleep(milliseconds[rank] * len(inputs[0]) / 2e3)

    for layer in (model.first, model.second):
        layer.register_forward_pre_hook(slow)
    results: list[RoundResult] = []
    pace = Pace(model, 60, "equal", callbacks=[OnRound(results.append)])
    for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
        pace.backward(loss_of(model(x), y))
        pace.step(optimizer)
    pace.host.detach()
    return results


@balanced
def test_fsdp_seconds_leave_out_the_collectives_of_layers() -> None:
    milliseconds = [1.0, 1.0, 20.0]  # on one busy core, each layer may wait for the processor for long
    rounds = run_ranks(3, measured, milliseconds, 6)[0]
    slept = np.array(milliseconds) * 20 / 1e3  # each rank has 20 of the 60 samples
    best = np.min([round.compute for round in rounds], axis=0)  # the machine may be busy
    assert (best >= slept).all()
    assert (best[:2] < 0.7 * best[2]).all(), f"{best}: the wait for the slowest is not theirs"
    assert max(round.seconds for round in rounds) >= slept[2]


def misuse(rank: int, ranks: int) -> None:
    """Models and options that cannot be balanced; at last a PyTorch that is too old."""
    partly, both = fresh(torch.float64), sharded_over(fresh(torch.float64), ranks)
    fully_shard(partly.first, mesh=init_device_mesh("cpu", (ranks,)))
    with pytest.raises(PacelineError, match=r"second\.weight is not sharded"):
        Pace(partly, BATCH)
    if BALANCED:
        with pytest.raises(PacelineError, match="FSDP needs the same on each"):
            Pace(both, BATCH, policy="factoring")
        with pytest.raises(PacelineError, match="use weigh='loss'"):
            Pace(both, BATCH, weigh="hook")
        delattr(FSDPModule, NEEDED)
    with pytest.raises(PacelineError, match=r"is untested; expected 2\.9 or newer"):
        Pace(both, BATCH)


@guarantee(
    "A model that was given to `fully_shard` under PyTorch 2.6 to 2.8 "
    "is refused with the version that it needs, 2.9."
)
def test_unsupported_sharding_raises() -> None:
    run_ranks(2, misuse)


def left(rank: int, ranks: int, leaves: bool) -> list[np.ndarray]:
    """The parameters after an epoch whose second round is left after its first micro-step, if it ``leaves``."""
    model = sharded_over(fresh(torch.float64), ranks)
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
    return [whole(p).numpy() for p in model.parameters()]


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@balanced
def test_round_that_is_left_leaves_no_gradient_in_the_next() -> None:
    for one, again in zip(run_ranks(3, left, False), run_ranks(3, left, True), strict=True):
        for expected, found in zip(one, again, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
