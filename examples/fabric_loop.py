"""A Lightning Fabric loop with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/fabric_loop.py [--policy equal]

The ranks sleep for each sample, rank 2 four times as long, as a slower machine would take longer.
"""

import argparse
import os
import time

import torch
from lightning.fabric import Fabric
from torch import nn

from paceline.data.datasets import load
from paceline.hosts.fabric import FabricPace  # 1
from paceline.torch.callbacks import OnRound


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    rounds: list = []  # what happened, for the last line
    pace = FabricPace(
        fabric, model, global_batch=256, policy=options.policy, callbacks=[OnRound(rounds.append)]
    )  # 2
    loader = pace.loader(dataset, seed=0)  # 3: instead of DataLoader and setup_dataloaders
    for _ in range(options.epochs):
        for x, y in loader:
            time.sleep((0.002 if fabric.global_rank == 2 else 0.0005) * len(x))
            pace.backward(nn.functional.cross_entropy(model(x), y))  # 4: instead of fabric.backward
            pace.step(optimizer)  # 5: steps and zeroes
    if fabric.is_global_zero:
        rate = sum(r.batch for r in rounds[1:]) / sum(r.seconds for r in rounds[1:])
        last = [r for r in rounds if r.batch == 256][-1]
        print(f"loss {last.loss:.3f}, loads {last.loads.tolist()}, {rate:.0f} samples/s", flush=True)
    pace.close()  # a clean end under gloo


if __name__ == "__main__":
    main()
