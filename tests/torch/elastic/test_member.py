"""Ranks that are killed, freeze, leave or join: the run goes on, and trains as one process would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch import ElasticPace, join
from paceline.torch.callbacks import Prometheus, Record
from paceline.torch.elastic.supervisor import Supervisor
from support.elastic_phases import Plan, phased, write
from support.elastic_runs import BATCH, FOR_EVER, Told, alone, exactly, faults, hit, run, stayed
from support.guarantees import guarantee
from support.often import times

NAP = 3e-3  # seconds a sample: while ranks start, the others sleep more than they compute


def check(told: Told, rounds: int | None = None, whole: bool = True, **options: Any) -> None:
    """Every round was run once, with the whole batch, and the parameters are those of one process.

    whole: no round is short. options: for that process."""
    assert not told.of("crash"), told.of("crash")[0][1]["trace"]
    ends = told.of("end")
    assert ends, "nobody has come to the end"
    rounds = rounds or ends[0][1]["rounds"]
    expected = alone(rounds, **options)
    for _, end in ends:
        assert end["rounds"] == rounds
        found = torch.tensor(end["parameters"], dtype=torch.float64)
        assert (found - expected).abs().max() < 1e-12
    by_step: dict[int, list[Any]] = {}
    for line in stayed(told):
        both = [line["loads"], line["shares"]]
        assert by_step.setdefault(line["step"], both) == both  # all make the same plans
    # Those who told of a round may all be lost one after another, with it as their last, once others have joined.
    assert {line["step"] for _, line in told.of("round")} == set(range(rounds))
    assert all(sum(loads) == BATCH for loads, _ in by_step.values()) or not whole


@guarantee(
    "Ranks that begin with different parameters and buffers, also those that are not saved, train those of the "
    "first rank."
)
def test_run_without_faults_trains_model_of_one_process(tmp_path: Path) -> None:
    told = run(tmp_path, 3, 30, lambda *_: None)
    check(told, 30)
    assert len(told.of("end")) == 3
    assert np.array(told.of("round")[-1][1]["loads"]).min() >= 1


@guarantee(
    "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with the "
    "model of one process."
)
def test_run_with_faults_at_random_moments_trains_model_of_one_process(tmp_path: Path) -> None:
    plan = faults(tmp_path, ["kill", "kill", "leave", "freeze"], times(14), 0.05, seed=1)
    told = run(
        tmp_path,
        4,
        FOR_EVER,
        plan,
        restarts=1000,
        nap=NAP,
        dead=1.0,
        slow=[1, 2, 1, 1],
        micro_batch=[7, 5, 9, 7],
    )
    check(told)
    assert len(told.faults) == times(14)


@guarantee(
    "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with the "
    "model of one process."
)
def test_run_with_faults_at_named_instants_trains_model_of_one_process(tmp_path: Path) -> None:
    """Also where some ranks have completed a round and others have not, and in the change of members itself."""
    plan = phased(tmp_path, times(12), seed=4, kinds=("kill", "leave", "fail", "two", "joiner", "first"))
    told = run(tmp_path, 4, FOR_EVER, plan, restarts=1000, nap=NAP, phases=True)
    check(told)
    assert len(told.faults) >= times(12)


@guarantee(
    "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with the "
    "model of one process."
)
def test_joiners_that_leave_or_are_killed_change_no_result(tmp_path: Path) -> None:
    """From ``register`` on until they have joined."""
    plan = phased(tmp_path, times(8), seed=2, kinds=("joiner leaves", "joiner is killed"))
    told = run(tmp_path, 3, FOR_EVER, plan, restarts=1000, nap=NAP, phases=True)
    check(told)
    assert len(told.faults) >= times(8)


MOVING = ("kill", "kill", "leave", "fail", "two", "joiner")
CLAIMED = ("piece", "backward", "sums", "committed", "claiming", "counted")


def most_pieces(told: Told) -> int:
    """Of a rank in a round."""
    return max(line["pieces"] for _, line in told.of("round"))


def uneven(tmp_path: Path, ranks: int, plan: Plan, **asked: Any) -> Told:
    """A run with these faults, of whose ranks one is slow."""
    slow = [3 if rank == 1 else 1 for rank in range(ranks)]
    return run(tmp_path, ranks, FOR_EVER, plan, restarts=1000, nap=NAP, phases=True, slow=slow, **asked)


@guarantee(
    "A lost rank's samples run once, in parts of equal cost, also with claims, `count=` and loader processes."
)
def test_claimed_samples_of_lost_ranks_run_once(tmp_path: Path) -> None:
    """What a lost rank has claimed and not run, or run and not summed, is run by the others."""
    plan = phased(tmp_path, times(10), seed=2, kinds=MOVING, phases=CLAIMED)
    told = uneven(tmp_path, 4, plan, policy="factoring")
    check(told)
    assert len(told.faults) >= times(10)
    assert most_pieces(told) > 3


@guarantee(
    "Under `deterministic=True`, the parameters after a lost rank "
    "have the bits of one process without faults."
)
def test_deterministic_run_with_faults_has_bits_of_one_process(tmp_path: Path) -> None:
    """Those of one process that is not elastic, also where ranks are lost in the middle of a round."""
    plan = phased(tmp_path, 5, seed=3, kinds=MOVING, phases=tuple(p for p in CLAIMED if p != "backward"))
    exact: dict[str, Any] = {"policy": "factoring", "deterministic": True, "quantum": 4, "samples": 1210}
    told = uneven(tmp_path, 3, plan, **exact)
    check(told, whole=False, samples=1210)
    assert len(told.faults) >= 5
    assert most_pieces(told) > 4
    ends = [end for _, end in told.of("end")]
    expected = exactly(ends[0]["rounds"], 1210, 4).tolist()
    for end in ends:
        assert end["parameters"] == expected


@guarantee(
    "A lost rank's samples run once, in parts of equal cost, also with claims, `count=` and loader processes."
)
@pytest.mark.parametrize(("policy", "padded"), [("auto", False), ("level", True)])
def test_samples_of_different_cost_of_lost_ranks_run_once(tmp_path: Path, policy: str, padded: bool) -> None:
    """A lost rank's are run by the others in parts of equal cost; the loss is a mean over their tokens."""
    phases = CLAIMED if policy == "auto" else CLAIMED[:4]
    plan = phased(tmp_path, times(6), seed=5, kinds=MOVING, phases=phases)
    told = uneven(tmp_path, 3, plan, policy=policy, costs={"padded": padded, "micro_batch_cost": 160.0})
    check(told, tokens=True)
    assert len(told.faults) >= times(6)


@guarantee(
    "A lost rank's samples run once, in parts of equal cost, also with claims, `count=` and loader processes."
)
@pytest.mark.parametrize("policy", ["factoring", pytest.param("level", marks=pytest.mark.nightly)])
def test_loader_processes_load_ahead_after_a_loss(tmp_path: Path, policy: str) -> None:
    """The next round's samples, and what is claimed, also where ranks are lost and what was loaded is of no use."""

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if not told.faults and newest >= 5 and len(keeper.members) == 3:
            hit(keeper, told, "kill", keeper.members[1].ident)

    told = run(tmp_path, 3, 40, plan, nap=2e-4, policy=policy, workers=1, slow=[1, 3, 1])
    check(told, 40)
    assert len(told.of("end")) == 2
    for _, end in told.of("end"):  # but in the first rounds of an epoch, or of these members
        assert sum(end["ahead"]) >= len(end["ahead"]) - 12 > 20


@guarantee("Sums that fail and backward passes that are left keep gradients and parameters exact.")
def test_failed_sums_and_a_left_round_keep_parameters_exact(tmp_path: Path) -> None:
    """Though nobody is lost; in the last round, too, which one of the ranks has completed by then. Another leaves its
    loop in the middle of a backward pass, and goes on with it. Connections that are not needed are closed."""
    rounds = 46
    (tmp_path / "order-0").write_text(json.dumps({"phase": "sums", "kind": "fail", "after": rounds - 2}))

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if 0 < newest < rounds - 5 and not (order := tmp_path / "order-2").exists():
            write(order, {"phase": "sums", "kind": "fail", "after": 2})

    told = run(tmp_path, 3, rounds, plan, phases=True, oops=7, waits=True, scaled=True, seconds=100)
    check(told, rounds)
    assert (tmp_path / "oops").exists()
    assert [line["what"] for who, line in told.of("hit") if who == 0] == ["fail"]
    changes = max(line["membership"] for _, line in told.of("mended"))
    assert changes > 12
    assert max(end["files"] for _, end in told.of("end")) < 30 + 4 * changes
    assert max(end["opened"] for _, end in told.of("end")) <= 7  # each may wait for a name server


@guarantee(
    "Learning rates or optimizer options that differ between ranks by more than rounding raise on every rank "
    "at the next report."
)
def test_option_that_a_joiner_counts_from_zero_raises(tmp_path: Path) -> None:
    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if not told.faults and newest >= 10:
            hit(keeper, told, "kill", 1)

    told = run(tmp_path, 2, 4000, plan, restarts=1, nap=NAP, own_decay=True)
    joined = [who for who, _ in told.of("joined")]
    assert (sorted(joined), joined[-1]) == ([0, 1, 2], 2)
    assert not told.of("end")
    crashes = [crash["words"] for _, crash in told.of("crash")]
    assert len(crashes) == 2
    assert all("has other options in round" in words and "weight_decay" in words for words in crashes)


@guarantee("A rank that joins takes over the running statistics of batch norm.")
def test_joiner_takes_over_running_statistics(tmp_path: Path) -> None:
    """A joiner has the running statistics of one of the others, and all ranks have the same parameters."""

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if len(told.faults) < 2 and newest >= 10 + 40 * len(told.faults) and len(keeper.members) == 3:
            hit(keeper, told, "kill", keeper.members[len(told.faults)].ident)

    told = run(tmp_path, 3, 100, plan, restarts=2, nap=5e-4, norm=True, micro_batch=[5, 5, 4])
    assert not told.of("crash"), told.of("crash")[0][1]["trace"]
    ends = [torch.tensor(end["parameters"]) for _, end in told.of("end")]
    assert len(ends) == 3
    assert all((end - ends[0]).abs().max() < 1e-12 for end in ends)
    assert (ends[0] - alone(100, norm=True)).abs().max() < 0.5  # whose batches have other means
    for _, end in told.of("end"):  # who has all is sent nothing
        assert end["received"] == end["useful"] > 0
    joiners = [line for who, line in told.of("joined") if who > 2]
    assert len(joiners) == 2
    for line in joiners:
        had = [one["statistics"] for _, one in told.of("round") if one["step"] == line["rounds"] - 1]
        assert line["statistics"] in had


@guarantee(
    "If all ranks with the model or the machine with the store are lost, the run ends with an error; a "
    "checkpoint resumes it exactly."
)
def test_run_without_a_rank_that_has_the_model_ends_with_an_error(tmp_path: Path) -> None:
    """One is killed, and the other freezes before the one that joins has the model: nothing begins from the start."""

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if not told.faults and newest >= 3:
            hit(keeper, told, "kill", 1)
        elif len(told.faults) == 1 and 2 in {member.ident for member in keeper.members}:
            hit(keeper, told, "freeze", 0)

    told = run(tmp_path, 2, FOR_EVER, plan, restarts=5, nap=2e-3)
    assert [who for who, _ in told.of("crash")] == [2]
    assert "every rank that had the model was lost" in told.of("crash")[0][1]["words"]
    assert not told.of("end")
    assert {who for who, _ in told.of("round")} == {0, 1}


@guarantee(
    "If all ranks with the model or the machine with the store are lost, the run ends with an error; a "
    "checkpoint resumes it exactly."
)
def test_run_whose_ranks_are_all_lost_ends(tmp_path: Path) -> None:
    """The run ends, and waits for nobody."""

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        if not told.faults and newest >= 3:
            for who in (0, 1):
                hit(keeper, told, "kill", who)

    told = run(tmp_path, 2, FOR_EVER, plan, restarts=5, nap=1e-3, seconds=60.0)
    assert not told.of("end")
    assert {who for who, _ in told.of("round")} == {0, 1}


@guarantee(
    "A model, loop, policy or option that cannot survive a lost rank is refused, or named at the start, with "
    "what to use instead."
)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loop": "whole"}, "use loop='round'"),
        ({"callbacks": [Record("runs/one"), Prometheus(0)]}, "Record and Prometheus would end with rank 0"),
    ],
)
def test_option_that_cannot_survive_a_lost_rank_raises(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        ElasticPace(torch.nn.Linear(1, 1), 4, **changed)


@guarantee(
    "A model, loop, policy or option that cannot survive a lost rank is refused, or named at the start, with "
    "what to use instead."
)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Embedding(4, 2, sparse=True), "sparse"),
        (torch.nn.Linear(2, 2, device="meta"), "by gloo on the CPU, and the model is on meta"),
    ],
)
def test_model_that_cannot_survive_a_lost_rank_raises(model: torch.nn.Module, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        ElasticPace(model, 4)


def test_elastic_pace_without_a_launcher_raises() -> None:
    with pytest.raises(PacelineError, match="needs a launcher that outlives the ranks"):
        ElasticPace(torch.nn.Linear(1, 1), 4)
    with pytest.raises(
        PacelineError, match=r"start this script with torchrun \(under paceline.torch.launcher no group"
    ):
        join()
