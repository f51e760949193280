"""Merges in one process, with the sums that other ranks would have added: changes, tables, projections, counters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch import Merge, peers
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.local_merge import HEAD, Flats, Merges, change, read
from paceline.torch.local_projection import APART, COLUMNS, Projection
from paceline.torch.members import Ranks


@pytest.mark.parametrize(
    ("weights", "most"),
    [((2.0, 1.0, 0.0, 0.0), 4.0), ((0.0, 0.0, 0.0, 0.0), 7.0)],
    ids=["ranks with a weight", "ranks that are present, if none has a weight"],
)
def test_counter_is_the_largest_of_the_ranks_that_count(weights: tuple[float, ...], most: float) -> None:
    model = torch.nn.BatchNorm1d(2).double()
    members: Any = SimpleNamespace(chief=True)
    merges = Merges(model, Merge(), Ranks(Reducer(), members))
    merges.begin()
    projected = merges._projection.of(merges.base[:2])
    counters, present = (3.0, 4.0, 7.0, 9.0), (1.0, 1.0, 1.0, 0.0)  # the last rank is lost
    table = [
        [here, weight, *(projected if here else (0.0, 0.0)), 0.1 * here, counter]
        for here, weight, counter in zip(present, weights, counters, strict=True)
    ]
    merges.apply(0, [torch.zeros(8, dtype=torch.float64), torch.tensor(table, dtype=torch.float64)])
    assert float(model.num_batches_tracked) == most
    merges.close()


def merges(model: torch.nn.Module, chief: bool = True, **options: Any) -> Merges:
    members: Any = SimpleNamespace(chief=chief)
    return Merges(model, Merge(**options), Ranks(Reducer(), members))


def line(*weights: float) -> torch.nn.Linear:
    """A model of one parameter, shape (1, n), in float64."""
    model = torch.nn.Linear(len(weights), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def sgd(model: torch.nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def test_change_is_before_minus_now_and_zero_for_equal_infinities() -> None:
    inf = torch.inf
    found = change(torch.tensor([3.0, inf, -inf, inf]), torch.tensor([1.0, inf, -inf, 1.0]))
    assert found.tolist() == [2.0, 0.0, 0.0, inf]


def test_changes_of_several_precisions_come_back_in_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ranks", lambda: 3)
    monkeypatch.setattr(peers, "rank", lambda: 1)
    before = [torch.ones(2, 2), torch.ones(3, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)]
    now = [
        torch.zeros(2, 2),
        torch.full((3,), 0.5, dtype=torch.float64),
        torch.zeros(1, dtype=torch.bfloat16),
    ]
    flats = Flats()
    flats.fill(before, now, 4.0, [1.0, 4.0])
    assert [(flat.dtype, flat.numel()) for flat in flats.own] == [
        (torch.float32, 5),
        (torch.float64, 3),
        (torch.float64, 6),
    ]
    works = flats.finish(lambda flat: flat.mul_(2))  # as if another rank had the same
    assert len(works) == 3
    assert flats.own[0].tolist() == [4.0] * 5  # a copy was summed
    flats.apply([])
    changes, table = read(flats.own, now)
    assert [each.tolist() for each in changes] == [[[8.0, 8.0], [8.0, 8.0]], [4.0, 4.0, 4.0], [8.0]]
    assert table.tolist() == [[0.0, 0.0], [2.0, 8.0], [0.0, 0.0]]
    flats.fill([], [], 1.0, [1.0])
    assert [flat.tolist() for flat in flats.own] == [[[0.0], [1.0], [0.0]]]


def test_projection_is_the_sum_over_places_and_the_norm_of_all() -> None:
    """By a loop over all elements, of tensors below, at and beyond a row of columns."""
    parameters = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        for shape in ((2, 3), (COLUMNS,), (2 * COLUMNS + 5,), (0,))
    ]
    projection = Projection(parameters)
    total = square = 0.0
    for each, parameter in enumerate(parameters):
        for place, element in enumerate(parameter.flatten().tolist()):
            row, column = divmod(place, 1024)
            factor = projection._each[each] * projection._rows[row] * projection._columns[column]
            total += float(factor) * element
            square += element**2
    number, norm = projection.of(parameters)
    assert number == pytest.approx(total, rel=1e-12)
    assert norm == pytest.approx(square**0.5, rel=1e-12)
    for factors in (projection._each, projection._rows, projection._columns):
        assert ((factors >= 1) & (factors < 2)).all()
    assert len(projection._columns) == 1024
    assert projection._each.tolist() == Projection(parameters)._each.tolist()  # the same on all ranks


def test_projections_apart_by_more_than_rounding_name_the_ranks() -> None:
    present = torch.tensor([True, True, True, False, True])
    norms = torch.tensor([2.0, 2.0, 2.0, 0.0, 2.0])
    single, half = Projection([torch.zeros(3)]), Projection([torch.zeros(3, dtype=torch.bfloat16)])
    near = torch.tensor([5.0, 5.0 + 1.9e-5, 5.0, 0.0, 5.0 - 1.9e-5], dtype=torch.float64)
    single.check_alike(3, present, near, norms)
    far = torch.tensor([5.0, 5.0 + 2.2e-5, 5.0, 0.0, 5.0 - 2.2e-5], dtype=torch.float64)
    with pytest.raises(PacelineError, match="interval 3 began with other parameters on rank 1, 4; expected"):
        single.check_alike(3, present, far, norms)
    half.check_alike(3, present, far, norms)  # bfloat16 has an eps of 2^-7
    assert APART == 1e-5
    single.check_alike(3, present, torch.full((5,), torch.nan), norms)
    one = torch.tensor([5.0, torch.nan, 5.0, 0.0, 5.0])
    with pytest.raises(PacelineError, match="on rank 1; expected"):
        single.check_alike(3, present, one, norms)


@pytest.mark.parametrize(("by", "weight"), [("samples", 3 / 8), ("steps", 2.0), ("ranks", 1.0)])
def test_weight_of_a_change_is_its_samples_steps_or_one(by: str, weight: float) -> None:
    model = line(1.0, 2.0)
    local = merges(model, by=by)
    local.begin()
    for many in (2.0, 1.0, 0.0):
        local.took(many)
    with torch.no_grad():
        model.weight.sub_(0.5)
    local.fill(8, [sgd(model, 0.25)])
    flat, table = local.flats.own
    assert flat.tolist() == [0.5 * weight] * 2
    number, norm = local._projection.of([torch.tensor([[1.0, 2.0]], dtype=torch.float64)])
    assert table.tolist() == [[1.0, weight, number, norm, 0.25]]
    assert len(table[0]) == HEAD
    local.begin()
    local.fill(8, [sgd(model)])
    assert local.flats.own[0].tolist() == [0.0, 0.0]
    assert local.flats.own[1][0, 1] == 0.0  # no step was taken
    local.close()


def row(local: Merges, weight: float, present: float = 1.0, lr: float = 0.5, *counters: float) -> list[float]:
    return [present, weight, *local._projection.of(local.base[: len(local._parameters)]), lr, *counters]


def test_merge_is_the_weighted_mean_of_the_changes() -> None:
    """Ranks of weights 1 and 3 changed by 1 and -1: the mean change is -0.5, taken from where all began."""
    model = line(1.0, 2.0)
    local = merges(model)
    local.begin()
    with torch.no_grad():
        model.weight.fill_(9.0)
    summed = torch.tensor([1.0 * 1 + 3.0 * -1, 0.0], dtype=torch.float64)
    table = torch.tensor([row(local, 1.0), row(local, 3.0)], dtype=torch.float64)
    local.apply(0, [summed, table])
    assert model.weight.tolist() == [[1.5, 2.0]]
    assert model.weight.grad is None
    local.begin()
    with torch.no_grad():
        model.weight.fill_(9.0)
    table = torch.tensor([row(local, 0.0), row(local, 0.0)], dtype=torch.float64)
    local.apply(1, [torch.zeros(2, dtype=torch.float64), table])
    assert model.weight.tolist() == [[1.5, 2.0]]  # nobody's change counts
    local.close()


def test_nesterov_moves_by_its_rate_and_momentum() -> None:
    """DiLoCo: lr 0.7 and momentum 0.9; a first step of 0.7 (g + 0.9 g) from 1.0 with g = 0.5."""
    model = line(1.0)
    local = merges(model, outer="nesterov")
    local.begin()
    local.apply(0, [torch.tensor([0.5], dtype=torch.float64), torch.tensor([row(local, 1.0)]).double()])
    assert model.weight.item() == pytest.approx(1.0 - 0.7 * 1.9 * 0.5)
    state = local.outer_state()
    other = merges(line(1.0), outer="nesterov")
    assert other.outer_state() == {}
    other.load_outer(state)
    assert other.outer_state()["state"][0]["momentum_buffer"].tolist() == [[0.5]]
    other.load_outer({})
    assert other.outer_state() == {}
    for each in (local, other):
        each.close()


def test_learning_rates_that_differ_warn_once_and_only_on_one_rank() -> None:
    for chief, rates, warns in (
        (True, (0.5, 0.25), True),
        (False, (0.5, 0.25), False),
        (True, (0.5, 0.5), False),
        (True, (0.5, float("nan")), False),
    ):
        model = line(1.0)
        local = merges(model, chief)
        for step in range(2):
            local.begin()
            table = torch.tensor([row(local, 1.0, lr=rate) for rate in rates], dtype=torch.float64)
            sums = [torch.zeros(1, dtype=torch.float64), table]
            if warns and not step:
                with pytest.warns(
                    RuntimeWarning, match=r"merge of interval 0 with learning rates from 0\.25 to 0\.5"
                ):
                    local.apply(step, sums)
            else:
                local.apply(step, sums)
        local.close()


def test_interval_that_is_left_restores_parameters_buffers_and_optimizers() -> None:
    model = torch.nn.BatchNorm1d(2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    local = merges(model)
    local.begin()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(4, 2, dtype=torch.float64)).square().sum().backward()
    with local.steps([optimizer]):
        assert local.stepping
        optimizer.step()
    assert not local.stepping
    optimizer.param_groups[0]["lr"] = 0.125
    assert int(model.num_batches_tracked) == 1
    local.back()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.125  # an option stays
    with torch.no_grad():
        model.weight.fill_(7.0)
    local.back()  # no interval is running
    assert model.weight.tolist() == [7.0, 7.0]
    local.close()


def test_buffers_that_steps_change_in_shape_or_kind_raise() -> None:
    model = line(1.0)
    model.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("mean", torch.zeros(2))
    local = merges(model)
    local.begin()
    local.fill(1, [])
    assert torch.isnan(local.flats.own[-1][0, 4])  # no learning rate
    assert local.flats.own[-1].shape == (1, HEAD)  # only single whole numbers are counters
    model.table[1] = 4
    with pytest.raises(PacelineError, match="buffer table holds 3 whole numbers that a rank's steps change"):
        local.fill(1, [])
    model.table[1] = 0
    model.mean = torch.zeros(3)
    with pytest.raises(PacelineError, match=r"buffer mean had the shape \(2,\) and has \(3,\) now"):
        local.fill(1, [])
    model.mean = torch.zeros(2)
    model.register_buffer("own", torch.zeros(2), persistent=False)
    local.fill(1, [])
    model.register_buffer("new", torch.zeros(2))
    with pytest.raises(PacelineError, match="buffer new has appeared since LocalSGD was made"):
        local.fill(1, [])
    local.close()
    with pytest.raises(PacelineError, match="the model has complex numbers"):
        merges(torch.nn.ParameterList([torch.zeros(1, dtype=torch.complex64)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_frozen_parameter_that_changes_within_an_interval_raises(dtype: torch.dtype) -> None:
    model = line(1.0)
    model.target = torch.nn.Parameter(torch.ones(2, 3).to(dtype).t(), requires_grad=False)
    model.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    local = merges(model)
    local.begin()
    local.fill(1, [])
    model.target.data[1, 1] = 2
    with pytest.raises(PacelineError, match="parameter target requires no gradient and was changed"):
        local.fill(1, [])
    local.begin()  # changed between two intervals
    local.fill(1, [])
    assert local.flats.own[-1].shape == (1, HEAD + 2)
    local.apply(0, local.flats.own)
    local.close()


def test_frozen_parameter_of_a_single_rank_may_change() -> None:
    model = line(1.0)
    model.target = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    alone: Any = Summing(0.0)
    local = Merges(model, Merge(), Ranks(Reducer(), SimpleNamespace(chief=True), alone))  # type: ignore[arg-type]
    local.begin()
    model.target.data.fill_(3.0)
    local.fill(1, [])
    assert local.flats.own[-1].shape == (1, HEAD)
    local.close()


def test_buffers_are_merged_without_the_outer_optimizer() -> None:
    model = line(1.0)
    model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    local = merges(model, outer="nesterov")
    local.begin()
    model.mean.fill_(3.0)  # this rank's own
    summed = torch.tensor([0.0, -4.0, 8.0], dtype=torch.float64)
    table = torch.tensor([row(local, 1.0), row(local, 3.0)], dtype=torch.float64)
    local.apply(0, [summed, table])
    assert model.mean.tolist() == [1.0, -2.0]
    local.close()


class Summing:
    """Sums with a rank whose change is ``other``, and whose weight is 1."""

    def __init__(self, other: float) -> None:
        self.other = other
        self.forgot = 0

    def connect(self, merge: Any) -> None: ...

    def close(self) -> None: ...

    def forget(self) -> None:
        self.forgot += 1

    def summing(self, send: Any) -> Callable[[list[torch.Tensor]], None]:
        return self._add

    def _add(self, own: list[torch.Tensor]) -> None:
        own[0].add_(self.other)
        own[-1][0, 1] += 1.0


def delayed(model: torch.nn.Module, other: float) -> tuple[Merges, Summing]:
    summing, members = Summing(other), SimpleNamespace(chief=True)
    ranks = Ranks(Reducer(), members, summing)  # type: ignore[arg-type]
    return Merges(model, Merge(by="ranks", delay=1), ranks), summing


def test_delayed_merge_keeps_the_changes_that_are_on_their_way() -> None:
    """b' = b - mean c(t), and the rank continues from b' - c(t+1); the other rank's changes are always 0.5."""
    model = line(8.0)
    local, _ = delayed(model, 0.5)

    def interval(step: int, now: float) -> None:
        local.begin()
        with local.steps(), torch.no_grad():
            model.weight.fill_(now)
        local.took(1.0)
        local.fill(1, [sgd(model)])
        local.send(whole=False)
        local.take_in(step, most=1)

    interval(0, 7.0)  # c(0) = 1
    assert (model.weight.item(), local.base[0].item(), len(local.flights)) == (7.0, 8.0, 1)
    interval(1, 5.0)  # c(1) = 2; b' = 8 - (1 + 0.5) / 2 = 7.25
    assert local.base[0].item() == 7.25
    assert model.weight.item() == 5.25
    seconds = local.take_in(1)  # b'' = 7.25 - (2 + 0.5) / 2
    assert model.weight.item() == 6.0
    assert seconds >= 0
    assert not local.flights
    local.close()


def test_rank_without_steps_sends_no_change_and_undoes_its_own() -> None:
    model = line(8.0)
    local, summing = delayed(model, 0.5)
    local.begin()
    with torch.no_grad():
        model.weight.fill_(7.0)
    local.took(0.0)
    local.fill(1, [sgd(model)])
    local.send(whole=False)
    assert model.weight.item() == 8.0
    local.take_in(0)
    assert model.weight.item() == 7.5  # the other rank alone has a weight
    local.forget()
    assert summing.forgot == 1
    local.close()


def test_state_for_a_rank_that_joins_is_that_of_the_intervals_beginning() -> None:
    model = torch.nn.BatchNorm1d(1).double()
    local = merges(model)
    local.begin()
    model(torch.ones(2, 1, dtype=torch.float64))
    with torch.no_grad():
        model.weight.fill_(5.0)
    state = local.state_dict()
    assert state["model"]["saved"]["weight"].tolist() == [1.0]
    assert state["model"]["saved"]["running_mean"].tolist() == [0.0]
    assert int(state["model"]["saved"]["num_batches_tracked"]) == 0
    local.over()
    assert local.state_dict()["model"]["saved"]["weight"].tolist() == [5.0]
    assert int(local.state_dict()["model"]["saved"]["num_batches_tracked"]) == 1
    other = merges(torch.nn.BatchNorm1d(1).double())
    other.load_state_dict(state)
    assert other._model.weight.tolist() == [1.0]  # type: ignore[union-attr]
    for each in (local, other):
        each.close()
