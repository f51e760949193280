"""How many samples a batch has: known, whatever it looks like, or not known and told so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from doctor.test_findings import diagnosis, forward
from paceline.doctor.findings import to_json
from paceline.doctor.hooks import Hooks, counted, drawn_by_step
from paceline.torch import leave
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


class Graphs(torch.utils.data.Dataset[torch.Tensor]):
    """Each of as many nodes as its number, and at least one."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index + 1, 4)


def joined(graphs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As PyTorch Geometric does it: nodes, and to which graph each belongs."""
    return torch.cat(graphs), torch.arange(len(graphs)).repeat_interleave(torch.tensor([*map(len, graphs)]))


def packed(texts: list[torch.Tensor]) -> torch.Tensor:
    """As one row."""
    return torch.cat(texts)[None]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(20, 4))


class Known:
    """A batch object that knows its number of samples."""

    num_graphs = 6

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def ahead(loader: Any) -> Iterator[Any]:
    """The next batch is fetched before the training gets the newest one, as Accelerate's loaders do."""
    batches = iter(loader)
    newest = next(batches)
    for following in batches:
        yield newest
        newest = following
    yield newest


class Pools(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: Any, *_: torch.Tensor) -> torch.Tensor:
        return self.layer(getattr(x, "x", x)).square().mean()


kept: list[torch.nn.Module] = []  # a module's last work may abort a process that lets go of it


def counts(rank: int, ranks: int) -> dict[str, tuple[list[int], bool]]:
    """Samples of four steps that the loader drew, 0 without one, and whether the batches know their number."""
    plain, graphs = torch.utils.data.TensorDataset(torch.ones(32, 4)), Graphs()
    load = torch.utils.data.DataLoader
    nodes = joined([torch.ones(20, 4)])
    kinds: dict[str, Any] = {
        "graphs": load(graphs, 6, collate_fn=joined),
        "graphs, loaded by processes": load(graphs, 6, collate_fn=joined, num_workers=2),
        "packed": load(graphs, 3, collate_fn=packed),
        "cut up": load(plain, 8),
        "real and fake": load(plain, 8),
        "evaluated": load(plain, 4),
        "uneven batches": load(plain, batch_sampler=[[0, 1], [2, 3, 4, 5], [6], [7, 8, 9, 10, 11]]),
        "stream": load(Stream(), 5),
        "fetched ahead": ahead(load(plain, batch_sampler=[[0, 1], [2, 3, 4, 5], [6], [7, 8, 9]])),
        "own graphs": [(nodes[0], torch.ones(2, 50, dtype=torch.int64))] * 4,
        "graphs that know their number": [Known(nodes[0])] * 4,
    }
    other = load(torch.utils.data.TensorDataset(torch.ones(9, 4)), 9)
    found = {}
    for kind, batches in kinds.items():
        ddp = DistributedDataParallel(Pools())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        hooks = Hooks(ddp, lambda: None)
        for _, batch in zip(range(4), batches, strict=False):
            given = batch if isinstance(batch, list | tuple) else [batch]
            parts: Any = (
                given[0].split(2) if kind == "cut up" else [given[0]] * (2 if kind == "real and fake" else 1)
            )
            for part in parts[:-1]:
                with ddp.no_sync():
                    ddp(part).backward()
            ddp(parts[-1], *given[1:]).backward()
            optimizer.step()
            if kind == "evaluated":
                for x in other:
                    with torch.no_grad():
                        ddp.module(*x)
        found[kind] = drawn_by_step(hooks.batches), hooks.counted
        hooks.remove()
        kept.append(ddp)
    leave(ddp)
    return found


@COUNTS
@pytest.mark.processes
def test_what_a_loader_draws_is_the_number_of_samples() -> None:
    """Graphs, pairs, texts that are packed into one row, batches of different sizes, an evaluation in between."""
    for found in run_ranks(2, counts):
        assert found == {
            "graphs": ([6] * 4, False),
            "graphs, loaded by processes": ([6] * 4, False),
            "packed": ([3] * 4, False),
            "cut up": ([8] * 4, False),
            "real and fake": ([8] * 4, False),
            "evaluated": ([4] * 4, False),
            "uneven batches": ([2, 4, 1, 5], False),
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
