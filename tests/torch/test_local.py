"""Ranks that step by themselves between merges: what the model comes to, against one process that plays the same."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.sync.intervals import interval
from paceline.torch import ElasticLocalSGD, LocalSGD, Merge
from paceline.torch.local import Every
from paceline.torch.local_merge import Flats
from support import local_jobs
from support.guarantees import guarantee
from support.local_jobs import COUNT, SINGLE, replayed, together, trained
from support.ranks import WAITS, run_ranks
from support.torch_jobs import UNEVEN, Samples, fresh

pytestmark = pytest.mark.processes

ANY = {"limits": [(0, None)] * 3}
LATE = Merge(outer="nesterov:lr=0.7,momentum=0.9", delay=1)
CASES: dict[str, dict[str, Any]] = {
    "loads of any kind": {"policy": UNEVEN, "every": 3, "momentum": 0.9, **ANY},
    "claimed": {"policy": "factoring", "every": 4, "momentum": 0.9, "jitter": 0.002},
    "claimed step by step": {"policy": "factoring:scheme=self", "every": 4, "jitter": 0.002},
    "auto": {"policy": "auto", "every": 3, "jitter": 0.02, "adam": True},
    "by the clock": {"every": "0.01 s", "jitter": 0.002},
    "as often as the link allows": {"every": "auto", "jitter": 0.001},
    "prefetched": {"policy": UNEVEN, "every": 2, "loader_workers": 1, **ANY},
    "prefetched by the clock": {"every": 0.01, "loader_workers": 1, "jitter": 0.002},
    "tokens": {"policy": UNEVEN, "every": 3, "counted": True, **ANY},
    "by steps": {"policy": UNEVEN, "every": 3, "merge": Merge(by="steps"), **ANY},
    "by ranks": {"policy": UNEVEN, "every": 3, "merge": Merge(by="ranks"), **ANY},
    "Nesterov": {"policy": UNEVEN, "every": 2, "merge": Merge(outer="nesterov:lr=0.7,momentum=0.9"), **ANY},
    "delayed": {"policy": UNEVEN, "every": 2, "merge": Merge(delay=1), "momentum": 0.9, **ANY},
    "delayed, statistics": {"policy": UNEVEN, "every": 1, "merge": LATE, "norm": True, **ANY},
    "delayed, claimed": {"policy": "auto", "every": 3, "merge": LATE, "jitter": 0.02, "adam": True},
    "delayed, by the clock": {"every": "0.01 s", "merge": Merge(by="ranks", delay=1), "jitter": 0.002},
    "delayed, as often as the link allows": {"every": "auto", "merge": LATE, "jitter": 0.001},
    "delayed, prefetched": {
        "policy": "level",
        "every": 2,
        "merge": LATE,
        "loader_workers": 1,
        "jitter": 0.002,
    },
    "decayed": {"policy": UNEVEN, "every": 2, "decay": 0.1, **ANY},
    "delayed, decayed": {"policy": UNEVEN, "every": 2, "merge": LATE, "decay": 0.1, **ANY},
    "delayed, decayed in each interval": {
        "policy": "equal",
        "every": 1,
        "merge": Merge(delay=1),
        "decay": 0.1,
    },
    "clipped": {"policy": UNEVEN, "every": 2, "clip": 0.05, "adam": True, **ANY},
    "scaled": {"policy": UNEVEN, "every": 2, "scaled": True, **ANY},
    "sums": {"policy": UNEVEN, "every": 2, "reduction": "sum", **ANY},
    "statistics": {"policy": UNEVEN, "every": 3, "norm": True, **ANY},
    "costs": {"policy": "level", "every": 3, "cost": True, "jitter": 0.002},
    "costs, claimed": {"policy": "factoring", "every": 3, "cost": True, "jitter": 0.002},
    "quantum": {"policy": UNEVEN, "every": 3, "quantum": 3, "count": 48, **ANY},
    "unused parameters": {"policy": UNEVEN, "every": 2, "sometimes": True, "momentum": 0.9, **ANY},
    "single precision": {"policy": UNEVEN, "every": 3, "dtype": "float32", "adam": True, **ANY},
}
CASES = {name: {"count": 47} | case for name, case in CASES.items()}


def apart(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a part of the largest number of its kind."""
    most = 0.0
    for name, value in expected.items():
        now = torch.tensor(found[name], dtype=value.dtype)
        assert (now.isinf() == value.isinf()).all(), name
        now, value = now.double().nan_to_num(neginf=0), value.double().nan_to_num(neginf=0)
        most = max(most, float((now - value).abs().max() / value.abs().max().clamp_min(1e-30)))
    return most


@guarantee(
    "All ranks end with the parameters of a replay in one process, also under `Merge(delay=1)`, and use each "
    "sample once per epoch."
)
def test_the_model_is_that_of_a_replay_and_each_sample_counts_once() -> None:
    runs = run_ranks(3, trained, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        own = [each[number] for each in runs]
        assert own[0]["state"] == own[1]["state"] == own[2]["state"], name
        assert own[0]["loss"] == own[1]["loss"]
        steps = [step for run in own for step in run["steps"]]
        rounds, count = own[0]["rounds"], case["count"]
        used = sorted(index for _, indices, _ in steps for index in indices)
        assert used == sorted([*range(count)] * 2), name
        assert own[0]["ends"] == own[1]["ends"] == own[2]["ends"]
        half = sorted(index for at, indices, _ in steps for index in indices if at < rounds / 2)
        assert case["every"] not in (2, 3) or half == [*range(count)], name  # each once an epoch
        assert all(len(indices) <= 1.5 * own[0]["most"] for _, indices, _ in steps), name
        if not case.get("counted") and case.get("reduction") != "sum":
            last = [
                (len(indices) * loss, len(indices))
                for run in own
                for (at, indices, _), loss in zip(run["steps"], run["losses"], strict=True)
                if at == rounds - 1
            ]
            mean = sum(each for each, many in last if many) / sum(many for _, many in last)
            assert own[0]["loss"] == pytest.approx(mean, rel=1e-5 if case.get("dtype") else 1e-12), name
        difference = apart(own[0]["state"], replayed(own, **case))
        assert difference < (1e-4 if case.get("dtype") else 1e-12), f"{name}: {difference:.1e}"


@guarantee(
    "One plain SGD step of each rank between merges gives the model of one process with the whole batch."
)
def test_one_step_each_is_one_process() -> None:
    """Under unlike loads, weighted by samples; under equal loads with momentum, too, which stays on its rank."""
    cases = [
        {"policy": SINGLE, "every": 1, "epochs": 4, **ANY},
        {"policy": "equal", "every": 1, "epochs": 4, "count": 84, "momentum": 0.9},
    ]
    runs = run_ranks(3, trained, cases)
    for number, case in enumerate(cases):
        steps = 4 * 7
        assert [len({at for at, _, _ in run[number]["steps"]}) for run in runs] == [steps] * 3  # one each
        assert all(len(run[number]["steps"]) == steps for run in runs)
        expected = together(steps, case.get("count", COUNT), case.get("momentum", 0.0))
        assert apart(runs[0][number]["state"], expected) < 1e-12
    (only,) = run_ranks(1, trained, [{"every": 1, "epochs": 2, "adam": True}])
    assert apart(only[0]["state"], together(2 * 7, COUNT, 0.0, adam=True)) < 1e-12


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
def test_ranks_that_do_not_fit_together_are_named() -> None:
    *changed, another, wrapped, around, waits = run_ranks(2, local_jobs.spoilt)[0]
    assert len(changed) == len(local_jobs.SPOILT)
    for words in changed[:-1]:  # negated or swapped, too
        assert "interval 1 began with other parameters on rank 0, 1; expected the same on all" in words
    assert "interval 1 began with other parameters on rank 1; expected the same on all" in changed[-1]
    assert "rank 1 was given a model with the checksum of parameters=" in another
    assert "LocalSGD: ranks take different numbers of steps" in wrapped
    assert "model(x) instead of ddp(x)" in around
    assert "calls a collective (barrier) within the round" in waits
    assert waits.endswith("call it if pace.merged")


def test_a_merge_that_one_rank_leaves_alone_ends_the_run() -> None:
    others, alone = run_ranks(2, local_jobs.interrupted)
    assert "round 0 was left on this rank after its backward pass" in alone
    assert "rank 1" in others


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
def test_parameters_of_several_kinds_and_counters_are_merged() -> None:
    first, second = run_ranks(2, local_jobs.kinds)
    assert first == second
    *each, unused, seen = first
    # 8 of 24 samples in 2 steps, 16 in 4
    expected = 1 - (8 * 2 + 16 * 4) / 24 / 8
    for values, precision in zip(each, (1e-15, 1e-7, 2**-8, 2**-11), strict=True):
        assert values == pytest.approx([expected] * 3, abs=precision)
    assert unused == [1.0, 1.0]
    assert seen == [4.0]


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
@pytest.mark.parametrize(("send", "step"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_what_rounding_leaves_out_is_sent_the_next_time(send: str, step: float) -> None:
    """So that the sum of 60 merges is as near as that of one; without it the error grows with their number."""
    (first, most, alone), *_ = run_ranks(3, local_jobs.sent, send)
    assert 0 < first < 2 * step
    assert most < 2 * step
    assert alone > 3 * most


def test_merges_in_fewer_bits_come_to_about_the_same() -> None:
    cases = [
        {"policy": UNEVEN, "every": 2, "norm": True, "merge": Merge(send=send), **ANY}
        for send in ("bf16", "int8")
    ] + [{"policy": UNEVEN, "every": 2, "merge": Merge(send="int8", delay=1), **ANY}]
    runs = run_ranks(3, trained, cases)
    for number, case in enumerate(cases):
        own = [each[number] for each in runs]
        assert own[0]["state"] == own[1]["state"] == own[2]["state"]
        assert 0 < apart(own[0]["state"], replayed(own, **case)) < 0.02


@guarantee(
    "All ranks end with the parameters of a replay in one process, also under `Merge(delay=1)`, and use each "
    "sample once per epoch."
)
def test_loops_that_draw_their_own_samples_and_streams() -> None:
    ranks = run_ranks(3, local_jobs.drawn)
    for kind in range(4):
        assert ranks[0][kind][1:] == ranks[1][kind][1:] == ranks[2][kind][1:]
    for delay in range(2):
        assert sum(sum(rank[delay][0]) for rank in ranks) == 3 * 2 * 12
        assert [sum(rank[2 + delay][0]) for rank in ranks] == [60, 40, 20]


@guarantee(
    "Under `Merge(delay=1)`, a rank that is late by less than an interval delays no other; the process "
    "group's timeout bounds longer waits."
)
def test_a_rank_that_is_late_by_less_than_an_interval_holds_nobody(tmp_path: Path) -> None:
    """It goes on when the other is through the next interval: else this is a hang."""
    assert run_ranks(2, local_jobs.late, str(tmp_path)) == [4, 4]


@guarantee(
    "Under `Merge(delay=1)`, a rank that is late by less than an interval delays no other; the process "
    "group's timeout bounds longer waits."
)
def test_a_rank_that_is_stuck_holds_a_delayed_merge_as_long_as_the_process_group_waits() -> None:
    assert run_ranks(2, local_jobs.patient) == [WAITS, WAITS]


@guarantee(
    'Under `policy="factoring:scheme=self"`, the others wait for at most two steps of a rank that becomes '
    "slow."
)
def test_a_rank_that_becomes_slow_holds_the_others_for_two_of_its_steps_if_steps_are_claimed(
    tmp_path: Path,
) -> None:
    """Where all is planned, it runs as many as were planned. What it has not begun is run by the others."""
    ranks = run_ranks(3, local_jobs.slowed, ["equal", "factoring:scheme=self"], str(tmp_path))
    planned, claimed = ([rank[policy] for rank in ranks] for policy in range(2))
    assert len(planned[1][0]) > 3
    assert len(claimed[1][0]) <= 3  # the running one, its last, and one claimed before others began
    for own in (planned, claimed):
        ran = [sum(steps) for steps, _ in own]
        assert sum(ran) == 6 * local_jobs.BATCH
        assert [loads for _, loads in own] == [ran] * 3  # which the record tells


@guarantee(
    "`pace.flush()` takes in a delayed merge; until then `pace.merged` is false, and a checkpoint is refused."
)
def test_a_loop_that_is_left_takes_in_what_is_on_its_way_with_a_flush() -> None:
    ranks = run_ranks(3, local_jobs.left)
    said, parted, whole, quiet, warned = zip(*ranks, strict=True)
    assert all("a checkpoint after interval 2, whose changes are still on their way" in each for each in said)
    assert parted[0] != parted[1] != parted[2]
    assert whole[0]["state"] == whole[1]["state"] == whole[2]["state"]
    runs = [{**each, "rounds": 3, "ends": [3]} for each in whole]
    assert apart(whole[0]["state"], replayed(runs, merge=Merge(delay=1))) < 1e-12
    assert quiet == ([], [], [])
    assert all("call pace.flush() on all ranks" in each for (each,) in warned)


@guarantee(
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`."
)
def test_what_was_left_within_an_interval_is_run_again() -> None:
    """And the parameters are those of the last merge by then; Nesterov's velocity goes on."""
    ranks = run_ranks(2, local_jobs.resumed)
    for whole, left in ranks:
        assert left[0] == whole[0]
        assert left[2]
        for one, other in zip(whole[1], left[1], strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-12)


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
@pytest.mark.parametrize("delay", [0, 1])
def test_what_rounding_left_out_is_no_part_of_what_is_loaded(delay: int) -> None:
    for whole, again in run_ranks(2, local_jobs.reloaded, delay):
        assert again == whole


def train(**options: Any) -> Callable[..., LocalSGD]:
    """A loop in this process, each of whose steps is what the function that it takes makes of (pace, loss)."""

    def run(step: Callable[[LocalSGD, torch.optim.Optimizer, torch.Tensor], object]) -> LocalSGD:
        model = fresh(torch.float64)
        optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
        with LocalSGD(model, 8, "equal", **{"every": 2, **options}) as pace:
            for x, y, _ in pace.loader(Samples(40), seed=5):
                step(pace, optimizer, loss_of(model(x), y))
        return pace

    return run


def both(pace: LocalSGD, optimizer: Any, loss: torch.Tensor) -> None:
    pace.backward(loss)
    pace.step(optimizer)


MISTAKES: dict[str, tuple[Callable[[LocalSGD, Any, torch.Tensor], object], str]] = {
    "no step": (lambda pace, _, loss: pace.backward(loss), "went on without pace.step"),
    "no backward": (lambda pace, optimizer, _: pace.step(optimizer), "called before pace.backward"),
    "nothing": (lambda *_: None, r"went on without pace.backward\(loss\)"),
    "two steps": (
        lambda pace, optimizer, loss: (both(pace, optimizer, loss), pace.step(optimizer)),
        "pace.step\\(\\) was called twice for one batch",
    ),
    "own step": (
        lambda pace, optimizer, loss: (pace.backward(loss), optimizer.step()),
        "expected pace.step",
    ),
    "closure": (
        lambda pace, optimizer, loss: (pace.backward(loss), optimizer.step(lambda: loss)),
        "closures, as LBFGS needs them, are not supported",
    ),
    "zeroed": (
        lambda pace, optimizer, loss: (pace.backward(loss), optimizer.zero_grad(), pace.step(optimizer)),
        "the gradients were zeroed between",
    ),
    "host": (
        lambda pace, _, loss: (pace.backward(loss), pace.host.stepped()),
        "is for your own loop",
    ),
    "checkpoint": (
        lambda pace, optimizer, loss: (both(pace, optimizer, loss), pace.state_dict()),
        "a checkpoint within round 0",
    ),
}


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_loop_that_is_wrong_is_refused(mistake: str) -> None:
    step, words = MISTAKES[mistake]
    with pytest.raises(PacelineError, match=words):
        train()(step)


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0: expected steps, 1 or more"),
        (
            {"every": "soon"},
            "every='soon': expected steps, 1 or more, seconds such as '2 s' or 2.0, or 'auto'",
        ),
        ({"every": -1.0}, "every=-1.0: expected"),
        ({"every": float("nan")}, "every=nan: expected"),
        ({"every": True}, "every=True: expected"),
        ({"merge": "mean"}, r"merge='mean': expected a paceline.torch.Merge\(...\)"),
        ({"limits": "memory"}, "limits='memory' cuts a step"),
        ({"limits": [(1, None)], "every": "auto"}, "limits= are samples of an interval"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        LocalSGD(fresh(torch.float64), 8, **{"every": 2, **options})


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        (Merge(send="int8"), r"ElasticLocalSGD: Merge\(send='int8'\) rounds sums"),
        (Merge(delay=1), r"ElasticLocalSGD: Merge\(delay=1\) continues with sums"),
    ],
)
def test_merges_that_a_lost_rank_would_leave_unfinished_raise(merge: Merge, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        ElasticLocalSGD(fresh(torch.float64), 8, merge=merge)


def test_merges_are_chosen_in_words() -> None:
    with pytest.raises(
        PacelineError, match="expected one of 'samples', 'steps', 'ranks'; did you mean steps"
    ):
        Merge(by="step")
    with pytest.raises(PacelineError, match="has no option 'speed=1'"):
        Merge(outer="nesterov:speed=1")
    with pytest.raises(PacelineError, match=r"Merge\(send='int4'\): expected None, 'bf16' or 'int8'"):
        Merge(send="int4")
    with pytest.raises(PacelineError, match="expected a name such as"):
        Merge(outer=3)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match=r"Merge\(delay=2\): expected 0, or 1 interval"):
        Merge(delay=2)
    with pytest.raises(PacelineError, match="expected a learning rate above 0"):
        Merge(outer="nesterov:lr=0")
    assert [interval(each) for each in (None, "auto", "2 s", "0.5s", 2.5, "8", 8)] == [
        "auto", "auto", 2.0, 0.5, 2.5, 8, 8,
    ]  # fmt: skip


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
def test_a_table_of_whole_numbers_that_steps_change_is_refused() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("used", torch.zeros(3, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            self.used += y.argmax(1).bincount(minlength=3)
            return y

    model = Counting().double()
    model.used = model.used.long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = LocalSGD(model, 8, every=1)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match="buffer used holds 3 whole numbers"):
        both(pace, optimizer, nn.functional.cross_entropy(model(x), y))
    pace.close()


class Appearing(nn.Linear):
    """Registers a buffer in its first forward pass, or lets one grow."""

    def __init__(self, name: str, persistent: bool = True) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.name, self.persistent = name, persistent
        self.register_buffer("there", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer(self.name, torch.ones(3), self.persistent)
        return super().forward(x)


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
@pytest.mark.parametrize(
    ("name", "persistent", "words"),
    [
        ("late", True, "buffer late has appeared since LocalSGD was made"),
        ("there", True, r"buffer there had the shape \(2,\) and has \(3,\) now"),
        ("cache", False, ""),
    ],
)
def test_buffers_that_appear_or_grow_are_not_left_out_of_merges_in_silence(
    name: str, persistent: bool, words: str
) -> None:
    model = Appearing(name, persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = LocalSGD(model, 8, every=1)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match=words) if words else contextlib.nullcontext():
        both(pace, optimizer, nn.functional.cross_entropy(model(x), y))
    pace.close()


@guarantee("A scheduler that each rank steps by itself causes a warning with the range of learning rates.")
def test_a_scheduler_that_each_rank_steps_by_itself_is_named() -> None:
    """Once, on rank 0; not one that is stepped at merges."""
    (own, merges), *others = run_ranks(2, local_jobs.scheduled)
    assert [each.split(":")[0] for each in own] == [
        "ranks came to the merge of interval 0 with learning rates from 0.05 to 0.1"
    ]
    assert not merges
    assert others == [[[], []]]


@guarantee(
    '`every="auto"` spends at most a tenth of the time on the link, also if '
    "its speed changes; waits for ranks do not count."
)
def test_the_link_takes_a_tenth_of_the_time() -> None:
    """Of 1,000 samples a second and merges of 0.5 s, in which ranks that come early wait longer, come intervals of
    4.5 s; the link then becomes four times faster."""
    every, step, link = Every("auto", 100), 0, 0.5
    for _ in range(60):
        size = every.size(step)
        every.take(step + 1, size, size / 1000, np.array([link + 2.0, link, np.nan]))
        step += 1
        link = 0.125 if step == 30 else link
        if step == 29:
            assert every.size(step) == 4500
    assert every.size(step) == pytest.approx(1125, abs=100)
    seconds = Every(2.0, 100)
    assert seconds.size(0) == 100
    for step in range(5):
        size = seconds.size(step)
        seconds.take(step + 1, size, size / 1000, np.array([np.nan]))
    assert seconds.size(5) == 2000
    again = Every(2.0, 100)
    again.load_state_dict(seconds.state_dict(5))
    assert again.size(5) == 2000


def test_parameters_that_no_merge_knows_of_are_not_stepped() -> None:
    model, outside = fresh(torch.float64), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    pace = LocalSGD(model, 8, every=2)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match="would move a parameter outside of the model"):
        both(pace, optimizer, outside * nn.functional.cross_entropy(model(x), y))
    pace.close()


@pytest.mark.parametrize("loads", [True, False])
def test_a_loop_that_failed_changes_nothing_of_what_is_loaded_afterwards(loads: bool) -> None:
    """An iterator with a name is left only when the error is forgotten, which is behind the handler that loads."""
    model = fresh(torch.float64)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch(pace: LocalSGD) -> None:
        batches = iter(pace.loader(Samples(40), seed=5))
        for x, y, _ in batches:
            both(pace, optimizer, nn.functional.cross_entropy(model(x), y))
            if not pace.merged and pace.rounds == 1:
                raise FloatingPointError

    pace = LocalSGD(model, 8, every=2)
    state = pace.state_dict()
    try:
        epoch(pace)
    except FloatingPointError as error:
        if not loads:
            pace.__exit__(type(error), error, None)
        model.load_state_dict(first)
        if loads:
            pace.load_state_dict(state)
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    pace.close()


@guarantee(
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`."
)
def test_the_outer_optimizer_of_a_checkpoint_goes_on_by_the_rates_chosen_now() -> None:
    def velocity(pace: LocalSGD) -> dict[str, Any]:
        return pace._loop.merges.outer_state()  # type: ignore[no-any-return]

    pace = train(merge=Merge(outer="nesterov:lr=0.7,momentum=0.9"))(both)
    state = pace.state_dict()
    before = copy.deepcopy(state)
    again = LocalSGD(fresh(torch.float64), 8, "equal", every=2, merge=Merge(outer="nesterov:lr=0.5"))
    empty = again.state_dict()
    again.load_state_dict(state)
    assert velocity(again)["param_groups"][0]["lr"] == 0.5
    assert velocity(again)["state"]
    parameters = list(again._loop.merges._outer.param_groups[0]["params"])
    for p in parameters:
        p.grad = torch.ones_like(p)
    again._loop.merges.stepping = True
    again._loop.merges._outer.step()
    # What is kept in memory stays what it was.
    for one, other in zip(state["outer"]["state"].values(), before["outer"]["state"].values(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
    again.load_state_dict(empty)
    assert not velocity(again)
    again.close()


def test_tokens_of_one_step_and_samples_of_another_are_no_weight() -> None:
    model = fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = LocalSGD(model, 8, every=2)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    pace.backward(nn.functional.cross_entropy(model(x), y), count=30)
    pace.step(optimizer)
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match="expected count= with each or none"):
        both(pace, optimizer, nn.functional.cross_entropy(model(x), y))
    pace.close()


def test_what_counts_for_nothing_may_hold_no_numbers() -> None:
    """As a buffer does that a rank without samples made the mean over none of them."""
    flats = Flats()
    flats.fill([torch.zeros(2)], [torch.full((2,), torch.nan)], 0.0, [1.0, 0.0, 0.0])
    assert flats.own[0].tolist() == [0.0, 0.0]


def left_within(rank: int, ranks: int, how: str, leaves: bool) -> list[np.ndarray]:
    """The parameters after two epochs of a run that is left within its second interval, if it ``leaves``."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    data = torch.Generator().manual_seed(7)
    x = torch.randn(72, 6, generator=data, dtype=torch.float64)
    y = torch.randint(3, (72,), generator=data)
    if how == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if how == "scaler" else None
    with LocalSGD(model, 12, "equal", every=3) as pace:
        loader = pace.loader(torch.utils.data.TensorDataset(x, y), seed=5)
        while pace.epoch < 2:
            taken = 0
            for inputs, targets in loader:
                pace.backward(torch.nn.functional.cross_entropy(model(inputs), targets), scaler=scaler)
                pace.step(optimizer, scaler)
                taken = 0 if pace.merged else taken + 1
                if leaves and pace.rounds == 1 and taken == 2:
                    leaves = False
                    break
            else:
                continue
            pace.load_state_dict(pace.state_dict())
    scale = [] if scaler is None else [np.array(scaler.get_scale())]
    return [p.detach().numpy().copy() for p in model.parameters()] + scale


@guarantee(
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`."
)
@pytest.mark.parametrize("how", ["momentum", "AdamW", "scaler"])
def test_interval_that_is_left_restores_optimizer_and_scaler(how: str) -> None:
    whole, left = run_ranks(3, left_within, how, False), run_ranks(3, left_within, how, True)
    for one, other in zip(whole, left, strict=True):
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def skipped(rank: int, ranks: int, by: str) -> float:
    """The weight after an interval in which the scaler of rank 1 skips its only step."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data = torch.utils.data.TensorDataset(torch.ones(3, 1, dtype=torch.float64))
    with (
        warnings.catch_warnings(),
        LocalSGD(model, 3, "equal", every=1, merge=Merge(by=by)) as pace,
    ):
        warnings.filterwarnings("ignore", "the loss of rank 1 was not finite")
        for (x,) in pace.loader(data, seed=0):
            pace.backward(model(x).mean() * (float("inf") if rank == 1 else 1.0), scaler=scaler)
            pace.step(optimizer, scaler)
    return float(model.weight.detach())


@guarantee("A rank whose only step a GradScaler skipped has no weight in the merge.")
@pytest.mark.parametrize("by", ["ranks", "steps", "samples"])
def test_rank_whose_step_a_scaler_skipped_does_not_weigh_in_a_merge(by: str) -> None:
    """The gradient is 1, so a step takes 0.5 away."""
    assert run_ranks(3, skipped, by) == [0.5] * 3
