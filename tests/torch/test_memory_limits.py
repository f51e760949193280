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
from paceline.torch import Pace, memory_limits, peers
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.round import LeftWithin, Round
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


class Reading:
    """A gauge whose numbers a test sets. forgets: a look at the peak begins a new one."""

    def __init__(self, now: float, room: float, forgets: bool = True) -> None:
        self.held, self.most, self.free, self.forgets = now, now, room, forgets

    def gauge(self) -> memory_limits.Gauge:
        return memory_limits.Gauge(
            lambda: self.forgets, lambda: self.held, lambda: self.most, lambda: self.free
        )


def line(now: float = 1000.0, room: float = 2000.0, forgets: bool = True) -> tuple[Any, Reading]:
    reading = Reading(now, room, forgets)
    return memory_limits._Line(reading.gauge()), reading  # type: ignore[arg-type]


def seen(line: Any, reading: Reading, amount: float, peak: float, through: bool = True) -> None:
    reading.most = peak
    line.ran(amount, through)


def test_line_through_two_peaks_says_how_much_fits() -> None:
    """Of 2000 bytes 1000 are taken, and 94 % of the rest may be; a sample takes 20."""
    one, reading = line()
    assert one.left == pytest.approx(940.0)
    assert one.most() == math.inf  # nothing is known
    seen(one, reading, 4, 1080.0)
    assert one.left == pytest.approx(860.0)
    assert one.most() == pytest.approx(4 + 860 / 20)
    reading.free = 1050.0  # others have taken memory
    assert one.left == pytest.approx(1000 + 47 - 1080)
    assert one.most() == pytest.approx(4 - 33 / 20)


def test_smaller_amount_gives_the_line_its_second_point_and_lifts_it_if_all_take_more() -> None:
    one, reading = line()
    seen(one, reading, 8, 1400.0)
    seen(one, reading, 5, 1200.0)  # more than half of 8: as good as the same point
    assert one.most() == pytest.approx(8 + 540 / 50)
    seen(one, reading, 4, 1160.0)
    assert one.most() == pytest.approx(8 + 540 / 60)  # 240 bytes for four samples
    seen(one, reading, 2, 1140.0)  # 100 more than the line says, for all amounts
    assert one.left == pytest.approx(440.0)
    assert one.most() == pytest.approx(8 + 440 / ((1500 - 1160) / 4))
    seen(one, reading, 8, 1300.0)  # an equal amount replaces the point
    assert one.most() == pytest.approx(8 + 640 / ((1300 - 1160) / 4))


def test_line_that_does_not_rise_allows_anything_or_half() -> None:
    one, reading = line()
    seen(one, reading, 8, 1000.0)
    assert one.most() == math.inf
    reading.free = 900.0
    assert one.most() == 4.0


def test_failed_pass_leaves_the_line_and_hides_later_peaks_only_if_they_are_not_forgotten() -> None:
    one, reading = line()
    seen(one, reading, 4, 1080.0)
    seen(one, reading, 90, 9999.0, through=False)
    assert one.most() == pytest.approx(4 + 860 / 20)
    seen(one, reading, 8, 1160.0)
    assert one.most() == pytest.approx(8 + 780 / 20)
    one, reading = line(forgets=False)
    seen(one, reading, 4, 1080.0)
    seen(one, reading, 90, 1900.0, through=False)
    seen(one, reading, 8, 1900.0)  # the peak is that of the failed pass
    assert one.most() == pytest.approx(4 + 860 / 20)
    seen(one, reading, 50, 1901.0)
    assert one.most() == pytest.approx(50 + 39 / (901 / 50))


def test_peak_that_stays_allows_one_more_and_says_nothing_of_smaller_amounts() -> None:
    one, reading = line(forgets=False)
    seen(one, reading, 4, 1920.0)
    seen(one, reading, 2, 1930.0)  # perhaps the larger amount's
    assert one.left == pytest.approx(20.0)
    assert one.most() == 5.0
    reading.free = 1900.0
    assert one.most() < 4.0


@pytest.mark.parametrize(
    ("lengths", "padded", "between", "most", "span"),
    [
        (None, False, [0, 1, 2, 3, 4, 5], {2.5: 2, 9.0: 5, 0.5: 0}, (1, 3)),
        ([5.0, 4.0, 3.0, 2.0, 1.0], False, [0, 5, 9, 12, 14, 15], {4.9: 0, 5.0: 1, 9.5: 2, 99.0: 5}, (1, 3)),
        ([5.0, 4.0, 3.0, 2.0, 1.0], True, [0, 5, 10, 15, 20, 25], {4.9: 0, 10.0: 2, 99.0: 5}, (1, 3)),
        # Shorter samples come first in the batch, so that it runs from its end.
        ([1.0, 2.0, 3.0, 4.0, 5.0], False, [0, 5, 9, 12, 14, 15], {9.5: 2}, (2, 4)),
        ([1.0, 9.0, 1.0, 1.0, 5.0], True, [0, 5, 10, 15, 36, 45], {15.0: 3, 35.9: 3}, (2, 4)),
        ([5.0, 1.0, 1.0, 1.0, 5.0], False, [0, 5, 6, 7, 8, 13], {6.0: 2}, (1, 3)),
    ],
)
def test_amounts_of_passes_by_hand(
    lengths: list[float] | None, padded: bool, between: list[float], most: dict[float, int], span: Any
) -> None:
    amounts = memory_limits.Amounts(5, None if lengths is None else np.array(lengths), padded)
    assert [amounts.between(0, end) for end in range(6)] == between
    assert {room: amounts.most(0, room) for room in most} == most
    assert amounts.span(1, 3) == span
    assert amounts.between(3, 3) == 0.0


def test_amounts_after_the_first_pass_count_from_there() -> None:
    lengths = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    plain, padded, even = (
        *(memory_limits.Amounts(5, lengths, each) for each in (False, True)),
        memory_limits.Amounts(5, None, False),
    )
    assert (plain.between(2, 4), padded.between(2, 4), even.between(2, 4)) == (5.0, 6.0, 2.0)
    assert (plain.most(2, 5.0), padded.most(2, 6.0), even.most(2, 9.0)) == (2, 2, 3)
    assert memory_limits.Amounts(1, np.array([3.0]), False).span(0, 1) == (0, 1)


def test_number_of_a_file_is_in_bytes_and_infinite_if_it_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("VmPeak:\t   12 kB\nVmRSS:\t    7 kB\nmemory 9\n")
    assert memory_limits._number(file, "VmRSS") == 7 * 1024
    assert memory_limits._number(file, "memory") == 9 * 1024
    assert memory_limits._number(file, "VmSize") == math.inf
    assert memory_limits._number(tmp_path / "none", "VmRSS") == math.inf


def test_free_memory_is_shared_by_the_ranks_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"/proc/meminfo": 800.0, "/proc/self/status": 100.0}
    monkeypatch.setattr(memory_limits, "_number", lambda path, name: free.get(str(path), 30.0 * 1024))
    files = tuple(tmp_path / name for name in ("limit", "used", "stat"))
    for file, text in zip(files, ("500", "480", ""), strict=True):
        file.write_text(text)
    monkeypatch.setattr(peers, "ranks", lambda: 5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory_limits._resident([]) == 100 + 800 / 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_limits._resident([]) == 100 + 800 / 4
    assert memory_limits._resident([files]) == 100 + (500 - 480 + 30) / 4
    files[1].write_text("900")
    assert memory_limits._resident([files]) == 100  # others hold more than the limit
    files[0].write_text("max")
    assert memory_limits._resident([files]) == 100 + 800 / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert memory_limits._resident([]) == 900


def test_error_message_names_samples_and_bytes_of_the_tightest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, tight = Reading(2**30, 9 * 2**30), Reading(1535 * 2**20, 2**31)
    roomy.most, tight.most = 2**30, 1535 * 2**20
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [roomy.gauge(), tight.gauge()])
    piece = Piece(RoundPlan(7, np.array([3]), 3), 3, True, True)
    cpu = torch.device("cpu")
    assert memory_limits.sentence(2, piece, cpu) == (
        "rank 2 ran out of memory in round 7 with 3 samples at once, and held up to 1.5 GiB of the 2.0 GiB that "
        "it may hold"
    )
    tight.most = 3 * 2**20
    tight.free = 4 * 2**20
    assert "with 1 sample at once, and held up to 3 MiB of the 4 MiB" in memory_limits.sentence(
        0, piece, cpu, 1
    )
    assert memory_limits._bytes(2**30 - 1) == "1024 MiB"
    assert memory_limits._each(piece) == 1.0
    costly = piece._replace(parts=np.array([12.0, 50.0, 1.0]))
    assert memory_limits._each(costly) == 4.0
    assert memory_limits._each(costly._replace(samples=0)) == 1.0


def test_note_is_added_where_memory_or_a_single_sample_may_be_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [Reading(2**20, 2**21).gauge()])
    cpu, plan = torch.device("cpu"), RoundPlan(7, np.array([1]), 1)
    one, two = (LeftWithin(Piece(plan, samples, True, True), False) for samples in (1, 2))

    def noted(error: BaseException, left: LeftWithin | None, fits: Any = None) -> tuple[str, str]:
        words = memory_limits.explain(error, cpu, left, fits)
        return words, "".join(getattr(error, "__notes__", []))

    assert noted(MemoryError(), None) == ("", "")
    words, note = noted(MemoryError(), two)
    assert words.startswith("rank 0 ran out of memory in round 7 with 2 samples at once")
    assert words.endswith("or a smaller global_batch")
    assert note == f"paceline: {words}"
    words, _ = noted(MemoryError(), two, np.array([3.0, np.nan, 4.0]))
    assert words.endswith("or a smaller global_batch (of 7 samples, as far as is known)")
    words, note = noted(ValueError(), one)
    assert words == ""
    assert note.startswith("paceline: rank 0 was given a single sample in round 7")
    for error, left in (
        (ValueError(), two),
        (PacelineError("x"), one),
        (ValueError(), one._replace(done=True)),
    ):
        assert noted(error, left) == ("", "")


def test_cpu_has_resident_memory_and_addresses_if_they_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        memory_limits.resource, "getrlimit", lambda kind: (memory_limits.resource.RLIM_INFINITY,) * 2
    )
    (resident,) = memory_limits.gauges(cpu)
    assert resident.now() > 2**20
    assert resident.peak() >= resident.now() * 0.9
    assert resident.room() > resident.now()
    monkeypatch.setattr(memory_limits.resource, "getrlimit", lambda kind: (2**40, 2**41))
    _, addresses = memory_limits.gauges(cpu)
    assert not addresses.begin()
    assert addresses.room() == 2**40
    assert addresses.peak() >= addresses.now() > resident.now()


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
