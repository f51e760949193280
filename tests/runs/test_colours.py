"""The colours of page.css: seen on their cards, and no worker's like the straggler's, with any colour vision."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest

from support.colours import contrast, linear

GUARANTEES = (
    "Lines, boxes and hatching have a contrast of 3:1 and texts 4.5:1, on "
    "light and dark screens, for any colour vision.",
)

CSS = resources.files("paceline.runs").joinpath("page.css").read_text(encoding="utf-8")
DARK_BY_SYSTEM, DARK_BY_CHOICE = re.findall(
    r"prefers-color-scheme: \w+\) \{\s*:root[^{]*\{(.*?)\}", CSS, re.DOTALL
)
THEMES = {"light": re.search(r":root, .slide \{(.*?)\}", CSS, re.DOTALL)[1], "dark": DARK_BY_SYSTEM}
WORKERS, RUNS = [f"c{i}" for i in range(8)], [f"r{i}" for i in range(8)]
# What is left of a colour without the cones for red, or for green (Machado, Oliveira and Fernandes 2009, severity 1).
VISIONS = {
    "any": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                          [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip


def colours(theme):
    return {name: linear(value) for name, value in re.findall(r"--([\w-]+): #(\w{6});", THEMES[theme])}


def oklab(light):
    """Coordinates in which equal distances are seen as about equal (Ottosson 2020)."""
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
    axes = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
    return axes @ np.cbrt(cones @ np.clip(light, 0, 1))


def distance(one, other, vision):
    return float(np.linalg.norm(oklab(VISIONS[vision] @ one) - oklab(VISIONS[vision] @ other)))


def test_the_measures_are_right():
    assert contrast(linear("000000"), linear("ffffff")) == pytest.approx(21)
    assert contrast(linear("767676"), linear("ffffff")) == pytest.approx(4.54, abs=0.01)
    assert oklab(linear("ffffff")) == pytest.approx([1, 0, 0], abs=1e-4)
    assert oklab(linear("ff0000")) == pytest.approx([0.628, 0.225, 0.126], abs=1e-3)
    for vision in ("no red", "no green"):
        assert distance(linear("ffffff"), linear("000000"), vision) == pytest.approx(1, abs=1e-3)
    vermilion, olive = linear("d55e00"), linear("857400")  # which look alike to some
    assert distance(vermilion, olive, "any") > 0.14
    assert min(distance(vermilion, olive, vision) for vision in VISIONS) < 0.02


@pytest.mark.parametrize("theme", THEMES)
def test_lines_boxes_and_hatching_are_seen_on_their_card(theme):
    found = colours(theme)
    for name in (*WORKERS, *RUNS, "busy", "bad", "good", "over", "hatch", "accent"):
        assert contrast(found[name], found["card"]) >= 3, name
    for name in ("ink", "soft", "bad-text"):
        assert contrast(found[name], found["card"]) >= 4.5, name
        assert contrast(found[name], found["paper"]) >= 4.5, name


@pytest.mark.parametrize("theme", THEMES)
def test_no_worker_has_the_stragglers_colour(theme):
    found = colours(theme)
    for name in WORKERS:
        assert distance(found[name], found["bad"], "any") > 0.15, name
        assert min(distance(found[name], found["bad"], vision) for vision in VISIONS) > 0.1, name
    for one, other in itertools.combinations(WORKERS, 2):
        assert distance(found[one], found[other], "any") > 0.1, (one, other)
    for one, other in itertools.combinations(RUNS, 2):
        assert distance(found[one], found[other], "any") > 0.1, (one, other)
    for other in ("bad", "over", "idle"):  # what is beside it in one bar
        assert distance(found["busy"], found[other], "any") > 0.1, other


def test_dark_is_the_same_by_the_system_and_by_choice():
    assert DARK_BY_SYSTEM.split() == DARK_BY_CHOICE.split()
