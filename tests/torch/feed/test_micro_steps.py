"""Rounds of equal micro-steps, for hosts that step on every so manyth batch; and where a host takes part in a
micro-step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch.feed.pieces import spread
from paceline.torch.host import Host
from paceline.torch.plan import Piece
from support.small_net import Samples, fresh, optimizer_of


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 3))
def test_a_load_is_spread_evenly_over_the_turns(load: int, micro_steps: int, min_samples: int) -> None:
    sizes = spread(load, micro_steps, min_samples)
    if load < min_samples:  # a round with too few samples for batch norm
        assert sizes == [load] + [0] * (micro_steps - 1)
        return
    used = [size for size in sizes if size]
    assert len(sizes) == micro_steps
    assert sum(sizes) == load
    assert sizes == sorted(sizes, reverse=True)
    assert all(size >= min_samples for size in used)
    assert not used or max(used) - min(used) <= 1
    assert len(used) == min(micro_steps, load // min_samples), "no micro-step is left empty without need"


def test_every_round_takes_as_many_turns() -> None:
    model = fresh(torch.float32)
    optimizer, seen = optimizer_of(model), []
    with HostedPace(model, 8, micro_steps=3, fill=True) as pace:
        for x, y, _ in pace.loader(Samples(17, torch.float32)):
            seen.append((len(x), pace.counts, pace.host.first, pace.host.last))
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    whole = [(3, True, True, False), (3, True, False, False), (2, True, False, True)]
    assert seen == [*whole, *whole, (1, True, True, False), (1, False, False, False), (1, False, False, True)]


def test_micro_steps_of_none_are_filled_in_every_round_however_long_its_plan_is_in_force() -> None:
    model = fresh(torch.float32)
    optimizer, sizes = optimizer_of(model), []
    with HostedPace(model, 2, policy="equal", micro_steps=3, fill=True) as pace:
        for x, y, _ in pace.loader(Samples(80, torch.float32)):
            sizes.append(len(x))
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    assert sizes == [1] * 120, "each third sample only fills a micro-step"


def test_what_does_not_go_together() -> None:
    model = fresh(torch.float32)
    for options, sentence in (
        ({"micro_steps": 0}, "micro_steps=0: expected"),
        ({"micro_steps": 2, "weigh": "hook"}, "weigh='loss'"),
        ({"micro_steps": 2, "policy": "factoring"}, "plans whole rounds"),
        ({"fill": True, "weigh": "hook", "policy": "factoring", "loop": "pieces"}, "may count for nothing"),
        ({"micro_steps": 2, "micro_batch": 3}, "8"),  # 2 micro-steps of 3 samples hold 6
    ):
        with pytest.raises(PacelineError, match=sentence):
            HostedPace(model, 8, **options)


class Heard(Host):
    """Notes what it is told, and takes every second sample."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def place(self, batch: Any) -> Any:
        return [part[::2] for part in batch]

    def micro_step_begins(self, piece: Piece) -> None:
        self.told.append((piece.step, piece.samples, piece.first, piece.last))

    def iteration_over(self) -> None:
        self.told.append("over")

    def step_begins(self, piece: Piece | None) -> None:
        if piece is not None and not piece.last:
            raise PacelineError("too early")
        self.told.append("steps")

    def step_ended(self, seconds: float) -> None:
        assert 0 <= seconds < 60
        self.told.append("stepped")

    def without_step(self, step: int, ever: bool, finite: Any) -> str:
        return f"round {step} has no step ({ever}, {finite()})"


def test_a_host_takes_part_in_every_turn() -> None:
    model = fresh(torch.float32)
    optimizer, host = optimizer_of(model), Heard()
    with HostedPace(model, 8, micro_steps=2) as pace:
        pace.host.adapter = host
        assert len(pace.host.adapter.place((torch.zeros(6),))[0]) == 3
        for number, (x, y, _) in enumerate(pace.loader(Samples(16, torch.float32))):
            assert len(x) == 2
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            if number == 0:
                with pytest.raises(PacelineError, match="too early"):
                    optimizer.step()
            pace.step(optimizer)
        rounds = [[(step, 4, True, False), (step, 4, False, True), "steps", "stepped"] for step in (0, 1)]
        assert host.told == [*rounds[0], *rounds[1], "over"]
        micro_steps = iter(pace.loader(Samples(16, torch.float32)))
        for _ in range(2):
            x, y, _ = next(micro_steps)
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
        with pytest.raises(PacelineError, match=r"round 2 has no step \(True, True\)"):
            next(micro_steps)
