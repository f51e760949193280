"""What is trained changes in mid-run; groups smaller than the world; two models; the losses that people print."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import Pace
from support import trained_jobs
from support.forks import as_torchrun, ended
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.torch_jobs import Samples, fresh, optimizer_of

NAMES_LAYERS = guarantee(
    "A layer that is unfrozen or added in a run raises with its name; the ways that the message names "
    "train the model of one process."
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm")]


def check(told: dict[int, str]) -> None:
    assert sorted(told) == [1, 2, 3]
    for number, name in ((1, "second.bias"), (2, "added.weight"), (3, "added.weight")):
        assert f"{name}, which was not trained when Pace was made" in told[number]


@NAMES_LAYERS
def test_what_is_trained_from_the_middle_of_a_run_is_refused_before_it_is_stepped() -> None:
    for told, rounds in run_ranks(2, trained_jobs.trained_in_mid_run):
        check(told)
        assert rounds == 5, "the loop goes on without it"


SCRIPT = """
import torch
from paceline.torch import ElasticPace
from support.trained_jobs import frozen, refused

torch.set_num_threads(1)
module, optimizer = frozen()
with ElasticPace(module, 16) as pace:
    pace.register(optimizer)
    told = refused(pace, module, module, optimizer)
    print(f"{told}\\n", end="", flush=True)
"""


@NAMES_LAYERS
def test_so_it_is_where_ranks_may_be_lost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "paceline.torch.launcher",
        "--workers",
        "2",
        "--max-restarts",
        "0",
        str(script),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=dict(os.environ) | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        check(ast.literal_eval(line))


@NAMES_LAYERS
def test_the_ways_that_are_told_train_the_model_of_one_process() -> None:
    for found in run_ranks(2, trained_jobs.unfrozen_in_the_ways_that_are_told):
        assert max(found) < 1e-12


@guarantee("A DDP module whose group is smaller than the world raises.")
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_group_that_is_smaller_than_the_world_is_refused(everywhere: bool) -> None:
    sentences = run_ranks(4, trained_jobs.in_two_groups, everywhere)
    for sentence in sentences if everywhere else sentences[:2]:
        assert "in a group of 2 ranks, and 4 take part in the run" in sentence


@guarantee("Two models in one loop, as in a GAN, train as in one process; mistakes with them raise an error.")
@pytest.mark.parametrize(("weigh", "through"), [("loss", "module"), ("loss", "wrapper"), ("hook", "module")])
def test_two_models_are_those_of_one_process(weigh: str, through: str) -> None:
    for found in run_ranks(2, trained_jobs.two_models, weigh, through):
        assert max(found) < 1e-12


@guarantee("Two models in one loop, as in a GAN, train as in one process; mistakes with them raise an error.")
def test_mistakes_with_two_models_are_told() -> None:
    for outside, behind, other, count, left in run_ranks(2, trained_jobs.mistakes_with_two):
        assert "outside of `for ... in pace.loader(...)`" in outside
        assert "after the step of round 0" in behind
        assert "pace.weighted(loss).backward()" in behind
        assert "without any parameter of this Pace's model; step another model's optimizer yourself" in other
        assert "count= is summed over the ranks for the model of this Pace alone" in count
        assert "another model has left gradients in this one" in left


def test_a_second_model_needs_rounds_of_one_turn() -> None:
    model = fresh(torch.float64)
    optimizer = optimizer_of(model)
    with Pace(model, 16, "equal", loop="pieces", micro_batch=8) as pace:
        for x, y, _ in pace.loader(Samples(16)):
            pace.backward(nn.functional.cross_entropy(model(x), y))
            if pace.step(optimizer):
                with pytest.raises(PacelineError, match="use loop='whole'"):
                    pace.weighted(torch.ones(()))


@guarantee(
    "`pace.mean`, `pace.gather` and `pace.loss_now()` count each sample of a round once, also with an idle "
    "rank."
)
@pytest.mark.parametrize(("counts", "loop"), [(False, "whole"), (True, "pieces")])
def test_the_loss_of_this_round_is_told_to_all_who_ask(counts: bool, loop: str) -> None:
    for now, later, told in run_ranks(2, trained_jobs.losses, counts, loop):
        assert now == pytest.approx(later, rel=1e-12)
        assert len(now) == 6
        assert all("no round is complete" in sentence for sentence in told)


def test_a_failure_with_a_single_sample_says_what_to_set() -> None:
    for rank, (note,) in enumerate(run_ranks(2, trained_jobs.one_sample)):
        assert f"rank {rank} was given a single sample in round 1" in note
        assert "Pace(..., limits=[(2, None)] * 2)" in note


@guarantee("A script that closes Pace ends without an error, with or without `destroy_process_group()`.")
def test_a_script_may_destroy_the_group_that_it_has_made() -> None:
    assert run_ranks(2, trained_jobs.destroyed_by_the_script) == [False, False]


@guarantee("A script that closes Pace ends without an error, with or without `destroy_process_group()`.")
def test_such_a_script_ends_without_an_error(tmp_path: Path) -> None:
    """Two of them, each alone: one leaves its group, and one does not."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, torch, torch.distributed as dist
from paceline.torch import Pace
which = os.environ["RANK"]
dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store{{which}}", rank=0, world_size=1)
with Pace(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)), 8) as pace:
    pass
if which == "1":
    dist.destroy_process_group()
""")
    assert ended(as_torchrun(2), [script], whole=True) == [(0, "", "")] * 2
