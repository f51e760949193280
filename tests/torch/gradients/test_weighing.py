"""How losses are weighed and their gradients kept, by hand in one process; on ranks: test_global_losses.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.gradients.counts import Counts, checked_count
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.weighing import (
    GLOBAL,
    MEAN,
    SUM,
    ExactWeighing,
    GradientStash,
    HookWeighing,
    LocalWeighing,
    Weighing,
    held,
)
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.steps import check_there

CPU = torch.device("cpu")


def two() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]


def set_grads(parameters: list[torch.nn.Parameter], *grads: list[float] | None) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else torch.tensor(grad)


def grads(parameters: list[torch.nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def piece(samples: int, first: bool = True, last: bool = True, batch: int = 12, step: int = 3) -> Piece:
    return Piece(RoundPlan(step, np.array([samples, batch - samples]), batch), samples, first, last)


def test_gradients_of_pieces_are_put_aside_and_brought_back_scaled() -> None:
    parameters = two()
    stash = GradientStash(parameters)
    stash.bring_back(piece(6, step=0))
    set_grads(parameters, [1.0, 2.0], None)
    stash.put()
    assert grads(parameters) == [None, None]
    stash.bring_back(piece(6, step=0), scale=0.5)
    assert grads(parameters) == [[0.5, 1.0], None]
    stash.put()
    stash.bring_back(piece(6, step=0))
    assert grads(parameters) == [[0.5, 1.0], None]


def test_pass_that_runs_apart_is_added_when_it_has_ended_and_dropped_if_it_fails() -> None:
    parameters = [*two(), torch.nn.Parameter(torch.zeros(1))]
    stash = GradientStash(parameters)
    stash.join()  # nothing was put aside
    stash.bring_back(piece(6, step=0))
    set_grads(parameters, [1.0, 2.0], None, [7.0])
    stash.put()
    stash.bring_back(piece(6, step=0), apart=True)
    assert grads(parameters) == [None, None, None]
    set_grads(parameters, [9.0, 9.0], None, None)
    stash.take_back()
    assert grads(parameters) == [None, None, None]
    stash.bring_back(piece(6, step=0), apart=True)
    set_grads(parameters, [10.0, 20.0], [5.0], None)
    stash.join()
    assert grads(parameters) == [[11.0, 22.0], [5.0], [7.0]]
    stash.join()
    assert grads(parameters) == [[11.0, 22.0], [5.0], [7.0]]


def test_gradients_that_appear_between_two_pieces_raise() -> None:
    parameters = two()
    stash = GradientStash(parameters)
    stash.bring_back(piece(6, step=5))
    set_grads(parameters, [1.0, 2.0], None)
    stash.put()
    set_grads(parameters, None, [0.0])
    with pytest.raises(PacelineError, match="round 5: gradients were added to the model between two pieces"):
        stash.bring_back(piece(6, step=5))


def test_gradients_that_stay_after_a_step_raise_unless_they_are_zeroed() -> None:
    for change, raises in ((None, True), ("zeroed", False), ("none", False), ("another", False)):
        parameters = two()
        stash = GradientStash(parameters)
        stash.bring_back(piece(6, step=0))
        set_grads(parameters, [1.0, 2.0], None)
        stash.ready()
        stash.used()
        if change == "zeroed":
            parameters[0].grad.zero_()  # type: ignore[union-attr]
        elif change == "none":
            parameters[0].grad = None
        elif change == "another":
            parameters[0].grad = torch.ones(2)
        if raises:
            with pytest.raises(PacelineError, match="round 1: gradients of the round before are still in"):
                stash.bring_back(piece(6, step=1))
        else:
            stash.bring_back(piece(6, step=1))


def test_gradients_that_another_models_pass_has_left_raise() -> None:
    parameters = two()
    weighing = Weighing(parameters, CPU, Reducer())
    assert weighing.weight_after_step(piece(3), 3.0) == 0.25
    set_grads(parameters, [0.0, 0.0], None)
    weighing.bring_back(piece(6, step=4))
    weighing.weight_after_step(piece(3), 3.0)
    set_grads(parameters, [0.0, 1.0], None)
    with pytest.raises(PacelineError, match="round 4: the backward pass of another model has left gradients"):
        weighing.bring_back(piece(6, step=4))
    weighing.bring_back(piece(6, step=4))  # reported once


def test_gradients_zeroed_before_the_step_raise_for_the_optimizer_that_had_some() -> None:
    parameters = two()
    first, second = (torch.optim.SGD([parameter], 0.1) for parameter in parameters)
    stash = GradientStash(parameters)
    stash.bring_back(piece(6, step=0))
    set_grads(parameters, [1.0, 2.0], None)
    stash.ready()
    check_there(stash, piece(3), [first, second])
    set_grads(parameters, None, [1.0])
    check_there(stash, piece(3), [second])
    with pytest.raises(PacelineError, match="round 3: the gradients were zeroed between"):
        check_there(stash, piece(3), [second, first])
    set_grads(parameters, None, None)
    check_there(stash, piece(3), [second])  # it had none
    check_there(stash, piece(3), [])
    with pytest.raises(PacelineError, match="round 3: the gradients were zeroed between"):
        check_there(stash, piece(3), [first])
    both = torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]]}], 0.1)
    assert list(held(both)) == parameters
    set_grads(parameters, None, [1.0])
    check_there(stash, piece(3), [both])
    assert list(held(SimpleNamespace())) == []  # type: ignore[arg-type]


def test_dropped_round_leaves_no_gradient_and_no_memory_of_one() -> None:
    parameters = two()
    stash = GradientStash(parameters)
    set_grads(parameters, [1.0, 2.0], None)
    stash.drop()
    assert grads(parameters) == [[1.0, 2.0], None]  # no round had begun: it is the user's
    stash.bring_back(piece(6, step=0))
    stash.drop()
    assert grads(parameters) == [None, None]
    stash.bring_back(piece(6, step=0))
    set_grads(parameters, [1.0, 2.0], None)
    stash.put()
    stash.drop()
    stash.bring_back(piece(6, step=0))
    assert grads(parameters) == [None, None]
    set_grads(parameters, [1.0, 2.0], None)
    stash.used()
    set_grads(parameters, [3.0, 2.0], None)
    stash.drop()
    assert grads(parameters) == [[3.0, 2.0], None]  # the round was over


def test_there_is_a_gradient_only_if_it_is_new_and_not_zero() -> None:
    parameters = two()
    stash = GradientStash(parameters)
    assert not stash.there()
    set_grads(parameters, [0.0, 0.0], None)
    assert not stash.there()
    set_grads(parameters, [0.0, 1.0], None)
    assert stash.there()
    stash.used()
    assert not stash.there()
    parameters[0].grad.add_(1.0)  # type: ignore[union-attr]
    assert stash.there()


def test_gradients_are_finite_and_scaled() -> None:
    parameters = two()
    stash = GradientStash(parameters)
    assert stash.finite()
    set_grads(parameters, [1.0, 2.0], None)
    assert stash.finite()
    stash.scale(0.5)
    stash.scale(torch.tensor(3.0))
    assert grads(parameters) == [[1.5, 3.0], None]
    for wrong in (float("nan"), float("inf")):
        set_grads(parameters, [1.0, 2.0], [wrong])
        assert not stash.finite()


class Averaging(Reducer):
    """As DistributedDataParallel: the last pass of a round averages over the ranks."""

    averages = sums = True
    reduces = type(None)

    def __init__(self) -> None:
        self.looks: list[bool] = []
        self.within = 0

    def no_sync(self) -> Any:
        reducer = self

        class Within:
            def __enter__(self) -> None:
                reducer.within += 1

            def __exit__(self, *_: object) -> None:
                reducer.within -= 1

        return Within()

    def check_sync(self, last: bool) -> None:
        self.looks.append(last)


def test_loss_weighs_its_samples_over_the_batch_times_the_ranks_that_ddp_divides_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LB-BSP, weighted aggregation: n m / B, with n = 3, m = 2 and B = 12; 1 in place of n if nothing averages."""
    monkeypatch.setattr(peers, "ranks", lambda: 3)
    averaging = Averaging()
    weighing = Weighing(two(), CPU, averaging)
    one, last = piece(2, last=False), piece(4, first=False)
    for each, part in ((one, 2.0), (last, 4.0)):
        weighing.begin(each)
        assert averaging.within == (each is one)
        assert weighing.weigh(each, part, None, True, MEAN) == 3 * part / 12
        assert weighing.weigh(each, part, None, False, MEAN) == 3 * part / 12
    weighing.release()
    assert averaging.looks == [False, False, True, True]
    assert weighing.global_part(one) == 4.0
    assert weighing.weight_after_step(one, 2.0) == 0.5
    assert Weighing(two(), CPU, Reducer()).weigh(one, 2.0, None, True, MEAN) == 2 / 12
    exact = ExactWeighing(two(), CPU, Averaging())
    assert exact.weigh(one, 2.0, None, True, MEAN) == 2 / 12
    assert exact.global_part(one) == 4.0
    assert not exact.sums


def test_micro_step_that_sums_does_not_run_within_no_sync() -> None:
    averaging = Averaging()
    weighing = Weighing(two(), CPU, averaging)
    weighing.begin(piece(2, last=False))
    weighing.begin(piece(2, first=False, last=False))
    assert averaging.within == 1
    weighing.begin(piece(2, first=False))
    assert (averaging.within, weighing.entered) == (0, None)
    weighing.release()
    assert averaging.within == 0
    local = LocalWeighing(two(), CPU, averaging, lambda: None)
    local.begin(piece(2))  # local steps sum no gradients
    assert averaging.within == 1


def test_reasons_against_losses_over_all_ranks_follow_from_the_options() -> None:
    class Elastic(Reducer):
        carries_counts = True

    plain, dropping = Weighing(two(), CPU, Reducer()), Weighing(two(), CPU, Reducer(), varies=True)
    assert (plain.no_global, plain.no_second, dropping.no_second) == ("", "", "")
    assert dropping.no_global.startswith("drop= leaves out samples")
    elastic = Weighing(two(), CPU, Elastic())
    assert elastic.no_global.startswith("with ElasticPace there is no process group")
    assert elastic.no_second == "ElasticPace sums the gradients of one model only"
    local = LocalWeighing(two(), CPU, Reducer(), lambda: None)
    assert local.no_global == "with LocalSGD each rank steps by itself; pass a mean, a sum or count="
    assert local.no_second == "with LocalSGD each rank steps by itself; make a Pace for each model"


def test_round_of_counts_is_divided_by_what_all_ranks_have_counted() -> None:
    """Two pieces of 3 and 5 tokens in a batch of 12; all ranks have counted 24: half of what samples would give."""
    parameters, asked = two(), list[int]()

    def counted(step: int) -> float:
        asked.append(step)
        return 24.0

    weighing = Weighing(parameters, CPU, Reducer(), counted=counted)
    for each, count in ((piece(2, last=False), 3.0), (piece(4, first=False), 5.0)):
        weighing.begin(each)
        assert weighing.weigh(each, count, count, True, MEAN) == count / 12
        set_grads(parameters, [1.0, 2.0], None)
        weighing.done(each)
        assert grads(parameters) == ([[0.5, 1.0], None] if each.last else [None, None])
    assert asked == [3]
    weighing.used()
    # The next round counts samples: nothing is scaled, and nothing is asked for.
    set_grads(parameters, None, None)
    weighing.weigh(piece(4), 4.0, None, True, MEAN)
    set_grads(parameters, [1.0, 2.0], None)
    weighing.done(piece(4))
    assert (grads(parameters), asked) == ([[1.0, 2.0], None], [3])


def test_round_whose_samples_vary_is_divided_by_those_that_ran() -> None:
    parameters = two()
    weighing = Weighing(parameters, CPU, Reducer(), varies=True, counted=lambda step: 8.0)
    weighing.weigh(piece(4), 4.0, None, True, MEAN)
    set_grads(parameters, [1.0, 2.0], None)
    weighing.done(piece(4))
    assert grads(parameters) == [[1.5, 3.0], None]


def test_one_piece_with_a_count_and_another_without_raise_until_the_round_is_dropped() -> None:
    weighing = Weighing(two(), CPU, Reducer(), counted=lambda step: 24.0)
    weighing.weigh(piece(2, last=False), 3.0, 3.0, True, MEAN)
    weighing.weigh(piece(2, last=False), 3.0, None, False, MEAN)  # not the micro-step's first pass
    with pytest.raises(PacelineError, match="round 3: one piece was given a count and another was not"):
        weighing.weigh(piece(2, first=False), 2.0, None, True, MEAN)
    weighing.drop()
    weighing.weigh(piece(2), 2.0, None, True, MEAN)


def test_counts_are_carried_by_the_sums_where_the_reducer_does_that() -> None:
    class Elastic(Reducer):
        carries_counts = True

    weighing = Weighing(two(), CPU, Elastic(), counted=lambda step: pytest.fail("asked"))
    weighing.weigh(piece(2), 3.0, 3.0, True, MEAN)
    weighing.count_back(3, 3.0)
    weighing.done(piece(2))


def test_count_of_a_pass_that_failed_is_taken_back() -> None:
    counts = Counts(torch.device("meta"), lambda step: pytest.fail("asked"))
    counts.add(0, 3.0, False)
    counts.add(0, 5.0, False)
    counts.add(0, -5.0, False)
    assert counts.given
    assert counts._own == 3.0
    counts.begin()
    assert counts.given is None
    assert counts._own == 0.0


def test_factor_of_a_round_in_which_nothing_counts_is_zero() -> None:
    for counted, factor in ((24.0, 0.5), (0.0, 0.0)):
        counts = Counts(CPU, lambda step, counted=counted: counted)  # type: ignore[misc]
        counts.add(1, counted, True)
        assert counts.factor(1, 12) == factor
        assert counts.given is None


def test_weighing_drops_the_counts_of_a_round_that_is_left() -> None:
    weighing = Weighing(two(), CPU, Reducer(), counted=lambda step: 24.0)
    weighing.weigh(piece(2), 3.0, 3.0, True, MEAN)
    assert weighing._counts.given
    weighing.drop()
    assert weighing._counts.given is None


def test_hook_gets_the_weight_of_the_accumulated_means() -> None:
    """g1 over 2 samples and g2 over 4: (2 g1 + 4 g2) / 12 is the hook's 4 / 12 of g1 (2 / 4) + g2."""
    parameters = two()
    weighing = HookWeighing(parameters, CPU, Averaging())
    one, last = piece(2, last=False), piece(4, first=False)
    assert weighing.weigh(one, 2.0, None, True, MEAN) == 1.0
    weighing.gather(one)
    assert weighing.share(one) == 2 / 12
    set_grads(parameters, [8.0, 4.0], None)
    weighing.gathered(one)
    weighing.done(one)
    assert grads(parameters) == [None, None]
    weighing.weigh(last, 4.0, None, True, MEAN)
    weighing.gather(last)
    assert grads(parameters) == [[4.0, 2.0], None]
    assert weighing.share(last) == 4 / 12
    weighing.gathered(last)
    weighing.done(last)
    assert grads(parameters) == [[4.0, 2.0], None]
    assert not weighing.counted


def test_hook_weighs_sums_counts_and_losses_over_all_ranks() -> None:
    weighing = HookWeighing(two(), CPU, Averaging(), counted=lambda step: 24.0)
    each = piece(4, last=False)
    assert weighing.weigh(each, 4.0, None, True, SUM) == 1 / 4
    weighing.gather(each)
    assert weighing.share(each) == 4 / 12
    weighing.gathered(each)
    weighing.weigh(each, 6.0, None, False, GLOBAL)
    weighing.gather(each)
    assert weighing.share(each) == 6 / 12
    weighing = HookWeighing(two(), CPU, Averaging(), counted=lambda step: 24.0)
    assert weighing.weigh(each, 3.0, 3.0, True, MEAN) == 1.0
    assert weighing.counted
    weighing.gather(each)
    assert weighing.share(each) == 3 / 12
    weighing.gathered(each)
    assert weighing.weigh(each, 5.0, 5.0, True, SUM) == 1 / 5
    weighing.drop()
    assert weighing.weigh(each, 0.0, 0.0, True, MEAN) == 0.0  # a mean over nothing
    assert weighing.weigh(each, 1.0, 0.0, True, SUM) == 1.0  # a sum counts all the same
    weighing.gather(each)
    assert weighing.share(each) == 1 / 12
    empty = piece(0, last=False)
    assert HookWeighing(two(), CPU, Averaging()).weigh(empty, 0.0, None, True, SUM) == 0.0


def test_hook_keeps_the_weight_of_earlier_pieces_for_a_piece_without_samples() -> None:
    parameters = two()
    weighing = HookWeighing(parameters, CPU, Averaging())
    one, empty = piece(4, last=False), piece(0, first=False)
    weighing.weigh(one, 4.0, None, True, MEAN)
    weighing.gather(one)
    set_grads(parameters, [8.0, 4.0], None)
    weighing.gathered(one)
    weighing.weigh(empty, 0.0, None, True, MEAN)
    weighing.gather(empty)
    assert grads(parameters) == [[8.0, 4.0], None]
    assert weighing.share(empty) == 4 / 12


def test_local_step_weighs_the_samples_or_the_count_of_its_own_batch() -> None:
    begun = list[int]()
    weighing = LocalWeighing(two(), CPU, Reducer(), lambda: begun.append(1))
    assert not weighing.sums
    first, second = piece(4, last=False), piece(4, first=False)
    for each in (first, second):
        weighing.begin(each)
        assert begun == [1]
        assert weighing.weigh(each, 2.0, None, True, MEAN) == 0.5
        assert weighing.weigh(each, 2.0, 9.0, False, MEAN) == 0.5
        assert weighing.many == 4.0
    with pytest.raises(PacelineError, match="one piece was given a count and another was not"):
        weighing.weigh(second, 2.0, 8.0, True, MEAN)
    assert weighing.weigh(first, 2.0, 8.0, True, MEAN) == 0.25  # an interval begins
    assert weighing.many == 8.0
    assert weighing.weigh(piece(0), 0.0, 0.0, True, MEAN) == 0.0


@pytest.mark.parametrize("count", ["many", "7", None, -1, float("nan"), float("inf"), torch.ones(2), [1]])
def test_count_that_is_no_number_from_zero_raises(count: Any) -> None:
    with pytest.raises(PacelineError, match=r"count=.*expected what the loss is a mean over"):
        checked_count(count)


def test_count_may_be_a_number_or_a_tensor_with_one() -> None:
    assert [checked_count(count) for count in (0, 3, 2.5, torch.tensor([4]))] == [0.0, 3.0, 2.5, 4.0]
