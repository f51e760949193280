"""Losses that train another model where loads differ are warned of, once, with file and line; others are not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from support import suspect_jobs
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.suspect_jobs import averaged, told

pytestmark = pytest.mark.processes

WRONG = {
    "injected": "suspect_jobs.Inject adds a gradient that does not come from the loss",
    "normalised": "sums a number over the ranks, and the loss is divided by it",
    "normalised_summed": "sums a number over the ranks, and the loss is divided by it",
    "as_a_number": "sums a number over the ranks, and the loss is divided by it",
    "gathered": "sums a number over the ranks, and the loss is divided by it",
    "in_place": "sums a tensor of the loss over the ranks",
    "own_center": "is divided by this rank's own number of samples times the ranks",
    "own_center_of_a_shape": "is divided by this rank's own number of samples times the ranks",
    "sum_of_entropies": "the loss is a sum, and counts as a mean over",
    "sum_of_rows": "the loss is a sum, and counts as a mean over",
}
RIGHT = (
    *(
        "scaled",
        "logs",
        "right_center",
        "differentiable",
        "penalised",
        "divided",
        "counted",
        "globally",
        "summed",
    ),
)


@guarantee(
    "A loss that trains another model where loads differ causes one warning with file and line; correct "
    "losses cause none."
)
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_trains_another_model_is_warned_of_once(name: str) -> None:
    lines, _ = inspect.getsourcelines(suspect_jobs)
    for warned in run_ranks(3, told, name, False, {}):
        assert [WRONG[name] in words for words, _ in warned] == [True], warned
        words, where = warned[0]
        assert where.startswith("suspect_jobs.py:")
        if "over the ranks" in words:  # it names the collective, too
            line = int(words.partition("suspect_jobs.py:")[2].split()[0])
            assert "all_reduce(" in lines[line - 1] or "all_gather(" in lines[line - 1]


@pytest.mark.parametrize("name", ["sum_by_a_constant", "mean_by_its_samples"])
def test_a_loss_that_grows_with_its_samples_is_warned_of_once_loads_have_changed(name: str) -> None:
    for warned in run_ranks(3, told, name, False, {}, True):
        assert ["the loss grows with this rank's samples" in words for words, _ in warned] == [True], warned


def test_a_loss_is_looked_at_within_a_counter_of_operations() -> None:
    for warned in run_ranks(3, told, "mean_by_its_samples", False, {}, True, True):
        assert ["the loss grows with this rank's samples" in words for words, _ in warned] == [True], warned


@pytest.mark.parametrize("name", [*RIGHT, "mean_by_an_annealed_number"])
def test_a_loss_that_trains_the_same_model_is_not_warned_of_while_loads_change(name: str) -> None:
    assert run_ranks(3, told, name, False, {}, True) == [[], [], []]


@guarantee(
    "A loss that trains another model where loads differ causes one warning with file and line; correct "
    "losses cause none."
)
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_trains_the_same_model_is_not_warned_of(name: str) -> None:
    assert run_ranks(3, told, name, False, {}) == [[], [], []]


@pytest.mark.parametrize("name", ["normalised", "in_place", "own_center"])
def test_a_loss_whose_loads_are_equal_is_not_warned_of(name: str) -> None:
    assert run_ranks(3, told, name, True, {}) == [[], [], []]


def test_an_injected_gradient_under_the_hook_is_not_warned_of() -> None:
    assert run_ranks(3, told, "injected", False, {"weigh": "hook"}) == [[], [], []]


@guarantee(
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or raises "
    "before the step."
)
@pytest.mark.parametrize("loop", ["pieces", "round"])
def test_an_average_is_updated_after_steps_alone(loop: str) -> None:
    right: list[Any] = run_ranks(3, averaged, loop, True)
    assert [said for said, _ in right] == [""] * 3
    for _, average in right:
        assert average == right[0][1]
    if loop == "pieces":
        for said, _ in run_ranks(3, averaged, loop, False)[:1]:
            assert (
                "AveragedModel.update_parameters() was called within round 0, before its optimizer step"
                in said
            )


def test_an_average_of_whole_rounds_is_updated_in_each() -> None:
    found = run_ranks(3, averaged, "whole", False)
    assert [said for said, _ in found] == [""] * 3
