"""limits="memory": what fits is found while training, running out is survived, and the model stays the same."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace, memory_limits, peers
from paceline.torch.callbacks import OnRound
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.round import LeftWithin
from support.gauge import Fake
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import difference

WITHIN_MEMORY = guarantee(
    '`limits="memory"` keeps within the process\'s cgroup, follows what others take, and trains the model'
    " of one process."
)

FEATURES, WIDTH, DEPTH, CLASSES = 16, 8192, 16, 4
MEGABYTE = 1 << 20


class Wide(nn.Module):
    """Few parameters, and about a megabyte of activations for each sample, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(DEPTH):
            hidden = torch.relu(hidden) * 1.1
        return self.last(hidden)


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def fresh() -> Wide:
    torch.manual_seed(3)
    return Wide().double()


def status(name: str) -> int:
    """Bytes of this process, by its name in the kernel's table."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def alone(batch: int) -> list[torch.Tensor]:
    """The parameters of one process that takes each batch at once."""
    model, data, loss_of = fresh(), Data(2 * batch), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for at in (0, batch, 0):
        loss_of(model(data.x[at : at + batch]), data.y[at : at + batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def limited(
    rank: int, ranks: int, rooms: list[int], batch: int, cgroup: bool, loop: str, policy: str
) -> dict[str, Any]:
    """Train 3 rounds with ``rooms`` megabytes to spare on each rank; what it came to.

    cgroup: it is the room in a memory cgroup of each rank's own, instead of addresses."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)  # as if all were a hundred times as large:
    libc.mallopt(-8, 1)  # a thread's own 64 MB of addresses would be much of this room
    libc.mallopt(-3, 1 << 16)  # and large tensors are given back when they are freed
    model, loss_of = DistributedDataParallel(fresh()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    group, before, room = None, status("VmSize"), rooms[rank] * MEGABYTE
    if cgroup:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as in a container for each rank
        group = Cgroup(room)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (before + room, resource.RLIM_INFINITY))
    told: list[Any] = []
    pace = Pace(model, batch, policy, limits="memory", loop=loop, callbacks=[OnRound(told.append)])
    loader, most = pace.loader(Data(2 * batch), shuffle=False), 0

    def loss_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(x))
        return loss_of(model(x), y)

    try:
        while pace.rounds < 3:
            for given in loader:
                if loop == "whole":
                    pace.backward(loss_at(*given))
                else:
                    pace.round(given, loss_at)
                pace.step(optimizer)
                if pace.rounds == 3:
                    break
    except (PacelineError, RuntimeError) as error:
        pace._loop.failed(error)
        raise
    held = (status("VmPeak") - before) / room
    if group is not None:
        held = group.leave() / room
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    pace.host.flush()
    found = {
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "held": held,
        "most": most,
        "loads": [result.loads.tolist() for result in told],
    }
    pace.close()
    return found


class Cgroup:
    """A memory cgroup below this process's own, with this process in it, which may hold so many bytes there.

    Raises OSError if this machine does not let one be made."""

    def __init__(self, room: int = 0) -> None:
        paths = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        old = "memory" in paths
        self._above = Path(f"/sys/fs/cgroup/memory{paths['memory']}" if old else f"/sys/fs/cgroup{paths['']}")
        limit, self._peak = ("limit_in_bytes", "max_usage_in_bytes") if old else ("max", "peak")
        self._own = self._above / f"paceline-{os.getpid()}"
        self._own.mkdir()
        try:
            (self._own / f"memory.{limit}").write_text(str(room or 1 << 40))
            (self._own / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._own.rmdir()
            raise

    def leave(self) -> int:
        """Bytes held at most; the cgroup is removed."""
        peak = int((self._own / f"memory.{self._peak}").read_text())
        (self._above / "cgroup.procs").write_text(str(os.getpid()))
        self._own.rmdir()
        return peak


@pytest.mark.processes
@WITHIN_MEMORY
@pytest.mark.parametrize(
    ("loop", "batch", "kind"),
    [
        ("round", 180, "addresses"),
        ("whole", 80, "cgroup"),
        # Each loop and each kind is above.
        pytest.param("round", 180, "cgroup", marks=pytest.mark.nightly),
        pytest.param("whole", 80, "addresses", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_different_memory_train_the_model_of_one_process(loop: str, batch: int, kind: str) -> None:
    """Two ranks with 140 and 70 MB for about 1 MB a sample, as addresses that are granted or in memory cgroups that
    kill; no numbers given. Where a round is taken in passes, both have the same load, whatever the machine does
    beside: what is left of a small load is cut so that passes do not grow."""
    if kind == "cgroup":
        try:
            Cgroup().leave()
        except (OSError, KeyError):
            pytest.skip("may not make a memory cgroup: run as root where /sys/fs/cgroup can be written")
    policy = "equal" if loop == "round" else "level"
    found = run_ranks(2, limited, [140, 70], batch, kind == "cgroup", loop, policy)
    for rank in found:
        assert difference(rank["parameters"], alone(batch)) < 1e-12
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
def test_limits_of_a_cgroup_and_its_parents_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    resident = memory_limits.Resident(memory_limits._cgroups())
    assert resident.room() - resident.now() == pytest.approx((400e6 - 160e6 + 40e6) / 2, abs=10e6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loop": "pieces"}, "loop='pieces' runs its passes itself"),
        ({"loop": "round", "weigh": "hook"}, "use weigh='loss'"),
        ({"loop": "round", "deterministic": True, "policy": "factoring"}, "deterministic=True fixes"),
        ({"limits": "all"}, "limits='all': expected 'memory', or a pair"),
    ],
)
def test_unsupported_memory_options_raise(options: dict[str, Any], said: str) -> None:
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
def test_passes_follow_the_memory_that_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_peak_that_cannot_be_reset_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = trained(monkeypatch, Fake(1000.0, 10.0, 1250.0, forgets=False), 6)
    assert 20 <= max(sizes) <= 25


def test_device_reports_its_peak_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert one.most() == pytest.approx(8 + 440 / 60)
    seen(one, reading, 8, 1300.0)  # an equal amount replaces the point
    assert one.most() == pytest.approx(8 + 640 / ((1300 - 1160) / 4))


def test_lift_of_the_line_is_that_of_the_newest_amount_near_the_largest() -> None:
    """Peaks that were read too high once do not keep passes small: the next pass of ordinary size corrects them."""
    one, reading = line()
    seen(one, reading, 8, 1400.0)
    seen(one, reading, 2, 1400.0)  # 300 more than 50 for each sample
    assert one.left == pytest.approx(240.0)
    seen(one, reading, 4, 1210.0)  # 10 more: not near the largest, so that it does not lower the lift
    assert one.left == pytest.approx(240.0)
    seen(one, reading, 5, 1270.0)  # 20 more
    assert one.left == pytest.approx(520.0)
    assert one.most() == pytest.approx(8 + 520 / 50)
    seen(one, reading, 6, 1200.0)
    assert one.left == pytest.approx(540.0)
    seen(one, reading, 6, 1340.0)
    seen(one, reading, 9, 1450.0)  # a larger amount has its own peak
    assert one.left == pytest.approx(490.0)


def test_line_that_does_not_rise_allows_anything_or_half() -> None:
    one, reading = line()
    seen(one, reading, 8, 1000.0)
    assert one.most() == math.inf
    reading.free = 1000.5
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
    free = {"/proc/meminfo": 800.0, "VmRSS": 100.0, "RssFile": 40.0}
    monkeypatch.setattr(
        memory_limits, "_number", lambda path, name: free.get(str(path), free.get(name, 30.0 * 1024))
    )
    files = tuple(tmp_path / name for name in ("limit", "used", "stat"))
    for file, text in zip(files, ("500", "480", ""), strict=True):
        file.write_text(text)
    machine, cgroup = memory_limits.Resident([]), memory_limits.Resident([files])  # type: ignore[list-item]
    monkeypatch.setattr(peers, "ranks", lambda: 5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert machine.room() == 60 + 800 / 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.room() == 60 + 800 / 4
    assert cgroup.room() == 60 + (500 - 480 + 30) / 4
    files[1].write_text("900")
    assert cgroup.room() == 60  # others hold more than the limit
    files[0].write_text("max")
    assert cgroup.room() == 60 + 800 / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert machine.room() == 860
    free["RssFile"] = math.inf  # this kernel does not report it
    assert machine.room() == 900


@WITHIN_MEMORY
def test_pages_of_a_mapped_file_do_not_count(tmp_path: Path) -> None:
    """Those of libraries that are used for the first time, for instance; where the peak may have been with or without
    them, it is taken with them."""
    file, many = tmp_path / "library", 64 * MEGABYTE
    file.write_bytes(bytes(many))
    resident = memory_limits.Resident([])
    resident.begin()
    before = resident.now()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert resident.now() < before + 8 * MEGABYTE
        assert before + 56 * MEGABYTE < resident.peak() < before + 72 * MEGABYTE
        resident.begin()
        assert resident.peak() < before + 8 * MEGABYTE


def test_error_message_names_samples_and_bytes_of_the_tightest_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, tight = Reading(2**30, 9 * 2**30), Reading(1535 * 2**20, 2**31)
    roomy.most, tight.most = 2**30, 1535 * 2**20
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [roomy.gauge(), tight.gauge()])
    piece = Piece(RoundPlan(7, np.array([3]), 3), 3, True, True)
    cpu = torch.device("cpu")
    assert memory_limits.shortage(2, piece, cpu) == (
        "rank 2 ran out of memory in round 7 with 3 samples at once, and held up to 1.5 GiB of the 2.0 GiB that "
        "it may hold"
    )
    tight.most = 3 * 2**20
    tight.free = 4 * 2**20
    assert "with 1 sample at once, and held up to 3 MiB of the 4 MiB" in memory_limits.shortage(
        0, piece, cpu, 1
    )
    assert (memory_limits._bytes(2**30 - 1), memory_limits._bytes(2**30)) == ("1024 MiB", "1.0 GiB")
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
