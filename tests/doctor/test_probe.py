"""Watching real DDP ranks: the times are each rank's own, and the training stays bit for bit what it was."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

import paceline.doctor
from paceline import PacelineError, runs
from paceline.doctor.hooks import Hooks
from paceline.doctor.phases import Phase
from paceline.doctor.probe import Probe
from paceline.torch import leave
from support.commands import installs, python
from support.guarantees import guarantee
from support.ranks import run_ranks

FINDS_TIME = guarantee(
    "The doctor finds the time that a rank loses in the loader, a pass or the step, and does not count waits "
    "for others."
)

CHANGES_NOTHING = guarantee(
    "The doctor keeps all parameters bit for bit and the program's own hooks; its failure does not end "
    "the training."
)

pytestmark = pytest.mark.processes


class Sleepy(torch.utils.data.Dataset[torch.Tensor]):
    """Eight samples a batch, the last of which takes a while to fetch."""

    def __init__(self, rank: int, steps: int, pause: float) -> None:
        made = torch.Generator().manual_seed(rank)
        self.samples = torch.randn(8 * steps, 4, generator=made, dtype=torch.float64)
        self.pause = pause

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 7:
            time.sleep(self.pause)
        return self.samples[index]


PHASES = ("FETCH", "PREPARE", "FORWARD", "BETWEEN", "BACKWARD", "FINISH")


class Net(torch.nn.Module):
    """Sleeps in the forward and in the backward pass."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, dtype=torch.float64)
        self.forward_pause, self.backward_pause = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_pause)
        y = self.layer(x)
        y.register_hook(lambda _: time.sleep(self.backward_pause))
        return y


def train(
    rank: int,
    ranks: int,
    run_dir: str | None,
    steps: int,
    watched: int,
    pauses: list[dict[str, float]],
    micro: int = 1,
    synchronised: bool = False,
    loader: bool = True,
    attack: int = 0,
) -> tuple[list[float], bool]:
    """Ranks that sleep so long in each phase of a step; the parameters, and whether they are watched to the end.

    micro: backward passes in a step. synchronised: each of them exchanges gradients. loader: batches come from a
    DataLoader. attack: further passes before the step's own, through the same samples, whose gradients are zeroed.
    """
    torch.manual_seed(0)
    pause = {name: pauses[rank].get(name, 0.0) / micro for name in PHASES}
    ddp = DistributedDataParallel(Net(pause["FORWARD"], pause["BACKWARD"]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    probe = None
    if run_dir is not None:
        probe = Probe(ddp, watched, run_dir)
    data = Sleepy(rank, steps * micro, pause["FETCH"])
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8) if loader else data.samples.split(8))
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            x = next(batches)
            time.sleep(pause["PREPARE"])
            for _ in range(attack):
                ddp(x).square().mean().backward()
            if attack:
                optimizer.zero_grad()
            alone = part < micro - 1 and not synchronised
            with ddp.no_sync() if alone else contextlib.nullcontext():
                loss = ddp(x).square().mean()
                time.sleep(pause["BETWEEN"])
                loss.backward()
        time.sleep(pauses[rank].get("FINISH", 0.0))
        optimizer.step()
    attached = probe is not None and bool(probe._hooks._handles)
    if probe is not None:
        probe.detach()
    values = torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()
    leave(ddp)
    return values, attached


def phase(run: runs.Run, name: str) -> np.ndarray:
    """Seconds, shape (T, n)."""
    return np.array([row[name] for row in run.extras["phases"]])


@CHANGES_NOTHING
@FINDS_TIME
def test_each_phase_is_distinguished_from_the_others_and_from_waiting(tmp_path: Path) -> None:
    """Each of three ranks sleeps in two other phases; a sleep shows there, on that rank, and nowhere else."""
    pauses = [
        {"FETCH": 0.12, "BETWEEN": 0.1},
        {"PREPARE": 0.12, "BACKWARD": 0.1},
        {"FORWARD": 0.12, "FINISH": 0.1},
    ]
    plain = run_ranks(3, train, None, 9, 0, [{}] * 3)  # sleeps change no parameters
    seen = run_ranks(3, train, str(tmp_path / "run"), 9, 8, pauses)
    assert [values for values, _ in plain] == [values for values, _ in seen]
    assert not any(attached for _, attached in seen), "hooks are left after the last step"
    run = runs.read(tmp_path / "run")
    assert run.round.tolist() == list(range(6)), "two steps of warm-up are left out"
    assert run.loads.tolist() == [[8, 8, 8]] * 6
    # Sleeps are lower bounds, and the least of six steps is near them on a busy machine, too.
    for name in PHASES:
        for rank, pause in enumerate(pauses):
            least = phase(run, name)[:, rank].min()
            assert least >= pause[name] if name in pause else least < 0.09, (name, rank)
    assert run.compute.min() >= 0.22
    assert phase(run, "REDUCE").min() < 0.09, "what the others slept is not one's own time"
    assert np.allclose(run.overhead, phase(run, "FINISH")), "what does not grow with the samples"
    whole = run.compute + phase(run, "REDUCE")
    longest = np.maximum(whole[:, 0], run.compute.max(axis=1))
    assert np.allclose(run.seconds, longest), "nothing of a step is left out or told twice"
    assert np.allclose(whole.sum(axis=0), whole[:, 0].sum(), rtol=0.3), "all end their steps together"
    told = run.extras["loop"][-1]
    assert [each["loader"] for each in told] == [
        {"processes": 0, "stream": False, "whole": True, "options": ["shuffle=False"]}
    ] * 3
    assert told[0]["host"] == ""


@pytest.mark.parametrize("synchronised", [False, True])
def test_accumulated_micro_batches_are_one_step(tmp_path: Path, synchronised: bool) -> None:
    pauses = [{}, {"FORWARD": 0.1, "PREPARE": 0.1, "FETCH": 0.1}]
    run_ranks(2, train, str(tmp_path / "run"), 8, 8, pauses, 4, synchronised)
    run = runs.read(tmp_path / "run")
    assert run.loads.tolist() == [[32, 32]] * 6
    assert run.compute[:, 1].min() >= 0.3 > run.compute[:, 0].min()
    for name in ("FORWARD", "PREPARE", "FETCH"):
        assert phase(run, name)[:, 1].min() >= 0.1
    counts = run.extras["counts"][-1]
    assert np.array(run.extras["parts"][-1])[:, 2].tolist() == counts["backwards"]
    assert counts == {"fetches": [4, 4], "backwards": [4, 4], "exchanges": [4, 4] if synchronised else [1, 1]}


def test_passes_whose_gradients_are_zeroed_are_no_accumulation(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path / "run"), 6, 6, [{}] * 2, 1, False, True, 3)
    run = runs.read(tmp_path / "run")
    assert run.loads.tolist() == [[8, 8]] * 4
    assert run.extras["counts"][-1] == {"fetches": [1, 1], "backwards": [1, 1], "exchanges": [1, 1]}


def test_the_line_that_sleeps_is_found(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path / "run"), 17, 16, [{}, {"PREPARE": 0.06, "FETCH": 0.03}])
    lines = [each["lines"] for each in runs.read(tmp_path / "run").extras["loop"][-1]]
    assert lines[1]["PREPARE"].startswith("test_probe.py, line ")
    assert lines[1]["PREPARE"].endswith(': time.sleep(pause["PREPARE"])')
    assert lines[1]["FETCH"].endswith(": time.sleep(self.pause)")


def test_a_training_that_ends_early_leaves_what_was_reported(tmp_path: Path) -> None:
    """Its batches come from no DataLoader, and none is told of."""
    run_ranks(2, train, str(tmp_path / "run"), 17, 100, [{"FORWARD": 0.001}] * 2, 1, False, False)
    run = runs.read(tmp_path / "run")
    assert run.round.tolist() == list(range(8)), "the report after 10 steps"
    assert run.extras["counts"][-1]["fetches"] == [0, 0]
    assert run.extras["loop"][-1][0]["loader"] is None


kept: list[torch.nn.Module] = []  # a module's last work may abort a process that lets go of it


def second(rank: int, ranks: int) -> list[float]:
    """This rank's own seconds of each step, where rank 1 sleeps before the backward pass of a second module."""
    ddp, other = (DistributedDataParallel(torch.nn.Linear(4, 2)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ddp, other)]
    hooks = Hooks(ddp, lambda: None)
    for _ in range(6):
        for module, optimizer in zip((other, ddp), reversed(optimizers), strict=True):
            loss = module(torch.ones(8, 4)).square().mean()
            time.sleep(0.1 if rank == 1 and module is other else 0)
            loss.backward()
            optimizer.step()
    steps = [step[: len(Phase)] for step in hooks.steps(all_of_them=True)]
    hooks.remove()
    kept.append(other)
    leave(ddp)
    return [sum(step) - step[Phase.REDUCE] for step in steps[2:]]


@FINDS_TIME
def test_waiting_in_the_backward_pass_of_a_second_module_is_no_work() -> None:
    quick, slow = run_ranks(2, second)
    assert min(slow) >= 0.1
    assert min(quick) < 0.05


def refusals(rank: int, ranks: int) -> list[str]:
    """What cannot be watched."""
    found = []
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    for model, steps in ((torch.nn.Linear(4, 2), 10), (ddp, 1)):
        try:
            paceline.doctor.watch(model, steps)
        except PacelineError as error:
            found.append(str(error))
    leave(ddp)
    return found


def test_model_that_cannot_be_watched_raises() -> None:
    for first, second in run_ranks(2, refusals):
        assert "expected a DistributedDataParallel" in first
        assert "steps=1" in second


def beside_the_program(rank: int, ranks: int) -> tuple[int, int, int]:
    """Steps trained where what should tell of them fails; how often a program's own hook of all optimizers ran, which
    runs after the doctor's; hooks left over."""
    before, ran = len(torch_optimizer._global_optimizer_post_hooks), []

    def failing(_: object) -> None:
        raise ZeroDivisionError

    def trained(*reports: Any) -> int:
        ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        Probe(ddp, 5, None, *reports)
        own = torch_optimizer.register_optimizer_step_post_hook(lambda *_: ran.append(1))
        for _ in range(8):
            optimizer.zero_grad()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        own.remove()
        kept.append(ddp)
        return len(torch_optimizer._global_optimizer_post_hooks) - before + len(ddp._forward_pre_hooks)

    left = trained()
    after = len(ran)
    trained(failing)
    leave(kept[-1])  # type: ignore[arg-type]
    return len(ran) - after, after, left


@CHANGES_NOTHING
def test_a_watcher_that_fails_ends_no_training_and_the_programs_hooks_run_at_each_step() -> None:
    assert run_ranks(2, beside_the_program) == [(8, 8, 0)] * 2


def test_what_prints_the_findings_is_missed_at_once() -> None:
    code = "import sys; sys.modules['rich'] = None; import paceline.doctor; paceline.doctor.watch(None)"
    done = python(code)
    assert re.search(f"PacelineError: rich is not installed; {installs('cli')}$", done.stderr.strip())
