"""Every sample is used exactly once an epoch, whatever the split, the loader and the stops."""

from __future__ import annotations

import io
import multiprocessing
import random
import time
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.hosts.accumulating import HostedPace
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.progress import Progress
from support.guarantees import guarantee
from support.often import some
from support.ranks import run_cases, run_ranks
from support.scripted import Script
from support.small_net import CLASSES, UNEVEN, Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes

CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "micro-batches": {"micro_batch": 2},
    "prefetching by 1": {"loader_workers": 1, "micro_batch": 4},
    "prefetching by 4": {"loader_workers": 4},
    "in order": {"shuffle": False},
    "quantum": {"quantum": 4, "count": 84},
    "last batch smaller than the ranks": {"count": 34},
    "batch norm": {"count": 33, "norm": True},
    "equal micro-steps": {"micro_steps": 4},
    "equal micro-steps, batch norm": {"micro_steps": 3, "norm": True, "fill": True},
    "measured": {"policy": "level", "limits": None},
}


PULLED = {"policy": "factoring", "batch": 48, "count": 120, "jitter": 4e-4, "limits": None}
CLAIMED: dict[str, dict[str, Any]] = {
    "in the main process": {},
    "prefetching by 1": {"loader_workers": 1, "micro_batch": 7},
    "prefetching by 4": {"loader_workers": 4},
    "batch norm": {"count": 97, "norm": True},
    "batch norm, micro-batches": {"norm": True, "micro_batch": 5},
    "batch norm, prefetching by 2": {"norm": True, "loader_workers": 2, "count": 97},
    "fewer samples than a batch": {"count": 31},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=4"},
}
CASES |= {f"claimed, {name}": PULLED | case for name, case in CLAIMED.items()}
CASES = some(
    CASES,
    *("prefetching by 4", "equal micro-steps, batch norm", "claimed, prefetching by 4"),
    *("claimed, batch norm, micro-batches", "claimed, batch norm, prefetching by 2"),
)


def indices_used(
    rank: int,
    ranks: int,
    count: int = 83,
    batch: int = 16,
    loader_workers: int = 0,
    shuffle: bool = True,
    norm: bool = False,
    jitter: float = 0.0,
    **options: Any,
) -> list[list[int]]:
    """For each of 2 epochs, the sample indices that this rank was given."""
    model: nn.Module = fresh(torch.float64)
    if norm:
        model = nn.Sequential(model, nn.BatchNorm1d(CLASSES).double())
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    options.setdefault("limits", [(0, None)] * 3)
    pace = HostedPace(ddp, batch, options.pop("policy", UNEVEN), **({"loop": "pieces"} | options))
    loader = pace.loader(Samples(count), seed=5, shuffle=shuffle, num_workers=loader_workers)
    epochs = []
    stalls = random.Random(rank)
    for _ in range(2):
        used = []
        for x, y, index in loader:
            time.sleep(jitter * stalls.expovariate(1.0))
            if pace.counts:
                used += index.tolist()
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        epochs.append(used)
    rounds = count // batch if norm and count % batch == 1 else -(-count // batch)
    assert pace.rounds == 2 * rounds
    assert all(torch.isfinite(p).all() for p in model.parameters())
    pace.host.detach()
    assert not multiprocessing.active_children()  # the loader's processes have ended with it
    return epochs


def test_each_sample_runs_once_an_epoch() -> None:
    for name, ranks in run_cases(3, indices_used, CASES).items():
        epochs = [list(chain(*parts)) for parts in zip(*ranks, strict=True)]
        for used in epochs:
            assert sorted(used) == list(range(CASES[name].get("count", 83))), name
        if CASES[name].get("shuffle", True):
            assert ranks[0][0] != ranks[0][1], f"{name}: the order repeats"
            assert epochs[0] != sorted(epochs[0]), name


@given(
    samples=st.integers(1, 200),
    size=st.integers(1, 20),
    min_samples=st.integers(1, 3),
    done=st.integers(0, 200),
)
def test_epoch_has_as_many_rounds_as_its_length(samples: int, size: int, min_samples: int, done: int) -> None:
    progress = Progress(size, min_samples, size)
    progress.samples, progress.samples_done = samples, min(done, samples)
    rounds = list(progress.remaining())
    assert len(rounds) == progress.left
    assert sum(size for _, size in rounds) == samples - progress.samples_done


def part_of_an_epoch(
    rank: int, ranks: int, steps: int, saved: bytes | None, loader_workers: int, policy: Any = "level"
) -> dict[str, Any]:
    """Train up to ``steps`` rounds in all (or the end of the epoch) from what another call saved."""
    state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    model = fresh(torch.float64)
    if state is not None:
        model.load_state_dict(state["model"])
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    results: list[RoundResult] = []
    pace = Pace(ddp, 16, policy, loop="pieces", callbacks=[OnRound(results.append)])
    loader = pace.loader(Samples(83), seed=5, num_workers=loader_workers)
    if state is not None:
        pace.load_state_dict(state["pace"])
    used = []
    for x, y, index in loader:
        used += index.tolist()
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
        if pace.rounds == steps:
            break
    buffer = io.BytesIO()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pace": pace.state_dict()}
    torch.save(parts, buffer)
    saved = buffer.getvalue()
    pace.close()
    loads = [result.loads.tolist() for result in results]
    return {"used": used, "saved": saved, "loads": loads, "rounds": pace.rounds}


@pytest.mark.parametrize(
    ("loader_workers", "then", "policy"),
    [(0, 3, "level"), (0, 2, "level"), (2, 3, "level"), (2, 2, "level"), (0, 2, "auto")],
)
def test_resumed_epoch_runs_the_remaining_samples_once(loader_workers: int, then: int, policy: str) -> None:
    before = run_ranks(3, part_of_an_epoch, 2, None, loader_workers, policy)
    after = run_ranks(then, part_of_an_epoch, 99, before[0]["saved"], loader_workers, policy)
    used = list(chain.from_iterable(part["used"] for part in before + after))
    assert sorted(used) == list(range(83))
    assert {part["rounds"] for part in after} == {6}


@guarantee(
    "A resumed run continues with the same plans and samples; a state that does not fit raises and changes "
    "nothing."
)
def test_resumed_run_divides_as_an_unbroken_one() -> None:
    policy = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9), (7, 1, 4), (2, 1, 1)))
    whole = run_ranks(3, part_of_an_epoch, 99, None, 0, policy)
    before = run_ranks(3, part_of_an_epoch, 3, None, 0, policy)
    after = run_ranks(3, part_of_an_epoch, 99, before[0]["saved"], 0, policy)
    assert before[0]["loads"] + after[0]["loads"] == whole[0]["loads"]
    expected, found = (
        torch.load(io.BytesIO(part[0]["saved"]), weights_only=True)["model"] for part in (whole, after)
    )
    # Within rounding: DDP orders its buckets by the first round that it sees, and so the sums of all later ones.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
