"""limits="memory": what fits is found while training, running out is survived, and the model stays the same."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import PacelineError
from paceline.samples import CostModel
from paceline.torch import Pace, memory_limits
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.round import Round
from support.guarantees import guarantee
from support.memory_jobs import (
    Cgroup,
    Fake,
    alone,
    limited,
    one_process,
    out_behind_its_forward_pass,
    running_out,
    too_small,
)  # fmt: skip
from support.ranks import run_ranks

WITHIN_MEMORY = guarantee(
    '`limits="memory"` keeps within the process\'s cgroup, follows what others take, and trains the model'
    " of one process."
)

TWO: dict[str, Any] = {"fits": [9, 4], "where": "backward"}


def differs(found: list[Any], expected: list[Any]) -> float:
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.processes
@WITHIN_MEMORY
@pytest.mark.parametrize("kind", ["addresses", "cgroup"])
@pytest.mark.parametrize(("loop", "batch"), [("round", 180), ("whole", 80)])
def test_ranks_of_unlike_memory_train_the_model_of_one_process(loop: str, batch: int, kind: str) -> None:
    """Two ranks with 140 and 70 MB for about 1 MB a sample, as addresses that are granted or in memory cgroups that
    kill; no numbers given. Where a round is taken in passes, both have the same load, whatever the machine does
    beside: what is left of a small load is cut so that passes do not grow."""
    options: dict[str, Any] = {"loop": loop} | ({"policy": "equal"} if loop == "round" else {})
    if kind == "cgroup":
        options["cgroup"] = True
        try:
            Cgroup().leave()
        except (OSError, KeyError):
            pytest.skip("may not make a memory cgroup: run as root where /sys/fs/cgroup can be written")
    found = run_ranks(2, limited, [140, 70], 2 * batch, batch, 3, options)
    for rank in found:
        assert differs(rank["parameters"], alone(2 * batch, batch, 3)) < 1e-12
    loads = np.array(found[0]["loads"])
    assert (loads.sum(1) == batch).all()
    if loop == "round":  # all is accumulated: memory has no say in loads, but in passes
        assert (loads == batch / 2).all()
        # the smaller one is used up; the other has room for larger passes
        assert found[1]["held"] > (0.9 if kind == "addresses" else 0.87)  # a cgroup counts in larger units
        assert found[0]["most"] > 1.2 * found[1]["most"]
    else:
        assert loads[0, 0] > 1.4 * loads[0, 1]  # before anything is known
        assert (loads[:, 1] < 70).all()


@WITHIN_MEMORY
def test_the_limits_of_a_cgroup_and_of_those_above_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under Slurm or systemd, whose limit is not at the top of what this process sees; version 2, by stand-ins."""
    for folder, limit, used in (("job", "400000000", 160000000), ("job/step", "max", 120000000), ("", "", 0)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        if limit:
            (tmp_path / folder / "memory.max").write_text(limit)
            (tmp_path / folder / "memory.current").write_text(str(used))
            (tmp_path / folder / "memory.stat").write_text("anon 5\ninactive_file 40000000\nactive_file 7\n")
    told = tmp_path / "cgroup"
    told.write_text("1:name=systemd:/other\n0::/job/step\n")

    def path(*parts: str) -> Path:
        found = Path(*parts)
        if str(found) == "/proc/self/cgroup":
            return told
        return Path(str(found).replace("/sys/fs/cgroup", str(tmp_path)))

    monkeypatch.setattr(memory_limits, "Path", path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    held = memory_limits._number("/proc/self/status", "VmRSS")
    room = memory_limits._resident(memory_limits._cgroups())
    assert room - held == pytest.approx((400e6 - 160e6 + 40e6) / 2, abs=10e6)


@pytest.mark.processes
@guarantee("A pass that runs out of memory is halved and run again, with the model of one process.")
@pytest.mark.parametrize(
    "options",
    [
        TWO,
        TWO | {"where": "forward"},
        TWO | {"counts": True},
        TWO | {"policy": "factoring:portion=0.3", "counts": True},
        TWO | {"micro_batch": 12, "where": "forward"},
    ],
    ids=["backward", "forward", "counts", "moving", "with a micro-batch"],
)
def test_a_pass_that_runs_out_of_memory_is_dropped_and_halved(options: dict[str, Any]) -> None:
    found = run_ranks(2, running_out, dict(options))
    parameters, losses, counted = one_process(options.get("counts", False))
    for rank in found:
        assert differs(rank["parameters"], parameters) < 1e-12
        assert rank["losses"] == pytest.approx(losses, rel=1e-12)
    if options.get("counts"):
        assert np.sum([rank["counted"] for rank in found], axis=0).tolist() == counted
    assert sum(rank["outs"] for rank in found) > 0
    assert any(found[0]["ran_out"])
    assert found[0]["ran_out"] == found[1]["ran_out"]


@pytest.mark.processes
def test_alone_also_the_last_pass_of_a_round_may_run_out() -> None:
    (found,) = run_ranks(1, running_out, {"fits": [9], "where": "backward"})
    assert found["outs"] > 0
    assert differs(found["parameters"], one_process(False)[0]) < 1e-12


@pytest.mark.processes
@guarantee("A pass that runs out of memory is halved and run again, with the model of one process.")
def test_with_buffers_that_are_sent_a_failed_forward_pass_does_not_send_them_again() -> None:
    one, other = run_ranks(2, running_out, TWO | {"norm": True, "where": "forward"})
    assert one["outs"] + other["outs"] > 0
    assert differs(one["parameters"], other["parameters"]) == 0


@pytest.mark.processes
@guarantee(
    "A rank without memory for its samples ends every rank with an error: which rank, how many samples and "
    "bytes, what to do."
)
def test_a_last_pass_whose_forward_pass_is_through_is_not_run_again() -> None:
    """DDP would sum the gradients of its first part over the ranks, and the others would wait for the rest."""
    other, own = run_ranks(2, out_behind_its_forward_pass)
    assert "rank 1 ran out of memory in round 1" in own
    assert "other ranks wait for its gradients" in own
    assert "rank 1 ran out of memory in round 1" in other


@pytest.mark.processes
@guarantee(
    "A rank without memory for its samples ends every rank with an error: "
    "which rank, how many samples and bytes, what to do."
)
@pytest.mark.parametrize("loop", ["round", "whole"])
def test_too_little_memory_is_told_on_every_rank(loop: str) -> None:
    other, own = run_ranks(2, too_small, loop)
    many = "1 sample at once" if loop == "round" else "4 samples at once"
    for said in (own, other):
        assert f"rank 1 ran out of memory in round 0 with {many}" in said
        assert ("take a smaller model" if loop == "round" else "a smaller global_batch") in said
    assert "rank 0 cannot continue without it" in other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loop": "pieces"}, "loop='pieces' runs its passes itself"),
        ({"loop": "round", "weigh": "hook"}, "use weigh='loss'"),
        ({"loop": "round", "deterministic": True, "policy": "factoring"}, "deterministic=True fixes"),
        ({"limits": "all"}, "limits='all': expected 'memory', or a pair"),
    ],
)
def test_what_does_not_go_together_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        Pace(nn.Linear(2, 1), 8, **({"limits": "memory"} | options))


def trained(
    monkeypatch: pytest.MonkeyPatch, gauge: Fake, rounds: int, tick: Any = None, **options: Any
) -> list[int]:
    """Sizes of the passes of one process whose memory a stand-in plays."""
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [gauge])
    monkeypatch.setattr(memory_limits, "LOOK_SECONDS", 0.0)
    sizes: list[int] = []
    model = nn.Linear(2, 1)

    def loss_at(x: torch.Tensor) -> torch.Tensor:
        gauge.run(float(x[:, 0].sum()) if options else len(x))
        sizes.append(len(x))
        return model(x).mean()

    with Pace(model, 64, "level", limits="memory", loop="round") as pace:
        data = torch.ones(640, 2)
        data[::2] = 3.0 if options else 1.0
        loader = pace.loader(data, shuffle=False, **({"cost": data[:, 0]} if options else {}))
        while pace.rounds < rounds:
            for batch in loader:
                pace.round(batch, loss_at)
                pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
                if tick is not None:
                    tick(pace.rounds)
                if pace.rounds == rounds:
                    break
    return sizes


def test_passes_begin_small_and_grow_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = trained(monkeypatch, Fake(1000.0, 10.0, 1250.0), 6)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert max(sizes) == 23  # 25 fit, of which 6 % are left free
    assert sizes[-3:] == [22, 21, 21]  # of equal size, once they grow no more
    assert sum(sizes) == 6 * 64


@WITHIN_MEMORY
def test_what_others_take_is_followed_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Fake(1000.0, 10.0, 1400.0)

    def tick(rounds: int) -> None:
        gauge.holds = 1100.0 if 4 <= rounds < 8 else 1400.0

    sizes = trained(monkeypatch, gauge, 12, tick)
    assert max(sizes) > 30
    assert len([size for size in sizes if size <= 9]) >= 4 * 64 // 9  # in four rounds
    assert sizes[-1] > 20


def test_with_costs_passes_are_cut_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = trained(monkeypatch, Fake(1000.0, 10.0, 1250.0), 6, cost=True)
    assert 9 <= max(sizes) <= 12  # of a length of 2 on average, where 25 fit
    assert sum(sizes) == 6 * 64


def test_a_peak_that_cannot_be_forgotten_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = trained(monkeypatch, Fake(1000.0, 10.0, 1250.0, forgets=False), 6)
    assert 20 <= max(sizes) <= 25


def test_a_device_is_asked_for_its_own_peak_and_for_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins: no device was there."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 800)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200, 4000))
    (gauge,) = memory_limits.gauges(torch.device("cuda", 0))
    assert gauge.begin()
    assert calls == ["reset"]
    assert (gauge.peak(), gauge.room()) == (700.0, 1000.0)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException, is_memory: bool) -> None:
    assert memory_limits.ran_out(error) is is_memory


def parts(
    monkeypatch: pytest.MonkeyPatch, rounds: list[int], fits: int, floor: int, sums: bool = False
) -> list[list[int]]:
    """The sizes of the passes that succeed in rounds of so many samples, where one of more than ``fits`` does not.

    The stand-in says that half as many more fit, so that passes fail."""
    gauge = Fake(100.0, 10.0, 100.0 + 15.0 * fits)
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [gauge])
    passes: Any = SimpleNamespace(
        device=torch.device("cpu"),
        gradients=SimpleNamespace(sums=sums),
        cuts=lambda batch: True,
        part=lambda *_, **__: None,
        take_back=lambda: None,
        droppable=True,
    )
    round = Round()
    terms: Any = SimpleNamespace(quantum=1, floor=floor, fixed_micro_steps=None)
    limit = memory_limits.MemoryLimit(round, passes, terms, lambda batch, first, last: last - first)

    def one(size: int) -> int:
        gauge.run(size if size <= fits else math.inf)
        return size

    sizes = []
    for samples in rounds:
        round.drawn(Piece(RoundPlan(0, np.array([samples]), samples), samples, True, True))
        sizes.append(list(limit.run(samples, one)))
    return sizes


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(3, 30))
def test_no_part_of_a_batch_is_too_small_for_batch_norm(rounds: list[int], fits: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sizes = parts(monkeypatch, rounds, fits, 2)
    assert [sum(each) for each in sizes] == rounds
    assert min(map(min, sizes)) >= 2
    assert max(map(max, sizes)) <= fits


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
def test_three_samples_are_not_cut_for_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts would leave one sample by itself, and a third try would not fit either."""
    with pytest.raises(PacelineError, match="ran out of memory in round 0 with 3 samples at once"):
        parts(monkeypatch, [3], 2, 2)


def test_last_pass_as_large_as_one_that_succeeded_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts(monkeypatch, [4, 4, 6, 9], 30, 1, sums=True) == [[1, 2, 1], [2, 2], [4, 2], [8, 1]]


LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=30)


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
@given(st.lists(LENGTHS, min_size=1, max_size=6), st.booleans(), st.integers(12, 60))
def test_last_pass_takes_no_more_than_one_that_went_through(
    rounds: list[list[int]], padded: bool, fits: int
) -> None:
    """Passes hold memory in proportion to their lengths, and the last pass of a batch also sums the gradients."""
    gauge = Fake(100.0, 1.0, 100.0 + 1.5 * fits)
    ran: list[tuple[float, bool]] = []  # amounts of the passes that went through, and whether they were last
    last = True
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(memory_limits, "gauges", lambda device: [gauge])
        passes: Any = SimpleNamespace(
            device=torch.device("cpu"), gradients=SimpleNamespace(sums=True), cuts=lambda batch: True,
            take_back=lambda: None, droppable=True,
        )  # fmt: skip

        def part(samples: int, first: bool, more: bool) -> None:
            nonlocal last
            last = not more

        passes.part = part
        round = Round()
        terms: Any = SimpleNamespace(quantum=1, floor=1, fixed_micro_steps=None)
        limit = memory_limits.MemoryLimit(round, passes, terms, lambda batch, first, end: batch[first:end])

        def one(batch: list[int]) -> list[int]:
            amount = float(len(batch) * max(batch) if padded else sum(batch))
            gauge.run(amount if amount <= fits else math.inf)
            ran.append((amount, last))
            return batch

        for lengths in rounds:
            last, model = True, CostModel(1.0, padded=padded)
            deal: Any = SimpleNamespace(lengths=np.array(lengths, float), model=model)
            plan = RoundPlan(0, np.array([len(lengths)]), len(lengths), None, deal)
            total = float(len(lengths) * max(lengths) if padded else sum(lengths))
            round.drawn(Piece(plan, len(lengths), True, True, parts=np.array([total, 0.0, 1.0]), start=0))
            done = list(limit.run(lengths, one))
            assert sorted(chain(*done)) == sorted(lengths), "each sample runs once"
    most = 0.0
    for amount, summed in ran:
        assert not summed or amount <= most
        most = max(most, amount)
