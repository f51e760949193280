"""The program of a torch model, without Ray: dtypes, layers with a state of their own, and batches of one sample."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.ray import torch_program
from paceline.ray.shards import Shard
from paceline.ray.worker import last_line

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
Y = torch.arange(24) % 3


@pytest.fixture(autouse=True)
def threads():
    """A program sets the threads of its worker, which is this process here."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def net(*layers):
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, 3))


class Counted(nn.Module):
    """Keeps a mean over the batches that it has seen, and a cache that grows."""

    def __init__(self, learns=True):
        super().__init__()
        self.learns, self.net = learns, net()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.full((2,), float("nan")))
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x):
        self.cache = torch.ones(len(x))
        if self.learns:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.net(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_model_trains_in_its_own_dtype_as_in_one_process(dtype):
    start, gradient = torch_program(lambda: net().to(dtype), X.to(dtype), Y)(0)
    torch.manual_seed(0)
    alone = net().to(dtype)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    shard = Shard(momentum=0.9, statistics=True)
    values = shard.set(start)
    for _ in range(3):
        found = [gradient(values, part)[0] for part in (np.arange(16), np.arange(16, 24))]
        assert {each.dtype for each in found} == {values.dtype} == {torch.empty(0, dtype=dtype).numpy().dtype}
        values, _ = shard.update([], [(16, 1.0), (8, 1.0)], None, 0.1, *found)
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(X.to(dtype)), Y).backward()
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in alone.parameters()]).numpy()
    assert np.abs(values - expected).max() < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda: net().bfloat16(),
            r"^the model has parameters in bfloat16; expected all in float32 or all in float64: return model.float\(",
        ),
        (
            lambda: net(nn.Linear(6, 6).double()),
            "^the model has parameters in float32 and float64; expected all in",
        ),
        (
            lambda: net(nn.BatchNorm1d(6)),
            "^the model's layer '1' is BatchNorm1d, whose running statistics stay in each worker; use GroupNorm or ",
        ),
        (
            lambda: net(nn.InstanceNorm1d(6, track_running_stats=True)),
            "^the model's layer '1' is InstanceNorm1d",
        ),
        (
            lambda: net(nn.LazyLinear(6)),
            "^the model's layer '1' is LazyLinear, which learns its sizes from its first batch; call the model once ",
        ),
        (lambda: nn.BatchNorm1d(6), "^the model is BatchNorm1d, whose running statistics"),
        (
            net(),
            "^model is a Sequential: expected a function that makes one, as each worker has its own; write lam",
        ),
        (list, r"^the function model returned \[\]: expected a torch.nn.Module$"),
    ],
    ids=["half", "mixed", "batch-norm", "instance-norm", "lazy", "only-a-norm", "instance", "no-module"],
)
def test_model_that_cannot_be_trained_raises_before_workers_start(model, said):
    with pytest.raises(PacelineError, match=said):
        torch_program(model, X, Y)


def test_model_that_only_the_workers_can_make_raises_there():
    made = []

    def model():
        made.append(1)
        if len(made) == 1:
            raise FileNotFoundError("weights.pt")
        return net().half()

    program = torch_program(model, X, Y)
    with pytest.raises(PacelineError, match=r"^the model has parameters in float16;"):
        program(0)


@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm1d(6).eval(), lambda: nn.GroupNorm(2, 6)], ids=["frozen", "group"]
)
def test_norms_without_changing_statistics_are_accepted(norm):
    start, gradient = torch_program(lambda: net(norm()), X.float(), Y)(0)
    assert np.isfinite(gradient(start, np.arange(1))[0]).all()


def test_batch_norm_with_a_single_sample_raises_with_what_to_use():
    layer = nn.BatchNorm1d(6, track_running_stats=False)
    start, gradient = torch_program(lambda: net(layer), X.float(), Y)(0)
    assert np.isfinite(gradient(start, np.arange(2))[0]).all()
    with pytest.raises(
        PacelineError, match=r"^a worker got 1 sample, and the model's batch norm needs 2; use Group"
    ):
        gradient(start, np.arange(1))


def test_buffer_that_training_changes_raises_at_once():
    start, gradient = torch_program(Counted, X.float(), Y)(0)
    with pytest.raises(
        PacelineError, match=r"^the model changes its buffer 'mean' in training, and buffers stay in"
    ):
        gradient(start, np.arange(4))


def test_constant_buffers_and_caches_are_accepted():
    start, gradient = torch_program(lambda: Counted(learns=False), X.float(), Y)(0)
    for count in (4, 8):
        assert np.isfinite(gradient(start, np.arange(count))[0]).all()


def test_checks_leave_the_random_numbers_of_the_program_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    torch_program(net, X.float(), Y)
    assert torch.equal(torch.rand(1), expected)


def test_error_of_a_worker_is_quoted_without_the_name_of_its_class():
    said = (
        "ray::GradientWorker.compute() (pid=1)\n  File x\npaceline.errors.PacelineError: the model changes it"
    )
    assert last_line(RuntimeError(said)) == "the model changes it"
    assert last_line(RuntimeError("Traceback\nValueError: none")) == "ValueError: none"
