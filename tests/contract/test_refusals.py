"""Whatever the decisions are given, they answer with a result, or with one message: PacelineError, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from paceline import Cluster, PacelineError, policies
from paceline.costs import Linear
from paceline.rounds import Plan
from paceline.samples import CostModel, Room, deal
from paceline.shares import project, proportional, water_level, whole_samples

NUMBERS = st.one_of(
    st.integers(-2, 40), st.floats(-2, 40), st.sampled_from([np.nan, np.inf, 1e300, 2**70, True, None, "x"])
)
VALUES = st.one_of(
    NUMBERS, st.lists(NUMBERS, max_size=4), st.lists(st.integers(0, 20), min_size=3, max_size=3)
)
COST = Linear(np.array([1.0, 2.0, 4.0]), np.zeros(3))
CALLS: list[Callable[..., Any]] = [
    lambda a, b, c: water_level(COST, a, b, c),
    lambda a, b, c: whole_samples(COST, a, b, c),
    lambda a, b, c: whole_samples(Plan(np.full(3, 1 / 3)), a, b, c, unit=2),
    lambda a, b, c: project(a, b, c),
    lambda a, b, c: proportional(a, b, c),
    lambda a, b, c: whole_samples(COST, a, b, fewest=c),
    lambda a, b, c: deal(np.ones(7), CostModel(1.0), np.ones(3), room=Room(least=a, most=b, micro_batch=c)),
    lambda a, b, c: deal(
        np.ones(7), CostModel(1.0), np.ones(3), room=Room(budget=a, micro_steps=b, min_samples=c)
    ),
    lambda a, b, c: Cluster(a, b, c),
]


def answered(call: Callable[..., Any], *given: Any) -> None:
    message = ""
    try:
        call(*given)
    except PacelineError as error:
        message = str(error)
    event("refused" if message else "answered")
    assert "\n" not in message
    assert len(message) <= 400


@settings(max_examples=400)
@given(st.sampled_from(range(len(CALLS))), VALUES, VALUES, VALUES)
def test_arguments_of_any_kind_get_a_result_or_one_message(call: int, a: Any, b: Any, c: Any) -> None:
    with np.errstate(all="ignore"):
        answered(CALLS[call], a, b, c)


WORDS = st.sampled_from(
    [*policies.names(), "alpha", "floor", "caution", "forecast", "ema", "least", "scheme", "rounds", "x", "", "0",
     "1", "-1", "0.5", "nan", "1e400", "yes", "no"]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(WORDS, min_size=1, max_size=7), st.lists(st.sampled_from(":,=/"), max_size=6))
def test_policy_of_any_text_is_made_or_refused_in_one_message(words: list[str], marks: list[str]) -> None:
    text = words[0] + "".join(mark + word for mark, word in zip(marks, words[1:], strict=False))
    answered(policies.create, text, Cluster(3, 30))
