"""Ranks that are stopped, late, fail or are killed: the others name them. Real processes on a real gloo group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import absent_jobs as jobs
from support.forks import as_torchrun, ended
from support.guarantees import guarantee
from support.ranks import WAITS, run_ranks

pytestmark = pytest.mark.processes

CASES = [  # who is stopped, in which round, under which policy
    (0, 0, "equal"),
    (1, 0, "factoring"),
    (2, 2, "level"),
    (0, 2, "factoring"),
]


@guarantee(
    "A silent rank is named after `patience` seconds (30) and after twice the time, under every policy; a "
    "late rank is named as late."
)
def test_a_stopped_rank_is_named_under_every_policy_from_the_first_round_on(tmp_path: Path) -> None:
    """Also rank 0, which hosts what the ranks tell each other: every call to it hangs meanwhile."""
    told = run_ranks(3, jobs.stopped, CASES, str(tmp_path))
    for number, (who, when, policy) in enumerate(CASES):
        for rank in {0, 1, 2} - {who}:
            named = [(m.round, m.ranks) for m in told[rank][number] if not m.lives]
            assert (when, [who]) in named, (who, when, policy, rank)


@guarantee(
    "A silent rank is named after `patience` seconds (30) and after twice the time, under every policy; a "
    "late rank is named as late."
)
def test_a_rank_that_lives_and_is_late_is_named_as_such(tmp_path: Path) -> None:
    first, slow, third = run_ranks(3, jobs.late, str(tmp_path))
    for told in (first, third):
        assert (0, [1]) in [(missing.round, missing.ranks) for missing in told if missing.lives]
    assert not [missing for missing in slow if missing.lives]


@guarantee(
    "If a rank raises, leaves or is killed, the others end with a `WorkerError` that names it, as far as "
    "known within 4 s."
)
@pytest.mark.parametrize(
    ("who", "policy", "ahead"), [(0, "level", False), (2, "factoring", False), (2, "level", True)]
)
def test_the_rank_that_fails_is_named_with_its_error_on_the_others(
    who: int, policy: str, ahead: bool
) -> None:
    """Also where no connection breaks: on a device, hosts wait for the failed one's report only."""
    told = run_ranks(3, jobs.failing, who, policy, ahead)
    for rank, words in enumerate(told):
        if rank == who:
            assert words == "KeyError", "its own error is its own"
        else:
            start = f"rank {who} failed in round 2: KeyError: 'no such image'; rank {rank} cannot continue"
            assert words.startswith(start)


@guarantee("Reports and claims are waited for as long as the process group waits.")
def test_reports_are_waited_for_as_long_as_the_process_group_waits(tmp_path: Path) -> None:
    (waits, none), (_, sentences) = run_ranks(2, jobs.limits_of_waiting, str(tmp_path))
    assert waits == WAITS
    assert none == []
    assert len(sentences) == 4  # where rank 0 is late, or stopped, in memory and in a collective
    for who, sentence in zip(["rank 0"] * 2 + ["another rank"] * 2, sentences, strict=True):
        assert re.match(
            rf"{who} has not reported its round \d+ s after rank 1 did, as long as the process", sentence
        )


ALONE = """
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, Stall, join, peers
from support.torch_jobs import Samples, fresh, optimizer_of

join()
torch.set_num_threads(1)
ddp = DistributedDataParallel(fresh(torch.float64))
optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
pace = Pace(ddp, 20, "level", stall=Stall(patience=float(sys.argv[2])))
for x, y, _ in pace.loader(Samples(20 * 6), seed=5):
    if peers.rank() == 1 and pace.rounds == 2:
        if sys.argv[1] == "raise":
            raise ValueError("a bad image\\nand more")
        sys.exit(3)
    pace.backward(loss_of(ddp(x), y))
    pace.step(optimizer)
"""


@guarantee(
    "If a rank raises, leaves or is killed, the others end with a `WorkerError` that names it, as far as "
    "known within 4 s."
)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1 failed in round 2: ValueError: a bad image"),
        ("exit", "rank 1 has ended its program"),
    ],
)
def test_a_program_that_ends_alone_is_named_by_the_others(how: str, words: str, tmp_path: Path) -> None:
    """Nobody said ``with``: the error is one that nobody catches."""
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    both = ended(as_torchrun(2), [script, how, "30"], whole=True)
    (status, _, first), (other_status, _, second) = both
    assert status == 1
    assert other_status == (1 if how == "raise" else 3)
    assert words in first.strip().splitlines()[-1]
    assert "rank 0 cannot continue without it" in first
    assert ("ValueError: a bad image" in second) == (how == "raise")
    assert "SIGABRT" not in first + second
