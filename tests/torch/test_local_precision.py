"""What a merge of real ranks makes of precisions, counters, rounding and skipped steps."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import LocalSGD, Merge
from paceline.torch.local import Merging
from support.guarantees import guarantee
from support.ranks import gathered, run_ranks
from support.scripted import Script
from support.small_net import Samples, fresh

pytestmark = pytest.mark.processes


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


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
def test_parameters_of_several_precisions_and_counters_are_merged() -> None:
    first, second = run_ranks(2, kinds)
    assert first == second
    *each, unused, seen = first
    # 8 of 24 samples in 2 steps, 16 in 4
    expected = 1 - (8 * 2 + 16 * 4) / 24 / 8
    for values, precision in zip(each, (1e-15, 1e-7, 2**-8, 2**-11), strict=True):
        assert values == pytest.approx([expected] * 3, abs=precision)
    assert unused == [1.0, 1.0]
    assert seen == [4.0]


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
        reducer.summing(send)(flats)
        weight = float(flats[1][:, 1].sum())
        merged += flats[0] / weight
        whole = own * (1.0 + rank) / weight
        dist.all_reduce(whole)
        exact += whole
        idle = [torch.zeros_like(own), torch.zeros_like(table)]
        reducer.summing(send)(idle)  # an interval whose samples all count for nothing
        assert not idle[0].any()
        kept, reducer._left = reducer._left, {}
        forgetful = [own * (1.0 + rank), table.clone()]
        reducer.summing(send)(forgetful)
        alone += forgetful[0] / weight
        reducer._left = kept
        assert (before != {}) == (number > 0)
        apart.append(float((merged - exact).abs().max()))
    late = reducer.summing(send)
    reducer.forget()
    late([own.clone(), table])  # a merge that was on its way when other parameters were loaded
    assert not reducer._left
    assert gathered(merged.tolist()) == [merged.tolist()] * ranks
    return [apart[0], max(apart), float((alone - exact).abs().max())]


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
@pytest.mark.parametrize(("send", "step"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_rounding_error_is_sent_with_the_next_merge(send: str, step: float) -> None:
    """So that the sum of 60 merges is as near as that of one; without it the error grows with their number."""
    (first, most, alone), *_ = run_ranks(3, sent, send)
    assert 0 < first < 2 * step
    assert most < 2 * step
    assert alone > 3 * most


def reloaded(rank: int, ranks: int, delay: int) -> list[list[float]]:
    """What a run that sends int8 comes to; the same behind another one that was left, and its beginning loaded."""
    found = []
    for left in (False, True):
        model = fresh(torch.float64)
        first = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        merge = Merge(send="int8", delay=delay)
        with LocalSGD(model, 12, "equal", every=2, merge=merge) as pace:
            state, loader = pace.state_dict(), pace.loader(Samples(83), seed=5)
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


@guarantee(
    "Parameters are merged in their own precision or a wider one; bf16 and int8 merges send later what "
    "rounding left out."
)
@pytest.mark.parametrize("delay", [0, 1])
def test_loaded_state_has_no_rounding_error(delay: int) -> None:
    for whole, again in run_ranks(2, reloaded, delay):
        assert again == whole


def skipped(rank: int, ranks: int, by: str) -> float:
    """The weight after an interval in which the scaler of rank 1 skips its only step."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    data = torch.utils.data.TensorDataset(torch.ones(3, 1, dtype=torch.float64))
    with (
        warnings.catch_warnings(),
        LocalSGD(model, 3, "equal", every=1, merge=Merge(by=by)) as pace,
    ):
        warnings.filterwarnings("ignore", "the loss of rank 1 was not finite")
        for (x,) in pace.loader(data, seed=0):
            pace.backward(model(x).mean() * (float("inf") if rank == 1 else 1.0), scaler=scaler)
            pace.step(optimizer, scaler)
    return float(model.weight.detach())


@guarantee("A rank whose only step a GradScaler skipped has no weight in the merge.")
@pytest.mark.parametrize("by", ["ranks", "steps", "samples"])
def test_rank_whose_step_a_scaler_skipped_has_no_weight(by: str) -> None:
    """The gradient is 1, so a step takes 0.5 away."""
    assert run_ranks(3, skipped, by) == [0.5] * 3
