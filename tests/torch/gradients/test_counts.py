"""Losses that are means over tokens: the gradient is that of all tokens of the round, whoever ran how many."""

from __future__ import annotations

import math
import random
import time
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.decisions import per_sample
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.often import some
from support.ranks import errors_of, run_cases, run_ranks
from support.sentences import BATCH, COUNT, IGNORED, LENGTH, WORDS, loss_of, means_of_sentences, model
from support.sharding import possible, sharded_over, whole
from support.small_net import UNEVEN, Samples, difference, fresh

pytestmark = pytest.mark.processes

LOOSE = ((0, None),) * 3
CASES: dict[str, dict[str, Any]] = {
    "whole": {"policy": UNEVEN, "limits": LOOSE},
    "clipped": {"policy": UNEVEN, "limits": LOOSE, "clip": True},
    "sums": {"policy": UNEVEN, "limits": LOOSE, "reduction": "sum"},
    "by round, accumulated": {"policy": UNEVEN, "limits": LOOSE, "loop": "round", "micro_batch": 3},
    "by round, moving": {"policy": "factoring", "loop": "round"},
    "pieces, moving, clipped": {"policy": "factoring:portion=0.3", "loop": "pieces", "clip": True},
    "empty batches": {"policy": UNEVEN, "limits": LOOSE, "fill": False},
    "the same bits": {"policy": "factoring", "loop": "round", "deterministic": True, "quantum": 2},
    "prefetching": {"policy": "level", "workers": 1},
    "means of sentences": {"policy": UNEVEN, "limits": LOOSE, "by_sentence": True},
    "means of sentences, moving": {"policy": "factoring", "loop": "round", "by_sentence": True},
    "sums of sentences by hook": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "weigh": "hook",
        "by_sentence": True,
        "reduction": "sum",
    },
    "hardly any": {"policy": UNEVEN, "limits": LOOSE, "rare": 30},
    "hardly any, moving": {"policy": "factoring", "loop": "round", "rare": 30},
    "by hook": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook"},
    "by hook, hardly any": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook", "rare": 30},
    "by hook, accumulated": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "weigh": "hook",
        "loop": "round",
        "micro_batch": 3,
        "fill": False,
    },
    "sums by hook": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook", "reduction": "sum"},
    "sharded": {"policy": UNEVEN, "limits": LOOSE, "sharded": True, "clip": True},
    "sharded, accumulated": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "sharded": True,
        "loop": "round",
        "micro_batch": 5,
        "rare": 30,
    },
}
CASES = possible(
    some(CASES, "means of sentences, moving", "hardly any, moving", "by hook, hardly any", "sums by hook")
)


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of unlike lengths, padded; padding and the labels of whole sentences count for nothing.

    rare: only every so manyth sentence has labels that count, so that most ranks of a round have none, and some
    rounds have none at all; by default two of three have.
    """

    def __init__(self, rare: int = 0) -> None:
        draw = torch.Generator().manual_seed(11)
        self.words = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        self.labels = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        lengths = torch.randint(1, LENGTH + 1, (COUNT,), generator=draw)
        self.labels[torch.arange(LENGTH)[None] >= lengths[:, None]] = IGNORED
        self.labels[torch.arange(COUNT) % rare != 0 if rare else torch.arange(COUNT) % 3 == 0] = IGNORED

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words[index], self.labels[index]


@cache
def one_process(
    clip: bool, rare: int = 0, by_sentence: bool = False
) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters, and the losses of the rounds, of one process that takes whole batches of two epochs.

    by_sentence: its loss is the mean over the sentences of each one's own mean, not the mean over all tokens."""
    net, data = model(), Sentences(rare)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), []
    for epoch in range(2):
        order = torch.from_numpy(Order(COUNT, 5).epoch(epoch))
        for first in range(0, COUNT, BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad()
            out, labels = net(data.words[chosen]), data.labels[chosen]
            if by_sentence:
                loss = means_of_sentences(out, labels).mean()
            elif labels.ne(IGNORED).any():
                loss = loss_of(out, labels, "mean")
            else:  # a mean over nothing: the round moves nothing but the momentum
                loss = out.sum() * 0.0
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            optimizer.step()
            losses.append(loss.item())
    return [p.detach() for p in net.parameters()], losses


def trained(
    rank: int,
    ranks: int,
    loop: str = "whole",
    reduction: str = "mean",
    clip: bool = False,
    workers: int = 0,
    rare: int = 0,
    by_sentence: bool = False,
    sharded: bool = False,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, float]:
    """The largest relative difference of the parameters and of the losses from one process."""
    results: list[RoundResult] = []
    net, stalls = model(), random.Random(rank)
    ddp: nn.Module = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    pace = HostedPace(ddp, BATCH, loop=loop, callbacks=[OnRound(results.append)], **options)
    loader = pace.loader(Sentences(rare), seed=5, num_workers=workers, **(loading or {}))

    def function(words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        time.sleep(4e-4 * stalls.expovariate(1.0))
        if by_sentence:
            each = means_of_sentences(ddp(words), labels)
            return each.mean() if reduction == "mean" else each.sum(), None
        return loss_of(ddp(words), labels, reduction), labels.ne(IGNORED).sum()

    for _ in range(2):
        for batch in loader:
            if loop == "round":
                pace.round(batch, function, reduction)
            else:
                loss, count = function(*batch)
                pace.backward(loss, reduction, count=count)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            pace.step(optimizer)
    pace.host.flush()
    pace.host.detach()
    expected, losses = one_process(clip, rare, by_sentence)
    found = [whole(p) for p in net.parameters()]
    return difference(found, expected), max(
        abs(r.loss / right - 1)
        for r, right in zip(results, losses, strict=True)
        if right  # a round without a token has no mean
    )


@guarantee("With `count=`, means and sums over tokens are those of one process, also if a rank has no token.")
def test_token_means_train_the_model_of_one_process() -> None:
    for name, ranks in run_cases(3, trained, CASES).items():
        for parameters, losses in ranks:
            assert parameters < 1e-12, f"{name}: relative difference {parameters:.1e}"
            assert losses < 1e-12, f"{name}: losses differ by {losses:.1e}"


def scaled(rank: int, ranks: int, many: float) -> list[float]:
    """The GradScaler's scale after each round of a loop in float16 whose samples count ``many`` each."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ddp = DistributedDataParallel(net)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scales = []
    with Pace(ddp, BATCH, UNEVEN, limits=LOOSE) as pace:
        for x, y, _ in pace.loader(Samples(6 * BATCH, torch.float32), seed=5):
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(ddp(x).float(), y)
            pace.backward(loss, scaler=scaler, count=many * len(x))
            pace.step(optimizer, scaler)
            scales.append(scaler.get_scale())
    return scales


@guarantee("With `count=`, means and sums over tokens are those of one process, also if a rank has no token.")
def test_counts_of_many_tokens_overflow_in_no_round_but_the_first() -> None:
    for few, many in zip(
        *run_cases(3, scaled, {"few": {"many": 1}, "many": {"many": 2**15}}).values(), strict=True
    ):
        assert len(few) == len(many) == 6
        assert set(few) == {2.0**16}
        assert set(many) == {2.0**15}, "the first step is left out, and no other"


def left(rank: int, ranks: int) -> float:
    """The difference from one process, if a counted round is left in its middle and run again in a resumed loop."""
    net, data = fresh(torch.float64), Samples(5 * BATCH)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    with Pace(ddp, BATCH, UNEVEN, loop="pieces", limits=LOOSE, micro_batch=2) as pace:
        loader, state, stops = pace.loader(data, seed=5), pace.state_dict(), True
        while pace.rounds < 5:
            for x, y, _ in loader:
                weights = 1e4 * (1.0 + y)
                loss = (nn.functional.cross_entropy(ddp(x), y, reduction="none") * weights).sum()
                leaves, stops = stops and pace.rounds == 3, stops and pace.rounds < 3
                if not (leaves and pace.host.last):  # which would wait for the others
                    pace.backward(loss, "sum", count=weights.sum())
                if leaves:
                    break
                if pace.step(optimizer):
                    state = pace.state_dict()
            if pace.rounds < 5:
                pace.load_state_dict(state)
    one = fresh(torch.float64)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.3, momentum=0.9)
    for chosen in torch.from_numpy(Order(len(data), 5).epoch(0)).split(BATCH):
        weights = 1.0 + torch.arange(3, dtype=torch.float64)
        nn.functional.cross_entropy(one(data.x[chosen]), data.y[chosen], weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return difference(net.parameters(), one.parameters())


@guarantee("With `count=`, means and sums over tokens are those of one process, also if a rank has no token.")
def test_counted_round_that_was_left_and_resumed_trains_the_model_of_one_process() -> None:
    assert max(run_ranks(3, left)) < 1e-12


def test_count_of_a_sample_is_the_nearest_power_of_two() -> None:
    assert [per_sample([total], 4, 8.0) for total in (0.0, 4.0, 5.6, 5.7, 2e-3)] == [8, 1, 1, 2, 2**-11]
    ranks = [1e16, 1.0, -0.0, 1.0]
    assert per_sample(ranks, 7, 1.0) == per_sample(ranks[::-1], 7, 1.0)
    assert per_sample([math.nan, 3.0], 7, 4.0) == per_sample([3.0], 0, 4.0) == 4.0


def collectives(rank: int, ranks: int) -> list[tuple[str, bool]]:
    """The collectives that one round with counts calls for beside DDP's own, each with whether the caller goes on
    at once, and the order in which they and the backward pass begin and end."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer, said = torch.optim.SGD(net.parameters(), lr=0.3), []
    plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier")}

    def telling(name: str, *arguments: Any, **options: Any) -> Any:
        said.append((name, bool(options.get("async_op"))))
        return plain[name](*arguments, **options)

    with Pace(ddp, BATCH, "equal") as pace:
        for words, labels in pace.loader(Sentences(), seed=5):
            if pace.rounds == 1:
                for name in plain:
                    setattr(dist, name, partial(telling, name))
                net[0].register_forward_hook(lambda *_: said.append(("forward", True)))
                net[2].weight.register_hook(lambda _: said.append(("backward", True)))
            out = ddp(words)
            pace.backward(loss_of(out, labels, "mean"), count=labels.ne(IGNORED).sum())
            pace.step(optimizer)
            if pace.rounds == 2:
                break
        for name, function in plain.items():
            setattr(dist, name, function)
    return said


def test_total_count_is_summed_beside_the_gradients() -> None:
    for said in run_ranks(2, collectives):
        assert said == [("forward", True), ("backward", True)]


def counts_on_some(rank: int, ranks: int) -> None:
    """Rank 0 alone says over how many labels its loss is a mean."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    pace = Pace(ddp, BATCH, "equal")
    for words, labels in pace.loader(Sentences(), seed=5):
        count = labels.ne(IGNORED).sum() if rank == 0 else None
        pace.backward(loss_of(ddp(words), labels, "mean"), count=count)
        pace.step(optimizer)


@guarantee("`count=` on one rank only, or for some losses under `drop=`, raises before any rank steps.")
def test_count_on_one_rank_only_raises_on_all() -> None:
    for sentence in errors_of(3, counts_on_some):
        assert sentence.startswith(
            "round 0: rank 0 gave a count with the loss, and rank 1, 2 did not; expected count="
        )


def test_invalid_counts_raise() -> None:
    model = fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(pace: Pace, *counts: Any) -> None:
        given = iter(counts)
        for x, y, _ in pace.loader(Samples(20)):
            pace.backward(torch.nn.functional.cross_entropy(model(x), y), count=next(given))
            pace.step(optimizer)

    for count in (-1, float("nan"), "x", torch.ones(2)):
        with pytest.raises(PacelineError, match="expected what the loss is a mean over"):
            run(Pace(model, 10, "equal"), count)
    with pytest.raises(PacelineError, match="one piece was given a count"):
        run(Pace(model, 10, "equal", loop="pieces", micro_batch=5), 3, None)
    for second in ({}, {"count": 4}, {"reduction": "global"}):
        pace = Pace(model, 10, "equal")
        batches = iter(pace.loader(Samples(20)))
        x, y, _ = next(batches)
        pace.weighted(torch.nn.functional.cross_entropy(model(x), y), count=3).backward()
        with pytest.raises(PacelineError, match="two losses of one micro-step have different counts"):
            pace.weighted(torch.nn.functional.cross_entropy(model(x), y), **second)
        pace.close()
    run(Pace(model, 10, "equal"), 0, 0)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def positives(rank: int, ranks: int, how: str, **options: Any) -> tuple[float, int]:
    """A detector's loss: that of all anchors, divided by the positive ones, of which a micro-batch may have none. The
    difference from one process, and the warnings."""
    net, alone, data = fresh(torch.float64), fresh(torch.float64), Samples(6 * BATCH)
    marks = (torch.rand(len(data), 3, generator=torch.Generator().manual_seed(2)) < 0.08).double()
    entropies = partial(nn.functional.binary_cross_entropy_with_logits, reduction="sum")
    ours, its = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, alone))
    for chosen in torch.from_numpy(Order(len(data), 5).epoch(0)).split(BATCH):
        (entropies(alone(data.x[chosen]), marks[chosen]) / marks[chosen].sum()).backward()
        its.step()
        its.zero_grad()
    ddp = DistributedDataParallel(net)

    def loss_of(x: torch.Tensor, _: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = entropies(ddp(x), marks[index]), marks[index].sum()
        return total if how == "sum" else total / count.clamp(min=1), count

    with (
        warnings.catch_warnings(record=True) as caught,
        Pace(ddp, BATCH, UNEVEN, limits=LOOSE, **options) as pace,
    ):
        warnings.simplefilter("always")
        for part in pace.loader(data, seed=5):
            if options.get("loop") == "round":
                pace.round(part, loss_of, how)
            else:
                loss, count = loss_of(*part)
                pace.backward(loss, how, count=count)
            pace.step(ours)
    said = sum("came with count=0, so that it counts for nothing" in str(one.message) for one in caught)
    return difference(net.parameters(), alone.parameters()), said


@guarantee(
    "A sum with `count=` counts also where nothing is counted; a mean over nothing that is not zero warns once."
)
def test_loss_of_a_micro_batch_without_anything_counted() -> None:
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "round": {"loop": "round", "micro_batch": 2},
        "hook": {"weigh": "hook"},
    }
    found = run_cases(3, positives, {name: {"how": "sum", **options} for name, options in ways.items()})
    for name, each in found.items():
        for far, said in each:
            assert (far < 1e-12, said) == (True, 0), name
    (wrong,) = run_cases(3, positives, {"mean": {"how": "mean", **ways["round"]}}).values()
    assert [said for _, said in wrong] == [1, 1, 1]
    assert min(far for far, _ in wrong) > 1e-3
