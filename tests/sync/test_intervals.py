"""Local steps: what an interval may be, and how long the next one is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.sync.intervals import Mean, Nesterov, interval, next_size, outer


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "auto"),
        (" auto ", "auto"),
        ("8", 8),
        (8, 8),
        (np.int64(8), 8),
        (1, 1),
        ("2 s", 2.0),
        (" 0.5s ", 0.5),
        (".25 s", 0.25),
        (2.0, 2.0),
        (2**31 - 2, 2**31 - 2),
    ],
)
def test_interval_is_a_number_of_steps_or_seconds(given: Any, found: Any) -> None:
    taken = interval(given)
    assert taken == found
    assert type(taken) is type(found)


@pytest.mark.parametrize(
    "given", [0, -1, 0.0, True, False, "", "soon", "0 s", "-2", "8 s s", 2**31 - 1, float("nan"), [8], 1 + 2j]
)
def test_interval_that_is_no_number_above_zero_raises(given: Any) -> None:
    with pytest.raises(
        PacelineError, match=r"expected steps, 1 or more, seconds such as .2 s. or 2\.0, or .auto."
    ):
        interval(given)


def test_interval_with_thousands_of_digits_raises() -> None:
    with pytest.raises(PacelineError, match="expected steps, 1 or more"):
        interval("9" * 5000)


@pytest.mark.parametrize(
    ("every", "link", "delay", "found"),
    [
        (2.0, 0.0, 0, 640),  # 3200 samples take 10 s, so 2 s are 640
        (0.9, 0.0, 0, 288),  # half a batch more is rounded: 288 = 9 x 32
        (0.95, 0.0, 0, 320),  # 304 are 9.5 batches, and round goes to the even one
        (0.1, 0.0, 0, 128),  # at least a quarter of the 512 of the newest interval
        (60.0, 0.0, 0, 2048),  # and at most four times as many
        ("auto", 0.2, 0, 576),  # 0.2 s are a tenth of 2 s: 1.8 s of steps
        ("auto", 1.6, 1, 640),  # 1.6 s are hidden in 0.8 of 2 s
    ],
)
def test_next_interval_takes_the_seconds_that_were_asked_for(
    every: float | str, link: float, delay: int, found: int
) -> None:
    assert next_size(every, 32, size=512, samples=3200, seconds=10.0, link=link, delay=delay) == found


def test_next_interval_has_one_step_at_least_and_1024_at_most() -> None:
    assert next_size(1e-3, 32, size=32, samples=32, seconds=1.0, link=0.0) == 32
    assert next_size(1e6, 32, size=32 * 1000, samples=32, seconds=1.0, link=0.0) == 32 * 1024
    assert next_size(1e6, 32, size=32 * 1024, samples=32, seconds=1.0, link=0.0) == 32 * 1024


def test_outer_optimizers_have_the_values_of_their_paper() -> None:
    """DiLoCo's are 0.7 and 0.9; the mean is SGD of rate 1."""
    assert outer("mean") == Mean()
    assert (Mean.lr, Mean.momentum, Mean.nesterov) == (1.0, 0.0, False)
    assert outer("nesterov") == Nesterov(0.7, 0.9)
    assert Nesterov.nesterov
    assert outer("nesterov:lr=10,momentum=0.5") == Nesterov(10, 0.5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nesterov:lr=0", "nesterov: lr=0.*: expected a learning rate above 0, at most 10"),
        ("nesterov:lr=10.1", "nesterov: lr=10.1: expected a learning rate above 0, at most 10"),
        ("nesterov:momentum=0", "nesterov: momentum=0.*: expected a momentum above 0 and below 1"),
        ("nesterov:momentum=1", "nesterov: momentum=1.*: expected a momentum above 0 and below 1"),
        ("adam", "expected one of mean, nesterov"),
    ],
)
def test_outer_optimizer_with_other_values_raises(spec: str, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        outer(spec)
