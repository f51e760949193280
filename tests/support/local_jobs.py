"""What ranks do that step by themselves between merges, and the same replayed by one process."""

from __future__ import annotations

import itertools
import random
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import ElasticLocalSGD, LocalSGD, Merge
from paceline.torch.callbacks import OnRound
from paceline.torch.elastic.messages import Where
from paceline.torch.feed.pieces import Order
from paceline.torch.local import Merging
from support import elastic_jobs
from support.elastic_jobs import Told
from support.events import Events, until
from support.scripted import Script
from support.torch_jobs import CLASSES, UNEVEN, Samples, fresh

# With steps of B / 3 samples, each of these loads is one step.
SINGLE = Script(((4, 3, 5), (4, 4, 4), (2, 5, 5), (3, 4, 5), (5, 4, 3)))
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


def trained(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one(rank, **case) for case in cases]


def one(
    rank: int,
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


SPOILT: dict[str, Callable[[torch.Tensor], object]] = {
    "changed": lambda p: p.add_(0.1),
    "negated": lambda p: p.neg_(),
    "rows": lambda p: p.copy_(p.flip(0)),
    "columns": lambda p: p.copy_(p.flip(1)),
    "two": lambda p: p.view(-1)[:2].copy_(p.view(-1)[:2].flip(0)),
    "numbers": lambda p: p.fill_(torch.nan),
}


def spoilt(rank: int, ranks: int) -> list[str]:
    """What is said if rank 1 alone spoils its parameters or has another model; if models are wrapped, or called
    through a wrapper; and if ranks wait for each other within an interval."""
    found = []
    for wrong in (*SPOILT, "another", "wrapped", "around", "waits"):
        model: nn.Module = fresh(torch.float64, sometimes=wrong == "another" and rank == 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrong == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        called = nn.parallel.DistributedDataParallel(model) if wrong == "around" else model
        try:
            with LocalSGD(model, BATCH, "equal", every=2) as pace:
                for x, y, _ in pace.loader(Samples(COUNT), seed=5):
                    pace.backward(nn.functional.cross_entropy(called(x), y))
                    pace.step(optimizer)
                    if wrong == "waits" and not pace.merged:
                        dist.barrier()
                    if pace.merged and rank == 1:
                        with torch.no_grad():
                            SPOILT.get(wrong, SPOILT["changed"])(next(model.parameters()))
        except PacelineError as error:
            found.append(str(error))
    return found


def sent(rank: int, ranks: int, send: str) -> list[float]:
    """Merges of random changes, one of which is large: how far their sum is from that of the exact ones, after the
    first and after the last; and how far after the last without what was left out; as parts of the largest change."""
    reducer = Merging(nn.Linear(1, 1), ranks)
    generator = torch.Generator().manual_seed(rank)
    exact, merged, alone = (torch.zeros(1000, dtype=torch.float64) for _ in range(3))
    apart = []
    for number in range(60):
        own = torch.randn(1000, generator=generator, dtype=torch.float64) * 0.01 + 0.003
        own[7] = 1.0
        table = torch.zeros(ranks, 3, dtype=torch.float64)
        table[rank, 1] = 1.0 + rank
        flats, before = [own * (1.0 + rank), table.clone()], dict(reducer._left)
        reducer.sum(flats, send)
        weight = float(flats[1][:, 1].sum())
        merged += flats[0] / weight
        whole = own * (1.0 + rank) / weight
        dist.all_reduce(whole)
        exact += whole
        idle = [torch.zeros_like(own), torch.zeros_like(table)]
        reducer.sum(idle, send)  # an interval whose samples all count for nothing
        assert not idle[0].any()
        kept, reducer._left = reducer._left, {}
        forgetful = [own * (1.0 + rank), table.clone()]
        reducer.sum(forgetful, send)
        alone += forgetful[0] / weight
        reducer._left = kept
        assert (before != {}) == (number > 0)
        apart.append(float((merged - exact).abs().max()))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, merged.tolist())
    assert all(each == everyone[0] for each in everyone)
    return [apart[0], max(apart), float((alone - exact).abs().max())]


class Kinds(nn.Module):
    """Parameters of several kinds; of whole numbers a counter, and a table that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torch.float64, torch.float32, torch.bfloat16, torch.float16
        self.each = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds])
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.register_buffer("table", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return torch.stack([each.double().sum() for each in self.each]).sum() * x.mean()


def kinds(rank: int, ranks: int) -> list[list[float]]:
    """What each parameter is after an interval in each of whose steps it was lowered by an eighth; the counter."""
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8)
    data = torch.utils.data.TensorDataset(torch.ones(24, dtype=torch.float64))
    policy = Script(((1, 2),))
    with LocalSGD(model, 8, policy, every=3) as pace:
        for (x,) in pace.loader(data, seed=5):
            pace.backward(model(x))
            pace.step(optimizer)
    return [each.double().tolist() for each in (*model.each, model.unused, model.seen[None])]


def drawn(rank: int, ranks: int) -> list[Any]:
    """Loops that make their own batches, and streams, without a delay and with one: each rank's steps, and whether
    all end with one model."""
    found = []
    for kind, delay in itertools.product(("sizes", "stream"), (0, 1)):
        model = fresh(torch.float64)
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
        data = Samples(60)
        options: dict[str, Any] = {"limits": [(0, None)] * ranks, "merge": Merge(delay=delay)}
        with LocalSGD(model, BATCH, UNEVEN, every=2, **options) as pace:
            source = pace.sizes(3) if kind == "sizes" else pace.stream(data[n] for n in range(20 * rank, 60))
            for each in source:
                x, y, many = (
                    (data.x[:each], data.y[:each], each) if kind == "sizes" else (*each[:2], len(each[0]))
                )
                pace.backward(nn.functional.cross_entropy(model(x), y))
                counts = pace.counts
                pace.step(optimizer)
                steps.append(many if counts else 0)
            assert pace.merged
        found.append([steps, pace.rounds, [p.tolist() for p in model.parameters()]])
    return found


def late(rank: int, ranks: int, folder: str) -> int:
    """The rounds of a run in which rank 1 stays in the second of four intervals until rank 0 is through the third."""
    model, events = fresh(torch.float64), Events(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(model, BATCH, "equal", every=2, merge=Merge(delay=1)) as pace:
        for x, y, _ in pace.loader(Samples(8 * BATCH), seed=5):
            if (pace.rounds, rank) == (1, 1):
                events.wait("through")
            pace.backward(nn.functional.cross_entropy(model(x), y))
            if (pace.rounds, rank) == (2, 0):
                events.tell("through")
            pace.step(optimizer)
    return pace.rounds


def patient(rank: int, ranks: int) -> float:
    """Seconds that a merge beside the steps waits for a rank that is stuck."""
    with LocalSGD(fresh(torch.float64), BATCH, merge=Merge(delay=1)) as pace:
        group = pace._ranks.merging._group
        dist.barrier()  # the other rank may still be connecting to this one
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


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


def interrupted(rank: int, ranks: int) -> str:
    """The words of the error after rank 1 has left its loop in the middle of a merge, and has begun another."""
    model = fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with LocalSGD(model, 8, "equal", every=2) as pace:
            merges: Any = pace._loop.merges
            loader, take_in = pace.loader(Samples(96), seed=5), merges.take_in

            def stops(*_: object) -> None:
                merges.take_in = take_in
                raise KeyError("an error of the program")

            merges.take_in = stops if rank else take_in
            while pace.epoch < 1:
                with suppress(KeyError):
                    for x, y, _ in loader:
                        pace.backward(nn.functional.cross_entropy(model(x), y))
                        pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    return ""


def scheduled(rank: int, ranks: int) -> list[list[str]]:
    """What is warned of a scheduler that is stepped behind each own step, and of one that is at merges."""
    found = []
    for own in (True, False):
        model = fresh(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with LocalSGD(model, 8, Script(((1, 2),)), every=3) as pace:
                for x, y, _ in pace.loader(Samples(48), seed=5):
                    pace.backward(nn.functional.cross_entropy(model(x), y))
                    pace.step(optimizer)
                    if own or pace.merged:
                        scheduler.step()
        found.append([str(each.message) for each in said])
    return found


def slowed(rank: int, ranks: int, policies: list[str], folder: str) -> list[list[Any]]:
    """Under each policy: the samples of this rank's steps in the third interval, and what all ranks are told to have
    run in it.

    If steps are claimed, rank 1 stays in its first step of that interval until the others have run all of it but
    three steps, or for ever."""
    found = []
    for number, policy in enumerate(policies):
        place, most = Path(folder) / str(number), 6 * BATCH - 3 * BATCH // ranks
        place.mkdir(exist_ok=True)
        model, told, steps = fresh(torch.float64), list[Any](), list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with LocalSGD(model, BATCH, policy, every=6, callbacks=[OnRound(told.append)]) as pace:
            for x, y, _ in pace.loader(Samples(3 * 6 * BATCH), seed=5):
                time.sleep(0.003)
                if pace.rounds == 2:
                    if rank == 1 and not steps and policy != "equal":
                        until(lambda place=place, most=most: ran_by_others(place) >= most)
                    steps.append(len(x))
                    (place / f"{rank}-{len(steps)}-{len(x)}").touch()
                pace.backward(nn.functional.cross_entropy(model(x), y))
                pace.step(optimizer)
        found.append([steps, told[2].loads.tolist()])
    return found


def ran_by_others(place: Path) -> int:
    """The samples that others than rank 1 have run, by the names of these files."""
    ran = (list(map(int, each.name.split("-"))) for each in place.iterdir())
    return sum(size for rank, _, size in ran if rank != 1)


def resumed(rank: int, ranks: int) -> list[Any]:
    """A run that is left within an interval and gone on with from its last merge, against one that is not left."""
    found = []
    for left in (False, True):
        torch.manual_seed(3)
        model, states, used = fresh(torch.float64), dict[str, Any](), list[list[int]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss, options = nn.functional.cross_entropy, {"every": 2, "merge": Merge(outer="nesterov")}
        for part in range(1 + left):
            pace = LocalSGD(model, BATCH, "equal", **options)
            loader = pace.loader(Samples(COUNT), seed=5)
            if part:
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                model.load_state_dict(states["model"])
                pace.load_state_dict(states["pace"])
            for _ in range(pace.epoch, 2):
                for x, y, index in loader:
                    pace.backward(loss(model(x), y))
                    step = pace.rounds
                    pace.step(optimizer)
                    if part or not left or step < 2:
                        used.append(index.tolist())
                    if pace.merged:
                        states = {
                            "pace": pace.state_dict(),
                            "model": {n: p.clone() for n, p in model.state_dict().items()},
                        }
                    elif left and not part and step == 2:
                        break
                if left and not part:
                    break
            back = all(torch.equal(p, states["model"][n]) for n, p in model.state_dict().items())
            pace.host.detach()
        found.append(
            [sorted(i for part in used for i in part), [p.tolist() for p in model.parameters()], back]
        )
    return found


def reloaded(rank: int, ranks: int, delay: int) -> list[list[float]]:
    """What a run that sends int8 comes to; the same behind another one that was left, and its beginning loaded."""
    found = []
    for left in (False, True):
        model = fresh(torch.float64)
        first = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        merge = Merge(send="int8", delay=delay)
        with LocalSGD(model, BATCH, "equal", every=2, merge=merge) as pace:
            state, loader = pace.state_dict(), pace.loader(Samples(COUNT), seed=5)
            for part in range(1 + left):
                for x, y, _ in loader:
                    pace.backward(nn.functional.cross_entropy(model(x), y))
                    pace.step(optimizer)
                    if left and not part and pace.rounds == 2:
                        break
                if left and not part:
                    model.load_state_dict(first)
                    pace.load_state_dict(state)
        found.append(nn.utils.parameters_to_vector(model.parameters()).tolist())
    return found


RATE = 0.05


def survive(where: Where, out: Path, rounds: int, options: dict[str, Any]) -> None:
    """A rank's life in a run that goes on without lost ranks: tells of each of its steps before it is taken."""
    from support.elastic_phases import Orders

    with elastic_jobs.telling(where, out) as say:
        orders = Orders(out, where.ident, say)
        orders.watch()
        orders.at("start")
        nap = options.get("nap", 1e-4) * options.get("slow", [1, 3, 1, 1])[where.place]
        model = elastic_jobs.network(where.ident, options.get("norm", False))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        pace = ElasticLocalSGD(
            model,
            elastic_jobs.BATCH,
            options.get("policy", "level"),
            every=options.get("every", 3),
            merge=options.get("merge", Merge()),
            callbacks=[elastic_jobs.Telling(say, lambda done: {"batch": done.batch})],
        )
        signal.signal(signal.SIGTERM, lambda *_: pace.leave())
        with pace:
            data = IndexedRows(elastic_jobs.SAMPLES)
            costs = {"cost": elastic_jobs.lengths(len(data)), "padded": False} if options.get("costs") else {}
            loader = pace.loader(data, seed=3, **costs)
            pace.register(optimizer)
            say(kind="joined", at=time.time(), rounds=pace.rounds)
            last = rounds
            while pace.rounds < last:
                for x, y, index in loader:
                    orders.at("piece")
                    time.sleep(nap * len(x))
                    pace.backward((model(x) - y).square().mean())
                    interval = pace.rounds
                    if pace.counts:
                        say(kind="took", interval=interval, epoch=pace.epoch, index=index.tolist())
                    pace.step(optimizer)
                    orders.at("step")
                    if pace.merged:
                        say(kind="merged", interval=interval)
                        if last > 10**6 and (out / "last").exists():
                            last = int((out / "last").read_text())
                        if pace.rounds >= last:
                            break
            pace._loop.settle()
            state = {name: value.tolist() for name, value in model.state_dict().items()}
            parameters = nn.utils.parameters_to_vector(model.parameters()).tolist()
            say(kind="end", rounds=pace.rounds, state=state, parameters=parameters)


class IndexedRows(elastic_jobs.Rows):
    """Rows that know their own index."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        return self.x[index], self.y[index], index


def counted(told: Told) -> list[tuple[int, dict[int, list[list[int]]]]]:
    """Epoch and the steps that counted in each interval, by worker: those of all that merged it, and of workers
    that were lost behind its sums, without whose samples the interval would not be whole."""
    took: dict[int, dict[int, list[Any]]] = {}
    epochs: dict[int, int] = {}
    for who, line in told.of("took"):
        took.setdefault(line["interval"], {}).setdefault(who, []).append(line["index"])
        epochs[line["interval"]] = line["epoch"]
    merged = {(line["interval"], who) for who, line in told.of("merged")}
    batches = {line["step"]: line["batch"] for _, line in told.of("round")}
    found = []
    for interval, by in sorted(took.items()):
        sure = {who: steps for who, steps in by.items() if (interval, who) in merged}
        if not sure:
            continue
        have = {index for steps in sure.values() for step in steps for index in step}
        missing = batches.get(interval, len(have)) - len(have)
        others = [who for who in by if who not in sure]
        for some in itertools.chain.from_iterable(
            itertools.combinations(others, many) for many in range(1, len(others) + 1)
        ):
            own = [index for who in some for step in by[who] for index in step]
            if missing and len(own) == len({*own} - have) == missing:
                sure, missing = {**sure, **{who: by[who] for who in some}}, 0
        assert not missing, (interval, missing)
        found.append((epochs[interval], sure))
    return found


def played(intervals: list[tuple[int, dict[int, list[list[int]]]]]) -> torch.Tensor:
    """The parameters of one process that plays these steps and merges them by their samples."""
    data, model = elastic_jobs.Rows(elastic_jobs.SAMPLES), elastic_jobs.network()
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _, by in intervals:
        total, mean = 0, torch.zeros_like(start)
        for steps in by.values():
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for index in map(torch.tensor, steps):
                optimizer.zero_grad()
                (model(data.x[index]) - data.y[index]).square().mean().backward()
                optimizer.step()
            many = sum(map(len, steps))
            mean += many * nn.utils.parameters_to_vector(model.parameters()).detach()
            total += many
        start = mean / total
    return start
