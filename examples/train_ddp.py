"""A DDP training script with Paceline's lines in it (marked).

    torchrun --standalone --nproc-per-node 3 examples/train_ddp.py

The ranks sleep for each sample, rank 2 four times as long, as a slower machine would take longer. Every rank ends
with the same model as one process that takes the whole batch, and the three of them take equally long.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline.data.datasets import load
from paceline.torch import RoundResult
from paceline.torch.callbacks import OnRound


def main() -> None:
    paceline.torch.join()  # init_process_group, in a form whose restarts work with gloo, too
    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train), torch.from_numpy(digits.y_train)
    )
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    rounds: list[RoundResult] = []
    pace = paceline.torch.Pace(ddp, global_batch=256, callbacks=[OnRound(rounds.append)])  # 1: the handle
    loader = pace.loader(dataset, seed=0)  # 2: instead of DistributedSampler and DataLoader
    for epoch in range(8):
        for x, y in loader:
            time.sleep((0.002 if dist.get_rank() == 2 else 0.0005) * len(x))
            loss = criterion(ddp(x), y)
            pace.backward(loss)  # 3: instead of loss.backward()
            pace.step(optimizer)
        if dist.get_rank() == 0:
            full = [each for each in rounds if each.batch == 256][-1]
            print(f"epoch {epoch}: loss {full.loss:.3f}, loads {full.loads.tolist()}", flush=True)
    pace.close()  # a clean end


if __name__ == "__main__":
    main()
