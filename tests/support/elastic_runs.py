"""A run whose ranks are killed, frozen, told to leave and started again; and what it must come to all the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from paceline.torch import ElasticPace, Pace
from paceline.torch.callbacks import Callback
from paceline.torch.elastic import recovery
from paceline.torch.elastic.link import LauncherLink
from paceline.torch.elastic.messages import Where
from paceline.torch.elastic.recovery import Rendezvous
from paceline.torch.elastic.supervisor import Loss, Supervisor
from paceline.torch.feed.prefetch import Prefetch
from paceline.torch.liveness.shutdown import end_with_parent
from support.forks import Fork

WIDTH, SAMPLES, BATCH = 8, 1200, 48


class Rows(torch.utils.data.Dataset):
    """Random rows, and what is to be learned of each."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.tokens = torch.from_numpy(lengths(samples))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index], self.tokens[index]


class Seldom(nn.Module):
    """Uses its weights for some samples alone, so that a part of a round may have no gradient for them, and a bias
    never. Its shift is not among the state that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        own = torch.Generator().manual_seed(torch.initial_seed())
        self.register_buffer("shift", 0.01 * torch.randn(32, generator=own), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, :1] > 0.6).to(x.dtype)
        return x + chosen * (x * self.weight + self.shift) if chosen.any() else x


def network(seed: int = 0, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    beside = nn.BatchNorm1d(32) if norm else Seldom()
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), beside, nn.Tanh(), nn.Linear(32, 1)
    ).double()


def statistics(model: nn.Module) -> list[float]:
    """The sums of its buffers, such as batch norm's."""
    return [float(buffer.double().sum()) for buffer in model.buffers()]


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def lengths(samples: int) -> np.ndarray:
    """What samples cost, and how many tokens they have."""
    return np.random.default_rng(8).integers(1, 40, samples)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor | None) -> Any:
    """The loss of a batch: a mean over its samples, or over the tokens of each, which are returned with it."""
    each = (model(x) - y).square()
    if tokens is None:
        return each.mean()
    count = int(tokens.sum())
    return (each.flatten() * tokens).sum() / max(count, 1), count


def alone(
    rounds: int, batch: int = BATCH, norm: bool = False, tokens: bool = False, samples: int = SAMPLES
) -> torch.Tensor:
    """The parameters of one process after so many rounds, with the same samples in each."""
    data, model = Rows(samples), network(norm=norm)
    optimizer, scheduler = optimizers(model)
    done, epoch = 0, 0
    while done < rounds:
        order = np.random.default_rng((3, epoch)).permutation(samples)
        for start in range(0, samples, batch):
            chosen = torch.from_numpy(order[start : start + batch])
            optimizer.zero_grad()
            of = data.tokens[chosen] if tokens else None
            loss = squares(model, data.x[chosen], data.y[chosen], of)
            (loss[0] if tokens else loss).backward()
            optimizer.step()
            scheduler.step()
            done += 1
            if done == rounds:
                break
        epoch += 1
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def exactly(rounds: int, samples: int, chunk: int) -> torch.Tensor:
    """The parameters of one process that is not elastic after so many rounds, under ``deterministic=True``."""
    torch.set_num_threads(1)
    model = network()
    optimizer, scheduler = optimizers(model)
    with Pace(model, BATCH, "factoring", loop="round", deterministic=True, quantum=chunk) as pace:
        loader = pace.loader(Rows(samples), seed=3)
        while pace.rounds < rounds:
            for batch in loader:
                pace.round(batch, lambda x, y, tokens: squares(model, x, y, None))
                if pace.step(optimizer):
                    scheduler.step()
                    if pace.rounds >= rounds:
                        break
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Way(NamedTuple):
    """How rounds are divided: options of ``run``, and the parameters that the run must come to."""

    options: dict[str, Any]
    expected: Callable[[int], torch.Tensor]


COSTS = {"padded": False, "micro_batch_cost": 160.0}
WAYS = {
    "planned": Way({}, alone),
    "moves": Way({"policy": "factoring"}, alone),
    "costs": Way({"policy": "auto", "costs": COSTS}, lambda rounds: alone(rounds, tokens=True)),
    "local": Way({"policy": "factoring"}, alone),  # see ``elastic_local.survive``
    "bits": Way(
        {"policy": "factoring", "deterministic": True, "quantum": 4},
        lambda rounds: exactly(rounds, SAMPLES, 4),
    ),
}


class Telling(Callback):
    """Tells of the members and the rounds of a Pace. more: of a round, also what this gives."""

    def __init__(self, say: Callable[..., None], more: Callable[[Any], dict[str, Any]]) -> None:
        self._say, self._more = say, more

    def on_members(self, change: Any) -> None:
        self._say(kind="mended", at=time.time(), **change._asdict())

    def on_round(self, result: Any) -> None:
        loads, shares = result.loads.tolist(), result.shares.tolist()
        told = {"step": result.step, "at": time.time(), "loads": loads, "shares": shares}
        self._say(kind="round", **told, **self._more(result))


@contextlib.contextmanager
def telling(where: Where, out: Path) -> Iterator[Callable[..., None]]:
    """A rank's process, which tells of what happens in a file of its own, and ends here."""
    os.environ.update(where.environment())
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loaders' processes, as in a program of its own
    with open(out / f"{where.ident}", "a", buffering=1) as file:

        def say(**words: Any) -> None:
            file.write(json.dumps(words) + "\n")

        try:
            yield say
        except SystemExit:
            say(kind="left")
            raise
        except BaseException as error:
            say(kind="crash", words=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
            file.flush()
            os._exit(1)
    os._exit(0)  # gloo's threads are those of groups that were left


class Oops(Exception):
    """Something in a user's loop."""


def train(where: Where, out: Path, rounds: int, options: dict[str, Any]) -> None:
    """A rank's life: tells of each round and each change of members in a file of its own."""
    with telling(where, out) as say:
        _train(where, out, rounds, options, say)


def _train(where: Where, out: Path, rounds: int, options: dict[str, Any], say: Callable[..., None]) -> None:
    from support.elastic_phases import Orders

    orders, opened = Orders(out, where.ident, say), itertools.count()
    real = LauncherLink.connect
    received: list[Any] = []  # by this rank, whether it has use for it or not
    useful: list[Any] = []
    ahead: list[
        int
    ] = []  # for each round, whether this rank's first samples of it were loaded before it began
    send, enter = recovery.send, Rendezvous.enter

    def sent(group: Any, mine: Any, *others: Any) -> Any:
        arrived = send(group, mine, *others)
        received.extend([] if mine is not None or arrived is None else [arrived])
        return arrived

    def entered(met_at: Rendezvous, word: Any) -> Any:
        met = enter(met_at, word)
        useful.extend([] if met.packed is None else [met.packed])
        return met

    recovery.send, Rendezvous.enter = sent, entered  # type: ignore[method-assign]
    LauncherLink.connect = lambda link: (next(opened), real(link))[1]  # type: ignore[method-assign]
    if options.get("phases"):
        orders.watch()
        orders.at("start")
    nap = options.get("nap", 0.0) * options.get("slow", [1] * where.places)[where.place]
    norm, by_cost = bool(options.get("norm")), "costs" in options
    model = network(where.ident, norm)  # all begin with what worker 0 has
    optimizer, scheduler = optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if options.get("scaled") else None
    pace = ElasticPace(
        model,
        BATCH,
        options.get("policy", "level"),
        micro_batch=None if (fits := options.get("micro_batch")) is None else fits[where.place],
        quantum=options.get("quantum", 1),
        deterministic=bool(options.get("deterministic")),
        callbacks=[
            Telling(
                say,
                lambda done: {
                    "pieces": 0 if done.within is None else max(map(len, done.within.pieces)),
                    "statistics": statistics(model),
                },
            )
        ],
    )
    signal.signal(signal.SIGTERM, lambda *_: pace.leave())

    def loss_of(x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> Any:
        orders.at("piece")
        time.sleep(nap * (float(tokens.sum()) / 20 if by_cost else len(x)))
        return squares(model, x, y, tokens if by_cost else None)

    def halfway(grad: torch.Tensor) -> None:
        if pace.rounds == options.get("oops") and pace.rank == 1 and not (out / "oops").exists():
            (out / "oops").touch()
            raise Oops  # the sums of later layers are under way by then

    list(model.parameters())[2].register_hook(halfway)

    with pace:
        samples = options.get("samples", SAMPLES)
        costs = {"cost": lengths(samples), **options["costs"]} if by_cost else {}
        if workers := options.get("workers"):
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            costs |= {"num_workers": workers, "worker_init_fn": end_with_parent}
            expect = Prefetch.expect

            def expected(begun: Prefetch, micro_steps: list[Any]) -> None:
                ahead.append(sum(map(begun.comes, micro_steps[:1])))
                expect(begun, micro_steps)

            Prefetch.expect = expected  # type: ignore[method-assign]
        loader = pace.loader(Rows(samples), seed=3, **costs)
        pace.register(optimizer, scheduler, *([] if scaler is None else [scaler]))
        say(kind="joined", at=time.time(), rounds=pace.rounds, statistics=statistics(model))
        last, decays = rounds, itertools.count()
        while pace.rounds < last:
            try:
                for batch in loader:
                    if options.get("own_decay"):  # by a number that begins with 0 on a rank that joins
                        optimizer.param_groups[0]["weight_decay"] = 1e-6 * next(decays)
                    pace.round(batch, loss_of, scaler=scaler)
                    if scaler is not None:
                        scaler.unscale_(optimizer)
                    orders.at("step")
                    if pace.step(optimizer, scaler):
                        scheduler.step()
                        if last > 10**6 and (out / "last").exists():
                            last = int((out / "last").read_text())
                        if pace.rounds >= last:
                            break
            except Oops:
                pace.host.abandon()
                pace.load_state_dict(pace.state_dict())  # so that the epoch goes on
        if options.get("waits"):  # for all others, who may need this rank for their last round
            pace.host.flush()
            (out / f"over-{where.ident}").touch()
            until = time.monotonic() + 400
            while len(list(out.glob("over-*"))) < where.places:
                assert time.monotonic() < until
                time.sleep(0.01)
        pace._loop.settle()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        files = len(os.listdir("/proc/self/fd"))
        say(
            kind="end",
            rounds=pace.rounds,
            epoch=pace.epoch,
            files=files,
            opened=next(opened),
            ahead=ahead,
            received=len(received),
            useful=len(useful),
            parameters=flat.tolist(),
        )


@dataclass
class Fault:
    """What was done to the run. at: as ``time.time`` tells it; who: the worker it was done to."""

    kind: str
    who: int
    at: float
    place: int = -1
    phase: str = "any"


@dataclass
class Told:
    """What became of a run."""

    faults: list[Fault] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    # When each worker's loss was, as ``time.time`` tells it.
    seen: dict[int, float] = field(default_factory=dict)
    lines: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by worker
    places: dict[int, int] = field(default_factory=dict)  # of all that were started
    stalls: list[Any] = field(default_factory=list)  # processes that stop the launcher for a while

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(who, line) for who, lines in self.lines.items() for line in lines if line["kind"] == kind]


def stayed(told: Told) -> list[dict[str, Any]]:
    """What was told of rounds; not of the last one of a worker that went then, since it may alone have completed it,
    and the others have mended it."""
    here = {who for who, _ in told.of("end")}
    newest = {who: line["step"] for who, line in told.of("round")}
    return [line for who, line in told.of("round") if who in here or line["step"] != newest[who]]


Plan = Callable[[Supervisor, Told, int], None]  # called again and again, with the newest round


def run(
    out: Path,
    ranks: int,
    rounds: int,
    plan: Plan,
    *,
    restarts: int = 0,
    dead: float = 1.0,
    seconds: float = 300.0,
    **options: Any,
) -> Told:
    """Train for so many rounds while ``plan`` does what it likes to the workers."""
    job = options.pop("job", train)

    def start(where: Where) -> Fork:
        return Fork(job, where, out, rounds, options)

    keeper, told = Supervisor(ranks, start, restarts, dead), Told()
    files: dict[int, Any] = {}
    halves: dict[int, str] = {}
    newest, until = -1, time.monotonic() + seconds
    try:
        over = False
        while not over:
            over = not keeper.workers  # and once more, for what they said last
            losses = keeper.look()
            told.losses += losses
            told.seen |= {loss.ident: time.time() for loss in losses}
            for ident in range(len(keeper.placed)):
                path = out / str(ident)
                if ident not in files and path.exists():
                    files[ident] = path.open()
                text = halves.get(ident, "") + (files[ident].read() if ident in files else "")
                *lines, halves[ident] = text.split("\n")
                for said in map(json.loads, lines):
                    told.lines.setdefault(ident, []).append(said)
                    if said["kind"] == "round":
                        newest = max(newest, said["step"])
                    if said["kind"] == "crash":
                        print(f"worker {ident}: {said['trace']}", file=sys.stderr)
            if keeper.running:
                plan(keeper, told, newest)
            if time.monotonic() > until:
                there = keeper.members
                raise AssertionError(f"round {newest} after {seconds} s; {told.faults}; members {there}")
            time.sleep(0.005)
    finally:
        keeper.close()
        for stall in told.stalls:
            stall.wait()
    return told


def hit(keeper: Supervisor, told: Told, kind: str, who: int) -> None:
    """Do it to this worker."""
    process, place = keeper.workers[who].process, keeper.placed[who]  # type: ignore[attr-defined]
    told.faults.append(Fault(kind, who, time.time(), place))
    number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "leave": signal.SIGTERM}[kind]
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


FOR_EVER = 10**9  # rounds, for ``faults``, which ends the run
REST = 20  # rounds after its last fault


def faults(out: Path, kinds: list[str], many: int, gap: float, seed: int = 0) -> Plan:
    """The run ends some rounds after the last of ``many`` faults at random moments, each of one of these kinds.

    Two at most are under way at once, and none where somebody has not taken over the model yet: a run of which nobody
    is left who has it ends."""
    chance, state = random.Random(seed), {"next": 0.0}

    def plan(keeper: Supervisor, told: Told, newest: int) -> None:
        members = keeper.members
        now = time.monotonic()
        there = {member.ident for member in members}
        whole = len(members) == keeper._places and newest >= 2
        under_way = len({fault.who for fault in told.faults} & there)
        if whole and len(told.faults) >= many and not (out / "last").exists():
            (out / "part").write_text(str(newest + REST))
            (out / "part").rename(out / "last")
        begun = {who for who, lines in told.lines.items() if any(line["kind"] == "joined" for line in lines)}
        if not whole or len(told.faults) >= many or under_way > 1 or not there <= begun:
            state["next"] = now + gap * chance.random()
            return
        if now < state["next"]:
            return
        who = chance.choice(members).ident
        if who in keeper.workers:
            kind = chance.choice(kinds)
            hit(keeper, told, kind, who)
            if kind == "leave":
                told_place = told.faults[-1].place
                keeper.start(told_place)
            state["next"] = now + 0.2

    return plan
