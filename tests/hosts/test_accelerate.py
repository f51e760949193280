"""Balanced batches in a real Accelerate loop: exact, resumable, and clear about what it can't do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import hosts
from support.guarantees import guarantee
from support.later import later
from support.ranks import run_ranks

jobs = later("support.accelerate_jobs", needs="accelerate")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]


def test_as_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["plain"][0] < 1e-12
        assert rank["clipped"] < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in found])


def test_two_ranks_also_resume_after_three(found: list[dict[str, Any]], folder: str) -> None:
    both = run_ranks(2, jobs.cases, folder)
    for rank in both:
        assert rank["plain"][0] < 1e-12
        assert rank["fewer"][0] < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in both])
    second = [i for rank in found for i in rank["resumed"][1][1]] + [
        i for rank in both for i in rank["fewer"][1][0]
    ]
    assert sorted(second) == list(range(hosts.COUNT))


def test_scheduler_steps_with_the_rounds(found: list[dict[str, Any]]) -> None:
    for steps, rounds in (rank["scheduled"] for rank in found):
        assert steps == rounds == 12


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_accumulates_as_the_accelerator_is_set(found: list[dict[str, Any]], accumulate: bool) -> None:
    for off, micro_steps, steps in (rank[f"accumulated, {accumulate}"] for rank in found):
        assert off < 1e-12
        assert micro_steps == 2 * 12, "every round takes two turns on every rank"
        assert steps == 2, "the Accelerator's own setting is as it was"


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("steps", [1, 2])
def test_samples_may_cost_differently(found: list[dict[str, Any]], steps: int) -> None:
    for off, _, micro_steps in (rank[f"by cost, {steps}"] for rank in found):
        assert off < 1e-12
        assert micro_steps == steps * 12
    hosts.every_sample_once([rank[f"by cost, {steps}"][1] for rank in found])


def test_accumulates_in_pieces_where_asked(found: list[dict[str, Any]]) -> None:
    for off, micro_steps, micro_batch in (rank["in pieces"] for rank in found):
        assert off < 1e-12
        assert micro_batch == 3  # 16 samples over 3 ranks and 2 steps
        assert micro_steps > 12, "some rounds took several micro-steps"


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
@pytest.mark.parametrize("form", ["accumulate", "own"])
def test_learning_rates_are_those_of_the_loop_without_it(found: list[dict[str, Any]], form: str) -> None:
    for theirs, ours, off, micro_steps in (rank["loops"][form] for rank in found):
        assert ours == theirs
        assert ours[-1] == 0.0
        assert off < 1e-12
        assert micro_steps[0] == micro_steps[1] == 8, (
            "len(loader) is the number of micro-steps, as without balancing"
        )


@guarantee("Under Accelerate, a missing or early step, or `accelerator.backward`, raises before the step.")
def test_round_without_its_step_and_step_without_its_round_raise(found: list[dict[str, Any]]) -> None:
    for says in (rank["loops"] for rank in found):
        assert "continued without optimizer.step()" in says["untold"]
        assert "AcceleratePace(..., accumulate=k)" in says["untold"]
        for shifted in ("shifted", "steps without accumulate"):
            assert "(i + 1) % 2 == 0" in says[shifted]
        assert "continued without optimizer.step()" in says["shifted, untold"]


def test_a_step_that_the_scaler_left_out_is_no_mistake(found: list[dict[str, Any]]) -> None:
    for rounds, scale, says in (rank["loops"]["overflown"] for rank in found):
        assert rounds == 3, "the one that overflowed among them"
        assert scale == 2.0
        assert "round 3 is complete, and the loop continued without optimizer.step()" in says


@pytest.mark.parametrize("accumulate", [False, True])
def test_work_may_move_within_the_round(found: list[dict[str, Any]], accumulate: bool) -> None:
    cases = [rank[f"moved, {accumulate}"] for rank in found]
    hosts.every_sample_once([used for _, used, _ in cases])
    assert max(off for off, _, _ in cases) < 1e-12
    assert sum(micro_steps for *_, micro_steps in cases) > 36


def test_resumes_where_it_was_saved(found: list[dict[str, Any]]) -> None:
    for off, _, _ in (rank["resumed"] for rank in found):
        assert off < 1e-12
    used = [
        [(first + second[:1])[0], first[1] + second[0]] for _, first, second in (r["resumed"] for r in found)
    ]
    hosts.every_sample_once(used)


def test_bf16(found: list[dict[str, Any]]) -> None:
    for off, dtypes in (rank["bf16"] for rank in found):
        assert dtypes == "{torch.bfloat16}"
        assert off < 0.02


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluates_as_without_it(found: list[dict[str, Any]]) -> None:
    for ours, theirs in (rank["evaluated"] for rank in found):
        assert sum(map(len, ours)) == 3 * hosts.COUNT
        assert ours == theirs


@guarantee("Under Accelerate, a missing or early step, or `accelerator.backward`, raises before the step.")
def test_mistakes_raise(found: list[dict[str, Any]]) -> None:
    for says in (rank["refused"] for rank in found):
        assert "use weigh='loss'" in says["hook"]
        assert "a checkpoint within round 0" in says["early"]
        assert "sync_gradients was changed" in says["changed"]
        assert "without pace.backward(loss)" in says["forgotten"]
        assert "scales by itself" in says["scaler"]
        assert "a backward pass that is not Paceline's" in says["stepped without"]
        assert "accumulate=2 and gradient_accumulation_steps=2" in says["twice"]
        assert "with loop='pieces'" in says["both"]


def scheduled(rank: int, ranks: int, balanced: bool) -> list[float]:
    """The learning rate of each step; the number of steps is counted by ``len`` of the loader, and the scheduler is
    prepared after it is known."""
    from paceline.hosts.accelerate import AcceleratePace
    from support.accelerate_loops import accelerator

    hosts.as_torchrun(rank, ranks)
    host = accelerator()
    data, model = torch.utils.data.TensorDataset(torch.randn(96, 4)), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = torch.utils.data.DataLoader(data, 8)
    if balanced:
        model = host.prepare(model)
        pace = AcceleratePace(host, model, 8 * ranks)
        loader = pace.loader(data)
    else:
        model = host.prepare(model)
    total = 3 * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    optimizer, scheduler = host.prepare(optimizer, scheduler)
    if not balanced:
        loader = host.prepare(loader)
    rates = []
    for _ in range(3):
        for (x,) in loader:
            loss = model(x).mean()
            pace.backward(loss) if balanced else host.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if balanced:
        pace.host.detach()
    return rates


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
def test_scheduler_over_rounds_has_the_rates_of_the_plain_program() -> None:
    plain, ours = run_ranks(3, scheduled, False), run_ranks(3, scheduled, True)
    assert len(plain[0]) == 12
    for theirs, found in zip(plain, ours, strict=True):
        assert found == pytest.approx(theirs, abs=1e-12)
