"""``loss.backward()`` in place of ``pace.backward(loss)``, or beside it, raises before a step takes what it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.feed.pieces import Order
from support.ranks import run_cases
from support.sharding import possible, sharded_over, whole
from support.small_net import TWO, Samples, difference, fresh, optimizer_of

GUARANTEES = (
    "A loss that bypasses DDP or `pace.backward`, as with `model(x)`, `no_sync()` or `loss.backward()`, "
    "raises before a step.",
)
ROUNDS, BATCH = 20, 16  # rounds of an epoch, more than are looked at; and samples of a round


@pytest.mark.parametrize("by", ["pace.step", "optimizer.step"])
def test_no_step_is_taken(by: str) -> None:
    model = fresh(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, pace = optimizer_of(model), Pace(model, 16)

    def train() -> None:
        for x, y, _ in pace.loader(Samples(48)):
            nn.functional.cross_entropy(model(x), y).backward()
            if by == "pace.step":
                pace.step(optimizer)
            else:
                optimizer.step()

    with pytest.raises(PacelineError, match=r"pace\.backward\(loss\)"):
        train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    pace.host.detach()


class Turn(NamedTuple):
    """What a micro-step of a loop has at hand. model: the module whose forward pass leads to the losses."""

    pace: Pace
    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    y: torch.Tensor

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.x), self.y)

    def other(self) -> torch.Tensor:
        out: torch.Tensor = self.model(-self.x)
        return out.square().mean()


Passes = Callable[[Turn], object]


def after(turn: Turn) -> None:
    turn.pace.backward(turn.loss())
    turn.other().backward()


def before(turn: Turn) -> None:
    turn.other().backward()
    turn.pace.backward(turn.loss())


def before_onto_zeros(turn: Turn) -> None:
    turn.optimizer.zero_grad(set_to_none=False)
    before(turn)


def second_of_two(turn: Turn) -> None:
    """As for SAM, whose first gradients are not those of the step."""
    turn.pace.backward(turn.loss())
    turn.optimizer.zero_grad()
    turn.loss().backward()


def after_from_the_third_epoch_on(turn: Turn) -> None:
    turn.pace.backward(turn.loss())
    if turn.pace.epoch == 2:
        turn.other().backward()


WRONG: dict[Passes, int] = {  # and the round of the first mistake
    after: 0,
    before: 0,
    before_onto_zeros: 0,
    second_of_two: 0,
    after_from_the_third_epoch_on: 2 * ROUNDS,
}


def epochs(passes: Passes, by: str, model: nn.Module, *given: Any) -> int:
    """Train for three epochs; returns the number of rounds. given: further arguments of Pace."""
    optimizer = optimizer_of(model)
    optimizer.zero_grad(set_to_none=False)
    pace = Pace(model, BATCH, *given)
    try:
        for _ in range(3):
            for x, y, _ in pace.loader(Samples(ROUNDS * BATCH), seed=5):
                passes(Turn(pace, model, optimizer, x, y))
                if by == "pace.step":
                    pace.step(optimizer)
                else:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=by == "optimizer.step")
        return pace.rounds
    finally:
        pace.host.detach()


@pytest.mark.parametrize("by", ["pace.step", "optimizer.step", "zeroed in place"])
@pytest.mark.parametrize(("passes", "step"), WRONG.items())
def test_pass_without_a_weight_beside_a_weighted_one_raises(passes: Passes, step: int, by: str) -> None:
    with pytest.raises(PacelineError, match=rf"^round {step}: a loss\.backward\(\) without a weight"):
        epochs(passes, by, fresh(torch.float64))


def weighted_twice(turn: Turn) -> None:
    turn.pace.backward(turn.loss())
    turn.pace.weighted(turn.other()).backward()


def weighted_before_another_forward_pass(turn: Turn) -> None:
    other = turn.pace.weighted(turn.other())
    loss = turn.loss()
    other.backward()
    turn.pace.backward(loss)


def zeroed_after_a_trial(turn: Turn) -> None:
    turn.loss().backward()
    turn.optimizer.zero_grad()
    turn.pace.backward(turn.loss() + turn.other())


def zeroed_in_place_after_a_trial(turn: Turn) -> None:
    turn.loss().backward()
    turn.optimizer.zero_grad(set_to_none=False)
    turn.pace.backward(turn.loss() + turn.other())


def evaluated_after_the_pass(turn: Turn) -> None:
    turn.pace.backward(turn.loss() + turn.other())
    turn.model(turn.x)


def recomputed(turn: Turn) -> None:
    out: Any = checkpoint(turn.model, turn.x, use_reentrant=False)
    turn.pace.backward(nn.functional.cross_entropy(out, turn.y) + turn.other())


RIGHT: tuple[Passes, ...] = (
    weighted_twice,
    weighted_before_another_forward_pass,
    zeroed_after_a_trial,
    zeroed_in_place_after_a_trial,
    evaluated_after_the_pass,
    recomputed,
)


def expected() -> list[torch.Tensor]:
    """The parameters of one process whose objective is the sum of both losses."""
    model, data = fresh(torch.float64), Samples(ROUNDS * BATCH)
    optimizer = optimizer_of(model)
    for epoch in range(3):
        for chosen in torch.from_numpy(Order(len(data), 5).epoch(epoch)).split(BATCH):
            turn = Turn(None, model, optimizer, data.x[chosen], data.y[chosen])  # type: ignore[arg-type]
            (turn.loss() + turn.other()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("by", ["pace.step", "optimizer.step", "zeroed in place"])
@pytest.mark.parametrize("passes", RIGHT)
def test_passes_with_weights_or_zeroed_again_train_the_same_model(passes: Passes, by: str) -> None:
    model = fresh(torch.float64)
    assert epochs(passes, by, model) == 3 * ROUNDS
    assert difference(model.parameters(), expected()) < 1e-12


def on_a_rank(rank: int, ranks: int, passes: Passes, sharded: bool) -> tuple[str, list[Any]]:
    """The error message, or the parameters, under FSDP2 (``sharded``) or DDP."""
    net = fresh(torch.float64)
    model = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    try:
        epochs(passes, "pace.step", model, TWO)
    except PacelineError as error:
        return str(error), []
    return "", [p.tolist() for p in map(whole, model.parameters())]


@pytest.mark.processes
def test_pass_without_a_weight_raises_on_each_rank() -> None:
    cases: dict[str, dict[str, Any]] = {
        f"{passes.__name__}, sharded={sharded}": {"passes": passes, "sharded": sharded}
        for passes in (*WRONG, weighted_twice)
        for sharded in (False, True)
    }
    for name, ranks in run_cases(2, on_a_rank, possible(cases)).items():
        step = WRONG.get(cases[name]["passes"])
        for said, parameters in ranks:
            if step is None:
                assert said == "", name
                assert difference(parameters, expected()) < 1e-12, name
            else:
                assert said.startswith(f"round {step}: a loss.backward() without a weight"), name
