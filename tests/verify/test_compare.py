"""What differs between two runs, found in records that are made up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.verify.compare import RunLog, difference, far, loss_kind, settled, tolerance
from paceline.verify.record import sketch
from paceline.verify.verdict import judged, to_json

EPS = torch.finfo(torch.float32).eps
FREE = st.floats(-10, 10, allow_subnormal=False)


def step(number: int = 0, **changed: Any) -> dict[str, Any]:
    """A line of one step of a model with two parameters."""
    line = {
        "kind": "step", "optimizer": 0, "number": number, "options": [{"lr": 0.1}], "states": {}, "losses": [],
        "metrics": [], "eps": EPS, "apart": False,
        "gradients": {"a": sketch("a", torch.ones(40)), "b": sketch("b", torch.ones(3))},
        "parameters": {"a": sketch("a", torch.ones(40)), "b": sketch("b", torch.ones(3))},
    }  # fmt: skip
    return line | changed


def run(name: str, *ranks: list[dict[str, Any]], loads: tuple[int, ...] = (4, 4)) -> RunLog:
    pace = {"kind": "pace", "loads": list(loads)}
    return RunLog(name, {rank: [pace, *lines] for rank, lines in enumerate(ranks)})


EQUAL = run("equal", [step(), step(1)], [step(), step(1)])
AGAIN = run("equal again", [step(), step(1)], [step(), step(1)])


def uneven(**changed: Any) -> RunLog:
    """The second step is changed on both ranks."""
    return run("uneven", [step(), step(1, **changed)], [step(), step(1, **changed)], loads=(2, 6))


def test_runs_that_agree_are_exact() -> None:
    verdict = judged([EQUAL, AGAIN, uneven()])
    assert verdict.exact is True
    assert verdict.sentence == "exact to 0 over 2 steps with loads 2/6"
    assert to_json(verdict)["runs"][0]["loads"] == [2, 6]


def test_a_gradient_that_differs_is_named_with_its_step_and_size() -> None:
    gradients = {"a": sketch("a", torch.ones(40)), "b": sketch("b", 1.5 * torch.ones(3))}
    verdict = judged([EQUAL, AGAIN, uneven(gradients=gradients)])
    assert verdict.exact is False
    assert verdict.sentence == "not exact with loads 2/6: from step 2, 0.33 in b"


def test_a_gradient_that_is_none_in_one_run_is_named() -> None:
    gradients = {"a": sketch("a", torch.ones(40)), "b": []}
    found = difference(EQUAL, uneven(gradients=gradients))
    assert found.absent == [(1, "b")]


def test_a_small_gradient_that_differs_is_not_hidden_by_a_large_one() -> None:
    small = run(
        "equal", [step(gradients={"a": sketch("a", torch.ones(40)), "b": sketch("b", 0.1 * torch.ones(3))})]
    )
    other = run(
        "uneven", [step(gradients={"a": sketch("a", torch.ones(40)), "b": sketch("b", 0.11 * torch.ones(3))})]
    )
    assert difference(small, other).worst.size > 0.05


def test_options_that_differ_between_runs_or_ranks_are_named() -> None:
    verdict = judged([EQUAL, AGAIN, uneven(options=[{"lr": 0.2}])])
    assert verdict.sentence == (
        "not exact with loads 2/6: lr of parameter group 0 at step 2 is 0.2, and 0.1 with equal loads"
    )
    other = run("uneven", [step(), step(1)], [step(), step(1, options=[{"lr": 0.3}])], loads=(2, 6))
    assert (
        "lr of parameter group 0 at step 2 is 0.3 on rank 1, and 0.1 on rank 0"
        in judged([EQUAL, AGAIN, other]).sentence
    )


def test_metrics_that_differ_between_runs_are_named() -> None:
    ours = run("equal", [step(metrics=[["pace.mean 1", 0.5]]), step(1)], [step(), step(1)])
    other = run("uneven", [step(metrics=[["pace.mean 1", 0.6]]), step(1)], [step(), step(1)], loads=(2, 6))
    near = run("uneven", [step(metrics=[["pace.mean 1", 0.50001]]), step(1)], [step(), step(1)], loads=(2, 6))
    assert judged([ours, ours, other]).sentence == (
        "not exact with loads 2/6: pace.mean 1 before step 1 is 0.6, and 0.5 with equal loads"
    )
    assert judged([ours, ours, near]).exact


def test_ranks_whose_averages_differ_are_named_even_if_equal_runs_differ_too() -> None:
    states = [{"Average.a": sketch("a", value * torch.ones(4))} for value in (1.0, 2.0, 3.0)]
    one = run("equal", [step(states=states[0])], [step(states=states[1])])
    again = run("equal again", [step(states=states[1])], [step(states=states[2])])
    verdict = judged([one, again, uneven()])
    assert verdict.exact is False
    assert "the ranks differ by 0.33 in Average.a" in verdict.sentence


def test_parts_of_a_sharded_model_may_differ_between_ranks() -> None:
    parts = [{"a": sketch("a", value * torch.ones(40)), "b": []} for value in (1.0, 2.0)]
    lines = [step(parameters=part, apart=True) for part in parts]
    sharded = run("equal", lines[:1], lines[1:])
    assert difference(sharded, sharded).alike(1e-9)


def test_a_program_that_does_not_repeat_itself_is_not_judged() -> None:
    other = run("equal again", [step(gradients={"a": sketch("a", torch.zeros(40)), "b": []}), step(1)])
    verdict = judged([EQUAL, other, uneven()])
    assert verdict.exact is None
    assert verdict.sentence.startswith("cannot tell: two runs with equal loads differ already: from step 1")


def test_a_program_whose_gradients_are_all_zero_is_not_judged() -> None:
    zero = {"a": sketch("a", torch.zeros(40)), "b": []}
    runs = [run(name, *[[step(gradients=zero)]] * 2) for name in ("equal", "equal again", "uneven")]
    verdict = judged(runs)
    assert verdict.exact is None
    assert verdict.sentence.startswith("cannot tell: all gradients are zero")
    assert verdict.suspects == []


def test_numbers_of_steps_that_differ_are_named() -> None:
    short = run("uneven", [step()], [step()], loads=(2, 6))
    assert judged([EQUAL, AGAIN, short]).sentence == (
        "not exact with loads 2/6: optimizer 1 takes 2 steps with equal loads, now 1"
    )


def test_a_schedule_is_compared_with_that_of_the_unported_program() -> None:
    epoch = {"kind": "epoch", "batches": 10, "between": 1}
    ours = run("equal", [step(), step(1), epoch], [step(), step(1)])
    halves = run("unported", [step(), epoch | {"batches": 40, "between": 4}])
    verdict = judged([ours, AGAIN, uneven()], unported=halves)
    assert verdict.exact is True
    (note,) = verdict.notes
    assert note.endswith("those of the unported program over 1 step, and an epoch has 10 steps there")
    longer = run("unported", [step(options=[{"lr": 0.2}]), epoch | {"batches": 30}])
    verdict = judged([ours, AGAIN, uneven()], unported=longer)
    assert verdict.exact is False
    assert verdict.schedule == [
        "lr of parameter group 0 at step 1 is 0.1, and 0.2 in the unported program",
        "an epoch has 10 steps, and 30 in the unported program",
    ]


def test_the_dimension_of_samples_is_settled_where_all_shapes_agree() -> None:
    rows = {"kind": "rows", "name": "bernoulli_", "file": "a.py", "line": 3, "elements": 1}
    other = rows | {"line": 4}
    found = [run("uneven", [rows, other]), run("idle", [rows, other | {"elements": 0}])]
    assert settled(found) == {"bernoulli_ a.py:3": 1}


def test_draws_that_grow_with_the_samples_without_rows_leave_the_verdict_open() -> None:
    gradients = {"a": sketch("a", torch.ones(40)), "b": sketch("b", 1.5 * torch.ones(3))}
    draw = {"kind": "draw", "name": "bernoulli_", "file": "a.py", "line": 3, "elements": 40}
    ours = run("equal", [draw, step(), step(1)], [draw, step(), step(1)])

    def other(**changed: Any) -> RunLog:
        lines = [draw | changed, step(), step(1, gradients=gradients)]
        return run("uneven", lines, lines, loads=(2, 6))

    verdict = judged([ours, AGAIN, other(elements=24)])
    assert verdict.exact is None
    assert verdict.sentence.startswith("cannot tell: a.py:3 draws bernoulli_ numbers whose count follows")
    assert judged([ours, AGAIN, other()]).exact is False, (
        "the same number of draws for any loads: all ranks draw alike"
    )
    assert judged([ours, AGAIN, uneven()]).exact is True


def test_nan_agrees_with_nan_only() -> None:
    nan = sketch("a", torch.full((4,), math.nan))
    assert far(nan, nan) == 0
    assert far(nan, sketch("a", torch.ones(4))) == math.inf


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]
)
def test_the_tolerance_follows_from_the_coarsest_type(dtype: torch.dtype, allowed: float) -> None:
    assert tolerance([run("equal", [step(eps=torch.finfo(dtype).eps)])]) == allowed


@given(st.lists(FREE, min_size=1, max_size=60), st.integers(0, 59), FREE)
def test_a_change_of_one_entry_is_measured_exactly(values: list[float], at: int, change: float) -> None:
    """The sketch of a difference in a single entry has no error but rounding."""
    one = torch.tensor(values, dtype=torch.float64)
    other = one.clone()
    other[at % len(values)] += change
    expected = float((one - other).norm())
    assert far(sketch("x", one), sketch("x", other)) == pytest.approx(expected, abs=1e-9)


def test_the_estimate_of_a_difference_is_within_a_factor_of_three() -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(50):
        one, other = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
        ratio = far(sketch(str(number), one), sketch(str(number), other)) / float((one - other).norm())
        assert 1 / 3 < ratio < 3


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=8))
def test_the_kind_of_a_loss_follows_from_its_values(values: list[float]) -> None:
    def losses(loads: tuple[int, ...], loss: Any) -> RunLog:
        parts, at = [], 0
        for load in loads:
            parts.append([step(losses=[[load, loss(values[at : at + load]), "mean", None]])])
            at += load
        return run("any", *parts, loads=loads)

    # Values for which the losses fit both kinds are left out.
    summed_twice = 4 * sum(values), 2 * sum(values[:2]) + 6 * sum(values[2:])
    means_added = sum(values) / 4, sum(values[:2]) / 2 + sum(values[2:]) / 6
    for one, other in (summed_twice, means_added):
        assume(abs(one - other) > 1e-6 * one)
    mean = [losses(loads, lambda part: sum(part) / len(part)) for loads in ((4, 4), (2, 6))]
    alike = max(values) - min(values) < 1e-2
    assert loss_kind(*mean) == "mean" or alike
    summed = [losses(loads, sum) for loads in ((4, 4), (2, 6))]
    assert loss_kind(*summed) == "sum" or alike
    whole = [losses(loads, lambda part: sum(values)) for loads in ((4, 4), (2, 6))]
    assert loss_kind(*whole) == "whole"


def test_a_loss_that_is_the_same_for_all_samples_at_first_is_a_mean() -> None:
    """As with a loss of .5 for each sample before the first step."""

    def losses(loads: tuple[int, ...], later: tuple[float, ...]) -> RunLog:
        ranks = [
            [step(number, losses=[[load, value, "mean", None]]) for number, value in enumerate((0.5, after))]
            for load, after in zip(loads, later, strict=True)
        ]
        return run("any", *ranks, loads=loads)

    assert loss_kind(losses((4, 4), (0.4, 0.3)), losses((2, 6), (0.2, 0.4))) == "mean"
    assert loss_kind(losses((4, 4), (0.4, 0.4)), losses((2, 6), (0.3, 0.3))) == "whole"


def test_warnings_of_the_run_are_suspects_and_without_any_the_loss_is() -> None:
    gradients = {"a": sketch("a", torch.ones(40)), "b": sketch("b", 1.5 * torch.ones(3))}
    other = uneven(gradients=gradients)
    assert [each[:32] for each in judged([EQUAL, AGAIN, other]).suspects] == [
        "nothing was noticed in the progr"
    ]
    other.ranks[1].append({"kind": "warning", "name": "the loss compares samples", "file": "a.py", "line": 1})
    assert judged([EQUAL, AGAIN, other]).suspects == ["the loss compares samples"]
