"""``paceline verify`` in real processes: it calls exact programs exact, and finds each wrong one, with its lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.guarantees import guarantee
from support.verified import verified

PROGRAM = Path(__file__).with_name("program.py")
EXACT = [
    "draws",
    "sampler",
    "square",
    "round",
    "pieces",
    "stream",
    "scaler",
    "short",
    "recurrent",
    "norm",
    "unseeded",
]
OFTEN = "draws"  # with every change; the others once a day
# A form of program.py: the sentence, and a suspect.
WRONG = {
    "center": ("not exact with loads 8/16: from step 1", r"program\.py:\d+: allreduce on 8 elements between"),
    "injected": ("not exact", r"program\.py:\d+: the autograd function Injected makes a gradient"),
    "statistic": ("not exact", r"program\.py:\d+: allreduce on 9 elements"),
    "normalised": ("not exact", r"program\.py:\d+: allreduce on 1 elements"),
    "sum": ("not exact", r"the loss grows with the samples of its rank"),
    "compared": ("not exact", r"the loss is neither a mean nor a sum"),
    "absent": ("not exact", r"the gradient of head.weight is None in one run only"),
    "metrics": ("not exact with loads 8/16: pace.mean 1 before step 1 is", r"pace.mean 1 before step 1 is"),
    "average": ("not exact with loads .*ranks differ by .* in Teacher", r"Teacher.* differs between ranks"),
}  # fmt: skip


def form(name: str, *often: str) -> object:
    return pytest.param(name, marks=() if name in often else pytest.mark.nightly)


@guarantee(
    "`paceline verify` calls an exact port exact, with dropout, noise, loader processes, pieces, streams or "
    "a GradScaler."
)
@pytest.mark.processes
@pytest.mark.parametrize("name", [form(name, OFTEN) for name in EXACT])
def test_a_program_that_is_exact_is_called_exact(name: str) -> None:
    verdict = verified(PROGRAM, name, ranks=2)
    assert verdict.exact, verdict
    steps = 2 if name == "short" else 5
    assert re.match(rf"exact to \S+ over {steps} steps with loads 8/16, 0/24 and 24/0$", verdict.sentence), (
        verdict.sentence
    )
    assert verdict.suspects == []
    notes = {"recurrent": "dropout between the layers of memory", "norm": "batch norm was in evaluation mode"}
    assert any(note.startswith(notes[name]) for note in verdict.notes) if name in notes else not verdict.notes


@guarantee(
    "`paceline verify` finds a port that trains another model, and names the likely cause by file and line."
)
@pytest.mark.processes
@pytest.mark.parametrize("name", [form(name, "center", "injected") for name in WRONG])
def test_a_program_that_trains_another_model_is_found_with_its_line(name: str) -> None:
    verdict = verified(PROGRAM, name, ranks=2)
    sentence, suspect = WRONG[name]
    assert verdict.exact is False, verdict
    assert re.match(sentence, verdict.sentence), verdict.sentence
    assert any(re.search(suspect, each) for each in verdict.suspects), verdict.suspects


@pytest.mark.nightly
@pytest.mark.processes
def test_batch_norm_in_training_mode_is_measured_if_asked_for() -> None:
    verdict = verified(PROGRAM, "norm", ranks=2, batch_norm=True)
    assert verdict.exact is False
    assert verdict.notes == []


@pytest.mark.nightly
@pytest.mark.processes
def test_draw_for_the_whole_batch_is_reported() -> None:
    verdict = verified(PROGRAM, "coin", ranks=2)
    assert verdict.exact, "all ranks toss alike"
    assert any(
        note.startswith("Python's random draws random numbers within a step") for note in verdict.notes
    )
