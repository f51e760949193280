"""torch's own ways for slow links, on a model that is balanced: compressed gradients, and parameters averaged seldom.

Loads are unlike, and where nothing else is said they are others in each round; the answers come from one process.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import LocalSGD, Merge, Pace
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.ranks import run_cases, run_ranks
from support.scripted import Script
from support.small_net import UNEVEN, Samples, fresh

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("slow links")]

GUARANTEES = (
    "`fp16_compress_hook`, PowerSGD and `PostLocalSGDOptimizer` give what they give on the whole batch.",
    "Waits for other ranks, in any collective of torch or in a communication hook, do not count as a "
    "rank's own seconds.",
)

CASES: dict[str, dict[str, Any]] = {
    "fp16": {"hook": "fp16", "dtype": "float32"},
    "fp16, level": {"hook": "fp16", "dtype": "float32", "forced": True},
    "fp16, claims": {"hook": "fp16", "dtype": "float32", "policy": "factoring"},
    "PowerSGD": {"hook": "power"},
    "PowerSGD, level": {"hook": "power", "forced": True},
    "PowerSGD, claims": {"hook": "power", "policy": "factoring"},
    "PowerSGD, tokens": {"hook": "power", "tokens": True},
    "every step": {"hook": "local", "period": 1, "forced": True},
    "seldom": {"hook": "local", "period": 4, "forced": True},
    "seldom, adam": {"hook": "local", "period": 4, "forced": True, "optimizer": "adam"},
}

COUNT, BATCH, SEED, WARM, STEPS = 83, 16, 5, 2, 18
FORCED = [(2, 2), (3, 3), (11, 11)]  # "level" has no choice then


def base_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


def register(ddp: DistributedDataParallel, hook: str, rank: int) -> None:
    """Give the module this hook, as its user would."""
    if hook == "fp16":
        ddp.register_comm_hook(None, hooks.fp16_compress_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(None, hooks.bf16_compress_hook)
    elif hook == "power":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=WARM, random_seed=11)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif hook == "local":
        ddp.register_comm_hook(PostLocalSGDState(None, None, WARM, False), post_localSGD_hook)


def slow_way(
    rank: int,
    ranks: int,
    hook: str = "",
    steps: int = STEPS,
    dtype: str = "float64",
    optimizer: str = "momentum",
    period: int = 0,
    forced: bool = False,
    tokens: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """This rank's parameters after its steps, and the samples that it ran in each of them."""
    kind = getattr(torch, dtype)
    ddp = DistributedDataParallel(fresh(kind))
    register(ddp, hook, rank)
    used: list[list[int]] = [[] for _ in range(steps)]
    steps_of: Any = base_optimizer(optimizer, ddp.parameters())
    if period:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a period of 1 is of no use but for a test
            steps_of = PostLocalSGDOptimizer(steps_of, PeriodicModelAverager(period, WARM))
    loads: Any = (
        {"limits": FORCED, "policy": "level"} if forced else {"policy": UNEVEN, "limits": [(0, None)] * 3}
    )
    loads |= {"loop": "whole" if forced else "pieces"} | options
    pace = Pace(ddp, BATCH, **loads)
    loader = pace.loader(Samples(COUNT, kind), seed=SEED, drop_last=forced)
    while pace.rounds < steps:
        for x, y, index in loader:
            if pace.counts:
                used[pace.rounds] += index.tolist()
            weights = weights_of(index).to(kind) * (1.0 if pace.counts else 0.0)
            losses = nn.functional.cross_entropy(ddp(x), y, reduction="none")
            if tokens:
                count = weights.sum()
                pace.backward((losses * weights).sum() / count.clamp(min=1.0), count=count)
            elif loads.get("weigh") == "hook":
                losses.mean().backward()
            else:
                pace.backward(losses.mean())
            pace.step(steps_of)
            if pace.rounds == steps:
                break
    pace.host.detach()
    return {"parameters": nn.utils.parameters_to_vector(ddp.parameters()).tolist(), "used": used}


def weights_of(index: torch.Tensor) -> torch.Tensor:
    """How many tokens a sample has."""
    return 1 + index % 5


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    """What each rank has in each case."""
    return run_cases(3, slow_way, CASES)


def rounds(short: bool) -> list[torch.Tensor]:
    """The samples of each round. short: an epoch's last round has fewer."""
    order, found, epoch = Order(COUNT, SEED), list[torch.Tensor](), 0
    while len(found) < STEPS:
        indices = torch.from_numpy(order.epoch(epoch))
        found += [each for each in indices.split(BATCH) if short or len(each) == BATCH]
        epoch += 1
    return found[:STEPS]


def gradients(model: nn.Module, chosen: torch.Tensor, dtype: torch.dtype, tokens: bool = False) -> None:
    """Leave the gradients of these samples' mean loss."""
    data = Samples(COUNT, dtype)
    losses = nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen], reduction="none")
    weights = weights_of(chosen).to(dtype) if tokens else torch.ones_like(losses)
    model.zero_grad()
    ((losses * weights).sum() / weights.sum()).backward()  # type: ignore[no-untyped-call]


def vector(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().numpy()


def off(found: list[dict[str, Any]], expected: np.ndarray) -> float:
    """The largest difference of any rank's parameters."""
    return max(float(np.abs(np.array(each["parameters"]) - expected).max()) for each in found)


def one_process(dtype: torch.dtype, short: bool) -> np.ndarray:
    model = fresh(dtype)
    optimizer = base_optimizer("momentum", model.parameters())
    for chosen in rounds(short):
        gradients(model, chosen, dtype)
        optimizer.step()
    return vector(model)


@pytest.mark.parametrize("case", ["fp16", "fp16, level", "fp16, claims"])
def test_halved_gradients_train_the_model_of_one_process_to_their_rounding(
    case: str, ran: dict[str, list[dict[str, Any]]]
) -> None:
    expected = one_process(torch.float32, "level" not in case)
    found = off(ran[case], expected)
    assert 1e-6 < found < 2e-3, "2^-11 of gradients below 1, in 18 steps with lr 0.1 and momentum 0.9"
    assert ran[case][0]["parameters"] == ran[case][2]["parameters"]


def low_rank(short: bool, tokens: bool = False) -> np.ndarray:
    """PowerSGD in one process: each round's whole gradient and what the round before left out, times an orthonormal
    basis of what it did with the last factor (Vogels et al. 2019, algorithm 1)."""
    model = fresh(torch.float64)
    optimizer = base_optimizer("momentum", model.parameters())
    matrices = [model.second.weight, model.first.weight]  # as DDP has them in its bucket
    with torch.random.fork_rng():
        torch.manual_seed(np.random.RandomState(11).randint(1_000_000_000))
        factors = [torch.randn(1, m.shape[1], 1, dtype=torch.float64)[0].numpy() for m in matrices]
    left = [np.zeros(m.shape) for m in matrices]
    for step, chosen in enumerate(rounds(short)):
        gradients(model, chosen, torch.float64, tokens)
        # under count= all is handed over in units of the batch's samples, and put right behind the hook
        unit = float(weights_of(chosen).sum()) / len(chosen) if tokens else 1.0
        for at, matrix in enumerate(matrices if step >= WARM else ()):
            assert matrix.grad is not None
            whole = unit * matrix.grad.numpy() + left[at]
            basis, _ = np.linalg.qr(whole @ np.linalg.qr(factors[at])[0])
            factors[at] = whole.T @ basis
            given = basis @ factors[at].T
            left[at] = whole - given
            matrix.grad.copy_(torch.from_numpy(given / unit))
        optimizer.step()
    return vector(model)


@pytest.mark.parametrize("case", ["PowerSGD", "PowerSGD, level", "PowerSGD, claims", "PowerSGD, tokens"])
def test_powersgd_gives_what_it_gives_on_the_whole_batch_with_its_errors_fed_back(
    case: str, ran: dict[str, list[dict[str, Any]]]
) -> None:
    expected = low_rank("level" not in case, "tokens" in case)
    assert off(ran[case], expected) < 1e-12
    assert off(ran[case], one_process(torch.float64, "level" not in case)) > 1e-3, "it is an approximation"


def averaged(found: list[dict[str, Any]], optimizer: str, period: int) -> np.ndarray:
    """Post-local SGD in one process: a model for each rank, whose local gradients are weighted by 3 m / B."""
    models = [fresh(torch.float64) for _ in found]
    optimizers = [base_optimizer(optimizer, model.parameters()) for model in models]
    for step in range(STEPS):
        for model, rank in zip(models, found, strict=True):
            gradients(model, torch.tensor(rank["used"][step]), torch.float64)
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= 3 * len(rank["used"][step]) / BATCH
        if step < WARM:
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)  # type: ignore[misc]
                for p in same:
                    p.grad = mean.clone()
        for each in optimizers:
            each.step()
        if step >= WARM and (step - WARM) % period == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([*same]).mean(0)
                    for p in same:
                        p.copy_(mean)
    return np.stack([vector(model) for model in models])


def test_averaging_after_every_step_of_sgd_is_training_in_one_process(
    ran: dict[str, list[dict[str, Any]]],
) -> None:
    assert off(ran["every step"], one_process(torch.float64, short=False)) < 1e-12


@pytest.mark.parametrize("case", ["seldom", "seldom, adam"])
def test_local_steps_between_averages_take_gradients_weighted_by_their_samples(
    case: str, ran: dict[str, list[dict[str, Any]]]
) -> None:
    found = ran[case]
    assert [len(rank["used"][0]) for rank in found] == [2, 3, 11]
    expected = averaged(found, CASES[case].get("optimizer", "momentum"), 4)
    got = np.array([rank["parameters"] for rank in found])
    assert np.abs(got - expected).max() < 1e-12
    assert np.abs(got[0] - got[2]).max() > 1e-4, "ranks part between two averages"


def loads_under(rank: int, ranks: int, hook: str, milliseconds: list[float], rounds: int) -> list[float]:
    """The loads, on average over the second half of the rounds, of ranks that sleep for each sample."""
    ddp = DistributedDataParallel(fresh(torch.float32))
    register(ddp, hook, rank)
    optimizer, last = torch.optim.SGD(ddp.parameters(), lr=0.1), list[list[float]]()
    with Pace(
        ddp, 60, "level", callbacks=[OnRound(lambda result: last.append(result.loads.tolist()))]
    ) as pace:
        for x, y, _ in pace.loader(Samples(60 * rounds, torch.float32), seed=SEED):
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(nn.functional.cross_entropy(ddp(x), y))
            pace.step(optimizer)
    return np.mean(last[rounds // 2 :], axis=0).tolist()


@pytest.mark.parametrize("hook", ["fp16", "power"])
def test_waits_within_a_hook_do_not_count_as_own_time(hook: str) -> None:
    loads = run_ranks(3, loads_under, hook, [5, 5, 20], 12)[0]
    assert sum(loads) == pytest.approx(60)
    assert loads[2] < 10, "an equal load is 20, and its share by speed 6.7"


def refusals(rank: int, ranks: int) -> None:
    bf16, fp16 = (DistributedDataParallel(fresh(torch.float64)) for _ in range(2))
    needs = "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL"
    with pytest.raises(TypeError, match=f"^{re.escape(needs)}$"):  # torch's own sentence
        register(bf16, "bf16", rank)
    register(fp16, "fp16", rank)
    words = (
        "weigh='hook' needs DistributedDataParallel's one communication hook, and the model has "
        "fp16_compress_hook already; use weigh='loss', which needs none"
    )
    with pytest.raises(PacelineError, match=f"^{re.escape(words)}$"):
        Pace(fp16, BATCH, "level", weigh="hook")


@guarantee('`bf16_compress_hook` over gloo, and your own hook beside `weigh="hook"`, raise one error.')
def test_unsupported_comm_hook_raises() -> None:
    run_ranks(2, refusals)


def own_data(rank: int, ranks: int, by: str) -> float:
    """Where a number ends that rank 0 pulls to 0 in 8 steps, and rank 1 to 1 in 2, if merges are weighed so."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with LocalSGD(model, 2, Script(((4.0, 1.0),)), every=5, merge=Merge(by=by)) as pace:
        for (x,) in pace.stream([(torch.ones(1, dtype=torch.float64),)] * 4000):
            pace.backward((model(x) - float(rank)).square().mean() / 2)
            pace.step(optimizer)
            if pace.rounds == 100:  # 0.905^100 of the way is left
                break
    return float(model.weight)


def test_merges_of_own_data_lean_to_ranks_with_more_steps() -> None:
    """A change grows with the steps that it took, and its weight comes on top: docs/local.md tells users so."""
    shares, steps = {"samples": (8, 2), "steps": (8, 2), "ranks": (1, 1)}, (8, 2)
    moved = [1 - 0.98**each for each in steps]  # towards a rank's own optimum, in an interval
    found = run_cases(2, own_data, {by: {"by": by} for by in shares})
    for by, ends in found.items():
        pulls = [weight * part for weight, part in zip(shares[by], moved, strict=True)]
        assert ends == pytest.approx([pulls[1] / sum(pulls)] * 2, abs=1e-3)
    # exact training of the same samples ends at 2 of 10
    assert found["ranks"] == pytest.approx([0.2] * 2, abs=0.02)
    assert max(found["samples"] + found["steps"]) < 0.08
