"""torch's own ways for slow links, on a model that is balanced: compressed gradients, and parameters averaged seldom.

Loads are unlike, and where nothing else is said they are others in each round; the answers come from one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.slow_jobs import (
    BATCH,
    COUNT,
    SEED,
    STEPS,
    WARM,
    base_optimizer,
    loads_under,
    own_data,
    refusals,
    slow_ways,
    weights_of,
)
from support.torch_jobs import Samples, fresh

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


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    """What each rank has in each case."""
    ranks = run_ranks(3, slow_ways, list(CASES.values()))
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(CASES)}


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


@pytest.mark.parametrize("hook", ["fp16", "power"])
def test_waits_within_a_hook_are_not_taken_for_a_ranks_own_time(hook: str) -> None:
    loads = run_ranks(3, loads_under, hook, [2, 2, 8], 12)[0]
    assert sum(loads) == 60
    assert loads[2] < 10, "an equal load is 20, and its share by speed 6.7"


@guarantee('`bf16_compress_hook` over gloo, and your own hook beside `weigh="hook"`, raise one error.')
def test_what_cannot_be_had_is_said_in_a_sentence() -> None:
    needs = "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL"
    for told in run_ranks(2, refusals):
        assert told["bf16 on gloo"] == f"TypeError: {needs}", "torch's own sentence"
        assert told["two hooks"] == (
            "PacelineError: weigh='hook' needs DistributedDataParallel's one communication hook, and the model has "
            "fp16_compress_hook already; use weigh='loss', which needs none"
        )


def test_where_each_rank_has_its_own_data_merges_lean_to_those_who_step_more() -> None:
    """A change grows with the steps that it took, and its weight comes on top: docs/local.md tells users so."""
    shares, steps = {"samples": (8, 2), "steps": (8, 2), "ranks": (1, 1)}, (8, 2)
    moved = [1 - 0.98**each for each in steps]  # towards a rank's own optimum, in an interval
    for ends in run_ranks(2, own_data, list(shares)):
        for end, weights in zip(ends, shares.values(), strict=True):
            pulls = [weight * part for weight, part in zip(weights, moved, strict=True)]
            assert end == pytest.approx(pulls[1] / sum(pulls), abs=1e-3)
        # exact training of the same samples ends at 2 of 10
        assert ends[2] == pytest.approx(0.2, abs=0.02)
        assert max(ends[:2]) < 0.08
