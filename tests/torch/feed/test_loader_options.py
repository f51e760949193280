"""Every option of torch's DataLoader: it leaves the model exact, or it is refused in a sentence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.ranks import run_cases
from support.small_net import TWO, Samples, difference, fresh, optimizer_of, reference

GUARANTEES = (
    "Each option of `DataLoader` (PyTorch 2.6 to 2.15) is passed on with the model of one process, or "
    "raises.",
)

# Of the lowest version of PyTorch that is allowed, 2.6, and of all later ones up to 2.15.
ASKED = ("batch_size", "sampler", "batch_sampler")  # refused, with what to write instead
OWN = ("dataset", "shuffle", "drop_last")  # of ``pace.loader`` itself
HANDED_ON: dict[str, list[dict[str, Any]]] = {
    "num_workers": [{"num_workers": 1}, {"num_workers": 3}],
    "collate_fn": [{"collate_fn": "own"}, {"collate_fn": "own", "num_workers": 2}],
    "pin_memory": [{"pin_memory": True}],
    "pin_memory_device": [{"pin_memory": True, "pin_memory_device": ""}],
    "timeout": [{"timeout": 60, "num_workers": 2}],
    "worker_init_fn": [{"worker_init_fn": "own", "num_workers": 2}],
    "multiprocessing_context": [
        {"multiprocessing_context": "fork", "num_workers": 2},
        {"multiprocessing_context": "forkserver", "num_workers": 1},
    ],
    "generator": [{"generator": "own"}, {"generator": "own", "num_workers": 2}],
    "prefetch_factor": [{"prefetch_factor": 1, "num_workers": 2}, {"prefetch_factor": 5, "num_workers": 2}],
    "persistent_workers": [{"persistent_workers": True, "num_workers": 2}],
    "in_order": [{"in_order": True, "num_workers": 2}],
}


def test_option_table_has_every_option_of_the_installed_version() -> None:
    """An option that is new in PyTorch is refused until it is in the table, and this says so."""
    options = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert options == {*ASKED, *OWN, *HANDED_ON}


COUNT, STEPS = 35, 7  # more than two epochs


def own_collate(samples: list[Any]) -> Any:
    """As the default, in a function that nobody knows."""
    return default_collate(samples)


def own_start(worker: int) -> None:
    """Of a loader's process."""
    torch.manual_seed(worker)


def trained(rank: int, ranks: int, loop: str, **options: Any) -> float:
    """With these options of a loader: the largest difference of a parameter from one process."""
    own = {"collate_fn": own_collate, "worker_init_fn": own_start, "generator": torch.Generator()}
    options = {name: own[name] if value == "own" else value for name, value in options.items()}
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    limit = {} if loop == "whole" else {"micro_batch": 5}
    pace = Pace(ddp, 16, TWO, loop=loop, limits=[(0, None)] * 2, **limit)
    loader = pace.loader(Samples(COUNT), seed=5, **options)
    while pace.rounds < STEPS:
        for x, y, _ in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer) and pace.rounds == STEPS:
                break
    pace.host.detach()
    return difference(model.parameters(), reference(COUNT, 16, STEPS, torch.float64))


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["whole", pytest.param("pieces", marks=pytest.mark.nightly)])
def test_handed_on_options_train_the_model_of_one_process(loop: str) -> None:
    cases = {str(options): {"loop": loop, **options} for each in HANDED_ON.values() for options in each}
    for name, ranks in run_cases(2, trained, cases, starts=True).items():
        assert max(ranks) < 1e-12, name


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("batch_size", 8, "for 8 samples a rank on average write"),
        ("batch_size", None, "global_batch=16 says how many samples"),
        ("sampler", [1], "shuffle= and seed= choose the order"),
        ("batch_sampler", [[1]], "shuffle= and seed= choose the order"),
        ("in_order", False, "another order than the planned one"),
        ("sharding", True, "this version of Paceline does not know whether sharding= leaves"),
        ("numworkers", 2, "this version of Paceline does not know whether numworkers= leaves"),
        ("num_workers", 1.5, "num_workers=1.5: expected a whole number, 0 to"),
        ("num_workers", None, "num_workers=None: expected a whole number, 0 to"),
        ("prefetch_factor", "2", "prefetch_factor='2': expected a whole number, 1 to"),
        ("timeout", float("nan"), "timeout=nan: expected seconds, 0 or more"),
        ("collate_fn", "pad", "collate_fn='pad': expected a function that takes a list of samples"),
        ("pin_memory", "no", "pin_memory='no': expected True or False"),
    ],
)
def test_unsupported_loader_option_raises(option: str, value: object, words: str) -> None:
    with Pace(fresh(torch.float64), 16) as pace, pytest.raises(PacelineError, match=words):
        pace.loader(Samples(83), **{option: value})


def test_stream_refuses_an_order_and_unknown_options() -> None:
    with Pace(fresh(torch.float64), 16) as pace:
        for options, words in (
            ({"shuffle": True}, "shuffle it at its source"),
            ({"sharding": True}, "does not know whether sharding= leaves"),
            ({"batch_size": 4}, "write Pace"),
        ):
            with pytest.raises(PacelineError, match=words):
                pace.stream([1, 2, 3], **options)
