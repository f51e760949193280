"""LocalSGD in one process: what is refused, and what a checkpoint or a loop that was left keeps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
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
from support.guarantees import guarantee
from support.small_net import Samples, fresh


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
def test_wrong_local_loop_raises(mistake: str) -> None:
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
def test_unsupported_local_options_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        LocalSGD(fresh(torch.float64), 8, **{"every": 2, **options})


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        (Merge(send="int8"), r"ElasticLocalSGD: Merge\(send='int8'\) rounds sums"),
        (Merge(delay=1), r"ElasticLocalSGD: Merge\(delay=1\) continues with sums"),
    ],
)
def test_elastic_merge_in_fewer_bits_or_delayed_raises(merge: Merge, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        ElasticLocalSGD(fresh(torch.float64), 8, merge=merge)


def test_invalid_merge_options_raise() -> None:
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
def test_changing_integer_buffer_raises() -> None:
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
def test_buffer_that_appears_or_grows_raises(name: str, persistent: bool, words: str) -> None:
    model = Appearing(name, persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = LocalSGD(model, 8, every=1)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match=words) if words else contextlib.nullcontext():
        both(pace, optimizer, nn.functional.cross_entropy(model(x), y))
    pace.close()


@guarantee(
    '`every="auto"` spends at most a tenth of the time on the link, also if '
    "its speed changes; waits for ranks do not count."
)
def test_auto_interval_spends_a_tenth_of_the_time_on_the_link() -> None:
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


def test_parameter_outside_of_the_model_raises() -> None:
    model, outside = fresh(torch.float64), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    pace = LocalSGD(model, 8, every=2)
    batches = iter(pace.loader(Samples(40), seed=5))
    x, y, _ = next(batches)
    with pytest.raises(PacelineError, match="would move a parameter outside of the model"):
        both(pace, optimizer, outside * nn.functional.cross_entropy(model(x), y))
    pace.close()


@pytest.mark.parametrize("loads", [True, False])
def test_failed_loop_leaves_a_loaded_state_alone(loads: bool) -> None:
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
def test_loaded_outer_optimizer_keeps_the_current_rates() -> None:
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


def test_state_of_another_class_of_outer_optimizer_raises_and_changes_nothing() -> None:
    pace = train(merge=Merge(outer="nesterov"))(both)
    state = pace.state_dict()
    again = LocalSGD(fresh(torch.float64), 8, "equal", every=2, merge=Merge(outer=torch.optim.Adam))
    before = again.state_dict()
    with pytest.raises(
        PacelineError, match="has the state of the outer optimizer SGD, and this run has Adam; exp"
    ):
        again.load_state_dict(state)
    assert str(again.state_dict()) == str(before)
    again.load_state_dict({**state, "outer": {}})
    assert again.rounds == pace.rounds
    again.close()


def test_count_with_some_steps_of_an_interval_raises() -> None:
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


def test_values_without_a_weight_may_be_nan() -> None:
    """As a buffer does that a rank without samples made the mean over none of them."""
    flats = Flats()
    flats.fill([torch.zeros(2)], [torch.full((2,), torch.nan)], 0.0, [1.0, 0.0, 0.0])
    assert flats.own[0].tolist() == [0.0, 0.0]
