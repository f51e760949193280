"""Texts of very unlike lengths, divided by what they cost, with a loss that is a mean over their letters.

    torchrun --standalone --nproc-per-node 3 examples/text_lengths.py

A small network learns to go on with the documentation of Python's standard library, letter by letter: texts of 16
to 512 letters, filled up to the longest of each micro-batch. Paceline is told the lengths. It measures what they cost
and how quick each rank is, deals each round's texts so that all ranks end together, and cuts each rank's part into
as many micro-batches as pay. Every rank ends with the model of one process that takes the whole batch.
"""

import argparse
import builtins
import collections
import inspect
import itertools
import json
import os
import statistics
import string

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import paceline.torch
from paceline.torch.callbacks import OnRound

MODULES = (builtins, collections, inspect, itertools, json, os, statistics, string)
LETTERS, LONGEST, NOTHING = 128, 512, -100


def texts() -> list[torch.Tensor]:
    """What these modules say of themselves and of all that they hold, as numbers of letters."""
    found = {inspect.getdoc(thing) for module in MODULES for thing in (module, *vars(module).values())}
    kept = sorted(text[:LONGEST] for text in found if text and len(text) >= 16)
    return [torch.tensor([min(ord(letter), LETTERS - 1) for letter in text]) for text in kept]


def filled(chosen: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: texts, and the letter that comes next at each place; NOTHING where none does."""
    following = [text[1:] for text in chosen]
    return (
        pad_sequence([text[:-1] for text in chosen], batch_first=True),
        pad_sequence(following, batch_first=True, padding_value=NOTHING),
    )


class Letters(nn.Module):
    """What letter comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.layer = nn.Embedding(LETTERS, 32), nn.GRU(32, 64, batch_first=True)
        self.said = nn.Linear(64, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.said(self.layer(self.known(text))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    paceline.torch.join()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Letters())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    dataset = texts()
    rounds: list[paceline.torch.RoundResult] = []

    pace = paceline.torch.Pace(ddp, global_batch=64, loop="round", callbacks=[OnRound(rounds.append)])
    loader = pace.loader(
        dataset, cost=lambda index: len(dataset[index]), collate_fn=filled, micro_batch_cost=16384
    )

    def loss_of(text: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = nn.functional.cross_entropy(ddp(text).flatten(0, 1), following.flatten(), ignore_index=NOTHING)
        return loss, following.ne(NOTHING).sum()  # the mean over so many letters

    for epoch in range(epochs):
        for batch in loader:
            pace.round(batch, loss_of)
            pace.step(optimizer)
        if dist.get_rank() == 0:
            last = rounds[-2]  # the newest may be a short one
            parts = [round(float(cost), 1) for cost in last.costs]
            print(
                f"epoch {epoch}: loss {last.loss:.3f}, texts {last.loads.tolist()}, cost {parts}", flush=True
            )
    pace.close()


if __name__ == "__main__":
    main()
