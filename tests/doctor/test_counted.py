"""How many samples a batch has: known, whatever it looks like, or not known and told so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doctor.test_findings import diagnosis, forward
from paceline.doctor.findings import to_json
from paceline.doctor.hooks import counted
from support import watched
from support.guarantees import guarantee
from support.ranks import run_ranks

COUNTS = guarantee(
    "The doctor counts the samples that the DataLoader draws; without a DataLoader it says that it cannot"
    " count."
)


def images(*sizes: int) -> list[torch.Tensor]:
    """As torchvision's detectors are given them."""
    return [torch.zeros(3, size, size) for size in sizes]


@COUNTS
@pytest.mark.parametrize(
    ("given", "samples"),
    [
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(5), torch.zeros(3), torch.zeros(1)]), 3),
        (SimpleNamespace(num_graphs=6, x=torch.zeros(40, 4)), 6),
        (SimpleNamespace(batch_size=torch.Size([7, 2])), 7),
        (torch.zeros(8, 4), None),  # of time steps, perhaps
        ({"input_ids": torch.zeros(8, 12), "attention_mask": torch.zeros(8, 12)}, None),
        ((torch.zeros(40, 4), torch.zeros(2, 90)), None),  # nodes and edges
        (images(30, 40), None),  # they all begin with their three channels
        ((images(30, 40), [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]), None),
        (lambda: None, None),
    ],
)  # fmt: skip
def test_only_batch_objects_know_their_number_of_samples(given: Any, samples: int | None) -> None:
    found, certain, *_ = counted(((given,), {}))
    assert certain is (samples is not None)
    assert samples is None or found == samples


def test_a_jagged_tensor_has_a_sample_for_each_part() -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(5), torch.zeros(3)], layout=torch.jagged)
    found, certain, *_ = counted(((jagged,), {}))
    assert (found, certain) == (2, True)


@COUNTS
@pytest.mark.processes
def test_what_a_loader_draws_is_the_number_of_samples() -> None:
    """Graphs, pairs, texts that are packed into one row, batches of unlike sizes, an evaluation in between."""
    for found in run_ranks(2, watched.counts):
        assert found == {
            "graphs": ([6] * 4, False),
            "graphs, loaded by processes": ([6] * 4, False),
            "packed": ([3] * 4, False),
            "cut up": ([8] * 4, False),
            "real and fake": ([8] * 4, False),
            "evaluated": ([4] * 4, False),
            "unlike batches": ([2, 4, 1, 5], False),
            "stream": ([5] * 4, False),
            "fetched ahead": ([2, 4, 1, 3], False),
            "own graphs": ([0] * 4, False),
            "graphs that know their number": ([0] * 4, True),
        }


@COUNTS
def test_run_without_counts_is_reported(tmp_path: Path) -> None:
    found = diagnosis(tmp_path / "unsure", forward(0.01, 0.04), sure=False)
    assert "+ pace = paceline.torch.Pace(ddp, global_batch=2 * batch_size)" in found.lines
    assert sum("The number of samples in a batch is unknown" in each for each in found.sentences) == 1
    assert not to_json(found)["loop"].sure
    known = diagnosis(tmp_path / "sure", forward(0.01, 0.04))
    assert "is unknown" not in " ".join(known.sentences)
    assert to_json(known)["loop"].batch == 32
