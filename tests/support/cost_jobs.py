"""What the ranks run whose samples cost differently: sentences of unlike lengths, filled up to a batch's longest."""

from __future__ import annotations

import io
import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support.token_jobs import IGNORED, WORDS, loss_of, means_of_sentences, model, sharded_over

COUNT, BATCH, SEED = 86, 32, 5


def lengths_of(count: int = COUNT) -> np.ndarray[Any, Any]:
    """Whole numbers, lognormal between 1 and 60."""
    drawn = np.random.default_rng(2).lognormal(2.0, 1.0, count)
    return np.clip(drawn, 1, 60).astype(int)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of unlike lengths; the first word of each has no label, so that some have none at all."""

    def __init__(self, count: int = COUNT) -> None:
        self.tokens = lengths_of(count).tolist()
        draw = torch.Generator().manual_seed(9)
        self.words = [torch.randint(WORDS, (length,), generator=draw) for length in self.tokens]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": self.words[index], "index": index}


def filled(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, labels and indices; filled up to the longest."""
    longest = max(len(sample["words"]) for sample in samples)
    words = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        words[row, : len(sample["words"])] = sample["words"]
        labels[row, 1 : len(sample["words"])] = sample["words"][1:].flip(0)
    return words, labels, torch.tensor([sample["index"] for sample in samples])


def one_process(epochs: int, by_sentence: bool = False) -> list[torch.Tensor]:
    """The parameters of one process that takes each whole batch itself."""
    net, data = model(), Texts()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(epochs):
        order = Order(COUNT, SEED).epoch(epoch)
        for first in range(0, COUNT, BATCH):
            words, labels, _ = filled([data[index] for index in order[first : first + BATCH]])
            optimizer.zero_grad()
            out = net(words)
            (
                means_of_sentences(out, labels).mean() if by_sentence else loss_of(out, labels, "mean")
            ).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def divided_by_cost(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case: how far from one process, the samples used in each epoch, and each round's loads and costs."""
    return [_case(rank, ranks, **case) for case in cases]


def _case(
    rank: int,
    ranks: int,
    loop: str = "whole",
    by_sentence: bool = False,
    sharded: bool = False,
    workers: int = 0,
    stop: int | None = None,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    parts = {"rank": rank, "ranks": ranks, "loop": loop, "by_sentence": by_sentence, "sharded": sharded}
    parts |= {"workers": workers, "loading": {"cost": "tokens"} if loading is None else loading}
    net, used, rounds = model(), [[], []], []
    if stop is None:
        _train(net, used, rounds, None, None, **parts, **options)
    else:  # left in the middle of the first epoch, and taken up by another Pace
        saved = _train(net, used, rounds, None, stop, **parts, **options)
        net = model()
        _train(net, used, rounds, saved, None, **parts, **options)
    found = [p.full_tensor().detach() if sharded else p.detach() for p in net.parameters()]  # type: ignore[operator]
    expected = one_process(2, by_sentence)
    far = max(float((p - q).abs().max() / q.abs().max()) for p, q in zip(found, expected, strict=True))
    loads = [round.loads.tolist() for round in rounds]
    costs = [None if round.costs is None else round.costs.tolist() for round in rounds]
    within = [None if round.within is None else round.within.pieces for round in rounds]
    parts = [None if round.parts is None else round.parts.tolist() for round in rounds]
    return {"far": far, "used": used, "loads": loads, "costs": costs, "pieces": within, "parts": parts}


def _train(
    net: nn.Sequential,
    used: list[list[int]],
    rounds: list[RoundResult],
    saved: bytes | None,
    until: int | None,
    *,
    rank: int,
    ranks: int,
    loop: str,
    by_sentence: bool,
    sharded: bool,
    workers: int,
    loading: dict[str, Any],
    **options: Any,
) -> bytes:
    state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    if state is not None:
        net.load_state_dict(state["model"])
    ddp: nn.Module = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    pace, stalls = (
        HostedPace(ddp, BATCH, loop=loop, callbacks=[OnRound(rounds.append)], **options),
        random.Random(rank),
    )
    loader = pace.loader(Texts(), seed=SEED, collate_fn=filled, **loading, num_workers=workers)
    if state is not None:
        pace.load_state_dict(state["pace"])

    def function(words: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, Any]:
        time.sleep(2e-4 * stalls.expovariate(1.0))
        if pace.counts:
            used[pace.epoch] += index.tolist()
        if by_sentence:
            return means_of_sentences(ddp(words), labels).mean(), None
        return loss_of(ddp(words), labels, "mean"), labels.ne(IGNORED).sum()

    while pace.epoch < 2 and pace.rounds != until:
        for batch in loader:
            if loop == "round":
                pace.round(batch, function)
            else:
                loss, count = function(*batch)
                pace.backward(loss, count=count)
            if pace.step(optimizer) and pace.rounds == until:
                break
    pace.host.flush()
    buffer = io.BytesIO()
    if until is not None:
        both = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "pace": pace.state_dict()}
        torch.save(both, buffer)
    pace.host.detach()
    return buffer.getvalue()


def refused(rank: int, ranks: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """The sentence that this rank gets for each case of options of Pace and of its loader."""
    sentences = []
    for options, loading in cases:
        own = {"of my own": np.arange(COUNT) + 1 + rank, "broken here": np.arange(COUNT) + min(rank, 1)}
        if isinstance(loading.get("cost"), str):
            loading = loading | {"cost": own.get(loading["cost"], loading["cost"])}
        pace = HostedPace(DistributedDataParallel(model()), BATCH, **options)
        try:
            pace.loader(Texts(), collate_fn=filled, **loading)
            sentences.append("nothing was wrong")
        except PacelineError as error:
            sentences.append(str(error))
        pace.host.detach()
    return sentences
