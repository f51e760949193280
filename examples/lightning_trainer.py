"""Lightning's Trainer with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/lightning_trainer.py [--policy equal]

The ranks sleep for each sample, rank 2 four times as long, as a slower machine would take longer.
"""

import argparse
import os
import time

import lightning as L
import torch
from torch import nn

from paceline.data.datasets import load
from paceline.hosts.lightning import BalancedCallback  # 1
from paceline.torch.callbacks import OnRound


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        time.sleep((0.002 if self.global_rank == 2 else 0.0005) * len(x))
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    rounds: list = []  # what happened, for the last line
    balanced = BalancedCallback(
        global_batch=256, policy=options.policy, callbacks=[OnRound(rounds.append)]
    )  # 2
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp", max_epochs=options.epochs,
        callbacks=[balanced],  # 3
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    L.seed_everything(0, verbose=False)
    trainer.fit(Digits(), balanced.loader(dataset, seed=0))  # 4: instead of a DataLoader
    if trainer.is_global_zero:
        rate = sum(r.batch for r in rounds[1:]) / sum(r.seconds for r in rounds[1:])
        last = [r for r in rounds if r.batch == 256][-1]
        print(f"loss {last.loss:.3f}, loads {last.loads.tolist()}, {rate:.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
