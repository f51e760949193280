"""Metrics over the samples of all ranks: ``pace.mean`` and ``pace.gather``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import PacelineError
from paceline.torch import Pace, metrics
from support.guarantees import guarantee
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

LIMITS = [(24, 24), (8, 8), (0, 0)]
SAMPLES = 83  # the last round is short


def measured(rank: int, ranks: int, loop: str) -> tuple[list[float], list[tuple[float, float]]]:
    """The rows gathered in an epoch, and each round's mean before and after its step; rank 2 has no work."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = torch.utils.data.TensorDataset(torch.arange(float(SAMPLES))[:, None])
    rows: list[float] = []
    means = []
    with Pace(model, 32, "level", loop=loop, limits=LIMITS) as pace:
        for batch in pace.loader(data, shuffle=False):
            if loop == "whole":
                (x,) = batch
                pace.backward(model(x).square().mean())
            else:
                ran: list[torch.Tensor] = []

                def loss_of(x: torch.Tensor, ran: list[torch.Tensor] = ran) -> torch.Tensor:
                    ran.append(x[: len(x) if pace.counts else 0])
                    return model(x).square().mean()

                pace.round(batch, loss_of)
                x = torch.cat(ran)
            rows += pace.gather(x).flatten().tolist()
            before = float(pace.mean(x.mean()))
            pace.step(optimizer)
            means.append((before, float(pace.mean(float(x.mean())))))
    return rows, means


@guarantee(
    "`pace.mean`, `pace.gather` and `pace.loss_now()` count each sample of a round once, also with an idle "
    "rank."
)
@pytest.mark.parametrize("loop", ["whole", "round"])
def test_metrics_with_an_idle_rank_count_each_sample_once(loop: str) -> None:
    whole = np.arange(float(SAMPLES))
    expected = [part.mean() for part in np.split(whole, [32, 64])]
    for rows, means in run_ranks(3, measured, loop):
        assert sorted(rows) == whole.tolist()
        for found in zip(*means, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def gathered_in_a_loss(rank: int, ranks: int) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    with Pace(model, 32, "level", loop="pieces", micro_batch=4) as pace:
        for (x,) in pace.loader(torch.utils.data.TensorDataset(torch.ones(64, 1))):
            try:
                pace.mean(x.mean())
            except PacelineError as error:
                pace.host.abandon()
                return str(error)
    return ""


def gathered_by_the_program(rank: int, ranks: int, loop: str) -> list[str]:
    """What happens to a gather of one number, and of each sample's row, after the step."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    said: list[str] = []
    with Pace(
        model, 32, "level", loop=loop, limits=LIMITS, micro_batch=None if loop == "whole" else 4
    ) as pace:
        for batch in pace.loader(torch.utils.data.TensorDataset(torch.ones(96, 1))):
            if loop == "whole":
                (x,) = batch
                pace.backward(model(x).mean())
            else:
                pace.round(batch, lambda x: model(x).mean())
                x = torch.ones(LIMITS[rank][0], 1)
            pace.step(optimizer)
            try:
                for rows in (x.sum()[None], x):
                    parts = [torch.empty_like(rows) for _ in range(ranks)]
                    torch.distributed.all_gather(parts, rows)
                    said.append(str(sum(len(part) for part in parts)))
            except PacelineError as error:
                return [*said, str(error)]
    return said


@pytest.mark.parametrize("loop", ["whole", "round"])
def test_a_gather_of_uneven_tensors_raises_on_every_rank(loop: str) -> None:
    for one, error in run_ranks(3, gathered_by_the_program, loop):
        assert one == "3"
        assert error.startswith(f"round 0: {__file__}:")
        assert (
            "elements, and all ranks must give as many; loads differ under Paceline, so write pace.gather"
            in error
        )


def test_mean_in_a_loop_whose_ranks_take_other_numbers_of_steps_raises() -> None:
    for words in run_ranks(2, gathered_in_a_loss):
        assert words.startswith("pace.mean() with loop='pieces': ranks run different numbers of micro-steps")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pace: pace.mean(1.0), r"pace\.mean\(\) was called outside of a round"),
        (lambda pace: pace.gather(torch.ones(3)), r"pace\.gather\(\) was called outside of a round"),
        (lambda pace: metrics.mean("seven", 1), r"pace\.mean\('seven'\): expected a number or a tensor"),
        (lambda pace: metrics.gather(torch.tensor(1.0), 1), r"expected a tensor with a row for each sample"),
    ],
)
def test_wrong_metric_raises(call: Any, words: str) -> None:
    with Pace(nn.Linear(1, 1), 4) as pace, pytest.raises(PacelineError, match=words):
        call(pace)
