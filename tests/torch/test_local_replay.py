"""LocalSGD against one process that plays the steps of every rank, interval by interval."""

from __future__ import annotations

import random
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import LocalSGD, Merge
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.ranks import run_cases, run_ranks
from support.scripted import Script
from support.small_net import CLASSES, UNEVEN, Samples, fresh

pytestmark = pytest.mark.processes

COUNT, BATCH = 83, 12


class Normed(nn.Module):
    """A model with statistics, a counter, a mask that holds infinities, a parameter that is not trained and one that
    is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = fresh(torch.float64), nn.BatchNorm1d(CLASSES).double()
        self.still = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)
        self.twice = self.net.second.bias
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x)) * self.still + self.twice + self.mask.exp()


def made(case: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    kind, sometimes = getattr(torch, case.get("dtype", "float64")), case.get("sometimes", False)
    model = Normed() if case.get("norm") else fresh(kind, sometimes=sometimes)
    if case.get("adam"):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=case.get("momentum", 0.0))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    return each.mean() if tokens is None else (each * tokens).sum() / max(float(tokens.sum()), 1.0)


def tokens_of(index: torch.Tensor) -> torch.Tensor:
    """How many tokens a sample has; some have none."""
    return (index * 7 % 5).double()


def trained(
    rank: int,
    ranks: int,
    *,
    epochs: int = 2,
    count: int = COUNT,
    jitter: float = 0.0,
    loader_workers: int = 0,
    counted: bool = False,
    clip: float = 0.0,
    scaled: bool = False,
    cost: bool = False,
    reduction: str = "mean",
    norm: bool = False,
    adam: bool = False,
    momentum: float = 0.0,
    dtype: str = "float64",
    sometimes: bool = False,
    decay: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """A run; ``steps``: of each step of this rank its interval, its samples and whether it counted.

    decay: a part of the parameters that the program itself takes away behind each step."""
    model, optimizer = made(
        {"norm": norm, "adam": adam, "momentum": momentum, "dtype": dtype, "sometimes": sometimes}
    )
    if rank:  # which takes rank 0's over
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
    pace = LocalSGD(model, BATCH, options.pop("policy", "level"), **options)
    data = Samples(count, getattr(torch, dtype))
    costs = {"cost": 1.0 + np.arange(count) % 9, "padded": False} if cost else {}
    loader = pace.loader(data, seed=5, num_workers=loader_workers, **costs)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    stalls, steps, losses, merges = random.Random(rank), list[Any](), list[float](), 0
    delay, ends = (options.get("merge") or Merge()).delay, list[int]()
    for _ in range(epochs):
        for x, y, index in loader:
            time.sleep(jitter * stalls.expovariate(1.0) * (1 + 3 * (rank == 1)))
            tokens = tokens_of(index) if counted else None
            loss = loss_of(model, x, y, tokens)
            if reduction == "sum":
                loss = loss * len(x)
            pace.backward(loss, reduction, scaler, count=None if tokens is None else tokens.sum())
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            step, counts = pace.rounds, pace.counts
            stepped = pace.step(optimizer, scaler)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - decay)
            steps.append((step, index.tolist() if counts else [], stepped))
            losses.append(float(loss.detach()))
            merges += pace.merged
            assert not pace.merged or pace.rounds == step + 1
            assert delay or pace.merged == (pace.rounds == step + 1)
            assert all(p.grad is None for p in model.parameters())
        assert pace.merged
        ends.append(pace.rounds)
        pace._loop.settle()
    rounds, last = pace.rounds, pace.loss
    assert merges == (epochs if delay else rounds)
    pace.host.detach()
    return {
        "steps": steps,
        "losses": losses,
        "loss": last,
        "rounds": rounds,
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "most": int(pace.host.terms.micro_batch or 0),
        "ends": ends,
    }


def replayed(runs: list[dict[str, Any]], **case: Any) -> dict[str, torch.Tensor]:
    """What the model comes to if one process plays what each rank did, interval by interval."""
    merge = case.get("merge") or Merge()
    model, _ = made(case)
    data = Samples(case.get("count", COUNT), getattr(torch, case.get("dtype", "float64")))
    models, optimizers = zip(*(made(case) for _ in runs), strict=True)
    velocity: dict[str, torch.Tensor] = {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    Interval = tuple[list[float], list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]

    def merged(interval: Interval, all_of_it: bool) -> dict[str, torch.Tensor]:
        """The base, after the changes of this interval; buffers only if that is all there is."""
        weights, begun, ended = interval
        found, total = dict(state), sum(weights)
        for name, before in state.items():
            each = [own[name] for own in ended]
            if not before.is_floating_point():
                if all_of_it:
                    found[name] = torch.stack([e for e, w in zip(each, weights, strict=True) if w]).amax(0)
            elif name not in trained:
                mean = sum(w / total * e.nan_to_num(neginf=-9) for w, e in zip(weights, each, strict=True))
                if all_of_it:
                    found[name] = torch.where(before.isinf(), before, mean)
            else:
                firsts = [own[name] for own in begun]
                change = sum(
                    w / total * (first - e) for w, first, e in zip(weights, firsts, each, strict=True)
                )
                if merge.outer == "mean":
                    found[name] = before - change
                else:  # Nesterov's momentum, as Sutskever et al. have it (ICML 2013), by its own formula
                    velocity[name] = 0.9 * velocity.get(name, torch.zeros_like(change)) + change
                    found[name] = before - 0.7 * (change + 0.9 * velocity[name])
        return found

    def decayed(one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = 1 - case.get("decay", 0.0)
        return {name: value * kept if name in trained else value for name, value in one.items()}

    starts, way = [state] * len(runs), list[Interval]()
    origins = starts  # without what the program has made of the parameters since
    for interval in range(runs[0]["rounds"]):
        weights = []
        for run, own, optimizer, start in zip(runs, models, optimizers, starts, strict=True):
            own.load_state_dict(start)
            weight, taken = 0.0, 0
            for number, (_, index, _) in enumerate([step for step in run["steps"] if step[0] == interval]):
                if number:
                    own.load_state_dict(decayed(own.state_dict()))
                if not index:
                    continue
                index = torch.tensor(index)
                tokens = tokens_of(index) if case.get("counted") else None
                many = len(index) if tokens is None else float(tokens.sum())
                loss_of(own, data.x[index], data.y[index], tokens).backward()
                if case.get("clip"):
                    nn.utils.clip_grad_norm_(own.parameters(), case["clip"])
                if many:
                    optimizer.step()
                    taken += 1
                optimizer.zero_grad()
                weight += many
            weights.append({"samples": weight, "steps": taken, "ranks": float(taken > 0)}[merge.by])
        ended = [{name: value.clone() for name, value in own.state_dict().items()} for own in models]
        begun = [
            origin if weight else start
            for weight, origin, start in zip(weights, origins, starts, strict=True)
        ]
        way.append((weights, begun, ended))
        keeps = merge.delay if interval + 1 not in runs[0]["ends"] else 0
        while len(way) > keeps:
            state = merged(way.pop(0), not way)
        starts = [
            {
                name: value + end[name] - start[name]
                if way and name in trained
                else end[name]
                if way
                else value
                for name, value in state.items()
            }
            for start, end in zip(begun, ended, strict=True)
        ]
        origins, starts = starts, [*map(decayed, starts)]
        if not way:  # all have changed them alike
            state, origins = decayed(state), starts
    return state


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
def test_model_equals_a_replay_and_each_sample_counts_once() -> None:
    for name, own in run_cases(3, trained, CASES).items():
        case = CASES[name]
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


# With steps of B / 3 samples, each of these loads is one step.
SINGLE = Script(((4, 3, 5), (4, 4, 4), (2, 5, 5), (3, 4, 5), (5, 4, 3)))


def together(steps: int, count: int, momentum: float, adam: bool = False) -> dict[str, torch.Tensor]:
    """What one process comes to that takes so many whole batches."""
    model, optimizer = made({"momentum": momentum, "adam": adam})
    data, order, done, epoch = Samples(count), Order(count, 5), 0, 0
    while done < steps:
        indices = order.epoch(epoch)
        for first in range(0, count, BATCH):
            chosen = torch.from_numpy(indices[first : first + BATCH])
            loss_of(model, data.x[chosen], data.y[chosen], None).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        epoch += 1
    return model.state_dict()


@guarantee(
    "One plain SGD step of each rank between merges gives the model of one process with the whole batch."
)
def test_one_step_per_interval_equals_one_process() -> None:
    """Under unlike loads, weighted by samples; under equal loads with momentum, too, which stays on its rank."""
    cases: dict[str, dict[str, Any]] = {
        "unlike": {"policy": SINGLE, "every": 1, "epochs": 4, **ANY},
        "equal": {"policy": "equal", "every": 1, "epochs": 4, "count": 84, "momentum": 0.9},
    }
    for name, runs in run_cases(3, trained, cases).items():
        case, steps = cases[name], 4 * 7
        assert [len({at for at, _, _ in run["steps"]}) for run in runs] == [steps] * 3  # one each
        assert all(len(run["steps"]) == steps for run in runs)
        expected = together(steps, case.get("count", COUNT), case.get("momentum", 0.0))
        assert apart(runs[0]["state"], expected) < 1e-12
    (only,) = run_ranks(1, partial(trained, every=1, epochs=2, adam=True))
    assert apart(only["state"], together(2 * 7, COUNT, 0.0, adam=True)) < 1e-12


def test_merges_in_fewer_bits_come_close_to_a_replay() -> None:
    cases: dict[str, dict[str, Any]] = {
        "bf16": {"policy": UNEVEN, "every": 2, "norm": True, "merge": Merge(send="bf16"), **ANY},
        "int8": {"policy": UNEVEN, "every": 2, "norm": True, "merge": Merge(send="int8"), **ANY},
        "delayed": {"policy": UNEVEN, "every": 2, "merge": Merge(send="int8", delay=1), **ANY},
    }
    for name, own in run_cases(3, trained, cases).items():
        assert own[0]["state"] == own[1]["state"] == own[2]["state"]
        assert 0 < apart(own[0]["state"], replayed(own, **cases[name])) < 0.02


def left(rank: int, ranks: int) -> list[Any]:
    """A loop that is left within an epoch with changes on their way: what is said of a checkpoint, the parameters
    before and behind a flush; the steps; and the warning if another one ends so."""
    model, found, steps = fresh(torch.float64), list[Any](), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for flushes in (True, False):
        pace = LocalSGD(model, BATCH, "equal", every=2, merge=Merge(delay=1))
        for x, y, index in pace.loader(Samples(COUNT), seed=5):
            pace.backward(nn.functional.cross_entropy(model(x), y))
            interval = pace.rounds
            pace.step(optimizer)
            assert not pace.merged
            steps += [(interval, index.tolist(), True)] if flushes else []
            if pace.rounds == 3:
                break
        if flushes:
            try:
                pace.state_dict()
            except PacelineError as error:
                found.append(str(error))
            found.append([p.tolist() for p in model.parameters()])
            pace.flush()
            assert pace.merged
            assert pace.state_dict()["rounds"] == 3
            found.append({"state": {n: p.tolist() for n, p in model.state_dict().items()}, "steps": steps})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            pace.host.detach()
        found.append([str(each.message) for each in said])
    return found


@guarantee(
    "`pace.flush()` takes in a delayed merge; until then `pace.merged` is false, and a checkpoint is refused."
)
def test_flush_takes_in_a_delayed_merge() -> None:
    ranks = run_ranks(3, left)
    said, parted, whole, quiet, warned = zip(*ranks, strict=True)
    assert all("a checkpoint after interval 2, whose changes are still on their way" in each for each in said)
    assert parted[0] != parted[1] != parted[2]
    assert whole[0]["state"] == whole[1]["state"] == whole[2]["state"]
    runs = [{**each, "rounds": 3, "ends": [3]} for each in whole]
    assert apart(whole[0]["state"], replayed(runs, merge=Merge(delay=1))) < 1e-12
    assert quiet == ([], [], [])
    assert all("call pace.flush() on all ranks" in each for (each,) in warned)
