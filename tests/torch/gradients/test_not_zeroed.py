"""Gradients that a step was taken with and that are still there: the next backward pass would count them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.torch_jobs import fresh
from support.zero_jobs import OWN, RIGHT, ROUNDS, STEPS, train, under_the_hook

GUARANTEES = (
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or "
    "raises before the step.",
)

FORMS: tuple[dict[str, Any], ...] = ({}, {"loop": "round"}, {"loop": "pieces", "micro_batch": 3})
CASES = [
    (name, options) for name in STEPS for options in FORMS
    if not (options.get("loop") == "pieces" and name in OWN)  # refused within a round, whatever follows
]  # fmt: skip


def check(name: str, rounds: int, sentence: str) -> None:
    if name in RIGHT:
        assert (rounds, sentence) == (ROUNDS, ""), name
    else:
        assert sentence.startswith("round 1: gradients of the round before are still in the model"), name


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_a_step_has_used_is_not_counted_again(name: str, options: dict[str, Any]) -> None:
    net = fresh(torch.float64)
    check(name, *train(net, net, STEPS[name], **options))


@pytest.mark.processes
def test_nor_under_the_hook() -> None:
    for found in run_ranks(2, under_the_hook):
        for name, (rounds, sentence) in found.items():
            check(name, rounds, sentence)
