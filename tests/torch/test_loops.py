"""Every form of loop keeps its meaning: the model of one process, or a sentence, never a wrong step in silence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from support.guarantees import guarantee
from support.loop_jobs import COUNT, DRAWS, loops, mutilated, mutilations
from support.often import THOROUGH
from support.ranks import run_ranks
from support.torch_jobs import UNEVEN

pytestmark = pytest.mark.processes

LOOSE = ((1, None),) * 3
FORMS = ("whole", "round", "pieces", "own whole", "own round", "own pieces")
EXTRAS: dict[str, dict[str, Any]] = {
    "zeroed at the top": {"zero": "top"},
    "zeroed in place at the top": {"zero": "top, in place"},
    "zeroed at the bottom": {"zero": "bottom"},
    "clipped": {"clip": True, "zero": "top"},
    "scaled": {"scaled": True},
    "scaled and clipped": {"scaled": True, "clip": True},
    "scheduled": {"schedule": True},
    "two optimizers": {"two": True, "zero": "top"},
    "two optimizers, scaled": {"two": True, "scaled": True},
    "bucket views": {"views": True, "zero": "top"},
    "hook": {"weigh": "hook", "zero": "top"},
    "hook, bucket views": {"weigh": "hook", "views": True, "zero": "bottom"},
}
POLICIES = {"equal": "equal", "level": "level", "auto": "auto", "dolbie": "dolbie", "uneven": UNEVEN}


def _cases() -> dict[str, dict[str, Any]]:
    """Each form with each extra; the policies, and accumulation where the form takes it, take turns.

    Where ``THOROUGH``, each extra with and without accumulation."""
    cases, micro_step = {}, itertools.cycle(POLICIES.items())
    for (at, form), (number, (extra, options)) in itertools.product(
        enumerate(FORMS), enumerate(EXTRAS.items())
    ):
        if "hook" in extra and form.endswith("round"):
            continue  # pace.round runs the backward pass itself
        either = (False, True) if THOROUGH else ((at + number) % 2 == 1,)
        for accumulates in either if not form.endswith("whole") else (False,):
            policy, chosen = next(micro_step)
            if "hook" in extra and form == "own pieces":
                policy, chosen = "level", "level"
            case = {"form": form, "policy": chosen, "limits": LOOSE, **options}
            if accumulates:
                case["micro_batch"] = 7
            cases[f"{form}, {extra}, {policy}, {'accumulates' if accumulates else 'whole'}"] = case
    return cases


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
def test_every_form_of_loop_trains_the_model_of_one_process() -> None:
    cases = _cases()
    found = run_ranks(3, loops, list(cases.values()))
    for number, (name, case) in enumerate(cases.items()):
        for difference, micro_steps, rounds in (rank[number] for rank in found):
            assert difference < 1e-12, f"{name}: relative difference {difference:.1e}"
            assert rounds == (DRAWS if case["form"].startswith("own") else 6), name
            assert micro_steps == rounds or case["form"].endswith("pieces"), name
    assert any(rank[n][1] > rank[n][2] for rank in found for n in range(len(cases))), (
        "no round took several micro-steps"
    )


@guarantee(
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or raises "
    "before the step."
)
@pytest.mark.parametrize(
    ("policy", "form"),
    [
        ("equal", "round"),
        ("auto", "whole"),
        ("auto", "pieces"),
        pytest.param("equal", "whole", marks=pytest.mark.nightly),
        pytest.param("equal", "pieces", marks=pytest.mark.nightly),
        pytest.param("auto", "round", marks=pytest.mark.nightly),
    ],
)
def test_a_mutilated_loop_means_what_it_says_or_is_refused(form: str, policy: str) -> None:
    (meant,) = run_ranks(1, mutilated, form, policy, True)
    found = run_ranks(2, mutilated, form, policy, False)
    assert len(mutilations(form)) > 20
    refused = 0
    for name, right in meant.items():
        for rank in found:
            if isinstance(rank[name], str):
                refused += 1
                continue
            assert not isinstance(right, str), f"{name}: went on, where one process says {right}"
            for ours, theirs in zip(rank[name], right, strict=True):
                torch.testing.assert_close(
                    torch.tensor(ours),
                    torch.tensor(theirs),
                    rtol=1e-10,
                    atol=1e-12,
                    msg=lambda m, name=name: f"{name}: {m}",
                )
    assert 0 < refused < 2 * len(meant)


def test_a_loop_that_was_left_between_rounds_goes_on_with_the_next_epoch() -> None:
    left = range(1, 4)
    for found in run_ranks(3, loops, [{"leave_after": rounds, "policy": UNEVEN} for rounds in left]):
        for leave_after, (difference, _, rounds) in zip(left, found, strict=True):
            assert difference < 1e-12
            assert rounds == leave_after + 2 * -(-COUNT // 48)
