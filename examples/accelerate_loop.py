"""An Accelerate training loop with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/accelerate_loop.py [--policy equal]

The ranks sleep for each sample, rank 2 four times as long, as a slower machine would take longer.
"""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn

from paceline.data.datasets import load
from paceline.hosts.accelerate import AcceleratePace
from paceline.torch.callbacks import OnRound


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    model, optimizer = accelerator.prepare(model, optimizer)  # the loader is not prepared
    rounds: list = []  # what happened, for the last line
    pace = AcceleratePace(
        accelerator, model, 256, options.policy, callbacks=[OnRound(rounds.append)]
    )  # 1: the handle
    loader = pace.loader(dataset, seed=0)  # 2: instead of DataLoader and prepare
    for _ in range(options.epochs):
        for x, y in loader:
            time.sleep((0.002 if accelerator.process_index == 2 else 0.0005) * len(x))
            loss = criterion(model(x), y)
            pace.backward(loss)  # 3: instead of accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    rate = sum(r.batch for r in rounds[1:]) / sum(r.seconds for r in rounds[1:])
    last = [r for r in rounds if r.batch == 256][-1]
    accelerator.print(f"loss {last.loss:.3f}, loads {last.loads.tolist()}, {rate:.0f} samples/s", flush=True)
    pace.close()  # 4: a clean end


if __name__ == "__main__":
    main()
