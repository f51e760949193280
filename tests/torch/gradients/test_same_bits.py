"""What ``deterministic=True`` asks for beside sums without rounding: kernels that compute alike everywhere."""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.batches import aligned
from paceline.torch.gradients import same_bits
from paceline.torch.gradients.same_bits import ExactSum
from support.guarantees import guarantee
from support.ranks import errors_of
from support.small_net import fresh

COMMAND = Path(__file__).parents[3] / "benchmarks" / "determinism.py"


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


def anywhere(values: torch.Tensor, start: int = 3) -> torch.Tensor:
    """The same values in memory that begins 4 or 8 bytes times ``start`` after a multiple of 64."""
    memory = torch.empty(start + values.numel(), dtype=values.dtype)
    memory[start:] = values.reshape(-1)
    return memory[start:].view(values.shape)


def test_unaligned_tensors_alone_are_copied() -> None:
    well, odd = torch.randn(4, 5), anywhere(torch.randn(4, 5))
    assert odd.data_ptr() % 64
    found = aligned({"pair": Pair(odd, "name"), "list": [well, (odd.T, 7)]})
    assert found["list"][0] is well
    assert found["pair"].y == "name"
    assert found["list"][1][1] == 7
    for copy, of in ((found["pair"].x, odd), (found["list"][1][0], odd.T)):
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, of)


def test_exact_sum_of_many_pieces_does_not_overflow() -> None:
    pieces = [sign * each for each in (0.49999 / 2**20, 3.7, 1e5) for sign in (1, -1, 1 / 3, -1 / 3)]
    parameter = nn.Parameter(torch.zeros(len(pieces), dtype=torch.float64))
    total = ExactSum([parameter])
    for _ in range(8192):
        parameter.grad = torch.tensor(pieces, dtype=torch.float64)
        total.add()
    total.finish()
    assert parameter.grad is not None
    exact = [float(round(Fraction(value) * 2**72) * Fraction(8192, 2**72)) for value in pieces]
    np.testing.assert_allclose(parameter.grad.numpy(), exact, rtol=1e-15)


@guarantee("Under `deterministic=True`, sums over any pieces are exact, whichever ranks claim the work.")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pieces=st.integers(1, 300), ranks=st.integers(1, 5))
def test_exact_sum_does_not_depend_on_the_division(seed: int, pieces: int, ranks: int) -> None:
    """Against fractions: each piece counts as the nearest multiple of 2^-72, and nothing is rounded after that."""
    rng, parameter = np.random.default_rng(seed), nn.Parameter(torch.zeros(20, dtype=torch.float64))
    each = rng.normal(size=(pieces, 20)) * 2.0 ** rng.integers(-75, 20, (pieces, 20))
    parts = [ExactSum([parameter]) for _ in range(ranks)]
    for values in each:
        parameter.grad = torch.from_numpy(values)
        parts[rng.integers(ranks)].add()
    parts[0].give(torch.stack([part.gathered() for part in parts]).sum(0))
    assert parameter.grad is not None
    for found, values in zip(parameter.grad.tolist(), each.T.tolist(), strict=True):
        exact = Fraction(sum(round(Fraction(value) * 2**72) for value in values), 2**72)
        assert abs(Fraction(found) - exact) <= abs(exact) / 2**51


@guarantee("Under `deterministic=True`, sums over any pieces are exact, whichever ranks claim the work.")
def test_round_of_8200_chunks_has_the_exact_gradient() -> None:
    """The derivative of a mean of products is the mean of what is multiplied."""
    samples = torch.randn(16_400, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples[:, 0] = 0.49999 / 2**20 * 8200  # what is left of each chunk beside whole units adds up
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters())
    with Pace(model, 16_400, "factoring", loop="pieces", deterministic=True, quantum=2) as pace:
        micro_steps = 0
        for x in pace.loader(samples, shuffle=False):
            micro_steps += 1
            pace.backward(model(x).mean())
            if pace.complete:
                assert model.weight.grad is not None
                found = model.weight.grad[0].tolist()
            pace.step(optimizer)
        assert micro_steps == 8200
    for column, value in enumerate(found):
        exact = sum(map(Fraction, samples[:, column].tolist())) / 16_400
        assert abs(Fraction(value) - exact) < Fraction(1, 10**15)


def test_exact_sum_knows_which_parameters_were_used_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parameters: this rank uses the first, the other one the first and the last."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 1, 3)]
    total = ExactSum(parameters)
    assert total.used() == [False] * 3
    parameters[0].grad = torch.tensor([1.5, -2.0])
    total.add()
    assert parameters[0].grad is None
    assert total.used() == [True, False, False]
    other = ExactSum(parameters)
    parameters[0].grad, parameters[2].grad = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0])
    other.add()
    theirs = other.gathered().clone()
    monkeypatch.setattr(same_bits.peers, "ranks", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.add_(theirs))
    total.finish()
    found = [None if p.grad is None else p.grad.tolist() for p in parameters]
    assert found == [[2.5, -1.0], None, [1.0, 2.0, 3.0]]
    assert total.used() == [False] * 3  # the next round begins
    assert ExactSum([]).used() == []


def test_processor_is_named_as_linux_does_and_unknown_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(same_bits, "CPU_INFO", info)
    assert same_bits._processor() == ""
    info.write_text("processor : 0\nmodel name\t: Quick: 9000\nmodel name\t: Other\n")
    assert same_bits._processor() == "Quick: 9000"
    info.write_text("processor : 0\n")
    assert same_bits._processor() == ""


def test_too_large_exact_sum_is_nan() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    total = ExactSum([parameter])
    for _ in range(5000):
        parameter.grad = torch.tensor([2.0**30])
        total.add()
    total.finish()
    assert parameter.grad is not None
    assert parameter.grad.isnan().all()


@guarantee("Under `deterministic=True`, sums over any pieces are exact, whichever ranks claim the work.")
@pytest.mark.parametrize("options", [{"deterministic": True}, {}])
def test_numpy_batches_are_aligned_if_deterministic(options: dict[str, Any]) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return anywhere(torch.from_numpy(np.stack([sample.numpy() for sample in samples])))

    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begins = set()
    with Pace(model, 16, "factoring", loop="pieces", **options) as pace:
        for x in pace.loader(torch.randn(40, 6), collate_fn=collate):
            begins.add(x.data_ptr() % 64)
            pace.backward(model(x).square().mean())
            pace.step(optimizer)
    assert begins == ({0} if options else {12})


@guarantee(
    "Under `deterministic=True`, dropout, unaligned parameters and ranks that compute differently are "
    "refused with their names."
)
def test_unaligned_parameter_raises() -> None:
    model = nn.Linear(6, 2)
    model.weight.data = anywhere(model.weight.data)
    with pytest.raises(PacelineError, match=r"weight of the model does not begin at a multiple of 64 bytes"):
        Pace(model, 16, "factoring", loop="pieces", deterministic=True)
    model.weight.data = model.weight.data.clone()
    Pace(model, 16, "factoring", loop="pieces", deterministic=True).close()


@guarantee(
    "Under `deterministic=True`, dropout, unaligned parameters and ranks that compute differently are "
    "refused with their names."
)
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Dropout(0.1), "1"),
        (nn.LSTM(3, 3, num_layers=2, dropout=0.1), "1"),
        (nn.TransformerEncoderLayer(6, 2, 8), r"1\.self_attn"),
    ],
)
def test_dropout_under_deterministic_raises(layer: nn.Module, name: str) -> None:
    with pytest.raises(PacelineError, match=f"{name} of the model drops out at random"):
        Pace(nn.Sequential(nn.Linear(6, 6), layer), 16, "factoring", loop="pieces", deterministic=True)
    Pace(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)), 16, "factoring", loop="pieces", deterministic=True
    ).close()


def with_as_many_threads(rank: int, ranks: int, threads: list[int]) -> None:
    torch.set_num_threads(threads[rank])
    Pace(
        DistributedDataParallel(fresh(torch.float64)), 16, "factoring", loop="pieces", deterministic=True
    ).close()


@pytest.mark.processes
@guarantee(
    "Under `deterministic=True`, dropout, unaligned parameters and ranks that compute differently are "
    "refused with their names."
)
def test_ranks_with_different_threads_raise() -> None:
    sentences = errors_of(2, with_as_many_threads, [1, 2])
    assert sentences[0] == sentences[1]
    assert "deterministic=True: rank 1 was given torch.get_num_threads()=2 and rank 0" in sentences[0]
    assert errors_of(2, with_as_many_threads, [2, 2]) == ["", ""]


@pytest.mark.processes
@guarantee("Under `deterministic=True`, sums over any pieces are exact, whichever ranks claim the work.")
def test_determinism_command_finds_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(COMMAND.parent)
    case = ["--case", "arrays at any address"]
    monkeypatch.setattr("sys.argv", [str(COMMAND), "--here", "--repetitions", "4", *case])
    assert import_module("determinism").main() == 0
    assert capsys.readouterr().out.count("the same bits") == 2
