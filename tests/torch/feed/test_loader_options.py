"""Every option of torch's DataLoader: it leaves the model exact, or it is refused in a sentence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.loader_jobs import differences
from support.ranks import run_ranks
from support.torch_jobs import Samples, fresh

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


def test_the_table_has_every_option_of_the_installed_version() -> None:
    """An option that is new in PyTorch is refused until it is in the table, and this says so."""
    options = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert options == {*ASKED, *OWN, *HANDED_ON}


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["whole", pytest.param("pieces", marks=pytest.mark.nightly)])
def test_what_is_handed_on_leaves_the_model_of_one_process(loop: str) -> None:
    cases = [{"loop": loop, **options} for each in HANDED_ON.values() for options in each]
    for found in run_ranks(2, differences, cases, starts=True):
        for case, difference in zip(cases, found, strict=True):
            assert difference < 1e-12, case


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
def test_what_is_refused_is_refused_in_a_sentence(option: str, value: object, words: str) -> None:
    with Pace(fresh(torch.float64), 16) as pace, pytest.raises(PacelineError, match=words):
        pace.loader(Samples(83), **{option: value})


def test_a_stream_takes_the_same_options_but_for_an_order() -> None:
    with Pace(fresh(torch.float64), 16) as pace:
        for options, words in (
            ({"shuffle": True}, "shuffle it at its source"),
            ({"sharding": True}, "does not know whether sharding= leaves"),
            ({"batch_size": 4}, "write Pace"),
        ):
            with pytest.raises(PacelineError, match=words):
                pace.stream([1, 2, 3], **options)
