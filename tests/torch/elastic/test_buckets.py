"""Buckets of gradients: how parameters are grouped, when each sum starts, and what becomes the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch.elastic import buckets
from paceline.torch.elastic.buckets import Buckets, ExactBuckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes(groups: list[list[torch.nn.Parameter]]) -> list[list[int]]:
    return [[p.numel() for p in group] for group in groups]


def test_first_bucket_is_small_and_parameters_come_last_to_first() -> None:
    """1 MiB for the first and 25 MiB for the others, as in DistributedDataParallel; here 40 and 100 bytes."""
    assert (buckets.FIRST_BYTES, buckets.BYTES) == (2**20, 25 * 2**20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "FIRST_BYTES", 40)
        patch.setattr(buckets, "BYTES", 100)
        assert sizes(buckets._groups(parameters(1, 20, 5, 6, 4))) == [[4, 6], [5, 20], [1]]
        assert sizes(buckets._groups(parameters(30, 30, 11))) == [[11], [30], [30]]
        assert sizes(buckets._groups([])) == []
        mixed = [*parameters(2), *parameters(2, dtype=torch.float64), *parameters(2, 3)]
        assert sizes(buckets._groups(mixed)) == [[3, 2], [2], [2]]
        wide = parameters(3, 3, dtype=torch.float64)
        assert sizes(buckets._groups([*wide, *parameters(1)])) == [[1], [3, 3]]


class Sum:
    """Sums with one other rank whose gradients are the same; ``done`` says whether the works have ended."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.done = True

    def __call__(self, tensor: torch.Tensor) -> Any:
        self.began.append(tensor.numel())
        tensor.mul_(2)
        return self

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of three parameters, each in its own bucket."""
    monkeypatch.setattr(buckets, "FIRST_BYTES", 4)
    monkeypatch.setattr(buckets, "BYTES", 4)
    model = torch.nn.ParameterList(parameters(1, 2, 3))
    held = Buckets(list(model))
    yield model, held
    held.close()


def test_sums_start_in_the_order_of_the_buckets_while_the_pass_runs(three: Any) -> None:
    model, held = three
    summing = Sum()
    held.begin(summing)
    (model[0].sum() + model[2].sum()).backward()
    assert summing.began == [3]  # the second one's gradient is still to come, and the first waits for it
    model[1].sum().mul(3).backward()
    assert summing.began == [3, 2, 1]
    works = held.finish(summing)
    assert summing.began == [3, 2, 1]
    assert works == [summing] * 3
    held.apply([True] * 3)
    assert [p.grad.tolist() for p in model] == [[2.0], [6.0, 6.0], [2.0, 2.0, 2.0]]


def test_parameter_without_a_gradient_is_summed_as_zeros_and_keeps_none_if_no_rank_has_one(
    three: Any,
) -> None:
    model, held = three
    for bucket in held._buckets:
        bucket.flat.fill_(float("nan"))
    summing = Sum()
    held.begin(summing)
    model[1].sum().backward()
    assert summing.began == []
    held.finish(summing)
    assert summing.began == [3, 2, 1]
    assert held.used() == [False, True, False]
    held.apply([True, True, False], factor=0.25)
    assert model[0].grad.tolist() == [0.0]  # another rank had one
    assert model[1].grad.tolist() == [0.5, 0.5]
    assert model[2].grad is None


def test_gradient_that_comes_twice_raises_after_its_sum_began(three: Any) -> None:
    model, held = three
    held.begin(Sum())
    model[2].sum().backward()
    with pytest.raises(PacelineError, match="a parameter got a gradient twice in one backward pass"):
        model[2].sum().backward()


def test_passes_that_are_not_to_be_summed_start_nothing_and_the_round_is_summed_at_its_end(
    three: Any,
) -> None:
    model, held = three
    summing = Sum()
    for _ in range(2):
        sum(p.sum() for p in model).backward()
    assert summing.began == []
    held.begin(summing)
    held.drop()
    sum(p.sum() for p in model).backward()
    assert summing.began == []
    held.finish(summing)
    assert summing.began == [3, 2, 1]
    held.finish(summing)  # once more, after sums that have failed
    assert summing.began == [3, 2, 1] * 2
    held.close()
    held.begin(summing)
    sum(p.sum() for p in model).backward()
    assert summing.began == [3, 2, 1] * 2


def test_memory_of_a_sum_that_still_runs_is_not_written_again(three: Any) -> None:
    model, held = three
    summing = Sum()
    summing.done = False
    flats = []
    for _ in range(2):
        held.begin(summing)
        sum(p.sum() for p in model).backward()
        held.finish(summing)
        flats.append([bucket.flat for bucket in held._buckets])
    assert not {flat.data_ptr() for flat in flats[0]} & {flat.data_ptr() for flat in flats[1]}
    summing.done = True
    places = [flat.data_ptr() for flat in flats.pop()]
    held.begin(summing)
    held.finish(summing)
    assert [bucket.flat.data_ptr() for bucket in held._buckets] == places


def test_exact_sums_are_those_of_all_passes_whatever_their_order() -> None:
    model = torch.nn.ParameterList(parameters(1, 2))
    held, summing = ExactBuckets(list(model)), Sum()
    for factor in (1e8, 1.0, -1e8):
        model[0].sum().mul(factor).backward()
        held.add()
        assert model[0].grad is None
    assert held.used() == [True, False]
    (work,) = held.finish(summing)
    assert work is summing
    held.apply([True, False], factor=0.5)
    assert model[0].grad.tolist() == [1.0]  # 2 (1e8 + 1 - 1e8) / 2, of which float32 would keep nothing
    assert model[1].grad is None
    model[1].sum().backward()
    held.add()
    held.drop()
    assert held.used() == [False, False]
